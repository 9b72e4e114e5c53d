//! What a run says of itself: a line of measurements each second, for the database and the metrics file, and at the
//! end the step that limited it.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::progress::{Progress, Snapshot, Step, StepShare};
use crate::db::runs::{Sample, StepSample};
use crate::error::Error;
use crate::locked::is_locked;
use crate::printable;

/// A session that is busy for this share of the time limits the run by itself.
const SATURATED: f64 = 0.85;

/// Below this share nothing can be called a limit.
const BUSY_LEAST: f64 = 0.3;

/// Waiting for memory for this share of the time is worth a hint.
const SHORT_OF_MEMORY: f64 = 0.3;

/// Reads the memory that this process uses on its device, in bytes.
pub type DeviceMemory = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Where measurements come from and go to.
#[derive(Default)]
pub struct Instruments {
    /// `None` without a GPU.
    pub device_memory: Option<DeviceMemory>,
    metrics: Option<Mutex<BufWriter<File>>>,
}

impl Instruments {
    /// With a metrics file, which is begun anew.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn new(device_memory: Option<DeviceMemory>, metrics: Option<&Path>) -> Result<Self, Error> {
        let create = |path: &Path| {
            if is_locked(path) {
                let path = printable::path(path);
                return Err(Error::Usage(format!("--metrics {path}: this is part of the database; name another file")));
            }
            let file = File::create(path);
            file.map(|file| Mutex::new(BufWriter::new(file)))
                .map_err(|e| Error::Usage(format!("--metrics {}: {e}", printable::path(path))))
        };
        Ok(Self { device_memory, metrics: metrics.map(create).transpose()? })
    }

    /// Bytes of the device that this process uses; 0 without one.
    pub fn device_bytes(&self) -> u64 {
        self.device_memory.as_ref().and_then(|read| read()).unwrap_or(0)
    }

    /// Writes one line. A full disk ends the file and not the run.
    pub fn write(&self, line: &Value) {
        if let Some(file) = &self.metrics {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(e) = writeln!(file, "{line}").and_then(|()| file.flush()) {
                log::warn!("the metrics file cannot be written: {e}");
            }
        }
    }
}

/// The line of one second in the metrics file: the words of `samples` and `step_samples`.
pub fn line(sample: &Sample, steps: &[StepSample], seconds: f64) -> Value {
    let mut shares = serde_json::Map::new();
    for step in steps {
        let share = json!({
            "busy": step.busy, "waiting_in": step.waiting_in, "waiting_out": step.waiting_out, "queued": step.queued,
        });
        shares.insert(step.step.to_owned(), share);
    }
    json!({
        "seconds": seconds, "done": sample.done, "failed": sample.failed, "detect_per_s": sample.detect_per_s,
        "embed_per_s": sample.embed_per_s, "slowest": sample.slowest, "rss_bytes": sample.rss_bytes,
        "held_bytes": sample.held_bytes, "device_bytes": sample.device_bytes, "padding": sample.padding,
        "decode_scale": sample.decode_scale, "steps": shares,
    })
}

/// A step's shares as the database stores them.
pub fn step_sample(share: &StepShare) -> StepSample {
    StepSample {
        step: share.step.word(),
        busy: share.busy,
        waiting_in: share.waiting_in,
        waiting_out: share.waiting_out,
        queued: share.queued,
    }
}

/// What limited a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// The step; `None` where there was too little work to say.
    pub step: Option<Step>,
    /// Share of the time that the busiest step worked.
    pub busy: f64,
    /// One line for the user.
    pub text: String,
}

