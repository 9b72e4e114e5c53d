//! `commit`: the one thread that stores outcomes, says that the run lives, and ends sessions that hang on
//! after a stop.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::alive::HEARTBEAT;
use super::apart::Word;
use super::breaker::Breaker;
use super::budget::Budget;
use super::desk::Desk;
use super::failures::TooMany;
use super::flights::{Stall, StallNews};
use super::measure::{line, resident_bytes, step_sample};
use super::progress::{Progress, Rates, Snapshot, Step, Wait};
use super::{Job, lock};
use crate::db::Db;
use crate::db::due::images_where;
use crate::db::runs::{Sample, StepSample};
use crate::db::wal::WalWatch;
use crate::error::Error;
use crate::model::Terminator;
use crate::printable;
use crate::row::{Finished, State};

/// Outcomes in one transaction, at most. A crash loses at most these and what is in flight.
const COMMIT_ROWS: usize = 256;

/// An outcome waits no longer than this for others.
const COMMIT_AFTER: Duration = Duration::from_millis(250);

/// The same when nothing is pending any more and the run waits for the last rows.
const COMMIT_AT_END: Duration = Duration::from_millis(10);

/// How often it is looked after workers that have died or gone silent.
const RESCUE_EVERY: Duration = Duration::from_secs(5);

