//! The breaker: a disk or network folder that vanishes must not mark ten thousand rows as failed, and neither must a system
//! that is short of something. A file that cannot be read is the file's fault only while others of its place can be.
//! [`Places`] gathers the evidence where a file was refused, [`Breaker`] draws the conclusion before an outcome is stored.
//!
//! Where the folder of a file is gone nobody can tell a deleted folder from a disk that is not there. Such outcomes are held
//! back, and their number decides: many of one place end the run, a handful fails at the end.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;

use super::message::Refused;
use super::seen_folders::SeenFolders;
use super::stop::{Cause, Stop};
use crate::error::Error;
use crate::file_system::is_empty;
use crate::pixels::header::Probed;
use crate::pixels::patience::is_shortage;
use crate::printable;
use crate::row::{Finished, Lost, RowCode, RowError};

/// File systems that are remembered; of more, the one that was read the longest time ago is forgotten.
const PLACES: usize = 16;

/// Files of each that are remembered, the latest. All of them must be unreadable: one alone may have been deleted.
const FILES: usize = 8;

/// So many outcomes of files whose folders are gone, below one folder of which nothing was read, and the run stops. Fewer
/// in all are failed rows.
const GONE_ROWS: usize = 20;

/// Outcomes that are held back at most. Of more the oldest is let through: all of its place are few, and others are read.
const HELD_MOST: usize = 1024;

/// What was read in this run, and where.
#[derive(Debug, Default)]
pub struct Places(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Files that were read, by file system. The one that was read last is the last.
    places: Vec<Place>,
    seen_folders: SeenFolders,
}

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
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(folder) = path.parent() {
            known.seen_folders.add(folder);
        }
        let places = &mut known.places;
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
            _ if error.os_error.is_some_and(is_shortage) => Some(Lost::Shortage(error.message.clone())),
            RowCode::Missing | RowCode::Permission | RowCode::Io => self.lost(path),
            _ => None,
        };
        Refused { error, lost }
    }

    fn lost(&self, path: &Path) -> Option<Lost> {
        if let Some(place) = self.gone_place(path) {
            return Some(Lost::Place(place));
        }
        let folder = path.parent().filter(|folder| is_gone(folder))?;
        let gone = uppermost_gone(folder);
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let unread = known.seen_folders.unread_above(&gone).to_owned();
        Some(Lost::Folder { gone, unread })
    }

    fn gone_place(&self, path: &Path) -> Option<PathBuf> {
        // Not held while files are looked at.
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner).places.clone();
        // Of several the one that the file would lie in, or the latest: a disk whose files are all done may be gone.
        let place = places.iter().max_by_key(|place| place.files.back().map_or(0, |file| in_common(file, path)))?;
        // Mostly the latest file is still there, and this is all there is to do.
        if place.files.iter().rev().any(|file| is_readable(file)) {
            return None;
        }
        let folder = place.files.back().and_then(|file| file.parent())?;
        Some(uppermost_gone(folder))
    }
}

/// Components from the root on that two paths share.
fn in_common(a: &Path, b: &Path) -> usize {
    a.components().zip(b.components()).take_while(|(a, b)| a == b).count()
}

/// True where a byte of the file can be read, or it has none; and where a shortage says nothing of it.
fn is_readable(path: &Path) -> bool {
    // As where images are opened: nothing here may wait for the other end of a pipe.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let read = file.and_then(|mut file| file.read(&mut [0]));
    read.map_or_else(|e| e.raw_os_error().is_some_and(is_shortage), |_| true)
}

/// The folder nearest to the root that cannot be looked at, of `folder` and those above it; `folder` itself where all
/// can.
fn uppermost_gone(folder: &Path) -> PathBuf {
    folder.ancestors().take_while(|above| is_gone(above)).last().unwrap_or(folder).to_owned()
}

/// True for a folder that cannot be looked at, or has nothing in it: what a disk leaves that is not mounted. A path that names
/// none is in the current folder.
fn is_gone(folder: &Path) -> bool {
    !folder.as_os_str().is_empty() && (folder.metadata().is_err() || is_empty(folder))
}

/// Holds outcomes back that may not be their rows' fault. Belongs to the one thread that stores outcomes.
#[derive(Debug, Default)]
pub struct Breaker {
    held: VecDeque<Held>,
    tripped: Option<Error>,
}

#[derive(Debug)]
struct Held {
    finished: Finished,
    /// The uppermost folder on the way to its file that is gone.
    gone: PathBuf,
}

