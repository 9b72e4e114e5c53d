//! Taking over from workers that are gone, before anything else is done.

use std::time::Duration;

use croprow::db::Db;
use croprow::error::Error;

use super::say;

/// Between two looks whether a worker that was silent lives.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Takes over from workers that are gone. One that is silent by the clock is given time for a heartbeat: the clock may
/// have been set.
pub(super) fn rescue(db: &mut Db) -> Result<(), Error> {
    let mut told = false;
    loop {
        for (run, images) in db.rescue_dead_runs()? {
            say(&format!("run {} ended without saying so; its {images} rows in flight are pending again", run.0));
        }
        if !db.has_doubtful_runs()? {
            return Ok(());
        }
        if !told {
            say("another worker has not been heard of for long; waiting some seconds for a sign of it");
            told = true;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}
