//! Storing outcomes: results and states together, one transaction per batch, only where the token still
//! matches.

use rusqlite::{Transaction, named_params, params};

use super::claim::stored_regions;
use super::due::{InForce, RecipeId};
use super::{Db, now};
use crate::error::Error;
use crate::row::{Finished, ImageFacts, ImageId, Outcome, Raw, Region, RowError, Stage, State};

/// Boxes closer than this on every side are the same region: a restart changes which images share a batch,
/// and that changes the low bits.
const SAME_BOX_PX: f32 = 0.01;

/// What a commit did with its outcomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Images whose last due stage is done.
    pub done: u64,
    /// Images that ended with a code.
    pub failed: u64,
    /// Images that `detect` is through with, done or failed.
    pub detected: u64,
    /// Images that `embed` is through with, done or failed.
    pub embedded: u64,
    /// Results of rows that somebody else has meanwhile. Nothing was stored.
    pub dropped: u64,
    /// Rows that are pending again because their file changed.
    pub begun_anew: u64,
}

impl Db {
    /// Stores a batch of outcomes in one transaction.
    ///
    /// # Errors
    /// Those of the database; nothing of the batch is stored then.
    pub fn commit_batch(&mut self, batch: &[Finished], in_force: InForce) -> Result<Committed, Error> {
        let tx = self.write()?;
        let mut committed = Committed::default();
        for finished in batch {
            store(&tx, finished, in_force, &mut committed)?;
        }
        tx.commit()?;
        Ok(committed)
    }
}

fn store(tx: &Transaction<'_>, finished: &Finished, in_force: InForce, committed: &mut Committed) -> Result<(), Error> {
    let stored = match &finished.outcome {
        Outcome::Done { raw, regions, embed } => {
            let stored = store_done(tx, finished, regions, embed.as_ref(), in_force)?;
            if let (true, Some(raw), Some(recipe)) = (stored, raw, in_force.detect) {
                store_raw(tx, finished.id, raw, recipe)?;
            }
            stored
        }
        Outcome::Failed(error) => store_failed(tx, finished, error, in_force)?,
        Outcome::FileChanged => begin_anew(tx, finished, in_force)?,
    };
    if !stored {
        committed.dropped += 1;
        return Ok(());
    }
    if let Some(facts) = &finished.facts {
        store_facts(tx, finished.id, facts)?;
    }
    match &finished.outcome {
        Outcome::Done { embed, .. } => {
            committed.detected += u64::from(finished.stage == Stage::Detect);
            committed.embedded += u64::from(embed.is_some());
            if matches!(embed, Some(Err(_))) { committed.failed += 1 } else { committed.done += 1 }
        }
        Outcome::Failed(_) => {
            committed.failed += 1;
            match finished.stage {
                Stage::Detect => committed.detected += 1,
                Stage::Embed => committed.embedded += 1,
            }
        }
        Outcome::FileChanged => committed.begun_anew += 1,
    }
    Ok(())
}

fn store_done(
    tx: &Transaction<'_>,
    finished: &Finished,
    regions: &[Region],
    embed: Option<&Result<(), RowError>>,
    in_force: InForce,
) -> Result<bool, Error> {
    let detected = finished.stage == Stage::Detect;
    let embed_state = embed.map(|end| if end.is_ok() { State::Done } else { State::Failed }.word());
    let error = embed.and_then(|end| end.as_ref().err());
    let rows = tx
        .prepare_cached(
            "UPDATE images SET
                detect_state = iif(:detected, 'done', detect_state),
                detect_recipe_id = iif(:detected, :detect_recipe, detect_recipe_id),
                embed_state = :embed_state, embed_recipe_id = iif(:embed_state = 'done', :embed_recipe, NULL),
                embed_attempts = embed_attempts + (:detected AND :embed_state IS NOT NULL),
                embed_code = :code, embed_message = :message,
                run_id = NULL, token = NULL, done_at = iif(:code IS NULL, :now, NULL)
             WHERE id = :id AND token = :token",
        )?
        .execute(named_params! {
            ":detected": detected,
            ":detect_recipe": in_force.detect.map(|r| r.0),
            ":embed_state": embed_state,
            ":embed_recipe": in_force.embed.map(|r| r.0),
            ":code": error.map(|e| e.code.word()),
            ":message": error.map(|e| &e.message),
            ":now": now(),
            ":id": finished.id.0,
            ":token": finished.token.0,
        })?;
    if rows == 0 {
        return Ok(false);
    }
    if finished.facts.as_ref().is_some_and(|facts| !is_same_file(tx, finished.id, facts).unwrap_or(false)) {
        // Vectors of other recipes would stay beside boxes that happen to be equal.
        delete_regions(tx, finished.id)?;
    }
    if error.is_some() {
        forget_vectors(tx, finished.id, in_force)?;
    }
    let recipe = if matches!(embed, Some(Ok(()))) { in_force.embed } else { None };
    replace_regions(tx, finished.id, regions, recipe)?;
    Ok(true)
}

