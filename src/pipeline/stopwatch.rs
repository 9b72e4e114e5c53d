//! Time that threads spend at one thing. A call that takes long counts while it goes on, so that no second is credited
//! with more than a second.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Sums over the threads that are at it.
#[derive(Debug, Default)]
pub struct Stopwatch(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    total: Duration,
    threads: u32,
    /// Up to when `total` counts.
    at: Option<Instant>,
}

impl State {
    fn advance(&mut self, now: Instant) {
        if let Some(at) = self.at {
            self.total += now.saturating_duration_since(at) * self.threads;
        }
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
    }
}

impl Stopwatch {
    /// Counts the time of `work`, also where that panics.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let _at_it = AtIt::begin(self);
        work()
    }

    /// The sum up to now.
    pub fn total(&self) -> Duration {
        self.change(|_| ())
    }

    fn change(&self, change: impl FnOnce(&mut u32)) -> Duration {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock: time must not run backwards.
        state.advance(Instant::now());
        change(&mut state.threads);
        state.total
    }
}

struct AtIt<'a>(&'a Stopwatch);

impl<'a> AtIt<'a> {
    fn begin(stopwatch: &'a Stopwatch) -> Self {
        stopwatch.change(|threads| *threads += 1);
        Self(stopwatch)
    }
}

impl Drop for AtIt<'_> {
    fn drop(&mut self) {
        self.0.change(|threads| *threads -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_counts_already_and_never_more_than_the_time_that_went_by() {
        let began = Instant::now();
        let stopwatch = Stopwatch::default();
        let inside = stopwatch.time(|| {
            std::thread::sleep(Duration::from_millis(20));
            stopwatch.total()
        });
        let after = stopwatch.total();
        assert!(inside >= Duration::from_millis(20) && after >= inside && after <= began.elapsed());
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(stopwatch.total(), after, "nobody is at it");
    }

    #[test]
    fn two_threads_count_twice_and_a_panic_ends_the_count() {
        let stopwatch = Stopwatch::default();
        stopwatch.time(|| stopwatch.time(|| std::thread::sleep(Duration::from_millis(20))));
        assert!(stopwatch.total() >= Duration::from_millis(40));
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stopwatch.time(|| panic!("as planned"))));
        assert!(panicked.is_err());
        let after = stopwatch.total();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(stopwatch.total(), after);
    }
}
