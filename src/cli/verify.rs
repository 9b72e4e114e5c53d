//! `croprow verify`.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use croprow::db::Db;
use croprow::error::Error;
use croprow::printable;
use croprow::verify::{Options, Report, mend, verify};
use serde_json::json;

use super::rescue::rescue;
use super::{opening, parse, print, print_json, say};

/// Examples of each kind of damage, where nothing else is said.
const EXAMPLES: u64 = 5;

/// Check what is stored: counters, rows, vectors, candidates, crops. Reads only, also beside a run.
#[derive(Args)]
#[command(after_help = "Exit codes: 0 sound, 1 bad command line, 2 damage found, 3 the database cannot be read.

Examples:
  croprow verify photos.db
  croprow verify photos.db --json --examples 1000000 > damage.json
  croprow verify photos.db --repair      then: croprow run photos.db")]
pub(crate) struct VerifyArgs {
    /// The database.
    pub(crate) db: PathBuf,
    /// Count again, and make images with damaged or missing results pending; then check once more
    #[arg(long)]
    repair: bool,
    /// Folder of the crops [default: those that runs were given]
    #[arg(long, value_name = "DIR")]
    crops: Option<PathBuf>,
    /// Examples shown of each kind of damage
    #[arg(long, value_name = "N", default_value_t = EXAMPLES, value_parser = parse::count)]
    examples: u64,
    /// One JSON object, for programs
    #[arg(long)]
    json: bool,
}

/// What was found is damage, as far as the exit code goes.
const DAMAGED: u8 = 2;

pub(crate) fn run(args: &VerifyArgs) -> Result<u8, Error> {
    let mut report = look(args)?;
    let mut mended = None;
    let forbidden = report.forbids_mending().filter(|_| args.repair);
    if let Some(why) = forbidden {
        // Not even opened for writing.
        say(why);
    } else if args.repair && !report.is_sound() {
        if !args.json {
            print(&describe(args, &report))?;
        }
        let mut db = Db::open_with(&args.db, opening())?;
        rescue(&mut db)?;
        let done = mend(&mut db, &report)?;
        drop(db);
        say(&format!(
            "mended: {} images are pending again, {} rows that referred to nothing are gone, all is counted again",
            done.images, done.dangling
        ));
        mended = Some(done);
        report = look(args)?;
    }
    report.notes.iter().for_each(|note| say(note));
    if args.json {
        let findings: Vec<_> = report
            .findings
            .iter()
            .map(|f| {
                json!({
                    "kind": f.damage.word(), "count": f.count, "examples": f.examples, "meaning": f.damage.meaning(),
                    "remedy": f.damage.remedy(),
                })
            })
            .collect();
        let told = json!({
            "database": args.db.to_string_lossy(), "sound": report.is_sound(), "images": report.images,
            "regions": report.regions, "vectors": report.vectors, "crops": report.crops, "damage": findings,
            "not_checked": report.notes, "pending_again": mended.map(|done| done.images),
        });
        print_json(&told)?;
    } else {
        print(&describe(args, &report))?;
    }
    Ok(if report.is_sound() { 0 } else { DAMAGED })
}

fn look(args: &VerifyArgs) -> Result<Report, Error> {
    let db = Db::open_read_only(&args.db).map_err(|error| match error {
        // For `verify` that is the answer, and a grave one.
        Error::Unreadable { .. } => Error::System(error.to_string()),
        other => other,
    })?;
    let crop_folders = match &args.crops {
        Some(folder) => vec![folder.clone()],
        None => db.crop_folders()?,
    };
    let options = Options {
        crop_folders,
        examples: usize::try_from(args.examples).unwrap_or(usize::MAX),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
    };
    verify(&db, &options, &mut |images| say(&format!("{images} images checked")))
}

fn describe(args: &VerifyArgs, report: &Report) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let (word, meaning) = (finding.damage.word(), finding.damage.meaning());
        let _ = writeln!(text, "{:>8} x {word}: {meaning}", finding.count);
        for example in &finding.examples {
            let _ = writeln!(text, "           {}", printable::line(example));
        }
        let _ = writeln!(text, "           -> {}", finding.damage.remedy());
    }
    let Report { images, regions, vectors, crops, .. } = report;
    let verdict = if report.is_sound() { "sound" } else { "damaged" };
    let _ = writeln!(
        text,
        "{}: {verdict}; {images} images, {regions} regions, {vectors} vectors and {crops} crops checked",
        printable::path(&args.db)
    );
    text
}
