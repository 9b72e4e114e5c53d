//! How a run ends: its row, its last lines, its exit code.

use croprow::config::Stale;
use croprow::db::Db;
use croprow::db::books::{Books, Deeds};
use croprow::db::claim::RunId;
use croprow::db::due::{InForce, Standing, Tally, images_where};
use croprow::error::Error;
use croprow::pipeline::Summary;
use croprow::pipeline::apart::Ended;
use croprow::pipeline::measure::Instruments;
use croprow::pipeline::progress::Progress;
use croprow::pipeline::stop::{Cause, Stop};
use croprow::row::State;
use serde_json::{Value, json};

use super::plan::is_pending;
use super::status::duration;
use super::{print_json, say, signals};

/// What is said with the exit code 2.
pub(super) const FAILED_REMAIN: &str = "failed rows remain: croprow status DB counts them, the view failures lists them, croprow retry DB brings them back";

/// A run that is over.
pub(super) struct Ending<'a> {
    pub(super) run: RunId,
    pub(super) progress: &'a Progress,
    pub(super) instruments: &'a Instruments,
    pub(super) stop: &'a Stop,
    /// Words for the moment that `--until` names.
    pub(super) until: Option<String>,
    /// What child processes ended before.
    pub(super) apart: Ended,
    /// `--limit`.
    pub(super) limit: Option<u64>,
    pub(super) json: bool,
    pub(super) in_force: InForce,
    pub(super) stale: Stale,
    /// The counters before the run.
    pub(super) books: Books,
}

impl Ending<'_> {
    /// Closes the run's row, says how it went, and finds the exit code. `told` is what was measured.
    pub(super) fn end(&self, db: &mut Db, result: Result<Summary, Error>, mut told: Value) -> Result<u8, Error> {
        let result = result.and_then(|summary| self.audit(db).map(|()| summary));
        let tally = if result.is_ok() { db.tally_in_scope()? } else { Tally::new() };
        let (how, stopped_by, code) = match (&result, self.stop.cause()) {
            (Err(error), _) => ("error", None, error.exit_code()),
            (Ok(_), None) => ("complete", None, exit_code_of(&tally)),
            (Ok(_), Some(Cause::Signal(signal))) => ("stopped", Some("signal"), signals::exit_code(*signal)),
            (Ok(_), Some(Cause::Until)) => ("stopped", Some("until"), exit_code_of(&tally)),
            (Ok(_), Some(Cause::Fault { exit_code, .. })) => ("error", None, *exit_code),
        };
        let summary = self.progress.summary();
        let Summary { done, failed, dropped, released } = summary;
        for (key, value) in [("done", done), ("failed", failed), ("dropped", dropped), ("released", released)] {
            told[key] = value.into();
        }
        if self.apart.rows() > 0 {
            (told["done"], told["failed"]) = ((done + self.apart.done).into(), (failed + self.apart.failed).into());
        }
        // Beyond a limit, or put in or brought back while the run was ending.
        let pending = if how == "complete" {
            images_where(&tally, |from| is_pending(from.settled(self.in_force, self.stale)))
        } else {
            0
        };
        told["pending"] = pending.into();
        let stopped_by = stopped_by.or((pending > 0 && self.limit.is_some()).then_some("limit"));
        (told["ended"], told["exit_code"], told["stopped_by"]) = (how.into(), code.into(), stopped_by.into());
        self.instruments.write(&json!({ "summary": told }));
        let stored = db.end_run(self.run, how, code, done, failed, Some(&told.to_string()));
        if result.is_ok() {
            // An error of the run is the one to tell, whatever the database says now.
            stored?;
            db.checkpoint();
        }
        self.say_how_it_went(how, stopped_by, code, &summary, &told);
        if self.json {
            print_json(&told)?;
        }
        result.map(|_| code)
    }

    fn audit(&self, db: &Db) -> Result<(), Error> {
        let Summary { done, failed, released, .. } = self.progress.summary();
        let (claimed, ended) = (Progress::get(&self.progress.claimed), Progress::get(&self.progress.ended));
        let (run, in_force, stale) = (self.run, self.in_force, self.stale);
        let wrong = db.audit(&self.books, &Deeds { run, in_force, stale, claimed, ended, released, done, failed })?;
        if wrong.is_empty() { Ok(()) } else { Err(Error::Books(wrong.join("; "))) }
    }

    fn say_how_it_went(&self, how: &str, stopped_by: Option<&str>, code: u8, summary: &Summary, told: &Value) {
        let Summary { done, failed, dropped, released } = *summary;
        let seconds = told["seconds"].as_f64().unwrap_or(0.0);
        let per_s = (done + failed) as f64 / seconds.max(1e-3);
        let how = match (&self.until, stopped_by) {
            (Some(until), Some("until")) => format!("{how} at {until} (--until)"),
            _ => how.to_owned(),
        };
        say(&format!("{how}: {done} done, {failed} failed in {} ({per_s:.1} images/s)", duration(seconds)));
        if let (Some(limit), true, true) = (told["limit"].as_str(), done + failed > 0, code != 3) {
            say(limit);
        }
        match (told["pending"].as_u64(), stopped_by) {
            (None | Some(0), _) => {}
            (Some(left), Some("limit")) => say(&format!("that was the --limit; pending: {left}")),
            (Some(left), _) => {
                say(&format!("pending since this run came to its end: {left}; the same command goes on"))
            }
        }
        if dropped > 0 {
            say(&format!(
                "{dropped} results were dropped: their rows were changed or taken by another worker meanwhile"
            ));
        }
        if released > 0 {
            say(&format!("{released} rows in flight are pending again"));
        }
        if code == 2 {
            say(FAILED_REMAIN);
        }
    }
}

/// 2 while any row that the run is about is failed or quarantined.
pub(super) fn exit_code_of(tally: &Tally) -> u8 {
    let bad = |s: &Standing| [s.detect, s.embed].iter().any(|s| matches!(s, Some(State::Failed | State::Quarantined)));
    if tally.iter().any(|(standing, _)| bad(standing)) { 2 } else { 0 }
}
