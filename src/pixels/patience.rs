//! Opening with some patience: where the system is short of something, or a file server has forgotten a handle, the file
//! is not to blame, and a moment later all may be well.

use std::thread::sleep;
use std::time::Duration;

use rustix::io::Errno;

/// Pauses before the next try while the system is short of something; after the last of them that is told.
const PAUSES_MS: [u64; 3] = [20, 80, 320];

/// What the system says when it has no room for one more open file: in the process, in all, or in its memory.
const SHORTAGES: [Errno; 3] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];

/// True for an `errno` that speaks of the system and of no file.
pub fn is_shortage(os_error: i32) -> bool {
    SHORTAGES.iter().any(|errno| errno.raw_os_error() == os_error)
}

/// Tries `open` again after a pause while the system is short of something, and once where a handle was stale.
pub(super) fn patiently<T>(mut open: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut pauses_ms = PAUSES_MS.into_iter();
    let mut was_stale = false;
    loop {
        match open() {
            Err(errno) if SHORTAGES.contains(&errno) => match pauses_ms.next() {
                Some(pause_ms) => sleep(Duration::from_millis(pause_ms)),
                None => return Err(errno),
            },
            Err(Errno::STALE) if !was_stale => was_stale = true,
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of these answers, the last of them again and again, and how many were asked for.
    fn after(answers: &[Result<u8, Errno>]) -> (Result<u8, Errno>, usize) {
        let mut calls = 0;
        let end = patiently(|| {
            calls += 1;
            answers[answers.len().min(calls) - 1]
        });
        (end, calls)
    }

    #[test]
    fn a_shortage_that_passes_is_waited_for_and_one_that_stays_is_told() {
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(after(&[Err(errno), Err(errno), Ok(7)]), (Ok(7), 3));
            assert_eq!(after(&[Err(errno)]), (Err(errno), 1 + PAUSES_MS.len()));
            assert!(is_shortage(errno.raw_os_error()));
        }
    }

    #[test]
    fn a_stale_handle_is_opened_again_once_and_all_else_not_at_all() {
        assert_eq!(after(&[Err(Errno::STALE), Ok(7)]), (Ok(7), 2));
        assert_eq!(after(&[Err(Errno::STALE)]), (Err(Errno::STALE), 2));
        for errno in [Errno::NOENT, Errno::ACCESS, Errno::IO] {
            assert_eq!(after(&[Err(errno), Ok(7)]), (Err(errno), 1));
            assert!(!is_shortage(errno.raw_os_error()));
        }
    }
}
