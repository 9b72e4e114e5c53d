//! Other people's SQLite files, read and never written: neither their tables nor their journal mode, and
//! nothing is left beside them. Does not know what the columns mean. Not for croprow's own database.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{CachedStatement, Connection, ErrorCode, OpenFlags};

use super::open::harden;
use crate::error::{Error, is_of_disk};
use crate::locked::is_locked;

/// One value of a row: text and blobs are bytes.
pub use rusqlite::types::ValueRef as Cell;

/// A writer of the other program that holds its lock for longer ends the reading with an error.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Words a query may begin with. `readonly()` alone would let ATTACH and some PRAGMAs pass.
const QUERY_WORDS: [&str; 3] = ["SELECT", "WITH", "VALUES"];

/// One query on somebody else's database.
pub struct Foreign {
    connection: Connection,
    path: PathBuf,
    query: String,
    /// The file as it was when it was opened without locks.
    unlocked: Option<Metadata>,
}

impl Foreign {
    /// Opens `path` for reading and checks that `query` is one statement that only reads.
    ///
    /// The file is hostile until shown otherwise: its schema is not trusted, so that a view in it cannot call
    /// functions with side effects, and extensions stay off.
    ///
    /// # Errors
    /// No such file, no SQLite file, a file whose log cannot be read without writing beside it, a query that
    /// does not fit or would write.
    pub fn open(path: &Path, query: &str) -> Result<Self, Error> {
        let fail = |e: rusqlite::Error| source_error(path, &e);
        let (connection, unlocked) = connect(path)?;
        connection.busy_timeout(BUSY_TIMEOUT).map_err(fail)?;
        harden(&connection).map_err(fail)?;
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false).map_err(fail)?;
        connection.pragma_update(None, "query_only", true).map_err(fail)?;
        // Reads the header, and the write-ahead log where there is one, before the query is blamed.
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(())).map_err(fail)?;
        let foreign = Self { connection, path: path.to_path_buf(), query: query.to_string(), unlocked };
        foreign.check_query()?;
        Ok(foreign)
    }

    /// Names of the columns of the result, in order.
    ///
    /// # Errors
    /// The statement cannot be prepared, or a name is not UTF-8.
    pub fn columns(&self) -> Result<Vec<String>, Error> {
        let statement = self.statement()?;
        // `rusqlite` has no way to such a name but a panic.
        let names = || statement.column_names().map(str::to_string).collect();
        catch_unwind(AssertUnwindSafe(names)).map_err(|_| Error::Source {
            path: self.path.clone(),
            reason: "--query: the name of a column is not UTF-8; give names as in SELECT ... AS path".to_owned(),
        })
    }

    /// Calls `each` with the cells of every row, in the order of [`columns`](Self::columns). The other
    /// program's write-ahead log cannot shrink while this runs.
    ///
    /// # Errors
    /// The query fails, the first error of `each`, or a file without locks that was written to meanwhile:
    /// what was given to `each` is then worth nothing.
    pub fn for_each(&self, each: &mut dyn FnMut(&[Cell<'_>]) -> Result<(), Error>) -> Result<(), Error> {
        let fail = |e: rusqlite::Error| source_error(&self.path, &e);
        let mut statement = self.statement()?;
        let width = statement.column_count();
        let mut rows = statement.query([]).map_err(fail)?;
        while let Some(row) = rows.next().map_err(fail)? {
            let cells = (0..width).map(|column| row.get_ref(column)).collect::<Result<Vec<_>, _>>().map_err(fail)?;
            each(&cells)?;
        }
        self.check_unchanged()
    }

    fn check_unchanged(&self) -> Result<(), Error> {
        let Some(before) = &self.unlocked else { return Ok(()) };
        let stamp = |m: &Metadata| (m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec());
        let now = fs::metadata(&self.path).map_err(|e| io_error(&self.path, &e))?;
        if stamp(before) == stamp(&now) {
            return Ok(());
        }
        let reason = "another program wrote to it while it was read; run this again".to_string();
        Err(Error::Source { path: self.path.clone(), reason })
    }

    fn statement(&self) -> Result<CachedStatement<'_>, Error> {
        self.connection.prepare_cached(&self.query).map_err(|e| source_error(&self.path, &e))
    }

    fn check_query(&self) -> Result<(), Error> {
        let reason = |text: &str| Error::Source { path: self.path.clone(), reason: format!("--query: {text}") };
        let first = first_word(&self.query);
        if !QUERY_WORDS.iter().any(|word| first.eq_ignore_ascii_case(word)) {
            return Err(reason("expected one SELECT"));
        }
        let statement = match self.connection.prepare_cached(&self.query) {
            Err(rusqlite::Error::MultipleStatement) => return Err(reason("expected one statement, found several")),
            Err(e) => return Err(reason(&text_of(&e))),
            Ok(statement) => statement,
        };
        if statement.readonly() && statement.column_count() > 0 { Ok(()) } else { Err(reason("it would write")) }
    }
}

