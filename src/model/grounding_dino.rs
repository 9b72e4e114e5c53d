//! GroundingDINO: a picture and a sentence of labels in, a score for every query and token out. Exports of Hugging
//! Face's code (`pixel_values`, `pixel_mask`) and of the original one (`img`, `position_ids`, `text_token_mask`).
//!
//! Source: `transformers`, `modeling_grounding_dino.py` and `processing_grounding_dino.py`; the reading by token
//! spans is this project's own, because the reference's may name what nobody asked for.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array2, ArrayView2, Axis, s};

use super::facts::Facts;
use super::hub::HubConfig;
use super::memory::ImageBatch;
use super::port::Feed;
use super::prompt::{self, Label, Prompts};
use super::session::{Graph, Images};
use super::text::{Text, Token};
use super::transformer::{Heads, MaskPort, check_finite, corner_box, image_of, sigmoid, trial_size};
use super::{Asked, Detector, Found, ModelError, loaded_graph};
use crate::candidate::{Candidate, Naming, Vocabulary};
use crate::config::DetectConfig;
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::{ImageInput, Labels};
use crate::row::{RowCode, RowError};

/// Tokens that the model reads at most, where nothing else is said; also the columns of its scores.
const TOKENS_MOST: usize = 256;

/// What a graph is tried with.
const TRIAL_PROMPT: &str = "an object. a thing.";

/// The inputs of the text.
#[derive(Clone, Copy, Default)]
struct Ports {
    pixel_mask: Option<MaskPort>,
    input_ids: usize,
    token_type_ids: Option<usize>,
    attention_mask: Option<usize>,
    position_ids: Option<usize>,
    /// `[batch, tokens, tokens]`: which tokens see each other.
    text_token_mask: Option<usize>,
}

/// A part of a prompt that the model reads at once.
#[derive(Debug)]
struct Chunk {
    tokens: Vec<Token>,
    /// Tokens of each label, and its number in the vocabulary.
    spans: Vec<(Range<usize>, usize)>,
    /// Number of its first token among the tokens of the whole prompt.
    begin: usize,
}

/// A prompt that the model can read.
#[derive(Debug)]
struct Prepared {
    chunks: Vec<Chunk>,
    vocabulary: Arc<Vocabulary>,
}

/// What turns prompts into tokens.
struct Reader {
    text: Text,
    full_stop: Token,
    /// Tokens between which the model sees no connection.
    borders: Vec<i64>,
    tokens_most: usize,
    rule: Labels,
}

/// A GroundingDINO that is loaded.
pub(super) struct GroundingDino {
    graph: Graph,
    input: ImageInput,
    heads: Heads,
    ports: Ports,
    /// Tokens that the graph demands, where it does not leave them open.
    fixed_tokens: Option<usize>,
    reader: Reader,
    prompts: Prompts<Prepared>,
}

impl GroundingDino {
    /// # Errors
    /// The graph has another contract, or the tokenizer or the prompt of the run cannot be used.
    pub(super) fn load(
        mut graph: Graph,
        input: ImageInput,
        text: Text,
        config: &HubConfig,
        detect: &DetectConfig,
    ) -> Result<(Self, Option<String>), Error> {
        let heads = Heads::of(&graph)?;
        let ports = ports_of(&graph)?;
        let fixed_tokens = graph.inputs[ports.input_ids].fixed(1);
        let tokens_most = config.max_text_tokens.unwrap_or(TOKENS_MOST).min(fixed_tokens.unwrap_or(usize::MAX));
        let mut reader = Reader::new(text, tokens_most, detect).map_err(|why| graph.refuse(why))?;
        let mut prompts = Prompts::new(detect.prompt.clone());
        let trial = prompts.prepare(TRIAL_PROMPT, |labels| reader.make(labels)).map_err(|why| graph.refuse(why))?;
        if let Some(prompt) = &detect.prompt {
            prompts
                .prepare(prompt, |labels| reader.make(labels))
                .map_err(|why| Error::Usage(format!("--prompt: {why}")))?;
        }
        let borders = reader.borders.clone();
        let padding = reader.text.padding;
        let chunk = &trial.chunks[0];
        let extra = |rows: usize, size: Size| {
            let mut feeds = text_feeds(&ports, &vec![chunk; rows], fixed_tokens, padding, &borders);
            feeds.extend(ports.pixel_mask.map(|mask| mask.feed(rows, size, &[])));
            feeds
        };
        let size = trial_size(&input);
        graph.try_blank(size, &extra)?;
        heads.check(&graph)?;
        let note = graph.settle_batch(size, heads.logits, &extra)?;
        if let Ok(columns) = usize::try_from(graph.outputs[heads.logits].dims[2]) {
            reader.tokens_most = reader.tokens_most.min(columns.max(chunk.tokens.len()));
        }
        Ok((Self { graph, input, heads, ports, fixed_tokens, reader, prompts }, note))
    }

