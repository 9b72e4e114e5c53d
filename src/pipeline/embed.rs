//! `embed`: a thread that owns a session of the embedder.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use crossbeam_channel::{Receiver, Sender};

use super::Job;
use super::ahead::each_batch;
use super::assemble::Assembly;
use super::batch::Batches;
use super::budget::Budget;
use super::calls::{Answer, Attempt, Calls, NanWatch};
use super::message::Crop;
use super::progress::{Progress, Step};
use super::stack::{Image, Stack};
use crate::error::Error;
use crate::geometry::Size;
use crate::model::memory::HostMemory;
use crate::model::{Embedder, Loaded, ModelError};
use crate::row::{Finished, RowError, Stage};

/// Runs batches until `crops` is closed. The session is dropped when this returns.
pub(super) fn run(
    job: &Job<'_>,
    mut embedder: Box<dyn Embedder>,
    (calls, memory): (&Calls<'_>, &HostMemory),
    budget: &Budget,
    crops: &Receiver<Crop>,
    (assembly, commit): (&Assembly, &Sender<Finished>),
) -> Result<(), Error> {
    let size = embedder.input().size;
    let (flow, in_hand) = ((job.progress, budget), AtomicUsize::new(0));
    // Whoever cuts an image's crops says that it has come, after the last of them.
    let batches = Batches::new(crops, flow, Stage::Embed, job.patience(&in_hand), |_| (), |_| ());
    let mut nan = NanWatch::default();
    let place = (job.progress, job.stop, memory);
    each_batch(
        place,
        batches,
        |()| calls.images(size),
        |_| size,
        |batch, stack| {
            if job.stop.is_ending() {
                return Ok(());
            }
            Progress::add(&job.progress.input_values, 3 * size.pixels() * batch.len() as u64);
            let mut attempt = EmbedderCall { embedder: embedder.as_mut(), stack, crops: &batch, size };
            let Answer::Given(answers) = calls.answer(&mut attempt, batch.len(), size)? else { return Ok(()) };
            nan.look(&answers)?;
            for (Crop { image, region, tensor }, answer) in batch.into_iter().zip(answers) {
                let vector = tensor.and_then(|_| Ok(answer?));
                if let Some(ended) = assembly.fill(image, region, vector) {
                    job.progress.send(Step::Embed, Step::Commit, commit, ended);
                }
            }
            Ok(())
        },
    )
}

impl Image for Crop {
    /// A crop that could not be made is a blank image; its error stands.
    fn values(&self) -> &[f32] {
        self.tensor.as_deref().unwrap_or(&[])
    }
}

/// Crops before their embedder.
struct EmbedderCall<'a> {
    embedder: &'a mut dyn Embedder,
    stack: &'a mut Stack,
    crops: &'a [Crop],
    size: Size,
}

impl Attempt for EmbedderCall<'_> {
    type Answer = Vec<f32>;

    fn model(&mut self) -> &mut dyn Loaded {
        self.embedder
    }

    fn call(&mut self, range: Range<usize>) -> Result<Vec<Result<Vec<f32>, RowError>>, ModelError> {
        let tensor = self.stack.of(self.crops, range, self.size);
        self.embedder.embed(tensor)
    }

    fn blank(&mut self) -> bool {
        self.embedder.embed(self.stack.blank(self.size)).is_ok()
    }
}
