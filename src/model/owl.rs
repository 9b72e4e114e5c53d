//! OWL-ViT and OWLv2: every label is a text of its own, scored against every place of the picture.
//!
//! Source: `transformers`, `modeling_owlvit.py`, `modeling_owlv2.py` and their processors.

use std::sync::Arc;

use ndarray::{Array2, ArrayView2, s};

use super::facts::Facts;
use super::memory::ImageBatch;
use super::port::Feed;
use super::prompt::{Label, Prompts};
use super::session::{Graph, Images};
use super::text::Text;
use super::transformer::{Heads, check_finite, corner_box, image_of, sigmoid, trial_size};
use super::{Asked, Detector, Found, ModelError, loaded_graph};
use crate::candidate::{Candidate, Naming, Vocabulary};
use crate::config::DetectConfig;
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::{ImageInput, Labels};
use crate::row::{RowCode, RowError};

/// Tokens of a label, by the families' `max_position_embeddings`.
const TOKENS: usize = 16;

/// What a graph is tried with.
const TRIAL_PROMPT: &str = "an object. a thing.";

/// A prompt that the model can read.
#[derive(Debug)]
struct Prepared {
    /// `[labels, tokens]`.
    ids: Array2<i64>,
    /// 1 for tokens that are no filling.
    attention: Array2<i64>,
    vocabulary: Arc<Vocabulary>,
}

/// An OWL that is loaded.
pub(super) struct Owl {
    graph: Graph,
    input: ImageInput,
    heads: Heads,
    input_ids: usize,
    attention_mask: Option<usize>,
    /// Labels per image that the graph demands.
    fixed_labels: Option<usize>,
    texts: Texts,
    prompts: Prompts<Prepared>,
}

/// What turns labels into tokens.
struct Texts {
    text: Text,
    /// Tokens of a label, with what surrounds and fills it.
    tokens: usize,
}

impl Owl {
    /// # Errors
    /// The graph has another contract, or the tokenizer or the prompt of the run cannot be used.
    pub(super) fn load(
        mut graph: Graph,
        input: ImageInput,
        text: Text,
        detect: &DetectConfig,
    ) -> Result<(Self, Option<String>), Error> {
        if detect.labels == Labels::Phrases {
            return Err(Error::Usage(
                "--labels phrases is the rule of GroundingDINO; this detector scores whole labels".to_owned(),
            ));
        }
        let heads = Heads::of(&graph)?;
        let (input_ids, attention_mask) = text_ports(&graph)?;
        let tokens = graph.inputs[input_ids].fixed(1).unwrap_or(TOKENS);
        let texts = graph.inputs[input_ids].fixed(0);
        let fixed_labels = texts.map(|texts| (texts / graph.fixed_batch.unwrap_or(1)).max(1));
        if texts.is_some() && graph.fixed_batch.is_none() {
            // As many texts as the graph demands belong to one image.
            graph.fixed_batch = Some(1);
        }
        let (texts, mut prompts) = (Texts { text, tokens }, Prompts::new(detect.prompt.clone()));
        let trial = prompts.prepare(TRIAL_PROMPT, |labels| texts.make(labels)).map_err(|why| graph.refuse(why))?;
        if let Some(prompt) = &detect.prompt {
            let made = prompts.prepare(prompt, |labels| texts.make(labels));
            made.map_err(|why| Error::Usage(format!("--prompt: {why}")))?;
        }
        let mut owl = Self { graph, input, heads, input_ids, attention_mask, fixed_labels, texts, prompts };
        let labels = owl.labels_per_image(&[&trial]);
        let (ids, mask, padding) = (owl.input_ids, owl.attention_mask, owl.texts.tokens);
        let extra =
            |rows: usize, _: Size| text_feeds(ids, mask, &vec![trial.as_ref(); rows], 0..labels, labels, padding);
        let size = trial_size(&owl.input);
        owl.graph.try_blank(size, &extra)?;
        heads.check(&owl.graph)?;
        let note = owl.graph.settle_batch(size, heads.logits, &extra)?;
        Ok((owl, note))
    }

    fn labels_per_image(&self, prepared: &[&Arc<Prepared>]) -> usize {
        let most = prepared.iter().map(|p| p.ids.nrows()).max().unwrap_or(1);
        self.fixed_labels.unwrap_or(most)
    }
}

impl Texts {
    fn make(&self, labels: &[Label]) -> Result<Prepared, String> {
        let shape = (labels.len(), self.tokens);
        let mut ids = Array2::from_elem(shape, self.text.padding);
        let mut attention = Array2::zeros(shape);
        for (row, label) in labels.iter().enumerate() {
            let own = self.text.tokens(&label.own)?;
            let all = self.text.before.iter().chain(&own).chain(&self.text.after);
            let length = self.text.before.len() + own.len() + self.text.after.len();
            if length > self.tokens || own.is_empty() {
                return Err(format!(
                    "the label {:?} has {} tokens; the model reads from 1 to {}",
                    label.own,
                    own.len(),
                    self.tokens - self.text.before.len() - self.text.after.len()
                ));
            }
            for (place, token) in all.enumerate() {
                ids[[row, place]] = token.id;
                attention[[row, place]] = 1;
            }
        }
        let labels = labels.iter().map(|l| l.own.clone()).collect();
        Ok(Prepared { ids, attention, vocabulary: Arc::new(Vocabulary { naming: Naming::Best, labels }) })
    }
}

loaded_graph!(Owl);

impl Owl {
    fn own_facts(&self) -> Facts {
        vec![("family", "owl".to_owned())]
    }
}

impl Detector for Owl {
    fn takes_prompts(&self) -> bool {
        true
    }

