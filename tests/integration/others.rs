//! Other programs on the same database while a run works: writers that hammer, readers that never end, people who move or
//! replace the file.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use croprow::config::Stale;
use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::error::Error;
use croprow::input::{self, AddRequest};
use croprow::locked::FileId;
use croprow::pixels::header::probe;
use croprow::row::RowCode;
use rusqlite::{Connection, params};

use crate::cli::{EMBEDDER, call, expect};
use crate::support::dump::{assert_sound, dump, number, text};
use crate::support::fake::{Behaviour, Setup, database, run};
use crate::support::photos;

fn slow(call_ms: u64) -> Setup {
    Setup { behaviour: Behaviour { call: Duration::from_millis(call_ms), ..Behaviour::default() }, ..Setup::default() }
}

/// Waits until `sql` is true.
pub(crate) fn wait_for(db: &Path, sql: &str) {
    let began = Instant::now();
    while number(db, sql) == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "never came true: {sql}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn wal_bytes(db: &Path) -> u64 {
    fs::metadata(format!("{}-wal", db.display())).map_or(0, |m| m.len())
}

#[test]
fn another_writer_that_hammers_for_ten_seconds_costs_no_row() {
    let (_folder, db, files) = photos(100);
    let (over, added) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let hammer = scope.spawn(|| {
            let mut other = Connection::open(&db).unwrap();
            other.busy_timeout(Duration::from_secs(20)).unwrap();
            let began = Instant::now();
            let mut turn = 0_usize;
            while began.elapsed() < Duration::from_secs(10) {
                turn += 1;
                let tx = other.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
                tx.execute("UPDATE images SET tag = ?1 WHERE id % 7 = ?1 % 7", [turn as i64]).unwrap();
                if turn.is_multiple_of(5) {
                    let file = files[turn % files.len()].to_str().unwrap();
                    tx.execute("INSERT INTO images (path, key) VALUES (?1, ?2)", params![file, format!("k{turn}")])
                        .unwrap();
                    added.fetch_add(1, Ordering::SeqCst);
                }
                if turn.is_multiple_of(50) {
                    // A writer that thinks while it holds the lock.
                    std::thread::sleep(Duration::from_millis(200));
                }
                tx.commit().unwrap();
            }
            over.store(true, Ordering::SeqCst);
            turn
        });
        let mut runs = 0;
        while !over.load(Ordering::SeqCst) {
            run(&db, &slow(1)).unwrap();
            runs += 1;
        }
        assert!(hammer.join().unwrap() > 100 && runs > 0);
    });
    run(&db, &Setup::default()).unwrap();
    let all = 100 + added.load(Ordering::SeqCst) as i64;
    assert!(all > 110, "{all}");
    assert_eq!(number(&db, "SELECT count(*) FROM images"), all);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'done' AND embed_state = 'done'"), all);
    assert_eq!(number(&db, "SELECT max(detect_attempts) FROM images"), 1, "a row was done twice");
    assert_sound(&db);
}

#[test]
fn the_log_stays_small_and_grows_only_while_somebody_reads_in_one_transaction() {
    let (_folder, db, _) = photos(250);
    let watched = db.with_file_name("watched.db");
    Connection::open(&db).unwrap().execute("VACUUM INTO ?1", [watched.to_str().unwrap()]).unwrap();
    // Vectors of 128 KiB: about 45 MiB in all.
    let behaviour = Behaviour { dim: Some(32_768), call: Duration::from_millis(50), ..Behaviour::default() };
    let setup = Setup { behaviour, ..Setup::default() };
    let largest = |db: &Path| {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut most = 0;
                while !over.load(Ordering::SeqCst) {
                    most = most.max(wal_bytes(db));
                    std::thread::sleep(Duration::from_millis(5));
                }
                most
            });
            let result = run(db, &setup);
            over.store(true, Ordering::SeqCst);
            result.unwrap();
            watch.join().unwrap()
        })
    };
    let alone = largest(&db);
    // What VACUUM INTO makes has no log before it is opened by us.
    drop(Db::open(&watched).unwrap());
    let reader = Connection::open(&watched).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM images").unwrap();
    let with_reader = largest(&watched);
    let vectors = number(&db, "SELECT sum(length(vector)) FROM embeddings") as u64;
    assert!(vectors > 36 << 20, "{vectors}");
    // 8,000 pages, and what is committed until the checkpoint has been made: a busy machine commits more at once.
    assert!(alone < vectors, "{alone}");
    assert!(with_reader > vectors, "{with_reader}");
    let done = "SELECT count(*) FROM images WHERE embed_state = 'done'";
    assert_eq!((number(&db, done), number(&watched, done)), (250, 250));
    reader.execute_batch("COMMIT").unwrap();
    let mut db = Db::open(&watched).unwrap();
    db.retry(None).unwrap();
    assert!(db.checkpoint());
    assert_eq!(wal_bytes(&watched), 0);
}

