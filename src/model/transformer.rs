//! What the transformer detectors of Hugging Face have in common: `logits` and `pred_boxes`, masks, and an input
//! whose size follows the picture.

use ndarray::{Array3, ArrayView2, ArrayViewD, Ix2, Ix3};

use super::Asked;
use super::port::Feed;
use super::session::Graph;
use crate::error::Error;
use crate::geometry::{BoxPx, Size};
use crate::recipe::ImageInput;
use crate::row::{RowCode, RowError};

/// Size of the picture that a graph of free size is tried with; its sides differ, so that they cannot be mixed up.
const TRIAL: Size = Size::new(640, 480);

/// Outputs of a detection transformer: `[batch, queries, classes or tokens]` and `[batch, queries, 4]`.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub logits: usize,
    pub boxes: usize,
}

impl Heads {
    /// # Errors
    /// The graph has no such outputs.
    pub(super) fn of(graph: &Graph) -> Result<Self, Error> {
        let logits = graph.output(&["logits", "pred_logits"]);
        let boxes = graph.output(&["pred_boxes", "boxes"]);
        match logits.zip(boxes).filter(|(l, b)| graph.outputs[*l].is_float() && graph.outputs[*b].is_float()) {
            Some((logits, boxes)) => Ok(Self { logits, boxes }),
            None => Err(graph.refuse(format!(
                "its family has the outputs logits and pred_boxes; this graph gives {}",
                graph.describe_outputs()
            ))),
        }
    }

    pub(super) fn both(self) -> [usize; 2] {
        [self.logits, self.boxes]
    }

    /// # Errors
    /// After a trial the outputs have not the shapes of their contract.
    pub(super) fn check(self, graph: &Graph) -> Result<(), Error> {
        let (logits, boxes) = (&graph.outputs[self.logits].dims, &graph.outputs[self.boxes].dims);
        match (logits.as_slice(), boxes.as_slice()) {
            ([b, q, _], [c, r, 4]) if b == c && q == r => Ok(()),
            _ => Err(graph.refuse(format!(
                "logits [batch, queries, classes] and boxes [batch, queries, 4] are expected; it gives {}",
                graph.describe_outputs()
            ))),
        }
    }
}

/// The size of tensor that a graph is tried with.
pub(super) fn trial_size(input: &ImageInput) -> Size {
    input.tensor_size(TRIAL)
}

/// The input that tells where a picture ends.
#[derive(Clone, Copy)]
pub(super) struct MaskPort {
    port: usize,
    /// Sides that the graph fixes, whatever the picture's; exports for the web have 64.
    height: Option<usize>,
    width: Option<usize>,
}

impl MaskPort {
    /// The graph's mask, if it has one.
    pub(super) fn of(graph: &Graph) -> Option<Self> {
        let port = graph.input(&["pixel_mask", "mask"])?;
        let input = &graph.inputs[port];
        Some(Self { port, height: input.fixed(1), width: input.fixed(2) })
    }

    /// Place among the graph's inputs.
    pub(super) fn index(self) -> usize {
        self.port
    }

    /// Ones where the picture is, `[rows, height, width]`; rows beyond `asked` are blank pictures and wholly valid.
    pub(super) fn feed(self, rows: usize, size: Size, asked: &[Asked<'_>]) -> Feed {
        let (height, width) = (size.height_px as usize, size.width_px as usize);
        let (rows_high, columns) = (self.height.unwrap_or(height), self.width.unwrap_or(width));
        let mut mask = Array3::<i64>::ones((rows, rows_high, columns));
        for (mut image, asked) in mask.outer_iter_mut().zip(asked) {
            if asked.valid != size {
                // In a mask of fewer rows each stands for several.
                let high = (asked.valid.height_px as usize * rows_high).div_ceil(height.max(1));
                let wide = (asked.valid.width_px as usize * columns).div_ceil(width.max(1));
                image.indexed_iter_mut().for_each(|((y, x), v)| *v = i64::from(y < high && x < wide));
            }
        }
        Feed { port: self.port, values: mask.into_dyn() }
    }
}

/// One image's part of an output of three dimensions.
pub(super) fn image_of<'a>(output: &'a ArrayViewD<'_, f32>, index: usize) -> Result<ArrayView2<'a, f32>, RowError> {
    let three = output.view().into_dimensionality::<Ix3>();
    let image = three.ok().filter(|o| index < o.shape()[0]).map(|o| o.index_axis_move(ndarray::Axis(0), index));
    image
        .and_then(|o| o.into_dimensionality::<Ix2>().ok())
        .ok_or_else(|| RowError::new(RowCode::Model, "the detector's output changed its shape"))
}

/// Boxes `cx cy w h` in parts of `frame`, in pixels of the input; frames begin at the top left corner.
pub(super) fn corner_box(boxes: &ArrayView2<'_, f32>, query: usize, frame: Size) -> BoxPx {
    let (w, h) = (frame.width_px as f32, frame.height_px as f32);
    BoxPx::from_center(boxes[[query, 0]] * w, boxes[[query, 1]] * h, boxes[[query, 2]] * w, boxes[[query, 3]] * h)
}

/// What one image gave: logits `[queries, columns]` and boxes `[queries, 4]`. A graph of free shapes may give others
/// than at its trial.
///
/// # Errors
/// Not one box for each query; a number that is not finite.
pub(super) fn check_answer(logits: &ArrayView2<'_, f32>, boxes: &ArrayView2<'_, f32>) -> Result<(), RowError> {
    if boxes.dim() != (logits.nrows(), 4) {
        let (queries, (boxes, sides)) = (logits.nrows(), boxes.dim());
        let reason = format!("the detector gave {boxes} boxes of {sides} numbers for {queries} queries");
        return Err(RowError::new(RowCode::Model, reason));
    }
    check_finite(logits.iter().chain(boxes.iter()))
}

/// # Errors
/// A number that is not finite.
fn check_finite<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> Result<(), RowError> {
    if numbers.into_iter().all(|v| v.is_finite()) {
        return Ok(());
    }
    Err(RowError::new(
        RowCode::NanOutput,
        "the detector gave NaN or infinity for this image; try an fp32 export of the model",
    ))
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
