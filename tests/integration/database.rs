//! Pages, claims, conditional commits, identity of rows, what is refused untouched.

use std::path::{Path, PathBuf};

use croprow::config::Stale;
use croprow::db::claim::{RunId, Tokens};
use croprow::db::due::InForce;
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::NewRun;
use croprow::db::{Db, Opening};
use croprow::error::Error;
use croprow::file_system::FileSystem;
use croprow::geometry::BoxPx;
use croprow::row::{Claim, FileStamp, Finished, NewRow, Outcome, Region, RowCode, RowError, Stage};
use rusqlite::Connection;

use crate::support::dump::{assert_sound, number};

pub(crate) fn row(path: &str) -> NewRow {
    NewRow { path: PathBuf::from(path), key: None, prompt: None, tag: None, stamp: None }
}

fn add(db: &mut Db, rows: Vec<NewRow>) -> croprow::db::add::Added {
    let (result, added) = db.add(|sink| rows.into_iter().try_for_each(sink));
    result.unwrap();
    added
}

fn recipe(name: &'static str) -> StoredRecipe<'static> {
    StoredRecipe { body: name, model_digest: name, model_path: Path::new(name) }
}

pub(crate) fn try_begin(db: &mut Db, detect: &'static str, embed: &'static str) -> Result<(RunId, InForce), Error> {
    let (detect, embed) = (Some(recipe(detect)), Some(recipe(embed)));
    db.begin_run(&NewRun { device: "cpu", device_note: None, runtime: "fake", settings: "{}", detect, embed })
}

pub(crate) fn begin(db: &mut Db) -> Tokens {
    Tokens::new(try_begin(db, "d1", "e1").unwrap().0)
}

fn region(x0: f32, vector: Option<Vec<f32>>) -> Region {
    let bbox = BoxPx { x0, y0: 0.0, x1: x0 + 10.0, y1: 10.0 };
    Region { bbox, label: Some("cat".into()), score: Some(0.5), crop: None, vector, embedded: false }
}

fn done(claim: &Claim, regions: Vec<Region>, embed: Option<Result<(), RowError>>) -> Finished {
    let outcome = Outcome::Done { raw: None, regions, embed };
    Finished { id: claim.id, token: claim.token, stage: claim.stage, facts: None, stamp: None, lost: None, outcome }
}

/// A database in a folder of its own, with both kinds of model in force.
pub(crate) fn database(rows: usize) -> (tempfile::TempDir, PathBuf, Db, Tokens, InForce) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("photos.db");
    let mut db = Db::open_or_create(&path).unwrap();
    add(&mut db, (0..rows).map(|i| row(&format!("/p/{i:06}.jpg"))).collect());
    let (run, in_force) = try_begin(&mut db, "d1", "e1").unwrap();
    (folder, path, db, Tokens::new(run), in_force)
}

/// Settles the rows of a small database. Returns how many.
pub(crate) fn settle(db: &mut Db, in_force: InForce, stale: Stale) -> usize {
    let Some(chunk) = db.misplaced(i64::MIN, in_force, stale).unwrap() else { return 0 };
    db.settle(&chunk).unwrap();
    chunk.ids.len()
}

#[test]
fn pages_come_in_order_and_no_row_comes_twice() {
    let (_folder, path, mut db, mut tokens, _) = database(25);
    let mut seen = Vec::new();
    let mut after = 0;
    loop {
        let page = db.claim_page(&mut tokens, Stage::Detect, after, 10).unwrap();
        let Some(last) = page.last() else { break };
        after = last.id.0;
        assert!(page.iter().all(|c| c.token == page[0].token && c.stage == Stage::Detect));
        seen.extend(page.iter().map(|c| c.id.0));
    }
    assert_eq!(seen, (1..=25).collect::<Vec<_>>());
    assert!(db.claim_page(&mut tokens, Stage::Detect, 0, 10).unwrap().is_empty());
    assert_eq!(number(&path, "SELECT sum(detect_attempts) FROM images"), 25, "attempts are counted with the claim");
    assert_sound(&path);
}