impl Breaker {
    /// Adds to `batch` what may be stored now. A stop is asked for when a place is found to be gone, or the system is short
    /// of something; rows whose outcome was held back are then pending again.
    pub fn sift(&mut self, mut finished: Finished, batch: &mut Vec<Finished>, stop: &Stop) {
        match finished.lost.take() {
            None => batch.push(finished),
            Some(_) if self.tripped.is_some() => {}
            Some(Lost::Shortage(message)) => self.trip(Error::Shortage(message), stop),
            Some(Lost::Place(folder)) => self.trip(Error::PlaceGone { folder, was_read: true }, stop),
            Some(Lost::Folder { gone, unread }) => {
                self.held.push_back(Held { finished, gone });
                let near: Vec<&Path> = self.gone().filter(|gone| gone.starts_with(&unread)).collect();
                if near.len() >= GONE_ROWS {
                    let folder = around(&near);
                    self.trip(Error::PlaceGone { folder, was_read: false }, stop);
                } else if self.held.len() > HELD_MOST {
                    batch.extend(self.held.pop_front().map(|held| held.finished));
                }
            }
        }
    }

    /// Outcomes that are held back.
    pub fn held(&self) -> u64 {
        self.held.len() as u64
    }

    /// All of their places have been seen, and they are few: they are failed rows.
    pub fn let_through(&mut self, batch: &mut Vec<Finished>) {
        batch.extend(self.held.drain(..).map(|held| held.finished));
    }

    /// Nothing more comes, and there is more in their places that nobody looked at: whether they are gone for good cannot
    /// be told.
    pub fn leave_open(&mut self, stop: &Stop) {
        if self.held() > 0 {
            let folder = around(&self.gone().collect::<Vec<_>>());
            self.trip(Error::PlaceGone { folder, was_read: false }, stop);
        }
    }

    /// The run ends for another reason, and whether they are gone for good cannot be told: their rows are pending again.
    pub fn give_back(&mut self) {
        if self.held() > 0 {
            let folder = around(&self.gone().collect::<Vec<_>>());
            log::warn!(
                "{} images below {} are pending again and not marked: the folders of their files are not there",
                self.held(),
                printable::path(&folder)
            );
            self.held.clear();
        }
    }

    fn gone(&self) -> impl Iterator<Item = &Path> {
        self.held.iter().map(|held| held.gone.as_path())
    }

    /// How it ended.
    ///
    /// # Errors
    /// A place was gone.
    pub fn verdict(self) -> Result<(), Error> {
        self.tripped.map_or(Ok(()), Err)
    }

    fn trip(&mut self, error: Error, stop: &Stop) {
        self.held.clear();
        if self.tripped.is_none() {
            stop.ask(Cause::from(&error));
            self.tripped = Some(error);
        }
    }
}

