//! Named points, for tests: the process aborts or stops where a test says so. Not compiled into a build without the feature
//! `faults`, where [`point`] is nothing.

/// Every crash point on the way of a row, in its order. A test goes through all of them.
pub const POINTS: [&str; 19] = [
    "add.stored",
    "run.begun",
    "settle.chunk",
    "read.claimed",
    "decode.begun",
    "decode.done",
    "detect.called",
    "crop.cut",
    "crop.file_written",
    "crop.file_named",
    "embed.called",
    "commit.begun",
    "commit.stored",
    "commit.committed",
    "heartbeat.written",
    "release.released",
    "run.ended",
    "rescue.remembered",
    "rescue.closed",
];

/// The process aborts at `NAME`, or at `NAME@N` when it comes by for the Nth time.
#[cfg(feature = "faults")]
const CRASH_AT: &str = "CROPROW_CRASH_AT";

/// The same, and the process stops until somebody lets it go on.
#[cfg(feature = "faults")]
const STOP_AT: &str = "CROPROW_STOP_AT";

/// A file whose name holds this aborts the process that decodes it, as a fault in a decoder would.
#[cfg(feature = "faults")]
const POISON: &str = "CROPROW_POISON";

/// Where a thread may hang for ever, if a test says so.
#[derive(Clone, Copy, Debug)]
pub enum Hang {
    /// While the header of a file is read.
    Probe,
    /// While it is decoded.
    Decode,
    /// While it is decoded once more.
    Again,
}

/// A point that a test asked for.
#[cfg(feature = "faults")]
struct Asked {
    name: String,
    time: u64,
    passed: std::sync::atomic::AtomicU64,
}

#[cfg(feature = "faults")]
impl Asked {
    fn by(variable: &str) -> Option<Self> {
        let asked = std::env::var(variable).ok()?;
        let (name, time) = asked.split_once('@').unwrap_or((&asked, "1"));
        assert!(POINTS.contains(&name), "{name} is no crash point");
        Some(Self { name: name.to_owned(), time: time.parse().ok()?, passed: Default::default() })
    }

    fn is_now(&self, name: &str) -> bool {
        name == self.name && self.passed.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1 == self.time
    }
}

/// Aborts or stops here, if a test wants it.
#[cfg(feature = "faults")]
pub fn point(name: &str) {
    use std::sync::LazyLock;

    static CRASH: LazyLock<Option<Asked>> = LazyLock::new(|| Asked::by(CRASH_AT));
    static STOP: LazyLock<Option<Asked>> = LazyLock::new(|| Asked::by(STOP_AT));

    assert!(POINTS.contains(&name), "{name} is missing in POINTS");
    if CRASH.as_ref().is_some_and(|asked| asked.is_now(name)) {
        std::process::abort();
    }
    if STOP.as_ref().is_some_and(|asked| asked.is_now(name)) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
        // Another thread may be told first; this one must not go on meanwhile and take the database's lock.
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Nothing, in this build.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn point(_: &str) {}

/// Aborts for a file that a test declares poisonous.
#[cfg(feature = "faults")]
pub fn poison(path: &std::path::Path) {
    if let Some(part) = std::env::var_os(POISON)
        && path.to_string_lossy().contains(&*part.to_string_lossy())
    {
        std::process::abort();
    }
}

/// Nothing, in this build.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn poison(_: &std::path::Path) {}

/// Does not return for a file whose name holds what `CROPROW_HANG`, `CROPROW_HANG_PROBE` or `CROPROW_HANG_AGAIN` says, as
/// a read from a dead mount would not; or so late as `CROPROW_HANG_MS` says.
#[cfg(feature = "faults")]
pub fn hang(at: Hang, path: &std::path::Path) {
    let variable = match at {
        Hang::Probe => "CROPROW_HANG_PROBE",
        Hang::Decode => "CROPROW_HANG",
        Hang::Again => "CROPROW_HANG_AGAIN",
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if std::env::var(variable).is_ok_and(|part| name.contains(&part)) {
        let returns_after_ms = std::env::var("CROPROW_HANG_MS").ok().and_then(|ms| ms.parse().ok());
        std::thread::sleep(std::time::Duration::from_millis(returns_after_ms.unwrap_or(u64::MAX)));
    }
}

/// Nothing, in this build.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn hang(_: Hang, _: &std::path::Path) {}
