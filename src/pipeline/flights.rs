//! Rows in flight: which there are, at which step, since when. So that a run that stands still can say at what.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::progress::Step;
use crate::config::STALLED_AFTER;
use crate::row::{Finished, ImageId};

/// The rows whose files were opened and whose outcomes are not stored yet.
#[derive(Debug, Default)]
pub struct Flights(Mutex<HashMap<ImageId, Flight>>);

/// A row on its way.
#[derive(Clone, Debug, PartialEq)]
pub struct Flight {
    /// The file.
    pub path: PathBuf,
    /// Where it is, or behind which step it waits.
    pub step: Step,
    /// When its file was opened.
    pub since: Instant,
}

impl Flights {
    /// The file of a row is about to be opened.
    pub fn begin(&self, id: ImageId, path: &Path) {
        self.open().insert(id, Flight { path: path.to_owned(), step: Step::Decode, since: Instant::now() });
    }

    /// These rows have come to a step.
    pub fn at(&self, step: Step, ids: impl IntoIterator<Item = ImageId>) {
        let mut flights = self.open();
        for id in ids {
            if let Some(flight) = flights.get_mut(&id) {
                flight.step = step;
            }
        }
    }

    /// Their outcomes are stored.
    pub fn end(&self, stored: &[Finished]) {
        let mut flights = self.open();
        for finished in stored {
            flights.remove(&finished.id);
        }
    }

    /// The row that is on its way for the longest time, and how many there are.
    pub fn oldest(&self) -> Option<(Flight, usize)> {
        let flights = self.open();
        let oldest = flights.values().min_by_key(|flight| flight.since)?;
        Some((oldest.clone(), flights.len()))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<ImageId, Flight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notices that a run stands still. Time in which the machine sleeps does not count.
#[derive(Debug)]
pub struct Stall {
    ended: u64,
    since: Instant,
    told: usize,
}

/// What is to be told of a stall.
#[derive(Debug, PartialEq)]
pub enum StallNews {
    /// No image has ended for so long.
    Still(Duration),
    /// Images end again.
    Over,
}

impl Stall {
    /// Begins at `now`.
    pub fn new(now: Instant) -> Self {
        Self { ended: 0, since: now, told: 0 }
    }

    /// Looks at how many images have ended; news once at each of [`STALLED_AFTER`], and once when it is over.
    pub fn look(&mut self, now: Instant, ended: u64, is_at_work: bool) -> Option<StallNews> {
        if ended != self.ended || !is_at_work {
            let was_told = std::mem::take(&mut self.told) > 0;
            (self.ended, self.since) = (ended, now);
            return was_told.then_some(StallNews::Over);
        }
        let still = now.duration_since(self.since);
        if STALLED_AFTER.get(self.told).is_none_or(|after| still < *after) {
            return None;
        }
        self.told += 1;
        Some(StallNews::Still(still))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_row_in_flight_is_named_with_its_step() {
        let flights = Flights::default();
        assert!(flights.oldest().is_none());
        let path = |n: i64| PathBuf::from(format!("/{n}.jpg"));
        for n in 1..=3 {
            flights.begin(ImageId(n), &path(n));
            std::thread::sleep(Duration::from_millis(2));
        }
        flights.at(Step::Detect, [ImageId(1), ImageId(2), ImageId(9)]);
        let (oldest, count) = flights.oldest().unwrap();
        assert_eq!((oldest.path, oldest.step, count), (path(1), Step::Detect, 3));
    }

    #[test]
    fn a_run_that_stands_still_is_told_after_a_minute_and_after_five_and_when_it_goes_on() {
        let began = Instant::now();
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        let mut stall = Stall::new(began);
        assert_eq!(stall.look(at(50), 1, true), None);
        let told: Vec<u64> = (51..=1_000).filter(|s| stall.look(at(*s), 1, true).is_some()).collect();
        assert_eq!(told, [110, 350], "60 s and 300 s after the last image, once each");
        assert_eq!(stall.look(at(1_001), 2, true), Some(StallNews::Over));
        assert_eq!(stall.look(at(1_002), 3, true), None);
        assert_eq!(stall.look(at(1_062), 3, true), Some(StallNews::Still(Duration::from_secs(60))), "and again");
        assert_eq!(stall.look(at(9_000), 3, false), Some(StallNews::Over));
        assert_eq!(stall.look(at(9_059), 3, true), None, "nothing was in flight in between");
    }
}
