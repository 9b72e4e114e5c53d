//! `oversee`: looks at the desk while the pool is at work, and ends a run in which nobody is left but threads that hang.
//! They can never be joined, so that the process has to be left. Stops are not its concern: whoever asks for one watches
//! the time.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::Job;
use super::desk::Desk;
use super::progress::Progress;
use crate::error::Error;
use crate::printable;

/// How often it looks; a thread is written off so much later at most.
const LOOK: Duration = Duration::from_millis(250);

/// Where the whole pool hangs and nothing has ended for so long, the run has: the sessions had their time for what they
/// have in hand.
const STILL: Duration = Duration::from_secs(2);

/// Files that a message names; each was logged when its thread was written off.
const NAMED_MOST: usize = 5;

/// Looks until `pool` is closed by the stages that work on it; or ends the process.
pub(super) fn run<'j>(
    job: &Job<'j>,
    desk: &Desk<'j>,
    read_is_over: &AtomicBool,
    pool: &Receiver<Infallible>,
) -> Result<(), Error> {
    let (mut looked, mut moved, mut ended) = (Instant::now(), Instant::now(), 0);
    while let Err(RecvTimeoutError::Timeout) = pool.recv_timeout(LOOK) {
        let now = Instant::now();
        desk.look(now - looked);
        looked = now;
        if ended != Progress::get(&job.progress.ended) {
            (ended, moved) = (Progress::get(&job.progress.ended), now);
        }
        let hung = desk.hung();
        if hung.is_empty() || job.stop.is_asked() {
            continue;
        }
        // In this order: `read` counts what it claims before it is over.
        let is_over = read_is_over.load(Ordering::Acquire) && job.progress.in_flight() == 0;
        let is_stuck = hung.len() >= job.pool.current_num_threads()
            && desk.is_settled()
            && job.progress.in_flight() > 0
            && now - moved >= STILL;
        if is_over {
            log::warn!("all is done but for {} that hang; they are left behind: {}", threads(hung.len()), names(&hung));
            (job.leave)(Ok(job.progress.summary()));
        }
        if is_stuck {
            let why = format!("all {} hang in files that give no answer: {}", threads(hung.len()), names(&hung));
            (job.leave)(Err(Error::Stuck(why)));
        }
    }
    Ok(())
}

fn threads(n: usize) -> String {
    format!("{n} thread{}", if n == 1 { "" } else { "s" })
}

fn names(files: &[PathBuf]) -> String {
    let named: Vec<String> = files.iter().take(NAMED_MOST).map(|path| printable::path(path as &Path)).collect();
    let more = if files.len() > NAMED_MOST { ", ..." } else { "" };
    format!("{}{more}", named.join(", "))
}
