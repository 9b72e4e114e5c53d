//! Names, prompts, tags, keys and labels that try to steer a terminal or to pass for something else.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rusqlite::Connection;
use serde_json::{Value, json};

use super::tame;
use crate::cli::{call, croprow, expect, run};
use crate::provenance::copy_of;
use crate::support::dump::{assert_sound, number, text};
use crate::support::picture;

const DETECTOR: &str = "tests/data/models/yolo-v8-tiny";

/// Colours, a title, a second line, HTML, a C1 control and a mark that turns the direction of text.
const NAME: &str = "a\x1b[31m\n\"><img src=x>\u{9b}31m\u{202e}'--.jpg";

#[test]
fn a_hostile_name_goes_through_every_verb_and_steers_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let photos = folder.path().join("\x1b]0;title\x07");
    fs::create_dir(&photos).unwrap();
    picture(1, 50, 40).save(photos.join(NAME)).unwrap();
    fs::write(photos.join(format!("bad{NAME}")), "\x1b[2Jjunk").unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (db, crops) = (at("photos.db"), at("crops"));
    let model = copy_of(DETECTOR, &folder.path().join("model\x1b[7m"));
    fs::write(Path::new(&model).join("croprow.toml"), "[detector]\nlabels = [\"\\u001b[31mred\\n\", \"=1+1\"]\n")
        .unwrap();

    let said = [
        (vec!["add", &db, photos.to_str().unwrap()], 0),
        (
            vec![
                "-vv",
                "run",
                &db,
                "--detector",
                &model,
                "--crops",
                &crops,
                "--device",
                "cpu",
                "--box-threshold",
                "0.06",
            ],
            2,
        ),
        (vec!["run", &db, "--json"], 2),
        (vec!["status", &db], 0),
        (vec!["status", &db, "--json"], 0),
        (vec!["doctor", "--detector", &model, "--device", "cpu"], 0),
        (vec!["doctor", "--detector", &model, "--device", "cpu", "--json"], 0),
        (vec!["select", &db, "--box-threshold", "0.01"], 1),
        (vec!["run", &db, "--detector", &at("gone\x1b[1m")], 1),
        (vec!["retry", &db], 0),
    ]
    .map(|(args, code)| {
        let output = call(&args);
        expect(&output, code);
        tame(&output)
    });
    assert!(said[3].contains("bada\\u{1b}[31m\\n\"><img src=x>\\u{9b}31m\\u{202e}'--.jpg"), "{}", said[3]);
    let status: Value = serde_json::from_str(&said[4]).unwrap();
    assert!(status["failures"][0]["example"].as_str().unwrap().contains("\\u{1b}[31m\\n"), "{status}");
    assert!(said[5].contains("\\u{1b}[31mred"), "{}", said[5]);

    // What is stored is what was given, and what is said of it is tame also in another program.
    let stored = text(Path::new(&db), "SELECT path FROM images WHERE format = 'jpeg'");
    assert_eq!(stored, photos.join(NAME).to_str().unwrap());
    assert_eq!(
        number(
            Path::new(&db),
            "SELECT count(*) FROM regions WHERE label IN (char(27) || '[31mred' || char(10), '=1+1')"
        ),
        { number(Path::new(&db), "SELECT count(*) FROM regions") }
    );
    assert!(number(Path::new(&db), "SELECT count(*) FROM regions WHERE crop GLOB '[0-9a-f][0-9a-f]/1-*.jpg'") > 0);
    assert_sound(Path::new(&db));
}

