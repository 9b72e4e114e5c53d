//! Counters and clocks of a run, read by `commit` for samples and by whoever draws a progress bar.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvError, Sender, TryRecvError, TrySendError};

use super::Summary;
use super::breaker::Places;
use super::failures::{Failures, TooMany};
use super::flights::Flights;
use super::learn::Learnt;
use super::stopwatch::Stopwatch;
use crate::config::MaxFailures;
use crate::geometry::Scale;
use crate::row::Finished;

/// Rates are taken over this much of the run's latest work.
const RATE_WINDOW: Duration = Duration::from_secs(15);

/// The steps of the flow, in its order: where time is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Claiming rows.
    Read,
    /// Reading, decoding and resizing files, on the pool.
    Decode,
    /// The detector's session.
    Detect,
    /// Selecting and cutting regions, on the pool.
    Crop,
    /// The embedder's session.
    Embed,
    /// The database.
    Commit,
}

impl Step {
    /// Every step, in the order of the flow.
    pub const ALL: [Step; 6] = [Step::Read, Step::Decode, Step::Detect, Step::Crop, Step::Embed, Step::Commit];

    /// The word in `samples.slowest` and `step_samples.step`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Decode => "decode",
            Self::Detect => "detect",
            Self::Crop => "crop",
            Self::Embed => "embed",
            Self::Commit => "commit",
        }
    }

    /// Threads that work at it, where the pool has `pool` and each model `sessions`.
    fn threads(self, pool: usize, sessions: usize) -> usize {
        match self {
            Self::Decode | Self::Crop => pool.max(1),
            Self::Detect | Self::Embed => sessions.max(1),
            Self::Read | Self::Commit => 1,
        }
    }
}

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The step before it.
    Input,
    /// The step behind it, or memory.
    Output,
}

/// Times of one step, summed over its threads, and the messages that wait before it.
#[derive(Debug, Default)]
struct Clock {
    busy: Stopwatch,
    input: Stopwatch,
    output: Stopwatch,
    queued: AtomicI64,
}

/// Counters since the start of the run.
#[derive(Debug, Default)]
pub struct Progress {
    /// Images that wait or are in flight, as the database counts them once a second; rows may be added while a run works.
    /// 0 where that says nothing: before the first count, and where the run is restricted.
    pub left: AtomicU64,
    /// Images that this run claimed.
    pub claimed: AtomicU64,
    /// Claims that have an outcome.
    pub ended: AtomicU64,
    /// Images whose last due stage is done.
    pub done: AtomicU64,
    /// Images that ended with a code.
    pub failed: AtomicU64,
    /// Images that `detect` is through with, done or failed.
    pub detected: AtomicU64,
    /// Images that `embed` is through with, done or failed.
    pub embedded: AtomicU64,
    /// Results that were not stored because somebody else had the row.
    pub dropped: AtomicU64,
    /// Rows given back unfinished.
    pub released: AtomicU64,
    /// Numbers in the tensors that models were called with.
    pub input_values: AtomicU64,
    /// How many of them were filling and no picture.
    pub padding_values: AtomicU64,
    /// Pictures decoded, second decodes of small regions among them.
    pub decodes: AtomicU64,
    /// Sum of `1000 / denominator` of the scales they were decoded at.
    pub decode_permille: AtomicU64,
    /// Nothing is pending, or no more may be claimed: `read` only waits for what is in flight.
    pub draining: AtomicBool,
    /// Outcomes that `commit` holds back; in flight all the same.
    pub held: AtomicU64,
    clocks: [Clock; 6],
    /// Sessions of each model, side by side.
    pub sessions: AtomicUsize,
    learnt: Mutex<Vec<Learnt>>,
    failures: Mutex<Failures>,
    /// Where files were read.
    pub places: Places,
    /// Rows in flight.
    pub flights: Flights,
}

impl Progress {
    /// Counts the time that `work` takes for `step`.
    pub fn timed<T>(&self, step: Step, work: impl FnOnce() -> T) -> T {
        self.clocks[step as usize].busy.time(work)
    }