/// A database in WAL mode that nobody has open has no log. Reading it in the usual way would leave an empty
/// log beside it, owned by whoever ran croprow, or fail where the folder is read-only. It is complete as it
/// is, so it is opened without locks and compared with itself at the end.
fn connect(path: &Path) -> Result<(Connection, Option<Metadata>), Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // SQLite looks for the log beside the real file.
    let real = path.canonicalize().map_err(|e| io_error(path, &e))?;
    if is_locked(&real) {
        let reason = "this is the database itself; name another as the source".to_owned();
        return Err(Error::Source { path: path.to_path_buf(), reason });
    }
    let mut log = OsString::from(&real);
    log.push("-wal");
    // Before the look for the log: a program that comes after it is noticed at the end.
    let before = fs::metadata(&real).map_err(|e| io_error(path, &e))?;
    let no_log = fs::symlink_metadata(&log).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let (connection, unlocked) = if no_log && in_wal_mode(&real) {
        let flags = flags | OpenFlags::SQLITE_OPEN_URI;
        let uri = uri(&real, "immutable=1").map_err(|e| io_error(path, &e))?;
        (Connection::open_with_flags(uri, flags), Some(before))
    } else {
        // Without SQLITE_OPEN_URI: a file named `file:x?mode=rwc` stays a file of that name.
        (Connection::open_with_flags(&real, flags), None)
    };
    Ok((connection.map_err(|e| source_error(path, &e))?, unlocked))
}

/// <https://www.sqlite.org/uri.html>. The path's bytes need not be UTF-8.
///
/// # Errors
/// The current folder cannot be told.
pub(super) fn uri(path: &Path, parameters: &str) -> io::Result<String> {
    let mut uri = String::from("file:");
    for byte in std::path::absolute(path)?.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-".contains(byte) {
            uri.push(char::from(*byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(uri, "%{byte:02X}");
        }
    }
    uri.push('?');
    uri.push_str(parameters);
    Ok(uri)
}

/// The first word of a statement, after white space and comments.
fn first_word(sql: &str) -> &str {
    let mut rest = sql.trim_start();
    loop {
        let after = if let Some(comment) = rest.strip_prefix("--") {
            comment.split_once('\n').map_or("", |(_, after)| after)
        } else if let Some(comment) = rest.strip_prefix("/*") {
            comment.split_once("*/").map_or("", |(_, after)| after)
        } else {
            let end = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
            return &rest[..end];
        };
        rest = after.trim_start();
    }
}

fn source_error(path: &Path, error: &rusqlite::Error) -> Error {
    let text = text_of(error);
    let code = error.sqlite_error_code();
    let reason = if code == Some(ErrorCode::NotADatabase) {
        "no SQLite database, or an encrypted one".to_string()
    } else if matches!(code, Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly)) && in_wal_mode(path) {
        format!(
            "{text}: it is in WAL mode and has a log (-wal), which cannot be read without writing beside it; \
             copy both to a folder you can write to and read the copy"
        )
    } else if code == Some(ErrorCode::ReadOnly) {
        format!("{text}: a program ended while it wrote to it; let that program open it once, then read it again")
    } else if is_of_disk(error) {
        format!(
            "{text}: what the query has to sort does not fit into the temporary folder; name one with room in SQLITE_TMPDIR"
        )
    } else if code == Some(ErrorCode::DatabaseBusy) {
        format!("{text}: another program has been writing for {} s", BUSY_TIMEOUT.as_secs())
    } else {
        text
    };
    Error::Source { path: path.to_path_buf(), reason }
}

fn io_error(path: &Path, error: &io::Error) -> Error {
    Error::Source { path: path.to_path_buf(), reason: error.to_string() }
}

/// SQLite's own words, without the statement: the user has just typed it.
fn text_of(error: &rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqliteFailure(_, Some(text)) => text.clone(),
        rusqlite::Error::SqlInputError { msg, .. } => msg.clone(),
        other => other.to_string(),
    }
}

/// Byte 19 of the header is the version a reader must know: 2 stands for WAL.
/// <https://www.sqlite.org/fileformat.html#file_format_version_numbers>
fn in_wal_mode(path: &Path) -> bool {
    let mut header = [0_u8; 20];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header.starts_with(b"SQLite format 3\0") && header[19] == 2
}
