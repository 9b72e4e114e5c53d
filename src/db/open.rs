//! Opening and creating a database. Nothing is written before it is known to be ours.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::claim::RunId;
use super::foreign::uri;
use super::migrate::{SCHEMA, migrate};
use super::refuse::{Head, check_is_sqlite, check_ours, check_reach, check_sqlite_version, open_error, refused};
use super::rescue::{Heartbeats, LEASE};
use super::scope::Scope;
use super::suspects::Claims;
use super::wal::{WAL_LIMIT_BYTES, beside, wal_bytes, wal_path};
use crate::config::Synchronous;
use crate::error::{Error, is_of_disk};
use crate::file_system::FileSystem;
use crate::locked::{FileId, Locked};
use crate::printable;

/// How long a statement waits for another writer before it fails.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a write waits in all, with a warning each time the above has passed. Then the run ends.
const BUSY_PATIENCE: Duration = Duration::from_secs(600);

/// How long the switch to WAL is tried again: it needs a moment alone, which the timeout does not cover.
const WAL_RETRY: Duration = Duration::from_secs(10);

/// Pages in the log at which a commit moves them into the database. Fewer: a page that many commits touch is written
/// and waited for more often. More: the commit that has to do it takes longer.
const CHECKPOINT_PAGES: i64 = 8_000;

/// Pages of the database kept in memory by one connection: part of what a run holds, so it is small.
const CACHE_KIB: i64 = 8 << 10;

/// What may be insisted on when a database is opened for writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opening {
    /// It may lie on a network file system.
    pub allow_network: bool,
}

/// The process's one write connection.
#[derive(Debug)]
pub struct Db {
    /// Which images this process works on; all where there is none. Closed first: the last connection to go clears the log
    /// away, and this one can only read.
    pub(super) scope: Option<Arc<Scope>>,
    pub(super) conn: Connection,
    path: PathBuf,
    /// The file as it was opened.
    file: FileId,
    pub(super) claims: Claims,
    pub(super) lease: Duration,
    pub(super) heartbeats: Heartbeats,
    /// The run that this process has begun.
    pub(super) own_run: Option<RunId>,
    /// Until `conn` is closed, which is before.
    _locked: Locked,
}

