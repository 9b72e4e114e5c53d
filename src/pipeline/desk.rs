//! The desk: which files the pool is at work on, and for how long. A thread cannot be ended: one that reads from a dead
//! mount, or whose decoder goes round for ever, is written off. Its image gets its outcome from here, its permit goes to
//! others; the memory in its hands stays reserved. Whoever takes the entry away first gives the outcome: the thread that
//! comes back, or the desk.
//!
//! Waiting for memory, for a permit or for the step behind is not at work, and no entry.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cores::Permit;
use crate::printable;
use crate::row::{Finished, ImageId, RowCode, RowError};

/// More time than this between two looks does not count: a process that was stopped for an hour has no old entries.
const STEP_MOST: Duration = Duration::from_secs(1);

/// Gives an image its outcome, in the way of the stage that it is in. Must not touch its file: that may hang, too.
type GiveUp<'a> = Box<dyn FnOnce(RowError) + Send + 'a>;

/// Files that are being looked at or decoded.
pub struct Desk<'a> {
    limit: Duration,
    board: Mutex<Board<'a>>,
}

#[derive(Default)]
struct Board<'a> {
    tickets: u64,
    at_work: Vec<Entry<'a>>,
    hung: Vec<Hung>,
    /// Images that were given up and whose outcome is not stored yet.
    unsettled: Vec<ImageId>,
}

struct Entry<'a> {
    ticket: u64,
    id: ImageId,
    path: PathBuf,
    /// Since the first look at it.
    age: Option<Duration>,
    permit: Permit<'a>,
    give_up: GiveUp<'a>,
}

/// A thread that was written off and is not back.
struct Hung {
    ticket: u64,
    path: PathBuf,
}

impl<'a> Desk<'a> {
    /// Whoever is at work for longer than `limit` is written off.
    pub fn new(limit: Duration) -> Self {
        Self { limit, board: Mutex::default() }
    }

    /// This thread begins with the file of an image. The entry keeps its permit. `give_up` is called where the thread is
    /// written off; it may wait for the step behind.
    pub fn begin(
        &self,
        id: ImageId,
        path: &Path,
        permit: Permit<'a>,
        give_up: impl FnOnce(RowError) + Send + 'a,
    ) -> Ticket<'_, 'a> {
        let path = path.to_owned();
        let mut board = self.board();
        board.tickets += 1;
        let ticket = board.tickets;
        board.at_work.push(Entry { ticket, id, path, age: None, permit, give_up: Box::new(give_up) });
        Ticket { desk: self, number: ticket }
    }

    /// Writes off who is over the limit now, `since_last_look`.
    pub fn look(&self, since_last_look: Duration) {
        let step = since_last_look.min(STEP_MOST);
        let (over, hung) = {
            let mut board = self.board();
            for entry in &mut board.at_work {
                entry.age = Some(entry.age.map_or(Duration::ZERO, |age| age + step));
            }
            let is_over = |entry: &mut Entry<'_>| entry.age.is_some_and(|age| age > self.limit);
            let over: Vec<Entry<'a>> = board.at_work.extract_if(.., is_over).collect();
            for entry in &over {
                board.hung.push(Hung { ticket: entry.ticket, path: entry.path.clone() });
                board.unsettled.push(entry.id);
            }
            (over, board.hung.len())
        };
        let limit_s = self.limit.as_secs();
        for Entry { path, permit, give_up, .. } in over {
            let name = printable::path(&path);
            log::warn!("{name}: no answer for {limit_s} s: timed_out; its thread is written off, {hung} hang now");
            drop(permit);
            let why = format!(
                "{name}: no answer within {limit_s} s (--decode-limit): its disk or network folder hangs, or its decoder \
                 does not come to an end"
            );
            give_up(RowError::new(RowCode::TimedOut, why));
        }
    }

    /// The files that threads hang in which were written off.
    pub fn hung(&self) -> Vec<PathBuf> {
        self.board().hung.iter().map(|hung| hung.path.clone()).collect()
    }

    /// True when every outcome that was given for a thread is stored.
    pub fn is_settled(&self) -> bool {
        self.board().unsettled.is_empty()
    }

    /// These outcomes are stored.
    pub fn settle(&self, stored: &[Finished]) {
        let mut board = self.board();
        if !board.unsettled.is_empty() {
            board.unsettled.retain(|id| stored.iter().all(|finished| finished.id != *id));
        }
    }

    fn board(&self) -> MutexGuard<'_, Board<'a>> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, ticket: u64) -> Option<Permit<'a>> {
        let entry = {
            let mut board = self.board();
            board.hung.retain(|hung| hung.ticket != ticket);
            let place = board.at_work.iter().position(|entry| entry.ticket == ticket)?;
            board.at_work.swap_remove(place)
        };
        Some(entry.permit)
    }
}

/// The right to give an image its outcome; lost where its thread is written off. A thread that panics leaves no entry.
pub struct Ticket<'d, 'a> {
    desk: &'d Desk<'a>,
    number: u64,
}

impl<'a> Ticket<'_, 'a> {
    /// The thread is back, with its permit. `None` where it was written off meanwhile: its image has its outcome, and
    /// what it brings is dropped.
    #[must_use]
    pub fn finish(self) -> Option<Permit<'a>> {
        self.desk.take(self.number)
    }
}

