//! Which workers live, and taking over from those that do not.
//!
//! A process that is gone is dead at once, where that can be seen. Everything else is a matter of its heartbeat, which
//! comes once a second. Two clocks look at it, for either may be wrong: by the wall clock in the database a worker whose
//! clock was set, or who was suspended, seems silent; by this process's own clock it must have been silent while
//! somebody watched.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rusqlite::{Connection, params};

use super::claim::RunId;
use super::due::{InForce, RecipeId};
use super::process::{ProcessId, Seen};
use super::{Db, now, suspects};
use crate::error::Error;
use crate::fault;
use crate::row::Stage;

/// A worker that cannot be seen to be gone is taken for dead when it has been silent for this long.
pub const LEASE: Duration = Duration::from_secs(300);

/// However silent by the wall clock, it is watched for this long: some heartbeats.
const WATCHED_LEAST: Duration = Duration::from_secs(15);

/// Heartbeats as this process saw them: the last one of each run, and when it came.
#[derive(Debug, Default)]
pub(super) struct Heartbeats(HashMap<i64, (f64, Instant)>);

impl Heartbeats {
    /// For how long that run has been silent while this process watched.
    fn silence(&mut self, run: RunId, heartbeat_at: f64) -> Duration {
        let (last, since) = self.0.entry(run.0).or_insert((heartbeat_at, Instant::now()));
        if *last != heartbeat_at {
            (*last, *since) = (heartbeat_at, Instant::now());
        }
        since.elapsed()
    }
}

/// A run that has not said that it ended.
pub(super) struct OpenRun {
    /// The run.
    pub(super) run: RunId,
    /// What it works with.
    pub(super) recipes: InForce,
    /// When it began, in seconds since 1970.
    pub(super) started_at: f64,
    process: ProcessId,
    heartbeat_at: f64,
}

/// Why rows are taken from a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Its process is gone: one of its rows may be why.
    Died,
    /// Its machine went down.
    WentDown,
    /// Its process is there and says nothing: stopped, or hanging.
    Silent,
}

impl OpenRun {
    fn fate(&self, own: &ProcessId, lease: Duration, watched: Duration) -> Option<Fate> {
        let by_the_wall_s = now() - self.heartbeat_at;
        let is_silent =
            watched >= lease || (by_the_wall_s > lease.as_secs_f64() && watched >= WATCHED_LEAST.min(lease));
        match self.process.seen_from(own) {
            Seen::Gone => Some(Fate::Died),
            Seen::WentDownWithTheMachine => Some(Fate::WentDown),
            Seen::Nothing => is_silent.then_some(Fate::Died),
            Seen::There => is_silent.then_some(Fate::Silent),
        }
    }

    /// Silent by the wall clock, which is enough to wait for a heartbeat and not enough to take its rows.
    fn is_doubtful(&self, own: &ProcessId, lease: Duration) -> bool {
        matches!(self.process.seen_from(own), Seen::Nothing | Seen::There)
            && now() - self.heartbeat_at > lease.as_secs_f64()
    }
}

/// A worker and the rows that it has in its hands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its run.
    pub run: RunId,
    /// Its host.
    pub host: String,
    /// Its process id there.
    pub pid: i64,
    /// How many rows.
    pub images: u64,
}

impl Db {
    /// Another lease, for all that this process decides.
    pub fn set_lease(&mut self, lease: Duration) {
        self.lease = lease;
    }