    /// Counts the time that `step` waits.
    pub fn waits<T>(&self, step: Step, what: Wait, wait: impl FnOnce() -> T) -> T {
        let clock = &self.clocks[step as usize];
        if what == Wait::Input { clock.input.time(wait) } else { clock.output.time(wait) }
    }

    /// Hands a message to the step behind; false where that has left.
    pub fn send<T>(&self, from: Step, to: Step, tx: &Sender<T>, message: T) -> bool {
        self.clocks[to as usize].queued.fetch_add(1, Ordering::Relaxed);
        match tx.try_send(message) {
            Ok(()) => true,
            Err(TrySendError::Disconnected(_)) => false,
            Err(TrySendError::Full(message)) => self.waits(from, Wait::Output, || tx.send(message)).is_ok(),
        }
    }

    /// Takes a message from the step before.
    ///
    /// # Errors
    /// That has left and nothing is waiting.
    pub fn recv<T>(&self, at: Step, rx: &Receiver<T>) -> Result<T, RecvError> {
        let message = match rx.try_recv() {
            Err(TryRecvError::Empty) => self.waits(at, Wait::Input, || rx.recv())?,
            other => other.map_err(|_| RecvError)?,
        };
        self.taken(at);
        Ok(message)
    }

    /// A message that waited before `step` was taken out.
    pub fn taken(&self, step: Step) {
        self.clocks[step as usize].queued.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a picture that was decoded at that scale.
    pub fn decoded(&self, scale: Scale) {
        Self::add(&self.decodes, 1);
        Self::add(&self.decode_permille, 1000 / u64::from(scale.denominator()));
    }

    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Reads a counter.
    pub fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    /// Claims without an outcome yet.
    pub fn in_flight(&self) -> u64 {
        Self::get(&self.claimed).saturating_sub(Self::get(&self.ended))
    }

    /// What became of the images so far.
    pub fn summary(&self) -> Summary {
        Summary {
            done: Self::get(&self.done),
            failed: Self::get(&self.failed),
            dropped: Self::get(&self.dropped),
            released: Self::get(&self.released),
        }
    }

    /// All images of the run, those that ended among them; `at_start` is what waited then.
    pub fn total(&self, at_start: u64) -> u64 {
        let ended = Self::get(&self.ended);
        match Self::get(&self.left) {
            0 => at_start.max(ended),
            left => ended + left,
        }
    }

    /// True where nothing more is claimed, and what is in flight is no more than `images`.
    pub fn is_last(&self, images: u64) -> bool {
        self.draining.load(Ordering::Relaxed) && self.in_flight() <= images
    }

    /// Counts the failures among the outcomes of a batch.
    pub fn count_failures(&self, batch: &[Finished], most: Option<MaxFailures>) -> Option<TooMany> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).count(batch, most)
    }

    /// A batch size that was found by measurement, for `commit` to store.
    pub fn learn(&self, learnt: Learnt) {
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner).push(learnt);
    }

    /// What was learnt since the last call.
    pub fn take_learnt(&self) -> Vec<Learnt> {
        std::mem::take(&mut self.learnt.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// All counters now; `threads` is the size of the pool.
    pub fn snapshot(&self, threads: usize) -> Snapshot {
        let steps = Step::ALL.map(|step| {
            let clock = &self.clocks[step as usize];
            // Time of the pool's steps is spread over its threads.
            let sessions = self.sessions.load(Ordering::Relaxed);
            let share = |stopwatch: &Stopwatch, among: usize| stopwatch.total() / among as u32;
            let all = step.threads(threads, sessions);
            // One thread hands work to the pool; it is the one that waits for it, and for memory.
            let (takes, gives) = match step {
                Step::Detect | Step::Embed => (all, all),
                Step::Crop => (1, all),
                Step::Read | Step::Decode | Step::Commit => (1, 1),
            };
            StepTimes {
                busy: share(&clock.busy, all),
                waiting_in: share(&clock.input, takes),
                waiting_out: share(&clock.output, gives),
                queued: clock.queued.load(Ordering::Relaxed).max(0) as u64,
            }
        });
        Snapshot {
            at: Instant::now(),
            ended: Self::get(&self.ended),
            detected: Self::get(&self.detected),
            embedded: Self::get(&self.embedded),
            input_values: Self::get(&self.input_values),
            padding_values: Self::get(&self.padding_values),
            decodes: Self::get(&self.decodes),
            decode_permille: Self::get(&self.decode_permille),
            steps,
        }
    }
}

/// Times of one step since the start of the run.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepTimes {
    /// Working, per thread.
    pub busy: Duration,
    /// Waiting for the step before.
    pub waiting_in: Duration,
    /// Waiting for the step behind, or for memory.
    pub waiting_out: Duration,
    /// Messages that wait before it now.
    pub queued: u64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    at: Instant,
    ended: u64,
    detected: u64,
    embedded: u64,
    input_values: u64,
    padding_values: u64,
    decodes: u64,
    decode_permille: u64,
    steps: [StepTimes; 6],
}

