//! The flow on one page: [`run`] makes the channels, spawns one named thread per stage, joins them in order
//! and returns a summary. A stage knows `message` and its own work, never another stage.

mod ahead;
mod alive;
pub mod apart;
mod assemble;
mod batch;
pub mod breaker;
mod budget;
mod calls;
mod commit;
pub mod cores;
mod crop;
pub mod crop_file;
mod decode;
mod desk;
mod detect;
mod embed;
pub mod failures;
pub mod flights;
pub mod learn;
pub mod measure;
mod message;
mod oversee;
pub mod progress;
mod read;
mod scale;
mod stack;
pub mod staged;
pub mod stop;
mod stopwatch;
mod sweep;
pub mod tune;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crossbeam_channel::bounded;

use crate::config::{Batch, RunConfig, Stale};
use crate::db::Db;
use crate::db::claim::RunId;
use crate::db::due::InForce;
use crate::db::refuse::explained;
use crate::error::Error;
use crate::model::{Loaded, Models, Terminator};
use crate::pixels::decode::FILE_BYTES_KEPT;
use crate::recipe::ImageInput;
use crate::row::Stage;
use ahead::STACKS_ON_GPU;
use apart::Word;
use assemble::Assembly;
use batch::Patience;
use budget::Budget;
use calls::Calls;
use cores::Cores;
use desk::Desk;
use learn::Learning;
use measure::Instruments;
use progress::{Progress, Step};
use stop::{Cause, Stop};
use tune::Tuner;

/// Claims between `read` and `decode`; the rest of a page waits in `read`.
const CLAIMS_WAITING: usize = 8;

/// Images in one call that `--batch auto` tries at most; on a CPU more than a few gain nothing.
const BATCH_MOST_ON_HOST: usize = 8;
const BATCH_MOST_ON_GPU: usize = 128;

/// One part in so many of `--memory` is for the tensors of one stage's batch.
const BATCHES_SHARE: u64 = 8;

/// Outcomes between the stages and `commit`; senders wait when a commit takes long.
const OUTCOMES_WAITING: usize = 4096;

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
    /// Stages whose rows are claimed: those with a model in this pass.
    pub stages: &'a [Stage],
    /// Decoding, resizing and cropping happen here and nowhere else.
    pub pool: &'a rayon::ThreadPool,
    /// Permits to compute on the host.
    pub cores: &'a Cores,
    /// Sessions compute on the host, and share its cores with the pool.
    pub on_host: bool,
    /// Batch sizes that earlier runs found.
    pub learnt: &'a Learning,
    /// Memory of the device and the metrics file.
    pub instruments: &'a Instruments,
    /// Counters.
    pub progress: &'a Progress,
    /// Soft and hard stops.
    pub stop: &'a Stop,
    /// Hears which row is begun with and which has ended, where a parent wants to know.
    pub watcher: Option<&'a (dyn Fn(Word) + Sync)>,
    /// One row after the other.
    pub one_by_one: bool,
    /// Ends the process in the way that a run ends, with this result: threads that hang can never be joined. Does
    /// not return. Rows in flight have to be released.
    pub leave: &'a (dyn Fn(Result<Summary, Error>) + Sync),
}

impl Job<'_> {
    fn tell(&self, word: Word) {
        if let Some(watcher) = self.watcher {
            watcher(word);
        }
    }

    /// When a partial batch of a session waits, which has so many `in_hand`.
    fn patience<'a>(&self, in_hand: &'a AtomicUsize) -> Patience<'a> {
        if self.on_host { Patience::WhileMoreComes } else { Patience::WhileBusy(in_hand) }
    }
}

