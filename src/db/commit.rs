//! Storing outcomes: results and states together, one transaction per batch, only where the token still
//! matches.

use std::sync::Arc;

use rusqlite::{OptionalExtension, Transaction, params};

use super::claim::stored_regions;
use super::due::{InForce, RecipeId};
use super::{Db, now};
use crate::candidate::Vocabulary;
use crate::error::Error;
use crate::fault;
use crate::geometry::BoxPx;
use crate::row::{FileStamp, Finished, ImageFacts, ImageId, Outcome, Raw, Region, RowError, Stage, State};

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
        fault::point("commit.begun");
        let tx = self.write()?;
        let mut committed = Committed::default();
        let mut vocabularies = Vocabularies::default();
        for finished in batch {
            store(&tx, finished, in_force, &mut vocabularies, &mut committed)?;
        }
        fault::point("commit.stored");
        tx.commit()?;
        fault::point("commit.committed");
        Ok(committed)
    }
}

fn store(
    tx: &Transaction<'_>,
    finished: &Finished,
    in_force: InForce,
    vocabularies: &mut Vocabularies,
    committed: &mut Committed,
) -> Result<(), Error> {
    let Some(before) = before(tx, finished)? else {
        committed.dropped += 1;
        return Ok(());
    };
    match &finished.outcome {
        Outcome::Done { raw, regions, embed } => {
            store_done(tx, finished, &before, regions, embed.as_ref(), in_force)?;
            if let (Some(raw), Some(recipe)) = (raw, in_force.detect) {
                store_raw(tx, finished.id, raw, vocabularies.id(tx, &raw.vocabulary)?, recipe)?;
            }
            committed.detected += u64::from(finished.stage == Stage::Detect);
            committed.embedded += u64::from(embed.is_some());
            match embed_state(regions, embed.as_ref(), in_force) {
                Some(State::Failed) => committed.failed += 1,
                Some(State::Pending) => {}
                _ => committed.done += 1,
            }
        }
        Outcome::Failed(error) => {
            store_failed(tx, finished, error, in_force)?;
            committed.failed += 1;
            match finished.stage {
                Stage::Detect => committed.detected += 1,
                Stage::Embed => committed.embedded += 1,
            }
        }
        Outcome::FileChanged => {
            begin_anew(tx, finished.id, in_force)?;
            committed.begun_anew += 1;
        }
    }
    Ok(())
}

/// `embed_state` after an outcome. Where `embed` did not run although an embedder is in force, its turn comes now;
/// without regions it has nothing to do.
fn embed_state(regions: &[Region], embed: Option<&Result<(), RowError>>, in_force: InForce) -> Option<State> {
    match (embed, in_force.embed) {
        (Some(Ok(())), _) => Some(State::Done),
        (Some(Err(_)), _) => Some(State::Failed),
        (None, Some(_)) => Some(if regions.is_empty() { State::Done } else { State::Pending }),
        (None, None) => None,
    }
}

/// What an image has from before.
struct Before {
    stamp: Option<FileStamp>,
    has_regions: bool,
}

/// `None` when somebody else has the row meanwhile. It cannot be taken between this and what is stored after it: the
/// transaction began as a writer.
fn before(tx: &Transaction<'_>, finished: &Finished) -> Result<Option<Before>, Error> {
    let row = tx
        .prepare_cached(
            "SELECT file_size_bytes, file_mtime_ns, EXISTS (SELECT 1 FROM regions WHERE image_id = images.id)
             FROM images WHERE id = ?1 AND token = ?2",
        )?
        .query_row([finished.id.0, finished.token.0], |r| {
            let stamp = r.get::<_, Option<i64>>(0)?.zip(r.get::<_, Option<i64>>(1)?);
            let stamp = stamp.map(|(size_bytes, mtime_ns)| FileStamp { size_bytes, mtime_ns });
            Ok(Before { stamp, has_regions: r.get(2)? })
        })
        .optional()?;
    Ok(row)
}

/// One statement for states and facts: each writes the whole row, its queue and its count.
macro_rules! end_of_row {
    ($facts:literal) => {
        concat!(
            "UPDATE images SET
                detect_state = iif(?2, 'done', detect_state), detect_recipe_id = iif(?2, ?3, detect_recipe_id),
                embed_state = ?4, embed_recipe_id = ?5, embed_attempts = embed_attempts + (?2 AND ?4 IS NOT NULL AND ?4 <> 'pending'),
                embed_code = ?6, embed_message = ?7, run_id = NULL, token = NULL, done_at = ?8",
            $facts,
            " WHERE id = ?1"
        )
    };
}
const END: &str = end_of_row!("");
const END_WITH_FACTS: &str = end_of_row!(
    ", file_size_bytes = ?9, file_mtime_ns = ?10, format = ?11, width_px = ?12, height_px = ?13, stored_width_px = ?14,
     stored_height_px = ?15, orientation = ?16, orientation_source = ?17, components = ?18, truncated = ?19,
     decode_denominator = ?20"
);

