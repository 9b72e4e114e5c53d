//! Selecting again from stored candidates: no model, no picture. Rows are taken over to the recipe in force in
//! chunks; regions are replaced by difference, so that those that did not change keep their ids and vectors.

use std::collections::HashMap;

use rusqlite::{Row, Transaction, named_params, params};

use super::Db;
use super::commit::{Difference, delete_regions, replace_regions};
use super::due::{InForce, RecipeId, images_where};
use crate::candidate::Vocabulary;
use crate::error::Error;
use crate::geometry::Size;
use crate::row::{ImageId, Region, State};

/// Images looked at in one transaction. Larger chunks hold the write lock longer.
const CHUNK_ROWS: i64 = 2_000;

/// The rows that are taken over: `?2` and `?3` are lists of recipes.
const CARRIED: &str = "i.detect_state = 'done' AND i.token IS NULL
    AND (i.detect_recipe_id IN (SELECT value FROM json_each(?2))
         OR (i.prompt IS NOT NULL AND i.detect_recipe_id IN (SELECT value FROM json_each(?3))))";

/// Vocabularies kept in memory; a table with a prompt of its own in every row has as many as images.
const VOCABULARIES_KEPT: usize = 10_000;

/// Rows whose candidates were made by a recipe that differs from the one in force in nothing that the model sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Recipes that differ in the rule of selection only.
    pub any: Vec<RecipeId>,
    /// Recipes that differ also in the prompt of the run: rows with a prompt of their own do not depend on it.
    pub own_prompt: Vec<RecipeId>,
}

/// What selecting again changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reselected {
    /// Images that were looked at.
    pub images: u64,
    /// Images with another set of regions than before.
    pub changed: u64,
    /// Regions that are new.
    pub new: u64,
    /// Regions that are no more.
    pub gone: u64,
    /// Regions that stayed, with their ids and vectors.
    pub kept: u64,
    /// Images that begin to wait for the embedder.
    pub pending: u64,
    /// Images whose candidates cannot be read: they wait for the detector again.
    pub damaged: u64,
}

/// The rule: packed candidates, what their labels mean, size of the upright image.
pub type Rule<'a> = dyn Fn(&[u8], &Vocabulary, Size) -> Result<Vec<Region>, Error> + 'a;

/// One image's candidates and how it stands.
struct Stored {
    id: i64,
    size: Size,
    vocabulary: i64,
    packed: Vec<u8>,
    embed_state: Option<State>,
    embed_recipe: Option<RecipeId>,
}

/// Selecting again, from one chunk to the next.
pub struct Selector<'a> {
    carried: &'a Carried,
    in_force: InForce,
    rule: &'a Rule<'a>,
    vocabularies: HashMap<i64, Vocabulary>,
    after: i64,
    /// What was done so far.
    pub done: Reselected,
}

impl<'a> Selector<'a> {
    /// Begins with the first row.
    pub fn new(carried: &'a Carried, in_force: InForce, rule: &'a Rule<'a>) -> Self {
        Self { carried, in_force, rule, vocabularies: HashMap::new(), after: i64::MIN, done: Reselected::default() }
    }

    /// The next chunk of the images that this process is about; false when there is none.
    ///
    /// # Errors
    /// Those of the database, of the condition and of the rule; the chunk is as it was then.
    pub fn step(&mut self, db: &mut Db) -> Result<bool, Error> {
        let Some(chunk) = self.next_ids(db)? else { return Ok(false) };
        if chunk.is_empty() {
            return Ok(true);
        }
        let tx = db.write()?;
        let page: Vec<Stored> = tx
            .prepare_cached(&format!(
                "SELECT i.id, ifnull(i.width_px, 0), ifnull(i.height_px, 0), c.vocabulary_id, c.packed, i.embed_state, i.embed_recipe_id
                 FROM images i JOIN candidates c ON c.image_id = i.id
                 WHERE i.id IN (SELECT value FROM json_each(?1)) AND {CARRIED} ORDER BY i.id"
            ))?
            .query_map(
                params![list(chunk), ids(&self.carried.any), ids(&self.carried.own_prompt)],
                Stored::from_row,
            )?
            .collect::<Result<_, _>>()?;
        let mut done = self.done;
        for kept in &page {
            let rule = self.rule;
            let made = self.vocabulary(&tx, kept.vocabulary).and_then(|v| {
                if kept.size.pixels() == 0 {
                    return Err(Error::System("an image of no size".to_owned()));
                }
                rule(&kept.packed, v, kept.size)
            });
            let regions = match made {
                Ok(regions) => regions,
                Err(error @ Error::Database(_)) => return Err(error),
                Err(error) => {
                    log::warn!("image {}: {error}; it goes through the detector again", kept.id);
                    begin_anew(&tx, kept.id)?;
                    done.damaged += 1;
                    continue;
                }
            };
            let difference = replace_regions(&tx, ImageId(kept.id), &regions, None)?;
            done.images += 1;
            done.changed += u64::from(difference.new + difference.gone > 0);
            done.new += difference.new;
            done.gone += difference.gone;
            done.kept += difference.kept;
            done.pending += u64::from(take_over(&tx, kept, difference, self.in_force)?);
        }
        tx.commit()?;
        self.done = done;
        Ok(true)
    }

