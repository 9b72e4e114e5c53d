//! Doors for `tests/fuzz`: what reads a stranger's text, files and numbers, without a session. Part of no interface.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use ndarray::ArrayView2;

use super::card::{Layout, Scores};
use super::grounding_dino::{self, Chunk, Reader};
use super::text::{Text, Token};
use super::{detr, labels, onnx_file, prompt};
use crate::candidate::Candidate;
use crate::config::{DetectConfig, Precision};
use crate::geometry::Size;
use crate::recipe::{Keep, Labels, Nms, OnEmpty, Selection};
use crate::row::RowError;

/// Candidates of a YOLO's output of one image, where a layout fits its shape.
pub fn yolo(output: ArrayView2<'_, f32>, classes: usize, floor: f32) -> Option<Result<Vec<Candidate>, RowError>> {
    let (rows, columns) = output.dim();
    let layouts = [Layout::V8, Layout::V5, Layout::End2End];
    let layout = layouts.into_iter().find(|layout| layout.fits(rows, columns, classes))?;
    Some(layout.read(output, classes, floor))
}

/// Candidates of a detection transformer's outputs of one image.
///
/// # Errors
/// As in a run.
pub fn transformer(
    logits: ArrayView2<'_, f32>,
    boxes: ArrayView2<'_, f32>,
    frame: Size,
    softmax: bool,
    floor: f32,
) -> Result<Vec<Candidate>, RowError> {
    let scores = if softmax { Scores::Softmax } else { Scores::Sigmoid };
    detr::read(logits, boxes, frame, scores, floor)
}

/// Candidates of a GroundingDINO's outputs of one image, for a prompt of labels of two tokens each.
///
/// # Errors
/// As in a run.
pub fn grounding_dino(
    logits: ArrayView2<'_, f32>,
    boxes: ArrayView2<'_, f32>,
    frame: Size,
    labels: usize,
    phrases: bool,
    floor: f32,
) -> Result<Vec<Candidate>, RowError> {
    let tokens = vec![Token { id: 1, text: "a".to_owned() }; 3 * labels + 2];
    let spans = (0..labels).map(|n| (1 + 3 * n..3 + 3 * n, n)).collect();
    let rule = if phrases { Labels::Phrases } else { Labels::Spans };
    grounding_dino::read(logits, boxes, frame, &Chunk { tokens, spans, begin: 0 }, rule, floor)
}

/// A GroundingDINO's reader of prompts.
pub struct Prompts(Reader, usize);

impl Prompts {
    /// With that `tokenizer.json`, for a model of so many tokens.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn load(tokenizer: &Path, tokens_most: usize, phrases: bool) -> Result<Self, String> {
        let labels = if phrases { Labels::Phrases } else { Labels::Spans };
        let config = DetectConfig {
            shape_step_px: None,
            model: PathBuf::new(),
            precision: Precision::Auto,
            prompt: None,
            labels,
            candidate_floor: 0.05,
            selection: selection(),
        };
        Ok(Self(Reader::new(Text::load(tokenizer)?, tokens_most, &config)?, tokens_most))
    }

    /// Reads a prompt, and panics where what is made of it would be wrong to use.
    pub fn check(&self, text: &str) {
        let Ok(labels) = prompt::labels(text) else { return };
        assert!(!labels.is_empty() && labels.iter().all(|l| !l.plain.is_empty() && !l.own.is_empty()));
        let Ok(prepared) = self.0.make(&labels) else { return };
        let mut named = Vec::new();
        for chunk in &prepared.chunks {
            assert!(chunk.tokens.len() <= self.1, "{} tokens", chunk.tokens.len());
            for (span, label) in &chunk.spans {
                assert!(!span.is_empty() && span.end < chunk.tokens.len(), "{span:?}");
                named.push(*label);
            }
        }
        assert_eq!(named, (0..labels.len()).collect::<Vec<_>>());
        assert!(!prepared.vocabulary.labels.is_empty());
    }
}

/// A rule that lets much through.
pub fn selection() -> Selection {
    Selection {
        box_threshold: 0.0,
        text_threshold: 0.25,
        nms_iou: 0.45,
        nms: Nms::Label,
        min_box_px: 1.0,
        margin: 0.1,
        keep: Keep::All,
        on_empty: OnEmpty::Skip,
    }
}

/// Labels in a graph's metadata, and the weights that a graph names.
pub fn graph(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = labels::parse(text);
    }
    let _ = onnx_file::external_data(Cursor::new(bytes));
}