    /// Closes the rows of runs whose process is gone or has been silent for the lease, and gives their images back, and
    /// those that an ended run still holds (it could not release them). Returns the runs and how many images they held.
    ///
    /// A silent worker may wake up: it has lost its tokens, so that nothing of it is stored, and its next heartbeat fails.
    ///
    /// # Errors
    /// Those of the database.
    pub fn rescue_dead_runs(&mut self) -> Result<Vec<(RunId, usize)>, Error> {
        let own = ProcessId::own();
        let mut gone: Vec<RunId> = holders_that_ended(&self.conn)?;
        for open in open_runs(&self.conn)? {
            if self.own_run == Some(open.run) {
                // Whatever the clocks say after a sleep.
                continue;
            }
            let watched = self.heartbeats.silence(open.run, open.heartbeat_at);
            let Some(fate) = open.fate(&own, self.lease, watched) else { continue };
            if self.close(&open, fate)? {
                gone.push(open.run);
            }
        }
        let mut rescued = Vec::new();
        for run in gone {
            let images = self.release(run)?;
            rescued.push((run, images));
        }
        Ok(rescued)
    }

    /// Closes a run whose rows are then released: it claims nothing more. False where it gave a sign of life after all, while
    /// this waited for the right to write.
    fn close(&mut self, open: &OpenRun, fate: Fate) -> Result<bool, Error> {
        let tx = self.write()?;
        let unchanged = "SELECT EXISTS (SELECT 1 FROM runs WHERE id = ?1 AND ended_at IS NULL AND heartbeat_at = ?2)";
        if !tx.query_row(unchanged, params![open.run.0, open.heartbeat_at], |r| r.get(0))? {
            return Ok(false);
        }
        if fate != Fate::Silent {
            suspects::remember(&tx, open.run, fate == Fate::WentDown)?;
            fault::point("rescue.remembered");
        }
        tx.execute("UPDATE runs SET ended_at = heartbeat_at, ended_how = 'died' WHERE id = ?1", [open.run.0])?;
        tx.commit()?;
        fault::point("rescue.closed");
        Ok(true)
    }

    /// True while a run is silent by the wall clock and has not been watched for long enough to say that it is dead.
    ///
    /// # Errors
    /// Those of the database.
    pub fn has_doubtful_runs(&self) -> Result<bool, Error> {
        let own = ProcessId::own();
        Ok(open_runs(&self.conn)?.iter().any(|open| open.is_doubtful(&own, self.lease)))
    }

