//! `croprow run`: settings, recipes, models, and then the pipeline.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use croprow::config::{Batch, RunConfig, Stale};
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::db::due::{InForce, RecipeId, Standing, Tally, images_where};
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::NewRun;
use croprow::db::select::Carried;
use croprow::db::suspects::Claims;
use croprow::error::Error;
use croprow::model::library::Runtime;
use croprow::model::placing::Placing;
use croprow::model::{self, ModelKind, Models};
use croprow::pipeline::apart::Word;
use croprow::pipeline::cores::Cores;
use croprow::pipeline::crop_file::prepare_folder;
use croprow::pipeline::learn::{BatchOwner, Learning};
use croprow::pipeline::measure::{self, DeviceMemory, Instruments};
use croprow::pipeline::progress::{Progress, Snapshot};
use croprow::pipeline::staged::run_staged;
use croprow::pipeline::stop::Stop;
use croprow::pipeline::{self, Job, Summary};
use croprow::printable;
use croprow::recipe::Decode;
use croprow::row::{Stage, State};
use serde_json::{Value, json};

use super::recipes::Recipes;
use super::run_args::RunArgs;
use super::settings::Settings;
use super::status::duration;
use super::ticker::Ticker;
use super::{apart, code_of, hush, memory, print_json, say, select, self_tests, signals};

/// Everything decided before a model is loaded.
struct Plan {
    settings: Settings,
    config: RunConfig,
    recipes: Recipes,
    stale: Stale,
    /// Finished rows that need no model to belong to these recipes.
    carried: Carried,
    /// How many of them are taken over.
    to_select: u64,
    /// Images that wait for this run.
    waiting: u64,
    /// How many of them wait for the detector.
    to_detect: u64,
    /// Finished images of other recipes that stay as they are.
    kept: u64,
    /// Settings of the last run.
    remembered: Option<String>,
}

/// Suspects first, in processes of their own; then everything else. A worker that dies meanwhile leaves others.
pub(crate) fn run(args: RunArgs, quiet: bool) -> Result<u8, Error> {
    let claims = apart::claims();
    if claims != Claims::Ordinary {
        hush();
        return work(&RunArgs { limit: None, json: false, metrics: None, ..args }, true, claims);
    }
    loop {
        let mut db = Db::open(&args.db)?;
        restrict(&args, &mut db)?;
        rescue(&mut db)?;
        if !db.suspects()?.is_empty() {
            // What is wrong with the command line is told before a process is started.
            Plan::make(&args, &mut db)?;
            if let Some(code) = apart::clear(&mut db)? {
                return Ok(code);
            }
        }
        drop(db);
        let code = work(&args, quiet, claims)?;
        let is_complete = matches!(code, 0 | 2) && args.limit.is_none();
        if !is_complete || Db::open(&args.db)?.suspects()?.is_empty() {
            return Ok(code);
        }
    }
}