#[test]
fn lists_of_hostile_rows_are_stored_exactly_and_errors_in_them_are_tame() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let db = at("photos.db");
    let rows =
        [json!({"path": NAME, "prompt": NAME, "tag": "=cmd|' /C calc'!A0", "key": "-- \x1b[31m; DROP TABLE images"})];
    fs::write(at("rows.json"), serde_json::to_string(&rows).unwrap()).unwrap();
    fs::write(at("rows.csv"), format!("path,tag\n\"--help\",\"{}\"\n", NAME.replace('"', "\"\""))).unwrap();
    fs::write(at("bad.jsonl"), "{\"path\": \"\x1b[31m").unwrap();
    fs::write(at("bad.csv"), "\x1b[31m,tag\nx,y\n").unwrap();
    for (args, code) in [
        (vec!["add", &db, "--from", &at("rows.json"), "--root", "/photos"], 0),
        (vec!["add", &db, "--from", &at("rows.csv"), "--root", "/photos"], 0),
        (vec!["add", &db, "--from", &at("bad.jsonl")], 1),
        (vec!["add", &db, "--from", &at("bad.csv")], 1),
        (vec!["add", &db, &at("gone\x1b[31m\nerror: forged")], 1),
        (vec!["add", &db, "--from-sqlite", &db, "--query", "SELECT \x1b[31m FROM images"], 1),
        (vec!["add", &db, "--from-sqlite", &db, "--query", "SELECT path AS \"\x1b[31m\" FROM images"], 1),
        (vec!["add", &at("no\x1b[31mdatabase/x.db"), "."], 1),
        (vec!["run", &db, "--detector", DETECTOR, "--crops", "/proc/\x1b[31m"], 1),
        (vec!["status", "--\x1b[31m\u{202e}"], 1),
        (vec!["\x1b[31m"], 1),
    ] {
        let output = croprow().args(&args).output().unwrap();
        expect(&output, code);
        let said = tame(&output);
        assert!(!said.lines().any(|line| line.starts_with("error: forged")), "{said}");
    }
    let stored = |column: &str| text(Path::new(&db), &format!("SELECT {column} FROM images ORDER BY id LIMIT 1"));
    assert_eq!((stored("prompt"), stored("tag")), (NAME.to_owned(), "=cmd|' /C calc'!A0".to_owned()));
    assert_eq!(stored("key"), "-- \x1b[31m; DROP TABLE images");
    assert_eq!(
        number(Path::new(&db), "SELECT count(*) FROM images WHERE path IN ('/photos/--help', '/photos/' || prompt)"),
        2
    );
}

#[test]
fn ten_thousand_missing_files_are_no_ten_thousand_lines() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("photos.db").to_str().unwrap().to_owned();
    // The folder is there: it is the files that are missing, not a disk.
    let here = folder.path().display();
    let list: String = (0..10_000).map(|n| format!("{here}/\x1b[31m{n}.jpg\n")).collect();
    fs::write(folder.path().join("list"), list).unwrap();
    expect(&call(&["add", &db, "--from", folder.path().join("list").to_str().unwrap()]), 0);
    let said = tame(&run(&db, &[]));
    assert!(said.contains("10000 failed"), "{said}");
    assert!(said.lines().count() < 40 && said.len() < 8_000, "{said}");
    assert_eq!(
        number(
            Path::new(&db),
            "SELECT count(*) FROM failures WHERE code = 'missing' AND message LIKE '%[31m9999.jpg%'"
        ),
        1
    );
}

#[test]
fn odd_names_come_back_exactly_and_have_whole_crops() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (db, photos, crops) = (at("photos.db"), at("photos"), at("crops"));
    fs::create_dir(&photos).unwrap();
    let longest = "n".repeat(251) + ".png";
    let names: [&[u8]; 11] = [
        b"with space.png",
        b"two\nlines.png",
        b"it's \"quoted\".png",
        b"-dash.png",
        b"100%25.png",
        "\u{1f682}.png".as_bytes(),
        "写真.png".as_bytes(),
        // The same word, composed and decomposed: two files.
        "\u{e9}.png".as_bytes(),
        "e\u{301}.png".as_bytes(),
        longest.as_bytes(),
        b"caf\xe9 \xff.png",
    ];
    let paths: BTreeSet<Vec<u8>> = (0..)
        .zip(names)
        .map(|(number, name)| {
            let path = Path::new(&photos).join(OsStr::from_bytes(name));
            picture(number, 60, 40).save_with_format(&path, image::ImageFormat::Png).unwrap();
            path.as_os_str().as_bytes().to_vec()
        })
        .collect();
    expect(&call(&["add", &db, &photos]), 0);
    let output = run(&db, &["--crops", &crops, "--on-empty", "whole"]);
    expect(&output, 0);
    tame(&output);
    let conn = Connection::open(&db).unwrap();
    for sql in [
        "SELECT CAST(path AS BLOB) FROM images WHERE embed_state = 'done'",
        "SELECT DISTINCT CAST(path AS BLOB) FROM results WHERE embedded
         AND crop GLOB '[0-9a-f][0-9a-f]/' || image_id || '-*.jpg'",
    ] {
        let mut statement = conn.prepare(sql).unwrap();
        let stored = statement.query_map([], |row| row.get::<_, Vec<u8>>(0)).unwrap().map(Result::unwrap);
        assert_eq!(stored.collect::<BTreeSet<_>>(), paths, "{sql}");
    }
    let verified = call(&["verify", &db]);
    expect(&verified, 0);
    tame(&verified);
    assert_sound(Path::new(&db));
}
