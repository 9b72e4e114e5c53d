//! `kill -9` at random moments: the database ends equal to that of an undisturbed run. Children are this
//! test program itself, running the real pipeline with fake models.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod points;
mod poison;
#[path = "../support/mod.rs"]
mod support;
mod walk;
mod workers;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use croprow::config::Stale;
use croprow::db::Db;
use croprow::db::suspects::Claims;
use croprow::pipeline::apart;
use croprow::pipeline::crop_file::prepare_folder;
use croprow::verify::{Damage, Options, verify};
use support::dump::{assert_sound, dump, number};
use support::fake::{Behaviour, Setup, database, run, run_and_clear};
use support::pictures;

/// Names the database to a child.
const DATABASE: &str = "CROPROW_TEST_DATABASE";

const IMAGES: u32 = 400;

/// Tells a child which suspects are its own.
const APART: &str = "CROPROW_TEST_APART";

/// A folder whose pictures a child adds first.
const PICTURES: &str = "CROPROW_TEST_PICTURES";

/// Milliseconds of silence after which a worker loses its rows.
const LEASE_MS: &str = "CROPROW_TEST_LEASE_MS";

/// No crops are written: for many rows.
const NO_CROPS: &str = "CROPROW_TEST_NO_CROPS";

/// With another detector, which finds the same.
const OTHER: &str = "CROPROW_TEST_OTHER";

/// Milliseconds that a call of a fake model takes.
const CALL_MS: &str = "CROPROW_TEST_CALL_MS";

/// Images of the test of power cuts, whose every moment is worked on to the end.
const POWER_CUT_IMAGES: u32 = 100;

/// Moments that are worked on, evenly over the run.
const MOMENTS_MOST: usize = 8;

/// Not a test: what the children run.
#[test]
#[ignore = "run by the other tests, as a child"]
fn child_worker() {
    let Some(db) = std::env::var_os(DATABASE) else { return };
    let db = Path::new(&db);
    let claims = match std::env::var(APART).as_deref() {
        Ok("together") => Claims::Together,
        Ok("alone") => Claims::Alone,
        _ => Claims::Ordinary,
    };
    let call_ms = std::env::var(CALL_MS).map_or(4, |ms| ms.parse().unwrap());
    let behaviour = Behaviour { call: Duration::from_millis(call_ms), ..Behaviour::default() };
    let mut setup = Setup { behaviour, claims, ..Setup::default() };
    setup.config.crops = std::env::var_os(NO_CROPS).is_none().then(|| db.with_extension("crops"));
    setup.stale = Stale::Redo;
    if let Ok(ms) = std::env::var(LEASE_MS) {
        setup.lease = Duration::from_millis(ms.parse().unwrap());
    }
    if std::env::var_os(OTHER).is_some() {
        setup.detector = Some("another detector");
    }
    if let Some(folder) = std::env::var_os(PICTURES) {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == "png")).collect();
        files.sort();
        database(db, &files);
    }
    if claims != Claims::Ordinary {
        apart::die_with_parent();
        // The harness has begun a line.
        println!();
        run(db, &setup).unwrap();
        return;
    }
    let mut apart = |claims| {
        let word = if claims == Claims::Alone { "alone" } else { "together" };
        worker(db).env(APART, word).stdout(Stdio::piped()).spawn()
    };
    run_and_clear(db, &setup, &mut apart).unwrap();
}

fn worker(db: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child_worker", "--exact", "--ignored", "--nocapture", "--test-threads", "1"]);
    command.env(DATABASE, db).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn start(db: &Path) -> Child {
    worker(db).spawn().unwrap()
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

/// What a disk holds at one moment: database and log, and the crops.
struct Moment {
    db: PathBuf,
    /// No page of the log was in the database by then: a power cut may have kept any beginning of the log.
    log_may_be_cut: bool,
}

fn take(db: &Path, initial: &[u8], number: usize) -> Moment {
    let to = db.with_file_name(format!("moment-{number}.db"));
    std::fs::copy(db, &to).unwrap();
    // Without its memory, as after a reboot.
    let _ = std::fs::copy(wal(db), wal(&to));
    let copied =
        Command::new("cp").arg("-r").args([db.with_extension("crops"), to.with_extension("crops")]).status().unwrap();
    assert!(copied.success());
    Moment { log_may_be_cut: std::fs::read(&to).unwrap() == initial, db: to }
}

fn wal(db: &Path) -> PathBuf {
    PathBuf::from(format!("{}-wal", db.display()))
}

/// A power cut keeps what was synced: files before the rows that name them, and commits in their order.
fn assert_goes_on(db: &Path, expected: &str, moment: &str) {
    let crops = db.with_extension("crops");
    let options = Options { crop_folders: vec![crops.clone()], examples: 5, threads: 2 };
    let look = || verify(&Db::open_read_only(db).unwrap(), &options, &mut |_| {}).unwrap();
    let report = look();
    let is_of_a_crash = |damage| matches!(damage, Damage::Abandoned | Damage::CropOrphan | Damage::CropUnfinished);
    assert!(report.findings.iter().all(|f| is_of_a_crash(f.damage)), "{moment}: {report:#?}");
    prepare_folder(&crops).unwrap();
    assert!(worker(db).env(CALL_MS, "0").status().unwrap().success(), "{moment}");
    assert!(dump(db) == expected, "{moment}: other rows than undisturbed");
    assert_sound(db);
    assert!(look().is_sound(), "{moment}: {:#?}", look());
}

#[test]
fn what_a_power_cut_leaves_goes_on_to_the_undisturbed_end() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), POWER_CUT_IMAGES);
    let expected = undisturbed(folder.path(), &files);
    let db = prepare(folder.path(), &files, "cut.db");
    let initial = std::fs::read(&db).unwrap();
    // Slow enough for several moments, however fast the machine is.
    let mut worker = worker(&db).env(CALL_MS, "20").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&worker);
    let mut moments = Vec::new();
    let mut dice = Dice(7);
    while worker.try_wait().unwrap().is_none() {
        // Nothing moves while the copy is made, as on a disk at one moment.
        if rustix::process::kill_process(pid, rustix::process::Signal::STOP).is_ok() && wal(&db).exists() {
            moments.push(take(&db, &initial, moments.len()));
        }
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
        std::thread::sleep(Duration::from_millis(5 + dice.up_to(60)));
    }
    assert!(dump(&db) == expected);
    let step = moments.len().div_ceil(MOMENTS_MOST).max(1);
    let (mut whole, mut cut) = (0, 0);
    for (number, Moment { db, log_may_be_cut }) in moments.into_iter().enumerate().step_by(step) {
        let log = std::fs::metadata(wal(&db)).map_or(0, |m| m.len());
        if log_may_be_cut && log > 0 {
            let shorter = db.with_file_name(format!("cut-{number}.db"));
            std::fs::copy(&db, &shorter).unwrap();
            std::fs::copy(wal(&db), wal(&shorter)).unwrap();
            let length = dice.up_to(log);
            std::fs::OpenOptions::new().write(true).open(wal(&shorter)).unwrap().set_len(length).unwrap();
            let crops = [db.with_extension("crops"), shorter.with_extension("crops")];
            assert!(Command::new("cp").arg("-r").args(crops).status().unwrap().success());
            assert_goes_on(&shorter, &expected, &format!("moment {number}, {length} bytes of a log of {log}"));
            cut += 1;
        }
        assert_goes_on(&db, &expected, &format!("moment {number}"));
        whole += 1;
    }
    assert!(whole >= 5 && cut >= 3, "only {whole} moments, {cut} of them with a log that may be cut");
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