fn store_failed(tx: &Transaction<'_>, finished: &Finished, error: &RowError, in_force: InForce) -> Result<bool, Error> {
    let sql = match finished.stage {
        Stage::Detect => {
            "UPDATE images SET detect_state = 'failed', detect_recipe_id = NULL, detect_code = ?1, detect_message = ?2,
                    run_id = NULL, token = NULL, done_at = NULL WHERE id = ?3 AND token = ?4"
        }
        Stage::Embed => {
            "UPDATE images SET embed_state = 'failed', embed_recipe_id = NULL, embed_code = ?1, embed_message = ?2,
                    run_id = NULL, token = NULL, done_at = NULL WHERE id = ?3 AND token = ?4"
        }
    };
    let rows =
        tx.prepare_cached(sql)?.execute(params![error.code.word(), error.message, finished.id.0, finished.token.0])?;
    if rows > 0 && finished.stage == Stage::Detect {
        // What an earlier recipe or file left must not stand as this row's result.
        delete_regions(tx, finished.id)?;
    }
    if rows > 0 {
        forget_vectors(tx, finished.id, in_force)?;
        // The file as it failed: when it is another, `add` and `retry --changed` take it up again.
        tx.prepare_cached("UPDATE images SET file_size_bytes = ?2, file_mtime_ns = ?3 WHERE id = ?1")?.execute(
            params![finished.id.0, finished.stamp.map(|s| s.size_bytes), finished.stamp.map(|s| s.mtime_ns),],
        )?;
    }
    Ok(rows > 0)
}

/// Whether the image's regions, if it has any, were made from this very file.
fn is_same_file(tx: &Transaction<'_>, id: ImageId, facts: &ImageFacts) -> Result<bool, Error> {
    let stored: (Option<i64>, Option<i64>) = tx
        .prepare_cached("SELECT file_size_bytes, file_mtime_ns FROM images WHERE id = ?1")?
        .query_row([id.0], |r| Ok((r.get(0)?, r.get(1)?)))?;
    Ok(stored == (None, None) || stored == (Some(facts.stamp.size_bytes), Some(facts.stamp.mtime_ns)))
}

/// An embedding that failed must not leave the vector of an earlier file or try standing.
fn forget_vectors(tx: &Transaction<'_>, image: ImageId, in_force: InForce) -> Result<(), Error> {
    tx.prepare_cached(
        "DELETE FROM embeddings WHERE recipe_id = ?2 AND region_id IN (SELECT id FROM regions WHERE image_id = ?1)",
    )?
    .execute(params![image.0, in_force.embed.map(|r| r.0)])?;
    Ok(())
}

fn begin_anew(tx: &Transaction<'_>, finished: &Finished, in_force: InForce) -> Result<bool, Error> {
    let (detect, embed) = if in_force.detect.is_some() { (Some("pending"), None) } else { (None, Some("pending")) };
    let rows = tx
        .prepare_cached(
            "UPDATE images SET detect_state = ?1, detect_recipe_id = NULL, embed_state = ?2, embed_recipe_id = NULL,
                    run_id = NULL, token = NULL, done_at = NULL, file_size_bytes = NULL, file_mtime_ns = NULL
             WHERE id = ?3 AND token = ?4",
        )?
        .execute(params![detect, embed, finished.id.0, finished.token.0])?;
    if rows > 0 {
        delete_regions(tx, finished.id)?;
    }
    Ok(rows > 0)
}

/// Regions and what they were selected from.
pub(super) fn delete_regions(tx: &Transaction<'_>, image: ImageId) -> Result<(), Error> {
    tx.prepare_cached("DELETE FROM regions WHERE image_id = ?1")?.execute([image.0])?;
    tx.prepare_cached("DELETE FROM candidates WHERE image_id = ?1")?.execute([image.0])?;
    Ok(())
}

