//! A prompt is a list of labels. How people write one, what the models are sent,
//! and what was made of those already met. Pure: knows no tokens.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::row::{RowCode, RowError};

/// A longer label is a mistake, and it would be stored with every region.
const LABEL_BYTES_MOST: usize = 1_000;

/// More labels are a mistake: the model is asked about some forty at a time.
const LABELS_MOST: usize = 20_000;

/// A label to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    /// As the user wrote it, without space around it; what is stored.
    pub own: String,
    /// In lower case, with single spaces and without full stops: what GroundingDINO is sent.
    pub plain: String,
}

/// The labels of a prompt, without repetitions: a JSON list, or text that is split at its full stops, or, where it
/// has none, at commas, semicolons and line ends.
///
/// # Errors
/// There is no label in it, or too many; or it looks like JSON and is no list of texts.
pub(super) fn labels(prompt: &str) -> Result<Vec<Label>, String> {
    if prompt.contains(char::REPLACEMENT_CHARACTER) {
        return Err("the prompt is not valid UTF-8, or holds the character that stands for what was not".to_owned());
    }
    let prompt = prompt.trim();
    let parts: Vec<String> = if prompt.starts_with('[') {
        serde_json::from_str(prompt)
            .map_err(|e| format!("the prompt begins like a JSON list of labels and is none: {e}"))?
    } else if prompt.contains('.') {
        prompt.split('.').map(str::to_owned).collect()
    } else {
        prompt.split([',', ';', '\n']).map(str::to_owned).collect()
    };
    if parts.len() > LABELS_MOST {
        return Err(format!("the prompt names {} things to look for; {LABELS_MOST} are the most", parts.len()));
    }
    let mut labels: Vec<Label> = Vec::new();
    let mut known: HashSet<String> = HashSet::new();
    for part in parts {
        let own = part.split_whitespace().collect::<Vec<_>>().join(" ");
        let plain = own.to_lowercase().replace('.', " ").split_whitespace().collect::<Vec<_>>().join(" ");
        if !plain.is_empty() && known.insert(plain.clone()) {
            labels.push(Label { own, plain });
        }
    }
    if let Some(long) = labels.iter().find(|l| l.own.len() > LABEL_BYTES_MOST) {
        let begin: String = long.own.chars().take(40).collect();
        return Err(format!(
            "the label \"{begin}...\" has {} bytes; labels have at most {LABEL_BYTES_MOST}",
            long.own.len()
        ));
    }
    if labels.is_empty() {
        return Err("the prompt names nothing to look for; write labels as \"a cat. a dog.\" or a JSON list".to_owned());
    }
    Ok(labels)
}

/// Distinct prompts whose tokens are remembered, and bytes of all of them. A table with a prompt of its own in every
/// row must not fill the memory: beyond either all are forgotten.
const PROMPTS_REMEMBERED: usize = 10_000;
const PROMPT_BYTES_REMEMBERED: usize = 4 << 20;

/// What an adapter made of the prompts that it met, each made once.
pub(super) struct Prompts<P> {
    /// For rows without their own.
    run: Option<String>,
    known: HashMap<String, Result<Arc<P>, String>>,
    /// Of the prompts in `known`.
    known_bytes: usize,
}

impl<P> Prompts<P> {
    /// `run` is the prompt of rows without their own.
    pub(super) fn new(run: Option<String>) -> Self {
        Self { run, known: HashMap::new(), known_bytes: 0 }
    }

    /// What `make` makes of a row's prompt, or the run's.
    ///
    /// # Errors
    /// There is none, or it cannot be used: code `prompt`.
    pub(super) fn of(
        &mut self,
        prompt: Option<&str>,
        make: impl FnOnce(&[Label]) -> Result<P, String>,
    ) -> Result<Arc<P>, RowError> {
        let Some(prompt) = prompt.map(str::to_owned).or_else(|| self.run.clone()) else {
            return Err(RowError::new(RowCode::Prompt, "the row has no prompt, and no --prompt is given"));
        };
        self.prepare(&prompt, make).map_err(|why| RowError::new(RowCode::Prompt, why))
    }

