//! `croprow run`: settings, recipes, models, and then the pipeline.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use croprow::config::RunConfig;
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::db::due::InForce;
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::NewRun;
use croprow::db::suspects::Claims;
use croprow::error::Error;
use croprow::model::library::Runtime;
use croprow::model::placing::Placing;
use croprow::model::{self, ModelKind, Models};
use croprow::pipeline::apart::{Ended, Word};
use croprow::pipeline::cores::Cores;
use croprow::pipeline::crop_file::prepare_folder;
use croprow::pipeline::learn::{BatchOwner, Learning};
use croprow::pipeline::measure::{self, DeviceMemory, Instruments};
use croprow::pipeline::progress::{Progress, Snapshot};
use croprow::pipeline::staged::run_staged;
use croprow::pipeline::stop::Stop;
use croprow::pipeline::{self, Job, Summary, lock};
use croprow::printable;
use croprow::recipe::Decode;
use croprow::row::Stage;
use jiff::ZonedDateTime;
use serde_json::{Value, json};

use super::ending::{Ending, FAILED_REMAIN, exit_code_of};
use super::plan::{Plan, check_prompts, describe_start};
use super::rescue::rescue;
use super::run_args::RunArgs;
use super::settings::Settings;
use super::signals::Running;
use super::ticker::Ticker;
use super::{apart, code_of, hush, memory, opening, print_json, room, say, select, self_tests, signals, until};

/// Suspects first, in processes of their own; then everything else. A worker that dies meanwhile leaves others.
pub(crate) fn run(args: RunArgs, quiet: bool) -> Result<u8, Error> {
    let claims = apart::claims();
    if claims != Claims::Ordinary {
        hush();
        let args = RunArgs { limit: None, json: false, metrics: None, ..args };
        return work(&args, true, claims, until::handed_down().as_ref(), Ended::default());
    }
    let until = args.until.map(|until| until.after(&ZonedDateTime::now())).transpose()?;
    let mut apart = Ended::default();
    loop {
        let mut db = Db::open_with(&args.db, opening())?;
        restrict(&args, &mut db)?;
        rescue(&mut db)?;
        // What is wrong with the command line is told before a process is started. Suspects may wait for a model that is not
        // wanted any more.
        let plan = if db.suspects()?.is_empty() { None } else { Some(Plan::make(&args, &mut db)?) };
        if let Some(plan) = plan.filter(|plan| plan.waiting > 0) {
            if let Some(code) = apart::clear(&mut db, until.as_ref(), &mut apart)? {
                return Ok(code);
            }
            if let Some(until) = until.as_ref().filter(|until| until::has_come(until)) {
                return stopped_early(&mut db, &plan, until, apart, args.json);
            }
        }
        drop(db);
        let code = work(&args, quiet, claims, until.as_ref(), apart)?;
        let is_over = until.as_ref().is_some_and(until::has_come);
        let is_complete = matches!(code, 0 | 2) && args.limit.is_none() && !is_over;
        if !is_complete || !has_suspects(&args)? {
            return Ok(code);
        }
    }
}

fn has_suspects(args: &RunArgs) -> Result<bool, Error> {
    let mut db = Db::open_with(&args.db, opening())?;
    restrict(args, &mut db)?;
    Ok(!db.suspects()?.is_empty() && Plan::make(args, &mut db)?.waiting > 0)
}

