//! Suspects: rows that were in the hands of a worker when it died. They are worked on apart, by a child process that says
//! which row it begins with and which has ended, so that its living parent knows what it died of.
//!
//! First all together, at full speed: after a power cut or `kill -9` every one of them is innocent. If the child dies, the rows
//! in its hands go one by one. A row with which three children died alone is quarantined.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

use rustix::process::{Signal, set_parent_process_death_signal};

use crate::db::Db;
use crate::db::suspects::{Claims, Suspect};
use crate::error::Error;
use crate::printable;
use crate::row::ImageId;

/// Children that die with one row alone in their hands before it is set aside: memory may have been short once.
const DEATHS_MOST: u32 = 3;

/// Children that end without an error and without having done a row, before this ends too.
const FRUITLESS_MOST: u32 = 3;

/// Suspects that are named in a message; the table `suspects` has all.
const NAMED_MOST: usize = 5;

/// What a child says by its exit code that wants to be started again.
const AGAIN: i32 = 75;

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// What a worker tells its parent about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// It is about to be looked at.
    Begins(ImageId),
    /// It is stored as done.
    Done(ImageId),
    /// It is stored as failed.
    Failed(ImageId),
}

impl Word {
    /// Says it to the parent. One that has left does not hear it.
    pub fn say(self) {
        let line = match self {
            Self::Begins(id) => format!("begins {id}\n"),
            Self::Done(id) => format!("done {id}\n"),
            Self::Failed(id) => format!("failed {id}\n"),
        };
        let mut out = io::stdout().lock();
        let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
    }

    fn parse(line: &str) -> Option<Self> {
        let (word, id) = line.split_once(' ')?;
        let id = ImageId(id.parse().ok()?);
        match word {
            "begins" => Some(Self::Begins(id)),
            "done" => Some(Self::Done(id)),
            "failed" => Some(Self::Failed(id)),
            _ => None,
        }
    }
}

/// For a child: a parent that is killed must not leave a worker behind. Its parent is the thread that started it.
pub fn die_with_parent() {
    if let Err(e) = set_parent_process_death_signal(Some(Signal::KILL)) {
        log::warn!("this process may outlive its parent: {e}");
    }
}

/// How a child ended.
struct End {
    status: ExitStatus,
    /// Rows it had begun with and not ended.
    in_its_hands: Vec<ImageId>,
    /// Rows it ended.
    ended: Ended,
}

/// Rows that children ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Rows.
    pub done: u64,
    /// Rows, those set aside among them.
    pub failed: u64,
}

impl Ended {
    /// All of them.
    pub const fn rows(self) -> u64 {
        self.done + self.failed
    }
}

impl std::ops::AddAssign for Ended {
    fn add_assign(&mut self, other: Self) {
        self.done += other.done;
        self.failed += other.failed;
    }
}

/// Works on suspects in child processes, until there are none or `is_over`, after which no death is judged. `start` starts one that claims as told, with its
/// standard output piped; `tell` gets lines for the user. Returns an exit code where a child ended with one that holds
/// for this process too. Adds to `all` what they ended.
///
/// # Errors
/// A child cannot be started, or dies before it has begun with a row. Those of the database.
pub fn clear(
    db: &mut Db,
    start: &mut dyn FnMut(Claims) -> io::Result<Child>,
    is_over: &dyn Fn() -> bool,
    tell: &dyn Fn(&str),
    all: &mut Ended,
) -> Result<Option<u8>, Error> {
    let mut fruitless = 0;
    let mut suspects = db.suspects()?;
    if !suspects.is_empty() {
        tell(&announce(&suspects));
    }
    while !suspects.is_empty() && !is_over() {
        let claims = if suspects.iter().all(|suspect| suspect.alone) { Claims::Alone } else { Claims::Together };
        let end = start(claims)
            .and_then(watch)
            .map_err(|e| Error::System(format!("cannot start a process for suspects: {e}")))?;
        db.rescue_dead_runs()?;
        *all += end.ended;
        let ended = end.ended.rows();
        if is_over() {
            // Whatever it died of may have been the stop.
            return Ok(None);
        }
        match (end.status.code(), end.status.signal()) {
            (Some(0 | 2), _) => {
                fruitless = if ended == 0 { fruitless + 1 } else { 0 };
                if fruitless == FRUITLESS_MOST {
                    return Err(Error::System(format!(
                        "{} images that may have killed a worker stay pending, and a process of their own does none of them; the \
                         table suspects has them, `croprow verify DB` looks for what is wrong with the database",
                        suspects.len()
                    )));
                }
            }
            // It ended rows that are none of the suspects' any more, so this comes to an end, too.
            (Some(AGAIN), _) if ended > 0 => fruitless = 0,
            (Some(code), _) => return Ok(Some(u8::try_from(code).unwrap_or(3))),
            (None, Some(signal @ (SIGHUP | SIGINT | SIGTERM))) => {
                return Ok(Some(if signal == SIGINT { 130 } else { 143 }));
            }
            (None, signal) => {
                let is_set_aside = died(db, claims, &suspects, &end.in_its_hands, signal.unwrap_or_default(), tell)?;
                all.failed += u64::from(is_set_aside);
            }
        }
        suspects = db.suspects()?;
    }
    Ok(None)
}

