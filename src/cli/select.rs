//! `croprow select`: another rule of selection on the stored candidates. No model is loaded, no picture is read.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::db::due::{InForce, images_where};
use croprow::db::runs::NewRun;
use croprow::db::select::{Carried, Reselected, Selector};
use croprow::error::Error;
use croprow::model::boxes::regions_of;
use croprow::printable;
use croprow::recipe::Labels;
use croprow::row::State;

use super::recipes::Recipes;
use super::run_args::SelectionArgs;
use super::settings::Settings;
use super::{opening, print, print_json, say};

/// Between two lines about how far it is.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// How often it is said that this lives: a worker that is silent for long is taken for dead.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Apply other thresholds or another selection rule to the stored candidates: no model is run.
#[derive(Args)]
#[command(
    after_help = "What is left out stays as it was. New regions wait for the embedder; `croprow run DB` embeds them.

Examples:
  croprow select photos.db --box-threshold 0.4
  croprow select photos.db --keep best --nms across --min-box 32 --margin 0.1"
)]
pub(crate) struct SelectArgs {
    /// The database.
    pub(crate) db: PathBuf,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Print the summary as one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &SelectArgs) -> Result<u8, Error> {
    let mut db = Db::open_with(&args.db, opening())?;
    db.rescue_dead_runs()?;
    let settings = Settings::remembered(db.last_settings()?.as_deref())?.reselected_by(&args.selection);
    let recipes = Recipes::in_force_with(settings.selection(), &db)?;
    check_floor(&recipes, &db)?;
    if args.selection.text_threshold.is_some() && recipes.rule().is_some_and(|r| r.labels == Labels::Spans) {
        say("--text-threshold changes nothing here: it is part of --labels phrases, and labels were taken by spans");
    }
    // An interrupted selection is finished by the next run.
    let settings = Settings { reselect: true, ..settings };
    let carried = recipes.carried(&db, true)?;
    let began = Instant::now();
    let done = apply(&mut db, &settings, &recipes, &carried)?;
    report(&db, done, began.elapsed(), args.json)?;
    Ok(0)
}

/// Below the floor nothing is stored, so the model would have to look again.
fn check_floor(recipes: &Recipes, db: &Db) -> Result<(), Error> {
    let Some(rule) = recipes.rule().filter(|r| r.selection.box_threshold < r.candidate_floor) else { return Ok(()) };
    let (threshold, floor) = (rule.selection.box_threshold, rule.candidate_floor);
    let (_, _, images) = db.candidate_bytes()?;
    Err(Error::Usage(format!(
        "candidates are kept above {floor} only: all {images} images need the model again for a threshold of {threshold}\n         \
         croprow run {} --candidate-floor {threshold} --box-threshold {threshold} --stale redo\n         \
         nothing was changed; they are: SELECT path FROM images JOIN candidates ON image_id = id",
        printable::path(db.path())
    )))
}

/// Puts `recipes` in force and takes the rows of `carried` over to them. Registered as a run, so that no worker
/// with other settings can be at work meanwhile.
pub(crate) fn apply(
    db: &mut Db,
    settings: &Settings,
    recipes: &Recipes,
    carried: &Carried,
) -> Result<Reselected, Error> {
    let remembered = settings.to_json()?;
    let (run, in_force) = db.begin_run(&NewRun {
        device: "none",
        device_note: Some("selected from stored candidates"),
        runtime: "not loaded",
        settings: &remembered,
        detect: recipes.detect(),
        embed: recipes.embed(),
    })?;
    let result = walk(db, run, recipes, carried, in_force);
    let (how, code) = if result.is_ok() { ("complete", 0) } else { ("error", 3) };
    db.end_run(run, how, code, 0, 0, None)?;
    db.checkpoint();
    result
}

fn walk(db: &mut Db, run: RunId, recipes: &Recipes, carried: &Carried, in_force: InForce) -> Result<Reselected, Error> {
    let Some(rule) = recipes.rule() else { return Ok(Reselected::default()) };
    let total = db.count_carried(carried)?;
    let select = |packed: &[u8], vocabulary: &_, size| regions_of(packed, vocabulary, &rule.selection, size);
    let mut selector = Selector::new(carried, in_force, &select);
    let (mut said, mut beat) = (Instant::now(), Instant::now());
    while selector.step(db)? {
        if beat.elapsed() >= HEARTBEAT {
            beat = Instant::now();
            db.beat(run)?;
        }
        if said.elapsed() >= SAY_EVERY {
            said = Instant::now();
            say(&format!("selected again: {} of {total} images", selector.done.images));
        }
    }
    Ok(selector.done)
}

/// What was done, and what it means for the embedder.
pub(crate) fn describe(done: Reselected, took: Duration) -> String {
    format!(
        "{} images selected again in {:.1} s without a model: {} changed, {} regions new, {} gone, {} kept; {} images wait for \
         the embedder",
        done.images,
        took.as_secs_f64(),
        done.changed,
        done.new,
        done.gone,
        done.kept,
        done.pending
    )
}

fn report(db: &Db, done: Reselected, took: Duration, json: bool) -> Result<(), Error> {
    let (median, largest, images) = db.candidate_bytes()?;
    let (tally, in_force) = (db.tally()?, db.in_force()?);
    let others = images_where(&tally, |s| s.detect == Some(State::Done) && s.detect_recipe != in_force.detect);
    let pending = images_where(&tally, |s| s.embed == Some(State::Pending));
    if json {
        let summary = serde_json::json!({
            "images": done.images, "changed": done.changed, "regions_new": done.new, "regions_gone": done.gone,
            "regions_kept": done.kept, "embed_pending": pending, "damaged": done.damaged,
            "images_of_other_recipes": others, "seconds": took.as_secs_f64(),
            "candidate_bytes_median": median, "candidate_bytes_most": largest, "images_with_candidates": images,
        });
        return print_json(&summary);
    }
    print(&format!("{}\n", describe(done, took)))?;
    if pending > done.pending {
        print(&format!("{pending} images wait for the embedder in all\n"))?;
    }
    if done.damaged > 0 {
        print(&format!("{} images had candidates that cannot be read: they wait for the detector\n", done.damaged))?;
    }
    if others > 0 {
        print(&format!(
            "{others} finished images were made by another recipe and stay as they are; croprow run DB --stale redo does them again\n"
        ))?;
    }
    print(&format!("candidates of {images} images: median {median} bytes, at most {largest}\n"))
}