    /// Looked for before the transaction, in which nobody should wait for a condition.
    fn next_ids(&mut self, db: &Db) -> Result<Option<Vec<i64>>, Error> {
        let chunk: Vec<i64> = db
            .conn
            .prepare_cached(&format!(
                "SELECT i.id FROM images i JOIN candidates c ON c.image_id = i.id
                 WHERE i.id > ?1 AND {CARRIED} ORDER BY i.id LIMIT ?4"
            ))?
            .query_map(params![self.after, ids(&self.carried.any), ids(&self.carried.own_prompt), CHUNK_ROWS], |r| {
                r.get(0)
            })?
            .collect::<Result<_, _>>()?;
        let Some(last) = chunk.last() else { return Ok(None) };
        self.after = *last;
        let chunk = match &db.scope {
            Some(scope) => scope.among(&chunk)?,
            None => chunk,
        };
        Ok(Some(chunk))
    }

    fn vocabulary(&mut self, tx: &Transaction<'_>, id: i64) -> Result<&Vocabulary, Error> {
        if self.vocabularies.len() >= VOCABULARIES_KEPT && !self.vocabularies.contains_key(&id) {
            self.vocabularies.clear();
        }
        match self.vocabularies.entry(id) {
            std::collections::hash_map::Entry::Occupied(known) => Ok(known.into_mut()),
            std::collections::hash_map::Entry::Vacant(place) => {
                let body: String =
                    tx.prepare_cached("SELECT body FROM vocabularies WHERE id = ?1")?.query_row([id], |r| r.get(0))?;
                let read = serde_json::from_str(&body);
                Ok(place
                    .insert(read.map_err(|e| Error::System(format!("the stored labels {id} cannot be read: {e}")))?))
            }
        }
    }
}

impl Stored {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get(0)?,
            size: Size::new(row.get(1)?, row.get(2)?),
            vocabulary: row.get(3)?,
            packed: row.get(4)?,
            embed_state: row.get::<_, Option<String>>(5)?.and_then(|word| State::from_word(&word)),
            embed_recipe: row.get::<_, Option<i64>>(6)?.map(RecipeId),
        })
    }
}

/// As JSON.
fn ids(recipes: &[RecipeId]) -> String {
    list(recipes.iter().map(|recipe| recipe.0).collect())
}

fn list(ids: Vec<i64>) -> String {
    serde_json::json!(ids).to_string()
}

/// The row belongs to the recipe in force; it waits for the embedder where a region has no vector yet. True where
/// it begins to wait.
fn take_over(tx: &Transaction<'_>, kept: &Stored, difference: Difference, in_force: InForce) -> Result<bool, Error> {
    let regions_changed = difference.new + difference.gone > 0;
    let (state, recipe) = match in_force.embed {
        Some(recipe) if regions_changed || kept.embed_state.is_none() => {
            if lacks_vectors(tx, kept.id, recipe)? {
                (Some(State::Pending), None)
            } else {
                (Some(State::Done), Some(recipe))
            }
        }
        None if difference.new > 0 => (None, None),
        _ => (kept.embed_state, kept.embed_recipe),
    };
    let word = state.map(State::word);
    tx.prepare_cached(
        "UPDATE images SET detect_recipe_id = :detect, embed_state = :state, embed_recipe_id = :recipe,
                embed_attempts = iif(:changed, 0, embed_attempts),
                embed_code = iif(:changed, NULL, embed_code), embed_message = iif(:changed, NULL, embed_message)
         WHERE id = :id",
    )?
    .execute(named_params! {
        ":detect": in_force.detect.map(|r| r.0),
        ":state": word,
        ":recipe": recipe.map(|r| r.0),
        ":changed": state != kept.embed_state,
        ":id": kept.id,
    })?;
    Ok(state == Some(State::Pending) && kept.embed_state != state)
}

