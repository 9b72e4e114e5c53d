//! The real pipeline with fake models behind the same traits.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use croprow::config::{Batch, Stale};
use croprow::error::Error;
use croprow::pipeline::stop::{Cause, Stop};
use croprow::recipe::Truncated;
use rusqlite::Connection;

use crate::support::dump::{assert_sound, dump, number};
use crate::support::fake::{Behaviour, Setup, database, run, run_until};
use crate::support::{photos, picture};

fn on_gpu(behaviour: Behaviour) -> Setup {
    Setup { on_gpu: true, sessions: 1, behaviour, ..Setup::default() }
}

fn copy(db: &Path, name: &str) -> PathBuf {
    let copy = db.with_file_name(name);
    Connection::open(db).unwrap().execute("VACUUM INTO ?1", [copy.to_str().unwrap()]).unwrap();
    copy
}

#[test]
fn every_image_is_done_once_with_its_regions_and_vectors() {
    let (_folder, db, _) = photos(70);
    let summary = run(&db, &Setup::default()).unwrap();
    assert_eq!((summary.done, summary.failed, summary.released), (70, 0, 0));
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_attempts = 1 AND embed_attempts = 1"), 70);
    assert!(number(&db, "SELECT count(*) FROM regions") > 70);
    assert!(number(&db, "SELECT count(*) FROM images WHERE id NOT IN (SELECT image_id FROM regions)") > 5);
    assert_eq!(number(&db, "SELECT count(*) FROM results WHERE embedded = 0"), 0);
    let held = "SELECT held_bytes FROM samples ORDER BY at DESC LIMIT 1";
    assert_eq!(number(&db, held), 0, "memory that no image has is still reserved");
    assert_sound(&db);
}

#[test]
fn results_do_not_depend_on_batch_size_threads_or_budget() {
    let (_folder, db, _) = photos(40);
    let others: Vec<PathBuf> = (0..4).map(|i| copy(&db, &format!("{i}.db"))).collect();
    run(&db, &Setup::default()).unwrap();
    let runs = [
        (Batch::Fixed(1), 1, 1),
        (Batch::Fixed(32), 4, 1 << 30),
        (Batch::Fixed(7), 2, 50_000),
        (Batch::Auto, 2, 1 << 30),
    ];
    for (other, (batch, threads, memory_bytes)) in others.iter().zip(runs) {
        let mut setup = Setup::default();
        (setup.config.batch, setup.config.threads, setup.config.memory_bytes) = (batch, threads, memory_bytes);
        run(other, &setup).unwrap();
        assert_eq!(dump(other), dump(&db), "batch {batch:?}, {threads} threads, {memory_bytes} bytes");
    }
}

#[test]
fn sessions_on_a_gpu_get_their_next_batch_meanwhile_and_give_the_same() {
    let (_folder, db, _) = photos(60);
    run(&copy(&db, "host.db"), &Setup::default()).unwrap();
    let host = dump(&db.with_file_name("host.db"));
    for (name, batch, memory_bytes, staged) in [
        ("1.db", Batch::Fixed(1), 64 << 20, false),
        ("7.db", Batch::Fixed(7), 50_000, false),
        ("32.db", Batch::Fixed(32), 64 << 20, true),
        ("auto.db", Batch::Auto, 64 << 20, false),
    ] {
        let mut setup = on_gpu(Behaviour { call: Duration::from_millis(2), ..Behaviour::default() });
        (setup.config.batch, setup.config.memory_bytes, setup.config.staged) = (batch, memory_bytes, staged);
        let gpu = copy(&db, name);
        assert_eq!(run(&gpu, &setup).unwrap().done, 60, "{name}");
        assert_eq!(dump(&gpu), host, "{name}");
        assert_eq!(number(&gpu, "SELECT held_bytes FROM samples ORDER BY at DESC LIMIT 1"), 0, "{name}");
        assert_sound(&gpu);
    }
}