/// `apart` is what child processes ended before.
fn work(args: &RunArgs, quiet: bool, claims: Claims, until: Option<&ZonedDateTime>, apart: Ended) -> Result<u8, Error> {
    let mut db = Db::open_with(&args.db, opening())?;
    restrict(args, &mut db)?;
    db.claim_only(claims);
    let mut plan = Plan::make(args, &mut db)?;
    if plan.to_select > 0 {
        let began = Instant::now();
        let done = select::apply(&mut db, &plan.to_remember(), &plan.recipes, &plan.carried)?;
        say(&select::describe(done, began.elapsed()));
        plan = Plan::make(args, &mut db)?;
    }
    // Rows in another worker's hands are waited for: it may die.
    let others = claims == Claims::Ordinary && !db.holders(NO_RUN, &Stage::ALL)?.is_empty();
    if plan.waiting == 0 && !others {
        plan.remember_idle(args, &mut db)?;
        return finish_idle(&db, &plan, apart, args.json);
    }
    db.set_synchronous(plan.settings.synchronous)?;
    if let Some(folder) = &plan.config.crops {
        room::check_crops(&db, folder)?;
        prepare_folder(folder)?;
    }
    room::tell_where_short(&db, plan.config.crops.as_deref());
    let runtime = model::library::load(plan.settings.runtime.as_deref(), plan.settings.device, plan.config.threads)?;
    let placing = Placing::of(&plan.config, plan.settings.device, &runtime)?;
    if let Some(note) = &placing.device.note {
        say(note);
    }
    let staged = must_be_staged(&mut plan, &placing);
    let mut loader = Loader { plan: &plan, placing: &placing, runtime: &runtime };
    let db = Arc::new(Mutex::new(db));
    let loaded = if staged { None } else { Some(loader.load(&db, &ALL_MODELS)?) };
    say(&describe_start(&plan, &placing, staged, until));
    let measured = Measured::begin(&plan.config, &placing)?;
    let (run_id, in_force) = lock(&db).begin_run(&NewRun {
        device: &placing.device.word,
        device_note: placing.device.note.as_deref(),
        runtime: &format!("{} {}", runtime.version, printable::path(&runtime.path)),
        settings: &plan.to_remember().to_json()?,
        detect: plan.recipes.detect(),
        embed: plan.recipes.embed(),
    })?;
    let books = lock(&db).open_books()?;
    let learnt = Learning::read(&lock(&db), loader.owners())?;
    let stop = Arc::new(Stop::default());
    let (held, asked, progress) = (Arc::clone(&db), Arc::clone(&stop), Arc::clone(&measured.progress));
    signals::hand_to(Running { stop: asked, db: held, run: run_id, progress })?;
    if let Some(until) = until {
        until::watch(&stop, until)?;
    }
    let (db, stop) = (&db, &stop);
    let ending = Ending {
        run: run_id,
        progress: &measured.progress,
        instruments: &measured.instruments,
        stop,
        until: until.map(until::words),
        apart,
        limit: args.limit,
        json: args.json,
        in_force,
        stale: plan.stale,
        books,
    };
    let end = |db: &mut Db, result| ending.end(db, result, measured.end(&plan.config, &placing));
    let work = Work { run: run_id, in_force, db, stop, measured: &measured, learnt: &learnt, quiet, claims, end: &end };
    let result = work.until_done(&mut loader, loaded);
    signals::hand_back();
    end(&mut lock(db), result)
}

/// Looks at the condition before anything is changed.
fn restrict(args: &RunArgs, db: &mut Db) -> Result<(), Error> {
    let settings = Settings::remembered(db.last_settings()?.as_deref())?.overridden_by(args);
    db.restrict(settings.condition.as_deref())
}

/// Said before a GPU opens a model: kernels that were built for an older one are translated then, once.
const PREPARING: &str = "preparing the models; on a GPU that is newer than its libraries this takes minutes at first";

/// No run has this id: all that hold rows are others.
const NO_RUN: RunId = RunId(0);

/// Both, for a run that is not staged.
const ALL_MODELS: [ModelKind; 2] = [ModelKind::Detector, ModelKind::Embedder];

/// True where one model after the other is loaded: because the user says so, or because both do not fit.
fn must_be_staged(plan: &mut Plan, placing: &Placing) -> bool {
    if plan.config.detect.is_none() || plan.config.embed.is_none() {
        return false;
    }
    // What images in flight will take is not free for models.
    let free = memory::free_bytes().map(|free| free.saturating_sub(plan.config.memory_bytes));
    match (plan.config.staged, placing.must_be_staged(free)) {
        (true, _) => true,
        (false, Some(why)) => {
            say(&format!("{why}: first all detections, then all embeddings (--staged)"));
            plan.config.staged = true;
            true
        }
        (false, None) => false,
    }
}