/// Takes over from workers that are gone. One that is silent by the clock is given time for a heartbeat: the clock may
/// have been set.
fn rescue(db: &mut Db) -> Result<(), Error> {
    let mut told = false;
    loop {
        for (run, images) in db.rescue_dead_runs()? {
            say(&format!("run {} ended without saying so; its {images} rows in flight are pending again", run.0));
        }
        if !db.has_doubtful_runs()? {
            return Ok(());
        }
        if !told {
            say("another worker has not been heard of for long; waiting some seconds for a sign of it");
            told = true;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Between two looks whether a worker that was silent lives.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

fn work(args: &RunArgs, quiet: bool, claims: Claims) -> Result<u8, Error> {
    let mut db = Db::open(&args.db)?;
    restrict(args, &mut db)?;
    db.claim_only(claims);
    let mut plan = Plan::make(args, &mut db)?;
    if plan.to_select > 0 {
        let began = Instant::now();
        let done = select::apply(&mut db, &plan.to_remember(), &plan.recipes, &plan.carried)?;
        say(&select::describe(done, began.elapsed()));
        plan = Plan::make(args, &mut db)?;
    }
    if plan.waiting == 0 {
        plan.remember_idle(args, &mut db)?;
        return finish_idle(&db, &plan, args.json);
    }
    if let Some(folder) = &plan.config.crops {
        prepare_folder(folder)?;
    }
    let runtime = model::library::load(plan.settings.runtime.as_deref(), plan.settings.device, plan.config.threads)?;
    let placing = Placing::of(&plan.config, plan.settings.device, &runtime)?;
    if let Some(note) = &placing.device.note {
        say(note);
    }
    let staged = must_be_staged(&mut plan, &placing);
    let mut loader = Loader { plan: &plan, placing: &placing, runtime: &runtime };
    let loaded = if staged { None } else { Some(loader.load(&mut db, &ALL_MODELS)?) };
    say(&describe_start(&plan, &placing, staged));
    let (run_id, in_force) = db.begin_run(&NewRun {
        device: &placing.device.word,
        device_note: placing.device.note.as_deref(),
        runtime: &format!("{} {}", runtime.version, printable::path(&runtime.path)),
        settings: &plan.to_remember().to_json()?,
        detect: plan.recipes.detect(),
        embed: plan.recipes.embed(),
    })?;
    let learnt = Learning::read(&db, loader.owners())?;
    let db = Arc::new(Mutex::new(db));
    let stop = Arc::new(Stop::default());
    signals::listen(&stop, &db, run_id)?;
    let measured = Measured::begin(&plan.config, &placing)?;
    let (db, stop) = (&db, &stop);
    let end = |db: &mut Db, result| {
        let summary = measured.end(&plan.config, &placing);
        end(db, run_id, result, &measured, summary, stop, args.json)
    };
    let work = Work { run: run_id, in_force, db, stop, measured: &measured, learnt: &learnt, quiet, claims, end: &end };
    let result = work.until_done(&mut loader, loaded);
    end(&mut db.lock().unwrap_or_else(PoisonError::into_inner), result)
}

/// Looks at the condition before anything is changed.
fn restrict(args: &RunArgs, db: &mut Db) -> Result<(), Error> {
    let settings = Settings::remembered(db.last_settings()?.as_deref())?.overridden_by(args);
    db.restrict(settings.condition.as_deref())
}

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
    fn load(&mut self, db: &mut Db, kinds: &[ModelKind]) -> Result<Models, Error> {
        let mut models = self.placing.load(&self.plan.config, self.runtime, kinds)?;
        models.notes.iter().for_each(|note| say(note));
        check_prompts(self.plan, &models, db)?;
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

impl Plan {
    fn make(args: &RunArgs, db: &mut Db) -> Result<Self, Error> {
        let remembered = db.last_settings()?;
        let settings = Settings::remembered(remembered.as_deref())?.overridden_by(args);
        let config = settings.resolve(args.limit, args.metrics.clone())?;
        let recipes = Recipes::of(&config, db)?;
        let asked = recipes.look_up(db)?;
        let tally = db.tally()?;
        let carried = recipes.carried(db, true)?;
        let stale = choose_stale(args, &settings, db, &recipes, asked, &tally, &carried)?;
        let reselect = match args.stale {
            Some(said) => Stale::from(said) == Stale::Redo,
            None => settings.reselect,
        };
        let settings = Settings { reselect, ..settings };
        let carried = recipes.carried(db, reselect)?;
        let to_select = db.count_carried(&carried)?;
        // An error of the condition is one before the start here.
        let in_scope = db.tally_in_scope().map_err(|e| match e {
            Error::System(why) => Error::Usage(why),
            other => other,
        })?;
        let waiting = images_where(&in_scope, |from| is_pending(from.settled(asked, stale)));
        let waiting = waiting.min(args.limit.unwrap_or(u64::MAX));
        let to_detect = images_where(&in_scope, |from| from.settled(asked, stale).detect == Some(State::Pending));
        let kept = match stale {
            Stale::Keep => images_where(&tally, |s| s.is_stale(asked)).saturating_sub(to_select),
            Stale::Redo => 0,
        };
        Ok(Self { settings, config, recipes, stale, carried, to_select, waiting, to_detect, kept, remembered })
    }

    /// The settings for the next run.
    fn to_remember(&self) -> Settings {
        Settings { stale: Some(self.stale), ..self.settings.clone() }
    }

    /// Words for the images that a run is restricted to.
    fn scope(&self) -> String {
        self.settings.condition.as_deref().map_or_else(String::new, |sql| format!(" where {}", printable::line(sql)))
    }

    /// Settings that were given while nothing is pending are settings all the same.
    fn remember_idle(&self, args: &RunArgs, db: &mut Db) -> Result<(), Error> {
        let settings = self.to_remember().to_json()?;
        if self.remembered.as_ref() == Some(&settings) {
            return Ok(());
        }
        if args.device.is_some() {
            // A device that cannot be had is told to who asks for it, not to the next run.
            let runtime =
                model::library::load(self.settings.runtime.as_deref(), self.settings.device, self.config.threads)?;
            Placing::of(&self.config, self.settings.device, &runtime)?;
        }
        let (run, _) = db.begin_run(&NewRun {
            device: "none",
            device_note: Some("nothing was pending"),
            runtime: "not loaded",
            settings: &settings,
            detect: self.recipes.detect(),
            embed: self.recipes.embed(),
        })?;
        db.end_run(run, "complete", exit_code_of(&db.tally_in_scope()?), 0, 0, None)
    }
}

fn is_pending(standing: Standing) -> bool {
    [standing.detect, standing.embed].contains(&Some(State::Pending))
}

/// A detector that reads text cannot work on a row that has none: better told before the night than after it.
fn check_prompts(plan: &Plan, loaded: &Models, db: &Db) -> Result<(), Error> {
    let prompted = loaded.detector.as_ref().is_some_and(|d| d.takes_prompts());
    if !prompted || plan.settings.prompt.is_some() {
        return Ok(());
    }
    let asked = plan.recipes.look_up(db)?.detect.unwrap_or(RecipeId(0));
    match db.due_without_prompt(asked, plan.stale == Stale::Redo)? {
        0 => Ok(()),
        images => Err(Error::Usage(format!(
            "{images} images that wait for the detector have no prompt: give --prompt \"a cat. a dog.\" for them, or add their own \
             (croprow add, column prompt)"
        ))),
    }
}

/// Finished rows of another recipe are never mixed silently with new ones: the user says what becomes of them.
fn choose_stale(
    args: &RunArgs,
    settings: &Settings,
    db: &Db,
    recipes: &Recipes,
    asked: InForce,
    tally: &Tally,
    carried: &Carried,
) -> Result<Stale, Error> {
    let all = images_where(tally, |s| s.is_stale(asked));
    // Rows with a prompt of their own do not depend on the run's.
    let own_prompt = db.count_carried(&Carried { any: Vec::new(), ..carried.clone() })?;
    let stale = all.saturating_sub(own_prompt);
    if stale == 0 {
        return Ok(settings.stale.unwrap_or(Stale::Keep));
    }
    match (args.stale, settings.stale) {
        (Some(said), _) => Ok(said.into()),
        // The same question was answered when these recipes came into force.
        (None, Some(said)) if asked == db.in_force()? => Ok(said),
        _ => {
            let done = images_where(tally, |s| [s.detect, s.embed].contains(&Some(State::Done)));
            let selected = db.count_carried(&Carried { own_prompt: Vec::new(), ..carried.clone() })?;
            let cheap = match selected {
                0 => String::new(),
                n => format!(" ({n} from their stored candidates, without the model)"),
            };
            Err(Error::Usage(format!(
                "{stale} of {done} finished rows were made by another recipe:\n{}\n\
                 say what becomes of them, nothing was changed:\n  \
                 --stale redo   do them again with the new recipe{cheap}\n  \
                 --stale keep   leave them as they are; only new rows get the new recipe",
                recipes.describe_change(db)?
            )))
        }
    }
}

fn describe_start(plan: &Plan, placing: &Placing, staged: bool) -> String {
    let stages = match (plan.to_detect > 0, &plan.config.embed) {
        (true, Some(_)) if staged => "detect, then embed",
        (true, Some(_)) => "detect and embed",
        (true, None) => "detect",
        _ => "embed",
    };
    let batches = match plan.config.batch {
        Batch::Auto => "batches by measurement".to_owned(),
        Batch::Fixed(images) => format!("batches of {images}"),
    };
    format!(
        "{stages} {}{} on {} with {}, {batches}, {} MiB for images in flight",
        counted(plan.waiting, "image"),
        plan.scope(),
        placing.device.word,
        counted(plan.config.threads as u64, "thread"),
        plan.config.memory_bytes >> 20
    )
}

fn counted(n: u64, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
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
                    loader.load(&mut self.db.lock().unwrap_or_else(PoisonError::into_inner), &[kind])
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
        let mut db = self.db.lock().unwrap_or_else(PoisonError::into_inner);
        let released = db.release(self.run);
        let result = result.and_then(|summary| {
            let is_complete = self.claims == Claims::Ordinary && config.limit.is_none();
            if is_complete && !db.suspects()?.is_empty() {
                return Err(Error::Stuck(
                    "images that may have killed a worker wait, and threads hang in files".into(),
                ));
            }
            Ok(Summary { released: released? as u64, ..summary })
        });
        crate::leave(code_of((self.end)(&mut db, result)))
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

/// Closes the run's row, says how it went, and finds the exit code.
fn end(
    db: &mut Db,
    run: RunId,
    result: Result<Summary, Error>,
    measured: &Measured,
    mut told: Value,
    stop: &Stop,
    json: bool,
) -> Result<u8, Error> {
    let progress = &measured.progress;
    let (done, failed) = (Progress::get(&progress.done), Progress::get(&progress.failed));
    let (how, code, summary) = match &result {
        Err(error) => ("error", error.exit_code(), Summary { done, failed, ..Summary::default() }),
        Ok(summary) => match stop.signal() {
            0 => ("complete", exit_code_of(&db.tally_in_scope()?), *summary),
            signal => ("stopped", signals::exit_code(signal), *summary),
        },
    };
    for (key, value) in
        [("done", done), ("failed", failed), ("dropped", summary.dropped), ("released", summary.released)]
    {
        told[key] = value.into();
    }
    (told["ended"], told["exit_code"]) = (how.into(), code.into());
    measured.instruments.write(&json!({ "summary": told }));
    let stored = db.end_run(run, how, code, done, failed, Some(&told.to_string()));
    if result.is_ok() {
        // An error of the run is the one to tell, whatever the database says now.
        stored?;
        db.checkpoint();
        say_how_it_went(how, code, &summary, &told);
    }
    if json {
        print_json(&told)?;
    }
    result.map(|_| code)
}

fn say_how_it_went(how: &str, code: u8, summary: &Summary, told: &Value) {
    let Summary { done, failed, dropped, released } = *summary;
    let seconds = told["seconds"].as_f64().unwrap_or(0.0);
    let per_s = (done + failed) as f64 / seconds.max(1e-3);
    say(&format!("{how}: {done} done, {failed} failed in {} ({per_s:.1} images/s)", duration(seconds)));
    if let (Some(limit), true) = (told["limit"].as_str(), done + failed > 0) {
        say(limit);
    }
    if dropped > 0 {
        say(&format!("{dropped} results were dropped: their rows were changed or taken by another worker meanwhile"));
    }
    if released > 0 {
        say(&format!("{released} rows in flight are pending again"));
    }
    if code == 2 {
        say(
            "failed rows remain: croprow status DB counts them, the view failures lists them, croprow retry DB brings them back",
        );
    }
}

fn finish_idle(db: &Db, plan: &Plan, json: bool) -> Result<u8, Error> {
    let code = exit_code_of(&db.tally_in_scope()?);
    let images: u64 = db.tally()?.iter().map(|(_, n)| n).sum();
    say(&format!("nothing is pending{} ({images} images in the database)", plan.scope()));
    if plan.kept > 0 {
        let kept = plan.kept;
        say(&format!("{kept} of them were made by another recipe and stay as they are; --stale redo does them again"));
    }
    let told = json!({
        "ended": "complete", "exit_code": code, "done": 0, "failed": 0, "dropped": 0, "released": 0, "seconds": 0.0,
    });
    Instruments::new(None, plan.config.metrics.as_deref())?.write(&json!({ "summary": told }));
    if json {
        print_json(&told)?;
    }
    Ok(code)
}

/// 2 while any row that the run is about is failed or quarantined.
fn exit_code_of(tally: &Tally) -> u8 {
    let bad = |s: &Standing| [s.detect, s.embed].iter().any(|s| matches!(s, Some(State::Failed | State::Quarantined)));
    if tally.iter().any(|(standing, _)| bad(standing)) { 2 } else { 0 }
}
