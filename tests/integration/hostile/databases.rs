//! Databases that a stranger has prepared.

use std::fs;
use std::path::Path;

use rusqlite::Connection;

use super::tame;
use crate::cli::{EMBEDDER, call, expect, folder, run};
use crate::support::dump::{assert_sound, number, text};

#[test]
fn triggers_and_views_of_a_stranger_reach_nothing_outside_of_the_database() {
    let (folder, db, photos) = folder(2);
    expect(&call(&["add", &db, &photos]), 0);
    let extension = folder.path().join("evil.so");
    fs::write(&extension, "not even a library").unwrap();
    let pristine = fs::read(&db).unwrap();
    for (sql, code) in [
        ("CREATE TRIGGER evil AFTER UPDATE ON images BEGIN SELECT load_extension('{}'); END", 3),
        ("CREATE TRIGGER evil AFTER INSERT ON runs BEGIN SELECT fts3_tokenizer('x', x'00'); END", 3),
        ("CREATE TEMP TABLE t (x); CREATE VIEW evil AS SELECT load_extension('{}')", 0),
        // A user's own, which only speaks of the database.
        (
            "CREATE TABLE mine (x); CREATE TRIGGER kind AFTER UPDATE ON images BEGIN INSERT INTO mine VALUES (upper(new.path)); END",
            0,
        ),
    ] {
        fs::write(&db, &pristine).unwrap();
        let conn = Connection::open(&db).unwrap();
        conn.execute_batch(&sql.replace("{}", extension.to_str().unwrap())).unwrap();
        drop(conn);
        let output = run(&db, &[]);
        let said = expect(&output, code);
        tame(&output);
        if code == 0 {
            assert!(said.contains("2 done"), "{sql}: {said}");
        } else {
            assert_eq!(
                number(Path::new(&db), "SELECT count(*) FROM images WHERE detect_state = 'pending'"),
                2,
                "{said}"
            );
        }
    }
    assert!(number(Path::new(&db), "SELECT count(*) FROM mine") > 0);
    assert_eq!(text(Path::new(&db), "SELECT name FROM sqlite_schema WHERE name = 'kind'"), "kind");
    assert_sound(Path::new(&db));
}

#[test]
fn a_view_in_place_of_ours_that_calls_what_it_must_not_is_an_error() {
    let (_folder, db, photos) = folder(1);
    expect(&call(&["add", &db, &photos]), 0);
    let conn = Connection::open(&db).unwrap();
    conn.execute_batch(
        "DROP VIEW failures; CREATE VIEW failures AS SELECT load_extension('x') AS stage, 1 AS code, 2 AS message",
    )
    .unwrap();
    drop(conn);
    let output = call(&["status", &db]);
    let said = expect(&output, 3);
    assert!(said.contains("load_extension"), "{said}");
    tame(&output);
}

#[test]
fn text_that_is_no_text_fails_its_row_at_most() {
    let (_folder, db, photos) = folder(5);
    expect(&call(&["add", &db, &photos]), 0);
    let conn = Connection::open(&db).unwrap();
    conn.execute_batch(
        "UPDATE images SET prompt = CAST(x'636174ff' AS TEXT) WHERE id = 2;
         UPDATE images SET key = CAST(x'ff' AS TEXT), tag = CAST(x'fe' AS TEXT) WHERE id = 3;
         UPDATE images SET file_size_bytes = -1, file_mtime_ns = -9223372036854775808 WHERE id = 4",
    )
    .unwrap();
    drop(conn);
    let detector = ["--detector", "tests/data/models/owlvit-tiny", "--prompt", "cat", "--on-empty", "whole"];
    let output = call(&[&["run", &db, "--device", "cpu", "--embedder", EMBEDDER], &detector[..]].concat());
    expect(&output, 2);
    tame(&output);
    let path = Path::new(&db);
    assert_eq!(number(path, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 4);
    assert_eq!(
        text(path, "SELECT image_id || ' ' || code || ' ' || (message LIKE '%UTF-8%') FROM failures"),
        "2 prompt 1"
    );
    assert_sound(path);
    // What is stored is read once more, now with a label that is no text.
    Connection::open(&db)
        .unwrap()
        .execute("UPDATE regions SET label = CAST(x'ff' AS TEXT) WHERE image_id = 3", [])
        .unwrap();
    let again = call(&["run", &db, "--embedder", "tests/data/models/dinov2-tiny", "--stale", "redo"]);
    expect(&again, 2);
    assert_eq!(number(path, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 4);
    expect(&call(&["status", &db]), 0);
}

#[test]
fn statements_hidden_behind_a_trigger_are_not_executed() {
    let (folder, db, photos) = folder(1);
    expect(&call(&["add", &db, &photos]), 0);
    let conn = Connection::open(&db).unwrap();
    conn.execute_batch("PRAGMA writable_schema = ON").unwrap();
    let hidden =
        "UPDATE sqlite_schema SET sql = sql || '; DELETE FROM images; --' WHERE name = 'images_counted_on_insert'";
    assert_eq!(conn.execute(hidden, []).unwrap(), 1);
    drop(conn);
    // As many as are counted in one go, for which the trigger is put aside and made again.
    let list: String = (0..6_000).map(|n| format!("/photos/{n}.jpg\n")).collect();
    fs::write(folder.path().join("list"), list).unwrap();
    let before = fs::read(&db).unwrap();
    let output = call(&["add", &db, "--from", folder.path().join("list").to_str().unwrap()]);
    let said = expect(&output, 1);
    tame(&output);
    assert!(said.contains("malformed"), "{said}");
    assert_eq!(fs::read(&db).unwrap(), before, "SQLite refuses such a schema as a whole");
}
