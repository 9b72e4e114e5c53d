//! How the program stops: at a time, by signals, and with which exit code.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::cli::{call, croprow, expect};
use crate::support::dump::{assert_sound, number};
use crate::support::picture;

const MODELS: [&str; 4] =
    ["--detector", "tests/data/models/yolo-v8-tiny", "--embedder", "tests/data/models/tiny-tokens"];

/// A database of `rows` rows that all name one picture, each with a key of its own.
fn many(rows: usize) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let photo = folder.path().join("photo.png");
    picture(1, 60, 40).save(&photo).unwrap();
    let list = folder.path().join("list.csv");
    let lines = (0..rows).map(|n| format!("{},{n}\n", photo.display()));
    fs::write(&list, format!("path,key\n{}", lines.collect::<String>())).unwrap();
    let db = folder.path().join("photos.db").to_str().unwrap().to_owned();
    expect(&call(&["add", &db, "--from", list.to_str().unwrap()]), 0);
    (folder, db)
}

fn states(db: &str, condition: &str) -> i64 {
    number(Path::new(db), &format!("SELECT count(*) FROM images WHERE {condition}"))
}

/// The time of day that many seconds from now, where clocks show UTC.
fn clock(after_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + after_s;
    format!("{:02}:{:02}:{:02}", now / 3600 % 24, now / 60 % 60, now % 60)
}

/// More rows than the small models do in the time that a test has.
const ENDLESS: usize = 150_000;

#[test]
fn at_the_time_of_until_a_run_stops_with_0_and_the_rest_is_pending() {
    let (_folder, db) = many(ENDLESS);
    let until = clock(4);
    let mut run = croprow();
    run.args(["run", &db, "--device", "cpu", "--batch", "1", "--json", "--until", &until])
        .args(MODELS)
        .env("TZ", "UTC");
    let began = Instant::now();
    let said = expect(&run.output().unwrap(), 0);
    assert!(began.elapsed() < Duration::from_secs(60), "took {:?}: {said}", began.elapsed());
    let at = format!("{} UTC", &until[..5]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.iter().any(|l| l.starts_with("detect and embed") && l.ends_with(&at)), "the first line: {said}");
    let stopped = lines.iter().find(|l| l.starts_with("stopped at ")).unwrap_or_else(|| panic!("{said}"));
    assert!(stopped.contains(&format!("{at} (--until): ")), "{said}");
    let json = lines.iter().find(|l| l.starts_with('{')).unwrap();
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!((json["ended"].as_str(), json["stopped_by"].as_str()), (Some("stopped"), Some("until")));
    assert_eq!(states(&db, "token IS NOT NULL"), 0, "nothing is left running");
    assert!(states(&db, "detect_state = 'pending'") > 0);
    assert_eq!(Some(states(&db, "embed_state = 'done'")), json["done"].as_i64());
    assert_sound(Path::new(&db));
    let past = expect(&call(&["run", &db, "--until", "2001-01-01T00:00"]), 1);
    assert!(past.contains("--until 2001-01-01T00:00:00 is past"), "{past}");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 1, "nothing was begun");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs WHERE settings LIKE '%until%'"), 0, "not remembered");
}
