//! A picture that kills the process, and processes that are killed over good pictures.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::dump::{assert_sound, dump, number, text};
use crate::support::pictures;
use crate::{CALL_MS, done, prepare, start, undisturbed, worker};

const POISON: &str = "CROPROW_POISON";

fn states(db: &Path, state: &str) -> i64 {
    number(db, &format!("SELECT count(*) FROM images WHERE '{state}' IN (detect_state, embed_state)"))
}

#[test]
fn a_picture_that_kills_its_worker_is_set_aside_at_the_second_start_and_all_others_are_done() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 500);
    let db = prepare(folder.path(), &files, "poisoned.db");
    let name = files[217].file_name().unwrap();
    let worker = || worker(&db).env(POISON, name).env(CALL_MS, "0").status().unwrap();
    assert_eq!(worker().signal(), Some(6), "the first start dies");
    assert!(worker().success(), "the second sees what it dies of");
    assert_eq!((done(&db), states(&db, "quarantined")), (499, 1));
    let told = text(
        &db,
        "SELECT path || ' ' || detect_code || ' ' || detect_message FROM images WHERE detect_state = 'quarantined'",
    );
    assert!(told.contains(name.to_str().unwrap()) && told.contains("killed_worker 3 processes died"), "{told}");
    assert_eq!(number(&db, "SELECT count(*) FROM suspects"), 0);
    assert_sound(&db);
}

#[test]
fn two_poisonous_pictures_are_told_apart_from_their_neighbours() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 60);
    for (from, to) in [(20, "poison-a.png"), (21, "poison-b.png")] {
        std::fs::rename(&files[from], folder.path().join(to)).unwrap();
    }
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    let db = prepare(folder.path(), &files, "poisoned.db");
    let worker = || worker(&db).env(POISON, "poison-").env(CALL_MS, "0").status().unwrap();
    assert!(!worker().success());
    assert!(worker().success());
    assert_eq!((done(&db), states(&db, "quarantined")), (58, 2));
}

#[test]
fn fifty_kills_over_good_pictures_set_none_aside() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 300);
    let expected = undisturbed(folder.path(), &files);
    let db = prepare(folder.path(), &files, "killed.db");
    let mut over_suspects = 0;
    for kill in 0..50 {
        let mut child = start(&db);
        // Some while suspects are worked on, some before, some after.
        let until = Instant::now() + Duration::from_millis(20 + 37 * (kill % 9));
        while Instant::now() < until && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        over_suspects += i64::from(number(&db, "SELECT count(*) FROM suspects") > 0);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_sound(&db);
    }
    assert!(over_suspects > 5, "only {over_suspects} kills met suspects");
    assert!(start(&db).wait().unwrap().success());
    assert_eq!(states(&db, "quarantined"), 0);
    assert_eq!(number(&db, "SELECT count(*) FROM suspects"), 0);
    assert_eq!(dump(&db), expected);
}

#[test]
fn a_child_does_not_outlive_its_parent() {
    let alive = |pid: u32| Command::new("kill").args(["-0", &pid.to_string()]).status().unwrap().success();
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 200);
    let db = prepare(folder.path(), &files, "orphan.db");
    let mut first = start(&db);
    while number(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL") == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    let mut parent = worker(&db).env(CALL_MS, "200").spawn().unwrap();
    let runs = || number(&db, "SELECT count(*) FROM runs WHERE ended_at IS NULL AND pid <> 0");
    let patience = Instant::now() + Duration::from_secs(30);
    while runs() == 0 {
        assert!(Instant::now() < patience, "the child never began");
        std::thread::sleep(Duration::from_millis(2));
    }
    let child = number(&db, "SELECT pid FROM runs ORDER BY id DESC LIMIT 1") as u32;
    assert_ne!(child, parent.id());
    parent.kill().unwrap();
    parent.wait().unwrap();
    while alive(child) {
        assert!(Instant::now() < patience, "the child lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}