fn begin_anew(tx: &Transaction<'_>, image: i64) -> Result<(), Error> {
    delete_regions(tx, ImageId(image))?;
    tx.prepare_cached(
        "UPDATE images SET detect_state = 'pending', detect_recipe_id = NULL, detect_attempts = 0, embed_state = NULL,
                embed_recipe_id = NULL, embed_code = NULL, embed_message = NULL WHERE id = ?1",
    )?
    .execute([image])?;
    Ok(())
}

fn lacks_vectors(tx: &Transaction<'_>, image: i64, recipe: RecipeId) -> Result<bool, Error> {
    Ok(tx
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM regions r WHERE r.image_id = ?1 AND NOT EXISTS
                (SELECT 1 FROM embeddings e WHERE e.region_id = r.id AND e.recipe_id = ?2))",
        )?
        .query_row(params![image, recipe.0], |r| r.get(0))?)
}

impl Db {
    /// How many finished rows `carried` speaks of, of those that this process is about.
    ///
    /// # Errors
    /// Those of the database and of the condition.
    pub fn count_carried(&self, carried: &Carried) -> Result<u64, Error> {
        let tally = self.tally()?;
        let of = |recipes: &[RecipeId]| {
            images_where(&tally, |standing| {
                standing.detect == Some(State::Done) && standing.detect_recipe.is_some_and(|r| recipes.contains(&r))
            })
        };
        let (any, own_prompt) = (of(&carried.any), of(&carried.own_prompt));
        if let Some(scope) = self.scope.as_ref().filter(|_| any + own_prompt > 0) {
            let numbers = |recipes: &[RecipeId]| recipes.iter().map(|r| r.0.to_string()).collect::<Vec<_>>().join(", ");
            let which = format!(
                "AND detect_state = 'done' AND (detect_recipe_id IN ({}) OR (prompt IS NOT NULL AND detect_recipe_id IN ({})))",
                numbers(&carried.any),
                numbers(&carried.own_prompt)
            );
            return Ok(scope.over_all("count(*)", &which, |r| r.get::<_, u64>(0))?.iter().sum());
        }
        if own_prompt == 0 {
            return Ok(any);
        }
        let with_prompt: u64 = self.conn.query_row(
            "SELECT count(*) FROM images WHERE prompt IS NOT NULL AND detect_state = 'done'
             AND detect_recipe_id IN (SELECT value FROM json_each(?1))",
            [ids(&carried.own_prompt)],
            |r| r.get(0),
        )?;
        Ok(any + with_prompt)
    }

    /// Images without a prompt of their own that a run with `detect` will give to the detector. With `redo` also the
    /// finished ones of other recipes.
    ///
    /// # Errors
    /// Those of the database.
    pub fn due_without_prompt(&self, detect: RecipeId, redo: bool) -> Result<u64, Error> {
        let (detect, redo) = (detect.0, i32::from(redo));
        let due = format!(
            "prompt IS NULL AND
                (detect_state = 'pending' OR (detect_state IS NULL AND ({redo} OR embed_state IS NULL OR embed_state = 'pending'))
                 OR ({redo} AND detect_state = 'done' AND detect_recipe_id IS NOT {detect}))"
        );
        if let Some(scope) = &self.scope {
            return Ok(scope.over_all("count(*)", &format!("AND {due}"), |r| r.get::<_, u64>(0))?.iter().sum());
        }
        Ok(self.conn.query_row(&format!("SELECT count(*) FROM images WHERE {due}"), [], |r| r.get(0))?)
    }

    /// Median and largest number of bytes of an image's candidates, and how many images have some.
    ///
    /// # Errors
    /// Those of the database.
    pub fn candidate_bytes(&self) -> Result<(u64, u64, u64), Error> {
        Ok(self.conn.query_row(
            "SELECT ifnull((SELECT length(packed) FROM candidates ORDER BY length(packed)
                            LIMIT 1 OFFSET (SELECT count(*) / 2 FROM candidates)), 0),
                    (SELECT ifnull(max(length(packed)), 0) FROM candidates), (SELECT count(*) FROM candidates)",
            [],
            |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?)),
        )?)
    }
}
