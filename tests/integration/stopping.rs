//! How the program stops: at a time, by signals, and with which exit code.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::{call, croprow, expect, folder};
use crate::support::dump::{assert_sound, number};
use crate::support::{picture, root};

const MODELS: [&str; 4] =
    ["--detector", "tests/data/models/yolo-v8-tiny", "--embedder", "tests/data/models/tiny-tokens"];

/// A database of `rows` rows that all name one picture, each with a key of its own.
fn many(rows: usize) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let photo = folder.path().join("photo.png");
    picture(1, 60, 40).save(&photo).unwrap();
    let list = folder.path().join("list.csv");
    let lines = (0..rows).map(|n| format!("{},{n}\n", photo.display()));
    fs::write(&list, format!("path,key\n{}", lines.collect::<String>())).unwrap();
    let db = folder.path().join("photos.db").to_str().unwrap().to_owned();
    expect(&call(&["add", &db, "--from", list.to_str().unwrap()]), 0);
    (folder, db)
}

fn states(db: &str, condition: &str) -> i64 {
    number(Path::new(db), &format!("SELECT count(*) FROM images WHERE {condition}"))
}

/// The time of day that many seconds from now, where clocks show UTC.
fn clock(after_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + after_s;
    format!("{:02}:{:02}:{:02}", now / 3600 % 24, now / 60 % 60, now % 60)
}

/// More rows than the small models do in the time that a test has.
const ENDLESS: usize = 150_000;

#[test]
fn at_the_time_of_until_a_run_stops_with_0_and_the_rest_is_pending() {
    let (_folder, db) = many(ENDLESS);
    let until = clock(4);
    let mut run = croprow();
    run.args(["run", &db, "--device", "cpu", "--batch", "1", "--json", "--until", &until])
        .args(MODELS)
        .env("TZ", "UTC");
    let began = Instant::now();
    let said = expect(&run.output().unwrap(), 0);
    assert!(began.elapsed() < Duration::from_secs(60), "took {:?}: {said}", began.elapsed());
    let at = format!("{} UTC", &until[..5]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.iter().any(|l| l.starts_with("detect and embed") && l.ends_with(&at)), "the first line: {said}");
    let stopped = lines.iter().find(|l| l.starts_with("stopped at ")).unwrap_or_else(|| panic!("{said}"));
    assert!(stopped.contains(&format!("{at} (--until): ")), "{said}");
    let json = lines.iter().find(|l| l.starts_with('{')).unwrap();
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!((json["ended"].as_str(), json["stopped_by"].as_str()), (Some("stopped"), Some("until")));
    assert_eq!(states(&db, "token IS NOT NULL"), 0, "nothing is left running");
    assert!(states(&db, "detect_state = 'pending'") > 0);
    assert_eq!(Some(states(&db, "embed_state = 'done'")), json["done"].as_i64());
    assert_sound(Path::new(&db));
    let past = expect(&call(&["run", &db, "--until", "2001-01-01T00:00"]), 1);
    assert!(past.contains("--until 2001-01-01T00:00:00 is past"), "{past}");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 1, "nothing was begun");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs WHERE settings LIKE '%until%'"), 0, "not remembered");
}

#[test]
fn at_the_time_of_until_processes_that_work_on_suspects_stop_too() {
    let (_folder, db) = many(30_000);
    let first = call(&[&["run", &db, "--device", "cpu", "--batch", "1", "--limit", "1"], &MODELS[..]].concat());
    expect(&first, 0);
    let conn = rusqlite::Connection::open(&db).unwrap();
    conn.execute(
        "INSERT INTO suspects (image_id, run_id, at) SELECT id, 1, 0 FROM images WHERE embed_state IS NULL",
        [],
    )
    .unwrap();
    drop(conn);
    let until = clock(4);
    let mut run = croprow();
    run.args(["run", &db, "--json", "--until", &until]).env("TZ", "UTC");
    let began = Instant::now();
    let said = expect(&run.output().unwrap(), 0);
    assert!(began.elapsed() < Duration::from_secs(60), "took {:?}: {said}", began.elapsed());
    assert!(
        said.contains("stopped at ") && said.contains("that may have killed a worker wait, and what was"),
        "{said}"
    );
    let json: serde_json::Value = serde_json::from_str(said.lines().find(|l| l.starts_with('{')).unwrap()).unwrap();
    assert_eq!((json["ended"].as_str(), json["stopped_by"].as_str()), (Some("stopped"), Some("until")));
    assert_eq!(states(&db, "token IS NOT NULL"), 0, "nothing is left running");
    assert!(states(&db, "embed_state = 'done'") > 1, "the child worked until then");
    assert!(number(Path::new(&db), "SELECT count(*) FROM suspects WHERE alone = 0 AND deaths = 0") > 0);
    assert_sound(Path::new(&db));
}

/// A child whose words are waited for, and that is not waited for in vain.
struct Worker {
    child: Child,
    words: Lines<BufReader<ChildStderr>>,
    said: String,
    ended: Arc<AtomicBool>,
}

/// A child that lives longer hangs, and is killed so that its test fails.
const PATIENCE: Duration = Duration::from_secs(180);

