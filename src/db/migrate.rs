//! Bringing a database to the newest schema: in one transaction, with a copy of the old one beside it.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, TransactionBehavior};

use super::path_to_sql;
use super::refuse::{check_ours, open_error};
use super::rescue::{LEASE, live_runs};
use crate::error::Error;
use crate::printable;

/// `PRAGMA application_id` of a croprow database: "crop".
pub(super) const APPLICATION_ID: i32 = 0x6372_6f70;

/// Append-only. The number of a migration is its place, from 1; it is stored in `user_version`.
const MIGRATIONS: [&str; SCHEMA] = [
    include_str!("../../migrations/0001_initial.sql"),
    include_str!("../../migrations/0002_candidates.sql"),
    include_str!("../../migrations/0003_measurements.sql"),
    include_str!("../../migrations/0004_suspects.sql"),
];

/// The newest schema.
pub(super) const SCHEMA: usize = 4;

/// A database that is about to get another schema is kept as it was, beside itself; and nobody may be at work on
/// it with the older program.
fn keep_old(conn: &Connection, path: &Path, version: usize) -> Result<(), Error> {
    if let Some(run) = live_runs(conn, LEASE)?.first().map(|live| live.run) {
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

pub(super) fn migrate(conn: &mut Connection, path: &Path) -> Result<(), Error> {
    let version = check_ours(conn, path)?;
    if (1..SCHEMA).contains(&version) {
        keep_old(conn, path, version)?;
    }
    if version == SCHEMA {
        return Ok(());
    }
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Read again inside the transaction: another process may have migrated meanwhile.
    let version = check_ours(&tx, path)?;
    if version == SCHEMA {
        return Ok(());
    }
    for sql in &MIGRATIONS[version..] {
        tx.execute_batch(sql)?;
    }
    tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    tx.pragma_update(None, "user_version", SCHEMA as i32)?;
    Ok(tx.commit()?)
}
