//! Batch sizes that were found by measurement, and where they are kept: per model, device and shape of input.

use std::path::PathBuf;

use crate::db::Db;
use crate::db::batch_sizes::LearntBatch;
use crate::error::Error;
use crate::geometry::Size;
use crate::row::Stage;

/// A batch size that was found best for a shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Learnt {
    /// Whose session.
    pub stage: Stage,
    /// Width and height of the model's input.
    pub shape: Size,
    /// Images in one call.
    pub images: usize,
    /// Images per second of the calls alone.
    pub per_s: f64,
}

/// Whose batch sizes are learnt: a model on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchOwner {
    /// Its session.
    pub stage: Stage,
    /// Digest of the model.
    pub digest: String,
    /// Where the model is.
    pub path: PathBuf,
    /// `cpu`, or the product's name of a GPU.
    pub device: String,
}

/// What earlier runs found, and under which names new findings are kept.
#[derive(Clone, Debug, Default)]
pub struct Learning {
    /// One per session.
    pub owners: Vec<BatchOwner>,
    /// What is tried first.
    pub known: Vec<Learnt>,
}

impl Learning {
    /// What the database knows of the models of `owners`.
    ///
    /// # Errors
    /// Those of the database.
    pub fn read(db: &Db, owners: Vec<BatchOwner>) -> Result<Self, Error> {
        let mut known = Vec::new();
        for BatchOwner { stage, digest, device, .. } in &owners {
            for LearntBatch { shape, images, per_s } in db.learnt_batches(digest, device)? {
                known.push(Learnt { stage: *stage, shape, images, per_s });
            }
        }
        Ok(Self { owners, known })
    }

    /// Keeps what was learnt for the next run.
    ///
    /// # Errors
    /// Those of the database.
    pub fn keep(&self, db: &mut Db, learnt: &[Learnt]) -> Result<(), Error> {
        for Learnt { stage, shape, images, per_s } in learnt {
            let batch = LearntBatch { shape: *shape, images: *images, per_s: *per_s };
            for owner in self.owners.iter().filter(|owner| owner.stage == *stage) {
                db.remember_batch(&owner.digest, &owner.path, &owner.device, &batch)?;
            }
        }
        Ok(())
    }
}
