//! `Error`: the run cannot go on. What concerns one row is a [`RowError`](crate::row::RowError).

use std::path::{Path, PathBuf};

use crate::file_system::FileSystem;
use crate::printable;

/// Why a command ended. Messages are lower-case fragments that name the path, the reason and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line or a setting is wrong. Nothing was touched.
    #[error("{0}")]
    Usage(String),
    /// A model, the runtime library or a device cannot be had. Nothing was touched.
    #[error("{0}")]
    StartUp(String),
    /// A source of rows cannot be read.
    #[error("{path}: {reason}", path = printable::path(path))]
    Source {
        /// What was read.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// The database cannot be opened or is not for this program. Nothing was touched.
    #[error("{path}: {reason}", path = printable::path(path))]
    Open {
        /// The database file.
        path: PathBuf,
        /// What is wrong and what helps.
        reason: String,
    },
    /// The file is damaged, or no database at all. Nothing was touched.
    #[error("{path}: {reason}", path = printable::path(path))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong and what helps.
        reason: String,
    },
    /// A statement failed on an open database.
    #[error("database: {0}")]
    Database(#[from] rusqlite::Error),
    /// The session failed for whole batches, not for single images.
    #[error("model: {0}")]
    Model(String),
    /// Memory of the host or the device does not suffice for a single image, even in a session opened anew.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The device is gone; only a new process can have it back.
    #[error("device lost: {0}")]
    DeviceLost(String),
    /// Another worker took this run for dead and has its rows.
    #[error("another worker took this one for dead and has its rows")]
    LeaseLost,
    /// A file cannot be written: its disk is full, a quota or a limit is reached, or the disk fails. No row is to blame.
    #[error("cannot write {path}: {reason}; {file_system}", path = printable::path(path))]
    Disk {
        /// What was being written.
        path: PathBuf,
        /// The system's word.
        reason: String,
        /// Where that is, and what is free there.
        file_system: String,
    },
    /// The database's file is not the one that was opened.
    #[error("{path}: {reason}", path = printable::path(path))]
    Replaced {
        /// Its name.
        path: PathBuf,
        /// What became of it.
        reason: &'static str,
    },
    /// More rows failed than `--max-failures` allows.
    #[error("{0}")]
    TooManyFailures(String),
    /// A folder with files of many rows is gone. No row was marked for it.
    #[error("nothing in {folder} can be read{how}: is its disk or network folder gone? no image was marked as failed for it",
            folder = printable::path(folder), how = if *was_read { " any more" } else { "" })]
    PlaceGone {
        /// The uppermost folder that is gone, or the one around several.
        folder: PathBuf,
        /// Files in it were read before, in the same run.
        was_read: bool,
    },
    /// What the database counts is not what the run did.
    #[error("the books do not balance: {0}")]
    Books(String),
    /// Threads hang in files, and what is left to do cannot be done beside them.
    #[error("{0}")]
    Stuck(String),
    /// The host took something away: threads, descriptors.
    #[error("{0}")]
    System(String),
    /// The system is short of something and could not open a file. No row was marked for it.
    #[error("{0}; no image was marked as failed for it")]
    Shortage(String),
    /// A stage panicked. A fault of this program.
    #[error("internal: the {stage} stage panicked: {message}; please report this")]
    Panicked {
        /// Name of the thread.
        stage: String,
        /// What the panic said.
        message: String,
    },
}

impl Error {
    /// That `path` could not be written, with its file system and what is free there.
    pub fn disk(path: &Path, reason: impl ToString) -> Self {
        let file_system =
            FileSystem::of(path).map_or_else(|e| format!("its file system cannot be asked: {e}"), |f| f.to_string());
        Self::Disk { path: path.to_owned(), reason: reason.to_string(), file_system }
    }

    /// The process's exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::StartUp(_) | Self::Source { .. } | Self::Open { .. } | Self::Unreadable { .. } => 1,
            Self::Database(_)
            | Self::Disk { .. }
            | Self::Replaced { .. }
            | Self::Model(_)
            | Self::System(_)
            | Self::Shortage(_)
            | Self::TooManyFailures(_)
            | Self::PlaceGone { .. }
            | Self::Books(_)
            | Self::Panicked { .. } => 3,
            Self::OutOfMemory(_) | Self::DeviceLost(_) | Self::LeaseLost | Self::Stuck(_) => 75,
        }
    }

    /// One line on what to do, where there is something general to say.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Disk { .. } => Some(
                "free space there (or raise the quota or `ulimit -f`, or mend the folder) and start the same command again: finished rows are kept, \
                 and no row was marked for it",
            ),
            Self::Replaced { .. } => Some(
                "what was stored is in the file that was moved away and in the log (-wal) beside its old name: put the file back and \
                 start again; never put another file beside that log",
            ),
            Self::Database(e) if is_damaged(e) => {
                Some("the database is damaged: keep a copy, then try `sqlite3 FILE .recover`, or go back to a backup")
            }
            Self::DeviceLost(_) | Self::LeaseLost => Some("start the same command again: finished rows are kept"),
            Self::Stuck(_) => Some(
                "start the same command again: finished rows are kept, images that gave no answer are failed with timed_out; is their \
                 disk or network folder gone?",
            ),
            Self::OutOfMemory(_) => Some(
                "start the same command again, finished rows are kept; if that does not help: --staged, a smaller or fp16 model, \
                 or more room (--vram, other programs)",
            ),
            Self::Model(_) => Some(
                "finished rows are kept; try --batch 1 or --device cpu, and check the model with its authors' example",
            ),
            Self::TooManyFailures(_) => Some(
                "what failed stays failed (the view failures lists it), the rest is pending: mend the cause, then croprow retry DB and \
                 the same command again; --max-failures none lets any number fail",
            ),
            Self::PlaceGone { .. } => Some(
                "bring it back and start the same command again, its rows are pending; where it is gone for good, leave its rows out \
                 (--where \"path NOT LIKE '/that/folder/%'\") or delete them (README, Stopping)",
            ),
            Self::Shortage(_) => Some(
                "raise the limit of open files (`ulimit -n`; of the system: `sysctl fs.file-max`) or free memory, end what else uses \
                 them up, or take fewer --threads; then start the same command again: finished rows are kept",
            ),
            Self::Books(_) => Some(
                "what is stored was stored whole; `croprow verify DB` counts again and names what is wrong, with --repair it mends the counters",
            ),
            Self::Usage(_)
            | Self::StartUp(_)
            | Self::Source { .. }
            | Self::Open { .. }
            | Self::Unreadable { .. }
            | Self::Database(_)
            | Self::System(_)
            | Self::Panicked { .. } => None,
        }
    }
}

/// True where SQLite finds the file damaged.
pub(crate) fn is_damaged(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase))
}

/// True where SQLite could not write: the disk is full, or the system refused for another reason.
pub(crate) fn is_of_disk(error: &rusqlite::Error) -> bool {
    use rusqlite::ffi;
    let code = error.sqlite_error().map(|e| e.extended_code);
    let writes = [
        ffi::SQLITE_IOERR_WRITE,
        ffi::SQLITE_IOERR_FSYNC,
        ffi::SQLITE_IOERR_DIR_FSYNC,
        ffi::SQLITE_IOERR_TRUNCATE,
        ffi::SQLITE_IOERR_SHMOPEN,
        ffi::SQLITE_IOERR_SHMSIZE,
        ffi::SQLITE_IOERR_SHMMAP,
        ffi::SQLITE_IOERR_GETTEMPPATH,
    ];
    matches!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::DiskFull))
        || code.is_some_and(|c| writes.contains(&c))
}
