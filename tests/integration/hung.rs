//! Files that give no answer, through the program: the thread that hangs is left behind, its image fails, and nothing else
//! is held up.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::cli::{call, croprow, expect, folder};
use crate::support::dump::{assert_sound, number, text};
use crate::support::picture;

/// Where a run says nothing else.
const SETTINGS: [(&str, &str); 5] = [
    ("--detector", "tests/data/models/yolo-v8-tiny"),
    ("--embedder", "tests/data/models/tiny-tokens"),
    ("--device", "cpu"),
    ("--threads", "2"),
    ("--decode-limit", "1"),
];

const DECODE: &str = "CROPROW_HANG";
const PROBE: &str = "CROPROW_HANG_PROBE";
const AGAIN: &str = "CROPROW_HANG_AGAIN";

/// Whoever takes longer hangs itself.
const PATIENCE: Duration = Duration::from_secs(60);

/// `count` pictures in a database of their own; the first ones, as a worker meets them, have these names.
fn photos(count: u32, names: &[&str]) -> (tempfile::TempDir, String) {
    let (folder, db, photos) = folder(count);
    for (i, name) in names.iter().enumerate() {
        fs::rename(format!("{photos}/{i:05}.png"), format!("{photos}/000-{name}.png")).unwrap();
    }
    expect(&call(&["add", &db, &photos]), 0);
    (folder, db)
}

fn command(db: &str, more: &[&str]) -> Command {
    let mut command = croprow();
    command.args(["run", db]).args(more);
    for (flag, value) in SETTINGS.iter().filter(|(flag, _)| !more.contains(flag)) {
        command.args([flag, value]);
    }
    command
}

