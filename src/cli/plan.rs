//! What a run is about to do, and the questions that are asked before it does anything.

use croprow::config::{Batch, RunConfig, Stale};
use croprow::db::Db;
use croprow::db::due::{InForce, RecipeId, Standing, Tally, images_where};
use croprow::db::runs::NewRun;
use croprow::db::select::Carried;
use croprow::error::Error;
use croprow::model::placing::Placing;
use croprow::model::{self, Models};
use croprow::printable;
use croprow::row::State;
use jiff::ZonedDateTime;

use super::ending::exit_code_of;
use super::recipes::Recipes;
use super::run_args::RunArgs;
use super::settings::Settings;
use super::until;

/// Everything decided before a model is loaded.
pub(super) struct Plan {
    pub(super) settings: Settings,
    pub(super) config: RunConfig,
    pub(super) recipes: Recipes,
    pub(super) stale: Stale,
    /// Finished rows that need no model to belong to these recipes.
    pub(super) carried: Carried,
    /// How many of them are taken over.
    pub(super) to_select: u64,
    /// Images that wait for this run.
    pub(super) waiting: u64,
    /// How many of them wait for the detector.
    pub(super) to_detect: u64,
    /// Finished images of other recipes that stay as they are.
    pub(super) kept: u64,
    /// Settings of the last run.
    pub(super) remembered: Option<String>,
}

impl Plan {
    pub(super) fn make(args: &RunArgs, db: &mut Db) -> Result<Self, Error> {
        let remembered = db.last_settings()?;
        let before = Settings::remembered(remembered.as_deref())?;
        let settings = before.clone().overridden_by(args);
        let config = settings.resolve(args.limit, args.metrics.clone())?;
        let recipes = Recipes::of(&config, db)?;
        let asked = recipes.look_up(db)?;
        // An error of the condition is one before the start here.
        let tally = db.tally_in_scope().map_err(before_the_start)?;
        let carried = recipes.carried(db, true)?;
        // An answer is about the images that it was given for.
        let is_covered = before.condition.is_none() || before.condition == settings.condition;
        let answered = match (args.stale, settings.stale) {
            (Some(said), _) => Some(said.into()),
            // The same question was answered when these recipes came into force.
            (None, Some(said)) if is_covered && asked == db.in_force()? => Some(said),
            _ => None,
        };
        let stale = choose_stale(answered, db, &recipes, asked, &tally, &carried)?;
        let reselect = match args.stale {
            Some(said) => Stale::from(said) == Stale::Redo,
            None => settings.reselect && is_covered,
        };
        let settings = Settings { reselect, ..settings };
        let carried = recipes.carried(db, reselect)?;
        let to_select = db.count_carried(&carried).map_err(before_the_start)?;
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
    pub(super) fn to_remember(&self) -> Settings {
        Settings { stale: Some(self.stale), ..self.settings.clone() }
    }

    /// Words for the images that a run is restricted to.
    pub(super) fn scope(&self) -> String {
        self.settings.condition.as_deref().map_or_else(String::new, |sql| format!(" where {}", printable::line(sql)))
    }

    /// Settings that were given while nothing is pending are settings all the same.
    pub(super) fn remember_idle(&self, args: &RunArgs, db: &mut Db) -> Result<(), Error> {
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

pub(super) fn is_pending(standing: Standing) -> bool {
    [standing.detect, standing.embed].contains(&Some(State::Pending))
}

/// A detector that reads text cannot work on a row that has none: better told before the night than after it.
pub(super) fn check_prompts(plan: &Plan, loaded: &Models, db: &Db) -> Result<(), Error> {
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

fn before_the_start(error: Error) -> Error {
    match error {
        Error::System(why) => Error::Usage(why),
        other => other,
    }
}

/// Finished rows of another recipe are never mixed silently with new ones: the user says what becomes of them. `tally` is
/// that of the images that the run is about.
fn choose_stale(
    answered: Option<Stale>,
    db: &Db,
    recipes: &Recipes,
    asked: InForce,
    tally: &Tally,
    carried: &Carried,
) -> Result<Stale, Error> {
    let all = images_where(tally, |s| s.is_stale(asked));
    // Rows with a prompt of their own do not depend on the run's.
    let own_prompt = db.count_carried(&Carried { any: Vec::new(), ..carried.clone() }).map_err(before_the_start)?;
    let stale = all.saturating_sub(own_prompt);
    match answered {
        Some(said) => Ok(said),
        None if stale == 0 => Ok(Stale::Keep),
        None => {
            let done = images_where(tally, |s| [s.detect, s.embed].contains(&Some(State::Done)));
            let selected =
                db.count_carried(&Carried { own_prompt: Vec::new(), ..carried.clone() }).map_err(before_the_start)?;
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

pub(super) fn describe_start(plan: &Plan, placing: &Placing, staged: bool, until: Option<&ZonedDateTime>) -> String {
    let until = until.map_or_else(String::new, |moment| format!(", until {}", until::words(moment)));
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
        "{stages} {}{} on {} with {}, {batches}, {} MiB for images in flight{until}",
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
