//! Bringing rows back to pending.

use rusqlite::params;

use super::commit::delete_regions;
use super::{Db, SqlPath};
use crate::error::Error;
use crate::row::{FileStamp, ImageId, RowCode, Stage};

/// Rows looked at in one step of `retry --changed`.
const CHANGED_PAGE_ROWS: i64 = 10_000;

impl Db {
    /// Failed and quarantined rows, of one code or all, become pending with their attempts forgotten.
    /// Returns how many rows that were.
    ///
    /// # Errors
    /// Those of the database.
    pub fn retry(&mut self, code: Option<RowCode>) -> Result<usize, Error> {
        let word = code.map(RowCode::word);
        let tx = self.write()?;
        let mut rows = 0;
        for stage in Stage::ALL {
            let sql = match stage {
                Stage::Detect => {
                    "UPDATE images SET detect_state = 'pending', detect_code = NULL, detect_message = NULL, detect_attempts = 0
                     WHERE detect_state IN ('failed', 'quarantined') AND detect_state <> 'done' AND (?1 IS NULL OR detect_code = ?1)"
                }
                Stage::Embed => {
                    "UPDATE images SET embed_state = 'pending', embed_code = NULL, embed_message = NULL, embed_attempts = 0
                     WHERE embed_state IN ('failed', 'quarantined') AND embed_state <> 'done' AND (?1 IS NULL OR embed_code = ?1)"
                }
            };
            rows += tx.execute(sql, [word])?;
        }
        tx.commit()?;
        Ok(rows)
    }

    /// Rows that were decoded and whose file is another now, by `stat_of`, become pending. Returns how many
    /// rows that were. A file that is gone is left as it is: its results still stand.
    ///
    /// # Errors
    /// Those of the database.
    pub fn retry_changed(&mut self, stat_of: impl Fn(&std::path::Path) -> Option<FileStamp>) -> Result<usize, Error> {
        let embed_only = self.in_force()?.detect.is_none() && self.in_force()?.embed.is_some();
        let (detect, embed) = if embed_only { (None, Some("pending")) } else { (Some("pending"), None) };
        let (mut after, mut changed) = (i64::MIN, 0);
        loop {
            let page: Vec<(i64, SqlPath, FileStamp)> = self
                .conn
                .prepare_cached(
                    "SELECT id, path, file_size_bytes, file_mtime_ns FROM images
                     WHERE id > ?1 AND file_size_bytes IS NOT NULL AND token IS NULL ORDER BY id LIMIT ?2",
                )?
                .query_map([after, CHANGED_PAGE_ROWS], |r| {
                    Ok((r.get(0)?, r.get(1)?, FileStamp { size_bytes: r.get(2)?, mtime_ns: r.get(3)? }))
                })?
                .collect::<Result<_, _>>()?;
            let Some((last, _, _)) = page.last() else { return Ok(changed) };
            after = *last;
            let other: Vec<i64> = page
                .iter()
                .filter(|(_, path, seen)| stat_of(&path.0).is_some_and(|now| now != *seen))
                .map(|(id, _, _)| *id)
                .collect();
            let tx = self.write()?;
            for id in other {
                let free = tx.prepare_cached("SELECT 1 FROM images WHERE id = ?1 AND token IS NULL")?.exists([id])?;
                if free {
                    delete_regions(&tx, ImageId(id))?;
                }
                changed += tx
                    .prepare_cached(
                        "UPDATE images SET detect_state = ?2, detect_recipe_id = NULL, detect_code = NULL, detect_message = NULL,
                                detect_attempts = 0, embed_state = ?3, embed_recipe_id = NULL, embed_code = NULL,
                                embed_message = NULL, embed_attempts = 0
                         WHERE id = ?1 AND token IS NULL",
                    )?
                    .execute(params![id, detect, embed])?;
            }
            tx.commit()?;
        }
    }
}