/// Stores outcomes until `finished` is closed.
pub(super) fn run(
    job: &Job<'_>,
    (budget, desk): (&Budget, &Desk<'_>),
    terminators: &[Terminator],
    finished: &Receiver<Finished>,
) -> Result<(), Error> {
    let stored = store_all(job, (budget, desk), terminators, finished);
    if stored.is_err() {
        // Nobody else ends calls that are under way now.
        job.stop.abort();
        terminators.iter().for_each(Terminator::terminate);
    }
    stored
}

fn store_all(
    job: &Job<'_>,
    (budget, desk): (&Budget, &Desk<'_>),
    terminators: &[Terminator],
    finished: &Receiver<Finished>,
) -> Result<(), Error> {
    let mut pulse = Pulse::new(job);
    let mut breaker = Breaker::default();
    let mut batch: Vec<Finished> = Vec::new();
    let mut oldest = Instant::now();
    loop {
        // At the end of the work nobody is worth waiting for, nor where one row waits for the other.
        let is_short = job.one_by_one || job.progress.draining.load(Ordering::Relaxed);
        let patience = if is_short { COMMIT_AT_END } else { COMMIT_AFTER };
        match job.progress.waits(Step::Commit, Wait::Input, || finished.recv_timeout(patience)) {
            Ok(outcome) => {
                job.progress.taken(Step::Commit);
                if batch.is_empty() {
                    oldest = Instant::now();
                }
                if outcome.lost.is_some() {
                    // It has left its file, and may be held back for long.
                    job.progress.flights.end(std::slice::from_ref(&outcome));
                }
                breaker.sift(outcome, &mut batch, job.stop);
                job.progress.held.store(breaker.held(), Ordering::Relaxed);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                settle_held(job, &mut breaker, &mut batch);
                store(job, desk, &mut batch)?;
                pulse.beat(job, budget)?;
                return breaker.verdict();
            }
        }
        if breaker.held() > 0 && !job.stop.is_asked() && batch.is_empty() && job.progress.is_last(breaker.held()) {
            settle_held(job, &mut breaker, &mut batch);
        }
        if batch.len() >= COMMIT_ROWS || oldest.elapsed() >= patience {
            store(job, desk, &mut batch)?;
        }
        if job.stop.is_ending() {
            // Again and again: a session may have begun another call meanwhile.
            terminators.iter().for_each(Terminator::terminate);
        }
        if pulse.last.elapsed() >= HEARTBEAT {
            pulse.beat(job, budget)?;
        }
    }
}

/// Nothing else is in flight, so that nothing comes that says more of the outcomes that are held back.
fn settle_held(job: &Job<'_>, breaker: &mut Breaker, batch: &mut Vec<Finished>) {
    let progress = job.progress;
    // A run with a limit, and a child that has the suspects only, leave rows of the same folders unseen.
    let may_leave_some =
        job.watcher.is_some() || job.config.limit.is_some_and(|limit| Progress::get(&progress.claimed) >= limit);
    if job.stop.is_asked() || !progress.draining.load(Ordering::Relaxed) {
        breaker.give_back();
    } else if may_leave_some {
        breaker.leave_open(job.stop);
    } else {
        breaker.let_through(batch);
    }
    progress.held.store(breaker.held(), Ordering::Relaxed);
}

fn store(job: &Job<'_>, desk: &Desk<'_>, batch: &mut Vec<Finished>) -> Result<(), Error> {
    if batch.is_empty() {
        return Ok(());
    }
    let too_many = job.progress.count_failures(batch, job.config.max_failures);
    if let Some(TooMany { kept, .. }) = &too_many {
        batch.truncate(*kept);
    }
    let committed = job.progress.timed(Step::Commit, || lock(job.db).commit_batch(batch, job.in_force))?;
    let progress = job.progress;
    progress.flights.end(batch);
    if Progress::get(&progress.ended) == 0 {
        log::info!("the first outcomes are stored");
    }
    Progress::add(&progress.done, committed.done);
    Progress::add(&progress.failed, committed.failed);
    Progress::add(&progress.detected, committed.detected);
    Progress::add(&progress.embedded, committed.embedded);
    Progress::add(&progress.dropped, committed.dropped);
    desk.settle(batch);
    for finished in batch.iter() {
        let has_failed = finished.outcome.error().is_some();
        job.tell(if has_failed { Word::Failed(finished.id) } else { Word::Done(finished.id) });
    }
    // Last: `read` takes it as the sign that nothing is in flight.
    Progress::add(&progress.ended, batch.len() as u64);
    if committed.dropped > 0 {
        log::info!("{} results dropped: their rows were changed or taken meanwhile", committed.dropped);
    }
    batch.clear();
    too_many.map_or(Ok(()), |TooMany { error, .. }| Err(error))
}

/// Images that wait or are in flight; 0 where the run is for some of them only.
fn left(job: &Job<'_>, db: &Db) -> Result<u64, Error> {
    if job.config.limit.is_some() || db.is_restricted() {
        return Ok(0);
    }
    let is_left = |state: Option<State>| matches!(state, Some(State::Pending | State::Running));
    Ok(images_where(&db.tally()?, |standing| {
        let settled = standing.settled(job.in_force, job.stale);
        is_left(settled.detect) || is_left(settled.embed)
    }))
}

struct Pulse {
    began: Instant,
    last: Instant,
    before: Snapshot,
    rates: Rates,
    wal_watch: WalWatch,
    rescued: Instant,
    stall: Stall,
}

impl Pulse {
    fn new(job: &Job<'_>) -> Self {
        let now = Instant::now();
        let before = job.progress.snapshot(job.config.threads);
        let rates = Rates::new(job.progress, job.config.threads);
        Self {
            began: now,
            last: now,
            before,
            rates,
            wal_watch: WalWatch::default(),
            rescued: now,
            stall: Stall::new(now),
        }
    }

    fn tell_of_a_stall(&mut self, job: &Job<'_>) {
        let oldest = job.progress.flights.oldest();
        match (self.stall.look(self.last, Progress::get(&job.progress.ended), oldest.is_some()), oldest) {
            (Some(StallNews::Still(still)), Some((flight, images))) => log::warn!(
                "stalled: no image has ended for {} s; the oldest of {images} in flight is in {} since {} s: {}",
                still.as_secs(),
                flight.step.word(),
                flight.since.elapsed().as_secs(),
                printable::path(&flight.path)
            ),
            (Some(StallNews::Over), _) => log::warn!("no longer stalled: images end again"),
            _ => {}
        }
    }

    fn beat(&mut self, job: &Job<'_>, budget: &Budget) -> Result<(), Error> {
        self.last = Instant::now();
        self.tell_of_a_stall(job);
        let rate = self.rates.sample(job.progress);
        let now = job.progress.snapshot(job.config.threads);
        let sample = Sample {
            done: Progress::get(&job.progress.done),
            failed: Progress::get(&job.progress.failed),
            detect_per_s: rate.detect_per_s,
            embed_per_s: rate.embed_per_s,
            slowest: rate.slowest.word(),
            rss_bytes: resident_bytes(),
            held_bytes: budget.held_bytes(),
            device_bytes: job.instruments.device_bytes(),
            padding: now.padding_since(&self.before),
            decode_scale: now.decode_scale_since(&self.before),
        };
        let steps: Vec<StepSample> = now.shares_since(&self.before).iter().map(step_sample).collect();
        self.before = now;
        job.instruments.write(&line(&sample, &steps, self.began.elapsed().as_secs_f64()));
        let mut db = lock(job.db);
        if self.rescued.elapsed() >= RESCUE_EVERY {
            self.rescued = self.last;
            // What they had is pending, or suspect: `read` finds the one, who started this run the other.
            db.rescue_dead_runs()?;
        }
        db.heartbeat(job.run, &sample, &steps)?;
        job.learnt.keep(&mut db, &job.progress.take_learnt())?;
        self.wal_watch.look(&db);
        job.progress.left.store(left(job, &db)?, Ordering::Relaxed);
        Ok(())
    }
}
