//! Stopping. Soft: nothing new is claimed, what is in flight ends. Hard, after a grace: what has not ended
//! is dropped and its rows are released. Abort: a stage failed, everything unwinds.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Instant;

use crate::config::STOP_GRACE;

/// Shared by all stages and whoever receives signals.
#[derive(Debug, Default)]
pub struct Stop {
    asked_at: OnceLock<Instant>,
    signal: AtomicI32,
    aborted: AtomicBool,
}

impl Stop {
    /// Asks for a soft stop because of `signal`. Later calls change nothing.
    pub fn ask(&self, signal: i32) {
        if self.asked_at.set(Instant::now()).is_ok() {
            self.signal.store(signal, Ordering::SeqCst);
        }
    }

    /// A stage failed: everybody leaves at once.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
    }

    /// True when nothing new may be claimed.
    pub fn is_asked(&self) -> bool {
        self.asked_at.get().is_some() || self.aborted.load(Ordering::Relaxed)
    }

    /// True when work in flight is to be dropped.
    pub fn is_ending(&self) -> bool {
        self.aborted.load(Ordering::Relaxed) || self.asked_at.get().is_some_and(|at| at.elapsed() >= STOP_GRACE)
    }

    /// The signal that asked first; 0 without any.
    pub fn signal(&self) -> i32 {
        self.signal.load(Ordering::SeqCst)
    }

    /// When the stop was asked for.
    pub fn asked_at(&self) -> Option<Instant> {
        self.asked_at.get().copied()
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
