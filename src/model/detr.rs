//! Detection transformers with a fixed list of classes: DETR, conditional and deformable DETR, YOLOS, RT-DETR (v1
//! and v2), D-FINE. They differ in how logits become scores.
//!
//! Source of the readings: `transformers`, `post_process_object_detection` of each family.

use std::sync::Arc;

use ndarray::{ArrayView1, ArrayView2};

use super::card::{Card, Scores};
use super::facts::{self, Facts};
use super::hub::HubConfig;
use super::memory::ImageBatch;
use super::session::{Graph, Images};
use super::transformer::{Heads, MaskPort, check_answer, corner_box, image_of, sigmoid, trial_size};
use super::{Asked, Detector, Found, ModelError, loaded_graph};
use crate::candidate::{Candidate, Naming, Vocabulary};
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::ImageInput;
use crate::row::RowError;

/// Families whose last class means "no object" and whose scores are a softmax.
pub(super) const SOFTMAX_FAMILIES: [&str; 3] = ["detr", "yolos", "table-transformer"];

/// Families whose classes are scored one by one; the best pairs of box and class are the detections.
pub(super) const SIGMOID_FAMILIES: [&str; 7] =
    ["conditional_detr", "deformable_detr", "dab-detr", "rt_detr", "rt_detr_v2", "d_fine", "deta"];

/// A detector of this kind that is loaded.
pub(super) struct Detr {
    graph: Graph,
    input: ImageInput,
    heads: Heads,
    scores: Scores,
    mask: Option<MaskPort>,
    vocabulary: Arc<Vocabulary>,
}

impl Detr {
    /// # Errors
    /// The graph has another contract, or nothing tells its labels or its kind of scores.
    pub(super) fn load(
        mut graph: Graph,
        input: ImageInput,
        card: &Card,
        config: &HubConfig,
    ) -> Result<(Self, Option<String>), Error> {
        let heads = Heads::of(&graph)?;
        let mask = MaskPort::of(&graph);
        check_inputs(&graph, mask)?;
        let extra = |rows: usize, size: Size| mask.map(|mask| mask.feed(rows, size, &[])).into_iter().collect();
        let size = trial_size(&input);
        graph.try_blank(size, &extra)?;
        heads.check(&graph)?;
        let note = graph.settle_batch(size, heads.logits, &extra)?;
        let classes = usize::try_from(graph.outputs[heads.logits].dims[2]).unwrap_or(0);
        let labels = card.detector.labels.clone().or_else(|| config.labels.clone()).unwrap_or_default();
        let scores = scores_of(&graph, card, config, classes, labels.len())?;
        let naming = if scores == Scores::Softmax { Naming::Best } else { Naming::Every };
        let vocabulary = Arc::new(Vocabulary { naming, labels });
        Ok((Self { graph, input, heads, scores, mask, vocabulary }, note))
    }
}

loaded_graph!(Detr);

impl Detr {
    fn own_facts(&self) -> Facts {
        let scores = match self.scores {
            Scores::Softmax => "softmax over classes and none",
            Scores::Sigmoid => "sigmoid of each class",
        };
        vec![("family", format!("detr, {scores}")), facts::of_labels(&self.vocabulary)]
    }
}

impl Detector for Detr {
    fn takes_prompts(&self) -> bool {
        false
    }