impl Drop for Ticket<'_, '_> {
    fn drop(&mut self) {
        drop(self.desk.take(self.number));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::cores::Cores;
    use super::super::message::finished;
    use super::*;
    use crate::row::{Claim, Outcome, Stage, Token};

    const LIMIT: Duration = Duration::from_secs(2);
    const SECOND: Duration = Duration::from_secs(1);

    fn claim(id: i64) -> Claim {
        let (id, token, path) = (ImageId(id), Token(1), PathBuf::from(format!("/photos/{id}.jpg")));
        Claim { id, token, stage: Stage::Detect, path, prompt: None, seen: None, scale: None, regions: None }
    }

    fn begin<'d, 'a>(
        desk: &'d Desk<'a>,
        id: i64,
        permit: Permit<'a>,
        give_up: impl FnOnce(RowError) + Send + 'a,
    ) -> Ticket<'d, 'a> {
        desk.begin(ImageId(id), &claim(id).path, permit, give_up)
    }

    fn cores() -> Cores {
        Cores::new(1, true, 2)
    }

    /// Looks until everybody who began before is over the limit.
    fn look_long(desk: &Desk<'_>) {
        (0..4).for_each(|_| desk.look(SECOND));
    }

    #[test]
    fn a_thread_that_comes_back_in_time_has_its_permit_and_gives_the_outcome_itself() {
        let (cores, given_up) = (cores(), AtomicUsize::new(0));
        let desk = Desk::new(LIMIT);
        let ticket = begin(&desk, 1, cores.one(), |_| _ = given_up.fetch_add(1, Ordering::SeqCst));
        (0..3).for_each(|_| desk.look(SECOND));
        assert!(ticket.finish().is_some());
        look_long(&desk);
        assert_eq!(given_up.load(Ordering::SeqCst), 0);
        assert!(desk.hung().is_empty() && desk.is_settled());
    }

    #[test]
    fn a_thread_over_the_limit_is_written_off_once_and_comes_back_to_nothing() {
        let (cores, errors) = (cores(), Mutex::new(Vec::new()));
        let desk = Desk::new(LIMIT);
        let ticket = begin(&desk, 7, cores.one(), |error| errors.lock().unwrap().push(error));
        look_long(&desk);
        look_long(&desk);
        let given: Vec<RowError> = errors.lock().unwrap().clone();
        assert_eq!(given.iter().map(|error| error.code).collect::<Vec<_>>(), [RowCode::TimedOut]);
        assert!(given[0].message.contains("/photos/7.jpg") && given[0].message.contains("2 s"), "{}", given[0].message);
        assert_eq!(desk.hung(), [PathBuf::from("/photos/7.jpg")]);
        // Its permit is the only one, and another has it now.
        let other = cores.one();
        assert!(ticket.finish().is_none(), "two would give the outcome");
        assert!(desk.hung().is_empty(), "it is back");
        drop(other);
    }

    #[test]
    fn an_outcome_that_was_given_up_is_waited_for_until_it_is_stored() {
        let cores = cores();
        let desk = Desk::new(LIMIT);
        let _hangs = begin(&desk, 3, cores.none(), |_| ());
        look_long(&desk);
        let stored = |id| finished(&claim(id), None, Outcome::FileChanged);
        desk.settle(&[stored(2), stored(4)]);
        assert!(!desk.is_settled());
        desk.settle(&[stored(3)]);
        assert!(desk.is_settled() && desk.hung().len() == 1);
    }

    #[test]
    fn time_in_which_nobody_looked_makes_nobody_old() {
        let (cores, given_up) = (cores(), AtomicUsize::new(0));
        let desk = Desk::new(LIMIT);
        let ticket = begin(&desk, 1, cores.none(), |_| _ = given_up.fetch_add(1, Ordering::SeqCst));
        desk.look(SECOND);
        desk.look(3600 * SECOND);
        assert!(ticket.finish().is_some());
        assert_eq!(given_up.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_panic_leaves_no_entry() {
        let cores = cores();
        let desk = Desk::new(LIMIT);
        std::thread::scope(|scope| {
            let work = || {
                let _ticket = begin(&desk, 1, cores.one(), |_| ());
                panic!("a decoder");
            };
            assert!(scope.spawn(work).join().is_err());
        });
        drop(cores.one());
        look_long(&desk);
        assert!(desk.hung().is_empty());
    }

    #[test]
    fn whoever_is_first_gives_the_outcome_and_nobody_else() {
        let cores = Cores::new(1, false, 1);
        let (given_up, came_back) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let desk = Desk::new(Duration::ZERO);
        let threads: usize = 4;
        let images: usize = 500;
        let working = AtomicUsize::new(threads);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for i in 0..images {
                        let give_up = |_| _ = given_up.fetch_add(1, Ordering::SeqCst);
                        let ticket = begin(&desk, i as i64, cores.none(), give_up);
                        std::thread::sleep(Duration::from_micros(i as u64 % 7 * 20));
                        came_back.fetch_add(usize::from(ticket.finish().is_some()), Ordering::SeqCst);
                    }
                    working.fetch_sub(1, Ordering::SeqCst);
                });
            }
            while working.load(Ordering::SeqCst) > 0 {
                desk.look(Duration::from_micros(50));
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        assert!(desk.hung().is_empty());
        let (given_up, came_back) = (given_up.load(Ordering::SeqCst), came_back.load(Ordering::SeqCst));
        assert_eq!(given_up + came_back, threads * images);
        assert!(given_up > 0 && came_back > 0, "{given_up} given up, {came_back} came back: no race was seen");
    }
}
