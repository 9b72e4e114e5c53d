//! Opening, creating and migrating a database. Refuses what is not its own before anything is written.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::path_to_sql;
use super::runs::first_live_run;
use super::scope::Scope;
use crate::error::Error;
use crate::printable;

/// `PRAGMA application_id` of a croprow database: "crop".
const APPLICATION_ID: i32 = 0x6372_6f70;

/// Append-only. The number of a migration is its place, from 1; it is stored in `user_version`.
const MIGRATIONS: [&str; 3] = [
    include_str!("../../migrations/0001_initial.sql"),
    include_str!("../../migrations/0002_candidates.sql"),
    include_str!("../../migrations/0003_measurements.sql"),
];

/// How long a statement waits for another writer before it fails.
const BUSY_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a write waits in all, with a warning each time the above has passed. Then the run ends.
const BUSY_PATIENCE: Duration = Duration::from_secs(600);

/// How long the switch to WAL is tried again: it needs a moment alone, which the timeout does not cover.
const WAL_RETRY: Duration = Duration::from_secs(10);

/// The WAL file is cut back to this after a checkpoint.
const WAL_LIMIT_BYTES: i64 = 64 << 20;

/// Pages in the log at which a commit moves them into the database. Fewer: a page that many commits touch is written
/// and waited for more often. More: the commit that has to do it takes longer.
const CHECKPOINT_PAGES: i64 = 8_000;

/// SQLite before this can lose committed rows when two connections checkpoint (the WAL-reset fault).
const SQLITE_OLDEST: i32 = 3_051_003;

/// Pages of the database kept in memory by one connection: part of what a run holds, so it is small.
const CACHE_KIB: i64 = 8 << 10;

/// The process's one write connection.
#[derive(Debug)]
pub struct Db {
    pub(super) conn: Connection,
    path: PathBuf,
    /// Which images this process works on; all where there is none.
    pub(super) scope: Option<Scope>,
}