    fn detect(
        &mut self,
        batch: &dyn ImageBatch,
        asked: &[Asked<'_>],
        floor: f32,
    ) -> Result<Vec<Result<Found, RowError>>, ModelError> {
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let (_, _, height, width) = batch.images().dim();
        let size = Size::new(width as u32, height as u32);
        let filled = self.graph.filled(Images::of(batch))?;
        let feeds: Vec<_> = self.mask.map(|mask| mask.feed(filled.len(), size, asked)).into_iter().collect();
        let (scores, vocabulary) = (self.scores, &self.vocabulary);
        let masked = self.mask.is_some();
        self.graph.call(&filled, &feeds, &self.heads.both(), |given| {
            let one = |(index, asked): (usize, &Asked<'_>)| {
                // Without a mask the model cannot know where the picture ends.
                let frame = if masked { asked.valid } else { size };
                let candidates = read(image_of(&given[0], index)?, image_of(&given[1], index)?, frame, scores, floor)?;
                Ok(Found { candidates, vocabulary: Arc::clone(vocabulary) })
            };
            asked.iter().enumerate().map(one).collect()
        })
    }
}

/// Candidates of one image: logits `[queries, classes]`, boxes `[queries, 4]`.
pub(super) fn read(
    logits: ArrayView2<'_, f32>,
    boxes: ArrayView2<'_, f32>,
    frame: Size,
    scores: Scores,
    floor: f32,
) -> Result<Vec<Candidate>, RowError> {
    check_answer(&logits, &boxes)?;
    let queries = logits.outer_iter().enumerate();
    Ok(queries
        .filter_map(|(query, row)| {
            let bbox = corner_box(&boxes, query, frame);
            match scores {
                Scores::Sigmoid => Candidate::above(bbox, row.iter().map(|x| sigmoid(*x)), floor),
                Scores::Softmax => Candidate::above(bbox, softmax_but_last(row), floor),
            }
        })
        .collect())
}

/// Softmax over all classes, without the last one, which means "no object".
fn softmax_but_last(row: ArrayView1<'_, f32>) -> impl Iterator<Item = f32> + '_ {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = row.iter().map(|x| (x - most).exp()).sum();
    row.into_iter().take(row.len().saturating_sub(1)).map(move |x| (x - most).exp() / total)
}

fn check_inputs(graph: &Graph, mask: Option<MaskPort>) -> Result<(), Error> {
    let known = [Some(graph.image.index), mask.map(MaskPort::index)];
    if (0..graph.inputs.len()).all(|i| known.contains(&Some(i))) {
        return Ok(());
    }
    Err(graph.refuse(format!(
        "a detector of classes takes images and at most a pixel_mask; this graph wants {}",
        graph.describe_inputs()
    )))
}

/// What the family, the card or the number of classes says.
fn scores_of(graph: &Graph, card: &Card, config: &HubConfig, classes: usize, labels: usize) -> Result<Scores, Error> {
    let family = config.model_type.as_deref().unwrap_or_default();
    let by_family = if SOFTMAX_FAMILIES.contains(&family) {
        Some(Scores::Softmax)
    } else if SIGMOID_FAMILIES.contains(&family) {
        Some(Scores::Sigmoid)
    } else {
        None
    };
    let by_count = match classes.checked_sub(labels) {
        Some(0) => Some(Scores::Sigmoid),
        Some(1) => Some(Scores::Softmax),
        _ => None,
    };
    let scores = card.detector.scores.or(by_family).or(by_count).filter(|_| labels > 0).ok_or_else(|| {
        graph.refuse(format!(
            "{classes} classes and {labels} labels, and no model_type that says what they are: write `[detector]` with labels \
             = [\"...\"] and scores = \"softmax\" (the last class is \"no object\") or \"sigmoid\" into croprow.toml beside it"
        ))
    })?;
    let named = if scores == Scores::Softmax { classes.saturating_sub(1) } else { classes };
    if labels < named {
        return Err(graph.refuse(format!(
            "{named} classes but {labels} labels: list all labels in croprow.toml ([detector] labels)"
        )));
    }
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::*;

    const FRAME: Size = Size::new(100, 50);

    #[test]
    fn softmax_families_leave_no_object_out() {
        let logits = arr2(&[[2.0, 1.0, 0.0], [0.0, 0.0, 9.0]]);
        let boxes = arr2(&[[0.5, 0.5, 0.2, 0.4], [0.5, 0.5, 0.2, 0.4]]);
        let found = read(logits.view(), boxes.view(), FRAME, Scores::Softmax, 0.3).unwrap();
        assert_eq!(found.len(), 1);
        assert!((found[0].best() - 0.665_240_9).abs() < 1e-6 && found[0].scores.len() == 1);
        assert_eq!((found[0].bbox.x0, found[0].bbox.y1), (40.0, 35.0));
    }

    #[test]
    fn sigmoid_families_score_every_class() {
        let logits = arr2(&[[0.0, 1.0, -9.0]]);
        let boxes = arr2(&[[0.5, 0.5, 0.2, 0.4]]);
        let found = read(logits.view(), boxes.view(), FRAME, Scores::Sigmoid, 0.3).unwrap();
        let labels: Vec<usize> = found[0].scores.iter().map(|s| s.label).collect();
        assert_eq!(labels, [1, 0]);
    }

    #[test]
    fn an_answer_with_other_boxes_than_scores_fails_the_image() {
        let logits = arr2(&[[0.0, 1.0], [0.0, 1.0]]);
        for boxes in [arr2(&[[0.5; 4]]).into_dyn(), arr2(&[[0.5; 3], [0.5; 3]]).into_dyn()] {
            let boxes = boxes.view().into_dimensionality().unwrap();
            let error = read(logits.view(), boxes, FRAME, Scores::Sigmoid, 0.3).unwrap_err();
            assert_eq!(error.code, crate::row::RowCode::Model);
        }
    }

    #[test]
    fn nan_fails_the_image() {
        let (logits, boxes) = (arr2(&[[f32::NAN]]), arr2(&[[0.5; 4]]));
        assert!(read(logits.view(), boxes.view(), FRAME, Scores::Sigmoid, 0.3).is_err());
    }
}
