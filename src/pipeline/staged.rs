//! Staged loading: the same flow in two passes, for models that do not fit into memory together. First all detections;
//! then the detector is gone, and the embedder works on the stored regions.

use super::alive::beside_heartbeats;
use super::measure::resident_bytes;
use super::progress::Progress;
use super::sweep::Sweep;
use super::{Job, Summary, lock, run};
use crate::db::due::images_where;
use crate::db::scope::Span;
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
            let Some(ready) = beside_heartbeats(job, || make_ready(job, *stage, load))? else { continue };
            let Ready { before, models, loaded } = ready;
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

/// A model, and the memory of the process without it and with it.
struct Ready {
    before: Memory,
    models: Models,
    loaded: Memory,
}

/// Makes rows due and loads the model of `stage`; `None` where nothing waits for it, or a stop is asked for.
fn make_ready(
    job: &Job<'_>,
    stage: Stage,
    load: &mut dyn FnMut(Stage) -> Result<Models, Error>,
) -> Result<Option<Ready>, Error> {
    Sweep::new(job).finish()?;
    if job.stop.is_asked() || !is_pending(job, stage)? {
        return Ok(None);
    }
    let before = Memory::now(job);
    let models = load(stage)?;
    Ok(Some(Ready { before, models, loaded: Memory::now(job) }))
}

/// How a process ends that threads hang in during the pass of `stage`: another pass would need them back.
fn nothing_more(job: &Job<'_>, stage: Stage, result: Result<Summary, Error>) -> Result<Summary, Error> {
    let summary = result?;
    Sweep::new(job).finish()?;
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

fn is_pending(job: &Job<'_>, stage: Stage) -> Result<bool, Error> {
    let scope = lock(job.db).scope();
    let Some(scope) = scope else {
        let tally = lock(job.db).tally()?;
        return Ok(images_where(&tally, |standing| standing.state(stage) == Some(State::Pending)) > 0);
    };
    let mut span = Span::ALL;
    while span.after < span.to && !job.stop.is_asked() {
        let look = scope.pending(stage, span, 1)?;
        if !look.ids.is_empty() {
            return Ok(true);
        }
        span.after = look.to;
    }
    Ok(false)
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