    /// Candidates of pairs of an image of `batch` and a part of its prompt.
    fn read_pairs(
        &mut self,
        batch: &dyn ImageBatch,
        asked: &[Asked<'_>],
        pairs: &[(usize, &Chunk)],
        floor: f32,
    ) -> Result<Vec<Result<Vec<Candidate>, RowError>>, ModelError> {
        let (_, _, height, width) = batch.images().dim();
        let size = Size::new(width as u32, height as u32);
        let places: Vec<usize> = pairs.iter().map(|(image, _)| *image).collect();
        // As a rule each image is asked once, and nothing has to be copied.
        let images = if places.iter().copied().eq(0..batch.images().len_of(Axis(0))) {
            Images::of(batch)
        } else {
            Images::from(batch.images().select(Axis(0), &places))
        };
        let filled = self.graph.filled(images)?;
        let rows = filled.len();
        let mut chunks: Vec<&Chunk> = pairs.iter().map(|(_, chunk)| *chunk).collect();
        chunks.resize(rows, pairs[0].1);
        let padding = self.reader.text.padding;
        let mut feeds = text_feeds(&self.ports, &chunks, self.fixed_tokens, padding, &self.reader.borders);
        let masked: Vec<Asked<'_>> = pairs.iter().map(|(image, _)| asked[*image]).collect();
        feeds.extend(self.ports.pixel_mask.map(|mask| mask.feed(rows, size, &masked)));
        let (rule, has_mask) = (self.reader.rule, self.ports.pixel_mask.is_some());
        self.graph.call(&filled, &feeds, &self.heads.both(), |given| {
            let one = |(row, (image, chunk)): (usize, &(usize, &Chunk))| {
                // Without a mask the model cannot know where the picture ends.
                let frame = if has_mask { asked[*image].valid } else { size };
                read(image_of(&given[0], row)?, image_of(&given[1], row)?, frame, chunk, rule, floor)
            };
            pairs.iter().enumerate().map(one).collect()
        })
    }
}

loaded_graph!(GroundingDino);

impl GroundingDino {
    fn own_facts(&self) -> Facts {
        vec![("family", "grounding-dino".to_owned())]
    }
}

impl Detector for GroundingDino {
    fn takes_prompts(&self) -> bool {
        true
    }

    fn detect(
        &mut self,
        batch: &dyn ImageBatch,
        asked: &[Asked<'_>],
        floor: f32,
    ) -> Result<Vec<Result<Found, RowError>>, ModelError> {
        let prepared: Vec<Result<Arc<Prepared>, RowError>> =
            asked.iter().map(|a| self.prompts.of(a.prompt, |labels| self.reader.make(labels))).collect();
        let pairs: Vec<(usize, &Chunk)> = prepared
            .iter()
            .enumerate()
            .filter_map(|(image, p)| p.as_ref().ok().map(|p| (image, p)))
            .flat_map(|(image, p)| p.chunks.iter().map(move |chunk| (image, chunk)))
            .collect();
        let mut answers: Vec<Result<Found, RowError>> = prepared
            .iter()
            .map(|p| match p {
                Ok(p) => Ok(Found { candidates: Vec::new(), vocabulary: Arc::clone(&p.vocabulary) }),
                Err(error) => Err(error.clone()),
            })
            .collect();
        // A prompt in several parts takes several calls, none larger than the batch that was asked for.
        for some in pairs.chunks(asked.len().max(1)) {
            let found = self.read_pairs(batch, asked, some, floor)?;
            for ((image, _), found) in some.iter().zip(found) {
                match (found, &mut answers[*image]) {
                    (Ok(candidates), Ok(answer)) => answer.candidates.extend(candidates),
                    (Err(error), answer) => *answer = Err(error),
                    (Ok(_), Err(_)) => {}
                }
            }
        }
        Ok(answers)
    }
}

impl Reader {
    fn new(text: Text, tokens_most: usize, detect: &DetectConfig) -> Result<Self, String> {
        let full_stop = match text.tokens(".")?.as_slice() {
            [only] => only.clone(),
            _ => return Err("its tokenizer has no token for a full stop, which separates labels".to_owned()),
        };
        let around = text.before.iter().chain(&text.after).map(|t| t.id);
        let mut borders: Vec<i64> = around.collect();
        borders.extend(text.single("."));
        borders.extend(text.single("?"));
        Ok(Self { text, full_stop, borders, tokens_most, rule: detect.labels })
    }

