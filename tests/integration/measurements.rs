//! What a run measured is kept: through migrations, through hand edits, and no longer than the run it belongs to.

use std::path::{Path, PathBuf};

use croprow::db::Db;
use croprow::db::batch_sizes::LearntBatch;
use croprow::db::claim::RunId;
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::{NewRun, Sample, StepSample};
use croprow::geometry::Size;
use rusqlite::Connection;

use crate::support::dump::{assert_sound, number};

const INITIAL: &str = include_str!("../../migrations/0001_initial.sql");
const CANDIDATES: &str = include_str!("../../migrations/0002_candidates.sql");

/// Rows in every table of the first schema that a migration could lose.
const ROWS: &str = "
    INSERT INTO models (id, digest, path, first_at) VALUES (1, 'm', '/m', 0);
    INSERT INTO recipes (id, stage, body, model_id, in_force, first_at) VALUES (1, 'embed', '{}', 1, 1, 0);
    INSERT INTO runs (host, boot_id, pid, pid_started, version, device, runtime, settings, started_at, heartbeat_at, ended_at)
    VALUES ('h', 'b', 1, 1, '0', 'cpu', '', '{}', 0, 1, 1);
    INSERT INTO samples VALUES (1, 0.5, 2, 0, 3.0, 4.0, 'decode', 5, 6);
    INSERT INTO images (path, embed_state, embed_recipe_id) VALUES ('/a.jpg', 'done', 1), ('/b.jpg', 'pending', NULL);
    INSERT INTO regions (image_id, x0, y0, x1, y1) VALUES (1, 0, 0, 2, 2);
    INSERT INTO embeddings VALUES (1, 1, 1, 'f32', x'00000000');";

fn begin(db: &mut Db) -> RunId {
    let embed = Some(StoredRecipe { body: "e", model_digest: "m", model_path: Path::new("/m") });
    let run = NewRun { device: "cpu", device_note: None, runtime: "fake", settings: "{}", detect: None, embed };
    db.begin_run(&run).unwrap().0
}

fn database() -> (tempfile::TempDir, PathBuf, Db) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("photos.db");
    let db = Db::open_or_create(&path).unwrap();
    (folder, path, db)
}

#[test]
fn databases_of_every_earlier_schema_keep_what_is_in_them() {
    for (version, schema) in [(1, INITIAL.to_owned()), (2, format!("{INITIAL}{CANDIDATES}"))] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old.db");
        let conn = Connection::open(&path).unwrap();
        conn.execute_batch(&schema).unwrap();
        conn.execute_batch(ROWS).unwrap();
        conn.execute_batch(&format!("PRAGMA application_id = 1668444016; PRAGMA user_version = {version}")).unwrap();
        if version == 2 {
            conn.execute_batch("INSERT INTO vocabularies (body) VALUES ('[]'); UPDATE models SET self_test = '{}'")
                .unwrap();
            conn.execute_batch("INSERT INTO candidates VALUES (1, 1, 1, 0, x'')").unwrap();
        }
        drop(conn);
        let mut db = Db::open(&path).unwrap();
        assert_eq!(number(&path, "PRAGMA user_version"), 4);
        let kept = folder.path().join(format!("old.db.schema{version}.bak"));
        assert_eq!(number(&kept, "PRAGMA user_version"), version);
        for file in [&path, &kept] {
            assert_eq!(number(file, "SELECT count(*) FROM results WHERE embedded"), 1);
            assert_eq!(number(file, "SELECT done FROM samples WHERE run_id = 1 AND at = 0.5"), 2);
            assert_sound(file);
        }
        let filled = "SELECT device_bytes = 0 AND padding = 0 AND decode_scale = 1 FROM samples";
        assert_eq!(number(&path, filled), 1, "an old sample says what was true of it");
        assert_eq!(number(&path, "SELECT summary IS NULL FROM runs"), 1);
        assert_eq!(db.self_test("m").unwrap().is_some(), version == 2);
        assert_eq!(db.learnt_batches("m", "cpu").unwrap(), []);
        let run = begin(&mut db);
        db.heartbeat(run, &Sample::default(), &[]).unwrap();
    }
}

