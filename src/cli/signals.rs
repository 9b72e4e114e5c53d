//! Signals: the first asks for a soft stop, the second leaves at once. A process that hangs after a stop
//! is ended by a watchdog.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use croprow::config::STOP_LIMIT;
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::error::Error;
use croprow::pipeline::stop::Stop;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::say;

/// How often the watchdog looks.
const LOOK: Duration = Duration::from_millis(100);

/// The exit code of a run that a signal stopped. A closed terminal counts as SIGTERM.
pub(crate) fn exit_code(signal: i32) -> u8 {
    if signal == SIGINT { 130 } else { 143 }
}

/// Process id of the child that works on suspects; 0 without one.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// A run has its own listener.
static LISTENING: AtomicBool = AtomicBool::new(false);

/// Signals go to this child from now on, or to nobody. Between two children they end the process as if nobody listened.
pub(crate) fn pass_on_to(child: Option<u32>) -> Result<(), Error> {
    static BEGUN: Once = Once::new();
    CHILD.store(child.and_then(|id| i32::try_from(id).ok()).unwrap_or(0), Ordering::SeqCst);
    if BEGUN.is_completed() || child.is_none() {
        return Ok(());
    }
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(cannot_listen)?;
    BEGUN.call_once(|| ());
    spawn("signals", move || {
        for signal in signals.forever() {
            match Pid::from_raw(CHILD.load(Ordering::SeqCst)) {
                Some(child) => {
                    let _ = Signal::from_named_raw(signal).map(|signal| kill_process(child, signal));
                }
                None if LISTENING.load(Ordering::SeqCst) => {}
                None => signal_hook::low_level::exit(i32::from(exit_code(signal))),
            }
        }
    })
}

fn cannot_listen(error: std::io::Error) -> Error {
    Error::StartUp(format!("cannot listen for signals: {error}"))
}

/// Listens from now on, until the process ends.
pub(crate) fn listen(stop: &Arc<Stop>, db: &Arc<Mutex<Db>>, run: RunId) -> Result<(), Error> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(cannot_listen)?;
    LISTENING.store(true, Ordering::SeqCst);
    let asked = Arc::clone(stop);
    spawn("signals", move || {
        for signal in signals.forever() {
            if asked.asked_at().is_some() {
                // The database is sound at any moment; rows in flight are given back by the next start.
                signal_hook::low_level::exit(i32::from(exit_code(signal)));
            }
            asked.ask(signal);
            say("croprow: stopping: what is in flight ends within eight seconds; a second signal leaves at once");
        }
    })?;
    let (stop, db) = (Arc::clone(stop), Arc::clone(db));
    spawn("watchdog", move || {
        loop {
            std::thread::sleep(LOOK);
            if stop.asked_at().is_some_and(|at| at.elapsed() >= STOP_LIMIT) {
                // A thread hangs in a read or a call that cannot be ended. Give back what can be given back.
                if let Ok(mut db) = db.try_lock() {
                    let _ = db.release(run);
                }
                signal_hook::low_level::exit(i32::from(exit_code(stop.signal())));
            }
        }
    })
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    spawned.map(drop).map_err(|e| Error::StartUp(format!("cannot start the {name} thread: {e}")))
}