impl Worker {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let words = BufReader::new(child.stderr.take().unwrap()).lines();
        let ended = Arc::new(AtomicBool::new(false));
        let (pid, over) = (pid_of(&child), Arc::clone(&ended));
        std::thread::spawn(move || {
            let began = Instant::now();
            while !over.load(Ordering::SeqCst) {
                if began.elapsed() > PATIENCE {
                    let _ = kill_process(pid, Signal::KILL);
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Self { child, words, said: String::new(), ended }
    }

    /// Reads until a line holds `words`.
    fn wait_for(&mut self, words: &str) {
        for line in self.words.by_ref() {
            let line = line.unwrap();
            self.said += &format!("{line}\n");
            if line.contains(words) {
                return;
            }
        }
        panic!("it ended without saying `{words}`: {}", self.said);
    }

    fn signal(&self, signal: Signal) -> Instant {
        kill_process(pid_of(&self.child), signal).unwrap();
        Instant::now()
    }

    /// Its exit code and all that it said.
    fn end(mut self) -> (i32, String) {
        for line in self.words.by_ref() {
            self.said += &format!("{}\n", line.unwrap());
        }
        let status = self.child.wait().unwrap();
        self.ended.store(true, Ordering::SeqCst);
        (status.code().unwrap_or_else(|| panic!("{status}: {}", self.said)), self.said)
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap()
}

/// What a stop may take.
const BOUND: Duration = Duration::from_secs(10);

#[test]
fn each_signal_stops_softly_with_its_code_and_nothing_is_left_running() {
    let (_folder, db) = many(ENDLESS);
    for (n, (signal, wanted)) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 143)].into_iter().enumerate() {
        let mut run = Worker::start(croprow().args(["-v", "run", &db, "--device", "cpu", "--batch", "1"]).args(MODELS));
        run.wait_for("the first outcomes are stored");
        let asked = run.signal(signal);
        let (code, said) = run.end();
        assert!(asked.elapsed() < BOUND, "took {:?}: {said}", asked.elapsed());
        assert_eq!(code, wanted, "{said}");
        assert!(said.contains("stopping: ") && said.contains("a second signal leaves at once"), "{said}");
        assert!(said.contains("stopped: ") && said.contains("rows in flight are pending again"), "{said}");
        assert_eq!(states(&db, "token IS NOT NULL"), 0);
        let sql = format!(
            "SELECT count(*) FROM runs WHERE ended_how = 'stopped' AND exit_code = {wanted} AND id = {}",
            n + 1
        );
        assert_eq!(number(Path::new(&db), &sql), 1);
    }
    assert!(states(&db, "embed_state = 'done'") > 0 && states(&db, "detect_state = 'pending'") > 0);
    assert_sound(Path::new(&db));
}

#[test]
fn a_closed_terminal_does_not_stop_what_nohup_started() {
    let (_folder, db) = many(ENDLESS);
    let program = format!(
        "trap '' HUP; exec {} -v run {db} --device cpu --batch 1 {}",
        env!("CARGO_BIN_EXE_croprow"),
        MODELS.join(" ")
    );
    let mut run = Worker::start(Command::new("sh").current_dir(root()).args(["-c", &program]));
    run.wait_for("the first outcomes are stored");
    run.signal(Signal::HUP);
    run.signal(Signal::TERM);
    let (code, said) = run.end();
    assert_eq!(code, 143, "{said}");
    assert!(said.contains("stopped: "), "the second signal was the first that counted: {said}");
}

const HANGS_ON_WHITE: [&str; 2] = ["--embedder", "tests/data/models/hangs-on-white"];

/// Eight pictures; the model of these tests counts for hours where one is white, which the fifth is.
fn with_white() -> (tempfile::TempDir, String) {
    let (folder, db, photos) = folder(8);
    image::RgbImage::from_pixel(20, 20, image::Rgb([255; 3])).save(Path::new(&photos).join("00004.png")).unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    (folder, db)
}

/// Starts on them, and returns when the white one is the only one that has not ended.
fn run_into_white(db: &str) -> Worker {
    let args = ["run", db, "--device", "cpu", "--threads", "2", "--batch", "1"];
    let mut run = Worker::start(croprow().arg("-v").args(args).args(HANGS_ON_WHITE));
    run.wait_for("the first outcomes are stored");
    while states(db, "embed_state = 'done'") < 7 {
        std::thread::yield_now();
    }
    run
}

#[test]
fn a_call_that_does_not_end_is_ended_within_the_bound_and_its_row_released() {
    let (_folder, db) = with_white();
    let run = run_into_white(&db);
    let asked = run.signal(Signal::TERM);
    let (code, said) = run.end();
    assert!(asked.elapsed() < BOUND, "took {:?}: {said}", asked.elapsed());
    assert!(asked.elapsed() > Duration::from_secs(5), "it was not in the call: {said}");
    assert_eq!(code, 143, "{said}");
    assert!(
        said.contains("stopped: 7 done, 0 failed") && said.contains("1 rows in flight are pending again"),
        "{said}"
    );
    assert_eq!(states(&db, "embed_state = 'pending' AND token IS NULL AND embed_attempts = 1"), 1);
    assert_sound(Path::new(&db));
}

#[test]
fn a_second_signal_leaves_at_once_and_the_database_is_sound() {
    let (_folder, db) = with_white();
    let mut run = run_into_white(&db);
    run.signal(Signal::TERM);
    run.wait_for("stopping: ");
    let asked = run.signal(Signal::INT);
    let (code, said) = run.end();
    assert!(asked.elapsed() < Duration::from_secs(3), "took {:?}: {said}", asked.elapsed());
    assert_eq!(code, 130, "{said}");
    assert_sound(Path::new(&db));
    assert_eq!(states(&db, "embed_state = 'done'"), 7);
    let said = expect(&call(&["run", &db, "--where", "path NOT LIKE '%00004.png'"]), 0);
    assert!(said.contains("run 1 ended without saying so; its 1 rows in flight are pending again"), "{said}");
    assert_sound(Path::new(&db));
}

#[test]
fn a_signal_while_models_load_leaves_at_once_and_nothing_was_begun() {
    let (_folder, db, photos) = folder(3);
    expect(&call(&["add", &db, &photos]), 0);
    for (signal, wanted) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 143)] {
        let args = ["-v", "run", &db, "--device", "cpu", "--embedder", "tests/data/models/hangs"];
        let mut run = Worker::start(croprow().args(args));
        run.wait_for("loading models");
        let asked = run.signal(signal);
        let (code, said) = run.end();
        assert!(asked.elapsed() < Duration::from_secs(3), "took {:?}: {said}", asked.elapsed());
        assert_eq!(code, wanted, "{said}");
        assert!(said.contains("ended by a signal"), "{said}");
    }
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 0);
    assert_eq!(states(&db, "token IS NULL"), 3);
    assert_sound(Path::new(&db));
}

