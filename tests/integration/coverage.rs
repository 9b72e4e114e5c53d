//! The table of promises is complete, and every test that it names is there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::support::root;

/// The numbers of the promises by their letter, in the order of the table.
const PROMISES: [(char, &[RangeInclusive<u32>]); 6] = [
    ('I', &[1..=8, 10..=21, 30..=34, 40..=45]),
    ('O', &[1..=20]),
    ('G', &[1..=16]),
    ('S', &[1..=19]),
    ('L', &[1..=18]),
    ('X', &[1..=10]),
];

/// A name of one word with so many underscores is a test's, not a column's or a code's.
const UNDERSCORES_LEAST: usize = 3;

/// One line of the table: ids, what the program must do, and what shows it.
fn table() -> Vec<[String; 3]> {
    let text = fs::read_to_string(root().join("tests/COVERAGE.md")).unwrap();
    let lines = text.lines().filter(|line| line.starts_with("| ")).skip(2);
    lines
        .map(|line| {
            let cells: Vec<String> = line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
            cells.try_into().unwrap_or_else(|_| panic!("not three cells: {line}"))
        })
        .collect()
}

#[test]
fn every_promise_has_a_line_and_no_cell_is_empty() {
    let mut ids = BTreeSet::new();
    for [promises, must, tests] in table() {
        assert!(!must.is_empty() && !tests.is_empty(), "{promises}");
        ids.extend(promises.split(", ").map(ToOwned::to_owned));
    }
    let mut expected = BTreeSet::new();
    for (letter, ranges) in PROMISES {
        let numbers = ranges.iter().cloned().flatten();
        expected.extend(numbers.map(|number| format!("{letter}-{number:02}")));
    }
    assert_eq!(ids, expected);
}

/// The text of every module by the name that the table has for it; `main.rs` and `lib.rs` have the empty one. Two
/// modules of one name, beside the code and beside the tests, are one here.
fn modules() -> BTreeMap<String, String> {
    let mut modules = BTreeMap::new();
    for folder in ["src", "tests/integration", "tests/crash"].map(|folder| root().join(folder)) {
        collect(&folder, &folder, &mut modules);
    }
    collect(&root().join("tests"), &root().join("tests/support"), &mut modules);
    modules
}

/// Adds what lies below `folder`; names begin below `above`.
fn collect(above: &Path, folder: &Path, modules: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(above, &path, modules);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let place = path.strip_prefix(above).unwrap().with_extension("");
            let mut words: Vec<&str> = place.iter().map(|word| word.to_str().unwrap()).collect();
            words.pop_if(|last| matches!(*last, "mod" | "main" | "lib"));
            modules.entry(words.join("::")).or_default().push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn every_test_that_the_coverage_names_exists() {
    let modules = modules();
    let mut tests = 0;
    for [ids, _, shown_by] in table() {
        // Of the name before, for `..::function`.
        let mut module = "";
        for quoted in shown_by.split('`').skip(1).step_by(2) {
            if let Some(script) = quoted.strip_prefix("scripts/") {
                let file = script.split(' ').next().unwrap();
                assert!(root().join("scripts").join(file).is_file(), "{ids}: {quoted}");
            }
            let name = quoted.trim_start_matches("unit ").trim_start_matches("crash ");
            let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:.".contains(c));
            if !is_name || !(name.contains("::") || name.matches('_').count() >= UNDERSCORES_LEAST) {
                continue;
            }
            if modules.contains_key(name) {
                module = name;
                continue;
            }
            let (within, function) = name.rsplit_once("::").unwrap_or(("", name));
            if within != ".." {
                module = within;
            }
            let text = modules.get(module).unwrap_or_else(|| panic!("{ids}: there is no module {module} for {name}"));
            assert!(text.contains(&format!("fn {function}(")), "{ids}: there is no {function} in {module}");
            tests += 1;
        }
    }
    assert!(tests > 200, "only {tests}");
}
