//! Images whose regions are spread over several batches, and maybe over several sessions: put together again, one
//! outcome each.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::message::{NoCrop, Opened, failed, finished};
use crate::row::{Finished, ImageId, Outcome};

/// The images that still lack vectors.
#[derive(Default)]
pub struct Assembly(Mutex<HashMap<ImageId, Embedding>>);

struct Embedding {
    image: Opened,
    missing: usize,
    error: Option<NoCrop>,
}

impl Assembly {
    /// Takes an image before the first of its crops is on its way.
    pub fn open(&self, image: Opened) {
        let missing = image.regions.iter().filter(|r| !r.embedded).count();
        let id = image.claim.id;
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.insert(id, Embedding { image, missing, error: None });
    }

    /// Takes the answer for one region. The image's outcome, when it was the last.
    pub fn fill(&self, id: ImageId, region: usize, answer: Result<Vec<f32>, NoCrop>) -> Option<Finished> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let embedding = open.get_mut(&id)?;
        match answer {
            Ok(vector) => embedding.image.regions[region].vector = Some(vector),
            // The first error speaks for the image.
            Err(error) => embedding.error = embedding.error.take().or(Some(error)),
        }
        embedding.missing -= 1;
        if embedding.missing > 0 {
            return None;
        }
        open.remove(&id).map(Embedding::finish)
    }
}

impl Assembly {
    /// The image's outcome at once, whatever is still on its way. `None` where it has ended.
    pub fn give_up(&self, id: ImageId, error: NoCrop) -> Option<Finished> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let embedding = open.remove(&id)?;
        Some(Embedding { error: embedding.error.or(Some(error)), ..embedding }.finish())
    }
}

impl Embedding {
    fn finish(self) -> Finished {
        let Opened { claim, facts, raw, regions } = self.image;
        let embed = match self.error {
            None => Ok(()),
            Some(NoCrop::Refused(refused)) if refused.lost.is_some() => return failed(&claim, refused),
            Some(NoCrop::Refused(refused)) => Err(refused.error.at(&claim.path)),
            Some(NoCrop::FileChanged) => return finished(&claim, None, Outcome::FileChanged),
        };
        finished(&claim, facts, Outcome::Done { raw, regions, embed: Some(embed) })
    }
}