impl Db {
    /// Opens an existing database, and brings its schema up to date.
    ///
    /// # Errors
    /// No such file, no croprow database, or one made by a newer croprow: untouched.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if !path.exists() {
            return Err(open_error(path, "no such database; make one with `croprow add`"));
        }
        check_is_sqlite(path)?;
        Self::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)
    }

    /// Opens a database, or makes a new one where there is no file.
    ///
    /// # Errors
    /// As [`Db::open`]; or the folder cannot be written.
    pub fn open_or_create(path: &Path) -> Result<Self, Error> {
        if path.exists() {
            return Self::open(path);
        }
        Self::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)
    }

    /// Opens an existing database for reading only. Nothing is migrated.
    ///
    /// # Errors
    /// As [`Db::open`]; a database of an older schema is refused too.
    pub fn open_read_only(path: &Path) -> Result<Self, Error> {
        if !path.exists() {
            return Err(open_error(path, "no such database; make one with `croprow add`"));
        }
        check_is_sqlite(path)?;
        let conn = open_for_reading(path)?;
        if check_ours(&conn, path)? < MIGRATIONS.len() {
            return Err(open_error(
                path,
                "made by an older croprow; `croprow run` or `croprow add` brings it up to date",
            ));
        }
        Ok(Self { conn, path: path.to_owned(), scope: None })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes a database that was made for nothing, and removes its files.
    pub fn remove(self) {
        let path = self.path.clone();
        drop(self);
        for suffix in ["", "-wal", "-shm"] {
            let mut name = path.clone().into_os_string();
            name.push(suffix);
            let _ = std::fs::remove_file(PathBuf::from(name));
        }
    }

    /// From now on only images of `condition` are claimed, and counted by [`tally_in_scope`](Self::tally_in_scope);
    /// `None`: all.
    ///
    /// # Errors
    /// It is not one condition that only reads. Nothing was changed.
    pub fn restrict(&mut self, condition: Option<&str>) -> Result<(), Error> {
        self.scope = condition.map(|condition| Scope::new(&self.path, condition)).transpose()?;
        Ok(())
    }

    /// True where this process works on some of the images only.
    pub fn is_restricted(&self) -> bool {
        self.scope.is_some()
    }

    /// Bytes of the write-ahead log beside the database; 0 where there is none.
    pub fn wal_bytes(&self) -> u64 {
        let mut name = self.path.clone().into_os_string();
        name.push("-wal");
        std::fs::metadata(PathBuf::from(name)).map_or(0, |m| m.len())
    }

    /// Moves the log into the database and cuts it back. Does nothing while somebody reads.
    pub fn checkpoint(&self) {
        // The result says "busy" while there are readers; the next chance will do, so nobody waits for them.
        let _ = self.conn.busy_timeout(Duration::ZERO);
        let _ = self.conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        let _ = self.conn.busy_timeout(BUSY_TIMEOUT);
    }

    fn connect(path: &Path, flags: OpenFlags) -> Result<Self, Error> {
        assert_sqlite_is_sound(path)?;
        let mut conn = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
            .map_err(|e| refused(path, &e))?;
        conn.busy_timeout(BUSY_TIMEOUT)?;
        harden(&conn)?;
        check_ours(&conn, path)?;
        switch_to_wal(&conn, path)?;
        conn.pragma_update(None, "synchronous", "NORMAL")?;
        conn.pragma_update(None, "foreign_keys", true)?;
        conn.pragma_update(None, "journal_size_limit", WAL_LIMIT_BYTES)?;
        conn.pragma_update(None, "cache_size", -CACHE_KIB)?;
        // Statement journals and sorts stay in memory: no temporary file system can fill up under a run, and
        // an upsert with triggers writes a journal per row.
        conn.pragma_update(None, "temp_store", "MEMORY")?;
        conn.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
        // Without it a statement is compiled again whenever a number it looks for changes, which is for every row.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        conn.set_prepared_statement_cache_capacity(64);
        migrate(&mut conn, path)?;
        Ok(Self { conn, path: path.to_owned(), scope: None })
    }

    /// A write transaction. `BEGIN IMMEDIATE`: one that begins by reading cannot be upgraded when somebody
    /// else wrote in between, and no time-out helps against that.
    pub(super) fn write(&mut self) -> Result<Transaction<'_>, Error> {
        let began = Instant::now();
        loop {
            match Transaction::new_unchecked(&self.conn, TransactionBehavior::Immediate) {
                Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && began.elapsed() < BUSY_PATIENCE => {
                    log::warn!(
                        "another program has held the database locked for {} s; waiting",
                        began.elapsed().as_secs()
                    );
                }
                begun => return Ok(begun?),
            }
        }
    }
}

/// A second connection, for reading only.
pub(super) fn open_for_reading(path: &Path) -> Result<Connection, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(|e| refused(path, &e))?;
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.pragma_update(None, "query_only", true)?;
    harden(&conn)?;
    Ok(conn)
}

/// A hostile file may carry triggers and views: they get nothing beyond plain SQL on its own tables. Extensions are
/// never loaded: this program has no call that would allow it.
pub(super) fn harden(conn: &Connection) -> rusqlite::Result<()> {
    for (setting, value) in [
        (DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true),
        (DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false),
        (DbConfig::SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, false),
    ] {
        conn.set_db_config(setting, value)?;
    }
    Ok(())
}

/// What `rusqlite` says when a database cannot be opened does not say what to do.
fn refused(path: &Path, error: &rusqlite::Error) -> Error {
    let remedy = match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            "; the folder of a database must be writable, also for looking at it, since the log lies beside it"
        }
        _ => "",
    };
    open_error(path, format!("{error}{remedy}"))
}

fn open_error(path: &Path, reason: impl ToString) -> Error {
    Error::Open { path: path.to_owned(), reason: reason.to_string() }
}

fn assert_sqlite_is_sound(path: &Path) -> Result<(), Error> {
    if rusqlite::version_number() < SQLITE_OLDEST {
        return Err(open_error(
            path,
            format!("this build holds SQLite {}, which can lose rows; build with the bundled one", rusqlite::version()),
        ));
    }
    Ok(())
}

