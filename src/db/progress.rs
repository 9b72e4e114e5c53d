//! What `status` tells. Instant at any size: counters and the last samples, never a scan.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use rusqlite::{OptionalExtension, Row};
use serde::Serialize;

use super::Db;
use crate::config::STALLED_AFTER;
use crate::error::Error;

/// Failures that `status` counts by code, at most: counting a million would take a second.
const FAILURE_SCAN_ROWS: i64 = 20_000;

/// One line of the view `progress`.
#[derive(Clone, Debug, Serialize)]
pub struct StageProgress {
    /// `detect` or `embed`.
    pub stage: String,
    /// Images that wait.
    pub pending: u64,
    /// Images that a worker has.
    pub running: u64,
    /// Images with results.
    pub done: u64,
    /// Images with a code.
    pub failed: u64,
    /// Images set aside.
    pub quarantined: u64,
    /// Images per second of the live runs; `None` without any.
    pub per_s: Option<f64>,
    /// Seconds until nothing is pending; `None` where nobody works or it cannot be told yet.
    pub eta_s: Option<u64>,
    /// The stage that is busiest in the live runs.
    pub slowest: Option<String>,
}

/// How many images failed alike.
#[derive(Clone, Debug, Serialize)]
pub struct FailureCount {
    /// The stage that failed.
    pub stage: String,
    /// The stable word.
    pub code: String,
    /// How many.
    pub images: u64,
    /// One of the messages.
    pub example: String,
}

/// Images that could not be decoded for the same reason, which names their format.
#[derive(Clone, Debug, Serialize)]
pub struct UnsupportedCount {
    /// As in their messages: `heic images are not supported`.
    pub reason: String,
    /// How many.
    pub images: u64,
}

/// The last run.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// `runs.id`.
    pub id: i64,
    /// Host it works or worked on.
    pub host: String,
    /// Its process.
    pub pid: i64,
    /// `cpu` or `cuda:N`.
    pub device: String,
    /// Seconds since 1970.
    pub started_at: f64,
    /// Seconds since 1970.
    pub heartbeat_at: f64,
    /// Seconds since 1970; `None` while it lives, or when it died.
    pub ended_at: Option<f64>,
    /// `complete`, `stopped`, `error` or `died`.
    pub ended_how: Option<String>,
    /// Images done by it.
    pub done: u64,
    /// Images failed in it.
    pub failed: u64,
}

/// Everything `status` tells.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// All images.
    pub images: u64,
    /// Per stage, in the order of the flow.
    pub stages: Vec<StageProgress>,
    /// By code, most frequent first. Counted over at most 20,000 failures; `stages` has all.
    pub failures: Vec<FailureCount>,
    /// Those of the code `unsupported` by format, most frequent first. Counted over the same failures.
    pub unsupported: Vec<UnsupportedCount>,
    /// The last run that began.
    pub last_run: Option<RunReport>,
    /// Seconds in which no image got through a stage, where the last run has not ended and that is long.
    pub stalled_s: Option<f64>,
}

impl Db {
    /// The state of the work.
    ///
    /// # Errors
    /// Those of the database.
    pub fn status(&self) -> Result<Status, Error> {
        let images = self.conn.query_row("SELECT ifnull(sum(images), 0) FROM counts", [], |r| r.get(0))?;
        let stages = self
            .conn
            .prepare("SELECT stage, pending, running, done, failed, quarantined, per_s, eta_s, slowest FROM progress")?
            .query_map([], stage_progress)?
            .collect::<Result<_, _>>()?;
        let failures = self
            .conn
            .prepare(
                "SELECT stage, code, count(*) AS images, min(message)
                 FROM (SELECT stage, code, message FROM failures LIMIT ?1) GROUP BY stage, code ORDER BY images DESC, code",
            )?
            .query_map([FAILURE_SCAN_ROWS], |r| {
                Ok(FailureCount { stage: r.get(0)?, code: r.get(1)?, images: r.get(2)?, example: r.get(3)? })
            })?
            .collect::<Result<_, _>>()?;
        let last_run = self
            .conn
            .query_row(
                "SELECT id, host, pid, device, started_at, heartbeat_at, ended_at, ended_how, done, failed
                 FROM runs ORDER BY ended_at IS NULL DESC, id DESC LIMIT 1",
                [],
                |r| {
                    Ok(RunReport {
                        id: r.get(0)?,
                        host: r.get(1)?,
                        pid: r.get(2)?,
                        device: r.get(3)?,
                        started_at: r.get(4)?,
                        heartbeat_at: r.get(5)?,
                        ended_at: r.get(6)?,
                        ended_how: r.get(7)?,
                        done: r.get(8)?,
                        failed: r.get(9)?,
                    })
                },
            )
            .optional()?;
        let open = last_run.as_ref().filter(|run: &&RunReport| run.ended_at.is_none());
        let stalled_s = open.map(|run| self.stalled_s(run.id)).transpose()?.flatten();
        let unsupported = self.unsupported()?;
        Ok(Status { images, stages, failures, unsupported, last_run, stalled_s })
    }

    fn unsupported(&self) -> Result<Vec<UnsupportedCount>, Error> {
        let mut statement = self
            .conn
            .prepare("SELECT message FROM (SELECT code, message FROM failures LIMIT ?1) WHERE code = 'unsupported'")?;
        let mut rows = statement.query([FAILURE_SCAN_ROWS])?;
        let mut images_by_reason = BTreeMap::<String, u64>::new();
        while let Some(row) = rows.next()? {
            let Some(message) = row.get::<_, Option<String>>(0)? else { continue };
            // Behind the path, which may hold a colon of its own.
            let reason = message.rsplit_once(": ").map_or(message.as_str(), |(_, reason)| reason);
            *images_by_reason.entry(reason.to_owned()).or_default() += 1;
        }
        let counts = images_by_reason.into_iter().map(|(reason, images)| UnsupportedCount { reason, images });
        let mut counts: Vec<UnsupportedCount> = counts.collect();
        counts.sort_by_key(|count| Reverse(count.images));
        Ok(counts)
    }

    /// From the samples: rates are over the last seconds, so it is at least that long.
    fn stalled_s(&self, run: i64) -> Result<Option<f64>, Error> {
        // By the index from the end: a night has tens of thousands of samples.
        let sql = "SELECT (SELECT max(at) FROM samples WHERE run_id = ?1)
                       - ifnull((SELECT at FROM samples WHERE run_id = ?1 AND (detect_per_s > 0 OR embed_per_s > 0)
                                 ORDER BY at DESC LIMIT 1),
                                (SELECT min(at) FROM samples WHERE run_id = ?1))
                   WHERE EXISTS (SELECT 1 FROM images WHERE detect_state = 'running' AND detect_state <> 'done'
                       UNION ALL SELECT 1 FROM images WHERE embed_state = 'running' AND embed_state <> 'done')";
        let still: Option<f64> = self.conn.query_row(sql, [run], |r| r.get(0)).optional()?.flatten();
        Ok(still.filter(|still| *still >= STALLED_AFTER[0].as_secs_f64()))
    }
}

fn stage_progress(r: &Row<'_>) -> rusqlite::Result<StageProgress> {
    Ok(StageProgress {
        stage: r.get(0)?,
        pending: r.get(1)?,
        running: r.get(2)?,
        done: r.get(3)?,
        failed: r.get(4)?,
        quarantined: r.get(5)?,
        per_s: r.get(6)?,
        eta_s: r.get(7)?,
        slowest: r.get(8)?,
    })
}
