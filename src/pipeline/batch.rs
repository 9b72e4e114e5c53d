//! Collecting batches from a channel, and what to do when a session refuses one. Pure but for the channel.

use std::ops::Range;

use crossbeam_channel::Receiver;
use ndarray::Array4;

use crate::error::Error;
use crate::geometry::Size;
use crate::model::ModelError;
use crate::row::{RowCode, RowError};

/// Batches of messages that share a key: tensors of one size need no padding, so that a row's result does not
/// depend on its neighbours. Full batches go first. When nothing more is there the one that has waited longest
/// goes as it is, rather than that its device idles.
pub struct Batches<'a, T, K> {
    rx: &'a Receiver<T>,
    size: usize,
    key: fn(&T) -> K,
    /// Groups that are not full yet, the oldest first.
    waiting: Vec<(K, Vec<T>)>,
}

impl<'a, T, K: PartialEq> Batches<'a, T, K> {
    /// Batches of up to `size` messages with equal keys.
    pub fn new(rx: &'a Receiver<T>, size: usize, key: fn(&T) -> K) -> Self {
        Self { rx, size, key, waiting: Vec::new() }
    }

    /// Puts a message to its like; the group, if that made it full.
    fn sort_in(&mut self, message: T) -> Option<Vec<T>> {
        let key = (self.key)(&message);
        let place = self.waiting.iter().position(|(k, _)| *k == key).unwrap_or_else(|| {
            self.waiting.push((key, Vec::new()));
            self.waiting.len() - 1
        });
        self.waiting[place].1.push(message);
        (self.waiting[place].1.len() >= self.size).then(|| self.waiting.remove(place).1)
    }
}

impl<T, K: PartialEq> Iterator for Batches<'_, T, K> {
    type Item = Vec<T>;

    /// Waits where nothing is there at all. `None` when the channel is closed and everything was handed out.
    fn next(&mut self) -> Option<Vec<T>> {
        loop {
            while let Ok(message) = self.rx.try_recv() {
                if let Some(full) = self.sort_in(message) {
                    return Some(full);
                }
            }
            if !self.waiting.is_empty() {
                return Some(self.waiting.remove(0).1);
            }
            let message = self.rx.recv().ok()?;
            if let Some(full) = self.sort_in(message) {
                return Some(full);
            }
        }
    }
}

/// Copies flat images of one tensor size into `[rows, 3, height, width]`; rows beyond `images` stay zero.
pub fn stack<'a>(images: impl Iterator<Item = &'a [f32]>, rows: usize, size: Size) -> Array4<f32> {
    let mut tensor = Array4::zeros((rows, 3, size.height_px as usize, size.width_px as usize));
    if let Some(flat) = tensor.as_slice_mut() {
        for (row, image) in flat.chunks_exact_mut(3 * size.pixels() as usize).zip(images) {
            row.copy_from_slice(image);
        }
    }
    tensor
}

/// Images in a row that gave NaN, after which it is the model and not the images.
const NAN_IN_A_ROW: usize = 8;

/// Tells single images that give NaN from a model that gives nothing else.
#[derive(Default)]
pub struct NanWatch(usize);

impl NanWatch {
    /// Looks at the answers of a batch.
    ///
    /// # Errors
    /// Too many images in a row gave NaN; none of this batch should be marked for it.
    pub fn look<T>(&mut self, answers: &[Result<T, RowError>]) -> Result<(), Error> {
        for answer in answers {
            match answer {
                Err(error) if error.code == RowCode::NanOutput => self.0 += 1,
                _ => self.0 = 0,
            }
        }
        if self.0 < NAN_IN_A_ROW {
            return Ok(());
        }
        Err(Error::Model(format!(
            "{} images in a row gave NaN, infinity or nothing but zeros: take the fp32 model",
            self.0
        )))
    }
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
    fn batches_hold_messages_of_one_size_and_full_ones_go_first() {
        let (tx, rx) = crossbeam_channel::unbounded();
        for message in [(1, 'a'), (2, 'b'), (2, 'c'), (1, 'd'), (3, 'e')] {
            tx.send(message).unwrap();
        }
        drop(tx);
        let batches: Vec<String> =
            Batches::new(&rx, 2, |m: &(u8, char)| m.0).map(|b| b.into_iter().map(|m| m.1).collect()).collect();
        assert_eq!(batches, ["bc", "ad", "e"]);
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
    fn a_model_that_gives_nothing_but_nan_ends_the_run_and_single_images_do_not() {
        let nan = || Err::<(), _>(RowError::new(RowCode::NanOutput, "NaN"));
        let mut watch = NanWatch::default();
        for _ in 0..20 {
            assert!(watch.look(&[nan(), nan(), nan(), Ok(())]).is_ok());
        }
        assert!(watch.look(&[nan(), nan(), nan(), nan()]).is_ok());
        assert!(watch.look(&[nan(), nan(), nan(), nan()]).unwrap_err().to_string().contains("fp32"));
    }

    #[test]
    fn a_lost_device_marks_no_image() {
        let mut lost = |_: Range<usize>| -> Result<Vec<Result<(), RowError>>, ModelError> {
            Err(ModelError::DeviceLost("CUDA error 719".into()))
        };
        assert!(matches!(call_or_split(8, &mut lost, &mut || true), Err(Error::DeviceLost(_))));
    }
}
