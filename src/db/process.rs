//! Processes, told apart across hosts, containers, restarts and reboots.

use std::io;
use std::sync::OnceLock;

use rustix::io::Errno;

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
    /// This process. Asked once: where no more files can be opened later, all others would seem to be of another boot.
    pub fn own() -> Self {
        static OWN: OnceLock<ProcessId> = OnceLock::new();
        let ask = || {
            let pid = i64::from(std::process::id());
            Self {
                host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
                boot_id: boot_and_namespace(),
                pid,
                started: start_ticks(pid).ok().flatten().unwrap_or(0),
            }
        };
        OWN.get_or_init(ask).clone()
    }

    /// True where the process with that number here, which began so many clock ticks after boot, is not there any more;
    /// false also where that cannot be told.
    pub fn is_gone(pid: i64, started: i64) -> bool {
        start_ticks(pid).is_ok_and(|ticks| ticks != Some(started))
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
        match start_ticks(self.pid) {
            Ok(ticks) if ticks == Some(self.started) => Seen::There,
            Ok(_) => Seen::Gone,
            Err(_) => Seen::Nothing,
        }
    }
}

fn boot_and_namespace() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), printable::path(&namespace))
}

/// When a process began, in clock ticks since boot; `None` where there is none.
///
/// # Errors
/// That cannot be told.
fn start_ticks(pid: i64) -> io::Result<Option<i64>> {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(ticks_in(&stat)),
        Err(e) => if_it_is_gone(e),
    }
}

/// A process that ends while its file is read is no process any more. Any other error says nothing of it.
fn if_it_is_gone(error: io::Error) -> io::Result<Option<i64>> {
    let is_gone = error.kind() == io::ErrorKind::NotFound || Errno::from_io_error(&error) == Some(Errno::SRCH);
    if is_gone { Ok(None) } else { Err(error) }
}

/// Field 22 of `/proc/PID/stat`. The command's name before it may hold spaces and brackets.
fn ticks_in(stat: &str) -> Option<i64> {
    let (_, rest) = stat.rsplit_once(')')?;
    // A zombie has ended; only its parent has not looked yet.
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_cannot_be_looked_at_is_not_taken_for_gone() {
        let own = ProcessId::own();
        assert!(own.started > 0 && own.seen_from(&own) == Seen::There && !ProcessId::is_gone(own.pid, own.started));
        assert!(ProcessId::is_gone(own.pid, own.started - 1) && ProcessId::is_gone(i64::from(i32::MAX), 1));
        assert_eq!(ProcessId { pid: i64::from(i32::MAX), ..own.clone() }.seen_from(&own), Seen::Gone);
        for (errno, is_told) in
            [(Errno::NOENT, true), (Errno::SRCH, true), (Errno::MFILE, false), (Errno::ACCESS, false)]
        {
            assert_eq!(if_it_is_gone(errno.into()).ok(), is_told.then_some(None), "{errno}");
        }
    }
}
