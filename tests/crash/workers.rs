//! Several workers on one database, of which some are killed and one is stopped for longer than its lease.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::support::dump::{assert_sound, dump, number};
use crate::support::fake::database;
use crate::support::pictures;
use crate::{CALL_MS, LEASE_MS, NO_CROPS, done, worker};

const ROWS: u32 = 20_000;

/// Pictures on the disk; many rows share one, by links.
const PICTURES: u32 = 50;

const LEASE: Duration = Duration::from_millis(1500);

fn command(db: &Path) -> Command {
    let mut command = worker(db);
    command.env(CALL_MS, "0").env(NO_CROPS, "1").env(LEASE_MS, LEASE.as_millis().to_string());
    command
}

fn is_stopped(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < patience, "{what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

#[test]
fn of_four_workers_two_are_killed_and_one_is_stopped_beyond_its_lease_and_every_row_is_committed_once() {
    let folder = tempfile::tempdir().unwrap();
    let originals = pictures(folder.path(), PICTURES);
    let rows = folder.path().join("rows");
    std::fs::create_dir(&rows).unwrap();
    let files: Vec<_> = (0..ROWS)
        .map(|i| {
            let name = rows.join(format!("{i:05}.png"));
            std::fs::hard_link(&originals[(i % PICTURES) as usize], &name).unwrap();
            name
        })
        .collect();
    let calm = folder.path().join("calm.db");
    database(&calm, &files);
    assert!(command(&calm).status().unwrap().success());

    let db = folder.path().join("shared.db");
    database(&db, &files);
    // Who writes a result a second time leaves a trace.
    let conn = rusqlite::Connection::open(&db).unwrap();
    conn.execute_batch(
        "CREATE TABLE committed (image_id INTEGER NOT NULL);
         CREATE TRIGGER committed_once AFTER UPDATE OF detect_state ON images
             WHEN NEW.detect_state = 'done'
             BEGIN INSERT INTO committed VALUES (NEW.id); END;",
    )
    .unwrap();
    let mut workers: Vec<Child> = vec![command(&db).env("CROPROW_STOP_AT", "commit.begun@3").spawn().unwrap()];
    workers.extend((0..3).map(|_| command(&db).spawn().unwrap()));
    let holds = |child: &Child| {
        number(&db, &format!("SELECT count(*) FROM images JOIN runs ON runs.id = run_id WHERE pid = {}", child.id()))
    };
    // With results in its hands that it is about to store.
    let mut stopped = workers.remove(0);
    wait_for("the first worker does not stop", || is_stopped(&stopped));
    assert!(holds(&stopped) > 0);
    for at in [2_000, 6_000] {
        wait_for("no progress", || done(&db) >= at);
        let mut victim = workers.remove(0);
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    let mut last = workers.remove(0);
    assert!(last.wait().unwrap().success());
    assert_eq!(done(&db), i64::from(ROWS), "the last worker takes over from all others before it ends");
    assert!(Command::new("kill").args(["-CONT", &stopped.id().to_string()]).status().unwrap().success());
    assert!(!stopped.wait().unwrap().success(), "a worker that lost its lease says so");

    assert_eq!(number(&db, "SELECT count(*) FROM committed"), i64::from(ROWS));
    assert_eq!(number(&db, "SELECT count(DISTINCT image_id) FROM committed"), i64::from(ROWS));
    assert_eq!(number(&db, "SELECT count(*) FROM runs WHERE ended_how = 'died'"), 2);
    assert_eq!(number(&db, "SELECT count(*) FROM runs WHERE ended_how = 'error'"), 1);
    assert_sound(&db);
    assert_eq!(dump(&db), dump(&calm));
}