fn store_raw(tx: &Transaction<'_>, image: ImageId, raw: &Raw, recipe: RecipeId) -> Result<(), Error> {
    let body = serde_json::to_string(raw.vocabulary.as_ref())
        .map_err(|e| Error::System(format!("labels cannot be stored: {e}")))?;
    tx.prepare_cached("INSERT INTO vocabularies (body) VALUES (?1) ON CONFLICT DO NOTHING")?.execute([&body])?;
    tx.prepare_cached(
        "INSERT OR REPLACE INTO candidates (image_id, recipe_id, vocabulary_id, count, packed)
         VALUES (?1, ?2, (SELECT id FROM vocabularies WHERE body = ?3), ?4, ?5)",
    )?
    .execute(params![image.0, recipe.0, body, raw.kept.count, raw.kept.packed])?;
    Ok(())
}

fn store_facts(tx: &Transaction<'_>, id: ImageId, facts: &ImageFacts) -> Result<(), Error> {
    tx.prepare_cached(
        "UPDATE images SET file_size_bytes = ?2, file_mtime_ns = ?3, format = ?4, width_px = ?5, height_px = ?6,
                stored_width_px = ?7, stored_height_px = ?8, orientation = ?9, orientation_source = ?10,
                components = ?11, truncated = ?12
         WHERE id = ?1",
    )?
    .execute(params![
        id.0,
        facts.stamp.size_bytes,
        facts.stamp.mtime_ns,
        facts.format,
        facts.upright.width_px,
        facts.upright.height_px,
        facts.stored.width_px,
        facts.stored.height_px,
        facts.orientation.exif(),
        facts.orientation_source,
        facts.components,
        facts.truncated,
    ])?;
    Ok(())
}

/// What replacing did, in regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) new: u64,
    pub(super) gone: u64,
    pub(super) kept: u64,
}

/// Replaces by difference: a region that did not change keeps its id and its vectors.
pub(super) fn replace_regions(
    tx: &Transaction<'_>,
    image: ImageId,
    regions: &[Region],
    recipe: Option<RecipeId>,
) -> Result<Difference, Error> {
    let mut old = stored_regions(tx, image)?;
    let mut difference = Difference::default();
    for region in regions {
        let same = old.iter().position(|(_, o)| o.label == region.label && same_box(o, region));
        let id = match same {
            Some(place) => {
                difference.kept += 1;
                let (id, was) = old.swap_remove(place);
                if was.score != region.score || (region.crop.is_some() && was.crop != region.crop) {
                    tx.prepare_cached("UPDATE regions SET score = ?2, crop = ifnull(?3, crop) WHERE id = ?1")?
                        .execute(params![id, region.score, region.crop])?;
                }
                id
            }
            None => {
                difference.new += 1;
                tx.prepare_cached(
                    "INSERT INTO regions (image_id, label, score, x0, y0, x1, y1, crop) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                )?
                .execute(params![
                    image.0,
                    region.label,
                    region.score,
                    region.bbox.x0,
                    region.bbox.y0,
                    region.bbox.x1,
                    region.bbox.y1,
                    region.crop,
                ])?;
                tx.last_insert_rowid()
            }
        };
        if let (Some(recipe), Some(vector)) = (recipe, &region.vector) {
            store_vector(tx, id, recipe, vector)?;
        }
    }
    for (id, _) in old {
        difference.gone += 1;
        tx.prepare_cached("DELETE FROM regions WHERE id = ?1")?.execute([id])?;
    }
    Ok(difference)
}

fn same_box(a: &Region, b: &Region) -> bool {
    let (a, b) = (a.bbox, b.bbox);
    [a.x0 - b.x0, a.y0 - b.y0, a.x1 - b.x1, a.y1 - b.y1].iter().all(|d| d.abs() <= SAME_BOX_PX)
}

fn store_vector(tx: &Transaction<'_>, region: i64, recipe: RecipeId, vector: &[f32]) -> Result<(), Error> {
    let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
    tx.prepare_cached(
        "INSERT INTO embeddings (region_id, recipe_id, dim, dtype, vector) VALUES (?1, ?2, ?3, 'f32', ?4)
         ON CONFLICT DO UPDATE SET dim = excluded.dim, dtype = excluded.dtype, vector = excluded.vector",
    )?
    .execute(params![region, recipe.0, vector.len() as i64, bytes])?;
    Ok(())
}
