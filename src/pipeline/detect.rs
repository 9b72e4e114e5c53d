//! `detect`: the one thread that owns the detector's session.

use std::cell::RefCell;
use std::iter;

use crossbeam_channel::{Receiver, Sender};

use super::Job;
use super::batch::{Answer, Batches, NanWatch, call_or_split, stack};
use super::message::{Decoded, Located, Origin, finished};
use super::progress::Place;
use crate::error::Error;
use crate::model::{Asked, Detector};
use crate::row::{Finished, Outcome};

/// Asked of a blank image, to tell a broken model from bad images.
const HARMLESS_PROMPT: &str = "object.";

/// Runs batches until `decoded` is closed. The session is dropped when this returns.
pub(super) fn run(
    job: &Job<'_>,
    mut detector: Box<dyn Detector>,
    decoded: &Receiver<Decoded>,
    located: &Sender<Located>,
    commit: &Sender<Finished>,
) -> Result<(), Error> {
    let floor = job.config.detect.as_ref().map_or(0.0, |d| d.candidate_floor);
    let images_most = detector.fixed_batch().unwrap_or(job.config.batch);
    let mut nan = NanWatch::default();
    for batch in Batches::new(decoded, images_most, |d: &Decoded| d.size) {
        if job.stop.is_ending() {
            continue;
        }
        let size = batch[0].size;
        let asked: Vec<Asked<'_>> =
            batch.iter().map(|d| Asked { prompt: d.claim.prompt.as_deref(), valid: d.placed.valid }).collect();
        let answer = job.progress.timed(Place::Detect, || {
            // Both closures need the session, one after the other.
            let session = RefCell::new(&mut detector);
            call_or_split(
                batch.len(),
                &mut |range| {
                    let images = batch[range.clone()].iter().map(|d| d.tensor.as_slice());
                    session.borrow_mut().detect(&stack(images, range.len(), size), &asked[range], floor)
                },
                &mut || {
                    let blank = stack(iter::empty(), 1, size);
                    let asked = Asked { prompt: Some(HARMLESS_PROMPT), valid: size };
                    session.borrow_mut().detect(&blank, &[asked], floor).is_ok()
                },
            )
        })?;
        let Answer::Given(answers) = answer else { continue };
        nan.look(&answers)?;
        for (Decoded { claim, facts, pixels, tensor, placed, mut held, .. }, answer) in batch.into_iter().zip(answers) {
            drop(tensor);
            held.shrink_to(pixels.bytes());
            // A closed channel means that the run is ending; the row is released.
            let _ = match answer {
                Ok(found) => {
                    let found = Origin::Raw(found, placed.placement);
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
