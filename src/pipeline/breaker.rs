//! The breaker: a disk or network folder that vanishes must not mark ten thousand rows as failed. A file that cannot be
//! read is the file's fault only while others can be. [`Places`] gathers the evidence where a file was refused,
//! [`Breaker`] draws the conclusion before an outcome is stored.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;

use super::message::Refused;
use super::stop::{Cause, Stop};
use crate::error::Error;
use crate::pixels::header::Probed;
use crate::row::{Finished, Lost, RowCode, RowError};

/// File systems that are remembered; of more, the one that was read the longest time ago is forgotten.
const PLACES: usize = 16;

/// Files of each that are remembered, the latest. All of them must be unreadable: one alone may have been deleted.
const FILES: usize = 8;

/// So many outcomes at the very start that are all of lost files, and the run stops. Fewer in all are failed rows.
const OPENING_ROWS: usize = 20;

/// Files that were read, by file system.
#[derive(Debug, Default)]
pub struct Places(Mutex<Vec<Place>>);

#[derive(Clone, Debug)]
struct Place {
    device: u64,
    /// The latest last.
    files: VecDeque<PathBuf>,
}

impl Places {
    /// Remembers a file whose header was read.
    pub fn was_read(&self, file: &Probed) {
        self.remember(&file.path, file.device);
    }

    fn remember(&self, path: &Path, device: u64) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut place = match places.iter().position(|place| place.device == device) {
            Some(i) => places.remove(i),
            None => Place { device, files: VecDeque::with_capacity(FILES) },
        };
        if place.files.len() == FILES {
            place.files.pop_front();
        }
        place.files.push_back(path.to_owned());
        if places.len() == PLACES {
            places.remove(0);
        }
        places.push(place);
    }

    /// What is to be made of the refusal of `path`. Looks at files, so it may wait for a disk.
    pub fn doubt(&self, path: &Path, error: RowError) -> Refused {
        let lost = match error.code {
            RowCode::Missing | RowCode::Permission | RowCode::Io => self.lost(path),
            _ => None,
        };
        Refused { error, lost }
    }

    fn lost(&self, path: &Path) -> Option<Lost> {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if places.is_empty() {
            let folder = path.parent().filter(|folder| folder.metadata().is_err())?;
            return Some(Lost::Folder(uppermost_gone(folder)));
        }
        // Of several the one that the file would lie in, or the latest: a disk whose files are all done may be gone.
        let place = places.iter().max_by_key(|place| place.files.back().map_or(0, |file| in_common(file, path)))?;
        // Mostly the latest file is still there, and this is all there is to do.
        if place.files.iter().rev().any(|file| is_readable(file)) {
            return None;
        }
        let folder = place.files.back().and_then(|file| file.parent())?;
        Some(Lost::Place(uppermost_gone(folder)))
    }
}

/// Components from the root on that two paths share.
fn in_common(a: &Path, b: &Path) -> usize {
    a.components().zip(b.components()).take_while(|(a, b)| a == b).count()
}

/// True where a byte of the file can be read, or it has none.
fn is_readable(path: &Path) -> bool {
    // As where images are opened: nothing here may wait for the other end of a pipe.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
    file.and_then(|mut file| file.read(&mut [0])).is_ok()
}

/// The folder nearest to the root that cannot be looked at, of `folder` and those above it; `folder` itself where all
/// can.
fn uppermost_gone(folder: &Path) -> PathBuf {
    folder.ancestors().take_while(|above| above.metadata().is_err()).last().unwrap_or(folder).to_owned()
}

/// Holds outcomes back that may not be their rows' fault. Belongs to the one thread that stores outcomes.
#[derive(Debug, Default)]
pub struct Breaker {
    /// All that there was so far.
    opening: Vec<Finished>,
    is_open: bool,
    tripped: Option<Error>,
}

impl Breaker {
    /// Adds to `batch` what may be stored now. A stop is asked for when a place is found to be gone; rows whose outcome
    /// was held back are then pending again.
    pub fn sift(&mut self, finished: Finished, batch: &mut Vec<Finished>, stop: &Stop) {
        match finished.lost.clone() {
            Some(_) if self.tripped.is_some() => {}
            Some(Lost::Place(folder)) => self.trip(Error::PlaceGone { folder, was_read: true }, stop),
            Some(Lost::Folder(folder)) if !self.is_open => {
                self.opening.push(finished);
                if self.opening.len() >= OPENING_ROWS {
                    self.trip(Error::PlaceGone { folder, was_read: false }, stop);
                }
            }
            Some(Lost::Folder(_)) | None => {
                self.let_through(batch);
                batch.push(finished);
            }
        }
    }

    /// Outcomes that are held back.
    pub fn held(&self) -> u64 {
        self.opening.len() as u64
    }

    /// Nothing more comes that could say otherwise: they are failed rows.
    pub fn let_through(&mut self, batch: &mut Vec<Finished>) {
        self.is_open = true;
        batch.append(&mut self.opening);
    }

    /// How it ended.
    ///
    /// # Errors
    /// A place was gone.
    pub fn verdict(self) -> Result<(), Error> {
        self.tripped.map_or(Ok(()), Err)
    }

