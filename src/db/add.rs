//! Bringing rows in. The same row twice is one row.

use rusqlite::params;

use super::{Db, path_to_sql};
use crate::error::Error;
use crate::row::NewRow;

/// What `add` did with the rows it was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// Rows that were not there.
    pub new: u64,
    /// Rows that were there, now pending again: their prompt, path or file changed.
    pub changed: u64,
    /// Rows that were there and stay as they are.
    pub known: u64,
}

/// A row changes when what decides its results does: prompt, path (of a keyed row), or the file itself
/// where the source stat-ed it and a decode has recorded it. Only then its states are touched. A source that
/// says nothing of prompt or tag changes neither.
const UPSERT: &str = "
    INSERT INTO images (path, key, prompt, tag, detect_state, embed_state)
    VALUES (:path, :key, :prompt, :tag, :detect, :embed)
    ON CONFLICT DO UPDATE SET
        path = excluded.path, prompt = ifnull(excluded.prompt, prompt), tag = ifnull(excluded.tag, tag),
        detect_state = excluded.detect_state, detect_recipe_id = NULL, detect_attempts = 0,
        detect_code = NULL, detect_message = NULL,
        embed_state = excluded.embed_state, embed_recipe_id = NULL, embed_attempts = 0,
        embed_code = NULL, embed_message = NULL,
        run_id = NULL, token = NULL, done_at = NULL
    WHERE (excluded.prompt IS NOT NULL AND prompt IS NOT excluded.prompt) OR path IS NOT excluded.path
       OR (:size IS NOT NULL AND file_size_bytes IS NOT NULL
           AND (file_size_bytes IS NOT :size OR file_mtime_ns IS NOT :mtime))";

impl Db {
    /// Runs `body` with a sink for rows, all in one transaction: after an error nothing is added.
    ///
    /// # Errors
    /// Those of `body`, and of the database.
    pub fn add(
        &mut self,
        body: impl FnOnce(&mut dyn FnMut(NewRow) -> Result<(), Error>) -> Result<(), Error>,
    ) -> Result<Added, Error> {
        let tx = self.write()?;
        let mut added = Added::default();
        {
            // The first stage of the recipes in force; `detect` where nothing has run yet.
            let embed_only: bool = tx.query_row(
                "SELECT NOT EXISTS (SELECT 1 FROM recipes WHERE stage = 'detect' AND in_force = 1)
                    AND EXISTS (SELECT 1 FROM recipes WHERE stage = 'embed' AND in_force = 1)",
                [],
                |r| r.get(0),
            )?;
            let (detect, embed) = if embed_only { (None, Some("pending")) } else { (Some("pending"), None) };
            let mut upsert = tx.prepare(UPSERT)?;
            let mut tag_only = tx.prepare(
                "UPDATE images SET tag = ?2 WHERE tag IS NOT ?2 AND CASE WHEN ?3 IS NULL THEN key IS NULL AND path = ?1 ELSE key = ?3 END",
            )?;
            let mut newest: i64 = tx.query_row("SELECT ifnull(max(id), 0) FROM images", [], |r| r.get(0))?;
            body(&mut |row: NewRow| {
                let path = path_to_sql(&row.path);
                let (size, mtime) = row.stamp.map_or((None, None), |s| (Some(s.size_bytes), Some(s.mtime_ns)));
                let touched = upsert.execute(rusqlite::named_params! {
                    ":path": path, ":key": row.key, ":prompt": row.prompt, ":tag": row.tag,
                    ":detect": detect, ":embed": embed, ":size": size, ":mtime": mtime,
                })?;
                let id = tx.last_insert_rowid();
                if touched == 0 {
                    added.known += 1;
                    if row.tag.is_some() {
                        tag_only.execute(params![path_to_sql(&row.path), row.tag, row.key])?;
                    }
                } else if id > newest {
                    newest = id;
                    added.new += 1;
                } else {
                    added.changed += 1;
                }
                Ok(())
            })?;
        }
        tx.commit()?;
        Ok(added)
    }
}
