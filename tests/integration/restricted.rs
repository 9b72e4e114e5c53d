//! Runs that are restricted by a condition, with fake models: what it costs to ask it, and who waits for that.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use croprow::config::Stale;
use croprow::db::Db;
use croprow::pipeline::stop::{Cause, Stop};
use rusqlite::Connection;

use crate::staged::rows;
use crate::support::dump::{assert_sound, number, text};
use crate::support::fake::{Behaviour, Setup, run, run_until};
use crate::support::photos;

/// True for the photos, after a look at some hundred other rows.
const SLOW: &str =
    "iif((SELECT count(*) FROM images i WHERE i.id BETWEEN images.id AND images.id + 400) > 0, tag = 'x', 0)";

/// Four photos that [`SLOW`] is true for, and so many pending rows that it is not.
fn among(others: i64) -> (tempfile::TempDir, PathBuf) {
    let (folder, db, _) = photos(4);
    Connection::open(&db).unwrap().execute("UPDATE images SET tag = 'x'", []).unwrap();
    rows(&db, 1_000, others, "detect_state", "'pending'");
    (folder, db)
}

/// How long it takes to ask the condition for all rows.
fn scan(db: &Path) -> Duration {
    let mut db = Db::open(db).unwrap();
    db.restrict(Some(SLOW)).unwrap();
    let began = Instant::now();
    db.tally_in_scope().unwrap();
    began.elapsed()
}

const DONE: &str = "SELECT count(*) FROM images WHERE embed_state = 'done'";

/// Everything that is stored of the rows of `condition`, with their ids.
fn stored(db: &Path, condition: &str) -> String {
    text(
        db,
        &format!(
            "SELECT group_concat(line, char(10)) FROM (
                 SELECT concat_ws('|', i.id, detect_state, detect_recipe_id, detect_attempts, embed_state, embed_recipe_id,
                                  embed_attempts, done_at, r.id, r.x0, r.score, e.recipe_id, hex(e.vector)) AS line
                 FROM images i LEFT JOIN regions r ON r.image_id = i.id LEFT JOIN embeddings e ON e.region_id = r.id
                 WHERE i.{condition} ORDER BY i.id, r.id, e.recipe_id)"
        ),
    )
}

#[test]
fn rows_that_the_condition_is_not_about_stay_as_they_are_when_others_are_done_again() {
    for is_staged in [false, true] {
        let (_folder, db, _) = photos(10);
        let conn = Connection::open(&db).unwrap();
        conn.execute("UPDATE images SET id = id + 100000 WHERE id > 5", []).unwrap();
        run(&db, &Setup::default()).unwrap();
        let recipe = |stage| format!("(SELECT id FROM recipes WHERE stage = '{stage}')");
        let values = format!("'done', {}, 'done', {}", recipe("detect"), recipe("embed"));
        rows(&db, 1_000, 11_000, "detect_state, detect_recipe_id, embed_state, embed_recipe_id", &values);
        // Never settled, and not yet.
        rows(&db, 20_000, 10, "tag", "NULL");
        let before = stored(&db, "id NOT IN (3, 100007)");
        let mut setup = Setup {
            detector: Some("another"),
            stale: Stale::Redo,
            condition: Some("id IN (3, 100007)"),
            ..Setup::default()
        };
        setup.config.staged = is_staged;
        assert_eq!(run(&db, &setup).unwrap().done, 2);
        assert!(stored(&db, "id NOT IN (3, 100007)") == before, "staged: {is_staged}");
        let anew = "SELECT count(*) FROM images WHERE embed_state = 'done' AND detect_recipe_id =
                    (SELECT id FROM recipes WHERE body = 'another')";
        assert_eq!(number(&db, anew), 2);
        assert_sound(&db);
    }
}

#[test]
fn commits_do_not_wait_until_the_condition_was_asked_for_all_rows() {
    let (_folder, db) = among(240_000);
    let began = Instant::now();
    let (first, all) = std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(&db, &Setup { condition: Some(SLOW), ..Setup::default() }).unwrap().done);
        while number(&db, DONE) < 4 {
            assert!(!runner.is_finished(), "it left rows pending");
            std::thread::sleep(Duration::from_millis(5));
        }
        let first = began.elapsed();
        assert_eq!(runner.join().unwrap(), 4);
        (first, began.elapsed())
    });
    assert!(first < all / 4, "stored after {first:?} of {all:?}");
    assert_sound(&db);
}

#[test]
fn the_condition_is_not_asked_again_and_again_while_rows_are_in_flight() {
    let (_folder, db) = among(10_000);
    let behaviour = Behaviour { call: Duration::from_secs(4), ..Behaviour::default() };
    run(&db, &Setup { condition: Some(SLOW), behaviour, ..Setup::default() }).unwrap();
    assert_eq!(number(&db, DONE), 4);
    let busy = "SELECT CAST(100 * avg(t.busy) AS INTEGER) FROM step_samples t JOIN samples s USING (run_id, at)
                WHERE t.step = 'read' AND s.done = 0";
    let percent = number(&db, busy);
    assert!(percent < 50, "`read` was busy for {percent} % of the time in which it waited for models");
}

#[test]
fn a_stop_is_heard_while_the_condition_is_asked() {
    let (_folder, db) = among(60_000);
    let (scan, stop) = (scan(&db), Stop::default());
    let began = Instant::now();
    let took = std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            std::thread::sleep(scan / 8);
            stop.ask(Cause::Signal(15));
        });
        run_until(&db, &Setup { condition: Some(SLOW), ..Setup::default() }, stop).unwrap();
        began.elapsed()
    });
    assert!(took < scan / 2, "{took:?} of {scan:?}");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL"), 0);
    assert_sound(&db);
}

#[test]
fn rows_are_claimed_only_when_they_are_where_they_belong() {
    let (_folder, db, _) = photos(3);
    // Due for an embedder alone, behind more rows than one chunk has of which none is pending.
    Connection::open(&db)
        .unwrap()
        .execute("UPDATE images SET id = id + 20000, detect_state = NULL, embed_state = 'pending'", [])
        .unwrap();
    rows(&db, 1, 12_000, "detect_state, detect_code", "'failed', 'missing'");
    run(&db, &Setup::default()).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'done' AND embed_state = 'done'"), 3);
    assert_sound(&db);
}
