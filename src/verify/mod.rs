//! `verify`: is what is stored what it says it is? Reads the database through a read-only connection, in pages, and the
//! crop files; changes nothing. What concerns one row is decided in `rows`, files are looked at in `crops`.

mod crops;
mod damage;
mod rows;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rayon::prelude::*;

pub use damage::{Damage, Finding, Report};

use crate::db::Db;
use crate::db::repair::Mended;
use crate::db::verify::{Dangling, StoredImage};
use crate::error::Error;
use crate::printable;
use crops::Folders;
use rows::{Facts, Fault};

/// Images read at once: with all their vectors they are in memory together.
const PAGE_ROWS: usize = 256;

/// Between two words about how far it is.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// What to look at.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folders in which crops may lie; a crop is looked for in one after the other.
    pub crop_folders: Vec<PathBuf>,
    /// Examples kept of each kind of damage.
    pub examples: usize,
    /// Threads that decode crops.
    pub threads: usize,
}

/// Checks everything. `tell` hears from time to time how many images have been looked at.
///
/// # Errors
/// The database cannot be read at all, or a thread cannot be started. Damage is no error: it is in the report.
pub fn verify(db: &Db, options: &Options, tell: &mut dyn FnMut(u64)) -> Result<Report, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads)
        .thread_name(|i| format!("verify-{i}"))
        .build()
        .map_err(|e| Error::System(format!("cannot start the threads of verify: {e}")))?;
    let mut report = Report::new(options.examples);
    let folders = Folders::of(&options.crop_folders);
    check_file(db, &mut report)?;
    note_damage(&mut report, |report| {
        if folders.is_empty() && db.has_crops()? {
            report.notes.push("crops are named, but no folder is known in which they lie: name it with --crops".into());
        }
        check_rows(db, &folders, &pool, report, tell)
    })?;
    note_damage(&mut report, |report| crops::check_folders(db, &folders, report))?;
    Ok(report)
}

/// Mends what can be mended: counters, and images with damaged or missing results, which are pending again. Crops that
/// are damaged are removed once no row names them.
///
/// # Errors
/// The file itself is damaged, or a run is at work; nothing was changed. Those of the database.
pub fn mend(db: &mut Db, report: &Report) -> Result<Mended, Error> {
    if let Some(reason) = report.forbids_mending() {
        return Err(Error::Unreadable { path: db.path().to_owned(), reason: reason.to_owned() });
    }
    let mended = db.repair(&report.repair)?;
    for file in &report.damaged_files {
        // One that stays is found as an orphan.
        let _ = std::fs::remove_file(file);
    }
    Ok(mended)
}

/// Everything that needs no page of rows.
fn check_file(db: &Db, report: &mut Report) -> Result<(), Error> {
    note_damage(report, |report| {
        for line in db.complaints()? {
            // Each CHECK of these tables is looked at row by row, which can say which row it is.
            let is_seen_below = ["images", "regions", "embeddings"]
                .iter()
                .any(|table| line == format!("CHECK constraint failed in {table}"));
            if !is_seen_below {
                report.add(Damage::Structure, line);
            }
        }
        Ok(())
    })?;
    note_damage(report, |report| {
        for Dangling { table, row, parent } in db.dangling()? {
            let row = row.map_or(String::new(), |row| format!(" row {row}"));
            let damage = match (table.as_str(), parent.as_str()) {
                ("regions", "images") => Damage::RegionWithoutImage,
                ("embeddings", "regions") => Damage::VectorWithoutRegion,
                ("candidates", "images") => Damage::CandidatesWithoutImage,
                // Seen below, with its image; a suspect that is gone does no harm.
                ("candidates", _) | ("suspects", "images") => continue,
                _ => Damage::Dangling,
            };
            report.add(damage, format!("{table}{row}, no such row in {parent}"));
        }
        Ok(())
    })?;
    note_damage(report, |report| {
        for wrong in db.miscounts()? {
            report.add(Damage::Counts, format!("{}: {} counted, {} there", wrong.standing, wrong.counted, wrong.there));
        }
        Ok(())
    })?;
    note_damage(report, |report| {
        for row in db.abandoned()? {
            let run = row.run.map_or("no run".to_owned(), |run| format!("run {run}"));
            report.add(Damage::Abandoned, format!("image {} {} ({run})", row.id, printable::path(&row.path)));
        }
        Ok(())
    })
}

/// A page that SQLite cannot read is damage, and the next check may still find its own.
fn note_damage(report: &mut Report, check: impl FnOnce(&mut Report) -> Result<(), Error>) -> Result<(), Error> {
    match check(report) {
        Err(Error::Database(error)) if crate::error::is_damaged(&error) => {
            report.add(Damage::Structure, error.to_string());
            Ok(())
        }
        other => other,
    }
}

fn check_rows(
    db: &Db,
    folders: &Folders,
    pool: &rayon::ThreadPool,
    report: &mut Report,
    tell: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let facts = Facts::read(db)?;
    let mut told = Instant::now();
    // Ids may be negative.
    let mut page = db.stored_page(i64::MIN, PAGE_ROWS)?;
    while let Some(last) = page.last().map(|image| image.id.0) {
        let checked: Vec<(StoredImage, Vec<Fault>)> = pool.install(|| {
            let one = |image: StoredImage| {
                let faults = faults(&image, &facts, folders);
                (image, faults)
            };
            page.into_par_iter().map(one).collect()
        });
        for (mut image, mut faults) in checked {
            if !faults.is_empty() {
                // A run beside this may have replaced the row, and its files, since the page was read.
                let again = db.stored_page(image.id.0.saturating_sub(1), 1)?;
                let Some(now) = again.into_iter().find(|now| now.id == image.id) else { continue };
                faults = self::faults(&now, &facts, folders);
                image = now;
            }
            report.count(&image, !folders.is_empty());
            faults.into_iter().for_each(|fault| report.fault(&image, fault));
        }
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            tell(report.images);
        }
        page = db.stored_page(last, PAGE_ROWS)?;
    }
    Ok(())
}

fn faults(image: &StoredImage, facts: &Facts, folders: &Folders) -> Vec<Fault> {
    let mut faults = rows::faults(image, facts);
    faults.extend(crops::faults(image, folders));
    faults
}
