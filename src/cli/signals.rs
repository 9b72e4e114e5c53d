//! Signals. Before a run works a signal ends the process at once: nothing that it would break is begun, every write is
//! a transaction. Then the first asks for a soft stop and the second leaves at once. Whatever made a run stop, a process
//! that hangs on is ended by a watchdog.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use croprow::config::STOP_LIMIT;
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::error::Error;
use croprow::pipeline::progress::Progress;
use croprow::pipeline::stop::{Cause, Stop};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::say;
use super::talk::complain;

/// How often the watchdog looks.
const LOOK: Duration = Duration::from_millis(100);

/// How long the watchdog waits for a database that somebody else works on. Then it leaves without a word in it, and the
/// next start finds a run that died.
const LOCK_WAIT: Duration = Duration::from_millis(300);

/// The run that signals stop softly, while it works.
static RUNNING: Mutex<Option<Arc<Running>>> = Mutex::new(None);

/// Process id of the child that works on suspects; 0 without one.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// The last signal that went to a child; 0 without one. A child may have been through just then.
static PASSED_ON: AtomicI32 = AtomicI32::new(0);

/// The exit code of a process whose child a signal was for.
pub(crate) fn passed_on() -> Option<u8> {
    Some(PASSED_ON.load(Ordering::SeqCst)).filter(|signal| *signal != 0).map(exit_code)
}

/// That run was asked to stop by a signal.
static ASKED: AtomicBool = AtomicBool::new(false);

fn running() -> MutexGuard<'static, Option<Arc<Running>>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn child() -> Option<Pid> {
    Pid::from_raw(CHILD.load(Ordering::SeqCst))
}

/// The first signal asks the child; the second, or the end of its time, ends it: it may hang in a file, or be stopped itself.
fn pass_on(child: Pid, signal: i32) {
    if PASSED_ON.swap(signal, Ordering::SeqCst) != 0 {
        end_child();
        return;
    }
    let _ = Signal::from_named_raw(signal).map(|signal| kill_process(child, signal));
    // Without the thread a second signal ends it all the same.
    let _ = end_child_after(|| true);
}

fn end_child() {
    if let Some(child) = child() {
        let _ = kill_process(child, Signal::KILL);
    }
}

/// A child that is there so long after it `was_asked` is ended, whatever it hangs in.
///
/// # Errors
/// The system gives no thread.
pub(crate) fn end_child_after(was_asked: impl Fn() -> bool + Send + 'static) -> Result<(), Error> {
    spawn("child watchdog", move || {
        while !was_asked() {
            std::thread::sleep(LOOK);
        }
        std::thread::sleep(STOP_LIMIT + LOOK);
        end_child();
    })
}

/// Signals go to this child from now on, or to nobody.
pub(crate) fn pass_on_to(child: Option<u32>) {
    CHILD.store(child.and_then(|id| i32::try_from(id).ok()).unwrap_or(0), Ordering::SeqCst);
}

/// What a signal and the watchdog need to know of a run.
pub(crate) struct Running {
    pub(crate) stop: Arc<Stop>,
    pub(crate) db: Arc<Mutex<Db>>,
    pub(crate) run: RunId,
    pub(crate) progress: Arc<Progress>,
}

/// The exit code of a process that a signal stopped. A closed terminal counts as SIGTERM.
pub(crate) fn exit_code(signal: i32) -> u8 {
    if signal == SIGINT { 130 } else { 143 }
}

/// Listens from now on, until the process ends. SIGHUP is not listened to where `nohup` said so.
///
/// # Errors
/// The system gives no handler or no thread.
pub(crate) fn listen() -> Result<(), Error> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|s| *s != SIGHUP || !is_ignored(&status, SIGHUP));
    let mut signals = Signals::new(wanted.collect::<Vec<_>>())
        .map_err(|e| Error::StartUp(format!("cannot listen for signals: {e}")))?;
    spawn("signals", move || {
        for signal in signals.forever() {
            if let Some(child) = child() {
                pass_on(child, signal);
                continue;
            }
            match running().as_deref() {
                Some(run) if !ASKED.swap(true, Ordering::SeqCst) => {
                    run.stop.ask(Cause::Signal(signal));
                    say(
                        "croprow: stopping: what is in flight ends within eight seconds; a second signal leaves at once",
                    );
                }
                // The database is sound at any moment; rows in flight are given back by the next start.
                Some(_) => signal_hook::low_level::exit(i32::from(exit_code(signal))),
                None => {
                    say("croprow: ended by a signal; what was stored before it is kept, the same command goes on");
                    signal_hook::low_level::exit(i32::from(exit_code(signal)));
                }
            }
        }
    })
}

/// From the system's account of this process: whether whoever started it ignores the signal.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).map(str::trim);
    mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Signals are for that run from now on.
///
/// # Errors
/// The system gives no thread.
pub(crate) fn hand_to(run: Running) -> Result<(), Error> {
    let run = Arc::new(run);
    // Not its own: when the run is over, the database has to be closed.
    let watched = Arc::downgrade(&run);
    ASKED.store(false, Ordering::SeqCst);
    *running() = Some(run);
    spawn("watchdog", move || {
        loop {
            std::thread::sleep(LOOK);
            let Some(own) = watched.upgrade() else { return };
            if let (Some(at), Some(cause)) = (own.stop.asked_at(), own.stop.cause())
                && at.elapsed() >= STOP_LIMIT
            {
                leave(&own, cause);
            }
        }
    })
}

/// The run is over: a signal ends the process again.
pub(crate) fn hand_back() {
    *running() = None;
}

/// A thread hangs in a read or a call that cannot be ended. Gives back what can be given back, and leaves.
fn leave(running: &Running, cause: &Cause) {
    let (how, code) = match cause {
        Cause::Signal(signal) => ("stopped", exit_code(*signal)),
        Cause::Until => ("stopped", 0),
        Cause::Fault { exit_code, message } => {
            complain(&format!("croprow: {message}"));
            ("error", *exit_code)
        }
    };
    let began = Instant::now();
    while began.elapsed() < LOCK_WAIT {
        let Ok(mut db) = running.db.try_lock() else {
            std::thread::sleep(LOOK);
            continue;
        };
        let (done, failed) = (Progress::get(&running.progress.done), Progress::get(&running.progress.failed));
        let _ = db.release(running.run).and_then(|_| db.end_run(running.run, how, code, done, failed, None));
        break;
    }
    complain("croprow: a thread hangs in a file or a model and was left behind; its rows are pending again");
    signal_hook::low_level::exit(i32::from(code));
}

/// A named thread that ends with the process.
///
/// # Errors
/// The system gives none.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    spawned.map(drop).map_err(|e| Error::StartUp(format!("cannot start the {name} thread: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_the_parent_ignores_is_told_from_one_that_it_does_not() {
        let nohup = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000180000440\n";
        assert!(is_ignored(nohup, SIGHUP));
        assert!(!is_ignored(nohup, SIGINT) && !is_ignored(nohup, SIGTERM));
        assert!(!is_ignored("", SIGHUP) && !is_ignored("SigIgn:\tnonsense\n", SIGHUP));
    }
}
