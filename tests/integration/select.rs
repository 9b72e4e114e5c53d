//! Selecting again from stored candidates, with fake models: it must equal a fresh run, and cost the embedder only
//! what is new.

use std::path::{Path, PathBuf};

use croprow::db::Db;
use croprow::db::due::InForce;
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::NewRun;
use croprow::db::select::{Carried, Reselected, Selector};
use croprow::model::boxes::regions_of;
use croprow::recipe::{Keep, Nms, OnEmpty, Selection};
use croprow::row::Stage;
use rusqlite::Connection;

use crate::support::dump::{assert_sound, dump, number};
use crate::support::fake::{self, Setup, selection};
use crate::support::pictures;

/// A database on which the fake models have run with that selection.
fn worked(folder: &Path, name: &str, files: &[PathBuf], detector: &'static str, rule: &Selection) -> PathBuf {
    let db = folder.join(name);
    fake::database(&db, files);
    fake::run(&db, &Setup { detector: Some(detector), selection: rule.clone(), ..Setup::default() }).unwrap();
    db
}

/// `croprow select`, with the recipes of the fakes.
fn select_again(path: &Path, body: &'static str, rule: &Selection) -> Reselected {
    let mut db = Db::open(path).unwrap();
    let recipe = |body| StoredRecipe { body, model_digest: body, model_path: Path::new(body) };
    let any = db.recipes(Stage::Detect).unwrap().into_iter().filter(|(_, b)| b != body).map(|(id, _)| id).collect();
    let carried = Carried { any, own_prompt: Vec::new() };
    let (detect, embed) = (Some(recipe(body)), Some(recipe("fake-embedder-1")));
    let new = NewRun { device: "none", device_note: None, runtime: "none", settings: "{}", detect, embed };
    let (run, in_force): (_, InForce) = db.begin_run(&new).unwrap();
    let select = |packed: &[u8], vocabulary: &_, size| regions_of(packed, vocabulary, rule, size);
    let mut selector = Selector::new(&carried, in_force, &select);
    while selector.step(&mut db).unwrap() {}
    let done = selector.done;
    db.end_run(run, "complete", 0, 0, 0, None).unwrap();
    done
}

fn ids(db: &Path) -> Vec<(i64, i64)> {
    let conn = Connection::open(db).unwrap();
    let mut statement = conn
        .prepare("SELECT r.id, e.rowid_of FROM regions r JOIN (SELECT region_id, count(*) AS rowid_of FROM embeddings GROUP BY 1) e ON e.region_id = r.id ORDER BY 1")
        .unwrap();
    let rows = statement.query_map([], |r| Ok((r.get(0)?, r.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

#[test]
fn a_higher_threshold_equals_a_fresh_run_and_leaves_nothing_for_the_embedder() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 60);
    let db = worked(folder.path(), "a.db", &files, "low", &selection(0.3));
    let before = ids(&db);
    let done = select_again(&db, "high", &selection(0.55));
    let fresh = worked(folder.path(), "b.db", &files, "high", &selection(0.55));
    assert_eq!(dump(&db), dump(&fresh));
    assert_eq!((done.images, done.new, done.pending), (60, 0, 0));
    assert!(done.changed > 10 && done.gone > 10 && done.kept > 5, "{done:?}");
    assert!(ids(&db).iter().all(|kept| before.contains(kept)), "kept regions have their ids and vectors");
    assert_sound(&db);
}

#[test]
fn a_lower_threshold_equals_a_fresh_run_once_the_new_regions_are_embedded() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 60);
    let db = worked(folder.path(), "a.db", &files, "high", &selection(0.55));
    let before = ids(&db);
    let done = select_again(&db, "low", &selection(0.3));
    let pending = number(&db, "SELECT count(*) FROM images WHERE embed_state = 'pending'");
    assert_eq!(done.pending, pending as u64);
    assert!(done.new > 10 && done.gone == 0 && done.pending < 60, "{done:?}");
    let lacking = number(&db, "SELECT count(*) FROM regions WHERE id NOT IN (SELECT region_id FROM embeddings)");
    assert_eq!(lacking as u64, done.new, "only what is new waits");
    fake::run(&db, &Setup { detector: Some("low"), ..Setup::default() }).unwrap();
    let fresh = worked(folder.path(), "b.db", &files, "low", &selection(0.3));
    assert_eq!(dump(&db), dump(&fresh));
    assert!(before.iter().all(|kept| ids(&db).contains(kept)), "kept regions have their ids and vectors");
    assert_sound(&db);
}

#[test]
fn every_part_of_the_rule_equals_a_fresh_run() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 40);
    let base = selection(0.3);
    let rules = [
        ("keep", Selection { keep: Keep::Best(1), ..base.clone() }),
        ("across", Selection { nms: Nms::Across, nms_iou: 0.05, ..base.clone() }),
        ("small", Selection { min_box_px: 8.0, ..base.clone() }),
        ("margin", Selection { margin: 0.2, ..base.clone() }),
        ("whole", Selection { box_threshold: 0.55, on_empty: OnEmpty::Whole, ..base.clone() }),
    ];
    for (name, rule) in rules {
        let db = worked(folder.path(), &format!("{name}-a.db"), &files, "base", &base);
        let done = select_again(&db, name, &rule);
        assert!(done.changed > 0, "{name} changes something");
        fake::run(&db, &Setup { detector: Some(name), selection: rule.clone(), ..Setup::default() }).unwrap();
        let fresh = worked(folder.path(), &format!("{name}-b.db"), &files, name, &rule);
        assert_eq!(dump(&db), dump(&fresh), "{name}");
        assert_sound(&db);
    }
}

#[test]
fn the_same_rule_again_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 20);
    let db = worked(folder.path(), "a.db", &files, "one", &selection(0.3));
    let before = dump(&db);
    let done = select_again(&db, "two", &selection(0.3));
    assert_eq!((done.images, done.changed, done.pending), (20, 0, 0));
    assert_eq!(dump(&db), before);
}
