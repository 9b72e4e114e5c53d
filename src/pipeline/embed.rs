//! `embed`: the one thread that owns the embedder's session. It also puts images together again whose
//! regions were spread over several batches.

use std::cell::RefCell;
use std::collections::HashMap;
use std::iter;

use crossbeam_channel::{Receiver, Sender};
use ndarray::s;

use super::Job;
use super::batch::{Answer, NanWatch, call_or_split, stack};
use super::message::{EmbedBatch, Opened, Slot, finished};
use super::progress::Place;
use crate::error::Error;
use crate::model::Embedder;
use crate::row::{Finished, ImageId, Outcome, RowError};

/// Runs batches until `crops` is closed. The session is dropped when this returns.
pub(super) fn run(
    job: &Job<'_>,
    mut embedder: Box<dyn Embedder>,
    crops: &Receiver<EmbedBatch>,
    commit: &Sender<Finished>,
) -> Result<(), Error> {
    let size = embedder.input().size;
    let mut nan = NanWatch::default();
    let mut open: HashMap<ImageId, Embedding> = HashMap::new();
    for EmbedBatch { opened, slots, tensor } in crops {
        open.extend(opened.into_iter().map(|image| (image.claim.id, Embedding::new(image))));
        if job.stop.is_ending() {
            continue;
        }
        let answer = job.progress.timed(Place::Embed, || {
            // Both closures need the session, one after the other.
            let session = RefCell::new(&mut embedder);
            call_or_split(
                slots.len(),
                &mut |range| {
                    if range.len() == slots.len() {
                        return session.borrow_mut().embed(&tensor);
                    }
                    session.borrow_mut().embed(&tensor.slice(s![range, .., .., ..]).to_owned())
                },
                &mut || session.borrow_mut().embed(&stack(iter::empty(), 1, size)).is_ok(),
            )
        })?;
        let Answer::Given(answers) = answer else { continue };
        nan.look(&answers)?;
        for (slot, answer) in slots.into_iter().zip(answers) {
            let Some(image) = open.get_mut(&slot.image) else { continue };
            if image.fill(&slot, answer) {
                let id = slot.image;
                if let Some(image) = open.remove(&id) {
                    let _ = commit.send(image.finish());
                }
            }
        }
    }
    Ok(())
}

/// An image that still lacks vectors.
struct Embedding {
    image: Opened,
    missing: usize,
    error: Option<RowError>,
}

impl Embedding {
    fn new(image: Opened) -> Self {
        Self { missing: image.regions.iter().filter(|r| !r.embedded).count(), image, error: None }
    }

    /// Takes one answer; true when it was the last.
    fn fill(&mut self, slot: &Slot, answer: Result<Vec<f32>, RowError>) -> bool {
        match slot.error.clone().map_or(answer, Err) {
            Ok(vector) => self.image.regions[slot.region].vector = Some(vector),
            // The first error speaks for the image.
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
        self.missing -= 1;
        self.missing == 0
    }

    fn finish(self) -> Finished {
        let Opened { claim, facts, raw, regions } = self.image;
        let embed = self.error.map_or(Ok(()), |error| Err(error.at(&claim.path)));
        finished(&claim, Some(facts), Outcome::Done { raw, regions, embed: Some(embed) })
    }
}