#[test]
fn no_read_transaction_is_open_while_a_model_works() {
    let (_folder, db, _) = photos(40);
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(&db, &slow(100)).unwrap());
        wait_for(&db, "SELECT count(*) > 0 FROM images WHERE token IS NOT NULL");
        let other = Connection::open(&db).unwrap();
        other.busy_timeout(Duration::ZERO).unwrap();
        let mut emptied = 0;
        while !runner.is_finished() {
            // Succeeds only where nobody reads or writes at that moment.
            let is_busy = other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |r| r.get::<_, bool>(0));
            emptied += usize::from(matches!(is_busy, Ok(false)));
            std::thread::sleep(Duration::from_millis(20));
        }
        runner.join().unwrap();
        assert!(emptied >= 5, "{emptied}");
    });
    assert_sound(&db);
}

#[test]
fn a_database_that_is_moved_away_ends_the_run_and_goes_on_when_it_is_back() {
    let (_folder, db, files) = photos(300);
    let moved = db.with_file_name("moved.db");
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(&db, &slow(10)));
        wait_for(&db, "SELECT count(*) > 8 FROM images WHERE embed_state = 'done'");
        fs::rename(&db, &moved).unwrap();
        let error = runner.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Replaced { .. }) && error.exit_code() == 3, "{error}");
        assert!(error.to_string().contains("was deleted or moved away"), "{error}");
    });
    assert!(!db.exists(), "it was made anew");
    // Its log was left where it is.
    fs::rename(&moved, &db).unwrap();
    let done = number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'");
    assert!(done > 8 && done < 300, "{done}");
    // Its process would be gone by now, and here it is this one.
    Db::open(&db).unwrap().end_run(RunId(1), "error", 3, 0, 0, None).unwrap();
    run(&db, &Setup::default()).unwrap();
    let fresh = db.with_file_name("fresh.db");
    database(&fresh, &files);
    run(&fresh, &Setup::default()).unwrap();
    assert!(dump(&db) == dump(&fresh));
    assert_sound(&db);
}

#[test]
fn a_database_that_another_takes_the_place_of_ends_the_run_and_the_other_is_not_touched() {
    let (folder, db, files) = photos(300);
    let other = folder.path().join("other.db");
    database(&other, &files[..3]);
    let bytes = fs::read(&other).unwrap();
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(&db, &slow(10)));
        wait_for(&db, "SELECT count(*) > 8 FROM images WHERE embed_state = 'done'");
        fs::rename(&db, folder.path().join("old.db")).unwrap();
        fs::rename(format!("{}-wal", db.display()), folder.path().join("old.db-wal")).unwrap();
        fs::remove_file(format!("{}-shm", db.display())).unwrap();
        fs::rename(&other, &db).unwrap();
        // The other one's own log must survive our leaving.
        fs::write(format!("{}-wal", db.display()), b"").unwrap();
        let error = runner.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Replaced { .. }) && error.exit_code() == 3, "{error}");
        assert!(error.to_string().contains("another file was put in its place"), "{error}");
    });
    assert_eq!(fs::read(&db).unwrap(), bytes);
    assert!(Path::new(&format!("{}-wal", db.display())).exists());
    let old = folder.path().join("old.db");
    assert_eq!(number(&old, "SELECT count(*) FROM images"), 300);
    assert_sound(&old);
}

