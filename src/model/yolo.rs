//! Detectors with a YOLO output: Ultralytics exports from v5 on, and whatever has the same layouts.

use std::sync::Arc;

use ndarray::Ix2;

use super::card::{Card, Layout};
use super::facts::{self, Facts};
use super::input::{Draft, check_size};
use super::memory::ImageBatch;
use super::port::Numbers;
use super::session::{Graph, nothing_more};
use super::{Asked, Detector, Found, ModelError, labels, loaded_graph};
use crate::candidate::{Naming, Vocabulary};
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::{Filter, Fit, ImageInput};
use crate::row::{RowCode, RowError};

/// Grey of Ultralytics' `LetterBox`.
const LETTERBOX_FILL: u8 = 114;

/// A YOLO that is loaded.
pub(super) struct Yolo {
    graph: Graph,
    input: ImageInput,
    vocabulary: Arc<Vocabulary>,
    layout: Layout,
    output: usize,
}

impl Yolo {
    /// Takes the graph and calls it with blank images. The second value is a line for the user, where there is
    /// something to say.
    ///
    /// # Errors
    /// The graph or what lies beside it cannot be used; the message names the file, what was found and what
    /// helps.
    pub(super) fn load(mut graph: Graph, card: &Card) -> Result<(Self, Option<String>), Error> {
        check_task(&graph)?;
        let labels = labels_of(&graph, card)?;
        let input = input_of(&graph, card)?;
        graph.try_blank(input.size, &nothing_more)?;
        let output = output_of(&graph, card)?;
        let layout = layout_of(&graph, output, labels.len(), card)?;
        let note = graph.settle_batch(input.size, output, &nothing_more)?;
        let vocabulary = Arc::new(Vocabulary { naming: Naming::Best, labels });
        Ok((Self { graph, input, vocabulary, layout, output }, note))
    }
}

loaded_graph!(Yolo);

impl Yolo {
    fn own_facts(&self) -> Facts {
        vec![("family", format!("yolo, layout {}", self.layout.word())), facts::of_labels(&self.vocabulary)]
    }
}

impl Detector for Yolo {
    fn takes_prompts(&self) -> bool {
        false
    }

    fn detect(
        &mut self,
        batch: &dyn ImageBatch,
        _: &[Asked<'_>],
        floor: f32,
    ) -> Result<Vec<Result<Found, RowError>>, ModelError> {
        let (layout, classes) = (self.layout, self.vocabulary.labels.len());
        let found = |candidates| Found { candidates, vocabulary: Arc::clone(&self.vocabulary) };
        self.graph.run(batch, &nothing_more, self.output, |image| match image.into_dimensionality::<Ix2>() {
            Ok(output) if layout.fits(output.nrows(), output.ncols(), classes) => {
                layout.read(output, classes, floor).map(found)
            }
            _ => Err(RowError::new(RowCode::Model, "the detector's output changed its shape")),
        })
    }
}

/// Segmentation, poses and rotated boxes have outputs that look alike and mean something else.
fn check_task(graph: &Graph) -> Result<(), Error> {
    match graph.metadata("task").as_deref() {
        None | Some("detect") => Ok(()),
        Some(other) => Err(graph.refuse(format!("a YOLO for the task `{other}`; croprow knows `detect`"))),
    }
}

fn labels_of(graph: &Graph, card: &Card) -> Result<Vec<String>, Error> {
    let found = match (&card.detector.labels, graph.metadata("names")) {
        (Some(own), _) => own.clone(),
        (None, Some(text)) => labels::parse(&text).map_err(|why| {
            graph.refuse(format!("its metadata `names` is not understood ({why}): list labels in croprow.toml"))
        })?,
        (None, None) => Vec::new(),
    };
    if found.is_empty() {
        return Err(graph.refuse(format!(
            "no labels in its metadata: write `[detector]` with labels = [\"...\"] into croprow.toml beside it; outputs: {}",
            graph.describe_outputs()
        )));
    }
    Ok(found)
}

fn input_of(graph: &Graph, card: &Card) -> Result<ImageInput, Error> {
    let habit = Draft {
        size: None,
        filter: Some(Filter::Bilinear),
        fit: Some(Fit::Pad { fill: LETTERBOX_FILL }),
        mean: Some([0.0; 3]),
        // A graph that takes grey levels gets them as they are.
        std: Some(if graph.image.numbers == Numbers::U8 { [1.0 / 255.0; 3] } else { [1.0; 3] }),
    };
    let mut draft = habit.overlaid(card)?;
    let exported = graph.metadata("imgsz").as_deref().and_then(size_of_imgsz);
    draft.size = graph.settle_size(draft.size, "croprow.toml")?.or(exported);
    let input = draft.finished().map_err(|missing| {
        graph.refuse(format!(
            "its input has no fixed size and no metadata `imgsz`: write `[input]` with {} into croprow.toml beside it",
            missing.join(", ")
        ))
    })?;
    check_size(&input).map_err(|why| graph.refuse(why))?;
    Ok(input)
}

/// `[height, width]`, or one number for both.
fn size_of_imgsz(text: &str) -> Option<Size> {
    let size = match serde_json::from_str::<serde_json::Value>(text).ok()? {
        serde_json::Value::Number(n) => [n.as_u64(); 2],
        serde_json::Value::Array(sides) => match sides.as_slice() {
            [height, width] => [height.as_u64(), width.as_u64()],
            _ => return None,
        },
        _ => return None,
    };
    let [height, width] = size.map(|side| side.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0));
    Some(Size::new(width?, height?))
}

