//! `detect`: the one thread that owns the detector's session.

use std::cell::RefCell;
use std::iter;

use crossbeam_channel::{Receiver, Sender};

use super::Job;
use super::batch::{Answer, call_or_split, collect, stack};
use super::message::{Decoded, Found, Located, finished};
use super::progress::Place;
use crate::error::Error;
use crate::model::Detector;
use crate::row::{Finished, Outcome};

/// Runs batches until `decoded` is closed. The session is dropped when this returns.
pub(super) fn run(
    job: &Job<'_>,
    mut detector: Box<dyn Detector>,
    decoded: &Receiver<Decoded>,
    located: &Sender<Located>,
    commit: &Sender<Finished>,
) -> Result<(), Error> {
    let input = detector.input().clone();
    let floor = job.config.detect.as_ref().map_or(0.0, |d| d.selection.box_threshold);
    let size = detector.fixed_batch().unwrap_or(job.config.batch);
    while let Some(batch) = collect(decoded, size) {
        if job.stop.is_ending() {
            continue;
        }
        let answer = job.progress.timed(Place::Detect, || {
            // Both closures need the session, one after the other.
            let session = RefCell::new(&mut detector);
            call_or_split(
                batch.len(),
                &mut |range| {
                    let images = batch[range.clone()].iter().map(|d| d.tensor.as_slice());
                    session.borrow_mut().detect(&stack(images, range.len(), &input), floor)
                },
                &mut || session.borrow_mut().detect(&stack(iter::empty(), 1, &input), floor).is_ok(),
            )
        })?;
        let Answer::Given(answers) = answer else { continue };
        for (Decoded { claim, facts, pixels, tensor, placement, mut held }, answer) in batch.into_iter().zip(answers) {
            drop(tensor);
            held.shrink_to(pixels.as_raw().len() as u64);
            // A closed channel means that the run is ending; the row is released.
            let _ = match answer {
                Ok(detections) => {
                    let found = Found::Detections(detections, placement);
                    located.send(Located { claim, facts, pixels, found, held }).is_ok()
                }
                Err(error) => {
                    commit.send(finished(&claim, Some(facts), Outcome::Failed(error.at(&claim.path)))).is_ok()
                }
            };
        }
    }
    Ok(())
}