/// Finds the step that limited the run between two snapshots, and what to change. `on_host` says that sessions
/// compute on the host with all of its `threads`, which the pool shares.
pub fn limit(began: &Snapshot, ended: &Snapshot, on_host: bool, exact: bool) -> Limit {
    let shares = ended.shares_since(began);
    let busy = |step: Step| shares[step as usize].busy;
    let busiest = shares.iter().max_by(|a, b| a.busy.total_cmp(&b.busy)).map_or(Step::Decode, |s| s.step);
    let pool = busy(Step::Decode) + busy(Step::Crop);
    let session = if busy(Step::Detect) >= busy(Step::Embed) { Step::Detect } else { Step::Embed };
    let waiting = shares[Step::Decode as usize].waiting_out;
    let step = match busiest {
        Step::Read | Step::Commit => busiest,
        // Time of a session on the host is time of all cores, as that of the pool is; both are shares of the same.
        _ if pool > busy(session) => Step::Decode,
        _ => session,
    };
    let short = waiting > SHORT_OF_MEMORY && step == Step::Decode && pool < SATURATED;
    let remedy = match step {
        _ if short => "images waited for memory: give more with --memory",
        Step::Decode if exact => "--decode scaled decodes no more than is used; more cores (--threads) help too",
        Step::Decode | Step::Crop => "more cores (--threads) or smaller files help, a faster model does not",
        Step::Detect | Step::Embed if on_host => {
            "a GPU, a smaller model or an int8 one (--precision int8 where its folder has it) helps"
        }
        Step::Detect | Step::Embed => "--precision fp16, a larger --batch or a smaller model helps",
        Step::Read | Step::Commit => "put the database on a faster disk",
    };
    let busy = if step == Step::Decode { pool.min(1.0) } else { busy(step) };
    if busy < BUSY_LEAST {
        return Limit {
            step: None,
            busy,
            text: "no step was busy for long: too little work to say what limits it".to_owned(),
        };
    }
    let text = format!("limited by {} (busy {:.0} % of the time): {remedy}", step.word(), 100.0 * busy);
    Limit { step: Some(step), busy, text }
}

/// Resident memory of this process; 0 where the system does not tell.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().map_or(0, |kib| kib << 10)
}

/// Processor time of this process, user and system.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The run in numbers, for its row and the last line of the metrics file.
pub fn summary(progress: &Progress, (began, ended): (&Snapshot, &Snapshot), limit: &Limit) -> Value {
    let mut steps = serde_json::Map::new();
    for share in ended.shares_since(began) {
        let one = json!({ "busy": share.busy, "waiting_in": share.waiting_in, "waiting_out": share.waiting_out });
        steps.insert(share.step.word().to_owned(), one);
    }
    json!({
        "limited_by": limit.step.map(Step::word), "limit": limit.text, "steps": steps,
        "padding": ended.padding_since(began), "decode_scale": ended.decode_scale_since(began),
        "decodes": Progress::get(&progress.decodes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(busy_percent: &[(Step, u64)], waiting_percent: u64, on_host: bool) -> Limit {
        let part = |percent: u64| Duration::from_millis(10 * percent);
        let busy: Vec<(Step, Duration)> = busy_percent.iter().map(|(step, percent)| (*step, part(*percent))).collect();
        let began = Progress::default().snapshot(1);
        limit(&began, &began.later(part(100), &busy, part(waiting_percent)), on_host, false)
    }

    #[test]
    fn the_step_that_worked_most_is_named_with_what_helps() {
        let limit = of(&[(Step::Decode, 5), (Step::Embed, 90)], 0, true);
        assert_eq!(limit.step, Some(Step::Embed));
        assert!(
            limit.text.starts_with("limited by embed (busy 90 % of the time)") && limit.text.contains("GPU"),
            "{}",
            limit.text
        );
        assert!(of(&[(Step::Detect, 40)], 0, false).text.contains("fp16"));
        assert!(of(&[(Step::Commit, 40)], 0, false).text.contains("disk"));
    }

    #[test]
    fn decoding_and_cutting_share_the_pool() {
        let limit = of(&[(Step::Decode, 20), (Step::Crop, 20), (Step::Embed, 30)], 0, true);
        assert_eq!(limit.step, Some(Step::Decode));
    }

    #[test]
    fn waiting_for_memory_is_told() {
        assert!(of(&[(Step::Decode, 40)], 60, false).text.contains("--memory"));
        assert!(!of(&[(Step::Decode, 95)], 60, false).text.contains("--memory"), "more would not help");
    }

    #[test]
    fn a_run_with_too_little_to_do_has_no_limit() {
        let limit = of(&[(Step::Detect, 20)], 0, true);
        assert!(limit.step.is_none() && limit.text.starts_with("no step was busy"), "{}", limit.text);
    }
}