    fn trip(&mut self, error: Error, stop: &Stop) {
        self.opening.clear();
        if self.tripped.is_none() {
            stop.ask(Cause::from(&error));
            self.tripped = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::row::{ImageId, Outcome, Stage, Token};

    fn lost(places: &Places, path: &Path, code: RowCode) -> Option<Lost> {
        places.doubt(path, RowError::new(code, "x")).lost
    }

    fn outcome(lost: Option<Lost>) -> Finished {
        let outcome = Outcome::Failed(RowError::new(RowCode::Missing, "x"));
        Finished { id: ImageId(1), token: Token(1), stage: Stage::Detect, facts: None, stamp: None, lost, outcome }
    }

    #[test]
    fn a_file_is_lost_only_when_all_files_read_before_it_on_a_file_system_are_unreadable() {
        let folder = tempfile::tempdir().unwrap();
        let mount = folder.path().join("disk/photos");
        fs::create_dir_all(&mount).unwrap();
        let file = |n: usize| mount.join(format!("{n}.jpg"));
        let places = Places::default();
        for n in 0..12 {
            fs::write(file(n), "x").unwrap();
            places.remember(&file(n), 1);
        }
        let other = folder.path().join("other.jpg");
        fs::write(&other, "").unwrap();
        places.remember(&other, 2);
        let gone = mount.join("gone.jpg");
        assert_eq!(lost(&places, &gone, RowCode::Missing), None, "one missing file in a sound folder");
        for n in 5..12 {
            fs::remove_file(file(n)).unwrap();
        }
        assert_eq!(lost(&places, &gone, RowCode::Io), None, "one of the eight is still there");
        fs::remove_file(file(4)).unwrap();
        let place = |folder: &Path| Some(Lost::Place(folder.to_owned()));
        assert_eq!(lost(&places, &gone, RowCode::Missing), place(&mount), "the folder of a mount that is gone stays");
        assert_eq!(lost(&places, &gone, RowCode::Decode), None, "that is about the content");
        let elsewhere = folder.path().join("gone.jpg");
        assert_eq!(lost(&places, &elsewhere, RowCode::Missing), None, "a disk that is not wanted any more");
        fs::rename(folder.path().join("disk"), folder.path().join("elsewhere")).unwrap();
        let disk = folder.path().join("disk");
        for code in [RowCode::Missing, RowCode::Permission, RowCode::Io] {
            assert_eq!(lost(&places, &gone, code), place(&disk), "{code}: the uppermost folder that is gone");
        }
    }

    #[test]
    fn before_anything_was_read_a_file_is_lost_when_its_folder_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let places = Places::default();
        assert_eq!(lost(&places, &folder.path().join("gone.jpg"), RowCode::Missing), None);
        let disk = folder.path().join("disk");
        let expected = Some(Lost::Folder(disk.clone()));
        assert_eq!(lost(&places, &disk.join("2024/05/a.jpg"), RowCode::Missing), expected);
        places.remember(&folder.path().join("read-and-deleted.jpg"), 1);
        assert!(matches!(lost(&places, &disk.join("a.jpg"), RowCode::Missing), Some(Lost::Place(_))));
    }

    #[test]
    fn many_file_systems_are_remembered_and_not_all() {
        let places = Places::default();
        for device in 0..100 {
            places.remember(Path::new("/nowhere/a.jpg"), device);
        }
        let kept: Vec<u64> = places.0.lock().unwrap().iter().map(|place| place.device).collect();
        assert_eq!(kept, (84..100).collect::<Vec<_>>());
    }

    #[test]
    fn the_first_twenty_outcomes_trip_it_if_all_are_lost_and_none_is_stored() {
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        let gone = || outcome(Some(Lost::Folder("/disk".into())));
        for n in 1..=25 {
            breaker.sift(gone(), &mut batch, &stop);
            assert_eq!(stop.is_asked(), n >= 20, "{n}");
        }
        assert!(batch.is_empty());
        let error = breaker.verdict().unwrap_err();
        assert!(error.exit_code() == 3 && error.to_string().contains("/disk"), "{error}");
    }

    #[test]
    fn any_other_outcome_lets_through_what_was_held_back() {
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        let gone = || outcome(Some(Lost::Folder("/disk".into())));
        (0..19).for_each(|_| breaker.sift(gone(), &mut batch, &stop));
        assert_eq!((batch.len(), breaker.held()), (0, 19));
        breaker.sift(outcome(None), &mut batch, &stop);
        (0..19).for_each(|_| breaker.sift(gone(), &mut batch, &stop));
        assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (39, 0, false));
        assert!(breaker.verdict().is_ok());
    }

    #[test]
    fn a_place_that_was_read_and_is_gone_trips_it_at_once_and_sound_outcomes_are_still_stored() {
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        let gone = || outcome(Some(Lost::Place("/disk".into())));
        breaker.sift(outcome(None), &mut batch, &stop);
        breaker.sift(gone(), &mut batch, &stop);
        breaker.sift(gone(), &mut batch, &stop);
        breaker.sift(outcome(None), &mut batch, &stop);
        assert_eq!(batch.len(), 2);
        assert!(matches!(stop.cause(), Some(Cause::Fault { exit_code: 3, message }) if message.contains("/disk")));
        assert!(breaker.verdict().is_err());
    }
}