#[test]
fn short_memory_broken_models_and_lost_devices_end_on_a_gpu_as_they_do_on_the_host() {
    let (_folder, db, _) = photos(60);
    let small = copy(&db, "small.db");
    run(&copy(&db, "host.db"), &Setup::default()).unwrap();
    let mut setup = on_gpu(Behaviour { memory_images: Some(3), ..Behaviour::default() });
    setup.config.batch = Batch::Fixed(16);
    assert_eq!(run(&small, &setup).unwrap().done, 60);
    assert_eq!(dump(&small), dump(&db.with_file_name("host.db")));
    for (behaviour, code) in [
        (Behaviour { broken: true, ..Behaviour::default() }, 3),
        (Behaviour { lost: true, ..Behaviour::default() }, 75),
        (Behaviour { embedder_is_lost: true, ..Behaviour::default() }, 75),
        (Behaviour { memory_images: Some(0), ..Behaviour::default() }, 75),
    ] {
        let other = copy(&db, "other.db");
        let error = run(&other, &on_gpu(behaviour)).unwrap_err();
        assert_eq!(error.exit_code(), code, "{error}");
        assert_eq!(number(&other, "SELECT count(*) FROM images WHERE token IS NOT NULL OR detect_state = 'failed'"), 0);
        assert_eq!(number(&other, "SELECT count(*) FROM images WHERE embed_state = 'failed'"), 0);
        assert_sound(&other);
        run(&other, &on_gpu(Behaviour::default())).unwrap();
        assert_eq!(dump(&other), dump(&db.with_file_name("host.db")));
        fs::remove_file(&other).unwrap();
    }
}

#[test]
fn nothing_pending_is_nothing_done() {
    let (_folder, db, _) = photos(3);
    run(&db, &Setup::default()).unwrap();
    let before = dump(&db);
    let summary = run(&db, &Setup::default()).unwrap();
    assert_eq!((summary.done, summary.failed), (0, 0));
    assert_eq!(dump(&db), before);
}

#[test]
fn either_model_may_be_left_out() {
    let (_folder, db, _) = photos(12);
    let both = copy(&db, "both.db");
    run(&both, &Setup::default()).unwrap();

    let whole = copy(&db, "whole.db");
    run(&whole, &Setup { detector: None, ..Setup::default() }).unwrap();
    assert_eq!(number(&whole, "SELECT count(*) FROM images WHERE detect_state IS NULL AND embed_state = 'done'"), 12);
    assert_eq!(
        number(&whole, "SELECT count(*) FROM results WHERE label IS NULL AND score IS NULL AND embedded = 1"),
        12
    );

    // Detect tonight, embed tomorrow: the same as both at once.
    run(&db, &Setup { embedder: None, ..Setup::default() }).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'done' AND embed_state IS NULL"), 12);
    assert_eq!(number(&db, "SELECT count(*) FROM embeddings"), 0);
    run(&db, &Setup::default()).unwrap();
    assert_eq!(dump(&db), dump(&both));
    assert_eq!(number(&db, "SELECT max(detect_attempts) FROM images"), 1, "detect ran once");
    assert_sound(&db);
}

#[test]
fn rows_of_another_recipe_stay_or_are_done_again_as_told() {
    let (_folder, db, _) = photos(10);
    run(&db, &Setup::default()).unwrap();
    let first = dump(&db);
    let ids = number(&db, "SELECT sum(id) FROM regions");
    let other = Setup { embedder: Some("fake-embedder-2"), ..Setup::default() };
    assert_eq!(run(&db, &other).unwrap().done, 0, "keep leaves finished rows alone");
    assert_eq!(dump(&db), first);
    assert_eq!(run(&db, &Setup { stale: Stale::Redo, ..other }).unwrap().done, 10);
    assert_eq!(number(&db, "SELECT sum(id) FROM regions"), ids, "regions keep their ids");
    assert_eq!(
        number(&db, "SELECT count(*) FROM embeddings"),
        2 * number(&db, "SELECT count(*) FROM regions"),
        "the vectors of the first embedder stay beside the new ones"
    );
    let without = Setup { detector: None, stale: Stale::Redo, ..Setup::default() };
    assert_eq!(run(&db, &without).unwrap().done, 10);
    assert_eq!(number(&db, "SELECT count(*) FROM regions WHERE label IS NOT NULL"), 0);
    assert_sound(&db);
}