#[cfg(test)]
impl Snapshot {
    /// The snapshot `elapsed` later, after these steps worked so long on one thread and `decode` waited for memory.
    pub(super) fn later(&self, elapsed: Duration, busy: &[(Step, Duration)], waiting: Duration) -> Self {
        let mut later = Self { at: self.at + elapsed, ..*self };
        for (step, time) in busy {
            later.steps[*step as usize].busy += *time;
        }
        later.steps[Step::Decode as usize].waiting_out += waiting;
        later
    }
}

/// What one step did of the time between two snapshots: shares from 0 to 1 of its threads' time.
#[derive(Clone, Copy, Debug)]
pub struct StepShare {
    /// Which.
    pub step: Step,
    /// Working.
    pub busy: f64,
    /// Waiting for the step before.
    pub waiting_in: f64,
    /// Waiting for the step behind, or for memory.
    pub waiting_out: f64,
    /// Messages that waited before it at the end.
    pub queued: u64,
}

impl Snapshot {
    /// What every step did since `then`.
    pub fn shares_since(&self, then: &Snapshot) -> [StepShare; 6] {
        let seconds = (self.at - then.at).as_secs_f64().max(1e-3);
        Step::ALL.map(|step| {
            let (now, then) = (&self.steps[step as usize], &then.steps[step as usize]);
            let share = |now: Duration, then: Duration| (now.saturating_sub(then).as_secs_f64() / seconds).min(1.0);
            StepShare {
                step,
                busy: share(now.busy, then.busy),
                waiting_in: share(now.waiting_in, then.waiting_in),
                waiting_out: share(now.waiting_out, then.waiting_out),
                queued: now.queued,
            }
        })
    }

    /// Share of the models' input that was filling since `then`, 0 to 1.
    pub fn padding_since(&self, then: &Snapshot) -> f64 {
        let values = self.input_values - then.input_values;
        (self.padding_values - then.padding_values) as f64 / values.max(1) as f64
    }

    /// Mean scale of what was decoded since `then`: 1 full size, 0.125 an eighth. 1 where nothing was.
    pub fn decode_scale_since(&self, then: &Snapshot) -> f64 {
        match self.decodes - then.decodes {
            0 => 1.0,
            n => (self.decode_permille - then.decode_permille) as f64 / 1000.0 / n as f64,
        }
    }
}

/// Rates over a sliding window of this run's own work. What was done before the run counts for nothing.
pub struct Rates {
    window: VecDeque<Snapshot>,
    threads: usize,
}

/// The run's speed lately.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Images per second that end, done or failed.
    pub ended_per_s: f64,
    /// Images per second through `detect`.
    pub detect_per_s: f64,
    /// Images per second through `embed`.
    pub embed_per_s: f64,
    /// The step that worked most.
    pub slowest: Step,
}

impl Rates {
    /// Begins now; `threads` is the size of the pool.
    pub fn new(progress: &Progress, threads: usize) -> Self {
        Self { window: VecDeque::from([progress.snapshot(threads)]), threads }
    }