fn store_done(
    tx: &Transaction<'_>,
    finished: &Finished,
    before: &Before,
    regions: &[Region],
    embed: Option<&Result<(), RowError>>,
    in_force: InForce,
) -> Result<(), Error> {
    let detected = finished.stage == Stage::Detect;
    let state = embed_state(regions, embed, in_force);
    let recipe = in_force.embed.filter(|_| state == Some(State::Done));
    let (detect_recipe, embed_recipe) = (in_force.detect.map(|r| r.0), recipe.map(|r| r.0));
    let embed_state = state.map(State::word);
    let error = embed.and_then(|end| end.as_ref().err());
    let (code, message) = (error.map(|e| e.code.word()), error.map(|e| &e.message));
    let done_at = (error.is_none() && state != Some(State::Pending)).then(now);
    let id = finished.id.0;
    match &finished.facts {
        None => tx.prepare_cached(END)?.execute(params![
            id,
            detected,
            detect_recipe,
            embed_state,
            embed_recipe,
            code,
            message,
            done_at
        ])?,
        Some(facts) => tx.prepare_cached(END_WITH_FACTS)?.execute(params![
            id,
            detected,
            detect_recipe,
            embed_state,
            embed_recipe,
            code,
            message,
            done_at,
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
            facts.scale.denominator(),
        ])?,
    };
    let is_other_file = finished.facts.as_ref().is_some_and(|f| before.stamp.is_some_and(|seen| seen != f.stamp));
    if is_other_file {
        // Vectors of other recipes would stay beside boxes that happen to be equal.
        delete_regions(tx, finished.id)?;
    }
    if error.is_some() {
        forget_vectors(tx, finished.id, in_force)?;
    }
    if before.has_regions && !is_other_file {
        replace_regions(tx, finished.id, regions, recipe)?;
    } else {
        for region in regions {
            let id = insert_region(tx, finished.id, region)?;
            store_vector(tx, id, region, recipe)?;
        }
    }
    Ok(())
}

fn store_failed(tx: &Transaction<'_>, finished: &Finished, error: &RowError, in_force: InForce) -> Result<(), Error> {
    let sql = match finished.stage {
        Stage::Detect => {
            "UPDATE images SET detect_state = 'failed', detect_recipe_id = NULL, detect_code = ?2, detect_message = ?3,
                    run_id = NULL, token = NULL, done_at = NULL WHERE id = ?1"
        }
        Stage::Embed => {
            "UPDATE images SET embed_state = 'failed', embed_recipe_id = NULL, embed_code = ?2, embed_message = ?3,
                    run_id = NULL, token = NULL, done_at = NULL WHERE id = ?1"
        }
    };
    tx.prepare_cached(sql)?.execute(params![finished.id.0, error.code.word(), error.message])?;
    if finished.stage == Stage::Detect {
        // What an earlier recipe or file left must not stand as this row's result.
        delete_regions(tx, finished.id)?;
    }
    forget_vectors(tx, finished.id, in_force)?;
    match &finished.facts {
        Some(facts) => store_facts(tx, finished.id, facts),
        None => {
            // The file as it failed: when it is another, `add` and `retry --changed` take it up again.
            let (size_bytes, mtime_ns) = (finished.stamp.map(|s| s.size_bytes), finished.stamp.map(|s| s.mtime_ns));
            tx.prepare_cached("UPDATE images SET file_size_bytes = ?2, file_mtime_ns = ?3 WHERE id = ?1")?
                .execute(params![finished.id.0, size_bytes, mtime_ns])?;
            Ok(())
        }
    }
}

/// An embedding that failed must not leave the vector of an earlier file or try standing.
fn forget_vectors(tx: &Transaction<'_>, image: ImageId, in_force: InForce) -> Result<(), Error> {
    tx.prepare_cached(
        "DELETE FROM embeddings WHERE recipe_id = ?2 AND region_id IN (SELECT id FROM regions WHERE image_id = ?1)",
    )?
    .execute(params![image.0, in_force.embed.map(|r| r.0)])?;
    Ok(())
}

fn begin_anew(tx: &Transaction<'_>, image: ImageId, in_force: InForce) -> Result<(), Error> {
    let (detect, embed) = if in_force.detect.is_some() { (Some("pending"), None) } else { (None, Some("pending")) };
    tx.prepare_cached(
        "UPDATE images SET detect_state = ?1, detect_recipe_id = NULL, embed_state = ?2, embed_recipe_id = NULL,
                run_id = NULL, token = NULL, done_at = NULL, file_size_bytes = NULL, file_mtime_ns = NULL
         WHERE id = ?3",
    )?
    .execute(params![detect, embed, image.0])?;
    delete_regions(tx, image)
}

