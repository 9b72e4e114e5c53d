//! Collecting batches from a channel.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::budget::Budget;
use super::progress::{Progress, Step, Wait};
use crate::row::Stage;

/// How often a session that could work on a partial batch looks whether more is still coming.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Batches of messages that share a key: tensors of one size need no padding, so that a row's result does not
/// depend on its neighbours.
///
/// A batch goes when it is full. A partial one, the one that has waited longest, goes when its device would idle
/// otherwise; where the session shares the host's cores with decoding, nothing idles while more images are coming,
/// so it goes when none are, because nothing is left or the budget admits no more.
pub struct Batches<'a, T, K> {
    rx: &'a Receiver<T>,
    progress: &'a Progress,
    budget: &'a Budget,
    step: Step,
    stage: Stage,
    patience: Patience<'a>,
    key: fn(&T) -> K,
    /// Called for every message that arrives.
    arrived: fn(&mut T),
    /// Groups that are not full yet, the oldest first.
    waiting: Vec<(K, Vec<T>)>,
}

/// When a partial batch waits for more.
#[derive(Clone, Copy)]
pub enum Patience<'a> {
    /// While more images are coming: the session shares the host's cores with decoding.
    WhileMoreComes,
    /// While the session has batches in hand, of which this counts: a GPU should never wait.
    WhileBusy(&'a AtomicUsize),
}

impl<'a, T, K: PartialEq> Batches<'a, T, K> {
    /// Batches of messages with equal keys, for the session of `stage`.
    pub fn new(
        rx: &'a Receiver<T>,
        (progress, budget): (&'a Progress, &'a Budget),
        stage: Stage,
        patience: Patience<'a>,
        key: fn(&T) -> K,
        arrived: fn(&mut T),
    ) -> Self {
        let step = match stage {
            Stage::Detect => Step::Detect,
            Stage::Embed => Step::Embed,
        };
        Self { rx, progress, budget, step, stage, patience, key, arrived, waiting: Vec::new() }
    }

    /// The next batch, of up to `size_of` its key. Waits where nothing is there at all. `None` when the channel is
    /// closed and everything was handed out.
    pub fn next(&mut self, size_of: impl Fn(&K) -> usize) -> Option<Vec<T>> {
        loop {
            if let Some(full) = self.full(&size_of) {
                return Some(full);
            }
            if let Ok(message) = self.rx.try_recv() {
                self.sort_in(message);
            } else if self.waiting.is_empty() {
                let message = self.waits(|rx| rx.recv()).ok()?;
                self.sort_in(message);
            } else if self.may_wait() {
                match self.waits(|rx| rx.recv_timeout(LOOK_AGAIN)) {
                    Ok(message) => self.sort_in(message),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Some(self.waiting.remove(0).1),
                }
            } else if self.rx.is_empty() {
                // Looked at once more: a message may have come between the first look and the count of those to come.
                return Some(self.waiting.remove(0).1);
            }
        }
    }

    /// What the batches are for.
    pub fn step(&self) -> Step {
        self.step
    }

