//! `Error`: the run cannot go on. What concerns one row is a [`RowError`](crate::row::RowError).

use crate::printable;
use std::path::PathBuf;

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
    /// Threads hang in files, and what is left to do cannot be done beside them.
    #[error("{0}")]
    Stuck(String),
    /// The host took something away: disk, threads.
    #[error("{0}")]
    System(String),
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
    /// The process's exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::StartUp(_) | Self::Source { .. } | Self::Open { .. } => 1,
            Self::Database(_) | Self::Model(_) | Self::System(_) | Self::Panicked { .. } => 3,
            Self::OutOfMemory(_) | Self::DeviceLost(_) | Self::LeaseLost | Self::Stuck(_) => 75,
        }
    }

    /// One line on what to do, where there is something general to say.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Database(e) if is_full(e) => {
                Some("the disk is full: free space on it and run again, finished rows are kept")
            }
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
            Self::Usage(_)
            | Self::StartUp(_)
            | Self::Source { .. }
            | Self::Open { .. }
            | Self::Database(_)
            | Self::System(_)
            | Self::Panicked { .. } => None,
        }
    }
}

fn is_damaged(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase))
}

fn is_full(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::DiskFull))
}
