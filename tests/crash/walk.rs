//! Random walks: what people do with a database and what befalls it, in any order, through the program with real ONNX files. A
//! model of a few lines says which state every picture may be in after each step, and at the end the database equals that
//! of one undisturbed run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use croprow::fault::POINTS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use rusqlite::Connection;

use crate::support::dump::{assert_sound, dump, number};
use crate::support::{picture, root};

const MODELS: [&str; 6] =
    ["--detector", "tests/data/models/yolo-v8-tiny", "--embedder", "tests/data/models/tiny-tokens", "--device", "cpu"];

/// Of a fresh walk; more with `PROPTEST_CASES`.
const WALKS: u32 = 6;

const STEPS: std::ops::Range<usize> = 4..10;

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

/// Box thresholds that `select` is asked for; all above the floor of the candidates.
const THRESHOLDS: [&str; 4] = ["0.2", "0.3", "0.5", "0.7"];

#[derive(Clone, Debug)]
enum Step {
    /// More pictures, and files that are none.
    Add { good: u32, bad: u32 },
    /// All that is pending.
    Run,
    /// At most so many.
    Limited { rows: u32 },
    /// A run that aborts when it comes by that point for that time, if it does.
    Crash { point: &'static str, time: u32 },
    /// A run that is asked to stop, or killed, so many milliseconds after it began.
    Signal { word: &'static str, after_ms: u64 },
    /// A run on a disk that has room for so many more KiB in any file.
    FullDisk { kib: u64 },
    /// A run that another program keeps from writing for that time.
    Locked { for_ms: u64 },
    /// Failed rows are pending again.
    Retry,
    /// The files that are no pictures become some, and are added again.
    Mend,
    /// Another threshold for what is stored.
    Select { threshold: &'static str },
}

fn step() -> impl Strategy<Value = Step> {
    let crash = (prop::sample::select(POINTS.to_vec()), 1..6_u32).prop_map(|(point, time)| Step::Crash { point, time });
    let signal = (prop::sample::select(vec!["-TERM", "-INT", "-HUP", "-KILL"]), 0..120_u64)
        .prop_map(|(word, after_ms)| Step::Signal { word, after_ms });
    prop_oneof![
        2 => (0..12_u32, 0..3_u32).prop_map(|(good, bad)| Step::Add { good, bad }),
        2 => Just(Step::Run),
        1 => (1..9_u32).prop_map(|rows| Step::Limited { rows }),
        4 => crash,
        3 => signal,
        2 => (0..200_u64).prop_map(|kib| Step::FullDisk { kib }),
        1 => (50..600_u64).prop_map(|for_ms| Step::Locked { for_ms }),
        1 => Just(Step::Retry),
        1 => Just(Step::Mend),
        2 => prop::sample::select(THRESHOLDS.to_vec()).prop_map(|threshold| Step::Select { threshold }),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pending,
    Done,
    Failed,
}

/// What must become of a picture.
const fn fate(is_bad: bool) -> State {
    if is_bad { State::Failed } else { State::Done }
}

/// A database, its pictures, and what the model says of them.
struct Walk {
    folder: tempfile::TempDir,
    /// By name: whether it is no picture, and its state.
    pictures: BTreeMap<String, (bool, State)>,
    threshold: &'static str,
}

impl Walk {
    fn begin() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("photos")).unwrap();
        let mut walk = Self { folder, pictures: BTreeMap::new(), threshold: "0.3" };
        walk.add(12, 1);
        walk
    }

    fn photos(&self) -> PathBuf {
        self.folder.path().join("photos")
    }

    fn db(&self) -> PathBuf {
        self.folder.path().join("photos.db")
    }

    /// The program on this database. It runs in the project's root, as models are named from there.
    fn command(&self, word: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_croprow"));
        command.current_dir(root()).env_remove("ORT_DYLIB_PATH").env_remove("RUST_LOG");
        command.stdin(Stdio::null()).arg(word).arg(self.db());
        command
    }

    fn run(&self) -> Command {
        let mut command = self.command("run");
        command.args(MODELS).args(["--batch", "2", "--box-threshold", self.threshold]);
        command
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Add { good, bad } => self.add(*good, *bad),
            Step::Run => self.run_to_the_end(),
            Step::Limited { rows } => {
                let before = self.count(State::Pending);
                self.expect(self.run().args(["--limit", &rows.to_string()]), &[0, 2]);
                self.go_on();
                // Suspects come first, and do not count.
                assert!(self.count(State::Pending) <= before.saturating_sub(*rows as usize));
            }
            Step::Crash { point, time } => {
                let crashed = output(self.run().env("CROPROW_CRASH_AT", format!("{point}@{time}")));
                let aborted = crashed.status.signal() == Some(SIGABRT);
                // Where suspects waited, it was their process that aborted, and this ends as any run; or at once, if that process
                // had not begun with one yet.
                let ended = matches!(crashed.status.code(), Some(0 | 2 | 3));
                assert!(aborted || ended || said(&crashed).contains("before it began with one"), "{}", said(&crashed));
                // A good one that was alone in a process three times is set aside, by right.
                self.expect(self.command("retry").args(["--code", "killed_worker"]), &[0]);
                self.go_on();
            }
            Step::Signal { word, after_ms } => self.signal(word, *after_ms),
            Step::FullDisk { kib } => self.run_on_a_full_disk(*kib),
            Step::Locked { for_ms } => self.run_beside_a_writer(*for_ms),
            Step::Retry => {
                self.expect(&mut self.command("retry"), &[0]);
                self.pictures.values_mut().filter(|p| p.1 == State::Failed).for_each(|p| p.1 = State::Pending);
            }
            Step::Mend => self.mend(),
            Step::Select { threshold } => {
                // Before the first run there is nothing to select from.
                if self.expect(self.command("select").args(["--box-threshold", threshold]), &[0, 1]) == 0 {
                    self.threshold = threshold;
                }
                for (name, now) in self.states() {
                    let of = &mut self.pictures.get_mut(&name).unwrap().1;
                    assert!(now == *of || (*of, now) == (State::Done, State::Pending), "{name}: {of:?} became {now:?}");
                    *of = now;
                }
            }
        }
        self.check();
    }

    fn add(&mut self, good: u32, bad: u32) {
        for i in 0..good + bad {
            let number = self.pictures.len() as u32;
            let name = format!("{number:04}.png");
            let path = self.photos().join(&name);
            if i < good {
                picture(number, 40 + number % 23, 30 + number % 17).save(&path).unwrap();
            } else {
                std::fs::write(&path, format!("{number} is no picture")).unwrap();
            }
            self.pictures.insert(name, (i >= good, State::Pending));
        }
        self.expect(self.command("add").arg(self.photos()), &[0]);
    }

    fn run_to_the_end(&mut self) {
        let code = self.expect(&mut self.run(), &[0, 2]);
        self.has_ended(code);
    }

    /// Nothing is pending, and the exit code says how it went.
    fn has_ended(&mut self, code: i32) {
        self.pictures.values_mut().filter(|p| p.1 == State::Pending).for_each(|p| p.1 = fate(p.0));
        assert_eq!(code == 2, self.count(State::Failed) > 0, "the exit code is {code}");
        let running = "SELECT (SELECT count(*) FROM images WHERE token IS NOT NULL) + (SELECT count(*) FROM suspects)";
        assert_eq!(number(&self.db(), running), 0);
    }

    fn signal(&mut self, word: &str, after_ms: u64) {
        let mut child = self.run().stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        // The first line, or the end of it.
        said.read_line(&mut String::new()).unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        assert!(Command::new("kill").args([word, &child.id().to_string()]).status().unwrap().success());
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        let status = child.wait().unwrap();
        let stopped = match word {
            "-KILL" => status.signal() == Some(SIGKILL),
            "-INT" => ended_by(status, 2),
            "-HUP" => ended_by(status, 1),
            _ => ended_by(status, 15),
        };
        assert!(stopped || matches!(status.code(), Some(0 | 2)), "{word}: {status}: {rest}");
        self.go_on();
    }

    fn run_on_a_full_disk(&mut self, kib: u64) {
        let size = std::fs::metadata(self.db()).unwrap().len();
        let program = self.run();
        let mut limited = Command::new("bash");
        limited.current_dir(root()).stdin(Stdio::null());
        limited.args(["-c", &format!("ulimit -f {}; exec \"$0\" \"$@\"", size / 1024 + kib)]);
        limited.arg(program.get_program()).args(program.get_args());
        self.expect(&mut limited, &[0, 2, 3]);
        self.go_on();
    }

    fn run_beside_a_writer(&mut self, for_ms: u64) {
        let other = Connection::open(self.db()).unwrap();
        other.busy_timeout(Duration::from_secs(20)).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        let writer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(for_ms));
            other.execute_batch("ROLLBACK").unwrap();
        });
        self.run_to_the_end();
        writer.join().unwrap();
    }

    fn mend(&mut self) {
        for (name, (is_bad, state)) in self.pictures.iter_mut().filter(|(_, p)| p.0) {
            let number: u32 = name[..4].parse().unwrap();
            picture(number, 50, 40).save(self.folder.path().join("photos").join(name)).unwrap();
            (*is_bad, *state) = (false, State::Pending);
        }
        self.expect(self.command("add").arg(self.photos()), &[0]);
    }

    /// Some of what was pending has met its fate, and nothing else has changed.
    fn go_on(&mut self) {
        for (name, now) in self.states() {
            let (is_bad, of) = self.pictures.get_mut(&name).unwrap();
            let may = now == *of || (*of == State::Pending && now == fate(*is_bad));
            assert!(may, "{name}: {of:?} became {now:?}");
            *of = now;
        }
    }

    /// The database says what the model says.
    fn check(&self) {
        assert_sound(&self.db());
        let expected: BTreeMap<_, _> = self.pictures.iter().map(|(name, picture)| (name.clone(), picture.1)).collect();
        assert_eq!(self.states(), expected);
    }

    fn states(&self) -> BTreeMap<String, State> {
        let conn = Connection::open(self.db()).unwrap();
        let mut statement = conn.prepare("SELECT path, detect_state, embed_state FROM images").unwrap();
        let rows = statement.query_map([], |r| {
            let path = PathBuf::from(r.get::<_, String>(0)?);
            let words: [Option<String>; 2] = [r.get(1)?, r.get(2)?];
            let state = match words.each_ref().map(Option::as_deref) {
                [_, Some("done")] => State::Done,
                [Some("failed"), _] | [_, Some("failed")] => State::Failed,
                _ => State::Pending,
            };
            Ok((path.file_name().unwrap().to_str().unwrap().to_owned(), state))
        });
        rows.unwrap().map(Result::unwrap).collect()
    }

    fn count(&self, state: State) -> usize {
        self.pictures.values().filter(|picture| picture.1 == state).count()
    }

    #[track_caller]
    fn expect(&self, command: &mut Command, codes: &[i32]) -> i32 {
        let output = output(command);
        let code = output.status.code().filter(|code| codes.contains(code));
        code.unwrap_or_else(|| panic!("{}: {}", output.status, said(&output)))
    }

    /// The rest is done, and all is as if nothing had been.
    fn end(mut self) {
        self.run_to_the_end();
        self.check();
        self.expect(&mut self.command("verify"), &[0]);
        let eventful = dump(&self.db());
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", self.db().display()));
        }
        self.expect(self.command("add").arg(self.photos()), &[0]);
        self.expect(&mut self.run(), &[0, 2]);
        assert_eq!(eventful, dump(&self.db()));
    }
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// By the signal itself, or with the exit code that stands for it.
fn ended_by(status: ExitStatus, signal: i32) -> bool {
    let code = if signal == 2 { 130 } else { 143 };
    status.code() == Some(code) || status.signal() == Some(signal)
}

#[test]
fn whatever_is_done_to_a_database_in_whatever_order_it_ends_like_an_undisturbed_one() {
    let cases = std::env::var("PROPTEST_CASES").map_or(WALKS, |n| n.parse().unwrap());
    let config = Config { cases, max_shrink_iters: 20, failure_persistence: None, ..Config::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let walk = |steps: Vec<Step>| -> Result<(), TestCaseError> {
        let mut walk = Walk::begin();
        for step in &steps {
            walk.take(step);
        }
        walk.end();
        Ok(())
    };
    runner.run(&prop::collection::vec(step(), STEPS), walk).unwrap_or_else(|e| panic!("{e}"));
}
