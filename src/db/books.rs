//! The books: at the end of a run the counters must hold what the run says it did, and what a new count of the rows
//! gives. Cheap, for every run; `verify` looks at everything.

use rusqlite::params;

use super::Db;
use super::claim::RunId;
use super::due::{InForce, Tally, images_where};
use crate::config::Stale;
use crate::error::Error;
use crate::row::State;

/// Rows are counted anew up to this many; that takes a fifth of a second. Of more, the counters are only held against
/// the run.
const RECOUNT_ROWS: u64 = 200_000;

/// The counters before a run.
#[derive(Clone, Debug)]
pub struct Books {
    /// Changes when another connection has written.
    version: i64,
    tally: Tally,
}

/// What a run says it did.
#[derive(Clone, Copy, Debug)]
pub struct Deeds {
    /// The run.
    pub run: RunId,
    /// What it worked with.
    pub in_force: InForce,
    /// Finished rows that it began anew would be counted twice: nothing is said of done and failed then.
    pub stale: Stale,
    /// Rows it claimed, one that it claimed twice counted twice.
    pub claimed: u64,
    /// Claims with an outcome.
    pub ended: u64,
    /// Claims without one, given back.
    pub released: u64,
    /// Rows whose last due stage was done.
    pub done: u64,
    /// Rows that failed.
    pub failed: u64,
}

impl Db {
    /// The counters as they are.
    ///
    /// # Errors
    /// Those of the database.
    pub fn open_books(&self) -> Result<Books, Error> {
        Ok(Books { version: self.data_version()?, tally: self.tally()? })
    }

    /// What does not balance; empty where all does. Rows that others changed meanwhile are nobody's fault.
    ///
    /// # Errors
    /// Those of the database.
    pub fn audit(&self, before: &Books, deeds: &Deeds) -> Result<Vec<String>, Error> {
        let mut wrong = Vec::new();
        let held = self.held_by(deeds.run)?;
        if held > 0 {
            wrong.push(format!("{held} rows are still marked as running"));
        }
        let negative: u64 = self.conn.query_row("SELECT count(*) FROM counts WHERE images < 0", [], |r| r.get(0))?;
        if negative > 0 {
            wrong.push(format!("{negative} counters are below zero"));
        }
        let after = self.tally()?;
        let images: u64 = after.iter().map(|(_, n)| n).sum();
        if images <= RECOUNT_ROWS && negative == 0 {
            let differing = self.miscounts()?.len();
            if differing > 0 {
                wrong.push(format!("{differing} counters differ from a new count of the rows"));
            }
        }
        if before.version == self.data_version()? {
            wrong.extend(deeds.differ_from(&before.tally, &after));
        }
        Ok(wrong)
    }

    fn data_version(&self) -> Result<i64, Error> {
        Ok(self.conn.query_row("PRAGMA data_version", [], |r| r.get(0))?)
    }

    fn held_by(&self, run: RunId) -> Result<u64, Error> {
        let sql = "SELECT (SELECT count(*) FROM images WHERE detect_state = 'running' AND detect_state <> 'done' AND run_id = ?1)
                        + (SELECT count(*) FROM images WHERE embed_state = 'running' AND embed_state <> 'done' AND run_id = ?1)";
        Ok(self.conn.query_row(sql, params![run.0], |r| r.get(0))?)
    }
}

impl Deeds {
    fn differ_from(&self, before: &Tally, after: &Tally) -> Vec<String> {
        let mut wrong = Vec::new();
        if self.claimed != self.ended + self.released {
            wrong.push(format!(
                "{} rows were claimed, {} have an outcome and {} were given back",
                self.claimed, self.ended, self.released
            ));
        }
        if self.stale == Stale::Keep {
            let done = |tally| {
                images_where(tally, |s| {
                    let detected = match (self.in_force.detect, s.detect) {
                        (Some(_), state) => state == Some(State::Done),
                        (None, state) => matches!(state, None | Some(State::Done)),
                    };
                    detected && (self.in_force.embed.is_none() || s.embed == Some(State::Done))
                })
            };
            let failed = |tally| images_where(tally, |s| [s.detect, s.embed].contains(&Some(State::Failed)));
            for (what, said, before, after) in
                [("done", self.done, done(before), done(after)), ("failed", self.failed, failed(before), failed(after))]
            {
                if before.checked_add(said) != Some(after) {
                    wrong.push(format!("{said} rows were {what} by this run, but there are {after} after {before}"));
                }
            }
        }
        wrong
    }
}
