//! Counters of a run, read by `commit` for samples and by whoever draws a progress bar.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rates are taken over this much of the run's latest work.
const RATE_WINDOW: Duration = Duration::from_secs(15);

/// The places where time is spent, in the order of the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Decoding, resizing and cropping on the pool.
    Decode,
    /// The detector's session.
    Detect,
    /// The embedder's session.
    Embed,
    /// The database.
    Commit,
}

impl Place {
    const ALL: [Place; 4] = [Place::Decode, Place::Detect, Place::Embed, Place::Commit];

    /// The word in `samples.slowest`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Detect => "detect",
            Self::Embed => "embed",
            Self::Commit => "commit",
        }
    }
}

/// Counters since the start of the run.
#[derive(Debug, Default)]
pub struct Progress {
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
    /// Nothing is pending: `read` only waits for what is in flight.
    pub draining: AtomicBool,
    busy_ns: [AtomicU64; 4],
}

impl Progress {
    /// Counts the time that `work` takes for `place`.
    pub fn timed<T>(&self, place: Place, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.busy_ns[place as usize].fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
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

    fn snapshot(&self, decode_threads: usize) -> Snapshot {
        let mut busy_ns = [0; 4];
        for (value, counter) in busy_ns.iter_mut().zip(&self.busy_ns) {
            *value = Self::get(counter);
        }
        // The pool's time is spread over its threads.
        busy_ns[Place::Decode as usize] /= decode_threads.max(1) as u64;
        Snapshot {
            ended: Self::get(&self.ended),
            at: Instant::now(),
            detected: Self::get(&self.detected),
            embedded: Self::get(&self.embedded),
            busy_ns,
        }
    }
}

#[derive(Clone, Copy)]
struct Snapshot {
    at: Instant,
    ended: u64,
    detected: u64,
    embedded: u64,
    busy_ns: [u64; 4],
}

/// Rates over a sliding window of this run's own work. What was done before the run counts for nothing.
pub struct Rates {
    window: VecDeque<Snapshot>,
    decode_threads: usize,
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
    /// Where most time goes.
    pub slowest: Place,
}

impl Rates {
    /// Begins now.
    pub fn new(progress: &Progress, decode_threads: usize) -> Self {
        Self { window: VecDeque::from([progress.snapshot(decode_threads)]), decode_threads }
    }

    /// The rate since the oldest snapshot in the window; takes a new snapshot.
    pub fn sample(&mut self, progress: &Progress) -> Rate {
        let now = progress.snapshot(self.decode_threads);
        while self.window.len() > 1 && now.at - self.window[0].at > RATE_WINDOW {
            self.window.pop_front();
        }
        let then = self.window[0];
        self.window.push_back(now);
        let seconds = (now.at - then.at).as_secs_f64().max(1e-3);
        let busy = |place: Place| now.busy_ns[place as usize] - then.busy_ns[place as usize];
        Rate {
            ended_per_s: (now.ended - then.ended) as f64 / seconds,
            detect_per_s: (now.detected - then.detected) as f64 / seconds,
            embed_per_s: (now.embedded - then.embedded) as f64 / seconds,
            slowest: Place::ALL.into_iter().max_by_key(|p| busy(*p)).unwrap_or(Place::Decode),
        }
    }
}