impl Db {
    /// Opens an existing database, and brings its schema up to date.
    ///
    /// # Errors
    /// No such file, no croprow database, one made by a newer croprow, or one on a network file system: untouched.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_with(path, Opening::default())
    }

    /// The same, insisting on what `opening` says.
    ///
    /// # Errors
    /// As [`Db::open`].
    pub fn open_with(path: &Path, opening: Opening) -> Result<Self, Error> {
        check_exists(path)?;
        Self::open_on(path, &file_system(path)?, opening)
    }

    /// The same for a file of that file system.
    ///
    /// # Errors
    /// As [`Db::open`].
    pub fn open_on(path: &Path, file_system: &FileSystem, opening: Opening) -> Result<Self, Error> {
        check_exists(path)?;
        check_is_sqlite(path)?;
        check_reach(path, file_system, opening.allow_network)?;
        // Closing a connection that can write moves the log into the database, and that would touch one that is not ours.
        drop(open_for_reading(path)?);
        Self::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)
    }

    /// Opens a database, or makes a new one where there is no file.
    ///
    /// # Errors
    /// As [`Db::open`]; or the folder cannot be written.
    pub fn open_or_create(path: &Path) -> Result<Self, Error> {
        Self::open_or_create_with(path, Opening::default())
    }

    /// The same, insisting on what `opening` says.
    ///
    /// # Errors
    /// As [`Db::open_or_create`].
    pub fn open_or_create_with(path: &Path, opening: Opening) -> Result<Self, Error> {
        if path.exists() {
            return Self::open_with(path, opening);
        }
        check_reach(path, &file_system(path)?, opening.allow_network)?;
        Self::connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)
    }

    /// Opens an existing database for reading only. Nothing is migrated. Works on a full disk, and where the folder cannot
    /// be written if there is no log to be read.
    ///
    /// # Errors
    /// As [`Db::open`]; a database of an older schema is refused too.
    pub fn open_read_only(path: &Path) -> Result<Self, Error> {
        check_exists(path)?;
        check_is_sqlite(path)?;
        let (conn, schema) = open_for_reading(path)?;
        if schema < SCHEMA {
            return Err(open_error(
                path,
                "made by an older croprow; `croprow run` or `croprow add` brings it up to date",
            ));
        }
        Self::of(conn, path)
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
            let _ = std::fs::remove_file(beside(&path, suffix));
        }
    }

    /// From now on this process is about the images of `condition` only; `None`: all. Counts in scope and suspects keep to
    /// it. Who claims or settles rows asks it himself, by [`scope`](Self::scope), so that nobody waits for this
    /// connection meanwhile.
    ///
    /// # Errors
    /// It is not one condition that only reads. Nothing was changed.
    pub fn restrict(&mut self, condition: Option<&str>) -> Result<(), Error> {
        self.scope = condition.map(|condition| Scope::new(&self.path, condition).map(Arc::new)).transpose()?;
        Ok(())
    }

    /// The condition that this process is restricted by.
    pub fn scope(&self) -> Option<Arc<Scope>> {
        self.scope.clone()
    }

    /// Whether a commit waits for the disk.
    ///
    /// # Errors
    /// Those of the database.
    pub fn set_synchronous(&self, synchronous: Synchronous) -> Result<(), Error> {
        let word = match synchronous {
            Synchronous::Normal => "NORMAL",
            Synchronous::Full => "FULL",
        };
        Ok(self.conn.pragma_update(None, "synchronous", word)?)
    }

    /// True where this process works on some of the images only.
    pub fn is_restricted(&self) -> bool {
        self.scope.is_some()
    }

    fn of(conn: Connection, path: &Path) -> Result<Self, Error> {
        let file = FileId::of(path).map_err(|e| open_error(path, e))?;
        // SQLite looks for the others beside the real file. It has made them by now.
        let real = path.canonicalize().map_err(|e| open_error(path, e))?;
        let locked = Locked::new(&["", "-wal", "-shm"].map(|suffix| beside(&real, suffix)));
        Ok(Self {
            conn,
            path: path.to_owned(),
            file,
            scope: None,
            claims: Claims::default(),
            lease: LEASE,
            heartbeats: Heartbeats::default(),
            own_run: None,
            _locked: locked,
        })
    }

    fn connect(path: &Path, flags: OpenFlags) -> Result<Self, Error> {
        check_sqlite_version(path)?;
        let mut conn =
            Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX).map_err(|e| refused(path, e))?;
        conn.busy_timeout(BUSY_TIMEOUT)?;
        // SQLite falls back to reading without a word.
        if conn.is_readonly("main")? {
            let place = file_system(path)?;
            return Err(open_error(
                path,
                format!(
                    "cannot be written (its own permissions, or {place}, mounted for reading only?); `croprow status` may still \
                     read it"
                ),
            ));
        }
        harden(&conn)?;
        check_ours(&conn, path)?;
        // Statement journals and sorts stay in memory: no temporary file system can fill up under a run, and
        // an upsert with triggers writes a journal per row.
        conn.pragma_update(None, "temp_store", "MEMORY")?;
        switch_to_wal(&conn, path)?;
        conn.pragma_update(None, "synchronous", "NORMAL")?;
        conn.pragma_update(None, "foreign_keys", true)?;
        conn.pragma_update(None, "journal_size_limit", WAL_LIMIT_BYTES)?;
        conn.pragma_update(None, "cache_size", -CACHE_KIB)?;
        conn.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
        // Without it a statement is compiled again whenever a number it looks for changes, which is for every row.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        conn.set_prepared_statement_cache_capacity(64);
        migrate(&mut conn, path)?;
        Self::of(conn, path)
    }

    /// A write transaction. `BEGIN IMMEDIATE`: one that begins by reading cannot be upgraded when somebody
    /// else wrote in between, and no time-out helps against that.
    pub(super) fn write(&mut self) -> Result<Transaction<'_>, Error> {
        self.check_is_the_same()?;
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

    /// SQLite goes on with a file that was deleted or moved away, and everything that is written to it is lost.
    fn check_is_the_same(&self) -> Result<(), Error> {
        let reason = match FileId::of(&self.path) {
            Ok(now) if now == self.file => return Ok(()),
            Ok(_) => "another file was put in its place while it was worked on",
            Err(_) => "was deleted or moved away while it was worked on",
        };
        // Closing would remove the log by its name, and that may be another database's by now.
        let _ = self.conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
        Err(Error::Replaced { path: self.path.clone(), reason })
    }
}

