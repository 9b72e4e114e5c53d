//! `embed`: a thread that owns a session of the embedder.

use std::iter;
use std::ops::Range;

use crossbeam_channel::{Receiver, Sender};

use super::Job;
use super::assemble::Assembly;
use super::batch::{Batches, Flow, Stack};
use super::budget::Budget;
use super::calls::{Answer, Attempt, Calls, NanWatch};
use super::message::Crop;
use super::progress::{Progress, Step};
use crate::error::Error;
use crate::geometry::Size;
use crate::model::{Embedder, Loaded, ModelError};
use crate::row::{Finished, RowError, Stage};

/// What all sessions of the embedder take from.
pub(super) fn batches<'a>(
    job: &Job<'a>,
    budget: &'a Budget,
    rx: &'a Receiver<Crop>,
    sessions: usize,
) -> Batches<'a, Crop, ()> {
    let (progress, patient) = (job.progress, job.on_host);
    let flow = Flow { rx, progress, budget, stage: Stage::Embed, sessions, patient };
    // Whoever cuts an image's crops says that it has come, after the last of them.
    Batches::new(flow, |_| (), |_| ())
}

/// Runs batches until there are no more. The session is dropped when this returns.
pub(super) fn run(
    job: &Job<'_>,
    mut embedder: Box<dyn Embedder>,
    mut calls: Calls<'_>,
    batches: &Batches<'_, Crop, ()>,
    (assembly, commit): (&Assembly, &Sender<Finished>),
) -> Result<(), Error> {
    let size = embedder.input().size;
    let (mut nan, mut stack) = (NanWatch::default(), Stack::default());
    while let Some(batch) = batches.next(|()| calls.images(size)) {
        if job.stop.is_ending() {
            continue;
        }
        job.progress.flights.at(Step::Embed, batch.iter().map(|crop| crop.image));
        Progress::add(&job.progress.input_values, 3 * size.pixels() * batch.len() as u64);
        let mut attempt = EmbedderCall { embedder: embedder.as_mut(), stack: &mut stack, crops: &batch, size };
        let Answer::Given(answers) = calls.answer(&mut attempt, batch.len(), size)? else { continue };
        nan.look(&answers)?;
        for (Crop { image, region, tensor }, answer) in batch.into_iter().zip(answers) {
            let vector = tensor.and_then(|_| Ok(answer?));
            if let Some(ended) = assembly.fill(image, region, vector) {
                job.progress.send(Step::Embed, Step::Commit, commit, ended);
            }
        }
    }
    Ok(())
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
        // A crop that could not be made is a blank image here; its error stands.
        let images = self.crops[range.clone()].iter().map(|c| c.tensor.as_deref().unwrap_or(&[]));
        let tensor = self.stack.of(images, range.len(), self.size);
        let answers = self.embedder.embed(&tensor);
        self.stack.keep(tensor);
        answers
    }

    fn blank(&mut self) -> bool {
        let blank = self.stack.of(iter::empty(), 1, self.size);
        self.embedder.embed(&blank).is_ok()
    }
}
