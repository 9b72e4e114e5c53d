//! Lists of labels in a graph's metadata: a JSON list or object, or the dict literal that Ultralytics writes
//! with Python's `str`, `{0: 'person', 1: "dog's bowl"}`. Pure.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// Labels by class index.
///
/// # Errors
/// What is not understood, for a message.
pub(super) fn parse(text: &str) -> Result<Vec<String>, String> {
    if let Ok(list) = serde_json::from_str::<Vec<String>>(text) {
        return Ok(list);
    }
    if let Ok(object) = serde_json::from_str::<BTreeMap<String, String>>(text) {
        let keyed: Result<Vec<_>, String> = object.into_iter().map(|(k, v)| Ok((index(&k)?, v))).collect();
        return in_order(keyed?);
    }
    Literal { rest: text.chars().peekable() }.read()
}

fn index(key: &str) -> Result<usize, String> {
    key.trim().parse().map_err(|_| format!("the key {key:?} is no number"))
}

fn in_order(mut keyed: Vec<(usize, String)>) -> Result<Vec<String>, String> {
    keyed.sort_by_key(|(i, _)| *i);
    match keyed.iter().enumerate().find(|(expected, (found, _))| expected != found) {
        Some((expected, _)) => Err(format!("the class numbers have a gap or a repetition at {expected}")),
        None => Ok(keyed.into_iter().map(|(_, label)| label).collect()),
    }
}

/// A reader of Python literals: a dict of integers or strings to strings, a list or a tuple of strings.
struct Literal<'a> {
    rest: Peekable<Chars<'a>>,
}

impl Literal<'_> {
    fn read(mut self) -> Result<Vec<String>, String> {
        let (closing, keyed) = match self.next_word()? {
            '{' => ('}', true),
            '[' => (']', false),
            '(' => (')', false),
            other => return Err(format!("a list of labels cannot begin with {other:?}")),
        };
        let mut found = Vec::new();
        loop {
            self.skip_space();
            if self.rest.next_if_eq(&closing).is_some() {
                break;
            }
            let key = if keyed { self.key()? } else { found.len() };
            found.push((key, self.string()?));
            match self.next_word()? {
                ',' => {}
                c if c == closing => break,
                other => return Err(format!("unexpected {other:?} after label {key}")),
            }
        }
        self.skip_space();
        match self.rest.next() {
            None => in_order(found),
            Some(extra) => Err(format!("unexpected {extra:?} after the list of labels")),
        }
    }

    fn key(&mut self) -> Result<usize, String> {
        self.skip_space();
        let key = match self.rest.peek() {
            Some('\'' | '"') => self.string()?,
            _ => std::iter::from_fn(|| self.rest.next_if(char::is_ascii_digit)).collect(),
        };
        match self.next_word()? {
            ':' => index(&key),
            other => Err(format!("unexpected {other:?} after the key {key:?}")),
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let quote = self.next_word()?;
        if quote != '\'' && quote != '"' {
            return Err(format!("a label must be in quotes, found {quote:?}"));
        }
        let mut label = String::new();
        loop {
            match self.rest.next() {
                Some(c) if c == quote => return Ok(label),
                Some('\\') => label.push(self.escape()?),
                Some(c) => label.push(c),
                None => return Err("a label without an end".to_owned()),
            }
        }
    }

    /// The escapes that Python's `repr` writes.
    fn escape(&mut self) -> Result<char, String> {
        match self.rest.next() {
            Some('n') => Ok('\n'),
            Some('r') => Ok('\r'),
            Some('t') => Ok('\t'),
            Some('x') => self.code_point(2),
            Some('u') => self.code_point(4),
            Some('U') => self.code_point(8),
            Some(c @ ('\\' | '\'' | '"')) => Ok(c),
            other => Err(format!("unknown escape \\{}", other.map(String::from).unwrap_or_default())),
        }
    }

    fn code_point(&mut self, digits: usize) -> Result<char, String> {
        let hex: String = self.rest.by_ref().take(digits).collect();
        let value = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
        value.and_then(char::from_u32).ok_or_else(|| format!("bad escape with {hex:?}"))
    }

    fn skip_space(&mut self) {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
    }

    fn next_word(&mut self) -> Result<char, String> {
        self.skip_space();
        self.rest.next().ok_or_else(|| "the list of labels ends early".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_dict_of_ultralytics_is_read_with_both_quotes_and_escapes() {
        let text = r#"{0: 'person', 1: "dog's bowl", 2: 'say \'hi\' "now"', 3: 'a\\b', 4: 'caf\xe9 \u2603', 5: '{x: [1]}, y'}"#;
        let expected = ["person", "dog's bowl", "say 'hi' \"now\"", "a\\b", "café ☃", "{x: [1]}, y"];
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn json_and_lists_are_read() {
        for text in [
            r#"["cat", "dog"]"#,
            r#"{"1": "dog", "0": "cat"}"#,
            "['cat', 'dog']",
            "('cat', 'dog',)",
            "{1:'dog',0:'cat'}",
        ] {
            assert_eq!(parse(text).unwrap(), ["cat", "dog"], "{text}");
        }
        assert_eq!(parse("{}").unwrap(), Vec::<String>::new());
    }

    #[test]
    fn ten_and_more_classes_are_in_the_order_of_numbers() {
        let text =
            serde_json::to_string(&(0..12).map(|i| (i.to_string(), format!("c{i}"))).collect::<BTreeMap<_, _>>());
        assert_eq!(parse(&text.unwrap()).unwrap()[10], "c10");
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for text in [
            "",
            "person",
            "{0: 'a', 2: 'b'}",
            "{0: 'a', 0: 'b'}",
            "{0: 'a'",
            "{0: 'a'} x",
            "{0: a}",
            r"{0: '\q'}",
            "{'x': 'a'}",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC{0,60}") {
            let _ = parse(&text);
        }
    }
}
