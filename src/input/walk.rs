//! Files and folders. A file that was named is taken whatever it is; a folder is searched for images, depth
//! first, by name within each folder, so that the order of the rows is stable.
//!
//! Left out: names that begin with a dot (`.thumbnails`, the `._x.jpg` of macOS), unless the user named them;
//! links to folders, unless the user named them. A link to a file is a row under its own path. Every real
//! folder is entered once, whichever way it is reached, so loops end. Memory holds the names of the folders
//! that are open, not the tree. The database itself is left out, too, whatever name leads to it.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, DirEntry, FileType, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::record::Rows;
use super::{io_reason, source_error};
use crate::error::Error;
use crate::locked::FileId;
use crate::pixels::sniff;
use crate::row::FileStamp;

/// First bytes of a file whose name does not say that it is an image.
const SNIFF_BYTES: u64 = 64;

/// Pushes the rows of every source.
pub(super) fn read(sources: &[PathBuf], rows: &mut Rows<'_>) -> Result<(), Error> {
    let mut walk = Walk { rows, entered: HashSet::new() };
    for source in sources {
        let path = std::path::absolute(source).map_err(|e| source_error(source, io_reason(&e)))?;
        let metadata = path.metadata().map_err(|e| source_error(source, io_reason(&e)))?;
        if metadata.is_dir() {
            walk.folder(path, &metadata)?;
        } else if FileId::from(&metadata).is_locked() {
            // `croprow add photos.db *`
            walk.rows.report_mut().not_images += 1;
        } else {
            walk.rows.file(path, stamp(&metadata))?;
        }
    }
    Ok(())
}

/// Size and time as they are stored beside a row.
fn stamp(metadata: &Metadata) -> FileStamp {
    FileStamp {
        size_bytes: i64::try_from(metadata.size()).unwrap_or(i64::MAX),
        mtime_ns: metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()),
    }
}

struct Walk<'r, 'a> {
    rows: &'r mut Rows<'a>,
    /// Device and inode.
    entered: HashSet<(u64, u64)>,
}

/// An open folder: what is left of its names, in order.
struct Level {
    path: PathBuf,
    names: std::vec::IntoIter<(OsString, FileType)>,
}

impl Walk<'_, '_> {
    /// Own stack: a tree may be deeper than a thread's.
    fn folder(&mut self, path: PathBuf, metadata: &Metadata) -> Result<(), Error> {
        let mut levels: Vec<Level> = self.enter(path, metadata).into_iter().collect();
        while let Some(level) = levels.last_mut() {
            let Some((name, kind)) = level.names.next() else {
                levels.pop();
                continue;
            };
            let path = level.path.join(name);
            if !kind.is_dir() {
                self.entry(path, kind)?;
                continue;
            }
            match path.symlink_metadata() {
                Ok(metadata) => levels.extend(self.enter(path, &metadata)),
                Err(e) => self.rows.unreadable(&path, &e),
            }
        }
        Ok(())
    }

    /// Opens a folder that has not been entered yet. What of it cannot be read is reported.
    fn enter(&mut self, path: PathBuf, metadata: &Metadata) -> Option<Level> {
        if !self.entered.insert((metadata.dev(), metadata.ino())) {
            return None;
        }
        let entries = fs::read_dir(&path).map_err(|e| self.rows.unreadable(&path, &e)).ok()?;
        self.rows.report_mut().folders += 1;
        let mut names = Vec::new();
        for entry in entries {
            match entry.and_then(|e| named(&e)) {
                Ok(named) => names.extend(named),
                Err(e) => self.rows.unreadable(&path, &e),
            }
        }
        names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        Some(Level { path, names: names.into_iter() })
    }

    /// Anything but a folder. Pipes and devices are never opened: that could block for ever.
    fn entry(&mut self, path: PathBuf, kind: FileType) -> Result<(), Error> {
        if !kind.is_file() && !kind.is_symlink() {
            self.rows.report_mut().not_images += 1;
            return Ok(());
        }
        let metadata = match path.metadata() {
            Ok(metadata) => metadata,
            Err(e) => {
                self.rows.unreadable(&path, &e);
                return Ok(());
            }
        };
        if metadata.is_dir() {
            return Ok(());
        }
        let is_image = match metadata.is_file() {
            true if FileId::from(&metadata).is_locked() => Ok(false),
            true if sniff::has_image_extension(&path) => Ok(true),
            true => looks_like_image(&path),
            false => Ok(false),
        };
        match is_image {
            Ok(true) => return self.rows.file(path, stamp(&metadata)),
            Ok(false) => self.rows.report_mut().not_images += 1,
            Err(e) => self.rows.unreadable(&path, &e),
        }
        Ok(())
    }
}

/// Name and kind, unless it is hidden. The kind is that of a link itself, not of what it points to.
fn named(entry: &DirEntry) -> io::Result<Option<(OsString, FileType)>> {
    let name = entry.file_name();
    if name.as_bytes().starts_with(b".") { Ok(None) } else { Ok(Some((name, entry.file_type()?))) }
}

fn looks_like_image(path: &Path) -> io::Result<bool> {
    // The name may have become a pipe's since it was listed; without the flag the open would wait for a writer.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(nonblock).open(path)?;
    if !file.metadata()?.is_file() {
        return Ok(false);
    }
    let mut first = Vec::new();
    file.take(SNIFF_BYTES).read_to_end(&mut first)?;
    Ok(sniff::looks_like_image(&first))
}