/// Looks at the first bytes, so that a text file or an empty one is refused without SQLite touching it.
fn check_is_sqlite(path: &Path) -> Result<(), Error> {
    let metadata = std::fs::metadata(path).map_err(|e| open_error(path, e))?;
    if !metadata.is_file() {
        return Err(open_error(path, "is not a regular file; name the database file"));
    }
    let mut magic = Vec::with_capacity(16);
    File::open(path).and_then(|f| f.take(16).read_to_end(&mut magic)).map_err(|e| open_error(path, e))?;
    match magic.as_slice() {
        b"SQLite format 3\0" => Ok(()),
        [] => Err(open_error(path, "is empty, so it is no database; remove it, or name another file")),
        _ => Err(open_error(path, "is not an SQLite database; name another file (images are given after it)")),
    }
}

/// The schema version of a database that is ours or brand-new (0).
fn check_ours(conn: &Connection, path: &Path) -> Result<usize, Error> {
    let pragma = |name: &str| conn.query_row(&format!("PRAGMA {name}"), [], |r| r.get::<_, i32>(0));
    let read = || -> rusqlite::Result<(i32, i32, bool)> {
        let used = conn.query_row("SELECT EXISTS (SELECT 1 FROM sqlite_schema)", [], |r| r.get(0))?;
        Ok((pragma("application_id")?, pragma("user_version")?, used))
    };
    let (application, version, used) = read().map_err(|e| match e.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => open_error(
            path,
            format!("{e}; the file is damaged: keep a copy, then try `sqlite3 FILE .recover`, or go back to a backup"),
        ),
        _ => refused(path, &e),
    })?;
    if used && application != APPLICATION_ID {
        return Err(open_error(
            path,
            "is an SQLite database of another program; croprow keeps its own: \
             `croprow add NEW.db --from-sqlite FILE --query 'SELECT path FROM ...'` reads rows out of yours",
        ));
    }
    let version = usize::try_from(version).unwrap_or(usize::MAX);
    if version > MIGRATIONS.len() {
        return Err(open_error(
            path,
            format!("has schema {version}, this croprow knows up to {}; use a newer croprow", MIGRATIONS.len()),
        ));
    }
    Ok(version)
}

fn switch_to_wal(conn: &Connection, path: &Path) -> Result<(), Error> {
    let began = Instant::now();
    loop {
        match conn.query_row("PRAGMA journal_mode = WAL", [], |r| r.get::<_, String>(0)) {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(mode) => {
                return Err(open_error(
                    path,
                    format!(
                        "cannot use a write-ahead log here (journal mode stays {mode}); put the database on a local disk"
                    ),
                ));
            }
            Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && began.elapsed() < WAL_RETRY => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(e) => return Err(refused(path, &e)),
        }
    }
}

/// A database that is about to get another schema is kept as it was, beside itself; and nobody may be at work on
/// it with the older program.
fn keep_old(conn: &Connection, path: &Path, version: usize) -> Result<(), Error> {
    if let Some(run) = first_live_run(conn)? {
        return Err(open_error(
            path,
            format!("run {} of an older croprow is at work on it; stop it first, this one changes the schema", run.0),
        ));
    }
    let name = |number: usize| {
        let mut name = path.to_owned().into_os_string();
        name.push(format!(".schema{version}{}.bak", if number == 0 { String::new() } else { format!("-{number}") }));
        PathBuf::from(name)
    };
    let Some(backup) = (0..).map(name).find(|p| !p.exists()) else { return Ok(()) };
    log::warn!(
        "keeping {} as it is in {} before its schema is brought up to date",
        printable::path(path),
        printable::path(&backup)
    );
    conn.execute("VACUUM INTO ?1", [path_to_sql(&backup)]).map_err(|e| {
        let _ = std::fs::remove_file(&backup);
        open_error(path, format!("cannot be copied to {} before its schema is changed: {e}", printable::path(&backup)))
    })?;
    Ok(())
}

fn migrate(conn: &mut Connection, path: &Path) -> Result<(), Error> {
    let version = check_ours(conn, path)?;
    if (1..MIGRATIONS.len()).contains(&version) {
        keep_old(conn, path, version)?;
    }
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Read again inside the transaction: another process may have migrated meanwhile.
    let version = check_ours(&tx, path)?;
    if version == MIGRATIONS.len() {
        return Ok(());
    }
    for sql in &MIGRATIONS[version..] {
        tx.execute_batch(sql)?;
    }
    tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    tx.pragma_update(None, "user_version", MIGRATIONS.len() as i32)?;
    Ok(tx.commit()?)
}
