//! `croprow status`.

use std::fmt::Write;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::db::progress::{RunReport, Status};
use croprow::error::Error;
use croprow::printable;

use super::{clear_screen, print, print_json};

/// Progress, rate, time left, failures. Instant at any size.
#[derive(Args)]
#[command(after_help = "Examples:
  croprow status photos.db
  croprow status photos.db --watch
  croprow status photos.db --json | python3 -m json.tool")]
pub(crate) struct StatusArgs {
    /// The database.
    pub(crate) db: PathBuf,
    /// One JSON object, for programs.
    #[arg(long)]
    json: bool,
    /// Again every two seconds, until interrupted.
    #[arg(long)]
    watch: bool,
}

/// Between two looks with `--watch`.
const WATCH: Duration = Duration::from_secs(2);

/// Formats that are not decoded are counted one by one up to this many, the most frequent ones.
const FORMATS_MOST: usize = 10;

pub(crate) fn run(args: &StatusArgs) -> Result<u8, Error> {
    loop {
        let db = Db::open_read_only(&args.db)?;
        let status = db.status()?;
        let alive = match &status.last_run {
            Some(run) => db.run_is_alive(RunId(run.id))?,
            None => false,
        };
        if args.json {
            let mut json =
                serde_json::to_value(&status).map_err(|e| Error::System(format!("cannot write JSON: {e}")))?;
            json["live"] = alive.into();
            print_json(&json)?;
        } else {
            if args.watch && std::io::stdout().is_terminal() {
                clear_screen()?;
            }
            print(&describe(&status, alive))?;
        }
        if !args.watch {
            return Ok(0);
        }
        std::thread::sleep(WATCH);
    }
}

fn describe(status: &Status, alive: bool) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{} images", status.images);
    let _ = writeln!(
        text,
        "{:<8}{:>10}{:>10}{:>10}{:>10}{:>13}{:>11}{:>12}",
        "stage", "pending", "running", "done", "failed", "quarantined", "images/s", "time left"
    );
    for s in &status.stages {
        let per_s = s.per_s.filter(|_| alive).map_or("-".into(), |v| format!("{v:.1}"));
        let eta = s.eta_s.filter(|eta| alive || *eta == 0).map_or("-".into(), |eta| duration(eta as f64));
        let _ = writeln!(
            text,
            "{:<8}{:>10}{:>10}{:>10}{:>10}{:>13}{:>11}{:>12}",
            s.stage, s.pending, s.running, s.done, s.failed, s.quarantined, per_s, eta
        );
    }
    match &status.last_run {
        None => text.push_str("no run yet; begin with: croprow run DB --detector MODEL --embedder MODEL\n"),
        Some(run) => {
            let _ = writeln!(text, "{}", describe_run(run, alive));
        }
    }
    if let Some(still) = status.stalled_s.filter(|_| alive) {
        let _ =
            writeln!(text, "stalled: no image has ended for {}; the run itself says at which file", duration(still));
    }
    if let Some(slowest) = status.stages.iter().find_map(|s| s.slowest.as_deref()).filter(|_| alive) {
        let _ = writeln!(text, "busiest stage: {slowest}");
    }
    let failed: u64 = status.stages.iter().map(|s| s.failed + s.quarantined).sum();
    let counted: u64 = status.failures.iter().map(|f| f.images).sum();
    if counted < failed {
        let _ = writeln!(text, "of the first {counted} failures of {failed}:");
    }
    for f in &status.failures {
        let _ = writeln!(text, "{:>8} x {} in {}, e.g. {}", f.images, f.code, f.stage, printable::line(&f.example));
    }
    for format in status.unsupported.iter().take(FORMATS_MOST) {
        let _ = writeln!(text, "{:>16} x {}", format.images, printable::line(&format.reason));
    }
    text
}

fn describe_run(run: &RunReport, alive: bool) -> String {
    let seconds = run.ended_at.unwrap_or(run.heartbeat_at) - run.started_at;
    let how = match (&run.ended_how, alive) {
        (Some(how), _) => how.clone(),
        (None, true) => format!("working, pid {} on {}", run.pid, run.host),
        (None, false) => "died; the next run takes its rows back".into(),
    };
    format!(
        "run {}: {how}; {} done and {} failed in {} on {}",
        run.id,
        run.done,
        run.failed,
        duration(seconds),
        run.device
    )
}

/// `3 s`, `4 min 05 s`, `7 h 12 min`, `3 d 04 h`.
pub(crate) fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {:02} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {:02} h", s / 86_400, s % 86_400 / 3600),
    }
}
