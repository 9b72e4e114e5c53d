//! Rows from other people's SQLite files.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use sha2::{Digest, Sha256};

use super::*;

fn sqlite(dir: &Path, sql: &str) -> PathBuf {
    let path = dir.join("their.db");
    rusqlite::Connection::open(&path).unwrap().execute_batch(sql).unwrap();
    path
}

fn query(path: &Path, sql: &str) -> AddRequest {
    let from_sqlite = Some((path.to_path_buf(), sql.to_string()));
    AddRequest { from_sqlite, root: Some("/r".into()), ..AddRequest::default() }
}

#[test]
fn a_query_on_another_sqlite_gives_rows_and_leaves_the_file_as_it_was() {
    let (_keep, dir) = tree();
    let path = sqlite(
        &dir,
        "CREATE TABLE t (n INTEGER PRIMARY KEY, p, c, s);
         INSERT INTO t VALUES (1, 'a b.jpg', 'cat', 2.0), (2, x'63e90aff', NULL, 'x'), (3, '/r/c', '', 9);",
    );
    let hash = |path: &Path| Sha256::digest(fs::read(path).unwrap());
    let before = hash(&path);
    let (rows, _) = run(&query(&path, "SELECT n AS id, p AS path, c AS prompt, s AS tag FROM t ORDER BY n")).unwrap();
    let text = |s: &str| Some(s.to_string());
    let row = |path: &[u8], id, prompt, tag: &str| NewRow {
        path: PathBuf::from(OsStr::from_bytes(path)),
        key: text(id),
        prompt,
        tag: text(tag),
        stamp: None,
    };
    let expected = [
        row(b"/r/a b.jpg", "1", text("cat"), "2"),
        row(b"/r/c\xe9\n\xff", "2", None, "x"),
        row(b"/r/c", "3", None, "9"),
    ];
    assert_eq!(rows, expected);
    assert_eq!(hash(&path), before);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing was left beside it");
}

#[test]
fn queries_that_are_not_one_select_are_refused_and_change_nothing() {
    let (_keep, dir) = tree();
    let path = sqlite(&dir, "CREATE TABLE t (path); INSERT INTO t VALUES ('a');");
    let before = fs::read(&path).unwrap();
    let other = dir.join("new.db").display().to_string();
    for (sql, message) in [
        ("DELETE FROM t RETURNING path", "expected one SELECT"),
        ("SELECT path FROM t; DROP TABLE t", "expected one statement"),
        ("WITH x AS (SELECT 1) DELETE FROM t RETURNING path", "it would write"),
        (&format!("ATTACH '{other}' AS x"), "expected one SELECT"),
        ("PRAGMA journal_mode = WAL", "expected one SELECT"),
        ("", "expected one SELECT"),
        ("SELECT load_extension('x') AS path", "not authorized"),
        ("SELECT nope FROM t", "no such column: nope"),
        ("SELECT path AS p FROM t", "the query: no column for the path"),
        ("SELECT 1 AS path FROM t", "row 1 of the query: path: expected text, found a number"),
    ] {
        let text = reason(run(&query(&path, sql)));
        assert!(text.contains("their.db: ") && text.contains(message), "{sql}: {text}");
    }
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    assert_eq!(
        run(&query(&path, "-- mine\n/* ; */ with x as (select * from t) select * from x; ")).unwrap().0.len(),
        1
    );
}

#[test]
fn files_that_are_no_sqlite_are_named() {
    let (_keep, dir) = tree();
    let text = write(&dir, "x.db", &b"not a database ".repeat(100));
    assert!(reason(run(&query(&text, "SELECT 1 AS path"))).contains("x.db: no SQLite database"));
    let missing = dir.join("missing.db");
    assert!(reason(run(&query(&missing, "SELECT 1 AS path"))).ends_with("missing.db: no such file or folder"));
    assert!(!missing.exists());
}

#[test]
fn the_log_of_another_program_is_read_along_and_the_file_stays_as_it_was() {
    let (_keep, dir) = tree();
    let path = sqlite(&dir, "PRAGMA journal_mode = WAL; CREATE TABLE t (path);");
    let writer = rusqlite::Connection::open(&path).unwrap();
    writer.execute_batch("PRAGMA wal_autocheckpoint = 0; INSERT INTO t VALUES ('a');").unwrap();
    let before = fs::read(&path).unwrap();
    assert_eq!(run(&query(&path, "SELECT path FROM t")).unwrap().0.len(), 1);
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn a_file_in_wal_mode_without_a_log_is_read_and_nothing_is_left_beside_it() {
    let (_keep, dir) = tree();
    let dir = dir.join(OsStr::from_bytes(b"50% of \xff?x=1#y"));
    fs::create_dir(&dir).unwrap();
    let path = sqlite(&dir, "PRAGMA journal_mode = WAL; CREATE TABLE t (path); INSERT INTO t VALUES ('a'), ('b');");
    symlink(&path, dir.join("link.db")).unwrap();
    assert_eq!(run(&query(&dir.join("link.db"), "SELECT path FROM t")).unwrap().0.len(), 2);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);

    let error = read(&query(&path, "SELECT path FROM t"), &mut |_| {
        let other = rusqlite::Connection::open(&path).unwrap();
        other.execute_batch("INSERT INTO t VALUES ('c'); PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
        Ok(())
    });
    assert!(error.unwrap_err().to_string().ends_with("wrote to it while it was read; run this again"));
}

#[test]
fn a_file_in_wal_mode_that_cannot_be_read_says_what_to_do() {
    let (_keep, dir) = tree();
    let path = sqlite(&dir, "PRAGMA journal_mode = WAL; CREATE TABLE t (path);");
    // Stands for a folder without write permission, which root would have all the same.
    fs::create_dir(dir.join("their.db-wal")).unwrap();
    let text = reason(run(&query(&path, "SELECT path FROM t")));
    assert!(text.contains("WAL mode") && text.contains("copy both"), "{text}");
}

#[test]
fn a_column_whose_name_is_no_text_is_an_error_and_no_panic() {
    let (_dir, path) = tree();
    let file = sqlite(&path, "CREATE TABLE t (path, other); INSERT INTO t VALUES ('a.jpg', 1)");
    let conn = rusqlite::Connection::open(&file).unwrap();
    conn.execute_batch("PRAGMA writable_schema = ON").unwrap();
    // CREATE TABLE t (path, \xff)
    let renamed =
        "UPDATE sqlite_schema SET sql = CAST(x'435245415445205441424c452074202870617468' || x'2c20ff29' AS TEXT)";
    conn.execute(renamed, []).unwrap();
    drop(conn);
    assert!(reason(run(&query(&file, "SELECT * FROM t"))).contains("not UTF-8"));
    assert_eq!(run(&query(&file, "SELECT path FROM t")).unwrap().0.len(), 1);
}
