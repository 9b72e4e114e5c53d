//! Workers that are gone, and what becomes of their rows.

use std::time::Duration;

use croprow::db::Db;
use croprow::db::claim::{RunId, Tokens};
use croprow::db::suspects::Claims;
use croprow::error::Error;
use croprow::row::Stage;
use rusqlite::Connection;

use crate::database::{begin, database, try_begin};
use crate::support::dump::{assert_sound, number};

#[test]
fn rows_of_a_dead_process_are_taken_back_and_those_of_a_live_one_are_not() {
    let (_folder, path, mut db, mut tokens, _) = database(4);
    db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap();
    // Another worker looks at it from here on.
    let mut db = Db::open(&path).unwrap();
    assert!(db.rescue_dead_runs().unwrap().is_empty(), "this process lives");
    let run = RunId(number(&path, "SELECT max(id) FROM runs"));
    assert!(db.run_is_alive(run).unwrap());
    // The same pid, but another process: it started at another time.
    Connection::open(&path).unwrap().execute("UPDATE runs SET pid_started = pid_started - 1", []).unwrap();
    assert!(!db.run_is_alive(run).unwrap());
    let rescued = db.rescue_dead_runs().unwrap();
    assert_eq!(rescued.iter().map(|r| r.1).sum::<usize>(), 2);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'pending'"), 4);
    // On another host it is the heartbeat that tells.
    let mut tokens = begin(&mut db);
    db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap();
    // Another worker looks at it from here on.
    let mut db = Db::open(&path).unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE runs SET host = 'elsewhere', pid_started = 1 WHERE ended_at IS NULL", []).unwrap();
    assert!(db.rescue_dead_runs().unwrap().is_empty());
    conn.execute("UPDATE runs SET heartbeat_at = heartbeat_at - 301 WHERE ended_at IS NULL", []).unwrap();
    assert!(db.rescue_dead_runs().unwrap().is_empty() && db.has_doubtful_runs().unwrap(), "a clock may have been set");
    watch_for_the_lease(&mut db);
    assert_eq!(db.rescue_dead_runs().unwrap().len(), 1);
    assert_sound(&path);
}

#[test]
fn rows_of_a_process_that_died_are_suspects_and_nobody_claims_them_beside_others() {
    let (_folder, path, mut db, mut tokens, _) = database(6);
    let held = db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap();
    // Another worker looks at it from here on.
    let mut db = Db::open(&path).unwrap();
    Connection::open(&path).unwrap().execute("UPDATE runs SET pid_started = pid_started - 1", []).unwrap();
    db.rescue_dead_runs().unwrap();
    let suspects = db.suspects().unwrap();
    assert_eq!(suspects.iter().map(|s| s.id).collect::<Vec<_>>(), held.iter().map(|c| c.id).collect::<Vec<_>>());
    assert!(suspects.iter().all(|s| !s.alone && s.deaths == 0));
    let mut tokens = begin(&mut db);
    let claimed = |db: &mut Db, tokens: &mut Tokens| -> Vec<i64> {
        db.claim_page(tokens, Stage::Detect, 0, 10).unwrap().iter().map(|claim| claim.id.0).collect()
    };
    assert_eq!(claimed(&mut db, &mut tokens), [3, 4, 5, 6]);
    db.suspect_alone(&[held[0].id]).unwrap();
    db.claim_only(Claims::Together);
    assert_eq!(claimed(&mut db, &mut tokens), [2]);
    db.claim_only(Claims::Alone);
    assert_eq!(claimed(&mut db, &mut tokens), [1]);
    assert_sound(&path);
}

#[test]
fn where_the_machine_went_down_rows_are_suspects_only_after_several_attempts() {
    let (_folder, path, mut db, mut tokens, _) = database(3);
    db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap();
    // Another worker looks at it from here on.
    let mut db = Db::open(&path).unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE images SET detect_attempts = 3 WHERE id = 2", []).unwrap();
    conn.execute("UPDATE runs SET boot_id = 'before ' || substr(boot_id, instr(boot_id, ' ') + 1)", []).unwrap();
    db.rescue_dead_runs().unwrap();
    assert_eq!(db.suspects().unwrap().iter().map(|s| s.id.0).collect::<Vec<_>>(), [2]);
}

