//! The one way from foreign text to a terminal, a log or a message: names of files, labels of models, what SQLite or
//! the runtime library says. Not for opening files, and not for what is stored as data: that stays as it is.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::Value;

/// One line: control characters, line breaks and marks that reorder a line of text become escapes.
pub fn line(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if steers(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

/// Several lines, for text whose line breaks are our own.
pub fn lines(text: &str) -> String {
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// A path in one line; bytes that are not UTF-8 become escapes, too.
pub fn path(path: &Path) -> String {
    let mut safe = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        safe.push_str(&line(chunk.valid()));
        for byte in chunk.invalid() {
            safe.push_str(&format!("\\x{byte:02x}"));
        }
    }
    safe
}

/// JSON in one line. Escapes of its own, which a reader turns back: JSON lets some control characters through.
pub fn json(value: &Value) -> String {
    let text = value.to_string();
    if !text.chars().any(steers) {
        return text;
    }
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        // What steers is in a string there, and below U+10000.
        if steers(c) { safe.push_str(&format!("\\u{:04x}", u32::from(c))) } else { safe.push(c) }
    }
    safe
}

/// What moves a cursor, changes colours, ends a line or turns the direction of text.
fn steers(c: char) -> bool {
    let reorders = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || reorders
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_hostile_name_cannot_steer_a_terminal() {
        let name = OsStr::from_bytes(b"a\x1b[31m\n\"><img>\xff\xc3\xa9\xc2\x9b\xe2\x80\xae.jpg");
        assert_eq!(path(Path::new(name)), "a\\u{1b}[31m\\n\"><img>\\xffé\\u{9b}\\u{202e}.jpg");
    }

    #[test]
    fn our_own_line_breaks_stay_and_no_other_control_character_does() {
        assert_eq!(lines("one\ntwo\r\x07\n"), "one\ntwo\\r\\u{7}\n");
        assert_eq!(line("one\ntwo\t"), "one\\ntwo\\t");
    }

    #[test]
    fn json_holds_no_control_character_and_means_the_same() {
        let value = serde_json::json!({ "a\u{7f}": "\u{9b}31m\u{202e}\n\u{1b}" });
        let text = json(&value);
        assert!(!text.chars().any(steers), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