/// Regions and what they were selected from.
pub(super) fn delete_regions(tx: &Transaction<'_>, image: ImageId) -> Result<(), Error> {
    tx.prepare_cached("DELETE FROM regions WHERE image_id = ?1")?.execute([image.0])?;
    tx.prepare_cached("DELETE FROM candidates WHERE image_id = ?1")?.execute([image.0])?;
    Ok(())
}

fn store_raw(tx: &Transaction<'_>, image: ImageId, raw: &Raw, vocabulary: i64, recipe: RecipeId) -> Result<(), Error> {
    tx.prepare_cached(
        "INSERT OR REPLACE INTO candidates (image_id, recipe_id, vocabulary_id, count, packed)
         VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![image.0, recipe.0, vocabulary, raw.kept.count, raw.kept.packed])?;
    Ok(())
}

/// The vocabularies of a batch, most often one: written as JSON and looked up once, not for every image.
#[derive(Default)]
struct Vocabularies(Vec<(Arc<Vocabulary>, i64)>);

impl Vocabularies {
    fn id(&mut self, tx: &Transaction<'_>, vocabulary: &Arc<Vocabulary>) -> Result<i64, Error> {
        if let Some((_, id)) = self.0.iter().find(|(known, _)| Arc::ptr_eq(known, vocabulary)) {
            return Ok(*id);
        }
        let body = serde_json::to_string(vocabulary.as_ref())
            .map_err(|e| Error::System(format!("labels cannot be stored: {e}")))?;
        tx.prepare_cached("INSERT INTO vocabularies (body) VALUES (?1) ON CONFLICT DO NOTHING")?.execute([&body])?;
        let id = tx.prepare_cached("SELECT id FROM vocabularies WHERE body = ?1")?.query_row([&body], |r| r.get(0))?;
        self.0.push((Arc::clone(vocabulary), id));
        Ok(id)
    }
}

fn store_facts(tx: &Transaction<'_>, id: ImageId, facts: &ImageFacts) -> Result<(), Error> {
    tx.prepare_cached(
        "UPDATE images SET file_size_bytes = ?2, file_mtime_ns = ?3, format = ?4, width_px = ?5, height_px = ?6,
                stored_width_px = ?7, stored_height_px = ?8, orientation = ?9, orientation_source = ?10,
                components = ?11, truncated = ?12, decode_denominator = ?13
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
        facts.scale.denominator(),
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
                insert_region(tx, image, region)?
            }
        };
        store_vector(tx, id, region, recipe)?;
    }
    for (id, _) in old {
        difference.gone += 1;
        tx.prepare_cached("DELETE FROM regions WHERE id = ?1")?.execute([id])?;
    }
    Ok(difference)
}

/// Stores a region that was not there. Returns its id.
fn insert_region(tx: &Transaction<'_>, image: ImageId, region: &Region) -> Result<i64, Error> {
    let BoxPx { x0, y0, x1, y1 } = region.bbox;
    tx.prepare_cached(
        "INSERT INTO regions (image_id, label, score, x0, y0, x1, y1, crop) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?
    .execute(params![image.0, region.label, region.score, x0, y0, x1, y1, region.crop])?;
    Ok(tx.last_insert_rowid())
}

fn same_box(a: &Region, b: &Region) -> bool {
    let (a, b) = (a.bbox, b.bbox);
    [a.x0 - b.x0, a.y0 - b.y0, a.x1 - b.x1, a.y1 - b.y1].iter().all(|d| d.abs() <= SAME_BOX_PX)
}

/// Stores the vector of the region with that id under `recipe`, where it has one.
fn store_vector(tx: &Transaction<'_>, id: i64, region: &Region, recipe: Option<RecipeId>) -> Result<(), Error> {
    let (Some(recipe), Some(vector)) = (recipe, &region.vector) else { return Ok(()) };
    tx.prepare_cached(
        "INSERT INTO embeddings (region_id, recipe_id, dim, dtype, vector) VALUES (?1, ?2, ?3, 'f32', ?4)
         ON CONFLICT DO UPDATE SET dim = excluded.dim, dtype = excluded.dtype, vector = excluded.vector",
    )?
    .execute(params![id, recipe.0, vector.len(), packed(vector)])?;
    Ok(())
}

/// As a vector is stored: little-endian f32.
fn packed(vector: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 * vector.len());
    for value in vector {
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes
}
