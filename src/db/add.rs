//! Bringing rows in. The same row twice is one row.

use rusqlite::{Transaction, named_params, params};

use super::{Db, path_to_sql};
use crate::error::Error;
use crate::fault;
use crate::row::{NewRow, State};

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

/// Not one statement with `DO UPDATE`: that would cost every new row what only known rows need.
const INSERT: &str = "
    INSERT INTO images (path, key, prompt, tag, detect_state, embed_state) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
    ON CONFLICT DO NOTHING";

/// A known row changes when what decides its results does: prompt, path (of a keyed row), or the file itself
/// where the source stat-ed it and a decode has recorded it. Only then its states are touched. A source that
/// says nothing of prompt or tag changes neither.
const CHANGE: &str = "
    UPDATE images SET
        path = :path, prompt = ifnull(:prompt, prompt), tag = ifnull(:tag, tag),
        detect_state = :detect, detect_recipe_id = NULL, detect_attempts = 0, detect_code = NULL, detect_message = NULL,
        embed_state = :embed, embed_recipe_id = NULL, embed_attempts = 0, embed_code = NULL, embed_message = NULL,
        run_id = NULL, token = NULL, done_at = NULL
    WHERE id = :id
      AND ((:prompt IS NOT NULL AND prompt IS NOT :prompt) OR path IS NOT :path
           OR (:size IS NOT NULL AND file_size_bytes IS NOT NULL
               AND (file_size_bytes IS NOT :size OR file_mtime_ns IS NOT :mtime)))";

const KNOWN_BY_KEY: &str = "SELECT id FROM images WHERE key = ?1";
const KNOWN_BY_PATH: &str = "SELECT id FROM images WHERE path = ?1 AND key IS NULL";

/// From this many new rows on they are counted in one go.
const BULK_ROWS: u64 = 5_000;

/// Rows written in one transaction. A source may be slow (a pipe, a walk over a network): the write lock is
/// taken only when so many rows are there, and given back at once.
const CHUNK_ROWS: usize = 200_000;

/// The indexes of a million rows fit into this; a run has no use for so much.
const BULK_CACHE_KIB: i64 = 64 << 10;

impl Db {
    /// Runs `body` with a sink for rows. Rows are written in chunks; after an error those of the chunk at hand
    /// are not, and [`Added`] in the second value says what was written before it.
    pub fn add(
        &mut self,
        body: impl FnOnce(&mut dyn FnMut(NewRow) -> Result<(), Error>) -> Result<(), Error>,
    ) -> (Result<(), Error>, Added) {
        if let Err(error) = self.conn.pragma_update(None, "cache_size", -BULK_CACHE_KIB) {
            return (Err(error.into()), Added::default());
        }
        let mut added = Added::default();
        let mut chunk: Vec<NewRow> = Vec::new();
        let result = body(&mut |row| {
            chunk.push(row);
            if chunk.len() >= CHUNK_ROWS { self.add_chunk(&mut chunk, &mut added) } else { Ok(()) }
        });
        let result = result.and_then(|()| self.add_chunk(&mut chunk, &mut added));
        (result, added)
    }

    fn add_chunk(&mut self, chunk: &mut Vec<NewRow>, added: &mut Added) -> Result<(), Error> {
        let tx = self.write()?;
        let mut now = *added;
        let first = first_stage(&tx)?;
        let mut bulk = Bulk::default();
        {
            let mut insert = tx.prepare(INSERT)?;
            for row in &*chunk {
                let path = path_to_sql(&row.path);
                if insert.execute(params![path, row.key, row.prompt, row.tag, first.detect, first.embed])? == 1 {
                    now.new += 1;
                    bulk.inserted(&tx)?;
                } else if change(&tx, row, first)? {
                    now.changed += 1;
                } else {
                    now.known += 1;
                }
            }
        }
        bulk.finish(&tx, first)?;
        tx.commit()?;
        fault::point("add.stored");
        log::info!("{} rows are stored or known", now.new + now.changed + now.known);
        *added = now;
        chunk.clear();
        Ok(())
    }
}

