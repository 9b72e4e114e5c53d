//! Makes rows due, one chunk at a time, from the lowest id to the highest. The condition that a run is restricted by is
//! asked in between, while the database is free for others.

use std::sync::Arc;
use std::time::Duration;

use super::{Job, lock};
use crate::db::scope::{Scope, Span};
use crate::error::Error;

/// Between two chunks. The lock on the database is not fair: without this who waits for it, to commit or to say that the
/// run lives, could wait for the whole sweep.
const BREATH: Duration = Duration::from_millis(1);

/// Where it has come to.
pub(super) struct Sweep<'a> {
    job: &'a Job<'a>,
    scope: Option<Arc<Scope>>,
    /// All rows up to this one stand where they belong.
    settled_to: i64,
}

impl<'a> Sweep<'a> {
    /// Before the first row.
    pub(super) fn new(job: &'a Job<'a>) -> Self {
        Self { job, scope: lock(job.db).scope(), settled_to: Span::ALL.after }
    }

    /// Back before the first row.
    pub(super) fn begin_again(&mut self) {
        self.settled_to = Span::ALL.after;
    }

    /// The last id that is settled; the highest there can be when it is through.
    pub(super) fn settled_to(&self) -> i64 {
        self.settled_to
    }

    /// True when all rows are settled.
    pub(super) fn is_through(&self) -> bool {
        self.settled_to == Span::ALL.to
    }

    /// Settles the next chunk. Returns how many rows were not where they belong.
    ///
    /// # Errors
    /// Those of the database and of the condition.
    pub(super) fn step(&mut self) -> Result<usize, Error> {
        if self.is_through() {
            return Ok(0);
        }
        let Job { db, in_force, stale, .. } = *self.job;
        let Some(mut chunk) = lock(db).misplaced(self.settled_to, in_force, stale)? else {
            self.settled_to = Span::ALL.to;
            return Ok(0);
        };
        if let Some(scope) = &self.scope {
            chunk.ids = scope.among(&chunk.ids)?;
        }
        if !chunk.ids.is_empty() {
            lock(db).settle(&chunk)?;
        }
        self.settled_to = chunk.last;
        std::thread::sleep(BREATH);
        Ok(chunk.ids.len())
    }

    /// Settles all that is left. Ends early where a stop is asked for.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        while !self.is_through() && !self.job.stop.is_asked() {
            self.step()?;
        }
        Ok(())
    }
}
