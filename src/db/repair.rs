//! Mending what `verify` found: rows whose results are damaged go back to pending, counters are counted again, and rows
//! that refer to nothing are removed. All in one transaction.

use std::collections::BTreeSet;

use rusqlite::{Transaction, params};

use super::Db;
use super::due::{InForce, RecipeId};
use super::rescue::open_runs;
use super::verify::counted_again;
use crate::error::Error;
use crate::row::ImageId;

/// What is to be mended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// Images that begin anew. Their regions stay until new ones replace them by difference.
    pub whole: Vec<ImageId>,
    /// Images that wait for the embedder again, their regions kept.
    pub embed: Vec<ImageId>,
    /// Vectors to be removed.
    pub vectors: Vec<VectorId>,
    /// Crop files to be written anew.
    pub crops: Vec<CropId>,
}

/// A region that has a crop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CropId {
    /// The image.
    pub image: ImageId,
    /// `regions.id`.
    pub region: i64,
}

/// Key of `embeddings`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorId {
    /// `regions.id`.
    pub region: i64,
    /// The recipe that made it.
    pub recipe: RecipeId,
}

/// What mending did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Images that are pending again.
    pub images: u64,
    /// Rows that referred to nothing and are gone.
    pub dangling: u64,
}

impl Db {
    /// Does what `repair` says, counts again, and removes rows that refer to nothing.
    ///
    /// # Errors
    /// A run is at work; nothing was changed. Those of the database.
    pub fn repair(&mut self, repair: &Repair) -> Result<Mended, Error> {
        // Rows in the hands of runs that are over.
        self.rescue_dead_runs()?;
        let in_force = self.in_force()?;
        let tx = self.write()?;
        // Also one that is only silent by the wall clock: it may wake up.
        if let Some(run) = open_runs(&tx)?.first().map(|open| open.run) {
            return Err(Error::Usage(format!(
                "run {} is at work on this database; stop it before anything is mended",
                run.0
            )));
        }
        let mut mended = Mended::default();
        for vector in &repair.vectors {
            tx.prepare_cached("DELETE FROM embeddings WHERE region_id = ?1 AND recipe_id = ?2")?
                .execute(params![vector.region, vector.recipe.0])?;
        }
        for crop in &repair.crops {
            tx.prepare_cached("UPDATE regions SET crop = NULL WHERE id = ?1")?.execute([crop.region])?;
        }
        // On its way to the embedder an image gets the crops that it lacks; without one it has to begin anew.
        let with_crops = repair.crops.iter().map(|crop| crop.image);
        let (embed, whole): (BTreeSet<ImageId>, BTreeSet<ImageId>) = match in_force.embed {
            Some(_) => {
                (repair.embed.iter().copied().chain(with_crops).collect(), repair.whole.iter().copied().collect())
            }
            None => (repair.embed.iter().copied().collect(), repair.whole.iter().copied().chain(with_crops).collect()),
        };
        for image in &whole {
            mended.images += begin_anew(&tx, *image, in_force)?;
        }
        for image in embed.difference(&whole) {
            mended.images += embed_anew(&tx, *image, in_force)?;
        }
        mended.dangling = remove_dangling(&tx)?;
        // The triggers have changed counters that may have been wrong or missing before.
        let counts = counted_again(&tx)?;
        tx.execute("DELETE FROM counts", [])?;
        for (standing, images) in counts {
            tx.prepare_cached("INSERT INTO counts VALUES (?1, ?2, ?3, ?4, ?5)")?.execute(params![
                standing.detect,
                standing.detect_recipe,
                standing.embed,
                standing.embed_recipe,
                images,
            ])?;
        }
        tx.commit()?;
        Ok(mended)
    }
}

fn begin_anew(tx: &Transaction<'_>, image: ImageId, in_force: InForce) -> Result<u64, Error> {
    let embed_only = in_force.detect.is_none() && in_force.embed.is_some();
    let (detect, embed) = if embed_only { (None, Some("pending")) } else { (Some("pending"), None) };
    let changed = tx
        .prepare_cached(
            "UPDATE images SET detect_state = ?2, detect_recipe_id = NULL, detect_code = NULL, detect_message = NULL,
                    detect_attempts = 0, embed_state = ?3, embed_recipe_id = NULL, embed_code = NULL, embed_message = NULL,
                    embed_attempts = 0, run_id = NULL, token = NULL, done_at = NULL
             WHERE id = ?1",
        )?
        .execute(params![image.0, detect, embed])?;
    Ok(changed as u64)
}

/// Without an embedder in force `embed` is not due until there is one.
fn embed_anew(tx: &Transaction<'_>, image: ImageId, in_force: InForce) -> Result<u64, Error> {
    let changed = tx
        .prepare_cached(
            "UPDATE images SET embed_state = ?2, embed_recipe_id = NULL, embed_code = NULL, embed_message = NULL,
                    embed_attempts = 0, done_at = NULL
             WHERE id = ?1 AND token IS NULL AND (detect_state IS NULL OR detect_state = 'done')",
        )?
        .execute(params![image.0, in_force.embed.map(|_| "pending")])?;
    Ok(changed as u64)
}

/// In this order, so that nothing is left hanging on what goes.
fn remove_dangling(tx: &Transaction<'_>) -> Result<u64, Error> {
    let mut removed = 0;
    for sql in [
        "DELETE FROM regions WHERE image_id NOT IN (SELECT id FROM images)",
        "DELETE FROM candidates WHERE image_id NOT IN (SELECT id FROM images)",
        "DELETE FROM embeddings WHERE region_id NOT IN (SELECT id FROM regions)",
        "DELETE FROM suspects WHERE image_id NOT IN (SELECT id FROM images) OR run_id NOT IN (SELECT id FROM runs)",
        "DELETE FROM embeddings WHERE recipe_id NOT IN (SELECT id FROM recipes)",
        "DELETE FROM samples WHERE run_id NOT IN (SELECT id FROM runs)",
        "DELETE FROM step_samples WHERE run_id NOT IN (SELECT id FROM runs)",
        "DELETE FROM batch_sizes WHERE model_id NOT IN (SELECT id FROM models)",
    ] {
        removed += tx.execute(sql, [])?;
    }
    Ok(removed as u64)
}
