//! Stopping. Soft: nothing new is claimed, what is in flight ends. Hard, after a grace: what has not ended
//! is dropped and its rows are released. Abort: a stage failed, everything unwinds.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::config::STOP_GRACE;
use crate::error::Error;

/// Why a run stops before its work is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A signal of that number.
    Signal(i32),
    /// The time that `--until` names has come.
    Until,
    /// It cannot go on. Kept for whoever ends a process that hangs on meanwhile.
    Fault {
        /// The process's exit code.
        exit_code: u8,
        /// What the error says.
        message: String,
    },
}

impl From<&Error> for Cause {
    fn from(error: &Error) -> Self {
        Self::Fault { exit_code: error.exit_code(), message: error.to_string() }
    }
}

/// Shared by all stages and whoever receives signals.
#[derive(Debug, Default)]
pub struct Stop {
    asked: OnceLock<(Instant, Cause)>,
    aborted: AtomicBool,
}

impl Stop {
    /// Asks for a soft stop. Later calls change nothing: the first cause is the one that is told.
    pub fn ask(&self, cause: Cause) {
        let _ = self.asked.set((Instant::now(), cause));
    }

    /// A stage failed or panicked: everybody leaves at once.
    pub fn abort(&self) {
        self.ask(Cause::Fault { exit_code: 3, message: "a stage of the run failed".to_owned() });
        self.aborted.store(true, Ordering::SeqCst);
    }

    /// True when nothing new may be claimed.
    pub fn is_asked(&self) -> bool {
        self.asked.get().is_some()
    }

    /// True when work in flight is to be dropped.
    pub fn is_ending(&self) -> bool {
        self.aborted.load(Ordering::Relaxed) || self.asked_at().is_some_and(|at| at.elapsed() >= STOP_GRACE)
    }

    /// Why, where a stop was asked for.
    pub fn cause(&self) -> Option<&Cause> {
        self.asked.get().map(|(_, cause)| cause)
    }

    /// When the stop was asked for.
    pub fn asked_at(&self) -> Option<Instant> {
        self.asked.get().map(|(at, _)| *at)
    }
}

/// The pool keeps a panic to itself until all its work is done, and `read` would wait for the lost image.
pub struct AbortOnPanic<'a>(pub &'a Stop);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_is_the_one_that_is_told_and_an_abort_ends_what_a_stop_lets_end() {
        let stop = Stop::default();
        assert!(!stop.is_asked() && stop.cause().is_none());
        stop.ask(Cause::Until);
        stop.ask(Cause::Signal(15));
        assert_eq!(stop.cause(), Some(&Cause::Until));
        assert!(stop.is_asked() && !stop.is_ending(), "what is in flight may end");
        stop.abort();
        assert!(stop.is_ending());
        assert_eq!(stop.cause(), Some(&Cause::Until));
        let failed = Stop::default();
        failed.ask(Cause::from(&Error::DeviceLost("gone".into())));
        failed.abort();
        assert!(matches!(failed.cause(), Some(Cause::Fault { exit_code: 75, message }) if message.contains("gone")));
    }
}