    /// The rate since the oldest snapshot in the window; takes a new snapshot.
    pub fn sample(&mut self, progress: &Progress) -> Rate {
        let now = progress.snapshot(self.threads);
        while self.window.len() > 1 && now.at - self.window[0].at > RATE_WINDOW {
            self.window.pop_front();
        }
        let then = self.window[0];
        self.window.push_back(now);
        let seconds = (now.at - then.at).as_secs_f64().max(1e-3);
        let busiest = now.shares_since(&then).into_iter().max_by(|a, b| a.busy.total_cmp(&b.busy));
        Rate {
            ended_per_s: (now.ended - then.ended) as f64 / seconds,
            detect_per_s: (now.detected - then.detected) as f64 / seconds,
            embed_per_s: (now.embedded - then.embedded) as f64 / seconds,
            slowest: busiest.map_or(Step::Decode, |s| s.step),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_follows_what_the_database_counts() {
        let progress = Progress::default();
        assert_eq!(progress.total(10), 10);
        Progress::add(&progress.ended, 4);
        progress.left.store(9, Ordering::Relaxed);
        assert_eq!(progress.total(10), 13, "three were added");
        progress.left.store(0, Ordering::Relaxed);
        Progress::add(&progress.ended, 9);
        assert_eq!(progress.total(10), 13);
    }

    #[test]
    fn rates_are_of_this_runs_own_work_and_always_numbers() {
        let progress = Progress::default();
        Progress::add(&progress.ended, 1_000);
        let mut rates = Rates::new(&progress, 1);
        let none = rates.sample(&progress);
        assert_eq!((none.ended_per_s, none.detect_per_s, none.embed_per_s), (0.0, 0.0, 0.0), "done before the window");
        Progress::add(&progress.ended, 1);
        let one = rates.sample(&progress);
        assert!(one.ended_per_s > 0.0 && one.ended_per_s <= 1_000.0, "no time went by: {}", one.ended_per_s);
    }

    #[test]
    fn waiting_for_a_full_queue_and_for_an_empty_one_are_told_apart() {
        let progress = Progress::default();
        let (tx, rx) = crossbeam_channel::bounded(1);
        assert!(progress.send(Step::Read, Step::Decode, &tx, 0));
        let waited = |step: Step| progress.snapshot(1).steps[step as usize];
        assert_eq!((waited(Step::Decode).queued, waited(Step::Read).waiting_out), (1, Duration::ZERO));
        std::thread::scope(|scope| {
            let progress = &progress;
            let full = scope.spawn(move || progress.send(Step::Read, Step::Decode, &tx, 1));
            // Not before the other has found the queue full: it counts its message first.
            while progress.snapshot(1).steps[Step::Decode as usize].queued < 2 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(progress.recv(Step::Decode, &rx), Ok(0));
            assert!(full.join().unwrap());
        });
        assert!(waited(Step::Read).waiting_out > Duration::ZERO, "the queue was full");
        assert_eq!((progress.recv(Step::Decode, &rx), waited(Step::Decode).waiting_in), (Ok(1), Duration::ZERO));
        assert!(progress.recv(Step::Decode, &rx).is_err());
        assert_eq!(waited(Step::Decode).queued, 0);
    }

    #[test]
    fn the_pools_time_is_spread_over_its_threads_and_a_models_over_its_sessions() {
        let progress = Progress::default();
        progress.sessions.store(2, Ordering::Relaxed);
        let mut sums = [Duration::ZERO; 6];
        for step in Step::ALL {
            progress.timed(step, || std::thread::sleep(Duration::from_millis(1)));
            sums[step as usize] = progress.clocks[step as usize].busy.total();
        }
        let busy = progress.snapshot(4).steps.map(|step| step.busy);
        let shares = [(Step::Read, 1), (Step::Decode, 4), (Step::Detect, 2), (Step::Crop, 4), (Step::Embed, 2)];
        assert_eq!(busy[..5], shares.map(|(step, threads)| sums[step as usize] / threads));
    }

    #[test]
    fn shares_are_of_the_time_between_two_snapshots() {
        let began = Progress::default().snapshot(1);
        let second = Duration::from_secs(1);
        let ended = began.later(4 * second, &[(Step::Embed, 3 * second)], second);
        let shares = ended.shares_since(&began);
        assert_eq!((shares[Step::Embed as usize].busy, shares[Step::Detect as usize].busy), (0.75, 0.0));
        assert_eq!(shares[Step::Decode as usize].waiting_out, 0.25);
    }
}
