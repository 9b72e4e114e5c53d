//! Files that must not be opened and closed again: SQLite's locks hang on them. The system drops all locks that a process has on
//! a file as soon as the process closes it anywhere (`close` in fcntl(2)), and a database whose locks are gone is taken for
//! closed by the next program, which removes the log under it. Whoever opens files that people name asks here before.
//! <https://www.sqlite.org/howtocorrupt.html#_posix_advisory_locks_canceled_by_a_separate_thread_doing_close_>

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

/// What is locked now. A file that several connections have open is in it as often.
static LOCKED: RwLock<Vec<FileId>> = RwLock::new(Vec::new());

/// A file, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The file that `path` leads to.
    ///
    /// # Errors
    /// There is none, or it cannot be looked at.
    pub fn of(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|metadata| Self::from(&metadata))
    }

    /// From the numbers of `stat`.
    pub const fn new(device: u64, inode: u64) -> Self {
        Self { device, inode }
    }

    /// True where SQLite has it open in this process.
    pub fn is_locked(self) -> bool {
        LOCKED.read().unwrap_or_else(PoisonError::into_inner).contains(&self)
    }
}

impl From<&Metadata> for FileId {
    fn from(metadata: &Metadata) -> Self {
        Self::new(metadata.dev(), metadata.ino())
    }
}

/// True for a file that SQLite has open in this process, by whatever name; false where there is no file.
pub fn is_locked(path: &Path) -> bool {
    FileId::of(path).is_ok_and(FileId::is_locked)
}

/// Locked until this is dropped.
#[derive(Debug)]
pub struct Locked(Vec<FileId>);

impl Locked {
    /// Those of the files that are there.
    pub fn new(files: &[PathBuf]) -> Self {
        let ids: Vec<FileId> = files.iter().filter_map(|file| FileId::of(file).ok()).collect();
        LOCKED.write().unwrap_or_else(PoisonError::into_inner).extend(&ids);
        Self(ids)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let mut all = LOCKED.write().unwrap_or_else(PoisonError::into_inner);
        for id in &self.0 {
            if let Some(place) = all.iter().position(|locked| locked == id) {
                all.swap_remove(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_locked_by_every_name_until_the_last_that_has_it_open_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a.db", "link.jpg", "hard.jpg", "other.jpg", "gone"].map(|name| folder.path().join(name));
        std::fs::write(&names[0], "").unwrap();
        std::fs::write(&names[3], "").unwrap();
        std::os::unix::fs::symlink(&names[0], &names[1]).unwrap();
        std::fs::hard_link(&names[0], &names[2]).unwrap();
        let locked = || names.each_ref().map(|name| is_locked(name));
        let first = Locked::new(&[names[0].clone(), names[4].clone()]);
        let second = Locked::new(&names[..1]);
        assert_eq!(locked(), [true, true, true, false, false]);
        drop(first);
        assert_eq!(locked(), [true, true, true, false, false], "the second has it open still");
        drop(second);
        assert_eq!(locked(), [false; 5]);
    }
}