#[test]
fn one_bad_file_in_a_batch_leaves_its_neighbours_done() {
    let (folder, _, mut files) = photos(32);
    let bad: Vec<(&str, &str, Vec<u8>)> = vec![
        ("empty.jpg", "empty", vec![]),
        ("page.jpg", "not_an_image", b"<!DOCTYPE html><html><body>404</body></html>".to_vec()),
        ("photo.heic", "unsupported", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic".to_vec()),
        ("short.png", "truncated", fs::read(&files[0]).unwrap()[..600].to_vec()),
    ];
    for (name, _, bytes) in &bad {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        files.insert(files.len() / 2, path);
    }
    files.push(folder.path().join("gone.jpg"));
    files.push(folder.path().join("folder.jpg"));
    fs::create_dir(folder.path().join("folder.jpg")).unwrap();
    let db = folder.path().join("mixed.db");
    database(&db, &files);
    let summary = run(&db, &Setup::default()).unwrap();
    assert_eq!((summary.done, summary.failed), (32, 6));
    let codes = [("gone.jpg", "missing"), ("folder.jpg", "not_regular")];
    for (name, code) in bad.iter().map(|(name, code, _)| (*name, *code)).chain(codes) {
        let sql = format!(
            "SELECT count(*) FROM failures WHERE path LIKE '%/{name}' AND code = '{code}' AND message LIKE '%{name}%'"
        );
        assert_eq!(number(&db, &sql), 1, "{name} should be {code}:\n{}", dump(&db));
    }
    assert_sound(&db);
    // They are not tried again by themselves.
    assert_eq!(run(&db, &Setup::default()).unwrap().failed, 0);
}

#[test]
fn a_batch_that_is_refused_is_tried_smaller() {
    let (_folder, db, _) = photos(20);
    let small = copy(&db, "small.db");
    run(&db, &Setup::default()).unwrap();
    let mut setup =
        Setup { behaviour: Behaviour { largest_batch: Some(3), ..Behaviour::default() }, ..Setup::default() };
    setup.config.batch = Batch::Fixed(16);
    run(&small, &setup).unwrap();
    assert_eq!(dump(&small), dump(&db));
}

#[test]
fn short_memory_makes_batches_smaller_fails_no_image_and_is_remembered() {
    let (_folder, db, _) = photos(60);
    let small = copy(&db, "small.db");
    run(&db, &Setup::default()).unwrap();
    let mut setup =
        Setup { behaviour: Behaviour { memory_images: Some(3), ..Behaviour::default() }, ..Setup::default() };
    setup.config.batch = Batch::Fixed(16);
    assert_eq!(run(&small, &setup).unwrap().done, 60);
    assert_eq!(dump(&small), dump(&db));
    for (stage, shape) in [("detect", "32x32"), ("embed", "16x16")] {
        let sql = format!(
            "SELECT images FROM batch_sizes b JOIN models m ON m.id = b.model_id
             WHERE digest = 'fake-{stage}' AND shape = '{shape}' AND device = 'cpu'"
        );
        assert_eq!(number(&small, &sql), 2, "{stage}");
    }
}

#[test]
fn what_was_learnt_is_tried_first_the_next_time() {
    let (_folder, db, _) = photos(120);
    let mut setup =
        Setup { behaviour: Behaviour { call: Duration::from_millis(2), ..Behaviour::default() }, ..Setup::default() };
    setup.config.batch = Batch::Auto;
    setup.config.limit = Some(100);
    run(&db, &setup).unwrap();
    // Each call takes the same time, so the largest batch is the fastest.
    let learnt = "SELECT images FROM batch_sizes WHERE shape = '16x16'";
    assert!(number(&db, learnt) >= 4, "{}", number(&db, learnt));
    Connection::open(&db).unwrap().execute("UPDATE batch_sizes SET images = 3, per_s = 1", []).unwrap();
    setup.config.limit = None;
    run(&db, &setup).unwrap();
    assert_eq!(number(&db, learnt), 3, "nothing is tried again");
}

#[test]
fn memory_that_does_not_suffice_for_one_image_ends_the_run_with_75_and_marks_no_image() {
    let (_folder, db, _) = photos(30);
    let behaviour = Behaviour { memory_images: Some(0), ..Behaviour::default() };
    let reopened = Arc::clone(&behaviour.reopened);
    let error = run(&db, &Setup { behaviour, ..Setup::default() }).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory(_)) && error.exit_code() == 75, "{error}");
    assert_eq!(reopened.load(Ordering::SeqCst), 1, "the session was opened anew once");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'pending' AND token IS NULL"), 30);
    assert_eq!(run(&db, &Setup::default()).unwrap().done, 30);
    assert_sound(&db);
}

