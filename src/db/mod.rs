//! The database: all SQL of this program, a file per use. Every write is one `BEGIN IMMEDIATE`
//! transaction on the process's one write connection; no cursor stays open across work.

pub mod add;
pub mod batch_sizes;
pub mod books;
pub mod claim;
pub mod commit;
pub mod due;
pub mod foreign;
mod migrate;
pub mod models;
pub mod open;
pub mod process;
pub mod progress;
pub mod recipes;
pub mod refuse;
pub mod repair;
pub mod rescue;
pub mod retry;
pub mod runs;
pub mod scope;
pub mod select;
pub mod suspects;
pub mod verify;
pub mod wal;

pub use open::{Db, Opening};

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::types::{FromSql, FromSqlResult, ToSqlOutput, Value, ValueRef};

/// Seconds since 1970. Wall clock: compared between processes and after a suspend.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// A path as it is stored: TEXT where it is UTF-8, else a BLOB of its bytes.
pub(crate) fn path_to_sql(path: &Path) -> ToSqlOutput<'_> {
    match path.to_str() {
        Some(text) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
        None => ToSqlOutput::Owned(Value::Blob(path.as_os_str().as_bytes().to_vec())),
    }
}

/// A path read back, byte for byte.
pub(crate) struct SqlPath(pub(crate) PathBuf);

impl FromSql for SqlPath {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let bytes = value.as_bytes()?;
        Ok(Self(PathBuf::from(OsString::from_vec(bytes.to_vec()))))
    }
}
