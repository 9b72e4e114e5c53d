//! `--max-failures`: how many rows may fail before the run stops. Counts over the whole run, both passes of a staged
//! one among it.

use std::collections::{HashMap, VecDeque};

use crate::config::MaxFailures;
use crate::error::Error;
use crate::row::{Finished, RowCode};

/// A share is one of so many outcomes, the latest; what was before them counts no more.
const WINDOW_ROWS: usize = 1_000;

/// A share of fewer outcomes says nothing yet.
const WINDOW_LEAST: usize = 100;

/// What failed so far.
#[derive(Debug, Default)]
pub struct Failures {
    by_code: HashMap<RowCode, u64>,
    failed: u64,
    /// Whether each of the latest outcomes failed.
    latest: VecDeque<bool>,
    latest_failed: usize,
}

/// The budget is used up.
#[derive(Debug)]
pub struct TooMany {
    /// So many outcomes of the batch may be stored; the last of them is the failure that is one too many.
    pub kept: usize,
    /// What is to be said.
    pub error: Error,
}

impl Failures {
    /// Counts the outcomes of a batch, as far as the budget goes.
    pub fn count(&mut self, batch: &[Finished], most: Option<MaxFailures>) -> Option<TooMany> {
        for (i, finished) in batch.iter().enumerate() {
            self.add(finished.outcome.error().map(|error| error.code));
            if let Some(words) = most.and_then(|most| self.beyond(most)) {
                return Some(TooMany { kept: i + 1, error: Error::TooManyFailures(words) });
            }
        }
        None
    }

    fn add(&mut self, code: Option<RowCode>) {
        if self.latest.len() == WINDOW_ROWS && self.latest.pop_front() == Some(true) {
            self.latest_failed -= 1;
        }
        self.latest.push_back(code.is_some());
        if let Some(code) = code {
            self.latest_failed += 1;
            self.failed += 1;
            *self.by_code.entry(code).or_default() += 1;
        }
    }

    /// What is to be said where the budget is used up.
    fn beyond(&self, most: MaxFailures) -> Option<String> {
        let what = match most {
            MaxFailures::Rows(rows) if self.failed > rows => format!("{} rows failed", self.failed),
            MaxFailures::Percent(percent) if self.latest.len() >= WINDOW_LEAST => {
                let share = 100.0 * self.latest_failed as f64 / self.latest.len() as f64;
                if share <= f64::from(percent) {
                    return None;
                }
                format!("{} of the last {} rows failed", self.latest_failed, self.latest.len())
            }
            _ => return None,
        };
        // Of codes that are equally common the first by name, so that the same run says the same.
        let commonest = self.by_code.iter().max_by_key(|(code, rows)| (**rows, std::cmp::Reverse(code.word())));
        let (code, rows) = commonest.map_or(("none", 0), |(code, rows)| (code.word(), *rows));
        Some(format!(
            "{what}, more than --max-failures {most} allows; the commonest code is {code} ({rows} in this run)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::{ImageId, Outcome, RowError, Stage, Token};

    fn outcome(code: Option<RowCode>) -> Finished {
        let outcome = match code {
            Some(code) => Outcome::Failed(RowError::new(code, "x")),
            None => Outcome::Done { raw: None, regions: vec![], embed: None },
        };
        Finished {
            id: ImageId(1),
            token: Token(1),
            stage: Stage::Detect,
            facts: None,
            stamp: None,
            lost: None,
            outcome,
        }
    }

    fn batch(codes: &[Option<RowCode>]) -> Vec<Finished> {
        codes.iter().copied().map(outcome).collect()
    }

    #[test]
    fn the_failure_that_is_one_too_many_ends_the_run_and_nothing_behind_it_is_stored() {
        let (missing, decode) = (Some(RowCode::Missing), Some(RowCode::Decode));
        let most = Some(MaxFailures::Rows(3));
        let mut failures = Failures::default();
        assert!(failures.count(&batch(&[missing, None, decode]), most).is_none());
        let TooMany { kept, error } = failures.count(&batch(&[None, missing, None, missing, missing]), most).unwrap();
        assert_eq!((kept, error.exit_code()), (4, 3));
        let text = error.to_string();
        assert!(text.contains("4 rows failed, more than --max-failures 3"), "{text}");
        assert!(text.contains("the commonest code is missing (3 in this run)"), "{text}");
        let none = Failures::default().count(&batch(&[missing; 300]), None);
        assert!(none.is_none(), "without a budget any number may fail");
        assert_eq!(Failures::default().count(&batch(&[decode]), Some(MaxFailures::Rows(0))).unwrap().kept, 1);
    }

    #[test]
    fn vectors_that_fail_count_as_well() {
        let mut finished = outcome(None);
        let error = RowError::new(RowCode::NanOutput, "x");
        finished.outcome = Outcome::Done { raw: None, regions: vec![], embed: Some(Err(error)) };
        assert!(Failures::default().count(&[finished], Some(MaxFailures::Rows(0))).is_some());
    }

    #[test]
    fn a_share_is_one_of_the_latest_outcomes_and_not_of_a_few() {
        let most = Some(MaxFailures::Percent(10.0));
        let missing = Some(RowCode::Missing);
        let mut failures = Failures::default();
        assert!(failures.count(&batch(&[missing; 99]), most).is_none(), "too few to say");
        assert_eq!(failures.count(&batch(&[None]), most).unwrap().kept, 1, "99 of 100");
        let mut failures = Failures::default();
        let tenth: Vec<_> = (0..1_000).map(|n| (n % 10 == 9).then_some(RowCode::Decode)).collect();
        assert!(failures.count(&batch(&tenth), most).is_none(), "exactly 10 % is not more than 10 %");
        let TooMany { error, .. } = failures.count(&batch(&[missing; 5]), most).unwrap();
        assert!(error.to_string().contains("101 of the last 1000 rows failed"), "{error}");
        // A bad stretch is forgotten after a thousand good ones.
        let mut failures = Failures::default();
        assert!(failures.count(&batch(&[None; 900]), most).is_none());
        assert!(failures.count(&batch(&[missing; 99]), most).is_none());
        assert!(failures.count(&batch(&[None; 1_000]), most).is_none());
        assert_eq!(failures.latest_failed, 0);
        assert!(failures.count(&batch(&[missing; 100]), most).is_none());
    }
}
