//! One row per process: who it is, whether it lives, what it was told, how it ended.

use rusqlite::{Connection, OptionalExtension, params};

use super::claim::RunId;
use super::due::InForce;
use super::process::ProcessId;
use super::recipes::{StoredRecipe, put_in_force};
use super::rescue::live_runs;
use super::{Db, now};
use crate::error::Error;
use crate::fault;

/// Samples of a run that are kept; older ones are thinned out when it ends.
const SAMPLES_KEPT: i64 = 100_000;

/// What a run says of itself at its start.
#[derive(Clone, Debug)]
pub struct NewRun<'a> {
    /// `cpu` or `cuda:N`: what is really used.
    pub device: &'a str,
    /// Why it is not what was asked for.
    pub device_note: Option<&'a str>,
    /// Version and path of the runtime library.
    pub runtime: &'a str,
    /// All settings, as JSON; the next `run` goes on with them.
    pub settings: &'a str,
    /// What pending rows are worked with; stored where it is new, and in force from now on.
    pub detect: Option<StoredRecipe<'a>>,
    /// The same for the second stage.
    pub embed: Option<StoredRecipe<'a>>,
}

/// One line of `samples`.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Images whose last due stage is done, since the start of the run.
    pub done: u64,
    /// Images that ended with a code, since the start of the run.
    pub failed: u64,
    /// Images per second through `detect`, lately.
    pub detect_per_s: f64,
    /// Images per second through `embed`, lately.
    pub embed_per_s: f64,
    /// The step that was busy most of the time.
    pub slowest: &'static str,
    /// Resident memory of the process.
    pub rss_bytes: u64,
    /// Bytes reserved by images in flight.
    pub held_bytes: u64,
    /// Device memory in use by this process as its driver tells; 0 without a GPU.
    pub device_bytes: u64,
    /// Share of the values of the models' inputs that were padding since the sample before, 0..=1.
    pub padding: f64,
    /// Mean linear scale at which pictures were decoded since the sample before: 1 full size, 0.125 an eighth.
    pub decode_scale: f64,
}

impl Default for Sample {
    /// Nothing done yet, nothing decoded smaller.
    fn default() -> Self {
        Self {
            done: 0,
            failed: 0,
            detect_per_s: 0.0,
            embed_per_s: 0.0,
            slowest: "",
            rss_bytes: 0,
            held_bytes: 0,
            device_bytes: 0,
            padding: 0.0,
            decode_scale: 1.0,
        }
    }
}

/// One line of `step_samples`: what the threads of a step did since the sample before. The shares are of the time of
/// all its threads, 0..=1 each; what they lack of 1 is neither.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSample {
    /// `read`, `decode`, `detect`, `crop`, `embed` or `commit`, each once in a sample.
    pub step: &'static str,
    /// Share in which they worked.
    pub busy: f64,
    /// Share in which they waited for input.
    pub waiting_in: f64,
    /// Share in which they waited for the next step or for memory.
    pub waiting_out: f64,
    /// Messages that wait for this step now.
    pub queued: u64,
}

