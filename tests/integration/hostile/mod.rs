//! What strangers bring: names, paths, links, databases. The program as a process, with real ONNX files.

mod conditions;
mod databases;
mod names;
mod roots;

use std::process::Output;

/// Everything a process said; never with a character that could steer a terminal.
#[track_caller]
fn tame(output: &Output) -> String {
    let said = [output.stdout.as_slice(), &output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    let wild = said.chars().find(|c| (c.is_control() && *c != '\n') || matches!(c, '\u{200e}'..='\u{202e}'));
    assert_eq!(wild, None, "{said:?}");
    said
}
