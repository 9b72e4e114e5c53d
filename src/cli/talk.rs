//! Everything that leaves the program for people: results on stdout, talk, errors and the log on stderr. Nothing is
//! written past this file, so that no name of a file and no words of a model or of SQLite steer a terminal.

use std::collections::HashMap;
use std::io::{self, Write};
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use croprow::error::Error;
use croprow::printable;
use log::{Level, LevelFilter, Record};
use serde_json::Value;

/// Lines of one kind within [`BURST_TIME`]; those that follow are counted and not written. A folder that vanished must
/// not fill a disk with its log: the database has every failure.
const BURST_LINES: u64 = 5;

/// After this time lines of that kind are written again.
const BURST_TIME: Duration = Duration::from_secs(10);

/// `--quiet`: talk is left out, errors are not.
static QUIET: AtomicBool = AtomicBool::new(false);

static BURSTS: LazyLock<Mutex<Bursts>> = LazyLock::new(Mutex::default);

/// Says from now on what `verbose` and `quiet` ask for. `RUST_LOG` goes before both.
pub(super) fn start(verbose: u8, quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::Error,
        (_, 0) => LevelFilter::Warn,
        (_, 1) => LevelFilter::Info,
        _ => LevelFilter::Debug,
    };
    env_logger::Builder::new()
        .filter_level(level)
        .parse_default_env()
        .format(|out, record| match admitted(record) {
            Some(text) => writeln!(out, "{text}"),
            None => Ok(()),
        })
        .init();
    std::panic::set_hook(Box::new(panicked));
}

/// Talk is left out from now on.
pub(crate) fn hush() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Tells of the lines that were left out.
pub(super) fn end() {
    for text in bursts(Bursts::rest) {
        complain(&text);
    }
}

/// Talk goes to stderr, unless `--quiet` forbids it.
pub(crate) fn say(text: &str) {
    if !QUIET.load(Ordering::Relaxed) {
        complain(text);
    }
}

/// Errors go to stderr. A closed terminal is no reason to fail.
pub(super) fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", printable::lines(text));
}

/// Results go to stdout; a reader that has gone away has seen enough.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    write_out(&printable::lines(text))
}

/// One JSON object in one line.
pub(crate) fn print_json(value: &Value) -> Result<(), Error> {
    write_out(&format!("{}\n", printable::json(value)))
}

/// An empty screen, the cursor at its top.
pub(crate) fn clear_screen() -> Result<(), Error> {
    write_out("\x1b[2J\x1b[H")
}

fn write_out(text: &str) -> Result<(), Error> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::System(format!("cannot write to stdout: {e}"))),
        _ => Ok(()),
    }
}

/// The line of a record; `None` where there were many of its kind lately.
fn admitted(record: &Record<'_>) -> Option<String> {
    let text =
        format!("croprow: {}: {}", record.level().as_str().to_lowercase(), printable::line(&record.args().to_string()));
    if record.level() > Level::Info {
        // Asked for.
        return Some(text);
    }
    let site = Site { file: record.file_static().unwrap_or_default(), line: record.line().unwrap_or_default() };
    bursts(|bursts| bursts.admit(site, text, Instant::now()))
}

fn bursts<T>(work: impl FnOnce(&mut Bursts) -> T) -> T {
    work(&mut BURSTS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The place in the source that a line comes from: lines of one place are of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Site {
    file: &'static str,
    line: u32,
}

/// How many lines of each kind there were lately.
#[derive(Debug, Default)]
struct Bursts(HashMap<Site, Burst>);

#[derive(Debug)]
struct Burst {
    began: Instant,
    lines: u64,
    left_out: u64,
    last: String,
}

impl Bursts {
    fn admit(&mut self, site: Site, text: String, now: Instant) -> Option<String> {
        let fresh = || Burst { began: now, lines: 0, left_out: 0, last: String::new() };
        let burst = self.0.entry(site).or_insert_with(fresh);
        let before = if now.duration_since(burst.began) >= BURST_TIME { burst.left_out } else { 0 };
        if now.duration_since(burst.began) >= BURST_TIME {
            *burst = fresh();
        }
        burst.lines += 1;
        if burst.lines > BURST_LINES {
            burst.left_out += 1;
            burst.last = text;
            return None;
        }
        Some(if before == 0 { text } else { format!("{text} (and {before} like it before)") })
    }

    fn rest(&mut self) -> Vec<String> {
        let left = |burst: Burst| {
            (burst.left_out > 0).then(|| format!("{} (and {} in all like it)", burst.last, burst.left_out))
        };
        std::mem::take(&mut self.0).into_values().filter_map(left).collect()
    }
}

/// A panic in a decoder becomes a row's code, and one in a stage ends the run with an error; here its place is told.
fn panicked(info: &PanicHookInfo<'_>) {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current().name().unwrap_or("unnamed").to_owned();
    let level = if thread.starts_with("decode-") { Level::Warn } else { Level::Error };
    log::log!(level, "a panic in the thread {thread} at {place}: {}", text.unwrap_or("no message"));
    let trace = std::backtrace::Backtrace::capture();
    if trace.status() == std::backtrace::BacktraceStatus::Captured {
        complain(&trace.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_lines_is_cut_short_and_counted() {
        let (mut bursts, began) = (Bursts::default(), Instant::now());
        let site = Site { file: "a.rs", line: 1 };
        let mut admit = |site, after_s| bursts.admit(site, "x".to_owned(), began + Duration::from_secs(after_s));
        for _ in 0..BURST_LINES {
            assert_eq!(admit(site, 0).as_deref(), Some("x"));
        }
        for _ in 0..7 {
            assert_eq!(admit(site, 1), None);
        }
        assert_eq!(admit(Site { line: 2, ..site }, 1).as_deref(), Some("x"), "another kind is not held back");
        assert_eq!(admit(site, 11).as_deref(), Some("x (and 7 like it before)"));
        for _ in 0..BURST_LINES {
            admit(site, 12);
        }
        assert_eq!(bursts.rest(), ["x (and 1 in all like it)"]);
        assert!(bursts.rest().is_empty());
    }
}
