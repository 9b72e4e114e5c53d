//! The process aborts at each named point on the way of a row; the next start ends as if nothing had been.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use croprow::fault::POINTS;

use crate::support::dump::{assert_sound, dump, number};
use crate::support::pictures;
use crate::{CALL_MS, OTHER, PICTURES, assert_crops_whole, prepare, undisturbed, worker};

/// Enough for a page, several batches and several commits.
const IMAGES: u32 = 40;

const SIGABRT: i32 = 6;

/// How often each point was passed before: the first time, and in the middle of the work where it comes by again.
const TIMES: [u32; 2] = [1, 4];

fn crashed(db: &Path, point: &str) -> bool {
    let mut worker = worker(db);
    worker.env(PICTURES, db.parent().unwrap()).env("CROPROW_CRASH_AT", point).env(CALL_MS, "0");
    let status = worker.status().unwrap();
    if status.signal() == Some(SIGABRT) {
        return true;
    }
    assert!(status.success(), "{point}: {status}");
    false
}

#[test]
fn a_crash_at_any_point_leaves_what_the_next_start_ends_as_if_nothing_had_been() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), IMAGES);
    let expected = undisturbed(folder.path(), &files);
    for point in POINTS {
        for time in TIMES {
            let db = prepare(folder.path(), &files, &format!("{point}-{time}.db"));
            if point.starts_with("rescue.") {
                assert!(crashed(&db, "decode.begun"), "{point} wants a run that died");
            }
            if point.starts_with("settle.") {
                assert!(worker(&db).env(OTHER, "1").env(CALL_MS, "0").status().unwrap().success());
            }
            let reached = crashed(&db, &format!("{point}@{time}"));
            assert!(reached || time > 1, "the worker never comes by {point}");
            assert_sound(&db);
            assert!(worker(&db).env(CALL_MS, "0").status().unwrap().success(), "after {point}@{time}");
            assert_eq!(dump(&db), expected, "after {point}@{time}");
            assert_crops_whole(&db);
            assert_eq!(number(&db, "SELECT count(*) FROM suspects WHERE deaths > 0"), 0);
        }
    }
}

#[test]
fn a_crash_while_rows_are_added_loses_none_and_doubles_none() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), IMAGES);
    let expected = undisturbed(folder.path(), &files);
    let db = folder.path().join("added.db");
    std::fs::create_dir(db.with_extension("crops")).unwrap();
    assert!(crashed(&db, "add.stored"));
    assert!(!crashed(&db, "add.stored@9"), "it adds again what it was told to");
    assert_eq!(dump(&db), expected);
}