/// Brings a known row up to date; true where that makes it pending again.
fn change(tx: &Transaction<'_>, row: &NewRow, first: FirstStage) -> Result<bool, Error> {
    let path = path_to_sql(&row.path);
    let id: i64 = match &row.key {
        Some(key) => tx.prepare_cached(KNOWN_BY_KEY)?.query_row([key], |r| r.get(0))?,
        None => tx.prepare_cached(KNOWN_BY_PATH)?.query_row([&path], |r| r.get(0))?,
    };
    let (size, mtime) = row.stamp.map_or((None, None), |s| (Some(s.size_bytes), Some(s.mtime_ns)));
    let changed = tx.prepare_cached(CHANGE)?.execute(named_params! {
        ":id": id, ":path": path, ":prompt": row.prompt, ":tag": row.tag,
        ":detect": first.detect, ":embed": first.embed, ":size": size, ":mtime": mtime,
    })?;
    if changed > 0 {
        // Another file or prompt: what was found before, under whatever recipe, is not found in this.
        tx.prepare_cached("DELETE FROM regions WHERE image_id = ?1")?.execute([id])?;
    } else if row.tag.is_some() {
        tx.prepare_cached("UPDATE images SET tag = ?2 WHERE id = ?1 AND tag IS NOT ?2")?
            .execute(params![id, row.tag])?;
    }
    Ok(changed > 0)
}

/// The states of a new row.
#[derive(Clone, Copy)]
struct FirstStage {
    detect: Option<&'static str>,
    embed: Option<&'static str>,
}

/// The first stage of the recipes in force; `detect` where nothing has run yet.
fn first_stage(tx: &Transaction<'_>) -> Result<FirstStage, Error> {
    let embed_only: bool = tx.query_row(
        "SELECT NOT EXISTS (SELECT 1 FROM recipes WHERE stage = 'detect' AND in_force = 1)
            AND EXISTS (SELECT 1 FROM recipes WHERE stage = 'embed' AND in_force = 1)",
        [],
        |r| r.get(0),
    )?;
    let pending = Some(State::Pending.word());
    Ok(if embed_only {
        FirstStage { detect: None, embed: pending }
    } else {
        FirstStage { detect: pending, embed: None }
    })
}

/// Counts new rows without the trigger that counts them one by one, which would cost as much as the rows
/// themselves. All within the transaction of a chunk: nobody ever sees the database without the trigger.
#[derive(Default)]
struct Bulk {
    inserted: u64,
    /// SQL of the trigger, while it is gone.
    trigger: Option<String>,
    counted_by_trigger: u64,
}

impl Bulk {
    fn inserted(&mut self, tx: &Transaction<'_>) -> Result<(), Error> {
        self.inserted += 1;
        if self.inserted == BULK_ROWS {
            let sql = "SELECT sql FROM sqlite_schema WHERE type = 'trigger' AND name = 'images_counted_on_insert'";
            self.trigger = Some(tx.query_row(sql, [], |r| r.get(0))?);
            self.counted_by_trigger = self.inserted;
            tx.execute_batch("DROP TRIGGER images_counted_on_insert")?;
        }
        Ok(())
    }

    fn finish(self, tx: &Transaction<'_>, first: FirstStage) -> Result<(), Error> {
        let Some(trigger) = self.trigger else { return Ok(()) };
        tx.execute(
            "INSERT INTO counts VALUES (ifnull(?1, ''), 0, ifnull(?2, ''), 0, ?3)
             ON CONFLICT DO UPDATE SET images = images + excluded.images",
            params![first.detect, first.embed, self.inserted - self.counted_by_trigger],
        )?;
        // One statement: in a hostile file more may stand behind it.
        tx.execute(&trigger, [])?;
        Ok(())
    }
}