#[test]
fn what_was_learnt_of_batches_is_kept_by_model_device_and_shape() {
    let (_folder, path, mut db) = database();
    let learnt = |width_px, images, per_s| LearntBatch { shape: Size::new(width_px, 320), images, per_s };
    assert_eq!(db.learnt_batches("m", "cpu").unwrap(), []);
    // The model is not there yet: a batch is learnt before the first recipe names it.
    db.remember_batch("m", Path::new("/m"), "cpu", &learnt(416, 8, 20.5)).unwrap();
    db.remember_batch("m", Path::new("/elsewhere"), "cpu", &learnt(640, 4, 9.0)).unwrap();
    db.remember_batch("m", Path::new("/m"), "NVIDIA H200", &learnt(416, 64, 900.0)).unwrap();
    db.remember_batch("other", Path::new("/o"), "cpu", &learnt(416, 1, 1.0)).unwrap();
    db.remember_batch("m", Path::new("/m"), "cpu", &learnt(416, 16, 30.0)).unwrap();
    let mut cpu = db.learnt_batches("m", "cpu").unwrap();
    cpu.sort_by_key(|b| b.shape.width_px);
    assert_eq!(cpu, [learnt(416, 16, 30.0), learnt(640, 4, 9.0)]);
    assert_eq!(db.learnt_batches("m", "NVIDIA H200").unwrap(), [learnt(416, 64, 900.0)]);
    assert_eq!(number(&path, "SELECT count(*) FROM models"), 2);
    assert_eq!(number(&path, "SELECT count(*) FROM models WHERE path = '/m'"), 1, "the first place stays");
    // The self-test and a recipe find the same model.
    db.remember_self_test("m", Path::new("/m"), "{}").unwrap();
    begin(&mut db);
    assert_eq!(number(&path, "SELECT count(*) FROM models"), 2);
    assert_eq!(db.learnt_batches("m", "cpu").unwrap().len(), 2);
    assert!(db.remember_batch("m", Path::new("/m"), "cpu", &learnt(416, 0, 1.0)).is_err(), "a batch of nothing");
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE batch_sizes SET shape = '4x4x4' WHERE images = 16", []).unwrap();
    assert!(db.learnt_batches("m", "cpu").unwrap_err().to_string().contains("4x4x4"));
}

#[test]
fn a_run_keeps_its_samples_its_steps_and_its_summary_and_they_go_with_it() {
    let (_folder, path, mut db) = database();
    let run = begin(&mut db);
    let sample =
        Sample { device_bytes: 3 << 30, padding: 0.25, decode_scale: 0.5, slowest: "embed", ..Sample::default() };
    let steps = ["read", "decode", "detect", "crop", "embed", "commit"].map(|step| StepSample {
        step,
        busy: 0.5,
        waiting_in: 0.25,
        waiting_out: 0.125,
        queued: 7,
    });
    db.heartbeat(run, &sample, &steps).unwrap();
    let conn = Connection::open(&path).unwrap();
    conn.execute_batch("PRAGMA foreign_keys = ON").unwrap();
    let stored = "SELECT count(*) FROM samples JOIN step_samples USING (run_id, at)
                  WHERE device_bytes = 3 << 30 AND padding = 0.25 AND decode_scale = 0.5
                    AND busy = 0.5 AND waiting_in = 0.25 AND waiting_out = 0.125 AND queued = 7";
    assert_eq!(number(&path, stored), 6);
    let unknown = StepSample { step: "describe", ..steps[0] };
    assert!(db.heartbeat(run, &sample, &[unknown]).is_err(), "no such step");
    assert_eq!(number(&path, "SELECT count(*) FROM samples"), 1, "all of a heartbeat or nothing");
    db.end_run(run, "complete", 0, 0, 0, Some(r#"{"images": 12}"#)).unwrap();
    assert_eq!(number(&path, "SELECT summary ->> 'images' FROM runs"), 12);
    assert!(conn.execute("INSERT INTO step_samples VALUES (99, 0, 'read', 0, 0, 0, 0)", []).is_err(), "no such run");
    conn.execute("DELETE FROM runs WHERE id = ?1", [run.0]).unwrap();
    assert_eq!(number(&path, "SELECT (SELECT count(*) FROM samples) + (SELECT count(*) FROM step_samples)"), 0);
}

#[test]
fn a_state_changed_by_hand_is_counted() {
    let (_folder, path, mut db) = database();
    let new = |i| croprow::row::NewRow {
        path: PathBuf::from(format!("/p/{i}.jpg")),
        key: None,
        prompt: None,
        tag: None,
        stamp: None,
    };
    db.add(|sink| (0..10).try_for_each(|i| sink(new(i)))).0.unwrap();
    // As somebody's sqlite3 program does it: a connection that knows nothing of croprow, foreign keys off.
    let conn = Connection::open(&path).unwrap();
    conn.pragma_update(None, "foreign_keys", false).unwrap();
    for sql in [
        "UPDATE images SET detect_state = 'failed', detect_code = 'missing' WHERE id <= 3",
        "UPDATE images SET detect_state = NULL, embed_state = 'done', embed_recipe_id = 5 WHERE id = 4",
        "UPDATE images SET embed_recipe_id = 6 WHERE id = 4",
        "UPDATE images SET detect_state = 'pending', detect_code = NULL WHERE id = 1",
        "UPDATE images SET tag = 'x', detect_state = detect_state",
        "DELETE FROM images WHERE id IN (2, 9)",
        "INSERT INTO images (path, detect_state) VALUES ('/by/hand', 'pending')",
    ] {
        conn.execute(sql, []).unwrap();
        assert_sound(&path);
    }
    assert_eq!(number(&path, "SELECT pending FROM progress WHERE stage = 'detect'"), 7);
}
