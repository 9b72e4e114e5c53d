//! Rows that may have killed a worker, through the program: named, worked on by a child process, set aside at last.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::cli::{EMBEDDER, call, croprow, expect};
use crate::others::wait_for;
use crate::support::dump::{assert_sound, number};
use crate::support::picture;

const SIGABRT: i32 = 6;
const SIGINT: i32 = 2;

/// A database of so many pictures, one of them called `poison.png`, and a run that died over it.
fn died(folder: &Path, pictures: u32) -> PathBuf {
    let (db, photos) = (folder.join("photos.db"), folder.join("photos"));
    fs::create_dir(&photos).unwrap();
    for i in 1..pictures {
        picture(i, 64, 48).save(photos.join(format!("{i:03}.png"))).unwrap();
    }
    picture(0, 64, 48).save(photos.join("poison.png")).unwrap();
    expect(&call(&["add", db.to_str().unwrap(), photos.to_str().unwrap()]), 0);
    let first =
        run(&db).args(["--embedder", EMBEDDER, "--device", "cpu"]).env("CROPROW_POISON", "poison").output().unwrap();
    assert_eq!(first.status.signal(), Some(SIGABRT), "{}", String::from_utf8_lossy(&first.stderr));
    db
}

fn run(db: &Path) -> Command {
    let mut command = croprow();
    command.arg("run").arg(db);
    command
}

#[test]
fn a_photo_that_kills_the_program_is_named_and_set_aside_and_can_be_brought_back() {
    let folder = tempfile::tempdir().unwrap();
    let db = died(folder.path(), 60);
    let second = run(&db).env("CROPROW_POISON", "poison").output().unwrap();
    let said = expect(&second, 2);
    assert!(said.contains("were in the hands of a worker when it died"), "{said}");
    assert!(said.contains("1 failed") && said.contains("failed rows remain"), "{said}");
    assert!(said.contains("poison.png: set aside as killed_worker"), "{said}");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 59);
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE code = 'killed_worker'"), 1);
    assert_sound(&db);
    expect(&call(&["retry", db.to_str().unwrap(), "--code", "killed_worker"]), 0);
    expect(&run(&db).output().unwrap(), 0);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 60);
}

#[test]
fn rows_that_were_in_flight_at_a_kill_are_done_by_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let db = died(folder.path(), 40);
    let said = expect(&run(&db).output().unwrap(), 0);
    assert!(said.contains("a process of its own works on them first"), "{said}");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 40);
    assert_eq!(number(&db, "SELECT count(*) FROM suspects"), 0);
}

#[test]
fn a_signal_ends_the_child_that_works_on_suspects_too() {
    let folder = tempfile::tempdir().unwrap();
    let db = died(folder.path(), 40);
    let mut parent = run(&db).stderr(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(parent.stderr.take().unwrap());
    let mut lines = said.lines().map(|line| line.unwrap());
    assert!(lines.any(|line| line.contains("a process of its own works on them first")));
    // The child loads its model now, or is at work; it has to hear of the signal in either case.
    assert!(Command::new("kill").args(["-INT", &parent.id().to_string()]).status().unwrap().success());
    lines.for_each(drop);
    let ended = parent.wait().unwrap();
    assert!(ended.code() == Some(130) || ended.signal() == Some(SIGINT), "{ended}");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'quarantined'"), 0);
    assert_eq!(number(&db, "SELECT coalesce(sum(deaths), 0) FROM suspects"), 0);
    assert_sound(&db);
}

#[test]
fn suspects_that_wait_for_a_model_that_is_not_wanted_any_more_hold_nothing_up() {
    let folder = tempfile::tempdir().unwrap();
    let (db, photos) = (folder.path().join("photos.db"), folder.path().join("photos"));
    fs::create_dir(&photos).unwrap();
    for i in 0..12 {
        picture(i, 64, 48).save(photos.join(format!("{i:03}.png"))).unwrap();
    }
    expect(&call(&["add", db.to_str().unwrap(), photos.to_str().unwrap()]), 0);
    let both = ["--detector", "tests/data/models/yolo-v8-tiny", "--embedder", EMBEDDER, "--device", "cpu"];
    let crashed =
        run(&db).args(both).args(["--staged", "yes"]).env("CROPROW_CRASH_AT", "embed.called").output().unwrap();
    assert_eq!(crashed.status.signal(), Some(SIGABRT), "{}", String::from_utf8_lossy(&crashed.stderr));
    assert_eq!(
        number(&db, "SELECT count(*) FROM images WHERE detect_state = 'done'"),
        12,
        "only embeddings are missing"
    );
    let said = expect(&run(&db).args(["--embedder", "none"]).output().unwrap(), 0);
    assert!(said.contains("nothing is pending"), "{said}");
    let said = expect(&run(&db).args(["--embedder", EMBEDDER]).output().unwrap(), 0);
    assert!(said.contains("a process of its own works on them first"), "{said}");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 12);
    assert_eq!(number(&db, "SELECT count(*) FROM suspects"), 0);
    assert_sound(&db);
}

#[test]
fn a_process_for_suspects_that_does_not_answer_is_ended_by_the_second_signal() {
    let folder = tempfile::tempdir().unwrap();
    let db = died(folder.path(), 20);
    let mut parent = run(&db).env("CROPROW_STOP_AT", "decode.begun").stderr(Stdio::null()).spawn().unwrap();
    wait_for(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL");
    let signal = || assert!(Command::new("kill").args(["-INT", &parent.id().to_string()]).status().unwrap().success());
    // The first may come while the second is on its way, and is then one with it.
    signal();
    std::thread::sleep(Duration::from_millis(300));
    signal();
    let began = Instant::now();
    let ended = parent.wait().unwrap();
    assert!(ended.code() == Some(130) || ended.signal() == Some(SIGINT), "{ended}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(number(&db, "SELECT coalesce(sum(deaths), 0) FROM suspects"), 0, "it died of the signal");
    expect(&run(&db).output().unwrap(), 0);
    assert_sound(&db);
}

#[test]
fn a_worker_waits_for_rows_that_another_has_in_its_hands_and_does_them_if_it_dies() {
    let folder = tempfile::tempdir().unwrap();
    let db = died(folder.path(), 20);
    expect(&run(&db).output().unwrap(), 0);
    let again = ["--stale", "redo", "--embedder", "tests/data/models/dinov2-tiny"];
    let mut first = run(&db).args(again).env("CROPROW_STOP_AT", "decode.begun").stderr(Stdio::null()).spawn().unwrap();
    wait_for(&db, "SELECT count(*) = 20 FROM images WHERE token IS NOT NULL");
    let mut second = run(&db).args(again).stderr(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(second.stderr.take().unwrap());
    let mut lines = said.lines().map(|line| line.unwrap());
    assert!(lines.any(|line| line.contains("waiting for 20 images")));
    first.kill().unwrap();
    first.wait().unwrap();
    lines.for_each(drop);
    assert!(second.wait().unwrap().success());
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 20);
    assert_sound(&db);
}