    fn detect(
        &mut self,
        batch: &dyn ImageBatch,
        asked: &[Asked<'_>],
        floor: f32,
    ) -> Result<Vec<Result<Found, RowError>>, ModelError> {
        let of = |a: &Asked<'_>| self.prompts.of(a.prompt, |labels| self.texts.make(labels));
        let prepared: Vec<Result<Arc<Prepared>, RowError>> = asked.iter().map(of).collect();
        let sound: Vec<(usize, &Arc<Prepared>)> =
            prepared.iter().enumerate().filter_map(|(i, p)| p.as_ref().ok().map(|p| (i, p))).collect();
        let Some((_, first)) = sound.first() else {
            return Ok(prepared.into_iter().map(|p| Err(p.err().unwrap_or_else(no_answer))).collect());
        };
        let (_, _, height, width) = batch.images().dim();
        let size = Size::new(width as u32, height as u32);
        let filled = self.graph.filled(Images::of(batch))?;
        let rows = filled.len();
        // Rows without a usable prompt get another's: their answers are not read.
        let mut texts: Vec<&Prepared> = vec![first.as_ref(); rows];
        sound.iter().for_each(|(i, p)| texts[*i] = p.as_ref());
        let most = sound.iter().map(|(_, p)| p.ids.nrows()).max().unwrap_or(1);
        let per_image = self.labels_per_image(&sound.iter().map(|(_, p)| *p).collect::<Vec<_>>());
        let mut scores: Vec<Result<Vec<Patch>, RowError>> = vec![Ok(Vec::new()); asked.len()];
        for begin in (0..most).step_by(per_image) {
            let range = begin..begin + per_image;
            let feeds =
                text_feeds(self.input_ids, self.attention_mask, &texts, range.clone(), per_image, self.texts.tokens);
            self.graph.call(&filled, &feeds, &self.heads.both(), |given| {
                for (image, prepared) in &sound {
                    let labels = range.start..range.end.min(prepared.ids.nrows());
                    let read = image_of(&given[0], *image)
                        .and_then(|logits| image_of(&given[1], *image).map(|boxes| (logits, boxes)))
                        .and_then(|(logits, boxes)| add(&mut scores[*image], logits, boxes, size, labels.len()));
                    if let Err(error) = read {
                        scores[*image] = Err(error);
                    }
                }
            })?;
        }
        let answer = |(prepared, patches): (Result<Arc<Prepared>, RowError>, Result<Vec<Patch>, RowError>)| {
            let vocabulary = Arc::clone(&prepared?.vocabulary);
            let patches = patches?.into_iter();
            let candidates = patches.filter_map(|p| Candidate::above(p.bbox, p.scores.into_iter(), floor)).collect();
            Ok(Found { candidates, vocabulary })
        };
        Ok(prepared.into_iter().zip(scores).map(answer).collect())
    }
}

fn no_answer() -> RowError {
    RowError::new(RowCode::Model, "the detector gave no answer")
}

/// A place of the picture with the scores of all labels so far.
#[derive(Clone)]
struct Patch {
    bbox: crate::geometry::BoxPx,
    scores: Vec<f32>,
}

/// Adds the scores of the next `labels` labels to every place.
fn add(
    patches: &mut Result<Vec<Patch>, RowError>,
    logits: ArrayView2<'_, f32>,
    boxes: ArrayView2<'_, f32>,
    frame: Size,
    labels: usize,
) -> Result<(), RowError> {
    let Ok(patches) = patches else { return Ok(()) };
    if logits.ncols() < labels {
        return Err(RowError::new(RowCode::Model, "the detector scores fewer labels than the prompt has"));
    }
    let logits = logits.slice(s![.., ..labels]);
    check_finite(logits.iter().chain(boxes.iter()))?;
    if patches.is_empty() {
        let place = |query| Patch { bbox: corner_box(&boxes, query, frame), scores: Vec::new() };
        *patches = (0..logits.nrows()).map(place).collect();
    }
    for (place, row) in patches.iter_mut().zip(logits.outer_iter()) {
        place.scores.extend(row.iter().map(|x| sigmoid(*x)));
    }
    Ok(())
}

/// The labels `range` of each row, `[rows * labels, tokens]`. Rows with fewer have empty texts, which the model
/// leaves out by their first token.
fn text_feeds(
    input_ids: usize,
    attention_mask: Option<usize>,
    rows: &[&Prepared],
    range: std::ops::Range<usize>,
    labels: usize,
    tokens: usize,
) -> Vec<Feed> {
    let shape = (rows.len() * labels, tokens);
    let (mut ids, mut attention) = (Array2::zeros(shape), Array2::zeros(shape));
    for (row, prepared) in rows.iter().enumerate() {
        let end = range.end.min(prepared.ids.nrows());
        for label in range.start.min(end)..end {
            let at = row * labels + label - range.start;
            ids.row_mut(at).assign(&prepared.ids.row(label));
            attention.row_mut(at).assign(&prepared.attention.row(label));
        }
    }
    let mut feeds = vec![Feed { port: input_ids, values: ids.into_dyn() }];
    feeds.extend(attention_mask.map(|port| Feed { port, values: attention.into_dyn() }));
    feeds
}

fn text_ports(graph: &Graph) -> Result<(usize, Option<usize>), Error> {
    let ids = graph.input(&["input_ids"]);
    let mask = graph.input(&["attention_mask"]);
    let known = [Some(graph.image.index), ids, mask];
    match ids.filter(|_| (0..graph.inputs.len()).all(|i| known.contains(&Some(i)))) {
        Some(ids) => Ok((ids, mask)),
        None => Err(graph.refuse(format!(
            "an OWL detector takes pixel_values, input_ids and attention_mask; this graph wants {}",
            graph.describe_inputs()
        ))),
    }
}
