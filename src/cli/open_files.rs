//! The limit of open files: what a login shell gives (often 1,024) is too little for many threads, models in parts and
//! a database at once, and a file that cannot be opened for it would look like a bad one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More is never wanted; some systems allow a billion, and some libraries walk over all of them.
const ENOUGH: u64 = 65_536;

/// Raises the soft limit as far as the system allows without asking. A refusal changes nothing.
pub(super) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Some(raised) = raised(limit.current, limit.maximum) {
        let wanted = Rlimit { current: Some(raised), maximum: limit.maximum };
        if let Err(e) = setrlimit(Resource::Nofile, wanted) {
            log::debug!("the limit of open files stays at {:?}: {e}", limit.current);
        }
    }
}

/// The soft limit to ask for; `None` stands for no limit, and where nothing is to be changed.
fn raised(soft: Option<u64>, hard: Option<u64>) -> Option<u64> {
    let wanted = hard.map_or(ENOUGH, |hard| hard.min(ENOUGH));
    (soft? < wanted).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_to_what_is_allowed_and_enough_and_never_lowered() {
        assert_eq!(raised(Some(1_024), Some(4_096)), Some(4_096));
        assert_eq!(raised(Some(1_024), Some(1 << 30)), Some(ENOUGH));
        assert_eq!(raised(Some(1_024), None), Some(ENOUGH));
        assert_eq!(raised(Some(100_000), Some(1 << 30)), None);
        assert_eq!(raised(Some(4_096), Some(4_096)), None);
        assert_eq!(raised(None, None), None);
    }
}
