//! Collecting batches from a channel.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};

use super::budget::Budget;
use super::progress::{Progress, Step, Wait};
use crate::row::Stage;

/// How often a session that could work on a partial batch looks whether more is still coming.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Where batches come from and who asks for them.
pub struct Flow<'a, T> {
    /// Messages of the step before.
    pub rx: &'a Receiver<T>,
    /// Counters.
    pub progress: &'a Progress,
    /// Knows whether more images are coming.
    pub budget: &'a Budget,
    /// Whose sessions ask.
    pub stage: Stage,
    /// How many of them there are.
    pub sessions: usize,
    /// When a partial batch waits for more.
    pub patience: Patience<'a>,
}

/// When a partial batch waits for more.
#[derive(Clone, Copy)]
pub enum Patience<'a> {
    /// While more images are coming: the sessions share the host's cores with decoding.
    WhileMoreComes,
    /// While the session has batches in hand, of which this counts: a GPU should never wait.
    WhileBusy(&'a AtomicUsize),
}

/// Batches of messages that share a key: tensors of one size need no padding, so that a row's result does not
/// depend on its neighbours. All sessions of a model take theirs here.
///
/// A batch goes when it is full. A partial one, the one that has waited longest, goes when its device would idle
/// otherwise; where the sessions share the host's cores with decoding, nothing idles while more images are coming,
/// so it goes when none are, because nothing is left or the budget admits no more. Then what waits is divided among
/// the sessions, so that none idles beside another's last batch.
pub struct Batches<'a, T, K> {
    flow: Flow<'a, T>,
    key: fn(&T) -> K,
    /// Called for every message that arrives.
    arrived: fn(&mut T),
    waiting: Mutex<Waiting<T, K>>,
}

impl<'a, T, K: PartialEq> Batches<'a, T, K> {
    /// Batches of messages with equal keys.
    pub fn new(flow: Flow<'a, T>, key: fn(&T) -> K, arrived: fn(&mut T)) -> Self {
        Self { flow, key, arrived, waiting: Mutex::new(Waiting(Vec::new())) }
    }

    /// The next batch, of up to `size_of` its key. Waits where nothing is there at all. `None` when the channel is
    /// closed and everything was handed out.
    pub fn next(&self, size_of: impl Fn(&K) -> usize) -> Option<Vec<T>> {
        let Flow { rx, budget, stage, sessions, .. } = self.flow;
        // Whoever holds the lock waits for messages, and for them all sessions wait.
        let mut waiting = self.waits(|_| self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        loop {
            // A batch for each session, no more: what waits here holds memory.
            while waiting.messages() < sessions * waiting.largest(&size_of) {
                let Ok(message) = rx.try_recv() else { break };
                self.sort_in(&mut waiting, message);
            }
            // In this order: what comes in between is then seen in the channel.
            let more_comes = budget.more_comes_to(stage) || !rx.is_empty();
            let share =
                if more_comes || sessions == 1 { usize::MAX } else { waiting.messages().div_ceil(sessions).max(1) };
            if let Some(full) = waiting.full(|key| size_of(key).clamp(1, share)) {
                return Some(full);
            }
            match rx.try_recv() {
                Ok(message) => self.sort_in(&mut waiting, message),
                Err(TryRecvError::Empty) if waiting.0.is_empty() => {
                    let message = self.waits(|rx| rx.recv()).ok()?;
                    self.sort_in(&mut waiting, message);
                }
                // A closed channel is seen in the next round.
                Err(TryRecvError::Empty) if self.may_wait(more_comes) => {
                    if let Ok(message) = self.waits(|rx| rx.recv_timeout(LOOK_AGAIN)) {
                        self.sort_in(&mut waiting, message);
                    }
                }
                Err(_) => return waiting.oldest(),
            }
        }
    }

    /// What the batches are for.
    pub fn step(&self) -> Step {
        match self.flow.stage {
            Stage::Detect => Step::Detect,
            Stage::Embed => Step::Embed,
        }
    }

    /// When a partial batch waits.
    pub fn patience(&self) -> Patience<'a> {
        self.flow.patience
    }

    fn may_wait(&self, more_comes: bool) -> bool {
        match self.flow.patience {
            Patience::WhileMoreComes => more_comes,
            Patience::WhileBusy(in_hand) => in_hand.load(Ordering::SeqCst) > 0,
        }
    }

    /// Counts as the sessions' waiting, where nobody else counts that.
    fn waits<R>(&self, wait: impl FnOnce(&Receiver<T>) -> R) -> R {
        let Flow { rx, progress, patience, .. } = self.flow;
        match patience {
            Patience::WhileMoreComes => progress.waits(self.step(), Wait::Input, || wait(rx)),
            Patience::WhileBusy(_) => wait(rx),
        }
    }