#[test]
fn a_signal_while_rows_are_added_keeps_the_chunks_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("photos.db").to_str().unwrap().to_owned();
    // What is written in one transaction, and one more.
    let lines: String = (0..200_001).map(|n| format!("/photos/{n}.jpg\n")).collect();
    let mut add = Worker::start(croprow().args(["-v", "add", &db, "--from", "-"]).stdin(Stdio::piped()));
    let mut stdin = add.child.stdin.take().unwrap();
    stdin.write_all(lines.as_bytes()).unwrap();
    stdin.flush().unwrap();
    add.wait_for("200000 rows are stored");
    let asked = add.signal(Signal::INT);
    let (code, said) = add.end();
    assert_eq!(code, 130, "{said}");
    assert!(asked.elapsed() < Duration::from_secs(3) && said.contains("the same command goes on"), "{said}");
    assert_eq!(states(&db, "1"), 200_000);
    assert_sound(Path::new(&db));
    drop(stdin);
    let list = folder.path().join("list.txt");
    fs::write(&list, lines).unwrap();
    let said = expect(&call(&["add", &db, "--from", list.to_str().unwrap()]), 0);
    assert!(said.contains("1 new") && said.contains("200000 already there"), "{said}");
}

#[test]
fn the_limit_of_open_files_is_raised_as_far_as_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("photos.db");
    let program = format!(
        "ulimit -Sn 64 && ulimit -Hn 512 && exec {} -v add {} --from -",
        env!("CARGO_BIN_EXE_croprow"),
        db.display()
    );
    let mut add = Worker::start(Command::new("sh").args(["-c", &program]).stdin(Stdio::piped()));
    add.wait_for("reading the sources");
    let limits = fs::read_to_string(format!("/proc/{}/limits", add.child.id())).unwrap();
    let line = limits.lines().find(|l| l.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().skip(3).take(2).collect::<Vec<_>>(), ["512", "512"], "{line}");
    drop(add.child.stdin.take());
    assert_eq!(add.end().0, 0);
}

#[test]
fn a_model_that_hangs_when_it_is_loaded_between_two_passes_is_left_within_the_bound() {
    let (_folder, db, photos) = folder(3);
    expect(&call(&["add", &db, &photos]), 0);
    let args = ["run", &db, "--device", "cpu", "--staged", "--detector", MODELS[1]];
    let run = Worker::start(croprow().args(args).args(["--embedder", "tests/data/models/hangs"]));
    while states(&db, "detect_state = 'done'") < 3 {
        std::thread::sleep(Duration::from_millis(20));
    }
    // It is silent for no longer than between two heartbeats: the database is not kept by whoever loads.
    let beats = || number(Path::new(&db), "SELECT CAST(1000 * max(heartbeat_at) AS INTEGER) FROM runs");
    let (began, first) = (Instant::now(), beats());
    while beats() < first + 5_000 {
        assert!(began.elapsed() < Duration::from_secs(60), "it fell silent");
        std::thread::sleep(Duration::from_millis(100));
    }
    let asked = run.signal(Signal::TERM);
    let (code, said) = run.end();
    assert!(asked.elapsed() < BOUND, "took {:?}: {said}", asked.elapsed());
    assert_eq!(code, 143, "{said}");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs WHERE ended_how = 'stopped' AND exit_code = 143"), 1);
    assert_sound(Path::new(&db));
}
