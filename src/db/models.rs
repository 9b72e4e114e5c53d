//! Digests of model files, kept so that a start does not read gigabytes again.

use std::path::Path;

use rusqlite::{OptionalExtension, params};

use super::{Db, now, path_to_sql};
use crate::error::Error;
use crate::row::FileStamp;

impl Db {
    /// The SHA-256 of a file that was read before at the same size and time.
    ///
    /// # Errors
    /// Those of the database.
    pub fn cached_digest(&self, path: &Path, stamp: FileStamp) -> Result<Option<String>, Error> {
        Ok(self
            .conn
            .query_row(
                "SELECT sha256 FROM model_files WHERE path = ?1 AND size_bytes = ?2 AND mtime_ns = ?3",
                params![path_to_sql(path), stamp.size_bytes, stamp.mtime_ns],
                |r| r.get(0),
            )
            .optional()?)
    }

    /// What the self-test of a model found, as JSON.
    ///
    /// # Errors
    /// Those of the database.
    pub fn self_test(&self, digest: &str) -> Result<Option<String>, Error> {
        let sql = "SELECT self_test FROM models WHERE digest = ?1";
        Ok(self.conn.query_row(sql, [digest], |r| r.get(0)).optional()?.flatten())
    }

    /// Keeps what the self-test of a model found.
    ///
    /// # Errors
    /// Those of the database.
    pub fn remember_self_test(&mut self, digest: &str, path: &Path, json: &str) -> Result<(), Error> {
        let tx = self.write()?;
        tx.execute(
            "INSERT INTO models (digest, path, first_at, self_test) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (digest) DO UPDATE SET self_test = excluded.self_test",
            params![digest, path_to_sql(path), now(), json],
        )?;
        Ok(tx.commit()?)
    }

    /// Keeps the SHA-256 of a file.
    ///
    /// # Errors
    /// Those of the database.
    pub fn cache_digest(&mut self, path: &Path, stamp: FileStamp, sha256: &str) -> Result<(), Error> {
        let tx = self.write()?;
        tx.execute(
            "INSERT INTO model_files (path, size_bytes, mtime_ns, sha256) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT DO UPDATE SET size_bytes = excluded.size_bytes, mtime_ns = excluded.mtime_ns, sha256 = excluded.sha256",
            params![path_to_sql(path), stamp.size_bytes, stamp.mtime_ns, sha256],
        )?;
        Ok(tx.commit()?)
    }
}
