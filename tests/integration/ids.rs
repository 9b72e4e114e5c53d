//! Ids are whole numbers of any sign: rows that people put in by hand have those that they gave them.

use std::path::Path;

use croprow::db::Db;
use croprow::row::FileStamp;
use rusqlite::Connection;

use crate::cli::{call, expect, folder, run};
use crate::support::dump::{assert_sound, number};
use crate::support::fake::{self, Setup};
use crate::support::photos;

/// Below zero, zero, and above.
const SHIFT: &str = "UPDATE images SET id = id - 5";

const DONE: &str = "SELECT count(*) FROM images WHERE detect_state = 'done' AND embed_state = 'done'";

#[test]
fn rows_with_ids_below_one_are_worked_on_like_others() {
    for (is_staged, condition) in [(false, None), (true, None), (false, Some("id < 100")), (true, Some("id < 100"))] {
        let (_folder, db, _) = photos(9);
        let conn = Connection::open(&db).unwrap();
        // Never settled.
        conn.execute("UPDATE images SET detect_state = NULL WHERE id % 2 = 0", []).unwrap();
        conn.execute(SHIFT, []).unwrap();
        let mut setup = Setup { condition, ..Setup::default() };
        setup.config.staged = is_staged;
        fake::run(&db, &setup).unwrap();
        assert_eq!(number(&db, DONE), 9, "staged: {is_staged}, {condition:?}");
        assert_sound(&db);
    }
}

#[test]
fn a_changed_file_of_a_row_below_one_is_noticed() {
    let (_folder, path, _) = photos(9);
    Connection::open(&path).unwrap().execute(SHIFT, []).unwrap();
    fake::run(&path, &Setup::default()).unwrap();
    let mut db = Db::open(&path).unwrap();
    assert_eq!(db.retry_changed(|_| Some(FileStamp { size_bytes: 1, mtime_ns: 1 })).unwrap(), 9);
    assert_sound(&path);
}

#[test]
fn the_program_runs_selects_again_and_verifies_rows_below_one() {
    let (_folder, db, photos) = folder(9);
    expect(&call(&["add", &db, &photos]), 0);
    Connection::open(&db).unwrap().execute(SHIFT, []).unwrap();
    assert!(expect(&run(&db, &["--box-threshold", "0.06"]), 0).contains("9 done, 0 failed"));
    let said = expect(&call(&["run", &db, "--box-threshold", "0.5", "--stale", "redo"]), 0);
    assert!(said.contains("9 images selected again"), "{said}");
    assert!(expect(&call(&["select", &db, "--keep", "best"]), 0).contains("9 images selected again"));
    expect(&call(&["verify", &db]), 0);
    assert_eq!(number(Path::new(&db), DONE), 9);
}
