//! `read`: claims pages of pending rows until there are none. Owns no row longer than it takes to hand it on.
//!
//! It goes over the rows in rounds, from the lowest id to the highest, in steps after each of which it may stop: rows are
//! made due chunk by chunk, and claimed up to where they are. Rows that become pending behind it are found in the next
//! round. The last is one that began when nobody had a row in hand any more, and found none.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::progress::{Progress, Step, Wait};
use super::sweep::Sweep;
use super::{Job, lock};
use crate::db::claim::{Among, RunId, Tokens};
use crate::db::scope::{Scope, Span};
use crate::error::Error;
use crate::row::{Claim, Stage};

/// Rows claimed at once. A crash makes at most this many rows, and those in flight, be done again.
const PAGE_ROWS: usize = 256;

/// How long to wait for rows in flight before looking for pending ones again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long to wait for rows in the hands of other workers before looking again.
const LOOK_AT_OTHERS: Duration = Duration::from_millis(500);

/// While rows are in somebody's hands, the next round begins after so many times what finding nothing took in the last
/// one: with a condition that is the time that it takes to ask it for every row.
const REST_TIMES: u32 = 10;

/// Hands claims to `decode` until nothing is pending, `limit` is reached or a stop is asked for.
pub(super) fn run(job: &Job<'_>, claimed: &Sender<Claim>) -> Result<(), Error> {
    let mut reader = Reader::new(job);
    while !job.stop.is_asked() && reader.left > 0 {
        let page = job.progress.timed(Step::Read, || reader.next_page())?;
        Progress::add(&job.progress.claimed, page.len() as u64);
        job.progress.draining.store(page.is_empty(), Ordering::Relaxed);
        if page.is_empty() && !reader.wait_for_more()? {
            return Ok(());
        }
        for claim in page {
            // The rest of the page is given back at the end.
            if job.stop.is_asked() || !job.progress.send(Step::Read, Step::Decode, claimed, claim) {
                return Ok(());
            }
        }
        while job.one_by_one && job.progress.in_flight() > 0 && !job.stop.is_asked() {
            job.progress.draining.store(true, Ordering::Relaxed);
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    Ok(())
}

struct Reader<'a> {
    job: &'a Job<'a>,
    tokens: Tokens,
    sweep: Sweep<'a>,
    /// What ordinary rows are asked before they are claimed; suspects were asked already.
    scope: Option<Arc<Scope>>,
    /// Where the round has come to, per stage.
    cursors: [i64; 2],
    /// Time that the round took for steps that found nothing.
    fruitless: Duration,
    /// Nobody had a row in hand when the round began, and none was claimed in it.
    is_last: bool,
    left: u64,
    page_rows: usize,
    /// Somebody waits for this process to end, and looks after others' rows.
    own_rows_only: bool,
    /// Runs that it was said to be waiting for.
    told: Vec<RunId>,
}

impl<'a> Reader<'a> {
    fn new(job: &'a Job<'a>) -> Self {
        let own_rows_only = job.watcher.is_some();
        Self {
            job,
            tokens: Tokens::new(job.run),
            sweep: Sweep::new(job),
            scope: lock(job.db).scope().filter(|_| !own_rows_only),
            cursors: [Span::ALL.after; 2],
            fruitless: Duration::ZERO,
            is_last: false,
            left: job.config.limit.unwrap_or(u64::MAX),
            page_rows: if job.one_by_one { 1 } else { PAGE_ROWS },
            own_rows_only,
            told: Vec::new(),
        }
    }

    /// The next claims; empty at the end of a round, and where a stop is asked for.
    fn next_page(&mut self) -> Result<Vec<Claim>, Error> {
        loop {
            // One chunk is made due per page, so that the first page waits for one chunk only.
            let began = Instant::now();
            if self.sweep.step()? == 0 {
                self.fruitless += began.elapsed();
            }
            let to = self.sweep.settled_to();
            for stage in self.job.stages {
                while self.cursors[*stage as usize] < to && !self.job.stop.is_asked() {
                    let began = Instant::now();
                    let page = self.page_of(*stage, to)?;
                    if !page.is_empty() {
                        self.is_last = false;
                        self.left -= page.len() as u64;
                        return Ok(page);
                    }
                    self.fruitless += began.elapsed();
                }
            }
            if self.sweep.is_through() || self.job.stop.is_asked() {
                return Ok(Vec::new());
            }
        }
    }

    /// One look behind the cursor, which comes closer to `to`: rows behind that are not settled yet.
    fn page_of(&mut self, stage: Stage, to: i64) -> Result<Vec<Claim>, Error> {
        let rows = self.page_rows.min(usize::try_from(self.left).unwrap_or(self.page_rows));
        let cursor = &mut self.cursors[stage as usize];
        let span = Span { after: *cursor, to };
        let Some(scope) = &self.scope else {
            let page = lock(self.job.db).claim_page(&mut self.tokens, stage, Among::Span(span), rows)?;
            *cursor = page.last().filter(|_| page.len() == rows).map_or(to, |claim| claim.id.0);
            return Ok(page);
        };
        let look = scope.pending(stage, span, rows)?;
        *cursor = look.to;
        if look.ids.is_empty() {
            return Ok(Vec::new());
        }
        lock(self.job.db).claim_page(&mut self.tokens, stage, Among::Listed(&look.ids), rows)
    }

    /// Waits a while where other workers have the last rows in their hands: if they die, somebody has to take over.
    fn others_hold_rows(&mut self) -> Result<bool, Error> {
        if self.own_rows_only {
            return Ok(false);
        }
        let holders = lock(self.job.db).holders(self.job.run, self.job.stages)?;
        for holder in holders.iter().filter(|holder| !self.told.contains(&holder.run)).collect::<Vec<_>>() {
            log::warn!(
                "nothing is pending; waiting for {} images that run {} (process {} on {}) has in its hands",
                holder.images,
                holder.run.0,
                holder.pid,
                holder.host
            );
            self.told.push(holder.run);
        }
        if !holders.is_empty() {
            std::thread::sleep(LOOK_AT_OTHERS);
        }
        Ok(!holders.is_empty())
    }

    /// At the end of a round. Rows in flight may become pending again (their file changed), rows may be added meanwhile,
    /// and another worker may have died with rows in its hands. False when the round was the last, or a stop is asked for.
    fn wait_for_more(&mut self) -> Result<bool, Error> {
        if self.is_last {
            return Ok(false);
        }
        let Job { progress, stop, db, .. } = *self.job;
        let (began, rest) = (Instant::now(), self.fruitless * REST_TIMES);
        while !stop.is_asked() {
            if progress.in_flight() > 0 {
                progress.waits(Step::Read, Wait::Output, || std::thread::sleep(LOOK_AGAIN));
            } else if lock(db).rescue_dead_runs()?.iter().any(|(_, images)| *images > 0) {
                break;
            } else if !self.others_hold_rows()? {
                self.is_last = true;
                break;
            }
            if began.elapsed() >= rest {
                break;
            }
        }
        self.begin_round();
        Ok(!stop.is_asked())
    }

    fn begin_round(&mut self) {
        self.sweep.begin_again();
        self.cursors = [Span::ALL.after; 2];
        self.fruitless = Duration::ZERO;
    }
}
