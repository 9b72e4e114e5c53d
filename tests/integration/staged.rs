//! Two passes: what goes on before the first and between both, when nothing is committed.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use croprow::db::Db;
use croprow::pipeline::stop::{Cause, Stop};
use rusqlite::Connection;

use crate::support::dump::{assert_sound, number};
use crate::support::fake::{Behaviour, Setup, run, run_until};
use crate::support::photos;

fn staged(behaviour: Behaviour) -> Setup {
    let mut setup = Setup { behaviour, ..Setup::default() };
    setup.config.staged = true;
    setup
}

/// Rows of files that are not there, with ids from `from` on, whose other columns are as `values` says.
pub(crate) fn rows(db: &Path, from: i64, count: i64, columns: &str, values: &str) {
    let sql = format!(
        "WITH RECURSIVE n(n) AS (SELECT ?1 UNION ALL SELECT n + 1 FROM n WHERE n < ?1 + ?2 - 1)
         INSERT INTO images (id, path, {columns}) SELECT n, '/gone/' || n || '.jpg', {values} FROM n"
    );
    assert_eq!(Connection::open(db).unwrap().execute(&sql, [from, count]).unwrap() as i64, count);
}

#[test]
fn a_worker_that_loads_a_model_for_long_is_not_taken_for_dead() {
    let (_folder, db, _) = photos(8);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut other = Db::open(&db).unwrap();
            // Longer than between two heartbeats, and shorter than it takes to load a model.
            other.set_lease(Duration::from_millis(3_500));
            while !over.load(Ordering::SeqCst) {
                assert_eq!(other.rescue_dead_runs().unwrap(), [], "it lives");
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let done = run(&db, &staged(Behaviour { load: Duration::from_secs(6), ..Behaviour::default() }));
        over.store(true, Ordering::SeqCst);
        assert_eq!(done.unwrap().done, 8);
        watcher.join().unwrap();
    });
    assert_sound(&db);
}

#[test]
fn a_worker_that_was_taken_for_dead_while_it_loaded_a_model_ends_with_75() {
    let (_folder, db, _) = photos(3);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let other = Connection::open(&db).unwrap();
            while !over.load(Ordering::SeqCst) {
                other.execute("UPDATE runs SET ended_at = 1, ended_how = 'died'", []).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let error = run(&db, &staged(Behaviour { load: Duration::from_secs(3), ..Behaviour::default() })).unwrap_err();
        over.store(true, Ordering::SeqCst);
        assert_eq!(error.exit_code(), 75, "{error}");
    });
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'pending'"), 3);
}

#[test]
fn a_stop_is_heard_while_rows_are_made_due() {
    let (_folder, db, _) = photos(3);
    rows(&db, 1_000, 30_000, "tag", "NULL");
    let stop = Stop::default();
    stop.ask(Cause::Signal(15));
    run_until(&db, &staged(Behaviour::default()), &stop).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state IS NULL"), 30_000);
    assert_sound(&db);
}
