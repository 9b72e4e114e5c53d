//! Processes, told apart across hosts, containers, restarts and reboots.

use crate::printable;

/// What one process can tell of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// It is there; it may be stopped or hang.
    There,
    /// It is not there any more.
    Gone,
    /// The machine was started again since.
    WentDownWithTheMachine,
    /// It is on another machine or in another container: its pid says nothing here.
    Nothing,
}

/// A process, told apart from a later one with the same pid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// Host name.
    pub host: String,
    /// Changes with every boot; then the process-id namespace, in which pids mean something.
    pub boot_id: String,
    /// Process id.
    pub pid: i64,
    /// Start time in clock ticks since boot.
    pub started: i64,
}

impl ProcessId {
    /// This process.
    pub fn own() -> Self {
        let pid = i64::from(std::process::id());
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: boot_and_namespace(),
            pid,
            started: start_ticks(pid).unwrap_or(0),
        }
    }

    /// When the process with that number here began, in clock ticks since boot; `None` where there is none.
    pub fn started_of(pid: i64) -> Option<i64> {
        start_ticks(pid)
    }

    /// The boot, without the namespace.
    fn boot(&self) -> Option<&str> {
        self.boot_id.split(' ').next()
    }

    /// What can be told of it from `own`, without waiting.
    pub(super) fn seen_from(&self, own: &Self) -> Seen {
        if self.host != own.host || (self.boot() == own.boot() && self.boot_id != own.boot_id) {
            return Seen::Nothing;
        }
        if self.boot() != own.boot() {
            return Seen::WentDownWithTheMachine;
        }
        if start_ticks(self.pid) == Some(self.started) { Seen::There } else { Seen::Gone }
    }
}

fn boot_and_namespace() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), printable::path(&namespace))
}

/// Field 22 of `/proc/PID/stat`. The command's name before it may hold spaces and brackets.
fn start_ticks(pid: i64) -> Option<i64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    // A zombie has ended; only its parent has not looked yet.
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}
