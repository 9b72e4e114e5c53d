//! One row per process: who it is, whether it lives, what it was told, how it ended.

use rusqlite::{Connection, OptionalExtension, params};

use super::claim::RunId;
use super::due::{InForce, RecipeId};
use super::recipes::{StoredRecipe, put_in_force};
use super::{Db, now};
use crate::error::Error;

/// A worker on another host is taken for dead when it has not been heard of for this long.
pub const LEASE_S: f64 = 300.0;

/// Samples of a run that are kept; older ones are thinned out when it ends.
const SAMPLES_KEPT: i64 = 100_000;

/// A process, told apart from a later one with the same pid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// Host name.
    pub host: String,
    /// Changes with every boot; then the process-id namespace, in which pids mean something.
    pub boot_id: String,
    /// Process id.
    pub pid: i64,
    /// Start time in clock ticks since boot.
    pub started: i64,
}

impl ProcessId {
    /// This process.
    pub fn own() -> Self {
        let pid = i64::from(std::process::id());
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: boot_and_namespace(),
            pid,
            started: start_ticks(pid).unwrap_or(0),
        }
    }

    /// When the process with that number here began, in clock ticks since boot; `None` where there is none.
    pub fn started_of(pid: i64) -> Option<i64> {
        start_ticks(pid)
    }

    /// Whether that process is gone, as far as can be told from here: at once on the same host.
    fn is_dead(&self, own: &Self, silent_s: f64) -> bool {
        let boot = |id: &Self| id.boot_id.split(' ').next().map(str::to_owned);
        if self.host != own.host || (boot(self) == boot(own) && self.boot_id != own.boot_id) {
            // Another machine or another container: its pids say nothing here.
            return silent_s > LEASE_S;
        }
        self.boot_id != own.boot_id || start_ticks(self.pid) != Some(self.started)
    }
}

fn boot_and_namespace() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// Field 22 of `/proc/PID/stat`. The command's name before it may hold spaces and brackets.
fn start_ticks(pid: i64) -> Option<i64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    // A zombie has ended; only its parent has not looked yet.
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

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
        let at = now();
        let tx = self.write()?;
        let in_force = put_in_force(&tx, run.detect, run.embed)?;
        let other = open_runs(&tx)?.into_iter().any(|(open, recipes)| recipes != in_force && !open.is_dead(&own, at));
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
        Ok((id, in_force))
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
        Ok(tx.commit()?)
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
        Ok(tx.commit()?)
    }

    /// Closes the rows of runs whose process is gone and gives their images back, and those that an ended run
    /// still holds (it could not release them). Returns the runs and how many images they held.
    ///
    /// # Errors
    /// Those of the database.
    pub fn rescue_dead_runs(&mut self) -> Result<Vec<(RunId, usize)>, Error> {
        let own = ProcessId::own();
        let at = now();
        let mut gone: Vec<RunId> = holders_that_ended(&self.conn)?;
        gone.extend(open_runs(&self.conn)?.iter().filter(|(open, _)| open.is_dead(&own, at)).map(|(open, _)| open.run));
        let mut rescued = Vec::new();
        for run in gone {
            let images = self.release(run)?;
            let tx = self.write()?;
            tx.execute(
                "UPDATE runs SET ended_at = heartbeat_at, ended_how = 'died' WHERE id = ?1 AND ended_at IS NULL",
                [run.0],
            )?;
            tx.commit()?;
            rescued.push((run, images));
        }
        Ok(rescued)
    }

    /// True for a run that has not ended and whose process is not known to be gone.
    ///
    /// # Errors
    /// Those of the database.
    pub fn run_is_alive(&self, run: RunId) -> Result<bool, Error> {
        let own = ProcessId::own();
        let at = now();
        Ok(open_runs(&self.conn)?.iter().any(|(open, _)| open.run == run && !open.is_dead(&own, at)))
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

/// A run that has not said that it ended.
pub(super) struct OpenRun {
    pub(super) run: RunId,
    process: ProcessId,
    pub(super) started_at: f64,
    heartbeat_at: f64,
}

impl OpenRun {
    fn is_dead(&self, own: &ProcessId, at: f64) -> bool {
        self.process.is_dead(own, at - self.heartbeat_at)
    }
}

/// A run that has not ended and whose process is not known to be gone.
pub(super) fn first_live_run(conn: &Connection) -> Result<Option<RunId>, Error> {
    Ok(live_runs(conn)?.first().map(|open| open.run))
}

/// All of them.
pub(super) fn live_runs(conn: &Connection) -> Result<Vec<OpenRun>, Error> {
    let own = ProcessId::own();
    let at = now();
    Ok(open_runs(conn)?.into_iter().map(|(open, _)| open).filter(|open| !open.is_dead(&own, at)).collect())
}

fn open_runs(conn: &Connection) -> Result<Vec<(OpenRun, InForce)>, Error> {
    let mut statement = conn.prepare(
        "SELECT id, host, boot_id, pid, pid_started, heartbeat_at, detect_recipe_id, embed_recipe_id, started_at
         FROM runs WHERE ended_at IS NULL",
    )?;
    let rows = statement.query_map([], |r| {
        let process = ProcessId { host: r.get(1)?, boot_id: r.get(2)?, pid: r.get(3)?, started: r.get(4)? };
        let recipe = |i| r.get::<_, Option<i64>>(i).map(|id| id.map(RecipeId));
        let recipes = InForce { detect: recipe(6)?, embed: recipe(7)? };
        Ok((OpenRun { run: RunId(r.get(0)?), process, started_at: r.get(8)?, heartbeat_at: r.get(5)? }, recipes))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Runs that ended and still hold rows. Looks at running rows only.
fn holders_that_ended(conn: &Connection) -> Result<Vec<RunId>, Error> {
    let mut statement = conn.prepare(
        "SELECT id FROM runs WHERE ended_at IS NOT NULL AND id IN (
             SELECT run_id FROM images WHERE detect_state = 'running' AND detect_state <> 'done'
             UNION SELECT run_id FROM images WHERE embed_state = 'running' AND embed_state <> 'done')",
    )?;
    let rows = statement.query_map([], |r| r.get(0).map(RunId))?;
    Ok(rows.collect::<Result<_, _>>()?)
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