/// Rows that the sources have.
fn added(db: &mut Db, sources: &AddRequest) -> u64 {
    let mut rows = 0;
    let (result, _) = db.add(|sink| input::read(sources, sink).map(|report| rows = report.rows));
    result.unwrap();
    rows
}

#[test]
fn a_row_a_list_or_a_folder_that_names_the_database_itself_does_not_cost_its_locks() {
    let (folder, path, _) = photos(2);
    let mut open = Db::open(&path).unwrap();
    let beside = |suffix: &str| folder.path().join(format!("photos.db{suffix}"));
    let link = folder.path().join("link.jpg");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let log = FileId::of(&beside("-wal")).unwrap();
    for name in [beside(""), beside("-wal"), beside("-shm"), link] {
        let refused = probe(&name, &Setup::default().config.decode).unwrap_err();
        assert_eq!(refused.code, RowCode::NotAnImage, "{}", refused.message);
        assert!(refused.message.contains("part of the database"), "{}", refused.message);
        let list = AddRequest { from: vec![name.clone()], ..AddRequest::default() };
        assert!(input::read(&list, &mut |_| Ok(())).unwrap_err().to_string().contains("part of the database"));
        let named = AddRequest { sources: vec![name], ..AddRequest::default() };
        assert_eq!(added(&mut open, &named), 0);
    }
    let whole = AddRequest { sources: vec![folder.path().to_owned()], ..AddRequest::default() };
    assert_eq!(added(&mut open, &whole), 2, "the pictures, and no other name of the database");
    let query = Some((path.clone(), "SELECT path FROM images".to_owned()));
    let itself = AddRequest { from_sqlite: query, ..AddRequest::default() };
    assert!(input::read(&itself, &mut |_| Ok(())).unwrap_err().to_string().contains("the database itself"));
    Db::open(&path).unwrap();
    // Another program that ends removes the log, unless it sees that somebody has the database open.
    expect(&call(&["retry", path.to_str().unwrap()]), 0);
    assert_eq!(FileId::of(&beside("-wal")).unwrap(), log);
    let metrics = call(&["run", path.to_str().unwrap(), "--embedder", EMBEDDER, "--metrics", path.to_str().unwrap()]);
    assert!(expect(&metrics, 1).contains("part of the database"));
    assert_eq!(number(&path, "SELECT count(*) FROM runs"), 0, "nothing was touched");
    assert_sound(&path);
}

#[test]
fn what_a_user_adds_to_the_schema_works_on_and_survives() {
    let (_folder, db, _) = photos(8);
    let additions = "
        ALTER TABLE images ADD COLUMN stars INTEGER;
        UPDATE images SET stars = id;
        CREATE TABLE notes (image_id INTEGER, path);
        CREATE INDEX images_by_stars ON images (stars);
        CREATE VIEW liked AS SELECT path FROM images WHERE stars > 5;
        CREATE TRIGGER noted AFTER UPDATE OF embed_state ON images
        WHEN NEW.embed_state IS 'done' AND OLD.embed_state IS NOT 'done'
        BEGIN INSERT INTO notes VALUES (NEW.id, NEW.path); END;";
    Connection::open(&db).unwrap().execute_batch(additions).unwrap();
    let schema = || text(&db, "SELECT group_concat(sql, ';') FROM (SELECT sql FROM sqlite_schema ORDER BY name)");
    let before = schema();
    assert_eq!(run(&db, &Setup::default()).unwrap().done, 8);
    let again = Setup { detector: Some("fake-detector-2"), stale: Stale::Redo, ..Setup::default() };
    assert_eq!(run(&db, &again).unwrap().done, 8);
    assert_eq!(schema(), before);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE stars = id"), 8);
    assert_eq!(number(&db, "SELECT count(*) FROM liked"), 3);
    assert_eq!(number(&db, "SELECT count(*) FROM notes JOIN images ON images.id = image_id"), 16);
    assert_sound(&db);
}
