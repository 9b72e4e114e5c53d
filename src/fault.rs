//! Named crash points, for tests: the process aborts where a test says so. Not compiled into a build without the feature
//! `faults`, where [`point`] is nothing.

/// Every crash point on the way of a row, in its order. A test goes through all of them.
pub const POINTS: [&str; 18] = [
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
    "commit.stored",
    "commit.committed",
    "heartbeat.written",
    "release.released",
    "run.ended",
    "rescue.remembered",
    "rescue.closed",
];

/// `NAME`, or `NAME@N` for the Nth time that the process comes by.
#[cfg(feature = "faults")]
const WHERE: &str = "CROPROW_CRASH_AT";

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

/// Aborts here, if a test wants it.
#[cfg(feature = "faults")]
pub fn point(name: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static ASKED: LazyLock<Option<(String, u64)>> = LazyLock::new(|| {
        let asked = std::env::var(WHERE).ok()?;
        let (name, time) = asked.split_once('@').unwrap_or((&asked, "1"));
        assert!(POINTS.contains(&name), "{name} is no crash point");
        Some((name.to_owned(), time.parse().ok()?))
    });
    static PASSED: AtomicU64 = AtomicU64::new(0);

    assert!(POINTS.contains(&name), "{name} is missing in POINTS");
    if let Some((asked, time)) = ASKED.as_ref()
        && asked == name
        && PASSED.fetch_add(1, Ordering::SeqCst) + 1 == *time
    {
        std::process::abort();
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
