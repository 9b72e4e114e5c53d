//! When many rows fail: the budget of `--max-failures`, and a disk that vanishes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use croprow::config::MaxFailures;
use croprow::error::Error;
use croprow::pipeline::stop::Stop;

use crate::cli::{call, expect, run as run_program};
use crate::support::dump::{assert_sound, dump, number};
use crate::support::fake::{Behaviour, Setup, database, run, run_until};
use crate::support::pictures;

/// A folder with a database and a `disk` that holds `count` pictures.
fn disk(count: u32) -> (tempfile::TempDir, PathBuf, PathBuf, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::create_dir_all(disk.join("photos")).unwrap();
    let files = pictures(&disk.join("photos"), count);
    let db = folder.path().join("photos.db");
    database(&db, &files);
    (folder, db, disk, files)
}

fn count(db: &Path, condition: &str) -> i64 {
    number(db, &format!("SELECT count(*) FROM images WHERE {condition}"))
}

#[test]
fn a_disk_that_vanishes_stops_the_run_and_fails_no_image() {
    let (folder, db, disk, files) = disk(300);
    let undisturbed = folder.path().join("undisturbed.db");
    database(&undisturbed, &files);
    run(&undisturbed, &Setup::default()).unwrap();
    let elsewhere = folder.path().join("elsewhere");
    let mut slow =
        Setup { behaviour: Behaviour { call: Duration::from_millis(10), ..Behaviour::default() }, ..Setup::default() };
    // Crops of full size, so that files are decoded a second time, too.
    slow.config.crops = Some(folder.path().join("crops"));
    fs::create_dir(folder.path().join("crops")).unwrap();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while count(&db, "detect_state = 'done'") == 0 {
                std::thread::yield_now();
            }
            fs::rename(&disk, &elsewhere).unwrap();
        });
        run_until(&db, &slow, &Stop::default()).unwrap_err()
    });
    assert!(matches!(&error, Error::PlaceGone { folder, was_read: true } if *folder == disk), "{error}");
    assert_eq!(error.exit_code(), 3);
    assert_eq!(count(&db, "detect_state = 'failed' OR embed_state = 'failed'"), 0);
    assert_eq!(count(&db, "token IS NOT NULL"), 0);
    let done = count(&db, "embed_state = 'done'");
    assert!(done > 0 && done < 300, "{done}");
    assert_sound(&db);
    fs::rename(&elsewhere, &disk).unwrap();
    assert_eq!(run(&db, &Setup::default()).unwrap().done as i64, 300 - done);
    let without_crops = |db: &Path| {
        rusqlite::Connection::open(db).unwrap().execute("UPDATE regions SET crop = NULL", []).unwrap();
        dump(db)
    };
    assert_eq!(without_crops(&db), without_crops(&undisturbed));
}

#[test]
fn a_disk_that_is_not_there_at_the_start_stops_the_run_and_fails_no_image() {
    let (_folder, db, disk, _) = disk(60);
    let elsewhere = disk.with_file_name("elsewhere");
    fs::rename(&disk, &elsewhere).unwrap();
    let error = run(&db, &Setup::default()).unwrap_err();
    assert!(matches!(&error, Error::PlaceGone { folder, was_read: false } if *folder == disk), "{error}");
    assert!(error.hint().unwrap().contains("bring it back") && error.hint().unwrap().contains("--where"));
    assert_eq!(count(&db, "detect_state = 'pending' AND token IS NULL"), 60);
    // An empty mount point is all that there is of a disk that is not mounted.
    fs::create_dir_all(disk.join("photos")).unwrap();
    assert!(matches!(run(&db, &Setup::default()), Err(Error::PlaceGone { .. })));
    assert_eq!(count(&db, "detect_state = 'pending' AND token IS NULL"), 60);
    // The same files are missing once there is a folder to look into.
    fs::write(disk.join("photos/notes.txt"), "mine").unwrap();
    assert_eq!(run(&db, &Setup::default()).unwrap().failed, 60);
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE code = 'missing'"), 60);
    assert_sound(&db);
}

