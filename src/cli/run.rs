//! `croprow run`: settings, recipes, models, and then the pipeline.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use croprow::config::{RunConfig, Stale};
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::db::due::{InForce, RecipeId, Standing, Tally, images_where};
use croprow::db::runs::NewRun;
use croprow::db::select::Carried;
use croprow::error::Error;
use croprow::model::{self, Models};
use croprow::pipeline::crop_file::prepare_folder;
use croprow::pipeline::progress::Progress;
use croprow::pipeline::stop::Stop;
use croprow::pipeline::{self, Job, Summary};
use croprow::row::State;

use super::recipes::Recipes;
use super::run_args::RunArgs;
use super::settings::Settings;
use super::status::duration;
use super::ticker::Ticker;
use super::{print, say, select, self_tests, signals};

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

pub(crate) fn run(args: RunArgs, quiet: bool) -> Result<u8, Error> {
    let mut db = Db::open(&args.db)?;
    for (run, images) in db.rescue_dead_runs()? {
        say(&format!("run {} ended without saying so; its {images} rows in flight are pending again", run.0));
    }
    let mut plan = Plan::make(&args, &mut db)?;
    if plan.to_select > 0 {
        let began = Instant::now();
        let done = select::apply(&mut db, &plan.to_remember(), &plan.recipes, &plan.carried)?;
        say(&select::describe(done, began.elapsed()));
        plan = Plan::make(&args, &mut db)?;
    }
    if plan.waiting == 0 {
        plan.remember_idle(&mut db)?;
        return finish_idle(&db, plan.kept, args.json);
    }
    if let Some(folder) = &plan.config.crops {
        prepare_folder(folder)?;
    }
    let runtime = model::library::load(plan.settings.runtime.as_deref(), plan.settings.device, plan.config.threads)?;
    let mut loaded = model::load_models(&plan.config, plan.settings.device, &runtime)?;
    for note in loaded.device.note.iter().chain(&loaded.notes) {
        say(note);
    }
    check_prompts(&plan, &loaded, &db)?;
    self_tests::run(&mut loaded, &plan.config, &plan.recipes, &runtime, &mut db)?;
    say(&describe_start(&plan, &loaded));
    let (run_id, in_force) = db.begin_run(&NewRun {
        device: &loaded.device.word,
        device_note: loaded.device.note.as_deref(),
        runtime: &format!("{} {}", runtime.version, runtime.path.display()),
        settings: &plan.to_remember().to_json()?,
        detect: plan.recipes.detect(),
        embed: plan.recipes.embed(),
    })?;
    let db = Arc::new(Mutex::new(db));
    let stop = Arc::new(Stop::default());
    signals::listen(&stop, &db, run_id)?;
    let began = Instant::now();
    let progress = Arc::new(Progress::default());
    let result = work(&plan, &db, run_id, in_force, loaded, &progress, &stop, quiet);
    let mut db = db.lock().unwrap_or_else(PoisonError::into_inner);
    end(&mut db, run_id, result, &progress, &stop, began.elapsed(), args.json)
}