/// The output of a process that ends by itself.
#[track_caller]
fn output(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > PATIENCE {
            child.kill().unwrap();
            let said = child.wait_with_output().unwrap();
            panic!("it hangs: {}", String::from_utf8_lossy(&said.stderr));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn images(db: &str, condition: &str) -> i64 {
    number(Path::new(db), &format!("SELECT count(*) FROM images WHERE {condition}"))
}

fn done(db: &str) -> i64 {
    images(db, "embed_state = 'done'")
}

fn timed_out(db: &str) -> i64 {
    images(db, "'timed_out' IN (detect_code, embed_code) AND 'failed' IN (detect_state, embed_state)")
}

#[test]
fn a_file_that_gives_no_answer_fails_alone_and_the_run_ends_by_itself() {
    for (place, more) in [(DECODE, [].as_slice()), (PROBE, &[]), (DECODE, &["--memory", "1", "--batch", "8"])] {
        let (_folder, db) = photos(30, &["hangs"]);
        let output = output(command(&db, more).arg("--json").env(place, "hangs"));
        let said = expect(&output, 2);
        assert!(said.contains("000-hangs.png: no answer for 1 s: timed_out"), "{said}");
        assert!(said.contains("complete: 29 done, 1 failed"), "{said}");
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((summary["done"].as_i64(), summary["exit_code"].as_i64()), (Some(29), Some(2)));
        assert_eq!((done(&db), timed_out(&db), images(&db, "token IS NOT NULL")), (29, 1, 0), "{said}");
        let message = text(Path::new(&db), "SELECT code || ' ' || message FROM failures");
        assert!(message.contains("timed_out") && message.contains("000-hangs.png: no answer within 1 s"), "{message}");
        assert_eq!(text(Path::new(&db), "SELECT ended_how || ' ' || exit_code FROM runs").trim(), "complete 2");
        assert_sound(Path::new(&db));
        // It answers again, and the limit is remembered.
        expect(&call(&["retry", &db, "--code", "timed_out"]), 0);
        expect(&call(&["run", &db]), 0);
        assert_eq!(done(&db), 30);
        assert_eq!(
            number(Path::new(&db), "SELECT count(*) FROM runs WHERE settings LIKE '%\"decode_limit_s\":1,%'"),
            2
        );
    }
}

#[test]
fn where_all_threads_hang_the_run_asks_for_a_restart_which_does_the_rest() {
    for place in [DECODE, PROBE] {
        let (_folder, db) = photos(30, &["hangs-a", "hangs-b"]);
        let said = expect(&output(command(&db, &[]).env(place, "hangs")), 75);
        assert!(said.contains("all 2 threads hang") && said.contains("000-hangs-a.png"), "{said}");
        assert!(said.contains("start the same command again"), "{said}");
        assert_eq!((timed_out(&db), images(&db, "token IS NOT NULL")), (2, 0), "{said}");
        assert_eq!(done(&db) + images(&db, "'pending' IN (detect_state, embed_state)"), 28, "{said}");
        assert_eq!(images(&db, "detect_attempts > 1"), 0, "released rows were claimed again");
        assert_sound(Path::new(&db));
        expect(&output(croprow().args(["run", &db]).env(place, "hangs")), 2);
        assert_eq!((done(&db), timed_out(&db)), (28, 2));
        assert_sound(Path::new(&db));
    }
}

#[test]
fn the_only_thread_marks_its_image_before_a_restart_and_needs_none_after_the_last() {
    let (_folder, db) = photos(6, &["hangs"]);
    let said = expect(&output(command(&db, &["--threads", "1"]).env(DECODE, "hangs")), 75);
    assert_eq!((timed_out(&db), images(&db, "token IS NOT NULL")), (1, 0), "{said}");
    expect(&output(croprow().args(["run", &db]).env(DECODE, "hangs")), 2);
    assert_eq!((done(&db), timed_out(&db)), (5, 1));
    let (_folder, db) = photos(1, &["hangs"]);
    expect(&output(command(&db, &["--threads", "1"]).env(PROBE, "hangs")), 2);
    assert_eq!(timed_out(&db), 1);
}

#[test]
fn threads_that_come_back_work_on_and_what_they_bring_is_dropped() {
    for place in [DECODE, PROBE] {
        let (_folder, db) = photos(30, &["late-a", "late-b"]);
        // Both are written off after a second to a second and a half, and the run would end two seconds later.
        let said = expect(&output(command(&db, &[]).env(place, "late").env("CROPROW_HANG_MS", "2500")), 2);
        assert_eq!(
            (said.matches("its thread is written off").count(), done(&db), timed_out(&db)),
            (2, 28, 2),
            "{said}"
        );
        assert!(said.contains("complete: 28 done, 2 failed") && !said.contains("left behind"), "{said}");
        assert_sound(Path::new(&db));
    }
}

/// Photos so large that models see them scaled.
fn large_photos() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..8 {
        let photo = picture(number, 1600, 1200);
        photo.save(folder.path().join(if number == 3 { "hangs.jpg".into() } else { format!("{number}.jpg") })).unwrap();
    }
    let db = folder.path().join("photos.db").to_str().unwrap().to_owned();
    expect(&call(&["add", &db, folder.path().to_str().unwrap()]), 0);
    (folder, db)
}

#[test]
fn a_second_decode_that_hangs_fails_its_image_and_no_other() {
    // For the files of its crops: the stage that the row was claimed for fails.
    let (folder, db) = large_photos();
    let crops = folder.path().join("crops");
    let more = ["--crops", crops.to_str().unwrap(), "--embedder", "none", "--on-empty", "whole"];
    let said = expect(&output(command(&db, &more).env(AGAIN, "hangs")), 2);
    assert_eq!((images(&db, "detect_state = 'done'"), timed_out(&db)), (7, 1), "{said}");
    assert_sound(Path::new(&db));
    // For small regions: what was detected is kept.
    let (_folder, db) = large_photos();
    let said = expect(&output(command(&db, &["--box-threshold", "0.05"]).env(AGAIN, "hangs")), 2);
    assert_eq!((done(&db), images(&db, "detect_state = 'done'")), (7, 8), "{said}");
    assert_eq!(images(&db, "embed_state = 'failed' AND embed_code = 'timed_out' AND path LIKE '%hangs.jpg'"), 1);
    assert_sound(Path::new(&db));
}

#[test]
fn a_signal_ends_a_run_that_hangs_and_its_row_is_pending_again() {
    for limit in ["300", "1"] {
        let (_folder, db) = photos(10, &["hangs"]);
        let mut command = command(&db, &["--decode-limit", limit]);
        let child = command.env(DECODE, "png").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        let began = Instant::now();
        while images(&db, "token IS NOT NULL") == 0 {
            if began.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("it does nothing");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Claimed is not begun: a stop in between gives all rows back at once.
        std::thread::sleep(Duration::from_secs(1));
        let asked = Instant::now();
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        let said = expect(&child.wait_with_output().unwrap(), 143);
        assert!(asked.elapsed() < Duration::from_secs(11), "took {:?}", asked.elapsed());
        assert_eq!(images(&db, "token IS NOT NULL"), 0, "{said}");
        let hang = if limit == "1" { 2 } else { 0 };
        assert_eq!((timed_out(&db), images(&db, "detect_state = 'pending'")), (hang, 10 - hang), "{said}");
    }
}

#[test]
fn a_limit_counts_what_timed_out() {
    let (_folder, db) = photos(30, &["hangs"]);
    let said = expect(&output(command(&db, &["--limit", "5"]).env(DECODE, "hangs")), 2);
    assert_eq!((done(&db), timed_out(&db), images(&db, "detect_state = 'pending'")), (4, 1, 25), "{said}");
}

#[test]
fn a_staged_run_asks_for_a_restart_between_its_passes_only() {
    let (_folder, db) = photos(12, &["hangs"]);
    let said = expect(&output(command(&db, &["--staged"]).env(PROBE, "hangs")), 75);
    assert!(said.contains("the pass of embed cannot begin"), "{said}");
    assert_eq!((images(&db, "detect_state = 'done'"), timed_out(&db)), (11, 1), "{said}");
    expect(&output(croprow().args(["run", &db]).env(PROBE, "hangs")), 2);
    assert_eq!((done(&db), timed_out(&db)), (11, 1));
}

#[test]
fn a_suspect_that_hangs_fails_in_its_child_and_its_parent_goes_on() {
    for threads in ["2", "1"] {
        let (_folder, db) = photos(20, &["hangs"]);
        let died = output(command(&db, &["--threads", threads]).env("CROPROW_POISON", "hangs"));
        assert_eq!(died.status.code(), None, "it was to be killed");
        let said = expect(&output(croprow().args(["run", &db]).env(DECODE, "hangs")), 2);
        assert!(said.contains("a process of its own works on them first"), "{said}");
        assert_eq!((done(&db), timed_out(&db)), (19, 1), "{said}");
        assert_eq!(number(Path::new(&db), "SELECT count(*) FROM suspects"), 0);
        assert_sound(Path::new(&db));
    }
}
