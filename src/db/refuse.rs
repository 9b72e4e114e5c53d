//! What is refused before anything is written: files that are no database, other programs' databases, newer schemas,
//! network file systems. And how SQLite's refusals are put into words.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rusqlite::{Connection, ErrorCode};

use super::migrate::{APPLICATION_ID, SCHEMA};
use crate::error::{Error, is_damaged, is_of_disk};
use crate::file_system::{FileSystem, Reach};
use crate::locked::FileId;
use crate::printable;

/// SQLite before this can lose committed rows when two connections checkpoint (the WAL-reset fault):
/// <https://www.sqlite.org/wal.html#the_wal_reset_bug>.
const SQLITE_OLDEST: i32 = 3_051_003;

pub(super) fn open_error(path: &Path, reason: impl ToString) -> Error {
    Error::Open { path: path.to_owned(), reason: reason.to_string() }
}

fn unreadable(path: &Path, reason: impl ToString) -> Error {
    Error::Unreadable { path: path.to_owned(), reason: reason.to_string() }
}

/// What SQLite says when a database cannot be opened does not say what to do.
pub(super) fn refused(path: &Path, error: rusqlite::Error) -> Error {
    if is_damaged(&error) {
        return unreadable(
            path,
            format!(
                "{error}; the file is damaged: keep a copy, then try `sqlite3 FILE .recover`, or go back to a backup"
            ),
        );
    }
    if is_of_disk(&error) {
        return explained(path, Error::Database(error));
    }
    let remedy = match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            "; the database and its folder must be writable, since the log lies beside it; `croprow status` may still read it"
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            "; another program has it open in a transaction, end that first"
        }
        _ => "",
    };
    open_error(path, format!("{error}{remedy}"))
}

/// The same error; where the disk is to blame, with the file system of `database` and what is free there.
pub fn explained(database: &Path, error: Error) -> Error {
    match error {
        Error::Database(cause) if is_of_disk(&cause) => Error::disk(database, cause),
        other => other,
    }
}

/// # Errors
/// The library that was built in has a fault that loses rows.
pub(super) fn check_sqlite_version(path: &Path) -> Result<(), Error> {
    if rusqlite::version_number() >= SQLITE_OLDEST {
        return Ok(());
    }
    let version = rusqlite::version();
    Err(open_error(path, format!("this build holds SQLite {version}, which can lose rows; build with the bundled one")))
}

/// Looks at the first bytes, so that a text file or an empty one is refused without SQLite touching it.
pub(super) fn check_is_sqlite(path: &Path) -> Result<(), Error> {
    let metadata = std::fs::metadata(path).map_err(|e| open_error(path, e))?;
    if !metadata.is_file() {
        return Err(open_error(path, "is not a regular file; name the database file"));
    }
    if FileId::from(&metadata).is_locked() {
        // It was looked at when it was opened.
        return Ok(());
    }
    let mut magic = Vec::with_capacity(16);
    File::open(path).and_then(|f| f.take(16).read_to_end(&mut magic)).map_err(|e| unreadable(path, e))?;
    match magic.as_slice() {
        b"SQLite format 3\0" => Ok(()),
        [] => Err(unreadable(path, "is empty, so it is no database; remove it, or name another file")),
        _ => Err(unreadable(
            path,
            "is not an SQLite database, or an encrypted one; name another file (images are given after it)",
        )),
    }
}

/// SQLite's log needs shared memory and locks that a network file system does not give: it has been seen to damage
/// databases within a minute.
pub(super) fn check_reach(path: &Path, file_system: &FileSystem, allow_network: bool) -> Result<(), Error> {
    if file_system.reach() == Reach::Local {
        return Ok(());
    }
    let place = format!(
        "lies on {} ({}), which other machines or a host can write to",
        printable::path(&file_system.mount_point),
        file_system.kind().unwrap_or("network")
    );
    if allow_network {
        log::warn!("{} {place}: it can be damaged there; keep backups", printable::path(path));
        return Ok(());
    }
    Err(open_error(
        path,
        format!(
            "{place}: databases are damaged there; keep it on a local disk (the images may be anywhere), or insist with \
             --allow-network-filesystem"
        ),
    ))
}

/// What a database says of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    application: i32,
    version: i32,
    is_used: bool,
}

impl Head {
    pub(super) fn read(conn: &Connection) -> rusqlite::Result<Self> {
        let pragma = |name: &str| conn.query_row(&format!("PRAGMA {name}"), [], |r| r.get::<_, i32>(0));
        let is_used = conn.query_row("SELECT EXISTS (SELECT 1 FROM sqlite_schema)", [], |r| r.get(0))?;
        Ok(Self { application: pragma("application_id")?, version: pragma("user_version")?, is_used })
    }

    /// The schema version of a database that is ours or brand-new (0).
    ///
    /// # Errors
    /// It is another program's, or a newer croprow's.
    pub(super) fn schema(self, path: &Path) -> Result<usize, Error> {
        if self.is_used && self.application != APPLICATION_ID {
            return Err(open_error(
                path,
                "is an SQLite database of another program; croprow keeps its own: \
                 `croprow add NEW.db --from-sqlite FILE --query 'SELECT path FROM ...'` reads rows out of yours",
            ));
        }
        let version = usize::try_from(self.version).unwrap_or(usize::MAX);
        if version > SCHEMA {
            return Err(open_error(
                path,
                format!("has schema {version}, this croprow knows up to {SCHEMA}; use a newer croprow"),
            ));
        }
        Ok(version)
    }
}

/// The schema version of a database that is ours or brand-new (0).
pub(super) fn check_ours(conn: &Connection, path: &Path) -> Result<usize, Error> {
    Head::read(conn).map_err(|e| refused(path, e))?.schema(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rusqlite::ffi;

    #[test]
    fn the_bundled_library_has_no_wal_reset_fault() {
        assert!(rusqlite::version_number() >= SQLITE_OLDEST, "{}", rusqlite::version());
        check_sqlite_version(Path::new("/x.db")).unwrap();
    }

    #[test]
    fn a_full_disk_is_told_with_its_place_and_its_room_and_other_errors_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let db = folder.path().join("photos.db");
        for code in [ffi::SQLITE_FULL, ffi::SQLITE_IOERR_WRITE, ffi::SQLITE_IOERR_SHMSIZE, ffi::SQLITE_IOERR_FSYNC] {
            let error = explained(&db, Error::Database(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)));
            let text = error.to_string();
            assert!(matches!(error, Error::Disk { .. }) && error.exit_code() == 3, "{text}");
            assert!(text.contains("photos.db") && text.contains("free of") && error.hint().is_some(), "{text}");
        }
        for code in [ffi::SQLITE_CONSTRAINT, ffi::SQLITE_BUSY, ffi::SQLITE_IOERR_READ] {
            let error = explained(&db, Error::Database(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)));
            assert!(matches!(error, Error::Database(_)), "{error}");
        }
    }
}
