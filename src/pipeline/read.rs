//! `read`: claims pages of pending rows until there are none. Owns no row longer than it takes to hand it on.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::Sender;

use super::progress::{Progress, Step, Wait};
use super::stop::Stop;
use super::{Job, lock};
use crate::config::Stale;
use crate::db::Db;
use crate::db::claim::{RunId, Tokens};
use crate::db::due::InForce;
use crate::error::Error;
use crate::row::{Claim, Stage};

/// Rows claimed at once. A crash makes at most this many rows, and those in flight, be done again.
const PAGE_ROWS: usize = 256;

/// How long to wait for rows in flight before looking for pending ones again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long to wait for rows in the hands of other workers before looking again.
const LOOK_AT_OTHERS: Duration = Duration::from_millis(500);

/// Hands claims to `decode` until nothing is pending, `limit` is reached or a stop is asked for.
pub(super) fn run(job: &Job<'_>, claimed: &Sender<Claim>) -> Result<(), Error> {
    let mut reader = Reader {
        db: job.db,
        tokens: Tokens::new(job.run),
        in_force: job.in_force,
        stages: job.stages,
        stale: job.stale,
        settled_to: Some(0),
        cursors: [0; 2],
        left: job.config.limit.unwrap_or(u64::MAX),
        page_rows: if job.one_by_one { 1 } else { PAGE_ROWS },
        run: job.run,
        own_rows_only: job.watcher.is_some(),
        told: Vec::new(),
    };
    while !job.stop.is_asked() && reader.left > 0 {
        let page = job.progress.timed(Step::Read, || reader.next_page())?;
        Progress::add(&job.progress.claimed, page.len() as u64);
        let page_is_empty = page.is_empty();
        if page_is_empty && !reader.wait_for_more(job.progress, job.stop)? {
            return Ok(());
        }
        job.progress.draining.store(page_is_empty, Ordering::Relaxed);
        for claim in page {
            // The rest of the page is given back at the end.
            if job.stop.is_asked() || !job.progress.send(Step::Read, Step::Decode, claimed, claim) {
                return Ok(());
            }
        }
        // One whose outcome is held back has left its file.
        while job.one_by_one && job.progress.in_flight() > Progress::get(&job.progress.held) && !job.stop.is_asked() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    job.progress.draining.store(true, Ordering::Relaxed);
    Ok(())
}

struct Reader<'a> {
    db: &'a Mutex<Db>,
    tokens: Tokens,
    in_force: InForce,
    /// Stages whose rows are claimed.
    stages: &'a [Stage],
    stale: Stale,
    /// Where the sweep that makes rows due has come to; `None` when it is through.
    settled_to: Option<i64>,
    /// The last id claimed, per stage. Rows that become pending behind it are found when it goes back to 0.
    cursors: [i64; 2],
    left: u64,
    page_rows: usize,
    run: RunId,
    /// Somebody waits for this process to end, and looks after others' rows.
    own_rows_only: bool,
    /// Runs that it was said to be waiting for.
    told: Vec<RunId>,
}

impl Reader<'_> {
    /// The next claims; empty when nothing is pending at the moment.
    fn next_page(&mut self) -> Result<Vec<Claim>, Error> {
        loop {
            // Rows are made due in chunks between pages, so that the first page waits for one chunk only.
            if let Some(after) = self.settled_to {
                self.settled_to = lock(self.db).settle_chunk(after, self.in_force, self.stale)?;
            }
            for stage in self.stages {
                let page = self.page_of(*stage)?;
                if !page.is_empty() {
                    self.left -= page.len() as u64;
                    return Ok(page);
                }
            }
            if self.settled_to.is_none() {
                return Ok(Vec::new());
            }
        }
    }

    fn page_of(&mut self, stage: Stage) -> Result<Vec<Claim>, Error> {
        let rows = self.page_rows.min(usize::try_from(self.left).unwrap_or(self.page_rows));
        let cursor = &mut self.cursors[stage as usize];
        let mut page = lock(self.db).claim_page(&mut self.tokens, stage, *cursor, rows)?;
        if page.is_empty() && *cursor > 0 {
            *cursor = 0;
            page = lock(self.db).claim_page(&mut self.tokens, stage, 0, rows)?;
        }
        if let Some(last) = page.last() {
            *cursor = last.id.0;
        }
        Ok(page)
    }

    /// Waits a while where other workers have the last rows in their hands: if they die, somebody has to take over.
    fn others_hold_rows(&mut self) -> Result<bool, Error> {
        if self.own_rows_only {
            return Ok(false);
        }
        let holders = lock(self.db).holders(self.run, self.stages)?;
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

    /// Rows in flight may become pending again (their file changed), rows may be added meanwhile, and another
    /// worker may have died with rows in its hands. False when there is nothing left to wait for.
    fn wait_for_more(&mut self, progress: &Progress, stop: &Stop) -> Result<bool, Error> {
        if stop.is_asked() {
            return Ok(false);
        }
        if progress.in_flight() > 0 {
            progress.waits(Step::Read, Wait::Output, || std::thread::sleep(LOOK_AGAIN));
        } else if lock(self.db).rescue_dead_runs()?.iter().all(|(_, images)| *images == 0)
            && !self.others_hold_rows()?
        {
            return Ok(false);
        }
        self.settled_to = Some(0);
        Ok(true)
    }
}