    fn sort_in(&self, waiting: &mut Waiting<T, K>, mut message: T) {
        self.flow.progress.taken(self.step());
        (self.arrived)(&mut message);
        waiting.sort_in((self.key)(&message), message);
    }
}

/// Groups that are not full yet, the oldest first.
struct Waiting<T, K>(Vec<(K, Vec<T>)>);

impl<T, K: PartialEq> Waiting<T, K> {
    fn messages(&self) -> usize {
        self.0.iter().map(|(_, group)| group.len()).sum()
    }

    fn sort_in(&mut self, key: K, message: T) {
        match self.0.iter_mut().find(|(k, _)| *k == key) {
            Some((_, group)) => group.push(message),
            None => self.0.push((key, vec![message])),
        }
    }

    /// The largest size of a batch of what waits.
    fn largest(&self, size_of: impl Fn(&K) -> usize) -> usize {
        self.0.iter().map(|(key, _)| size_of(key)).max().unwrap_or(1)
    }

    fn oldest(&mut self) -> Option<Vec<T>> {
        (!self.0.is_empty()).then(|| self.0.remove(0).1)
    }

    /// A group that has reached its size; what is beyond stays, for the size may have come down meanwhile.
    fn full(&mut self, size_of: impl Fn(&K) -> usize) -> Option<Vec<T>> {
        let place = self.0.iter().position(|(key, group)| group.len() >= size_of(key))?;
        let (key, group) = &mut self.0[place];
        let rest = group.split_off(size_of(key));
        let full = std::mem::replace(group, rest);
        if group.is_empty() {
            self.0.remove(place);
        }
        Some(full)
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::Reservation;
    use super::super::stop::Stop;
    use super::*;

    type Message = (u8, char, Option<Reservation>);

    fn batches<'a>(
        rx: &'a Receiver<Message>,
        progress: &'a Progress,
        budget: &'a Budget,
        patience: Patience<'a>,
        sessions: usize,
    ) -> Batches<'a, Message, u8> {
        let flow = Flow { rx, progress, budget, stage: Stage::Detect, sessions, patience };
        Batches::new(flow, |m| m.0, |m| m.2.iter_mut().for_each(|held| held.came_to(Stage::Detect)))
    }

    fn collect(rx: &Receiver<Message>, budget: &Budget, size: usize) -> Vec<String> {
        let progress = Progress::default();
        let batches = batches(rx, &progress, budget, Patience::WhileMoreComes, 1);
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
    fn the_last_images_are_divided_among_the_sessions() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let (progress, budget) = (Progress::default(), Budget::new(99, 99));
        let last = budget.admit(1, &[Stage::Detect], &Stop::default());
        (0..19).for_each(|_| tx.send((1, 'a', None)).unwrap());
        let batches = batches(&rx, &progress, &budget, Patience::WhileMoreComes, 2);
        let next = || batches.next(|_| 8).map(|batch| batch.len());
        assert_eq!(next(), Some(8), "more is coming");
        tx.send((1, 'a', last)).unwrap();
        drop(tx);
        assert_eq!([next(), next(), next(), next(), next(), next()], [Some(6), Some(3), Some(2), Some(1), None, None]);
    }

    #[test]
    fn sessions_share_what_waits() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let (progress, budget) = (Progress::default(), Budget::new(99, 99));
        (0..1000).for_each(|i| tx.send(((i % 7) as u8, 'a', None)).unwrap());
        drop(tx);
        let batches = batches(&rx, &progress, &budget, Patience::WhileMoreComes, 3);
        let take = || std::iter::from_fn(|| batches.next(|_| 4)).map(|batch| batch.len()).sum::<usize>();
        let taken: usize = std::thread::scope(|scope| {
            let sessions = [scope.spawn(take), scope.spawn(take), scope.spawn(take)];
            sessions.into_iter().map(|session| session.join().unwrap()).sum()
        });
        assert_eq!(taken, 1000);
    }

    #[test]
    fn an_idle_gpu_does_not_wait_for_a_full_batch_and_a_busy_one_lets_it_grow() {
        let (tx, rx) = crossbeam_channel::unbounded();
        let (progress, budget, busy) = (Progress::default(), Budget::new(9, 9), AtomicUsize::new(0));
        let coming = budget.admit(1, &[Stage::Detect], &Stop::default());
        let batches = batches(&rx, &progress, &budget, Patience::WhileBusy(&busy), 1);
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
        drop((tx, coming));
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