/// The folder around all of these; the last of them where that is only the root.
fn around(folders: &[&Path]) -> PathBuf {
    let last = folders.last().copied().unwrap_or(Path::new(""));
    let is_around = |folder: &&Path| folders.iter().all(|inner| inner.starts_with(folder));
    last.ancestors().find(is_around).filter(|folder| folder.parent().is_some()).unwrap_or(last).to_owned()
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

    fn folder_is_lost(gone: &Path, unread: &Path) -> Option<Lost> {
        Some(Lost::Folder { gone: gone.to_owned(), unread: unread.to_owned() })
    }

    #[test]
    fn before_anything_was_read_a_file_is_lost_when_its_folder_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let places = Places::default();
        let empty = folder_is_lost(folder.path(), Path::new("/"));
        assert_eq!(lost(&places, &folder.path().join("gone.jpg"), RowCode::Missing), empty, "an empty mount point");
        fs::write(folder.path().join("notes.txt"), "x").unwrap();
        assert_eq!(lost(&places, &folder.path().join("gone.jpg"), RowCode::Missing), None);
        assert_eq!(lost(&places, Path::new("gone.jpg"), RowCode::Missing), None, "the current folder is there");
        let disk = folder.path().join("disk");
        let expected = folder_is_lost(&disk, Path::new("/"));
        assert_eq!(lost(&places, &disk.join("2024/05/a.jpg"), RowCode::Missing), expected);
        places.remember(&folder.path().join("read-and-deleted.jpg"), 1);
        assert!(matches!(lost(&places, &disk.join("a.jpg"), RowCode::Missing), Some(Lost::Place(_))));
    }

    #[test]
    fn while_other_files_are_read_a_file_is_lost_when_its_folder_is_gone_and_not_when_it_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let (pictures, archive) = (folder.path().join("pictures"), folder.path().join("archive"));
        let places = Places::default();
        fs::create_dir_all(pictures.join("a")).unwrap();
        fs::write(pictures.join("a/1.jpg"), "x").unwrap();
        places.remember(&pictures.join("a/1.jpg"), 1);
        assert_eq!(lost(&places, &pictures.join("a/gone.jpg"), RowCode::Missing), None);
        assert_eq!(lost(&places, &archive.join("2019/1.jpg"), RowCode::Missing), folder_is_lost(&archive, &archive));
        // Where the folder of the mount stays, empty or with something in it, it is still all of it that was never read.
        fs::create_dir(&archive).unwrap();
        let year = archive.join("2019");
        assert_eq!(lost(&places, &year.join("1.jpg"), RowCode::Missing), folder_is_lost(&archive, &archive));
        fs::write(archive.join("notes.txt"), "x").unwrap();
        assert_eq!(lost(&places, &year.join("1.jpg"), RowCode::Missing), folder_is_lost(&year, &archive));
        let beside = pictures.join("b");
        assert_eq!(lost(&places, &beside.join("1.jpg"), RowCode::Missing), folder_is_lost(&beside, &beside));
    }

    #[test]
    fn a_shortage_of_the_system_is_no_files_fault_and_says_nothing_of_others() {
        let places = Places::default();
        let error = |os_error| RowError { os_error: Some(os_error), ..RowError::new(RowCode::Io, "/a.jpg: too many") };
        let short = places.doubt(Path::new("/a.jpg"), error(rustix::io::Errno::MFILE.raw_os_error()));
        assert_eq!(short.lost, Some(Lost::Shortage("/a.jpg: too many".into())));
        assert_eq!(places.doubt(Path::new("/a.jpg"), error(rustix::io::Errno::IO.raw_os_error())).lost, None);
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        breaker.sift(outcome(short.lost), &mut batch, &stop);
        assert!(batch.is_empty() && stop.is_asked());
        let error = breaker.verdict().unwrap_err();
        assert!(error.exit_code() == 3 && error.to_string().contains("/a.jpg: too many"), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("ulimit -n")));
    }

    #[test]
    fn many_file_systems_are_remembered_and_not_all() {
        let places = Places::default();
        for device in 0..100 {
            places.remember(Path::new("/nowhere/a.jpg"), device);
        }
        let kept: Vec<u64> = places.0.lock().unwrap().places.iter().map(|place| place.device).collect();
        assert_eq!(kept, (84..100).collect::<Vec<_>>());
    }

    fn gone(gone: &str, unread: &str) -> Finished {
        outcome(folder_is_lost(Path::new(gone), Path::new(unread)))
    }

    #[test]
    fn twenty_outcomes_of_a_folder_that_is_gone_trip_it_whatever_else_was_read_and_none_is_stored() {
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        for n in 1..=25 {
            breaker.sift(outcome(None), &mut batch, &stop);
            breaker.sift(gone("/disk", "/disk"), &mut batch, &stop);
            assert_eq!(stop.is_asked(), n >= 20, "{n}");
        }
        assert_eq!(batch.len(), 25);
        let error = breaker.verdict().unwrap_err();
        assert!(error.exit_code() == 3 && error.to_string().contains("/disk"), "{error}");
    }

    #[test]
    fn small_folders_of_a_disk_of_which_nothing_was_read_count_together_and_others_do_not() {
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        for n in 0..19 {
            // Nothing was read yet when it was looked for.
            breaker.sift(gone(&format!("/mnt/archive/{n}"), "/"), &mut batch, &stop);
        }
        for n in 0..200 {
            let deleted = format!("/pictures/{n}");
            breaker.sift(gone(&deleted, &deleted), &mut batch, &stop);
        }
        assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (0, 219, false));
        breaker.sift(gone("/mnt/archive/20", "/mnt/archive"), &mut batch, &stop);
        assert_eq!((batch.len(), breaker.held()), (0, 0));
        let error = breaker.verdict().unwrap_err();
        assert!(matches!(&error, Error::PlaceGone { folder, .. } if folder == Path::new("/mnt/archive")), "{error}");
    }

    #[test]
    fn of_many_small_folders_that_are_gone_the_oldest_are_let_through() {
        let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
        for n in 0..HELD_MOST + 100 {
            let deleted = format!("/pictures/{n}");
            breaker.sift(gone(&deleted, &deleted), &mut batch, &stop);
        }
        assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (100, HELD_MOST as u64, false));
    }

    #[test]
    fn a_handful_is_let_through_or_given_back_or_left_open() {
        let held = || {
            let (stop, mut breaker, mut batch) = (Stop::default(), Breaker::default(), Vec::new());
            (0..19).for_each(|_| breaker.sift(gone("/disk", "/"), &mut batch, &stop));
            breaker.sift(outcome(None), &mut batch, &stop);
            assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (1, 19, false), "others say nothing of them");
            (stop, breaker, batch)
        };
        let (stop, mut breaker, mut batch) = held();
        breaker.let_through(&mut batch);
        assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (20, 0, false));
        assert!(breaker.verdict().is_ok());
        let (stop, mut breaker, batch) = held();
        breaker.give_back();
        assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (1, 0, false));
        assert!(breaker.verdict().is_ok());
        let (stop, mut breaker, batch) = held();
        breaker.leave_open(&stop);
        assert_eq!((batch.len(), breaker.held(), stop.is_asked()), (1, 0, true));
        assert!(matches!(breaker.verdict(), Err(Error::PlaceGone { was_read: false, .. })));
        let mut nothing = Breaker::default();
        nothing.leave_open(&Stop::default());
        assert!(nothing.verdict().is_ok());
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