#[test]
fn two_passes_give_what_one_gives() {
    let (_folder, db, _) = photos(40);
    let staged = copy(&db, "staged.db");
    run(&db, &Setup::default()).unwrap();
    let mut setup = Setup::default();
    setup.config.staged = true;
    let summary = run(&staged, &setup).unwrap();
    assert_eq!((summary.done, summary.released), (40, 0));
    assert_eq!(dump(&staged), dump(&db));
    assert_sound(&staged);
}

#[test]
fn the_first_of_two_passes_makes_regions_pending_in_the_transaction_that_makes_them() {
    let (_folder, db, _) = photos(40);
    let mut setup = Setup::default();
    setup.config.staged = true;
    setup.config.limit = Some(20);
    let stop = Stop::default();
    let embeds = "SELECT count(*) FROM images WHERE embed_state = 'pending'";
    let nothing = "SELECT count(*) FROM images WHERE embed_state = 'done' AND id NOT IN (SELECT image_id FROM regions)";
    // The embedder never gets its memory: what the first pass stored stays.
    setup.behaviour.embedder_is_lost = true;
    assert_eq!(run_until(&db, &setup, &stop).unwrap_err().exit_code(), 75);
    assert!(number(&db, embeds) > 10 && number(&db, nothing) > 0);
    let to_embed = number(&db, embeds);
    assert_eq!(to_embed + number(&db, nothing), 20);
    assert_sound(&db);
    assert_eq!(run(&db, &Setup::default()).unwrap().done as i64, to_embed + 20);
}

#[test]
fn fewer_threads_than_cores_share_their_permits() {
    let (_folder, db, _) = photos(40);
    let strict = copy(&db, "strict.db");
    run(&db, &Setup::default()).unwrap();
    let mut setup = Setup { cores: 16, ..Setup::default() };
    setup.config.threads = 3;
    assert_eq!(run(&strict, &setup).unwrap().done, 40);
    assert_eq!(dump(&strict), dump(&db));
}

#[test]
fn a_broken_model_or_a_lost_device_ends_the_run_and_marks_no_image() {
    for (behaviour, code) in [
        (Behaviour { broken: true, ..Behaviour::default() }, 3),
        (Behaviour { lost: true, ..Behaviour::default() }, 75),
    ] {
        let (_folder, db, _) = photos(30);
        let error = run(&db, &Setup { behaviour, ..Setup::default() }).unwrap_err();
        assert_eq!(error.exit_code(), code, "{error}");
        assert!(matches!(error, Error::Model(_) | Error::DeviceLost(_)));
        assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'pending' AND token IS NULL"), 30);
        assert_sound(&db);
        assert_eq!(run(&db, &Setup::default()).unwrap().done, 30, "the next run does them all");
    }
}

#[test]
fn a_stage_that_panics_ends_the_run_and_marks_no_image() {
    let (_folder, db, _) = photos(30);
    let behaviour = Behaviour { panics: true, ..Behaviour::default() };
    let error = run(&db, &Setup { behaviour, ..Setup::default() }).unwrap_err();
    assert!(
        matches!(&error, Error::Panicked { stage, message } if stage == "detect" && message == "as planned"),
        "{error}"
    );
    assert_eq!(error.exit_code(), 3);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'pending' AND token IS NULL"), 30);
    assert_eq!(run(&db, &Setup::default()).unwrap().done, 30, "the next run does them all");
}

#[test]
fn a_vector_with_nan_fails_its_image_and_no_other() {
    let (_folder, db, _) = photos(40);
    let behaviour = Behaviour { nan_below: 0.2, ..Behaviour::default() };
    let summary = run(&db, &Setup { behaviour, ..Setup::default() }).unwrap();
    assert!(summary.failed > 0 && summary.done > 0, "{summary:?}");
    let failed = number(&db, "SELECT count(*) FROM failures WHERE stage = 'embed' AND code = 'nan_output'");
    assert_eq!(failed, summary.failed as i64);
    assert_sound(&db);
    // Retried with a sound model they end as if nothing had been.
    Connection::open(&db)
        .unwrap()
        .execute("UPDATE images SET embed_state = 'pending', embed_code = NULL, embed_message = NULL WHERE embed_state = 'failed'", [])
        .unwrap();
    run(&db, &Setup::default()).unwrap();
    let fresh = db.with_file_name("fresh.db");
    let files: Vec<PathBuf> = (0..40).map(|n| db.with_file_name(format!("{n:05}.png"))).collect();
    database(&fresh, &files);
    run(&fresh, &Setup::default()).unwrap();
    assert_eq!(dump(&db), dump(&fresh));
}

