//! Folders that are gone while other pictures are read: a disk that is not there must not be taken for deleted files, however
//! a run ends.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use croprow::config::Stale;
use croprow::db::suspects::Claims;
use croprow::error::Error;
use croprow::pipeline::stop::{Cause, Stop};
use rusqlite::Connection;

use crate::cli::{call, expect, folder, run as run_program};
use crate::support::dump::{assert_sound, number};
use crate::support::fake::{Behaviour, Setup, database, run, run_until};
use crate::support::pictures;

/// A database of pictures that are there, and of an archive whose disk is not.
struct Mixed {
    _folder: tempfile::TempDir,
    db: PathBuf,
    archive: PathBuf,
}

impl Mixed {
    /// `gone` rows of the archive, before or after `there` others.
    fn new(there: u32, gone: u32, gone_first: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (home, archive) = (folder.path().join("pictures"), folder.path().join("archive"));
        fs::create_dir(&home).unwrap();
        let mut files =
            [pictures(&home, there), (0..gone).map(|n| archive.join(format!("{n}/{n}.png"))).collect::<Vec<_>>()];
        if gone_first {
            files.reverse();
        }
        let db = folder.path().join("photos.db");
        database(&db, &files.concat());
        Self { _folder: folder, db, archive }
    }

    fn count(&self, condition: &str) -> i64 {
        number(&self.db, &format!("SELECT count(*) FROM images WHERE {condition}"))
    }

    /// No row of the archive is marked or in anybody's hands.
    #[track_caller]
    fn assert_pending(&self, rows: i64) {
        assert_eq!(self.count("'failed' IN (detect_state, embed_state)"), 0);
        assert_eq!(self.count("path LIKE '%/archive/%' AND detect_state = 'pending' AND token IS NULL"), rows);
        assert_sound(&self.db);
    }
}

#[track_caller]
fn assert_gone(error: &Error, archive: &Path) {
    assert!(matches!(error, Error::PlaceGone { folder, was_read: false } if folder == archive), "{error}");
    assert!(error.exit_code() == 3 && error.hint().is_some_and(|hint| hint.contains("--where")), "{error}");
}

fn slow() -> Setup {
    Setup { behaviour: Behaviour { call: Duration::from_millis(10), ..Behaviour::default() }, ..Setup::default() }
}

#[test]
fn a_disk_that_is_not_there_stops_the_run_although_other_pictures_are_read() {
    let mixed = Mixed::new(30, 40, false);
    assert_gone(&run(&mixed.db, &Setup::default()).unwrap_err(), &mixed.archive);
    assert_eq!(mixed.count("embed_state = 'done'"), 30);
    mixed.assert_pending(40);
}

#[test]
fn a_disk_that_is_not_there_keeps_the_results_of_its_rows_when_all_is_done_again() {
    let folder = tempfile::tempdir().unwrap();
    let (home, archive) = (folder.path().join("pictures"), folder.path().join("archive"));
    fs::create_dir(&home).unwrap();
    fs::create_dir(&archive).unwrap();
    let db = folder.path().join("photos.db");
    database(&db, &[pictures(&home, 30), pictures(&archive, 40)].concat());
    run(&db, &Setup::default()).unwrap();
    let sql =
        "SELECT count(*) FROM images i JOIN regions r ON r.image_id = i.id JOIN embeddings e ON e.region_id = r.id
               WHERE i.path LIKE '%/archive/%'";
    let results = || number(&db, sql);
    let before = results();
    assert!(before > 20, "{before}");
    fs::rename(&archive, folder.path().join("elsewhere")).unwrap();
    let again = Setup { detector: Some("fake-detector-2"), stale: Stale::Redo, ..Setup::default() };
    assert_gone(&run(&db, &again).unwrap_err(), &archive);
    assert_eq!(results(), before);
    fs::rename(folder.path().join("elsewhere"), &archive).unwrap();
    run(&db, &again).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 70);
    assert_eq!(results(), before, "the same pictures");
}

#[test]
fn rows_of_small_folders_that_were_deleted_fail_at_the_end() {
    let mixed = Mixed::new(30, 19, true);
    let summary = run(&mixed.db, &Setup::default()).unwrap();
    assert_eq!((summary.done, summary.failed, summary.released), (30, 19, 0));
    // Many of them among others that are read are no disk either.
    let folder = tempfile::tempdir().unwrap();
    let deleted = (0..60).map(|n| folder.path().join(format!("deleted-{}/{n}.png", n / 10)));
    let files: Vec<PathBuf> = pictures(folder.path(), 30).into_iter().chain(deleted).collect();
    let db = folder.path().join("photos.db");
    database(&db, &files);
    let summary = run(&db, &Setup::default()).unwrap();
    assert_eq!((summary.done, summary.failed), (30, 60));
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE code = 'missing'"), 60);
}