#[test]
fn a_handful_of_files_whose_folder_is_gone_are_missing() {
    let (_folder, db, disk, _) = disk(19);
    fs::remove_dir_all(&disk).unwrap();
    let summary = run(&db, &Setup::default()).unwrap();
    assert_eq!((summary.failed, summary.released), (19, 0));
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE code = 'missing'"), 19);
}

#[test]
fn files_that_were_deleted_from_a_folder_that_is_there_are_missing() {
    let (_folder, db, _, files) = disk(50);
    fs::write(files[0].with_file_name("notes.txt"), "mine").unwrap();
    files.iter().for_each(|file| fs::remove_file(file).unwrap());
    let summary = run(&db, &Setup::default()).unwrap();
    assert_eq!((summary.done, summary.failed), (0, 50));
}

#[test]
fn the_failure_that_is_one_too_many_stops_the_run() {
    let (_folder, db, _, files) = disk(90);
    for file in files.iter().skip(5).step_by(2) {
        fs::write(file, "no picture").unwrap();
    }
    let mut setup = Setup::default();
    setup.config.max_failures = Some(MaxFailures::Rows(5));
    let error = run(&db, &setup).unwrap_err();
    assert!(
        matches!(&error, Error::TooManyFailures(words) if words.contains("not_an_image (6 in this run)")),
        "{error}"
    );
    assert_eq!(error.exit_code(), 3);
    assert_eq!(count(&db, "detect_state = 'failed'"), 6, "they stay failed, and no others");
    assert_eq!(count(&db, "token IS NOT NULL"), 0, "what was in flight is released");
    assert!(count(&db, "detect_state = 'pending'") > 0);
    assert_sound(&db);
}

#[test]
fn failures_are_counted_over_both_passes_of_a_staged_run() {
    let (_folder, db, _, files) = disk(60);
    files.iter().take(20).for_each(|file| fs::write(file, "no picture").unwrap());
    let mut setup = Setup::default();
    setup.config.staged = true;
    setup.config.max_failures = Some(MaxFailures::Rows(21));
    setup.behaviour.nan_below = 0.2;
    assert!(matches!(run(&db, &setup), Err(Error::TooManyFailures(_))));
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE stage = 'detect'"), 20);
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE stage = 'embed' AND code = 'nan_output'"), 2);
}

#[test]
fn the_budget_of_failures_is_remembered_and_told_by_the_program() {
    let (_folder, db, disk, files) = disk(60);
    files.iter().step_by(2).for_each(|file| fs::write(file, "no picture").unwrap());
    let db = db.to_str().unwrap();
    for (args, failed) in [(&["--max-failures", "4"][..], 5), (&[], 10)] {
        let said = expect(&run_program(db, args), 3);
        assert!(said.contains("croprow: 5 rows failed, more than --max-failures 4 allows"), "{said}");
        assert!(said.contains("the commonest code is not_an_image (5 in this run)"), "{said}");
        assert!(said.contains("error: ") && said.contains("5 failed in"), "{said}");
        assert_eq!(count(Path::new(db), "detect_state = 'failed'"), failed);
    }
    let said = expect(&call(&["run", db, "--max-failures", "none"]), 2);
    assert!(said.contains("20 failed"), "{said}");
    assert_eq!(count(Path::new(db), "embed_state = 'done'"), 30);
    assert_eq!(number(Path::new(db), "SELECT count(*) FROM runs WHERE exit_code = 3 AND ended_how = 'error'"), 2);
    expect(&call(&["retry", db]), 0);
    let said = expect(&call(&["run", db, "--max-failures", "10%"]), 2);
    assert!(said.contains("30 failed"), "a share of fewer than a hundred says nothing: {said}");
    // A disk that is gone is told with what to do.
    fs::rename(&disk, disk.with_file_name("elsewhere")).unwrap();
    expect(&call(&["retry", db]), 0);
    let said = expect(&call(&["run", db]), 3);
    assert!(
        said.contains(&format!("nothing in {} can be read: ", disk.display())) && said.contains("bring it back"),
        "{said}"
    );
    assert_eq!(count(Path::new(db), "detect_state = 'pending'"), 30);
}
