//! Who computes on the host's cores. At most `--threads` threads do at any moment: sessions that compute on the host
//! take theirs first, decoding takes what is left.

use std::sync::{Condvar, Mutex, PoisonError};

/// Permits to compute.
pub struct Cores {
    threads: usize,
    /// False where there is nothing to hand out: the system has no more cores than `threads`, and shares them out
    /// without leaving one idle; or the sessions compute on a GPU.
    strict: bool,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    /// Permits that are out.
    busy: usize,
    /// Sessions that wait for permits; they go before the pool.
    sessions_waiting: usize,
}

impl Cores {
    /// `threads` may compute. `on_host` says that sessions do, and `cores` how many there are in all.
    pub fn new(threads: usize, on_host: bool, cores: usize) -> Self {
        Self { threads, strict: on_host && threads < cores, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Waits for one permit, for a thread of the pool. Must not be held while waiting for another step.
    pub fn one(&self) -> Permit<'_> {
        self.take(1, |state, threads| state.sessions_waiting == 0 && state.busy < threads)
    }

    /// No permit, for a thread of the pool that waits for a disk.
    pub fn none(&self) -> Permit<'_> {
        Permit { cores: self, permits: 0 }
    }

    /// Waits for `threads` permits, for the call of a session that computes with so many.
    pub fn several(&self, threads: usize) -> Permit<'_> {
        if self.strict {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).sessions_waiting += 1;
        }
        let threads = threads.min(self.threads);
        let permit = self.take(threads, |state, all| state.busy + threads <= all);
        if self.strict {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).sessions_waiting -= 1;
        }
        permit
    }

    fn take(&self, permits: usize, free: impl Fn(&State, usize) -> bool) -> Permit<'_> {
        if !self.strict {
            return self.none();
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_while(state, |state| !free(state, self.threads));
        waited.unwrap_or_else(PoisonError::into_inner).busy += permits;
        Permit { cores: self, permits }
    }
}

/// The right to compute; given back when dropped.
pub struct Permit<'a> {
    cores: &'a Cores,
    permits: usize,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.permits > 0 {
            self.cores.state.lock().unwrap_or_else(PoisonError::into_inner).busy -= self.permits;
            self.cores.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn never_more_threads_compute_than_may() {
        let cores = Cores::new(3, true, 16);
        let (busy, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |threads: usize| {
            let now = busy.fetch_add(threads, Ordering::SeqCst) + threads;
            most.fetch_max(now, Ordering::SeqCst);
            std::thread::sleep(Duration::from_micros(200));
            busy.fetch_sub(threads, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| (0..50).for_each(|_| drop((cores.one(), work(1)))));
            }
            for _ in 0..2 {
                scope.spawn(|| (0..20).for_each(|_| drop((cores.several(3), work(3)))));
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_session_waits_for_those_at_work_only() {
        let cores = Cores::new(1, true, 2);
        let one = cores.one();
        std::thread::scope(|scope| {
            let session = scope.spawn(|| drop(cores.several(3)));
            std::thread::sleep(Duration::from_millis(30));
            assert!(!session.is_finished());
            let late = scope.spawn(|| drop(cores.one()));
            drop(one);
            session.join().unwrap();
            late.join().unwrap();
        });
    }

    #[test]
    fn with_all_cores_allowed_the_system_shares_them_out() {
        let cores = Cores::new(2, true, 2);
        let _held = (cores.several(3), cores.one(), cores.several(3));
    }
}