impl Db {
    /// Registers this process and puts its recipes in force, in one step: two workers that start together
    /// with different recipes must not both find the other absent.
    ///
    /// # Errors
    /// A live worker works with other recipes; nothing was changed. Those of the database.
    pub fn begin_run(&mut self, run: &NewRun<'_>) -> Result<(RunId, InForce), Error> {
        let own = ProcessId::own();
        let (at, lease) = (now(), self.lease);
        let tx = self.write()?;
        let in_force = put_in_force(&tx, run.detect, run.embed)?;
        let other = live_runs(&tx, lease)?.into_iter().any(|live| live.recipes != in_force);
        if other {
            return Err(Error::Usage(
                "another worker is at work on this database with other models or settings; stop it first, or start \
                 this one with the same"
                    .into(),
            ));
        }
        tx.execute(
            "INSERT INTO runs (host, boot_id, pid, pid_started, version, device, device_note, runtime, settings,
                               detect_recipe_id, embed_recipe_id, started_at, heartbeat_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?12)",
            params![
                own.host,
                own.boot_id,
                own.pid,
                own.started,
                env!("CARGO_PKG_VERSION"),
                run.device,
                run.device_note,
                run.runtime,
                run.settings,
                in_force.detect.map(|r| r.0),
                in_force.embed.map(|r| r.0),
                at,
            ],
        )?;
        let id = RunId(tx.last_insert_rowid());
        tx.commit()?;
        fault::point("run.begun");
        Ok((id, in_force))
    }

    /// Says that the run lives, where there is nothing to tell of it.
    ///
    /// # Errors
    /// As [`heartbeat`](Self::heartbeat).
    pub fn beat(&mut self, run: RunId) -> Result<(), Error> {
        let at = now();
        let tx = self.write()?;
        let open = tx
            .prepare_cached("UPDATE runs SET heartbeat_at = ?2 WHERE id = ?1 AND ended_at IS NULL")?
            .execute(params![run.0, at])?;
        tx.commit()?;
        if open == 0 { Err(Error::LeaseLost) } else { Ok(()) }
    }

    /// Says that the run lives, and how it and its steps go.
    ///
    /// # Errors
    /// Somebody took this run for dead and its rows with it. Those of the database.
    pub fn heartbeat(&mut self, run: RunId, sample: &Sample, steps: &[StepSample]) -> Result<(), Error> {
        let at = now();
        let tx = self.write()?;
        let open = tx
            .prepare_cached(
                "UPDATE runs SET heartbeat_at = ?2, done = ?3, failed = ?4 WHERE id = ?1 AND ended_at IS NULL",
            )?
            .execute(params![run.0, at, sample.done, sample.failed])?;
        if open == 0 {
            return Err(Error::LeaseLost);
        }
        tx.prepare_cached(
            "INSERT OR REPLACE INTO samples (run_id, at, done, failed, detect_per_s, embed_per_s, slowest, rss_bytes,
                                             held_bytes, device_bytes, padding, decode_scale)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        )?
        .execute(params![
            run.0,
            at,
            sample.done,
            sample.failed,
            sample.detect_per_s,
            sample.embed_per_s,
            sample.slowest,
            sample.rss_bytes,
            sample.held_bytes,
            sample.device_bytes,
            sample.padding,
            sample.decode_scale,
        ])?;
        for step in steps {
            tx.prepare_cached(
                "INSERT OR REPLACE INTO step_samples (run_id, at, step, busy, waiting_in, waiting_out, queued)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![
                run.0,
                at,
                step.step,
                step.busy,
                step.waiting_in,
                step.waiting_out,
                step.queued
            ])?;
        }
        tx.commit()?;
        fault::point("heartbeat.written");
        Ok(())
    }

    /// Closes the run's row. `summary` is JSON.
    ///
    /// # Errors
    /// Those of the database.
    pub fn end_run(
        &mut self,
        run: RunId,
        how: &str,
        exit_code: u8,
        done: u64,
        failed: u64,
        summary: Option<&str>,
    ) -> Result<(), Error> {
        let at = now();
        let tx = self.write()?;
        tx.execute(
            "UPDATE runs SET heartbeat_at = ?2, ended_at = ?2, ended_how = ?3, exit_code = ?4, done = ?5, failed = ?6,
                    summary = ?7
             WHERE id = ?1",
            params![run.0, at, how, exit_code, done, failed, summary],
        )?;
        thin_out(&tx, run, SAMPLES_KEPT)?;
        tx.commit()?;
        fault::point("run.ended");
        Ok(())
    }

    /// Settings of the last run that began, as JSON.
    ///
    /// # Errors
    /// Those of the database.
    pub fn last_settings(&self) -> Result<Option<String>, Error> {
        Ok(self.conn.query_row("SELECT settings FROM runs ORDER BY id DESC LIMIT 1", [], |r| r.get(0)).optional()?)
    }
}

/// Keeps the last `kept` samples of a run, and the lines of its steps beside them.
fn thin_out(conn: &Connection, run: RunId, kept: i64) -> Result<(), Error> {
    let oldest: Option<f64> = conn
        .query_row(
            "SELECT at FROM samples WHERE run_id = ?1 ORDER BY at DESC LIMIT 1 OFFSET ?2 - 1",
            params![run.0, kept],
            |r| r.get(0),
        )
        .optional()?;
    if let Some(oldest) = oldest {
        conn.execute("DELETE FROM samples WHERE run_id = ?1 AND at < ?2", params![run.0, oldest])?;
        conn.execute("DELETE FROM step_samples WHERE run_id = ?1 AND at < ?2", params![run.0, oldest])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_samples_are_kept_with_those_of_their_steps() {
        let folder = tempfile::tempdir().unwrap();
        let mut db = Db::open_or_create(&folder.path().join("photos.db")).unwrap();
        let new = NewRun { device: "cpu", device_note: None, runtime: "", settings: "{}", detect: None, embed: None };
        let (run, _) = db.begin_run(&new).unwrap();
        let step = |step| StepSample { step, busy: 0.5, waiting_in: 0.25, waiting_out: 0.25, queued: 3 };
        for done in 0..7 {
            let sample = Sample { done, ..Sample::default() };
            db.heartbeat(run, &sample, &[step("decode"), step("commit")]).unwrap();
        }
        let count = |db: &Db, sql: &str| db.conn.query_row(sql, [], |r| r.get::<_, i64>(0)).unwrap();
        thin_out(&db.conn, run, 7).unwrap();
        assert_eq!(count(&db, "SELECT count(*) FROM samples"), 7, "no more than are kept");
        thin_out(&db.conn, run, 3).unwrap();
        assert_eq!(count(&db, "SELECT count(*) FROM samples"), 3);
        assert_eq!(count(&db, "SELECT min(done) FROM samples"), 4);
        assert_eq!(count(&db, "SELECT count(*) FROM step_samples"), 6);
        assert_eq!(count(&db, "SELECT count(DISTINCT at) FROM step_samples JOIN samples USING (run_id, at)"), 3);
    }
}
