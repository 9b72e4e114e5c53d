//! Collecting batches from a channel, and what to do when a session refuses one. Pure but for the channel.

use std::ops::Range;

use crossbeam_channel::Receiver;
use ndarray::Array4;

use crate::error::Error;
use crate::model::ModelError;
use crate::recipe::ImageInput;
use crate::row::{RowCode, RowError};

/// The next batch: waits for one message, then takes what is there already, up to `size`. A partial batch
/// goes rather than that its device idles. `None` when the channel is closed and empty.
pub fn collect<T>(rx: &Receiver<T>, size: usize) -> Option<Vec<T>> {
    let mut batch = vec![rx.recv().ok()?];
    while batch.len() < size {
        let Ok(message) = rx.try_recv() else { break };
        batch.push(message);
    }
    Some(batch)
}

/// Copies flat images into `[rows, 3, height, width]`; rows beyond `images` stay zero.
pub fn stack<'a>(images: impl Iterator<Item = &'a [f32]>, rows: usize, input: &ImageInput) -> Array4<f32> {
    let mut tensor = Array4::zeros((rows, 3, input.size.height_px as usize, input.size.width_px as usize));
    if let Some(flat) = tensor.as_slice_mut() {
        for (row, image) in flat.chunks_exact_mut(input.values()).zip(images) {
            row.copy_from_slice(image);
        }
    }
    tensor
}

/// What a session said of a batch.
pub enum Answer<T> {
    /// One answer per image.
    Given(Vec<Result<T, RowError>>),
    /// The run is ending; the rows are released.
    Terminated,
}

/// Calls `call` on the whole batch; where it is refused, on halves, down to single images. An image that is
/// refused alone fails with code `model`. Where every image is refused, `healthy` is asked with an input
/// that cannot be at fault: if that is refused too, it is the model that failed and not the images.
///
/// # Errors
/// The model refuses everything, memory does not suffice for one image, or the device is gone.
pub fn call_or_split<T>(
    size: usize,
    call: &mut dyn FnMut(Range<usize>) -> Result<Vec<Result<T, RowError>>, ModelError>,
    healthy: &mut dyn FnMut() -> bool,
) -> Result<Answer<T>, Error> {
    let mut answers: Vec<Result<T, RowError>> = Vec::with_capacity(size);
    let mut refused_alone = 0;
    let mut waiting: Vec<Range<usize>> = std::iter::once(0..size).collect();
    while let Some(range) = waiting.pop() {
        match call(range.clone()) {
            Ok(given) => answers.extend(given),
            Err(ModelError::Terminated) => return Ok(Answer::Terminated),
            Err(ModelError::DeviceLost(reason)) => return Err(Error::DeviceLost(reason)),
            Err(ModelError::OutOfMemory(reason)) if range.len() == 1 => {
                return Err(Error::Model(format!("not enough memory for a single image: {reason}")));
            }
            Err(ModelError::OutOfMemory(_) | ModelError::Failed(_)) if range.len() > 1 => {
                let middle = range.start + range.len() / 2;
                log::warn!("a batch of {} was refused, trying halves", range.len());
                // The first half is on top of the stack, so that answers keep their order.
                waiting.push(middle..range.end);
                waiting.push(range.start..middle);
            }
            Err(ModelError::OutOfMemory(reason) | ModelError::Failed(reason)) => {
                refused_alone += 1;
                answers
                    .push(Err(RowError::new(RowCode::Model, format!("the model refused this image alone: {reason}"))));
                if refused_alone == size && !healthy() {
                    return Err(Error::Model(format!("every image is refused: {reason}")));
                }
            }
        }
    }
    Ok(Answer::Given(answers))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(bad: &'static [usize]) -> impl FnMut(Range<usize>) -> Result<Vec<Result<usize, RowError>>, ModelError> {
        move |range| {
            if range.clone().any(|i| bad.contains(&i)) {
                Err(ModelError::Failed("refused".into()))
            } else {
                Ok(range.map(Ok).collect())
            }
        }
    }

    #[test]
    fn an_image_that_is_refused_alone_fails_and_its_neighbours_keep_their_answers() {
        let Ok(Answer::Given(answers)) = call_or_split(7, &mut call(&[2, 5]), &mut || true) else { panic!() };
        let codes: Vec<_> = answers.iter().map(|a| a.as_ref().map_err(|e| e.code).copied()).collect();
        let bad = Err(RowCode::Model);
        assert_eq!(codes, [Ok(0), Ok(1), bad, Ok(3), Ok(4), bad, Ok(6)]);
    }

    #[test]
    fn a_model_that_refuses_everything_ends_the_run() {
        assert!(matches!(call_or_split(2, &mut call(&[0, 1]), &mut || false), Err(Error::Model(_))));
        let Ok(Answer::Given(answers)) = call_or_split(2, &mut call(&[0, 1]), &mut || true) else { panic!() };
        assert!(answers.iter().all(Result::is_err), "two bad images are two failed rows while the model is sound");
    }

    #[test]
    fn a_lost_device_marks_no_image() {
        let mut lost = |_: Range<usize>| -> Result<Vec<Result<(), RowError>>, ModelError> {
            Err(ModelError::DeviceLost("CUDA error 719".into()))
        };
        assert!(matches!(call_or_split(8, &mut lost, &mut || true), Err(Error::DeviceLost(_))));
    }
}
