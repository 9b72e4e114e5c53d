//! The flow on one page: [`run`] makes the channels, spawns one named thread per stage, joins them in order
//! and returns a summary. A stage knows `message` and its own work, never another stage.

mod batch;
mod budget;
mod commit;
mod crop;
pub mod crop_file;
mod decode;
mod detect;
mod embed;
mod message;
pub mod progress;
mod read;
pub mod stop;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crossbeam_channel::bounded;

use crate::config::{RunConfig, Stale};
use crate::db::Db;
use crate::db::claim::RunId;
use crate::db::due::InForce;
use crate::error::Error;
use crate::model::{Models, Terminator};
use crate::recipe::ImageInput;
use budget::Budget;
use progress::Progress;
use stop::Stop;

/// Claims between `read` and `decode`; the rest of a page waits in `read`.
const CLAIMS_WAITING: usize = 8;

/// Batches of crops between `crop` and `embed`: one is ready while another is worked on.
const EMBED_BATCHES_READY: usize = 2;

/// Outcomes between the stages and `commit`; senders wait when a commit takes long.
const OUTCOMES_WAITING: usize = 1024;

/// One run's shared things, seen by every stage.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// Validated settings.
    pub config: &'a RunConfig,
    /// The process's one write connection.
    pub db: &'a Mutex<Db>,
    /// This run's row.
    pub run: RunId,
    /// The recipes that pending rows are worked with.
    pub in_force: InForce,
    /// What becomes of finished rows of other recipes.
    pub stale: Stale,
    /// Decoding, resizing and cropping happen here and nowhere else.
    pub pool: &'a rayon::ThreadPool,
    /// Counters.
    pub progress: &'a Progress,
    /// Soft and hard stops.
    pub stop: &'a Stop,
}

/// What the models want, for the stages that prepare their inputs.
struct Shapes {
    detect: Option<ImageInput>,
    embed: Option<ImageInput>,
    embed_batch: usize,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Images whose last due stage is done.
    pub done: u64,
    /// Images that ended with a code.
    pub failed: u64,
    /// Results that were not stored because another worker had the row.
    pub dropped: u64,
    /// Rows given back unfinished.
    pub released: u64,
}

/// Works until nothing is pending, the limit is reached or a stop is asked for. Whatever happens, rows that
/// did not end are pending again when this returns, and both sessions are gone.
///
/// # Errors
/// The first error of a stage, in the order of the flow; finished rows are stored.
pub fn run(job: &Job<'_>, models: Models) -> Result<Summary, Error> {
    let shapes = Shapes::of(&models, job.config.batch);
    let terminators = terminators(&models);
    let in_flight = images_in_flight(job.config);
    let budget = Budget::new(job.config.memory_bytes.saturating_sub(shapes.batch_bytes(job.config)), in_flight);
    let Models { detector, embedder, .. } = models;
    let result: Result<(), Error> = std::thread::scope(|scope| {
        let (claimed_tx, claimed_rx) = bounded(CLAIMS_WAITING);
        // As many as the budget admits: a thread of the pool never waits for room.
        let (decoded_tx, decoded_rx) = bounded(in_flight);
        let (located_tx, located_rx) = bounded(in_flight);
        let (crops_tx, crops_rx) = bounded(EMBED_BATCHES_READY);
        let (commit_tx, commit_rx) = bounded(OUTCOMES_WAITING);
        let decode_exits = decode::Exits {
            detect: detector.is_some().then_some(decoded_tx),
            crop: located_tx.clone(),
            commit: commit_tx.clone(),
        };
        let crop_exits = crop::Exits { embed: embedder.is_some().then_some(crops_tx), commit: commit_tx.clone() };
        let (shapes, budget, terminators) = (&shapes, &budget, &terminators);
        let (detect_commit, embed_commit) = (commit_tx.clone(), commit_tx);
        let stages = [
            stage(scope, job.stop, "read", move || read::run(job, &claimed_tx))?,
            stage(scope, job.stop, "decode", move || decode::run(job, shapes, budget, &claimed_rx, &decode_exits))?,
            stage(scope, job.stop, "detect", move || match detector {
                Some(detector) => detect::run(job, detector, &decoded_rx, &located_tx, &detect_commit),
                None => Ok(()),
            })?,
            stage(scope, job.stop, "crop", move || crop::run(job, shapes, &located_rx, &crop_exits))?,
            stage(scope, job.stop, "embed", move || match embedder {
                Some(embedder) => embed::run(job, embedder, &crops_rx, &embed_commit),
                None => Ok(()),
            })?,
            stage(scope, job.stop, "commit", move || commit::run(job, budget, terminators, &commit_rx))?,
        ];
        // Every stage is joined before the first error, in the order of the flow, is told.
        let ends: Vec<Result<(), Error>> = stages.into_iter().map(join).collect();
        ends.into_iter().collect()
    });
    let released = lock(job.db).release(job.run);
    result?;
    Ok(Summary {
        done: Progress::get(&job.progress.done),
        failed: Progress::get(&job.progress.failed),
        dropped: Progress::get(&job.progress.dropped),
        released: released? as u64,
    })
}

/// Images between `decode` and the last crop: enough for each session to have its next batches ready.
fn images_in_flight(config: &RunConfig) -> usize {
    3 * config.batch + 2 * config.threads
}

impl Shapes {
    fn of(models: &Models, batch: usize) -> Self {
        Self {
            detect: models.detector.as_ref().map(|d| d.input().clone()),
            embed: models.embedder.as_ref().map(|e| e.input().clone()),
            embed_batch: models.embedder.as_ref().and_then(|e| e.fixed_batch()).unwrap_or(batch),
        }
    }

    /// Tensors of whole batches, reserved before the first image.
    fn batch_bytes(&self, config: &RunConfig) -> u64 {
        let image = |input: &Option<ImageInput>| input.as_ref().map_or(0, |i| 4 * i.values_most() as u64);
        let embed_batches = EMBED_BATCHES_READY as u64 + 2;
        config.batch as u64 * image(&self.detect) + embed_batches * self.embed_batch as u64 * image(&self.embed)
    }
}

fn terminators(models: &Models) -> Vec<Terminator> {
    let detector = models.detector.iter().map(|d| d.terminator());
    detector.chain(models.embedder.iter().map(|e| e.terminator())).collect()
}

type Handle<'scope> = (&'static str, ScopedJoinHandle<'scope, Result<(), Error>>);

/// A named thread. Its error or panic makes all others leave.
fn stage<'scope, 'env: 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    stop: &'env Stop,
    name: &'static str,
    work: impl FnOnce() -> Result<(), Error> + Send + 'scope,
) -> Result<Handle<'scope>, Error> {
    let guarded = move || {
        let abort = AbortUnlessDone(stop);
        let result = work();
        if result.is_ok() {
            std::mem::forget(abort);
        }
        result
    };
    let spawned = Builder::new().name(name.to_owned()).spawn_scoped(scope, guarded);
    spawned.map(|handle| (name, handle)).map_err(|e| {
        stop.abort();
        Error::System(format!("cannot start the {name} thread: {e}"))
    })
}

struct AbortUnlessDone<'a>(&'a Stop);

impl Drop for AbortUnlessDone<'_> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn join((stage, handle): Handle<'_>) -> Result<(), Error> {
    handle.join().unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let message = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::Panicked { stage: stage.to_owned(), message })
    })
}

/// A panic elsewhere leaves the database sound: every write is a transaction.
pub(crate) fn lock(db: &Mutex<Db>) -> MutexGuard<'_, Db> {
    db.lock().unwrap_or_else(PoisonError::into_inner)
}