/// A connection that cannot write, and the schema of the database, which is ours.
pub(super) fn open_for_reading(path: &Path) -> Result<(Connection, usize), Error> {
    check_sqlite_version(path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let open = |conn: rusqlite::Result<Connection>| -> rusqlite::Result<(Connection, Head)> {
        let conn = conn?;
        conn.busy_timeout(BUSY_TIMEOUT)?;
        conn.pragma_update(None, "query_only", true)?;
        harden(&conn)?;
        conn.pragma_update(None, "temp_store", "MEMORY")?;
        let head = Head::read(&conn)?;
        Ok((conn, head))
    };
    let first = open(Connection::open_with_flags(path, flags));
    let (conn, head) = match first {
        Err(error) if needs_no_memory_beside(&error) => {
            let uri = uri(path, way_without_writing(path, &error)?).map_err(|e| open_error(path, e))?;
            open(Connection::open_with_flags(uri, flags | OpenFlags::SQLITE_OPEN_URI))
        }
        other => other,
    }
    .map_err(|e| refused(path, e))?;
    Ok((conn, head.schema(path)?))
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

fn check_exists(path: &Path) -> Result<(), Error> {
    if path.exists() { Ok(()) } else { Err(open_error(path, "no such database; make one with `croprow add`")) }
}

fn file_system(path: &Path) -> Result<FileSystem, Error> {
    FileSystem::of(path).map_err(|e| open_error(path, format!("its file system cannot be asked: {e}")))
}

/// True where a reader could not make the file of shared memory that belongs to a log.
fn needs_no_memory_beside(error: &rusqlite::Error) -> bool {
    is_of_disk(error) || matches!(error.sqlite_error_code(), Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly))
}

/// How a database is opened where nothing can be written beside it: by <https://www.sqlite.org/uri.html>.
fn way_without_writing(path: &Path, error: &rusqlite::Error) -> Result<&'static str, Error> {
    if wal_bytes(path) == 0 {
        // It is complete as it is, and nobody can be writing to it, or there would be a log.
        return Ok("immutable=1");
    }
    if beside(path, "-shm").exists() {
        // The index of the log is made in this process's own memory.
        return Ok("mode=ro&readonly_shm=1");
    }
    let place = file_system(path)?;
    Err(open_error(
        path,
        format!(
            "{error}: what was stored last is in {}, which cannot be read without writing beside it, and that cannot be done \
             ({place}); copy both to a folder that can be written and look there",
            printable::path(&wal_path(path))
        ),
    ))
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
            Err(e) => return Err(refused(path, e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::NewRow;

    fn add(db: &mut Db, rows: std::ops::Range<u32>) -> Result<(), Error> {
        let row = |i| NewRow { path: format!("/p/{i:08}.jpg").into(), key: None, prompt: None, tag: None, stamp: None };
        db.add(|sink| rows.clone().try_for_each(|i| sink(row(i)))).0
    }

    fn images(db: &Db) -> i64 {
        db.conn.query_row("SELECT count(*) FROM images", [], |r| r.get(0)).unwrap()
    }

    #[test]
    fn a_database_without_room_stores_nothing_of_a_batch_and_goes_on_when_there_is_some() {
        let folder = tempfile::tempdir().unwrap();
        let mut db = Db::open_or_create(&folder.path().join("photos.db")).unwrap();
        add(&mut db, 0..100).unwrap();
        let pages: i64 = db.conn.query_row("PRAGMA page_count", [], |r| r.get(0)).unwrap();
        db.conn.query_row(&format!("PRAGMA max_page_count = {}", pages + 2), [], |_| Ok(())).unwrap();
        let failed = add(&mut db, 100..5_000).unwrap_err();
        let error = crate::db::refuse::explained(db.path(), failed);
        assert!(matches!(error, Error::Disk { .. }) && error.exit_code() == 3, "{error}");
        assert_eq!(images(&db), 100);
        assert_eq!(db.status().unwrap().images, 100, "the counters are rolled back too");
        db.conn.query_row("PRAGMA max_page_count = 100000", [], |_| Ok(())).unwrap();
        add(&mut db, 100..5_000).unwrap();
        assert_eq!((images(&db), db.status().unwrap().images), (5_000, 5_000));
    }

    #[test]
    fn the_durability_that_was_asked_for_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open_or_create(&folder.path().join("photos.db")).unwrap();
        let set = |db: &Db| db.conn.query_row("PRAGMA synchronous", [], |r| r.get::<_, i64>(0)).unwrap();
        assert_eq!(set(&db), 1);
        db.set_synchronous(Synchronous::Full).unwrap();
        assert_eq!(set(&db), 2);
    }
}