#[test]
fn rows_that_an_ended_run_still_holds_are_taken_back() {
    let (_folder, path, mut db, mut tokens, _) = database(3);
    assert_eq!(db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap().len(), 2);
    // A full disk: the run could say that it ended, but not release its rows.
    db.end_run(RunId(1), "error", 3, 0, 0, None).unwrap();
    assert_eq!(db.rescue_dead_runs().unwrap(), [(RunId(1), 2)]);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'pending'"), 3);
    assert!(db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap().is_empty(), "an ended run claims nothing");
    assert!(matches!(db.heartbeat(RunId(1), &Default::default(), &[]), Err(Error::LeaseLost)));
    assert_sound(&path);
}

#[test]
fn a_second_worker_with_other_recipes_is_refused_and_changes_nothing() {
    let (_folder, path, mut db, _, in_force) = database(3);
    assert!(matches!(try_begin(&mut db, "d2", "e1"), Err(Error::Usage(_))));
    assert_eq!(db.in_force().unwrap(), in_force);
    assert_eq!(number(&path, "SELECT count(*) FROM runs"), 1);
    assert_eq!(try_begin(&mut db, "d1", "e1").unwrap().1, in_force, "the same recipes may share the work");
}

#[test]
fn a_worker_in_another_container_is_judged_by_its_heartbeat() {
    let (_folder, path, mut db, mut tokens, _) = database(2);
    db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap();
    // Another worker looks at it from here on.
    let mut db = Db::open(&path).unwrap();
    let conn = Connection::open(&path).unwrap();
    // The same machine and boot, but pids that mean something else.
    conn.execute("UPDATE runs SET boot_id = substr(boot_id, 1, instr(boot_id, ' ')) || 'pid:[1]', pid_started = 1", [])
        .unwrap();
    assert!(db.rescue_dead_runs().unwrap().is_empty());
    conn.execute("UPDATE runs SET heartbeat_at = heartbeat_at - 301", []).unwrap();
    assert!(db.rescue_dead_runs().unwrap().is_empty());
    watch_for_the_lease(&mut db);
    assert_eq!(db.rescue_dead_runs().unwrap().len(), 1);
}

#[test]
fn a_worker_that_beats_while_its_rescuer_waits_for_the_right_to_write_is_left_alone() {
    let (_folder, path, mut db, mut tokens, _) = database(2);
    db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap();
    let mut other = Db::open(&path).unwrap();
    assert!(other.rescue_dead_runs().unwrap().is_empty());
    watch_for_the_lease(&mut other);
    let writer = Connection::open(&path).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE; UPDATE runs SET heartbeat_at = heartbeat_at + 1").unwrap();
    let rescuer = std::thread::spawn(move || other.rescue_dead_runs().unwrap());
    std::thread::sleep(Duration::from_millis(200));
    writer.execute_batch("COMMIT").unwrap();
    assert_eq!(rescuer.join().unwrap(), []);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'running'"), 1);
}

#[test]
fn nobody_takes_the_own_run_for_dead() {
    let (_folder, path, mut db, mut tokens, _) = database(2);
    db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap();
    assert!(db.rescue_dead_runs().unwrap().is_empty());
    // As after a SIGSTOP that was longer than the lease.
    watch_for_the_lease(&mut db);
    assert!(db.rescue_dead_runs().unwrap().is_empty());
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'running'"), 1);
}

/// A short lease, and no heartbeat while this process watches.
fn watch_for_the_lease(db: &mut Db) {
    db.set_lease(Duration::from_millis(30));
    std::thread::sleep(Duration::from_millis(40));
}