    fn make(&self, labels: &[Label]) -> Result<Prepared, String> {
        let room = self.tokens_most.saturating_sub(self.text.before.len() + self.text.after.len());
        let mut chunks: Vec<Chunk> = Vec::new();
        for (number, label) in labels.iter().enumerate() {
            let tokens = self.text.tokens(&label.plain)?;
            if tokens.is_empty() || tokens.len() + 1 > room {
                return Err(format!(
                    "the label {:?} has {} tokens; the model reads from 1 to {}",
                    label.own,
                    tokens.len(),
                    room.saturating_sub(1)
                ));
            }
            let used = chunks.last().map_or(usize::MAX, |c| c.tokens.len() - self.text.before.len());
            if used.saturating_add(tokens.len() + 1) > room {
                let begin = chunks.last().map_or(0, |c| c.begin + c.tokens.len() + self.text.after.len());
                chunks.push(Chunk { tokens: self.text.before.clone(), spans: Vec::new(), begin });
            }
            if let Some(chunk) = chunks.last_mut() {
                let first = chunk.tokens.len();
                chunk.tokens.extend(tokens);
                chunk.spans.push((first..chunk.tokens.len(), number));
                chunk.tokens.push(self.full_stop.clone());
            }
        }
        for chunk in &mut chunks {
            chunk.tokens.extend(self.text.after.iter().cloned());
        }
        log::info!("prompt in {} part(s): {}", chunks.len(), prompt::sentence(labels));
        let vocabulary = Arc::new(self.vocabulary(labels, &chunks));
        Ok(Prepared { chunks, vocabulary })
    }