#[test]
fn a_limit_stops_after_that_many_images() {
    let (_folder, db, _) = photos(100);
    let mut setup = Setup::default();
    setup.config.limit = Some(70);
    assert_eq!(run(&db, &setup).unwrap().done, 70);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'pending' AND detect_attempts = 0"), 30);
}

#[test]
fn a_stop_keeps_what_ends_and_gives_the_rest_back() {
    let (_folder, db, _) = photos(300);
    let undisturbed = copy(&db, "undisturbed.db");
    run(&undisturbed, &Setup::default()).unwrap();
    let slow =
        Setup { behaviour: Behaviour { call: Duration::from_millis(10), ..Behaviour::default() }, ..Setup::default() };
    let stop = Stop::default();
    let summary = std::thread::scope(|scope| {
        scope.spawn(|| {
            while number(&db, "SELECT count(*) FROM images WHERE detect_state = 'done'") == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            stop.ask(Cause::Signal(15));
        });
        run_until(&db, &slow, &stop).unwrap()
    });
    assert!(summary.done > 0 && summary.done < 300, "{summary:?}");
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL"), 0);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE detect_state = 'done'"), summary.done as i64);
    assert_sound(&db);
    run(&db, &Setup::default()).unwrap();
    assert_eq!(dump(&db), dump(&undisturbed));
}

#[test]
fn a_file_that_changed_between_detect_and_embed_begins_anew() {
    let (_folder, db, files) = photos(6);
    run(&db, &Setup { embedder: None, ..Setup::default() }).unwrap();
    picture(999, 64, 48).save(&files[2]).unwrap();
    run(&db, &Setup::default()).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 6);
    assert_eq!(number(&db, "SELECT width_px FROM images WHERE path LIKE '%00002.png'"), 64);
    let fresh = db.with_file_name("fresh.db");
    database(&fresh, &files);
    run(&fresh, &Setup::default()).unwrap();
    assert_eq!(dump(&db), dump(&fresh));
}

#[test]
fn crops_are_files_before_their_rows_are_done() {
    let (folder, db, _) = photos(10);
    let crops = folder.path().join("crops");
    fs::create_dir(&crops).unwrap();
    let mut setup = Setup::default();
    setup.config.crops = Some(crops.clone());
    run(&db, &setup).unwrap();
    let conn = Connection::open(&db).unwrap();
    let mut statement = conn.prepare("SELECT crop, x0, y0, x1, y1 FROM regions").unwrap();
    let mut rows = statement.query([]).unwrap();
    let mut count = 0;
    while let Some(row) = rows.next().unwrap() {
        let crop = image::open(crops.join(row.get::<_, String>(0).unwrap())).unwrap();
        let side = |a: usize, b: usize| row.get::<_, f64>(b).unwrap().ceil() - row.get::<_, f64>(a).unwrap().floor();
        assert_eq!((f64::from(crop.width()), f64::from(crop.height())), (side(1, 3), side(2, 4)));
        count += 1;
    }
    assert!(count > 5);
}

#[test]
fn a_truncated_file_is_used_and_marked_where_the_user_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.jpg");
    picture(1, 400, 300).save(&whole).unwrap();
    let bytes = fs::read(&whole).unwrap();
    let cut = folder.path().join("cut.jpg");
    fs::write(&cut, &bytes[..bytes.len() * 6 / 10]).unwrap();
    let db = folder.path().join("photos.db");
    database(&db, &[whole, cut]);
    let mut setup = Setup::default();
    assert_eq!(run(&db, &setup).unwrap().failed, 1);
    assert_eq!(number(&db, "SELECT count(*) FROM failures WHERE code = 'truncated'"), 1);
    croprow::db::Db::open(&db).unwrap().retry(None).unwrap();
    setup.config.decode.truncated = Truncated::Use;
    assert_eq!(run(&db, &setup).unwrap().done, 1);
    assert_eq!(number(&db, "SELECT truncated FROM images WHERE path LIKE '%cut.jpg'"), 1);
}
