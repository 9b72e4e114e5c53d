//! Little room on a disk, and one that is not there, are told at the start and not at three in the morning.

use std::path::{Path, PathBuf};

use croprow::db::Db;
use croprow::error::Error;
use croprow::file_system::{Bytes, FileSystem, is_empty};
use croprow::printable;

use super::say;

/// Less room than this on a disk that a run writes to is worth a word: a night of work rarely takes less.
const LEAST_FREE_BYTES: u64 = 512 << 20;

/// Looks at the disks of the database with its log, and of the crops. Nothing is written to a temporary folder.
pub(crate) fn tell_where_short(db: &Db, crops: Option<&Path>) {
    let mut told: Vec<PathBuf> = Vec::new();
    for (what, path) in [("the database and its log grow", Some(db.path())), ("the crops grow", crops)] {
        let Some(disk) = path.and_then(|path| FileSystem::of(path).ok()) else { continue };
        if disk.free_bytes < LEAST_FREE_BYTES && !told.contains(&disk.mount_point) {
            say(&format!("{disk}, and {what} there; below {} that is little", Bytes(LEAST_FREE_BYTES)));
            told.push(disk.mount_point);
        }
    }
}

/// A folder of crops that was there is not made again: its disk is not mounted, and another would fill up.
///
/// # Errors
/// It is not there or empty, and rows name crops.
pub(crate) fn check_crops(db: &Db, folder: &Path) -> Result<(), Error> {
    let is_there = folder.exists() && !is_empty(folder);
    if is_there || !db.crop_folders()?.iter().any(|known| known == folder) || !db.has_crops()? {
        return Ok(());
    }
    Err(Error::StartUp(format!(
        "--crops {}: crops of finished images were in it, and it is not there or empty; bring its disk back, or name another \
         folder; where they are gone for good, make this one with any file in it",
        printable::path(folder)
    )))
}
