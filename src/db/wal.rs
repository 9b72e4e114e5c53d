//! The write-ahead log beside the database: how large it is, and cutting it back. It cannot be moved into the database
//! beyond what the oldest reader sees, so a reader that stays makes it grow, and only the reader's user can help.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Db;
use super::open::BUSY_TIMEOUT;
use crate::printable;

/// The log's file is cut back to this when it begins anew after a checkpoint.
pub(super) const WAL_LIMIT_BYTES: i64 = 64 << 20;

/// A log beyond this is told to the user, and again each time it has doubled: it is on the way to fill the disk.
const WAL_WARN_BYTES: u64 = 256 << 20;

/// A log beyond [`WAL_LIMIT_BYTES`] is tried to be cut back so often. More often: commits wait for it in vain while a
/// reader is there.
const CUT_BACK_EVERY: Duration = Duration::from_secs(30);

impl Db {
    /// Bytes of the write-ahead log beside the database; 0 where there is none.
    pub fn wal_bytes(&self) -> u64 {
        wal_bytes(self.path())
    }

    /// Moves the log into the database and cuts it back to nothing. As far as it can be done without waiting for readers.
    /// True where nothing is left of it.
    pub fn checkpoint(&self) -> bool {
        // "Busy" while there are readers; the next chance will do, so nobody waits for them.
        let _ = self.conn.busy_timeout(Duration::ZERO);
        let busy = self.conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |r| r.get::<_, bool>(0));
        let _ = self.conn.busy_timeout(BUSY_TIMEOUT);
        matches!(busy, Ok(false))
    }
}

/// The log of a database.
pub(super) fn wal_path(database: &Path) -> PathBuf {
    beside(database, "-wal")
}

/// A file that SQLite keeps beside a database.
pub(super) fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.to_owned().into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

pub(super) fn wal_bytes(database: &Path) -> u64 {
    std::fs::metadata(wal_path(database)).map_or(0, |m| m.len())
}

/// Watches the log during a run.
#[derive(Debug)]
pub struct WalWatch {
    warn_at_bytes: u64,
    last_cut: Option<Instant>,
}

impl Default for WalWatch {
    fn default() -> Self {
        Self { warn_at_bytes: WAL_WARN_BYTES, last_cut: None }
    }
}

impl WalWatch {
    /// Cuts a large log back where that can be done, and says so loudly where it cannot.
    pub fn look(&mut self, db: &Db) {
        let bytes = db.wal_bytes();
        if bytes <= WAL_LIMIT_BYTES.unsigned_abs() || self.last_cut.is_some_and(|at| at.elapsed() < CUT_BACK_EVERY) {
            return;
        }
        self.last_cut = Some(Instant::now());
        if !db.checkpoint() && self.is_worth_a_word(bytes) {
            log::warn!(
                "{} has grown to {} MiB and cannot be cut back: another program has been reading in one transaction all the \
                 while (a forgotten sqlite3? a query that waits for its pager?); it grows until that ends, then it shrinks by itself",
                printable::path(&wal_path(db.path())),
                bytes >> 20
            );
        }
    }

    /// True for the first size beyond the threshold, and then for each that is twice the last one.
    fn is_worth_a_word(&mut self, bytes: u64) -> bool {
        let is_worth = bytes >= self.warn_at_bytes;
        if is_worth {
            self.warn_at_bytes = bytes.saturating_mul(2);
        }
        is_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_log_is_told_once_per_doubling() {
        let mut watch = WalWatch::default();
        let told = |watch: &mut WalWatch, mib: u64| watch.is_worth_a_word(mib << 20);
        let sizes = [10, 255, 256, 300, 511, 512, 900, 1023, 1100, 2000, 2300];
        let said: Vec<u64> = sizes.into_iter().filter(|mib| told(&mut watch, *mib)).collect();
        assert_eq!(said, [256, 512, 1100, 2300]);
    }

    #[test]
    fn a_log_is_cut_back_once_its_reader_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open_or_create(&folder.path().join("photos.db")).unwrap();
        let reader = Db::open_read_only(db.path()).unwrap();
        reader.conn.execute_batch("BEGIN; SELECT count(*) FROM images").unwrap();
        db.conn.execute("INSERT INTO images (path) VALUES ('/a.jpg')", []).unwrap();
        assert!(!db.checkpoint() && db.wal_bytes() > 0, "a reader sees the state before");
        reader.conn.execute_batch("COMMIT").unwrap();
        assert!(db.checkpoint());
        assert_eq!(db.wal_bytes(), 0);
    }
}