/// A database of the first schema, with one image and perhaps a run that lives.
fn of_the_first_schema(path: &Path, pid: Option<u32>) {
    let conn = rusqlite::Connection::open(path).unwrap();
    conn.execute_batch(include_str!("../../migrations/0001_initial.sql")).unwrap();
    conn.execute_batch(
        "PRAGMA application_id = 1668444016; PRAGMA user_version = 1; INSERT INTO images (path) VALUES ('/a.jpg')",
    )
    .unwrap();
    if let Some(pid) = pid {
        let own = croprow::db::process::ProcessId::own();
        conn.execute(
            "INSERT INTO runs (host, boot_id, pid, pid_started, version, device, runtime, settings, started_at, heartbeat_at)
             VALUES (?1, ?2, ?3, ?4, '0', 'cpu', '', '{}', 0, unixepoch())",
            rusqlite::params![own.host, own.boot_id, pid, own.started],
        )
        .unwrap();
    }
}

#[test]
fn an_older_database_is_kept_beside_itself_and_brought_up_to_date() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.db");
    of_the_first_schema(&path, None);
    drop(Db::open(&path).unwrap());
    assert_eq!(number(&path, "SELECT count(*) FROM images"), 1);
    assert_eq!(number(&path, "SELECT count(*) FROM candidates"), 0);
    let kept = folder.path().join("old.db.schema1.bak");
    assert_eq!(number(&kept, "SELECT count(*) FROM images"), 1);
    assert_eq!(number(&kept, "PRAGMA user_version"), 1);
    drop(Db::open(&path).unwrap());
    assert!(!folder.path().join("old.db.schema1-1.bak").exists(), "kept once");
}

#[test]
fn a_database_that_an_older_worker_is_busy_with_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.db");
    of_the_first_schema(&path, Some(std::process::id()));
    let text = Db::open(&path).unwrap_err().to_string();
    assert!(text.contains("run 1 of an older croprow is at work"), "{text}");
    assert_eq!(number(&path, "PRAGMA user_version"), 1);
}

#[test]
fn a_result_without_the_token_is_dropped() {
    let (_folder, path, mut db, mut tokens, in_force) = database(2);
    let late = db.claim_page(&mut tokens, Stage::Detect, 0, 2).unwrap();
    // Somebody takes the rows away, and another claims one of them.
    let mut other = begin(&mut db);
    Connection::open(&path)
        .unwrap()
        .execute("UPDATE images SET detect_state = 'pending', run_id = NULL, token = NULL", [])
        .unwrap();
    let taken = db.claim_page(&mut other, Stage::Detect, 0, 1).unwrap();
    let batch: Vec<Finished> =
        late.iter().map(|c| done(c, vec![region(0.0, Some(vec![1.0; 4]))], Some(Ok(())))).collect();
    let committed = db.commit_batch(&batch, in_force).unwrap();
    assert_eq!((committed.done, committed.dropped), (0, 2));
    assert_eq!(number(&path, "SELECT count(*) FROM regions"), 0);
    let committed = db.commit_batch(&[done(&taken[0], vec![], Some(Ok(())))], in_force).unwrap();
    assert_eq!((committed.done, committed.dropped), (1, 0));
    assert_sound(&path);
}