    /// When a partial batch waits.
    pub fn patience(&self) -> Patience<'a> {
        self.patience
    }

    fn may_wait(&self) -> bool {
        match self.patience {
            Patience::WhileMoreComes => self.budget.more_comes_to(self.stage),
            Patience::WhileBusy(in_hand) => in_hand.load(Ordering::SeqCst) > 0,
        }
    }

    /// Counts as the session's waiting, where nobody else counts that.
    fn waits<R>(&self, wait: impl FnOnce(&Receiver<T>) -> R) -> R {
        match self.patience {
            Patience::WhileMoreComes => self.progress.waits(self.step, Wait::Input, || wait(self.rx)),
            Patience::WhileBusy(_) => wait(self.rx),
        }
    }

    fn sort_in(&mut self, mut message: T) {
        self.progress.taken(self.step);
        (self.arrived)(&mut message);
        let key = (self.key)(&message);
        match self.waiting.iter_mut().find(|(k, _)| *k == key) {
            Some((_, group)) => group.push(message),
            None => self.waiting.push((key, vec![message])),
        }
    }

    /// A group that has reached its size; what is beyond stays, for the size may have come down meanwhile.
    fn full(&mut self, size_of: impl Fn(&K) -> usize) -> Option<Vec<T>> {
        let place = self.waiting.iter().position(|(key, group)| group.len() >= size_of(key).max(1))?;
        let size = size_of(&self.waiting[place].0).max(1);
        if self.waiting[place].1.len() == size {
            return Some(self.waiting.remove(place).1);
        }
        let rest = self.waiting[place].1.split_off(size);
        Some(std::mem::replace(&mut self.waiting[place].1, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::Reservation;
    use super::super::stop::Stop;
    use super::*;

    type Message = (u8, char, Option<Reservation>);

    fn collect(rx: &Receiver<Message>, budget: &Budget, size: usize) -> Vec<String> {
        let progress = Progress::default();
        let arrived = |m: &mut Message| m.2.iter_mut().for_each(|held| held.came_to(Stage::Detect));
        let mut batches =
            Batches::new(rx, (&progress, budget), Stage::Detect, Patience::WhileMoreComes, |m: &Message| m.0, arrived);
        let mut all = Vec::new();
        while let Some(batch) = batches.next(|_| size) {
            all.push(batch.into_iter().map(|m| m.1).collect());
        }
        all
    }

    #[test]
    fn batches_hold_messages_of_one_size_and_full_ones_go_first() {
        let (tx, rx) = crossbeam_channel::unbounded();
        for (size, name) in [(1, 'a'), (2, 'b'), (2, 'c'), (1, 'd'), (3, 'e')] {
            tx.send((size, name, None)).unwrap();
        }
        drop(tx);
        assert_eq!(collect(&rx, &Budget::new(9, 9), 2), ["bc", "ad", "e"]);
    }

    #[test]
    fn a_partial_batch_waits_while_more_is_coming_and_cores_are_shared() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let budget = Budget::new(9, 9);
        let admit = || budget.admit(1, &[Stage::Detect], &Stop::default());
        let (first, second) = (admit(), admit());
        tx.send((1, 'a', first)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(60));
                tx.send((1, 'b', second)).unwrap();
            });
            assert_eq!(collect(&rx, &budget, 2), ["ab"]);
        });
    }

    #[test]
    fn an_idle_gpu_does_not_wait_for_a_full_batch_and_a_busy_one_lets_it_grow() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let (progress, budget, busy) = (Progress::default(), Budget::new(9, 9), AtomicUsize::new(0));
        let _coming = budget.admit(1, &[Stage::Detect], &Stop::default());
        let (flow, patience) = ((&progress, &*budget), Patience::WhileBusy(&busy));
        let mut batches = Batches::new(&rx, flow, Stage::Detect, patience, |m: &Message| m.0, |_: &mut Message| ());
        tx.send((1, 'a', None)).unwrap();
        assert_eq!(batches.next(|_| 2).map(|batch| batch.len()), Some(1));
        busy.store(1, Ordering::SeqCst);
        tx.send((1, 'b', None)).unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| batches.next(|_| 3).map(|batch| batch.len()));
            std::thread::sleep(Duration::from_millis(60));
            assert!(!next.is_finished(), "the device works on another batch");
            tx.send((1, 'c', None)).unwrap();
            std::thread::sleep(Duration::from_millis(60));
            busy.store(0, Ordering::SeqCst);
            assert_eq!(next.join().unwrap(), Some(2));
        });
        // A busy device does not keep what is left when nothing more can come.
        busy.store(1, Ordering::SeqCst);
        tx.send((1, 'd', None)).unwrap();
        drop(tx);
        assert_eq!(batches.next(|_| 3).map(|batch| batch.len()), Some(1));
    }

    #[test]
    fn a_partial_batch_goes_when_the_budget_admits_no_more() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let budget = Budget::new(1, 9);
        let stop = Stop::default();
        tx.send((1, 'a', budget.admit(1, &[Stage::Detect], &stop))).unwrap();
        std::thread::scope(|scope| {
            // Admitted only when the first is gone, which holds all of the budget.
            scope.spawn(|| tx.send((1, 'b', budget.admit(1, &[Stage::Detect], &stop))).map(|()| drop(tx)));
            assert_eq!(collect(&rx, &budget, 2), ["a", "b"]);
        });
    }
}
