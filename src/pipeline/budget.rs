//! Host memory in bytes. One reservation per image, taken before anything is allocated for it, for its
//! worst case to the end; it only shrinks. Nobody waits for budget while holding budget.
//!
//! Who holds a reservation is on the way, so the budget also knows whether more images may come to a session.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::stop::Stop;
use crate::row::Stage;

/// How often a waiter looks whether the run is ending.
const WAKE: Duration = Duration::from_millis(100);

/// Bytes, and a count of images, that may be in flight.
pub struct Budget {
    limit_bytes: u64,
    limit_images: usize,
    held: Mutex<Held>,
    freed: Condvar,
    /// Admitted images that have not come to the session of a stage yet.
    coming: [AtomicUsize; 2],
}

#[derive(Default)]
struct Held {
    bytes: u64,
    images: usize,
}

impl Budget {
    /// `limit_images` bounds the channels behind it; `limit_bytes` bounds the memory.
    pub fn new(limit_bytes: u64, limit_images: usize) -> Arc<Self> {
        Arc::new(Self {
            limit_bytes,
            limit_images,
            held: Mutex::default(),
            freed: Condvar::new(),
            coming: Default::default(),
        })
    }

    /// Waits until `bytes` fit, for an image that will come to the sessions of `stages`. An image larger than the whole
    /// budget is let in when nothing else is held, but by threads that hang. `None` when the run is ending.
    pub fn admit(self: &Arc<Self>, bytes: u64, stages: &[Stage], stop: &Stop) -> Option<Reservation> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if stop.is_ending() {
                return None;
            }
            let fits = held.bytes.saturating_add(bytes) <= self.limit_bytes && held.images < self.limit_images;
            if fits || held.images == 0 {
                held.bytes += bytes;
                held.images += 1;
                let comes_to = Stage::ALL.map(|stage| AtomicBool::new(stages.contains(&stage)));
                for stage in stages {
                    self.coming[*stage as usize].fetch_add(1, Ordering::SeqCst);
                }
                let seat = Arc::new(Seat { budget: Arc::clone(self), comes_to, taken: AtomicBool::new(true) });
                return Some(Reservation { seat, bytes });
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

    /// True while admitted images are on their way to the session of `stage`.
    pub fn more_comes_to(&self, stage: Stage) -> bool {
        self.coming[stage as usize].load(Ordering::SeqCst) > 0
    }

    fn give_back(&self, bytes: u64, images: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.bytes -= bytes;
        held.images -= images;
        drop(held);
        self.freed.notify_all();
    }
}

/// What an admitted image counts for, apart from its bytes. Shared with whoever gives the image up.
pub struct Seat {
    budget: Arc<Budget>,
    comes_to: [AtomicBool; 2],
    taken: AtomicBool,
}

impl Seat {
    /// The image has come to the session of `stage`.
    fn came_to(&self, stage: Stage) {
        if self.comes_to[stage as usize].swap(false, Ordering::SeqCst) {
            self.budget.coming[stage as usize].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The image comes to no session any more, and others are admitted as if it were not there. Its bytes stay reserved
    /// while a thread has them.
    pub fn leave(&self) {
        Stage::ALL.into_iter().for_each(|stage| self.came_to(stage));
        if self.taken.swap(false, Ordering::SeqCst) {
            self.budget.give_back(0, 1);
        }
    }
}

/// A part of the budget; given back when dropped.
pub struct Reservation {
    seat: Arc<Seat>,
    bytes: u64,
}

impl Reservation {
    /// Gives back all but `bytes`. Growing is impossible.
    pub fn shrink_to(&mut self, bytes: u64) {
        if bytes < self.bytes {
            self.seat.budget.give_back(self.bytes - bytes, 0);
            self.bytes = bytes;
        }
    }

    /// The image has come to the session of `stage`.
    pub fn came_to(&self, stage: Stage) {
        self.seat.came_to(stage);
    }

    /// For whoever may give the image up.
    pub fn seat(&self) -> Arc<Seat> {
        Arc::clone(&self.seat)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.seat.budget.give_back(self.bytes, 0);
        self.seat.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_when_a_reservation_shrinks_and_drops() {
        let budget = Budget::new(100, 10);
        let stop = Stop::default();
        let mut first = budget.admit(80, &[], &stop).unwrap();
        first.shrink_to(30);
        first.shrink_to(60);
        assert_eq!(budget.held_bytes(), 30);
        let second = budget.admit(70, &[], &stop).unwrap();
        assert_eq!(budget.held_bytes(), 100);
        drop((first, second));
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn an_image_larger_than_the_budget_is_let_in_alone() {
        let budget = Budget::new(100, 10);
        let stop = Stop::default();
        let small = budget.admit(10, &[], &stop).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| budget.admit(500, &[], &stop).map(|r| r.bytes));
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
        let _all = budget.admit(100, &[], &stop).unwrap();
        stop.abort();
        assert!(budget.admit(1, &[], &stop).is_none());
    }

    #[test]
    fn whoever_is_on_the_way_to_a_session_is_known() {
        let budget = Budget::new(100, 9);
        let stop = Stop::default();
        let both = budget.admit(1, &Stage::ALL, &stop).unwrap();
        let failed = budget.admit(1, &[Stage::Detect], &stop).unwrap();
        both.came_to(Stage::Detect);
        both.came_to(Stage::Detect);
        assert!(budget.more_comes_to(Stage::Detect) && budget.more_comes_to(Stage::Embed));
        drop(failed);
        assert!(!budget.more_comes_to(Stage::Detect) && budget.more_comes_to(Stage::Embed));
        drop(both);
        assert!(!budget.more_comes_to(Stage::Embed));
    }

    #[test]
    fn an_image_that_was_given_up_is_waited_for_by_nobody_and_keeps_its_bytes() {
        let budget = Budget::new(100, 9);
        let stop = Stop::default();
        let hangs = budget.admit(90, &Stage::ALL, &stop).unwrap();
        let seat = hangs.seat();
        seat.leave();
        seat.leave();
        assert!(Stage::ALL.iter().all(|stage| !budget.more_comes_to(*stage)));
        assert_eq!(budget.held_bytes(), 90);
        // Alone beside it, as it may hang for ever.
        let second = budget.admit(80, &[], &stop).unwrap();
        assert_eq!(budget.held_bytes(), 170);
        drop(second);
        drop(hangs);
        assert_eq!((budget.held_bytes(), budget.held.lock().unwrap().images), (0, 0));
    }
}
