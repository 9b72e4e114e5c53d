//! Says that a run lives while no `commit` does: before the first pass and between two, when rows are made due and a model
//! is loaded. That may take longer than a worker may be silent.

use std::convert::Infallible;
use std::thread::Builder;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::stop::Cause;
use super::{Job, lock};
use crate::error::Error;

/// How often it is said.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// Does `work` beside heartbeats. It must not keep the database to itself.
///
/// # Errors
/// Those of `work`; another worker took this run for dead, which is the one that is told.
pub(super) fn beside_heartbeats<T>(job: &Job<'_>, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    std::thread::scope(|scope| {
        // Closed when the work is done, and when it panics.
        let (working, is_over) = bounded::<Infallible>(0);
        let heart = Builder::new()
            .name("heartbeat".to_owned())
            .spawn_scoped(scope, move || beat(job, &is_over))
            .map_err(|e| Error::System(format!("cannot start the heartbeat thread: {e}")))?;
        let result = work();
        drop(working);
        let beats = heart.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        beats.and(result)
    })
}

fn beat(job: &Job<'_>, is_over: &Receiver<Infallible>) -> Result<(), Error> {
    while let Err(RecvTimeoutError::Timeout) = is_over.recv_timeout(HEARTBEAT) {
        let beat = lock(job.db).beat(job.run);
        if let Err(error) = beat {
            // What is done meanwhile is for nothing.
            job.stop.ask(Cause::from(&error));
            return Err(error);
        }
    }
    Ok(())
}
