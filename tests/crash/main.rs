//! `kill -9` at random moments: the database ends equal to that of an undisturbed run. Children are this
//! test program itself, running the real pipeline with fake models.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../support/mod.rs"]
mod support;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::dump::{assert_sound, dump, number};
use support::fake::{Behaviour, Setup, database, run};
use support::pictures;

/// Names the database to a child.
const DATABASE: &str = "CROPROW_TEST_DATABASE";

const IMAGES: u32 = 400;

/// Not a test: what the children run.
#[test]
#[ignore = "run by the other tests, as a child"]
fn child_worker() {
    let Some(db) = std::env::var_os(DATABASE) else { return };
    let behaviour = Behaviour { call: Duration::from_millis(4), ..Behaviour::default() };
    let mut setup = Setup { behaviour, ..Setup::default() };
    setup.config.crops = Some(Path::new(&db).with_extension("crops"));
    run(Path::new(&db), &setup).unwrap();
}

fn start(db: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["child_worker", "--exact", "--ignored", "--nocapture"])
        .env(DATABASE, db)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// A database of the same pictures, in the same folder.
fn prepare(folder: &Path, files: &[PathBuf], name: &str) -> PathBuf {
    let db = folder.join(name);
    database(&db, files);
    std::fs::create_dir(db.with_extension("crops")).unwrap();
    db
}

/// Pseudo-random, so that a failure can be seen again.
struct Dice(u64);

impl Dice {
    fn up_to(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn undisturbed(folder: &Path, files: &[PathBuf]) -> String {
    let db = prepare(folder, files, "undisturbed.db");
    assert!(start(&db).wait().unwrap().success());
    assert_sound(&db);
    dump(&db)
}

/// Crops that rows name are whole.
fn assert_crops_whole(db: &Path) {
    let conn = rusqlite::Connection::open(db).unwrap();
    let mut statement = conn.prepare("SELECT crop FROM regions").unwrap();
    let names = statement.query_map([], |r| r.get::<_, String>(0)).unwrap();
    for name in names {
        let path = db.with_extension("crops").join(name.unwrap());
        image::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

fn done(db: &Path) -> i64 {
    number(db, "SELECT count(*) FROM images WHERE embed_state = 'done'")
}

#[test]
fn kill_9_at_random_moments_loses_nothing_and_doubles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), IMAGES);
    let expected = undisturbed(folder.path(), &files);
    let db = prepare(folder.path(), &files, "killed.db");
    let mut dice = Dice(20);
    let (mut kills, mut in_the_middle) = (0, 0);
    loop {
        let mut child = start(&db);
        let patience = Duration::from_millis(30 + dice.up_to(220));
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if kills < 25 && began.elapsed() >= patience {
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        match status.signal() {
            Some(9) => kills += 1,
            _ => {
                assert!(status.success(), "the worker failed by itself: {status}");
                break;
            }
        }
        let running = number(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL");
        in_the_middle += i64::from(running > 0 && done(&db) < i64::from(IMAGES));
        assert_sound(&db);
    }
    assert!(in_the_middle >= 5, "only {in_the_middle} of {kills} kills met rows in flight");
    assert_eq!(dump(&db), expected);
    assert_crops_whole(&db);
    assert_eq!(number(&db, "SELECT count(*) FROM runs WHERE ended_how = 'died'"), kills);
}

#[test]
fn three_workers_on_one_database_share_it_and_a_killed_one_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), IMAGES);
    let expected = undisturbed(folder.path(), &files);
    let db = prepare(folder.path(), &files, "shared.db");
    let mut workers: Vec<Child> = (0..3).map(|_| start(&db)).collect();
    let began = Instant::now();
    while done(&db) < 20 {
        assert!(began.elapsed() < Duration::from_secs(60), "no progress");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut victim = workers.remove(0);
    victim.kill().unwrap();
    victim.wait().unwrap();
    // The victim has its rows until somebody looks: the last worker to end does.
    for mut worker in workers {
        assert!(worker.wait().unwrap().success());
    }
    assert_eq!(dump(&db), expected);
    assert_sound(&db);
    let twice = number(&db, "SELECT count(*) FROM images WHERE detect_attempts > 2");
    assert_eq!(twice, 0, "a row was done again though its worker lived");
}