#[test]
fn a_region_that_did_not_change_keeps_its_id_and_its_vectors() {
    let (_folder, path, mut db, mut tokens, in_force) = database(1);
    let claim = db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap().remove(0);
    let regions = vec![region(0.0, Some(vec![1.0, 2.0])), region(50.0, Some(vec![3.0, 4.0]))];
    db.commit_batch(&[done(&claim, regions, Some(Ok(())))], in_force).unwrap();
    let first = number(&path, "SELECT id FROM regions WHERE x0 < 1");

    let first_run = number(&path, "SELECT max(id) FROM runs");
    db.end_run(RunId(first_run), "complete", 0, 1, 0, None).unwrap();
    let (run, redo) = try_begin(&mut db, "d2", "e1").unwrap();
    let mut tokens = Tokens::new(run);
    assert_eq!(settle(&mut db, redo, Stale::Redo), 1);
    let claim = db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap().remove(0);
    // The second is gone, a third is new, the first moved by less than a hundredth of a pixel.
    let regions = vec![region(0.004, None), region(90.0, None)];
    db.commit_batch(&[done(&claim, regions, None)], redo).unwrap();
    assert_eq!(number(&path, "SELECT id FROM regions WHERE x0 < 1"), first);
    assert_eq!(number(&path, "SELECT count(*) FROM regions"), 2);
    assert_eq!(number(&path, "SELECT region_id FROM embeddings"), first);
    assert_sound(&path);
}

#[test]
fn no_object_found_is_done_with_zero_regions() {
    let (_folder, path, mut db, mut tokens, in_force) = database(1);
    let claim = db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap().remove(0);
    db.commit_batch(&[done(&claim, vec![], Some(Ok(())))], in_force).unwrap();
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'done' AND embed_state = 'done'"), 1);
}

#[test]
fn an_embedder_that_fails_leaves_the_regions_standing() {
    let (_folder, path, mut db, mut tokens, in_force) = database(1);
    let claim = db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap().remove(0);
    let error = RowError::new(RowCode::NanOutput, "/p/000000.jpg: the vector holds NaN");
    let committed = db.commit_batch(&[done(&claim, vec![region(0.0, None)], Some(Err(error)))], in_force).unwrap();
    assert_eq!((committed.done, committed.failed, committed.detected), (0, 1, 1));
    assert_eq!(number(&path, "SELECT count(*) FROM failures WHERE stage = 'embed' AND code = 'nan_output'"), 1);
    assert_eq!(number(&path, "SELECT count(*) FROM results WHERE embedded = 0"), 1);

    assert_eq!(db.retry(Some(RowCode::Missing)).unwrap(), 0);
    assert_eq!(db.retry(Some(RowCode::NanOutput)).unwrap(), 1);
    let again = db.claim_page(&mut tokens, Stage::Embed, 0, 1).unwrap().remove(0);
    assert_eq!(again.regions.as_ref().map(Vec::len), Some(1), "regions come with the claim");
    db.commit_batch(&[done(&again, vec![region(0.0, Some(vec![1.0]))], Some(Ok(())))], in_force).unwrap();
    assert_eq!(number(&path, "SELECT count(*) FROM results WHERE embedded = 1"), 1);
    assert_sound(&path);
}

#[test]
fn the_same_row_twice_is_one_row_and_a_changed_prompt_is_pending_again() {
    let (_folder, path, mut db, mut tokens, in_force) = database(0);
    let keyed = |path: &str, prompt: &str| NewRow { key: Some("k1".into()), prompt: Some(prompt.into()), ..row(path) };
    let rows = vec![row("/p/a.jpg"), keyed("/p/b.jpg", "cat."), keyed("/p/b.jpg", "cat."), row("/p/a.jpg")];
    let added = add(&mut db, rows);
    assert_eq!((added.new, added.changed, added.known), (2, 0, 2));
    for claim in db.claim_page(&mut tokens, Stage::Detect, 0, 10).unwrap() {
        db.commit_batch(&[done(&claim, vec![], Some(Ok(())))], in_force).unwrap();
    }
    let added = add(&mut db, vec![keyed("/p/b.jpg", "dog."), row("/p/a.jpg")]);
    assert_eq!((added.new, added.changed, added.known), (0, 1, 1));
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'pending' AND prompt = 'dog.'"), 1);
    // A key is an identity of its own: the same path without it is another row.
    assert_eq!(add(&mut db, vec![row("/p/b.jpg")]).new, 1);
    // A source that says nothing of prompt and tag changes neither.
    let silent = NewRow { prompt: None, ..keyed("/p/b.jpg", "") };
    assert_eq!(add(&mut db, vec![silent]).known, 1);
    let tagged = NewRow { tag: Some("holiday".into()), prompt: None, ..keyed("/p/b.jpg", "") };
    assert_eq!(add(&mut db, vec![tagged]).known, 1);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE tag = 'holiday' AND prompt = 'dog.'"), 1);
    assert_sound(&path);
}