    fn vocabulary(&self, labels: &[Label], chunks: &[Chunk]) -> Vocabulary {
        match self.rule {
            Labels::Spans => {
                Vocabulary { naming: Naming::Best, labels: labels.iter().map(|l| l.own.clone()).collect() }
            }
            Labels::Phrases => {
                // The reference never decodes the first position and the last that there can be.
                let text = |(place, token): (usize, &Token)| {
                    if place == 0 || place == TOKENS_MOST - 1 { String::new() } else { token.text.clone() }
                };
                let tokens = chunks.iter().flat_map(|c| c.tokens.iter().enumerate().map(text)).collect();
                Vocabulary { naming: Naming::Phrases, labels: tokens }
            }
        }
    }
}

fn ports_of(graph: &Graph) -> Result<Ports, Error> {
    let find = |names: &[&str]| graph.input(names);
    let Some(input_ids) = find(&["input_ids"]) else {
        return Err(graph.refuse(format!("GroundingDINO wants input_ids; its inputs: {}", graph.describe_inputs())));
    };
    let ports = Ports {
        pixel_mask: MaskPort::of(graph),
        input_ids,
        token_type_ids: find(&["token_type_ids"]),
        attention_mask: find(&["attention_mask"]),
        position_ids: find(&["position_ids"]),
        text_token_mask: find(&["text_token_mask", "text_self_attention_masks"]),
    };
    let optional = [ports.token_type_ids, ports.attention_mask, ports.position_ids, ports.text_token_mask];
    let mut known = vec![Some(graph.image.index), ports.pixel_mask.map(MaskPort::index), Some(input_ids)];
    known.extend(optional);
    let unknown = (0..graph.inputs.len()).find(|i| !known.contains(&Some(*i)) || !usable(graph, *i));
    match unknown {
        None => Ok(ports),
        Some(i) => Err(graph.refuse(format!(
            "the input {} is not known for GroundingDINO; its inputs: {}",
            graph.inputs[i].name,
            graph.describe_inputs()
        ))),
    }
}

fn usable(graph: &Graph, index: usize) -> bool {
    index == graph.image.index || Feed::can_be(&graph.inputs[index])
}

/// The text of a batch, filled up to its longest (or to what the graph demands).
fn text_feeds(
    ports: &Ports,
    chunks: &[&Chunk],
    fixed_tokens: Option<usize>,
    padding: i64,
    borders: &[i64],
) -> Vec<Feed> {
    let longest = chunks.iter().map(|c| c.tokens.len()).max().unwrap_or(0);
    let length = fixed_tokens.unwrap_or(longest);
    let shape = (chunks.len(), length);
    let mut ids = Array2::from_elem(shape, padding);
    let mut attention = Array2::<i64>::zeros(shape);
    for (row, chunk) in chunks.iter().enumerate() {
        for (place, token) in chunk.tokens.iter().enumerate() {
            ids[[row, place]] = token.id;
            attention[[row, place]] = 1;
        }
    }
    let (positions, sees) = blocks(&ids, borders);
    let mut feeds = Vec::new();
    let mut feed = |port: Option<usize>, values: ndarray::ArrayD<i64>| {
        feeds.extend(port.map(|port| Feed { port, values }));
    };
    feed(ports.token_type_ids, ids.mapv(|_| 0).into_dyn());
    feed(Some(ports.input_ids), ids.into_dyn());
    feed(ports.attention_mask, attention.into_dyn());
    feed(ports.position_ids, positions.into_dyn());
    feed(ports.text_token_mask, sees.into_dyn());
    feeds
}

/// Positions within a label, and which tokens see each other: those of one label with its full stop. Source:
/// `generate_masks_with_special_tokens_and_transfer_map`.
fn blocks(ids: &Array2<i64>, borders: &[i64]) -> (Array2<i64>, ndarray::Array3<i64>) {
    let (rows, length) = ids.dim();
    let mut positions = Array2::zeros((rows, length));
    let mut sees = ndarray::Array3::zeros((rows, length, length));
    for row in 0..rows {
        let mut previous = 0;
        for place in 0..length {
            sees[[row, place, place]] = 1;
            if !borders.contains(&ids[[row, place]]) {
                continue;
            }
            if place != 0 && place != length - 1 {
                for a in previous + 1..=place {
                    positions[[row, a]] = (a - previous - 1) as i64;
                    sees.slice_mut(s![row, a, previous + 1..=place]).fill(1);
                }
            }
            previous = place;
        }
    }
    (positions, sees)
}

/// Candidates of one image and one part of its prompt: logits `[queries, columns]`, boxes `[queries, 4]`.
fn read(
    logits: ArrayView2<'_, f32>,
    boxes: ArrayView2<'_, f32>,
    frame: Size,
    chunk: &Chunk,
    rule: Labels,
    floor: f32,
) -> Result<Vec<Candidate>, RowError> {
    let columns = chunk.tokens.len();
    if logits.ncols() < columns {
        return Err(RowError::new(RowCode::Model, "the detector scores fewer tokens than the prompt has"));
    }
    // Columns beyond the prompt are minus infinity by design.
    let logits = logits.slice(s![.., ..columns]);
    check_finite(logits.iter().chain(boxes.iter()))?;
    let one = |(query, row): (usize, ndarray::ArrayView1<'_, f32>)| {
        let bbox = corner_box(&boxes, query, frame);
        let mut candidate = match rule {
            Labels::Phrases => Candidate::above(bbox, row.iter().map(|x| sigmoid(*x)), floor)?,
            Labels::Spans => {
                let best = |span: &Range<usize>| {
                    sigmoid(row.slice(s![span.clone()]).iter().copied().fold(f32::NEG_INFINITY, f32::max))
                };
                Candidate::above(bbox, chunk.spans.iter().map(|(span, _)| best(span)), floor)?
            }
        };
        for score in &mut candidate.scores {
            score.label = match rule {
                Labels::Phrases => chunk.begin + score.label,
                Labels::Spans => chunk.spans[score.label].1,
            };
        }
        Some(candidate)
    };
    Ok(logits.outer_iter().enumerate().filter_map(one).collect())
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::*;

    #[test]
    fn tokens_see_those_of_their_own_label() {
        // [CLS] a b . c . [SEP] [PAD]
        let ids = arr2(&[[101, 5, 6, 1012, 7, 1012, 102, 0]]);
        let (positions, sees) = blocks(&ids, &[101, 102, 1012]);
        assert_eq!(positions, arr2(&[[0, 0, 1, 2, 0, 1, 0, 0]]));
        let row = |place: usize| sees.slice(s![0, place, ..]).to_vec();
        assert_eq!(row(1), [0, 1, 1, 1, 0, 0, 0, 0]);
        assert_eq!(row(4), [0, 0, 0, 0, 1, 1, 0, 0]);
        assert_eq!(row(0), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(row(7), [0, 0, 0, 0, 0, 0, 0, 1]);
    }
}