/// Loads models, each tested once and held to what is known of it.
struct Loader<'a> {
    plan: &'a Plan,
    placing: &'a Placing,
    runtime: &'a Runtime,
}

impl Loader<'_> {
    /// The database is free for others while that takes its time.
    fn load(&mut self, db: &Mutex<Db>, kinds: &[ModelKind]) -> Result<Models, Error> {
        log::info!("loading models");
        if self.placing.device.is_cuda() {
            say(PREPARING);
        }
        let mut models = self.placing.load(&self.plan.config, self.runtime, kinds)?;
        models.notes.iter().for_each(|note| say(note));
        check_prompts(self.plan, &models, &lock(db))?;
        self_tests::run(&mut models, &self.plan.config, &self.plan.recipes, self.runtime, db)?;
        Ok(models)
    }

    fn owners(&self) -> Vec<BatchOwner> {
        let stored = [(Stage::Detect, self.plan.recipes.detect()), (Stage::Embed, self.plan.recipes.embed())];
        let owner = |(stage, recipe): (Stage, Option<StoredRecipe<'_>>)| {
            let recipe = recipe?;
            Some(BatchOwner {
                stage,
                digest: recipe.model_digest.to_owned(),
                path: recipe.model_path.to_owned(),
                device: self.placing.batch_device(),
            })
        };
        stored.into_iter().filter_map(owner).collect()
    }
}

/// Everything that the pipeline works with.
struct Work<'a> {
    run: RunId,
    in_force: InForce,
    db: &'a Mutex<Db>,
    stop: &'a Stop,
    measured: &'a Measured,
    learnt: &'a Learning,
    quiet: bool,
    claims: Claims,
    /// Closes the run and finds the exit code.
    end: &'a EndOfRun<'a>,
}

type EndOfRun<'a> = dyn Fn(&mut Db, Result<Summary, Error>) -> Result<u8, Error> + Sync + 'a;

impl Work<'_> {
    /// `loaded` are all models; without them they are loaded one after the other.
    fn until_done(&self, loader: &mut Loader<'_>, loaded: Option<Models>) -> Result<Summary, Error> {
        let plan = loader.plan;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(plan.config.threads)
            .thread_name(|i| format!("decode-{i}"))
            .build()
            .map_err(|e| Error::System(format!("cannot start the decode threads: {e}")))?;
        let on_host = !loader.placing.device.is_cuda();
        let all_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = Cores::new(plan.config.threads, on_host, all_cores);
        let due = |stage: &Stage| match stage {
            Stage::Detect => plan.config.detect.is_some(),
            Stage::Embed => plan.config.embed.is_some(),
        };
        let stages: Vec<Stage> = Stage::ALL.into_iter().filter(due).collect();
        let progress = &self.measured.progress;
        let (waiting, threads) = (plan.waiting, plan.config.threads);
        let ticker = Mutex::new(Some(Ticker::start(Arc::clone(progress), waiting, threads, self.quiet)));
        let leave = |result| self.leave(&plan.config, &ticker, result);
        let job = Job {
            config: &plan.config,
            db: self.db,
            run: self.run,
            in_force: self.in_force,
            stale: plan.stale,
            stages: &stages,
            pool: &pool,
            cores: &cores,
            on_host,
            learnt: self.learnt,
            instruments: &self.measured.instruments,
            progress,
            stop: self.stop,
            watcher: (self.claims != Claims::Ordinary).then_some(&Word::say),
            one_by_one: self.claims == Claims::Alone,
            leave: &leave,
        };
        match loaded {
            Some(models) => pipeline::run(&job, models),
            None => run_staged(
                &job,
                &mut |stage| {
                    let kind = match stage {
                        Stage::Detect => ModelKind::Detector,
                        Stage::Embed => ModelKind::Embedder,
                    };
                    loader.load(self.db, &[kind])
                },
                &crate::give_back_freed_memory,
                &say,
            ),
        }
    }

    /// The end of a run that threads hang in.
    fn leave(&self, config: &RunConfig, ticker: &Mutex<Option<Ticker>>, result: Result<Summary, Error>) -> ! {
        drop(ticker.lock().unwrap_or_else(PoisonError::into_inner).take());
        // Held to the end: `read` would claim again what is released.
        let mut db = lock(self.db);
        let released = db.release(self.run);
        Progress::add(&self.measured.progress.released, *released.as_ref().unwrap_or(&0) as u64);
        let result = result.and_then(|_| {
            let is_complete = self.claims == Claims::Ordinary && config.limit.is_none();
            if is_complete && !db.suspects()?.is_empty() {
                return Err(Error::Stuck(
                    "images that may have killed a worker wait, and threads hang in files".into(),
                ));
            }
            released?;
            Ok(self.measured.progress.summary())
        });
        let code = (self.end)(&mut db, result);
        crate::leave(code_of(Some(db.path()), code))
    }
}