#[test]
fn a_file_that_changed_since_its_decode_is_pending_again() {
    let (_folder, path, mut db, mut tokens, in_force) = database(0);
    let stamped = |mtime_ns| NewRow { stamp: Some(FileStamp { size_bytes: 10, mtime_ns }), ..row("/p/a.jpg") };
    add(&mut db, vec![stamped(1)]);
    assert_eq!(add(&mut db, vec![stamped(2)]).known, 1, "before a decode there is nothing to compare with");
    let claim = db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap().remove(0);
    db.commit_batch(&[done(&claim, vec![], Some(Ok(())))], in_force).unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE images SET file_size_bytes = 10, file_mtime_ns = 2", []).unwrap();
    assert_eq!(add(&mut db, vec![stamped(2)]).known, 1);
    assert_eq!(db.retry_changed(|_| Some(FileStamp { size_bytes: 10, mtime_ns: 2 })).unwrap(), 0);
    assert_eq!(db.retry_changed(|_| None).unwrap(), 0, "a file that is gone keeps its results");
    assert_eq!(add(&mut db, vec![stamped(3)]).changed, 1);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'pending'"), 1);
    assert_sound(&path);
}

#[test]
fn names_that_are_not_utf8_survive() {
    use std::os::unix::ffi::OsStrExt;
    let (_folder, path, mut db, mut tokens, _) = database(0);
    let name = PathBuf::from(std::ffi::OsStr::from_bytes(b"/p/\xff\xfe\n'\".jpg"));
    let rows = vec![NewRow { path: name.clone(), ..row("") }];
    assert_eq!(add(&mut db, rows.clone()).new, 1);
    assert_eq!(add(&mut db, rows).known, 1);
    assert_eq!(db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap()[0].path, name);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE typeof(path) = 'blob'"), 1);
}

#[test]
fn an_error_in_a_source_adds_nothing() {
    let (_folder, path, mut db, ..) = database(0);
    let (failed, added) = db.add(|sink| {
        sink(row("/p/a.jpg"))?;
        Err(Error::Usage("line 2 is bad".into()))
    });
    assert!(failed.is_err() && added == Default::default());
    assert_eq!(number(&path, "SELECT count(*) FROM images"), 0);
}

#[test]
fn rows_in_bulk_are_counted_like_single_ones() {
    let (_folder, path, mut db, ..) = database(7);
    let rows = |range: std::ops::Range<u32>| range.map(|i| row(&format!("/bulk/{i}.jpg"))).collect::<Vec<_>>();
    assert_eq!(add(&mut db, rows(0..12_000)).new, 12_000);
    assert_sound(&path);
    let added = add(&mut db, rows(6_000..18_000));
    assert_eq!((added.new, added.known), (6_000, 6_000));
    assert_eq!(add(&mut db, rows(18_000..18_003)).new, 3, "the trigger counts again");
    assert_sound(&path);
    assert_eq!(number(&path, "SELECT sum(images) FROM counts"), 18_010);
}

#[test]
fn rows_put_in_by_hand_are_found() {
    let (_folder, path, mut db, mut tokens, in_force) = database(0);
    Connection::open(&path).unwrap().execute("INSERT INTO images (path) VALUES ('/p/by-hand.jpg')", []).unwrap();
    settle(&mut db, in_force, Stale::Keep);
    assert_eq!(db.claim_page(&mut tokens, Stage::Detect, 0, 10).unwrap().len(), 1);
}

