//! A child process for suspects: the same command, told by its environment to work on them and to say how it goes.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use croprow::db::Db;
use croprow::db::suspects::Claims;
use croprow::error::Error;
use croprow::pipeline::apart::{self, Ended};
use jiff::ZonedDateTime;

use super::{say, signals, until};

/// Tells a child which suspects are its own.
const APART: &str = "CROPROW_APART";

const TOGETHER: &str = "together";
const ALONE: &str = "alone";

/// What this process claims; not ordinary rows where it is such a child.
pub(super) fn claims() -> Claims {
    let claims = match std::env::var(APART).as_deref() {
        Ok(TOGETHER) => Claims::Together,
        Ok(ALONE) => Claims::Alone,
        _ => return Claims::Ordinary,
    };
    apart::die_with_parent();
    claims
}

/// Works on suspects in child processes, until there are none or `until` has come. Returns an exit code that one of them
/// ended with, where it holds for this process too. Says how it went, and adds to `all` what they ended.
///
/// # Errors
/// Those of [`apart::clear`].
pub(super) fn clear(db: &mut Db, until: Option<&ZonedDateTime>, all: &mut Ended) -> Result<Option<u8>, Error> {
    let mut ended = Ended::default();
    let is_over = || until.is_some_and(until::has_come) || signals::passed_on().is_some();
    if let Some(until) = until {
        let until = until.clone();
        signals::end_child_after(move || until::has_come(&until))?;
    }
    let result = apart::clear(db, &mut |claims| start(claims, until), &is_over, &say, &mut ended);
    if ended.rows() > 0 {
        say(&format!("of those {} done, {} failed", ended.done, ended.failed));
    }
    *all += ended;
    signals::pass_on_to(None);
    // Whatever became of the child: who stopped this process wanted all of it to stop.
    match signals::passed_on() {
        Some(code) => Ok(Some(code)),
        None => result,
    }
}

fn start(claims: Claims, until: Option<&ZonedDateTime>) -> io::Result<Child> {
    if signals::passed_on().is_some() {
        return Err(io::ErrorKind::Interrupted.into());
    }
    let word = if claims == Claims::Alone { ALONE } else { TOGETHER };
    // The file itself: it may have been replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.args(std::env::args_os().skip(1)).env(APART, word);
    if let Some(until) = until {
        until::hand_down(&mut command, until);
    }
    // A group of its own: a terminal's signals reach it through its parent only, each once.
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    signals::pass_on_to(Some(child.id()));
    Ok(child)
}