    /// The same for a prompt that is given, with the reason as text.
    pub(super) fn prepare(
        &mut self,
        prompt: &str,
        make: impl FnOnce(&[Label]) -> Result<P, String>,
    ) -> Result<Arc<P>, String> {
        if let Some(known) = self.known.get(prompt) {
            return known.clone();
        }
        let made = labels(prompt).and_then(|labels| make(&labels)).map(Arc::new);
        if self.known.len() >= PROMPTS_REMEMBERED || self.known_bytes + prompt.len() > PROMPT_BYTES_REMEMBERED {
            self.known.clear();
            self.known_bytes = 0;
        }
        self.known_bytes += prompt.len();
        self.known.insert(prompt.to_owned(), made.clone());
        made
    }
}

/// What GroundingDINO is sent: `a cat. a dog.`, for the log.
pub(super) fn sentence(labels: &[Label]) -> String {
    let sent: Vec<String> = labels.iter().map(|l| format!("{}.", l.plain)).collect();
    sent.join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(prompt: &str) -> String {
        sentence(&labels(prompt).unwrap())
    }

    #[test]
    fn prompts_are_sent_in_lower_case_with_full_stops() {
        for prompt in [
            "Cat; DOG, remote control",
            " cat.dog . Remote   Control",
            r#"["Cat", "dog", "remote control."]"#,
            "cat\ndog\nremote control\n",
        ] {
            assert_eq!(sent(prompt), "cat. dog. remote control.", "{prompt}");
        }
        assert_eq!(sent("a train. a locomotive."), "a train. a locomotive.");
        assert_eq!(sent("a white, fluffy dog. a cat"), "a white, fluffy dog. a cat.");
        assert_eq!(sent(r#"["St. Bernard"]"#), "st bernard.");
    }

    #[test]
    fn the_label_that_is_stored_is_the_users_own() {
        let own = |prompt: &str| labels(prompt).unwrap().into_iter().map(|l| l.own).collect::<Vec<_>>();
        assert_eq!(own(r#"["St. Bernard", "Tabby  cat"]"#), ["St. Bernard", "Tabby cat"]);
        assert_eq!(own("container. container number. Container."), ["container", "container number"]);
    }

    #[test]
    fn a_prompt_without_a_label_is_an_error() {
        for prompt in ["", " . . ", "[]", ";,", "[\" \"]"] {
            assert!(labels(prompt).unwrap_err().contains("nothing to look for"), "{prompt:?}");
        }
        assert!(labels(&"very ".repeat(300)).unwrap_err().contains("1499 bytes"));
        assert!(labels("[cat, dog]").unwrap_err().contains("JSON"));
        assert!(labels("cat. \u{fffd}dog.").unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn a_prompt_of_endless_labels_is_refused_at_once() {
        let prompt = |labels: u32| (0..labels).map(|n| format!("{n:x}.")).collect::<String>();
        assert_eq!(labels(&prompt(19_000)).unwrap().len(), 19_000);
        assert!(labels(&prompt(2_000_000)).unwrap_err().contains("20000 are the most"));
    }

    #[test]
    fn long_prompts_are_not_all_remembered() {
        let mut prompts: Prompts<usize> = Prompts::new(None);
        for n in 0..50 {
            let prompt = format!("{n}. {}", "a cat. ".repeat(20_000 / 2));
            assert_eq!(prompts.prepare(&prompt, |labels| Ok(labels.len())).as_deref(), Ok(&2));
            assert!(prompts.known.keys().map(String::len).sum::<usize>() <= PROMPT_BYTES_REMEMBERED);
            assert_eq!(prompts.known.keys().map(String::len).sum::<usize>(), prompts.known_bytes);
        }
        assert!(prompts.known.len() < 60 && prompts.known.len() > 20);
    }

    proptest! {
        #[test]
        fn what_is_sent_gives_the_same_labels_again(prompt in "\\PC{0,60}") {
            if let Ok(found) = labels(&prompt) && !sentence(&found).starts_with('[') {
                let again = labels(&sentence(&found)).unwrap();
                prop_assert_eq!(sentence(&again), sentence(&found));
            }
        }
    }
}
