//! Host memory in bytes. One reservation per image, taken before anything is allocated for it, for its
//! worst case to the end; it only shrinks. Nobody waits for budget while holding budget.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::stop::Stop;

/// How often a waiter looks whether the run is ending.
const WAKE: Duration = Duration::from_millis(100);

/// Bytes, and a count of images, that may be in flight.
pub struct Budget {
    limit_bytes: u64,
    limit_images: usize,
    held: Mutex<Held>,
    freed: Condvar,
}

#[derive(Default)]
struct Held {
    bytes: u64,
    images: usize,
}

impl Budget {
    /// `limit_images` bounds the channels behind it; `limit_bytes` bounds the memory.
    pub fn new(limit_bytes: u64, limit_images: usize) -> Arc<Self> {
        Arc::new(Self { limit_bytes, limit_images, held: Mutex::default(), freed: Condvar::new() })
    }

    /// Waits until `bytes` fit. An image larger than the whole budget is let in when nothing else is held.
    /// `None` when the run is ending.
    pub fn admit(self: &Arc<Self>, bytes: u64, stop: &Stop) -> Option<Reservation> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if stop.is_ending() {
                return None;
            }
            let fits = held.bytes.saturating_add(bytes) <= self.limit_bytes && held.images < self.limit_images;
            if fits || held.images == 0 {
                held.bytes += bytes;
                held.images += 1;
                return Some(Reservation { budget: Arc::clone(self), bytes });
            }
            held = self.freed.wait_timeout(held, WAKE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// True where one image of that size has to be alone.
    pub fn exceeded_by(&self, bytes: u64) -> bool {
        bytes > self.limit_bytes
    }

    /// Bytes reserved now.
    pub fn held_bytes(&self) -> u64 {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    fn give_back(&self, bytes: u64, images: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.bytes -= bytes;
        held.images -= images;
        drop(held);
        self.freed.notify_all();
    }
}

/// A part of the budget; given back when dropped.
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Reservation {
    /// Gives back all but `bytes`. Growing is impossible.
    pub fn shrink_to(&mut self, bytes: u64) {
        if bytes < self.bytes {
            self.budget.give_back(self.bytes - bytes, 0);
            self.bytes = bytes;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_when_a_reservation_shrinks_and_drops() {
        let budget = Budget::new(100, 10);
        let stop = Stop::default();
        let mut first = budget.admit(80, &stop).unwrap();
        first.shrink_to(30);
        first.shrink_to(60);
        assert_eq!(budget.held_bytes(), 30);
        let second = budget.admit(70, &stop).unwrap();
        assert_eq!(budget.held_bytes(), 100);
        drop((first, second));
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn an_image_larger_than_the_budget_is_let_in_alone() {
        let budget = Budget::new(100, 10);
        let stop = Stop::default();
        let small = budget.admit(10, &stop).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| budget.admit(500, &stop).map(|r| r.bytes));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished(), "it was let in beside another image");
            drop(small);
            assert_eq!(waiting.join().unwrap(), Some(500));
        });
    }

    #[test]
    fn a_waiter_leaves_when_the_run_ends() {
        let budget = Budget::new(100, 1);
        let stop = Stop::default();
        let _all = budget.admit(100, &stop).unwrap();
        stop.abort();
        assert!(budget.admit(1, &stop).is_none());
    }
}