/// The clocks and counters of a run, from its first image to its last.
struct Measured {
    progress: Arc<Progress>,
    instruments: Instruments,
    began: Instant,
    cpu_before: Duration,
    before: Snapshot,
}

impl Measured {
    fn begin(config: &RunConfig, placing: &Placing) -> Result<Self, Error> {
        let device_memory = placing.gpu.clone().map(|gpu| -> DeviceMemory { Box::new(move || gpu.used_bytes()) });
        let progress = Arc::new(Progress::default());
        Ok(Self {
            before: progress.snapshot(config.threads),
            progress,
            instruments: Instruments::new(device_memory, config.metrics.as_deref())?,
            began: Instant::now(),
            cpu_before: measure::cpu_time(),
        })
    }

    /// What is told and kept at the end.
    fn end(&self, config: &RunConfig, placing: &Placing) -> Value {
        let after = self.progress.snapshot(config.threads);
        let exact = config.decode.mode == Decode::Exact;
        let limit = measure::limit(&self.before, &after, !placing.device.is_cuda(), exact);
        let mut summary = measure::summary(&self.progress, (&self.before, &after), &limit);
        summary["seconds"] = self.began.elapsed().as_secs_f64().into();
        summary["cpu_seconds"] = (measure::cpu_time() - self.cpu_before).as_secs_f64().into();
        summary
    }
}

/// The time of `--until` came while suspects were worked on.
fn stopped_early(db: &mut Db, plan: &Plan, until: &ZonedDateTime, apart: Ended, json: bool) -> Result<u8, Error> {
    let suspects = match db.suspects()?.len() {
        0 => String::new(),
        images => format!("{images} images that may have killed a worker wait, and "),
    };
    say(&format!("stopped at {} (--until): {suspects}what was pending beside them waits", until::words(until)));
    tell_of_no_work(db, plan, ("stopped", Some("until")), apart, json)
}

fn finish_idle(db: &Db, plan: &Plan, apart: Ended, json: bool) -> Result<u8, Error> {
    let images: u64 = db.tally()?.iter().map(|(_, n)| n).sum();
    say(&format!("nothing is pending{} ({images} images in the database)", plan.scope()));
    if db.is_restricted() {
        say("the condition of --where is remembered; --where none lifts it");
    }
    if plan.kept > 0 {
        let kept = plan.kept;
        say(&format!("{kept} of them were made by another recipe and stay as they are; --stale redo does them again"));
    }
    tell_of_no_work(db, plan, ("complete", None), apart, json)
}

/// The summary of a run that this process did nothing in itself.
fn tell_of_no_work(db: &Db, plan: &Plan, how: (&str, Option<&str>), apart: Ended, json: bool) -> Result<u8, Error> {
    let code = exit_code_of(&db.tally_in_scope()?);
    let (ended, stopped_by) = how;
    let told = json!({
        "ended": ended, "stopped_by": stopped_by, "exit_code": code,
        "done": apart.done, "failed": apart.failed, "dropped": 0, "released": 0, "seconds": 0.0,
    });
    Instruments::new(None, plan.config.metrics.as_deref())?.write(&json!({ "summary": told }));
    if code == 2 {
        say(FAILED_REMAIN);
    }
    if json {
        print_json(&told)?;
    }
    Ok(code)
}