/// What the models want, for the stages that prepare their inputs.
struct Shapes {
    detect: Option<ImageInput>,
    embed: Option<ImageInput>,
    /// Pixels of a picture per pixel of the embedder's input, at least; `None` for full size.
    embed_spare: Option<u32>,
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
/// did not end are pending again when this returns, and both sessions are gone. It does not return, but calls
/// [`Job::leave`], where threads hang in files and nothing else is left to do, or nobody to do it.
///
/// # Errors
/// The first error of a stage, in the order of the flow; finished rows are stored.
pub fn run(job: &Job<'_>, models: Models) -> Result<Summary, Error> {
    let room = Room::of(job, &models);
    let shapes = Shapes {
        detect: models.detector.as_ref().map(|d| d.input().clone()),
        embed: models.embedder.as_ref().map(|e| e.input().clone()),
        embed_spare: job.config.decode.mode.embedder_spare(models.embedder.as_ref().is_some_and(|e| e.has_patches())),
    };
    let terminators = terminators(&models);
    let budget = Budget::new(room.images_bytes, room.images);
    let Models { detector, embedder, more_detectors, more_embedders, threads_per_session, memory, .. } = models;
    let detectors: Vec<_> = detector.into_iter().chain(more_detectors).collect();
    let embedders: Vec<_> = embedder.into_iter().chain(more_embedders).collect();
    job.progress.sessions.store(detectors.len().max(embedders.len()), Ordering::Relaxed);
    let assembly = Arc::new(Assembly::default());
    let (detecting, embedding) = (&AtomicUsize::new(0), &AtomicUsize::new(0));
    let (desk, read_is_over) = (&Desk::new(job.config.decode_limit), &AtomicBool::new(false));
    let (detect_tuner, embed_tuner) = (&Mutex::new(room.detect), &Mutex::new(room.embed));
    let result: Result<(), Error> = std::thread::scope(|scope| {
        let (claimed_tx, claimed_rx) = bounded(CLAIMS_WAITING);
        // As many as the budget admits: a thread of the pool never waits for room.
        let (decoded_tx, decoded_rx) = bounded(room.images);
        let (located_tx, located_rx) = bounded(room.images);
        let (crops_tx, crops_rx) = bounded(room.crops);
        let (commit_tx, commit_rx) = bounded(OUTCOMES_WAITING);
        let (pool_tx, pool_rx) = bounded(0);
        let decode_exits = decode::Exits {
            detect: (!detectors.is_empty()).then_some(decoded_tx),
            crop: located_tx.clone(),
            commit: commit_tx.clone(),
            _pool: pool_tx.clone(),
        };
        let crop_exits = crop::Exits {
            embed: (!embedders.is_empty()).then_some(crops_tx),
            assembly: Arc::clone(&assembly),
            commit: commit_tx.clone(),
            _pool: pool_tx,
        };
        let (shapes, budget, terminators, assembly, memory) = (&shapes, &budget, &terminators, &*assembly, &memory);
        let calls = |step, tuner| Calls::new(job.progress, job.cores, threads_per_session, step, tuner);
        let (detect_commit, embed_commit) = (commit_tx.clone(), commit_tx);
        let stages = [
            stage(scope, job.stop, "read", move || {
                let read = read::run(job, &claimed_tx);
                read_is_over.store(true, Ordering::Release);
                read
            })?,
            stage(scope, job.stop, "decode", move || {
                decode::run(job, shapes, (budget, desk), &claimed_rx, &decode_exits)
            })?,
            stage(scope, job.stop, "detect", move || {
                let batches = detect::batches(job, budget, (&decoded_rx, detectors.len()), detecting);
                side_by_side(job.stop, detectors, |detector| {
                    let calls = calls(Step::Detect, detect_tuner);
                    detect::run(job, detector, (&calls, memory), &batches, (&located_tx, &detect_commit))
                })
            })?,
            stage(scope, job.stop, "crop", move || crop::run(job, shapes, desk, &located_rx, &crop_exits))?,
            stage(scope, job.stop, "embed", move || {
                let batches = embed::batches(job, budget, (&crops_rx, embedders.len()), embedding);
                side_by_side(job.stop, embedders, |embedder| {
                    let calls = calls(Step::Embed, embed_tuner);
                    embed::run(job, embedder, (&calls, memory), &batches, (assembly, &embed_commit))
                })
            })?,
            stage(scope, job.stop, "commit", move || commit::run(job, (budget, desk), terminators, &commit_rx))?,
            stage(scope, job.stop, "oversee", move || oversee::run(job, desk, read_is_over, &pool_rx))?,
        ];
        // Every stage is joined before the first error, in the order of the flow, is told.
        let ends: Vec<Result<(), Error>> = stages.into_iter().map(join).collect();
        ends.into_iter().collect()
    });
    let mut db = lock(job.db);
    let released = db.release(job.run);
    Progress::add(&job.progress.released, *released.as_ref().unwrap_or(&0) as u64);
    result.map_err(|error| explained(db.path(), error))?;
    released?;
    Ok(job.progress.summary())
}

/// How `--memory` is divided: tensors of whole batches and crops that wait are reserved before the first image.
struct Room {
    detect: Tuner,
    embed: Tuner,
    /// Crops that wait for the embedder; whoever cuts more waits.
    crops: usize,
    /// Images between `decode` and the last crop.
    images: usize,
    images_bytes: u64,
}

impl Room {
    fn of(job: &Job<'_>, models: &Models) -> Self {
        let most = if job.on_host { BATCH_MOST_ON_HOST } else { BATCH_MOST_ON_GPU };
        let for_batches_bytes = job.config.memory_bytes / BATCHES_SHARE;
        let tuner = |stage, model: Option<&dyn Loaded>| {
            let images_most = model.and_then(Loaded::fixed_batch).unwrap_or(match job.config.batch {
                Batch::Auto => most,
                Batch::Fixed(images) => images,
            });
            Tuner::new(stage, job.config.batch, images_most, (for_batches_bytes / 4) as usize, &job.learnt.known)
        };
        let detect = tuner(Stage::Detect, models.detector.as_deref().map(|d| d as &dyn Loaded));
        let embed = tuner(Stage::Embed, models.embedder.as_deref().map(|e| e as &dyn Loaded));
        let sessions = 1 + models.more_detectors.len().max(models.more_embedders.len());
        let detect_batch = models.detector.as_ref().map_or(0, |d| sessions * detect.most(d.input().size_most()));
        let embed_batch = models.embedder.as_ref().map_or(0, |e| sessions * embed.most(e.input().size_most()));
        let bytes = |input: Option<&ImageInput>| input.map_or(0, |input| 4 * input.values_most() as u64);
        let crop_bytes = bytes(models.embedder.as_ref().map(|e| e.input()));
        let crops = (2 * embed_batch).clamp(1, ((for_batches_bytes / crop_bytes.max(1)) as usize).max(1));
        let stacks = if job.on_host { 1 } else { STACKS_ON_GPU };
        // The tensors themselves, crops in a batch and before it, and in the hands of each thread of the pool a crop and a file.
        let reserved_bytes = (stacks * detect_batch) as u64 * bytes(models.detector.as_ref().map(|d| d.input()))
            + ((stacks + 1) * embed_batch + crops + job.config.threads) as u64 * crop_bytes
            + job.config.threads as u64 * FILE_BYTES_KEPT;
        Self {
            detect,
            embed,
            crops,
            // Enough for each session to have its next batches ready.
            images: 3 * detect_batch.max(embed_batch).max(1) + 2 * job.config.threads,
            // Half of a tiny budget at least, or every image would have to be alone.
            images_bytes: job.config.memory_bytes.saturating_sub(reserved_bytes).max(job.config.memory_bytes / 2),
        }
    }
}

/// One thread per session; the first error wins and makes the others leave.
fn side_by_side<M: Send>(
    stop: &Stop,
    models: Vec<M>,
    work: impl Fn(M) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            models.into_iter().map(|model| scope.spawn(move || guarded(stop, move || work(model)))).collect();
        let ends: Vec<Result<(), Error>> =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
        ends.into_iter().collect()
    })
}