fn announce(suspects: &[Suspect]) -> String {
    let named: Vec<String> = suspects.iter().take(NAMED_MOST).map(|s| printable::path(&s.path)).collect();
    let more = if suspects.len() > NAMED_MOST { ", ..." } else { "" };
    format!(
        "{} images were in the hands of a worker when it died; a process of its own works on them first, as one of them may \
         have killed it: {}{more}",
        suspects.len(),
        named.join(", ")
    )
}

/// What follows from the death of a child. True where a row was set aside for it.
fn died(
    db: &mut Db,
    claims: Claims,
    suspects: &[Suspect],
    in_its_hands: &[ImageId],
    signal: i32,
    tell: &dyn Fn(&str),
) -> Result<bool, Error> {
    let name = |id: &ImageId| {
        suspects.iter().find(|s| s.id == *id).map_or_else(|| format!("image {id}"), |s| printable::path(&s.path))
    };
    match (claims, in_its_hands) {
        (_, []) => {
            return Err(Error::StartUp(format!(
                "a process for suspects died by signal {signal} before it began with one: the models, the runtime library or \
                 memory are at fault, not the images"
            )));
        }
        (Claims::Alone, [id]) => {
            let deaths = db.count_death(*id)?;
            tell(&format!(
                "{}: a process died by signal {signal} with this image alone in its hands ({deaths} of {DEATHS_MOST})",
                name(id)
            ));
            if deaths >= DEATHS_MOST {
                let message = format!(
                    "{deaths} processes died with this image alone in their hands, the last by signal {signal}"
                );
                db.quarantine(*id, &message)?;
                tell(&format!(
                    "{}: set aside as killed_worker; `croprow retry --code killed_worker` brings it back",
                    name(id)
                ));
                return Ok(true);
            }
        }
        (_, several) => {
            tell(&format!(
                "a process died by signal {signal} with {} images in its hands; they go one by one",
                several.len()
            ));
            db.suspect_alone(several)?;
        }
    }
    Ok(false)
}

/// Listens to a child until it is gone.
fn watch(mut child: Child) -> io::Result<End> {
    let mut hands = BTreeSet::new();
    let mut ended = Ended::default();
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines() {
            match line.ok().as_deref().and_then(Word::parse) {
                Some(Word::Begins(id)) => {
                    hands.insert(id);
                }
                Some(Word::Done(id)) => {
                    hands.remove(&id);
                    ended.done += 1;
                }
                Some(Word::Failed(id)) => {
                    hands.remove(&id);
                    ended.failed += 1;
                }
                None => {}
            }
        }
    }
    Ok(End { status: child.wait()?, in_its_hands: hands.into_iter().collect(), ended })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_understood_and_nothing_else_is() {
        assert_eq!(Word::parse("begins 12"), Some(Word::Begins(ImageId(12))));
        assert_eq!(Word::parse("done -3"), Some(Word::Done(ImageId(-3))));
        assert_eq!(Word::parse("failed 4"), Some(Word::Failed(ImageId(4))));
        assert_eq!((Word::parse("done"), Word::parse("ends 1"), Word::parse("begins x")), (None, None, None));
    }
}