#[test]
fn a_slow_source_holds_no_lock() {
    let (_folder, path, mut db, ..) = database(0);
    let (result, added) = db.add(|sink| {
        sink(row("/p/a.jpg"))?;
        // Another writer in the middle: it would wait for twenty seconds and fail.
        let other = Connection::open(&path).unwrap();
        other.busy_timeout(std::time::Duration::ZERO).unwrap();
        other.execute("INSERT INTO images (path) VALUES ('/p/b.jpg')", []).unwrap();
        Ok(())
    });
    result.unwrap();
    assert_eq!(added.new, 1);
    assert_sound(&path);
}

#[test]
fn another_file_leaves_no_vector_of_the_old_one() {
    let (_folder, path, mut db, mut tokens, in_force) = database(1);
    let facts = |mtime_ns| croprow::row::ImageFacts {
        stamp: FileStamp { size_bytes: 9, mtime_ns },
        format: "png",
        stored: croprow::geometry::Size::new(10, 10),
        upright: croprow::geometry::Size::new(10, 10),
        orientation: Default::default(),
        orientation_source: "none",
        components: 3,
        scale: croprow::geometry::Scale::FULL,
        truncated: false,
    };
    let store = |db: &mut Db, tokens: &mut Tokens, stage, mtime_ns, vector: Option<f32>| {
        let claim = db.claim_page(tokens, stage, 0, 1).unwrap().remove(0);
        let embed = match vector {
            Some(_) => Ok(()),
            None => Err(RowError::new(RowCode::NanOutput, "all zero")),
        };
        let mut finished = done(&claim, vec![region(0.0, vector.map(|v| vec![v]))], Some(embed));
        finished.facts = Some(facts(mtime_ns));
        db.commit_batch(&[finished], in_force).unwrap();
    };
    let vectors = "SELECT count(*) FROM embeddings";
    store(&mut db, &mut tokens, Stage::Detect, 1, Some(1.0));
    assert_eq!(number(&path, vectors), 1);
    assert_eq!(db.retry_changed(|_| Some(FileStamp { size_bytes: 9, mtime_ns: 2 })).unwrap(), 1);
    assert_eq!(number(&path, vectors), 0, "the old picture's vector stands beside the new file");
    store(&mut db, &mut tokens, Stage::Detect, 2, Some(1.0));
    // The same file embedded again and refused: its earlier vector must not pass for the result.
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE images SET embed_state = 'pending', embed_recipe_id = NULL", []).unwrap();
    store(&mut db, &mut tokens, Stage::Embed, 2, None);
    assert_eq!(number(&path, "SELECT count(*) FROM results WHERE embedded"), 0);
    assert_sound(&path);
}

#[test]
fn a_failed_file_that_was_mended_is_pending_again() {
    let (_folder, path, mut db, mut tokens, in_force) = database(1);
    let claim = db.claim_page(&mut tokens, Stage::Detect, 0, 1).unwrap().remove(0);
    let outcome = Outcome::Failed(RowError::new(RowCode::Truncated, "/p/000000.jpg: ends early"));
    let stamp = Some(FileStamp { size_bytes: 5, mtime_ns: 1 });
    let failed = Finished { stamp, outcome, ..done(&claim, vec![], None) };
    db.commit_batch(&[failed], in_force).unwrap();
    let stamped = |mtime_ns| NewRow { stamp: Some(FileStamp { size_bytes: 5, mtime_ns }), ..row("/p/000000.jpg") };
    assert_eq!(add(&mut db, vec![stamped(1)]).known, 1);
    assert_eq!(add(&mut db, vec![stamped(2)]).changed, 1);
    assert_eq!(number(&path, "SELECT count(*) FROM images WHERE detect_state = 'pending' AND detect_code IS NULL"), 1);
}

