//! Rows that may have killed a worker. While they are suspects no worker claims them beside other rows.

use rusqlite::{Connection, params};

use super::claim::RunId;
use super::{Db, SqlPath, now};
use crate::error::Error;
use crate::row::{ImageId, RowCode};
use std::path::PathBuf;

/// After so many claims a row is a suspect also where the whole machine went down with its worker.
const ATTEMPTS_BEYOND_CHANCE: i64 = 3;

/// Which rows a process claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Claims {
    /// All but suspects.
    #[default]
    Ordinary,
    /// Suspects beside one another: most of them are innocent.
    Together,
    /// Suspects that a child died with, one after the other.
    Alone,
}

/// A row that may have killed a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// The row.
    pub id: ImageId,
    /// Its file.
    pub path: PathBuf,
    /// It is worked on with no other row beside it.
    pub alone: bool,
    /// Child processes that died with it alone in their hands.
    pub deaths: u32,
}

impl Db {
    /// Which rows this process claims from now on.
    pub fn claim_only(&mut self, claims: Claims) {
        self.claims = claims;
    }

    /// Suspects that wait for a child process, in the order of their ids. Those that have ended, or were deleted, are
    /// forgotten.
    ///
    /// # Errors
    /// Those of the database and of the condition.
    pub fn suspects(&mut self) -> Result<Vec<Suspect>, Error> {
        // Mostly there are none, and nobody has to wait for the right to write.
        if !self.conn.query_row("SELECT EXISTS (SELECT 1 FROM suspects)", [], |r| r.get(0))? {
            return Ok(Vec::new());
        }
        let tx = self.write()?;
        tx.execute(
            "DELETE FROM suspects WHERE image_id NOT IN
                 (SELECT id FROM images WHERE detect_state = 'pending' AND detect_state <> 'done'
                  UNION SELECT id FROM images WHERE embed_state = 'pending' AND embed_state <> 'done')
             AND NOT EXISTS (SELECT 1 FROM images WHERE id = image_id AND token IS NOT NULL)",
            [],
        )?;
        tx.commit()?;
        self.waiting_suspects()
    }

    /// The same, and nothing is written.
    pub(super) fn waiting_suspects(&self) -> Result<Vec<Suspect>, Error> {
        let mut waiting = waiting(&self.conn)?;
        if let Some(scope) = &self.scope {
            let ids = scope.among(&waiting.iter().map(|suspect| suspect.id.0).collect::<Vec<_>>())?;
            waiting.retain(|suspect| ids.contains(&suspect.id.0));
        }
        Ok(waiting)
    }

    /// These were in the hands of a child that died: from now on each is worked on alone.
    ///
    /// # Errors
    /// Those of the database.
    pub fn suspect_alone(&mut self, ids: &[ImageId]) -> Result<(), Error> {
        let tx = self.write()?;
        for id in ids {
            tx.execute("UPDATE suspects SET alone = 1 WHERE image_id = ?1", [id.0])?;
        }
        Ok(tx.commit()?)
    }

    /// A child died with this row alone in its hands. Returns how many have.
    ///
    /// # Errors
    /// Those of the database.
    pub fn count_death(&mut self, id: ImageId) -> Result<u32, Error> {
        let tx = self.write()?;
        tx.execute("UPDATE suspects SET alone = 1, deaths = deaths + 1 WHERE image_id = ?1", [id.0])?;
        let deaths =
            tx.query_row("SELECT coalesce(max(deaths), 0) FROM suspects WHERE image_id = ?1", [id.0], |r| r.get(0))?;
        tx.commit()?;
        Ok(deaths)
    }

    /// Sets a row aside: it kills its worker. `retry` brings it back.
    ///
    /// # Errors
    /// Those of the database.
    pub fn quarantine(&mut self, id: ImageId, message: &str) -> Result<(), Error> {
        let tx = self.write()?;
        for sql in [
            "UPDATE images SET detect_state = 'quarantined', detect_code = ?2, detect_message = ?3
             WHERE id = ?1 AND detect_state = 'pending' AND detect_state <> 'done'",
            "UPDATE images SET embed_state = 'quarantined', embed_code = ?2, embed_message = ?3
             WHERE id = ?1 AND embed_state = 'pending' AND embed_state <> 'done'",
        ] {
            tx.execute(sql, params![id.0, RowCode::KilledWorker.word(), message])?;
        }
        tx.execute("DELETE FROM suspects WHERE image_id = ?1", [id.0])?;
        Ok(tx.commit()?)
    }
}

fn waiting(conn: &Connection) -> Result<Vec<Suspect>, Error> {
    let mut statement = conn.prepare_cached(
        "SELECT image_id, path, alone, deaths FROM suspects JOIN images ON images.id = image_id
         WHERE detect_state = 'pending' OR embed_state = 'pending' ORDER BY image_id",
    )?;
    let rows = statement.query_map([], |r| {
        Ok(Suspect { id: ImageId(r.get(0)?), path: r.get::<_, SqlPath>(1)?.0, alone: r.get(2)?, deaths: r.get(3)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Remembers the rows that a dead run holds, before they are given back. Where the machine itself went down, only those
/// that were claimed again and again.
pub(super) fn remember(conn: &Connection, run: RunId, machine_went_down: bool) -> Result<(), Error> {
    let attempts_least = if machine_went_down { ATTEMPTS_BEYOND_CHANCE } else { 0 };
    conn.execute(
        "INSERT OR IGNORE INTO suspects (image_id, run_id, at)
         SELECT id, ?1, ?2 FROM images
         WHERE run_id = ?1 AND id IN
             (SELECT id FROM images WHERE detect_state = 'running' AND detect_state <> 'done'
              UNION SELECT id FROM images WHERE embed_state = 'running' AND embed_state <> 'done')
           AND max(detect_attempts, embed_attempts) >= ?3",
        params![run.0, now(), attempts_least],
    )?;
    Ok(())
}