impl Plan {
    fn make(args: &RunArgs, db: &mut Db) -> Result<Self, Error> {
        let remembered = db.last_settings()?;
        let settings = Settings::remembered(remembered.as_deref())?.overridden_by(args);
        let config = settings.resolve(args.limit)?;
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
        let waiting = images_where(&tally, |from| is_pending(from.settled(asked, stale)));
        let waiting = waiting.min(args.limit.unwrap_or(u64::MAX));
        let to_detect = images_where(&tally, |from| from.settled(asked, stale).detect == Some(State::Pending));
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

    /// Settings that were given while nothing is pending are settings all the same.
    fn remember_idle(&self, db: &mut Db) -> Result<(), Error> {
        let settings = self.to_remember().to_json()?;
        if self.remembered.as_ref() == Some(&settings) {
            return Ok(());
        }
        let (run, _) = db.begin_run(&NewRun {
            device: "none",
            device_note: Some("nothing was pending"),
            runtime: "not loaded",
            settings: &settings,
            detect: self.recipes.detect(),
            embed: self.recipes.embed(),
        })?;
        db.end_run(run, "complete", exit_code_of(&db.tally()?), 0, 0, None)
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

fn describe_start(plan: &Plan, loaded: &Models) -> String {
    let stages = match (plan.to_detect > 0, &plan.config.embed) {
        (true, Some(_)) => "detect and embed",
        (true, None) => "detect",
        _ => "embed",
    };
    format!(
        "{stages} {} images on {} with {} threads, batches of {}, {} MiB for images in flight",
        plan.waiting,
        loaded.device.word,
        plan.config.threads,
        plan.config.batch,
        plan.config.memory_bytes >> 20
    )
}

#[expect(clippy::too_many_arguments, reason = "the one place where everything comes together")]
fn work(
    plan: &Plan,
    db: &Mutex<Db>,
    run: RunId,
    in_force: InForce,
    loaded: Models,
    progress: &Arc<Progress>,
    stop: &Stop,
    quiet: bool,
) -> Result<Summary, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(plan.config.threads)
        .thread_name(|i| format!("decode-{i}"))
        .build()
        .map_err(|e| Error::System(format!("cannot start the decode threads: {e}")))?;
    let job = Job { config: &plan.config, db, run, in_force, stale: plan.stale, pool: &pool, progress, stop };
    let _ticker = Ticker::start(Arc::clone(progress), plan.waiting, plan.config.threads, quiet);
    pipeline::run(&job, loaded)
}

/// Closes the run's row, says how it went, and finds the exit code.
fn end(
    db: &mut Db,
    run: RunId,
    result: Result<Summary, Error>,
    progress: &Progress,
    stop: &Stop,
    took: Duration,
    json: bool,
) -> Result<u8, Error> {
    let (done, failed) = (Progress::get(&progress.done), Progress::get(&progress.failed));
    let summary = match result {
        Ok(summary) => summary,
        Err(error) => {
            // The first error is the one to tell, whatever the database says now.
            let _ = db.end_run(run, "error", error.exit_code(), done, failed, None);
            if json {
                print_summary("error", error.exit_code(), &Summary { done, failed, ..Summary::default() }, took)?;
            }
            return Err(error);
        }
    };
    let (how, code) = match stop.signal() {
        0 => ("complete", exit_code_of(&db.tally()?)),
        signal => ("stopped", signals::exit_code(signal)),
    };
    db.end_run(run, how, code, done, failed, None)?;
    db.checkpoint();
    let per_s = (done + failed) as f64 / took.as_secs_f64().max(1e-3);
    say(&format!("{how}: {done} done, {failed} failed in {} ({per_s:.1} images/s)", duration(took.as_secs_f64())));
    if summary.dropped > 0 {
        say(&format!(
            "{} results were dropped: their rows were changed or taken by another worker meanwhile",
            summary.dropped
        ));
    }
    if summary.released > 0 {
        say(&format!("{} rows in flight are pending again", summary.released));
    }
    if code == 2 {
        say(
            "failed rows remain: croprow status DB counts them, the view failures lists them, croprow retry DB brings them back",
        );
    }
    if json {
        print_summary(how, code, &summary, took)?;
    }
    Ok(code)
}

fn finish_idle(db: &Db, kept: u64, json: bool) -> Result<u8, Error> {
    let tally = db.tally()?;
    let code = exit_code_of(&tally);
    let images: u64 = tally.iter().map(|(_, n)| n).sum();
    say(&format!("nothing is pending ({images} images in the database)"));
    if kept > 0 {
        say(&format!("{kept} of them were made by another recipe and stay as they are; --stale redo does them again"));
    }
    if json {
        print_summary("complete", code, &Summary::default(), Duration::ZERO)?;
    }
    Ok(code)
}

/// 2 while any row is failed or quarantined.
fn exit_code_of(tally: &Tally) -> u8 {
    let bad = |s: &Standing| [s.detect, s.embed].iter().any(|s| matches!(s, Some(State::Failed | State::Quarantined)));
    if tally.iter().any(|(standing, _)| bad(standing)) { 2 } else { 0 }
}

fn print_summary(how: &str, code: u8, summary: &Summary, took: Duration) -> Result<(), Error> {
    let json = serde_json::json!({
        "ended": how, "exit_code": code, "done": summary.done, "failed": summary.failed,
        "dropped": summary.dropped, "released": summary.released, "seconds": took.as_secs_f64(),
    });
    print(&format!("{json}\n"))
}
