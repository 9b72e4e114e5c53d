//! Recipes: storing them, and putting them in force.

use std::path::{Path, PathBuf};

use rusqlite::{OptionalExtension, Transaction, params};

use super::due::{InForce, RecipeId};
use super::{Db, SqlPath, now, path_to_sql};
use crate::error::Error;
use crate::row::Stage;

/// A recipe as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct StoredRecipe<'a> {
    /// Canonical JSON; two recipes are the same when these are.
    pub body: &'a str,
    /// Digest of the model.
    pub model_digest: &'a str,
    /// Where the model was.
    pub model_path: &'a Path,
}

impl Db {
    /// The recipes in force.
    ///
    /// # Errors
    /// Those of the database.
    pub fn in_force(&self) -> Result<InForce, Error> {
        let one = |stage: Stage| {
            self.conn
                .query_row("SELECT id FROM recipes WHERE stage = ?1 AND in_force = 1", [stage.word()], |r| {
                    r.get(0).map(RecipeId)
                })
                .optional()
        };
        Ok(InForce { detect: one(Stage::Detect)?, embed: one(Stage::Embed)? })
    }

    /// The body of a stage's recipe in force.
    ///
    /// # Errors
    /// Those of the database.
    pub fn recipe_in_force(&self, stage: Stage) -> Result<Option<String>, Error> {
        let sql = "SELECT body FROM recipes WHERE stage = ?1 AND in_force = 1";
        Ok(self.conn.query_row(sql, [stage.word()], |r| r.get(0)).optional()?)
    }

    /// All recipes of a stage that were ever in force.
    ///
    /// # Errors
    /// Those of the database.
    pub fn recipes(&self, stage: Stage) -> Result<Vec<(RecipeId, String)>, Error> {
        let mut statement = self.conn.prepare("SELECT id, body FROM recipes WHERE stage = ?1 ORDER BY id")?;
        let rows = statement.query_map([stage.word()], |r| Ok((RecipeId(r.get(0)?), r.get(1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Digest and place of the model of a stage's recipe in force.
    ///
    /// # Errors
    /// Those of the database.
    pub fn model_in_force(&self, stage: Stage) -> Result<Option<(String, PathBuf)>, Error> {
        let sql = "SELECT m.digest, m.path FROM recipes r JOIN models m ON m.id = r.model_id
                   WHERE r.stage = ?1 AND r.in_force = 1";
        let row = self.conn.query_row(sql, [stage.word()], |r| Ok((r.get(0)?, r.get::<_, SqlPath>(1)?.0)));
        Ok(row.optional()?)
    }

    /// The ids that these recipes have, or 0 for one that was never used here. Writes nothing.
    ///
    /// # Errors
    /// Those of the database.
    pub fn look_up(&self, detect: Option<&str>, embed: Option<&str>) -> Result<InForce, Error> {
        let one = |stage: Stage, body: Option<&str>| -> Result<Option<RecipeId>, Error> {
            let Some(body) = body else { return Ok(None) };
            let id = self
                .conn
                .query_row("SELECT id FROM recipes WHERE stage = ?1 AND body = ?2", [stage.word(), body], |r| r.get(0))
                .optional()?;
            Ok(Some(RecipeId(id.unwrap_or(0))))
        };
        Ok(InForce { detect: one(Stage::Detect, detect)?, embed: one(Stage::Embed, embed)? })
    }
}

/// Stores these recipes where they are new, and makes them, and no others, the ones in force.
pub(super) fn put_in_force(
    tx: &Transaction<'_>,
    detect: Option<StoredRecipe<'_>>,
    embed: Option<StoredRecipe<'_>>,
) -> Result<InForce, Error> {
    tx.execute("UPDATE recipes SET in_force = 0 WHERE in_force = 1", [])?;
    let detect = detect.map(|r| store(tx, Stage::Detect, r)).transpose()?;
    let embed = embed.map(|r| store(tx, Stage::Embed, r)).transpose()?;
    Ok(InForce { detect, embed })
}

fn store(tx: &Transaction<'_>, stage: Stage, recipe: StoredRecipe<'_>) -> Result<RecipeId, Error> {
    tx.execute(
        "INSERT INTO models (digest, path, first_at) VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET path = excluded.path",
        params![recipe.model_digest, path_to_sql(recipe.model_path), now()],
    )?;
    let id = tx.query_row(
        "INSERT INTO recipes (stage, body, model_id, in_force, first_at)
         VALUES (?1, ?2, (SELECT id FROM models WHERE digest = ?3), 1, ?4)
         ON CONFLICT (stage, body) DO UPDATE SET in_force = 1 RETURNING id",
        params![stage.word(), recipe.body, recipe.model_digest, now()],
        |r| r.get(0),
    )?;
    Ok(RecipeId(id))
}