    /// Other runs that have rows of these stages in their hands.
    ///
    /// # Errors
    /// Those of the database.
    pub fn holders(&self, own: RunId, stages: &[Stage]) -> Result<Vec<Holder>, Error> {
        let mut statement = self.conn.prepare_cached(
            "SELECT runs.id, host, pid, count(*) FROM images JOIN runs ON runs.id = images.run_id
             WHERE runs.id <> ?1 AND images.id IN
                 (SELECT id FROM images WHERE ?2 AND detect_state = 'running' AND detect_state <> 'done'
                  UNION SELECT id FROM images WHERE ?3 AND embed_state = 'running' AND embed_state <> 'done')
             GROUP BY runs.id",
        )?;
        let wanted = |stage| stages.contains(&stage);
        let rows = statement.query_map(params![own.0, wanted(Stage::Detect), wanted(Stage::Embed)], |r| {
            Ok(Holder { run: RunId(r.get(0)?), host: r.get(1)?, pid: r.get(2)?, images: r.get(3)? })
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// True for a run that has not ended and whose process is not known to be gone.
    ///
    /// # Errors
    /// Those of the database.
    pub fn run_is_alive(&self, run: RunId) -> Result<bool, Error> {
        Ok(live_runs(&self.conn, self.lease)?.iter().any(|live| live.run == run))
    }
}

/// Runs that have not ended and are not known to be gone; silent ones are, by the wall clock.
pub(super) fn live_runs(conn: &Connection, lease: Duration) -> Result<Vec<OpenRun>, Error> {
    let own = ProcessId::own();
    let mut runs = open_runs(conn)?;
    runs.retain(|open| open.fate(&own, lease, Duration::ZERO).is_none() && !open.is_doubtful(&own, lease));
    Ok(runs)
}

/// Runs that have not said that they ended.
pub(super) fn open_runs(conn: &Connection) -> Result<Vec<OpenRun>, Error> {
    let mut statement = conn.prepare(
        "SELECT id, host, boot_id, pid, pid_started, heartbeat_at, detect_recipe_id, embed_recipe_id, started_at
         FROM runs WHERE ended_at IS NULL",
    )?;
    let rows = statement.query_map([], |r| {
        let process = ProcessId { host: r.get(1)?, boot_id: r.get(2)?, pid: r.get(3)?, started: r.get(4)? };
        let recipe = |i| r.get::<_, Option<i64>>(i).map(|id| id.map(RecipeId));
        let recipes = InForce { detect: recipe(6)?, embed: recipe(7)? };
        Ok(OpenRun { run: RunId(r.get(0)?), recipes, started_at: r.get(8)?, process, heartbeat_at: r.get(5)? })
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

    const LEASE: Duration = Duration::from_secs(300);
    const LONG: Duration = Duration::from_secs(301);
    const SHORT: Duration = Duration::from_secs(16);

    fn open(process: ProcessId, heartbeat_s_ago: f64) -> OpenRun {
        let recipes = InForce { detect: None, embed: None };
        OpenRun { run: RunId(1), recipes, started_at: 0.0, process, heartbeat_at: now() - heartbeat_s_ago }
    }

    fn elsewhere() -> ProcessId {
        ProcessId { host: "elsewhere".into(), ..ProcessId::own() }
    }

    #[test]
    fn a_process_that_is_gone_is_dead_at_once_and_one_that_lives_is_not() {
        let own = ProcessId::own();
        assert_eq!(open(own.clone(), 0.0).fate(&own, LEASE, Duration::ZERO), None);
        let earlier = ProcessId { started: own.started - 1, ..own.clone() };
        assert_eq!(open(earlier, 0.0).fate(&own, LEASE, Duration::ZERO), Some(Fate::Died));
        let before_boot = ProcessId { boot_id: "another ns".into(), ..own.clone() };
        assert_eq!(open(before_boot, 0.0).fate(&own, LEASE, Duration::ZERO), Some(Fate::WentDown));
        assert_eq!(open(elsewhere(), 0.0).fate(&own, LEASE, Duration::ZERO), None);
    }

    #[test]
    fn a_stopped_process_loses_its_rows_and_is_not_suspected() {
        let own = ProcessId::own();
        assert_eq!(open(own.clone(), 0.0).fate(&own, LEASE, LONG), Some(Fate::Silent));
        assert_eq!(open(elsewhere(), 0.0).fate(&own, LEASE, LONG), Some(Fate::Died));
    }

    #[test]
    fn a_clock_that_was_set_forward_kills_nobody_who_still_beats() {
        let own = ProcessId::own();
        let an_hour_ago = open(elsewhere(), 3600.0);
        assert!(an_hour_ago.is_doubtful(&own, LEASE));
        assert_eq!(an_hour_ago.fate(&own, LEASE, Duration::from_secs(3)), None, "watched too shortly");
        assert_eq!(an_hour_ago.fate(&own, LEASE, SHORT), Some(Fate::Died));
        let mut heartbeats = Heartbeats::default();
        assert!(heartbeats.silence(RunId(1), 1.0) < Duration::from_secs(1));
        std::thread::sleep(Duration::from_millis(20));
        assert!(heartbeats.silence(RunId(1), 1.0) >= Duration::from_millis(20));
        assert!(heartbeats.silence(RunId(1), 0.5) < Duration::from_millis(20), "any other value is a heartbeat");
    }

    #[test]
    fn a_clock_that_was_set_back_hides_nobody_who_is_silent() {
        let own = ProcessId::own();
        let from_the_future = open(elsewhere(), -3600.0);
        assert_eq!(from_the_future.fate(&own, LEASE, SHORT), None);
        assert_eq!(from_the_future.fate(&own, LEASE, LONG), Some(Fate::Died));
    }
}