#[test]
fn rows_that_are_held_back_at_a_stop_are_pending_again() {
    let mixed = Mixed::new(300, 10, true);
    let stop = Stop::default();
    let summary = std::thread::scope(|scope| {
        scope.spawn(|| {
            while mixed.count("embed_state = 'done'") == 0 {
                std::thread::yield_now();
            }
            stop.ask(Cause::Signal(2));
        });
        run_until(&mixed.db, &slow(), &stop).unwrap()
    });
    assert!(summary.released >= 10 && summary.failed == 0 && summary.done < 300, "{summary:?}");
    mixed.assert_pending(10);
}

#[test]
fn a_limit_that_is_reached_says_nothing_of_a_folder_that_is_gone() {
    let mixed = Mixed::new(20, 10, true);
    let mut limited = Setup::default();
    limited.config.limit = Some(15);
    assert_gone(&run(&mixed.db, &limited).unwrap_err(), &mixed.archive);
    assert_eq!(mixed.count("embed_state = 'done'"), 5);
    mixed.assert_pending(10);
    // One that is not reached leaves no row unseen.
    limited.config.limit = Some(1_000);
    assert_eq!(run(&mixed.db, &limited).unwrap().failed, 10);
}

#[test]
fn suspects_whose_disk_is_not_there_are_not_marked_neither_one_by_one_nor_together() {
    for (claims, gone) in [(Claims::Alone, 25), (Claims::Alone, 5), (Claims::Together, 25), (Claims::Together, 5)] {
        let mixed = Mixed::new(3, gone, true);
        let conn = Connection::open(&mixed.db).unwrap();
        conn.execute_batch("PRAGMA foreign_keys = OFF").unwrap();
        let alone = claims == Claims::Alone;
        let sql = "INSERT INTO suspects (image_id, run_id, at, alone) SELECT id, 1, 0, ?1 FROM images";
        assert_eq!(conn.execute(sql, [alone]).unwrap(), gone as usize + 3);
        drop(conn);
        let error = run(&mixed.db, &Setup { claims, ..Setup::default() }).unwrap_err();
        assert!(matches!(&error, Error::PlaceGone { was_read: false, .. }), "{claims:?} {gone}: {error}");
        mixed.assert_pending(i64::from(gone));
        assert_eq!(number(&mixed.db, "SELECT count(*) FROM suspects WHERE deaths > 0"), 0);
    }
}

#[test]
fn a_root_that_is_reached_by_a_link_and_whose_disk_vanishes_fails_no_image() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, link) = (folder.path().join("disk"), folder.path().join("link"));
    fs::create_dir_all(disk.join("photos")).unwrap();
    symlink(disk.join("photos"), &link).unwrap();
    pictures(&link, 300);
    let files: Vec<PathBuf> = (0..300).map(|n| link.join(format!("{n:05}.png"))).collect();
    let db = folder.path().join("photos.db");
    database(&db, &files);
    let mut slow = slow();
    slow.config.root = Some(link.canonicalize().unwrap().into());
    let count = |condition: &str| number(&db, &format!("SELECT count(*) FROM images WHERE {condition}"));
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while count("embed_state = 'done'") == 0 {
                std::thread::yield_now();
            }
            fs::rename(&disk, folder.path().join("elsewhere")).unwrap();
        });
        run(&db, &slow).unwrap_err()
    });
    assert!(matches!(&error, Error::PlaceGone { folder, was_read: true } if *folder == link), "{error}");
    assert_eq!(count("detect_state = 'failed'"), 0);
    fs::rename(folder.path().join("elsewhere"), &disk).unwrap();
    run(&db, &slow).unwrap();
    assert_eq!(count("embed_state = 'done'"), 300);
}

#[test]
fn a_folder_that_is_gone_for_good_can_be_left_out_or_deleted() {
    let (folder, db, photos) = folder(10);
    let gone = folder.path().join("archive").to_str().unwrap().to_owned();
    expect(&call(&["add", &db, &photos]), 0);
    let list: String = (0..30).map(|n| format!("{gone}/{n}.jpg\n")).collect();
    let list_file = folder.path().join("list");
    fs::write(&list_file, list).unwrap();
    expect(&call(&["add", &db, "--from", list_file.to_str().unwrap()]), 0);
    let said = expect(&run_program(&db, &[]), 3);
    assert!(said.contains(&format!("nothing in {gone} can be read: is its disk or network folder gone?")), "{said}");
    assert!(said.contains("no image was marked as failed") && said.contains("--where"), "{said}");
    let images = |condition: &str| number(Path::new(&db), &format!("SELECT count(*) FROM images WHERE {condition}"));
    assert_eq!((images("embed_state = 'done'"), images("detect_state = 'pending'")), (10, 30));
    let without = format!("path NOT LIKE '{gone}/%'");
    expect(&call(&["run", &db, "--where", &without]), 0);
    expect(&call(&["run", &db, "--where", "none"]), 3);
    let conn = Connection::open(&db).unwrap();
    conn.execute_batch(&format!("PRAGMA foreign_keys = ON; DELETE FROM images WHERE path LIKE '{gone}/%'")).unwrap();
    drop(conn);
    expect(&call(&["run", &db]), 0);
    assert_sound(Path::new(&db));
}