#[test]
fn what_is_no_croprow_database_is_refused_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, make: &dyn Fn(&Path), reason: &str| {
        let path = folder.path().join(name);
        make(&path);
        let before = std::fs::read(&path).unwrap_or_default();
        for opened in [Db::open(&path), Db::open_or_create(&path), Db::open_read_only(&path)] {
            let error = opened.unwrap_err();
            assert!(error.to_string().contains(reason), "{name}: {error}");
            assert!(error.to_string().contains(name), "{error}");
            assert_eq!(error.exit_code(), 1);
        }
        assert_eq!(std::fs::read(&path).unwrap_or_default(), before, "{name} was touched");
    };
    refused("empty.db", &|p| std::fs::write(p, b"").unwrap(), "is empty");
    // Without its key an encrypted database is noise from its first byte.
    let noise = |p: &Path| std::fs::write(p, (0..8192_u32).map(|i| (i * i + 7 * i) as u8).collect::<Vec<_>>()).unwrap();
    refused("encrypted.db", &noise, "or an encrypted one");
    refused("text.db", &|p| std::fs::write(p, b"hello, this is text").unwrap(), "not an SQLite database");
    refused(
        "foreign.db",
        &|p| Connection::open(p).unwrap().execute_batch("CREATE TABLE mine (id); INSERT INTO mine VALUES (1)").unwrap(),
        "another program",
    );
    refused(
        "newer.db",
        &|p| {
            drop(Db::open_or_create(p).unwrap());
            Connection::open(p)
                .unwrap()
                .execute_batch("PRAGMA user_version = 999; PRAGMA journal_mode = DELETE")
                .unwrap();
        },
        "use a newer croprow",
    );
    refused("folder.db", &|p| std::fs::create_dir(p).unwrap(), "not a regular file");
    let missing = Db::open(&folder.path().join("missing.db")).unwrap_err();
    assert!(missing.to_string().contains("croprow add"), "{missing}");
    assert!(!folder.path().join("missing.db").exists());
}

#[test]
fn another_programs_database_keeps_the_log_that_was_left_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let (live, path) = (folder.path().join("live.db"), folder.path().join("mine.db"));
    let mine = Connection::open(&live).unwrap();
    mine.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE mine (id); INSERT INTO mine VALUES (1)").unwrap();
    // As a crash leaves it.
    for suffix in ["", "-wal"] {
        std::fs::copy(format!("{}{suffix}", live.display()), format!("{}{suffix}", path.display())).unwrap();
    }
    let read = || ["", "-wal"].map(|suffix| std::fs::read(format!("{}{suffix}", path.display())).unwrap());
    let before = read();
    assert!(before[1].len() > 4096);
    for opened in [Db::open(&path), Db::open_or_create(&path), Db::open_read_only(&path)] {
        assert!(opened.unwrap_err().to_string().contains("another program"));
        assert!(read() == before, "the log was moved into the database");
    }
}

#[test]
fn a_database_on_a_network_file_system_is_refused_untouched_unless_the_user_insists() {
    let (_folder, path, db, ..) = database(2);
    drop(db);
    let before = std::fs::read(&path).unwrap();
    let nfs = FileSystem {
        mount_point: "/mnt/nas".into(),
        magic: 0x6969,
        free_bytes: 1 << 40,
        total_bytes: 1 << 41,
        lacks_inodes: false,
    };
    let error = Db::open_on(&path, &nfs, Opening::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("/mnt/nas (nfs)") && text.contains("--allow-network-filesystem"), "{text}");
    assert_eq!((error.exit_code(), std::fs::read(&path).unwrap()), (1, before));
    Db::open_on(&path, &nfs, Opening { allow_network: true }).unwrap();
    let local = FileSystem { magic: 0xef53, ..nfs };
    Db::open_on(&path, &local, Opening::default()).unwrap();
}

#[test]
fn a_damaged_database_is_named_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.db");
    let mut bytes = b"SQLite format 3\0".to_vec();
    bytes.extend(std::iter::repeat_n(0xa5, 4080));
    std::fs::write(&path, &bytes).unwrap();
    let error = Db::open(&path).unwrap_err();
    assert!(error.to_string().contains("damaged.db"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}
