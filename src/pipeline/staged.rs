//! Staged loading: the same flow in two passes, for models that do not fit into memory together. First all detections;
//! then the detector is gone, and the embedder works on the stored regions.

use super::measure::resident_bytes;
use super::progress::Progress;
use super::{Job, Summary, lock, run};
use crate::db::due::images_where;
use crate::error::Error;
use crate::model::Models;
use crate::row::{Stage, State};

/// Works until nothing is pending, with one model in memory at a time. `load` loads the model of a stage, `give_back`
/// returns freed memory to the system, `tell` gets a line for the user on the memory that each took and gave back.
///
/// # Errors
/// Those of [`run`], and of `load`.
pub fn run_staged(
    job: &Job<'_>,
    load: &mut dyn FnMut(Stage) -> Result<Models, Error>,
    give_back: &dyn Fn(),
    tell: &dyn Fn(&str),
) -> Result<Summary, Error> {
    let mut summary = Summary::default();
    loop {
        let claimed = Progress::get(&job.progress.claimed);
        for stage in job.stages {
            settle(job)?;
            if job.stop.is_asked() || !is_pending(job, *stage)? {
                continue;
            }
            let before = Memory::now(job);
            let models = load(*stage)?;
            let loaded = Memory::now(job);
            let leave = |result| (job.leave)(nothing_more(job, *stage, result));
            summary = run(&Job { stages: std::slice::from_ref(stage), leave: &leave, ..*job }, models)?;
            give_back();
            tell(&before.describe(loaded, Memory::now(job), *stage));
        }
        // Rows whose file changed, and rows that were added, need another round.
        if job.stop.is_asked() || job.config.limit.is_some() || claimed == Progress::get(&job.progress.claimed) {
            return Ok(summary);
        }
    }
}

/// How a process ends that threads hang in during the pass of `stage`: another pass would need them back.
fn nothing_more(job: &Job<'_>, stage: Stage, result: Result<Summary, Error>) -> Result<Summary, Error> {
    let summary = result?;
    settle(job)?;
    for other in job.stages {
        // A limit leaves rows of the first stage for another run.
        let counts = job.config.limit.is_none() || *other as usize > stage as usize;
        if counts && is_pending(job, *other)? {
            return Err(Error::Stuck(format!(
                "the pass of {} cannot begin beside threads that hang in files",
                other.word()
            )));
        }
    }
    Ok(summary)
}

/// Makes rows due, so that it can be told whether a stage has any before its model is loaded.
fn settle(job: &Job<'_>) -> Result<(), Error> {
    let mut after = Some(0);
    while let Some(id) = after {
        after = lock(job.db).settle_chunk(id, job.in_force, job.stale)?;
    }
    Ok(())
}

fn is_pending(job: &Job<'_>, stage: Stage) -> Result<bool, Error> {
    let tally = lock(job.db).tally_in_scope()?;
    let waiting = images_where(&tally, |standing| {
        let state = match stage {
            Stage::Detect => standing.detect,
            Stage::Embed => standing.embed,
        };
        state == Some(State::Pending)
    });
    Ok(waiting > 0)
}

/// Memory of the process at one moment.
#[derive(Clone, Copy)]
struct Memory {
    host_bytes: u64,
    device_bytes: u64,
}

impl Memory {
    fn now(job: &Job<'_>) -> Self {
        Self { host_bytes: resident_bytes(), device_bytes: job.instruments.device_bytes() }
    }

    /// Of a stage's model: what it took, what the run added, what is left of both.
    fn describe(self, loaded: Self, after: Self, stage: Stage) -> String {
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        let device = match loaded.device_bytes.max(after.device_bytes) {
            0 => String::new(),
            _ => format!(
                "; GPU {} before, {} with it, {} now",
                mib(self.device_bytes),
                mib(loaded.device_bytes),
                mib(after.device_bytes)
            ),
        };
        format!(
            "the model of {} is gone: memory {} before it, {} with it, {} now{device}",
            stage.word(),
            mib(self.host_bytes),
            mib(loaded.host_bytes),
            mib(after.host_bytes)
        )
    }
}