/// The named one, else the only f32 output of three dimensions, of several the first that Ultralytics names so.
fn output_of(graph: &Graph, card: &Card) -> Result<usize, Error> {
    let fitting = |i: &usize| graph.outputs[*i].is_float() && graph.outputs[*i].dims.len() == 3;
    let all: Vec<usize> = (0..graph.outputs.len()).filter(fitting).collect();
    let named = |name: &str| all.iter().copied().find(|i| graph.outputs[*i].name == name);
    let chosen = match (&card.detector.output, all.as_slice()) {
        (Some(name), _) => named(name),
        (None, [only]) => Some(*only),
        (None, _) => named("output0"),
    };
    chosen.ok_or_else(|| {
        graph.refuse(format!(
            "no output that reads as detections, f32 [b, n, 5 + classes], [b, 4 + classes, n] or [b, n, 6]; outputs: {}; \
             croprow.toml beside it can name one ([detector] output)",
            graph.describe_outputs()
        ))
    })
}

fn layout_of(graph: &Graph, output: usize, classes: usize, card: &Card) -> Result<Layout, Error> {
    let dims = &graph.outputs[output].dims;
    let side = |i: usize| usize::try_from(dims[i]).unwrap_or(0);
    let (rows, columns) = (side(1), side(2));
    match card.detector.layout {
        Some(layout) if layout.fits(rows, columns, classes) => Ok(layout),
        Some(layout) => Err(card.refuse(&format!(
            "[detector] layout = \"{}\" with {classes} labels does not fit the outputs: {}",
            layout.word(),
            graph.describe_outputs()
        ))),
        None => Layout::guess(rows, columns, classes, suppresses(graph)).map_err(|why| {
            graph.refuse(format!(
                "{why}: write `[detector]` with layout = \"v5\", \"v8\" or \"end2end\" and labels into croprow.toml beside \
                 it; outputs: {}",
                graph.describe_outputs()
            ))
        }),
    }
}

/// Ultralytics writes `end2end` for models without suppression, and its arguments for exports with it built in.
fn suppresses(graph: &Graph) -> bool {
    let says = |key: &str, word: &str| graph.metadata(key).is_some_and(|v| v.contains(word));
    says("end2end", "True") || says("end2end", "true") || says("args", "'nms': True")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imgsz_is_height_before_width() {
        assert_eq!(size_of_imgsz("[480, 640]"), Some(Size::new(640, 480)));
        assert_eq!(size_of_imgsz("416"), Some(Size::new(416, 416)));
        for text in ["", "[640]", "[0, 640]", "[-1, 640]", "'640'", "[480.5, 640]"] {
            assert_eq!(size_of_imgsz(text), None, "{text}");
        }
    }
}