fn terminators(models: &Models) -> Vec<Terminator> {
    let detectors = models.detector.iter().chain(&models.more_detectors).map(|d| d.terminator());
    detectors.chain(models.embedder.iter().chain(&models.more_embedders).map(|e| e.terminator())).collect()
}

type Handle<'scope> = (&'static str, ScopedJoinHandle<'scope, Result<(), Error>>);

/// A named thread. Its error or panic makes all others leave.
fn stage<'scope, 'env: 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    stop: &'env Stop,
    name: &'static str,
    work: impl FnOnce() -> Result<(), Error> + Send + 'scope,
) -> Result<Handle<'scope>, Error> {
    let spawned = Builder::new().name(name.to_owned()).spawn_scoped(scope, move || guarded(stop, work));
    spawned.map(|handle| (name, handle)).map_err(|e| {
        stop.abort();
        Error::System(format!("cannot start the {name} thread: {e}"))
    })
}

/// Makes all others leave where `work` fails or panics.
fn guarded(stop: &Stop, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let abort = AbortUnlessDone(stop);
    let result = work();
    match &result {
        Ok(()) => std::mem::forget(abort),
        Err(error) => stop.ask(Cause::from(error)),
    }
    result
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
pub fn lock(db: &Mutex<Db>) -> MutexGuard<'_, Db> {
    db.lock().unwrap_or_else(PoisonError::into_inner)
}
