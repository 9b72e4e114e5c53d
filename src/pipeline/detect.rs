//! `detect`: a thread that owns a session of the detector.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use crossbeam_channel::{Receiver, Sender};

use super::Job;
use super::ahead::each_batch;
use super::batch::Batches;
use super::budget::Budget;
use super::calls::{Answer, Attempt, Calls, NanWatch};
use super::message::{Decoded, Located, Origin, finished};
use super::progress::{Progress, Step};
use super::stack::{Image, Stack};
use crate::error::Error;
use crate::geometry::Size;
use crate::model::memory::HostMemory;
use crate::model::{Asked, Detector, Found, Loaded, ModelError};
use crate::row::{Finished, Outcome, RowError, Stage};

/// Asked of a blank image, to tell a broken model from bad images.
const HARMLESS_PROMPT: &str = "object.";

/// Runs batches until `decoded` is closed. The session is dropped when this returns.
pub(super) fn run(
    job: &Job<'_>,
    mut detector: Box<dyn Detector>,
    (calls, memory): (&Calls<'_>, &HostMemory),
    budget: &Budget,
    decoded: &Receiver<Decoded>,
    (located, commit): (&Sender<Located>, &Sender<Finished>),
) -> Result<(), Error> {
    let floor = job.config.detect.as_ref().map_or(0.0, |d| d.candidate_floor);
    let arrived = |d: &mut Decoded| d.image.held.came_to(Stage::Detect);
    let (flow, in_hand) = ((job.progress, budget), AtomicUsize::new(0));
    let batches = Batches::new(decoded, flow, Stage::Detect, job.patience(&in_hand), |d: &Decoded| d.size, arrived);
    let mut nan = NanWatch::default();
    let place = (job.progress, job.stop, memory);
    each_batch(
        place,
        batches,
        |size| calls.images(*size),
        |d| d.size,
        |batch, stack| {
            if job.stop.is_ending() {
                return Ok(());
            }
            let size = batch[0].size;
            count_padding(job.progress, &batch);
            let asked: Vec<Asked<'_>> = batch
                .iter()
                .map(|d| Asked { prompt: d.image.claim.prompt.as_deref(), valid: d.placed.valid })
                .collect();
            let mut attempt = DetectorCall { detector: detector.as_mut(), stack, images: &batch, asked, size, floor };
            let Answer::Given(answers) = calls.answer(&mut attempt, batch.len(), size)? else { return Ok(()) };
            nan.look(&answers)?;
            for (Decoded { mut image, tensor, placed, .. }, answer) in batch.into_iter().zip(answers) {
                drop(tensor);
                image.shrink();
                // A closed channel means that the run is ending; the row is released.
                match answer {
                    Ok(found) => {
                        let found = Origin::Raw(found, placed.placement);
                        job.progress.send(Step::Detect, Step::Crop, located, Located { image, found });
                    }
                    Err(error) => {
                        let outcome = Outcome::Failed(error.at(&image.claim.path));
                        let ended = finished(&image.claim, image.facts, outcome);
                        job.progress.send(Step::Detect, Step::Commit, commit, ended);
                    }
                }
            }
            Ok(())
        },
    )
}

impl Image for Decoded {
    fn values(&self) -> &[f32] {
        &self.tensor
    }
}

fn count_padding(progress: &Progress, batch: &[Decoded]) {
    let pixels = |size: Size| size.pixels();
    let all: u64 = batch.iter().map(|d| pixels(d.size)).sum();
    let filled: u64 = batch.iter().map(|d| pixels(d.placed.valid)).sum();
    Progress::add(&progress.input_values, 3 * all);
    Progress::add(&progress.padding_values, 3 * (all - filled.min(all)));
}

/// Images of one tensor size before their detector.
struct DetectorCall<'a> {
    detector: &'a mut dyn Detector,
    stack: &'a mut Stack,
    images: &'a [Decoded],
    asked: Vec<Asked<'a>>,
    size: Size,
    floor: f32,
}

impl Attempt for DetectorCall<'_> {
    type Answer = Found;

    fn model(&mut self) -> &mut dyn Loaded {
        self.detector
    }

    fn call(&mut self, range: Range<usize>) -> Result<Vec<Result<Found, RowError>>, ModelError> {
        let tensor = self.stack.of(self.images, range.clone(), self.size);
        self.detector.detect(tensor, &self.asked[range], self.floor)
    }

    fn blank(&mut self) -> bool {
        let asked = Asked { prompt: Some(HARMLESS_PROMPT), valid: self.size };
        self.detector.detect(self.stack.blank(self.size), &[asked], self.floor).is_ok()
    }
}
