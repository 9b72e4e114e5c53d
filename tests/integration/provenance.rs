//! What decides a result is known and changes exactly the rows that depend on it: prompts, floors, files of a
//! model, the self-test. The program as a process, with real ONNX files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cli::{call, expect, folder, run};
use crate::support::dump::{assert_sound, dump, number};
use crate::support::{pictures, root};

const TEXT_DETECTOR: &str = "tests/data/models/grounding-dino-tiny";

/// Copies a model's folder, so that it can be changed.
fn copy_of(model: &str, to: &Path) -> String {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(root().join(model)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    to.to_str().unwrap().to_owned()
}

/// A folder with small pictures of one shape, a list that gives some of them prompts, and a database.
fn prompted(own_prompts: usize, pictures_in_all: u32) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = pictures(folder.path(), pictures_in_all);
    let rows: Vec<_> = files
        .iter()
        .enumerate()
        .map(|(i, path)| match i < own_prompts {
            true => serde_json::json!({"path": path, "prompt": ["a train", "a locomotive"]}),
            false => serde_json::json!({"path": path}),
        })
        .collect();
    let list = folder.path().join("rows.json");
    fs::write(&list, serde_json::to_string(&rows).unwrap()).unwrap();
    let db = folder.path().join("photos.db").to_str().unwrap().to_owned();
    expect(&call(&["add", &db, "--from", list.to_str().unwrap()]), 0);
    (folder, db)
}

#[test]
fn another_prompt_of_the_run_concerns_only_rows_without_their_own() {
    let (_folder, db) = prompted(2, 5);
    let detect = |more: &[&str]| {
        let mut args = vec!["run", &db, "--detector", TEXT_DETECTOR, "--device", "cpu"];
        args.extend(more);
        call(&args)
    };
    let said = expect(&detect(&[]), 1);
    assert!(said.contains("3 images that wait for the detector have no prompt"), "{said}");
    expect(&detect(&["--prompt", "a cat. a dog."]), 0);
    let path = Path::new(&db);
    let labels = "SELECT count(DISTINCT label) FROM regions r JOIN images i ON i.id = r.image_id WHERE label NOT IN";
    assert_eq!(number(path, &format!("{labels} ('a cat', 'a dog', 'a train', 'a locomotive')")), 0);
    assert!(number(path, "SELECT count(*) FROM regions") > 0);
    let own = "SELECT count(*) FROM regions r JOIN images i ON i.id = r.image_id WHERE prompt IS NOT NULL AND label LIKE '%cat%'";
    assert_eq!(number(path, own), 0);
    let said = expect(&detect(&["--prompt", "a house."]), 1);
    assert!(said.contains("3 of 5 finished rows") && said.contains("prompt was"), "{said}");
    let said = expect(&detect(&["--prompt", "a house.", "--stale", "redo"]), 0);
    assert!(said.contains("3 done"), "{said}");
    assert_eq!(number(path, "SELECT count(*) FROM images WHERE detect_attempts > 0 AND prompt IS NOT NULL"), 2);
    assert_eq!(
        number(path, "SELECT count(DISTINCT detect_recipe_id) FROM images"),
        1,
        "all belong to the recipe in force"
    );
    assert_eq!(number(path, "SELECT count(*) FROM regions WHERE label = 'a cat'"), 0);
    assert_sound(path);
}

#[test]
fn finished_rows_without_a_prompt_are_not_thrown_away_for_a_detector_that_wants_one() {
    let (_folder, db, photos) = folder(3);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &[]), 0);
    let before = dump(Path::new(&db));
    let said = expect(&call(&["run", &db, "--detector", TEXT_DETECTOR, "--stale", "redo", "--device", "cpu"]), 1);
    assert!(said.contains("3 images that wait for the detector have no prompt"), "{said}");
    assert_eq!(dump(Path::new(&db)), before);
}

#[test]
fn damaged_candidates_cost_their_row_a_second_look_and_nothing_else() {
    let (_folder, db, photos) = folder(4);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &[]), 0);
    let conn = rusqlite::Connection::open(&db).unwrap();
    conn.execute("UPDATE candidates SET packed = x'0902' WHERE image_id = 2", []).unwrap();
    conn.execute("UPDATE candidates SET packed = x'01ffff' WHERE image_id = 3", []).unwrap();
    drop(conn);
    let said = expect(&call(&["select", &db, "--box-threshold", "0.35"]), 0);
    assert!(said.contains("2 images had candidates that cannot be read"), "{said}");
    let said = expect(&call(&["run", &db]), 0);
    assert!(said.contains("2 done"), "{said}");
    assert_sound(Path::new(&db));
}

#[test]
fn a_threshold_below_the_floor_names_what_needs_the_model_again() {
    let (_folder, db, photos) = folder(4);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &["--candidate-floor", "0.2"]), 0);
    let before = dump(Path::new(&db));
    let said = expect(&call(&["select", &db, "--box-threshold", "0.1"]), 1);
    assert!(said.contains("all 4 images need the model again") && said.contains("--candidate-floor 0.1"), "{said}");
    assert_eq!(dump(Path::new(&db)), before);
    let said = expect(&run(&db, &["--box-threshold", "0.1"]), 1);
    assert!(said.contains("below --candidate-floor 0.2"), "{said}");
    let said = expect(&run(&db, &["--box-threshold", "0.1", "--candidate-floor", "0.1", "--stale", "redo"]), 0);
    assert!(said.contains("4 done"), "{said}");
}

#[test]
fn select_equals_a_fresh_run_through_the_program() {
    let (folder, db, photos) = folder(6);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &[]), 0);
    let said = expect(&call(&["select", &db, "--box-threshold", "0.35", "--keep", "2"]), 0);
    assert!(said.contains("6 images selected again") && said.contains("median"), "{said}");
    // The new rule is remembered: nothing is stale, and what is new is embedded.
    expect(&call(&["run", &db]), 0);
    let fresh = folder.path().join("fresh.db").to_str().unwrap().to_owned();
    expect(&call(&["add", &fresh, &photos]), 0);
    expect(&run(&fresh, &["--box-threshold", "0.35", "--keep", "2"]), 0);
    assert_eq!(dump(Path::new(&db)), dump(Path::new(&fresh)));
    let said = expect(&call(&["select", &db, "--json", "--box-threshold", "0.3", "--keep", "all"]), 0);
    assert!(said.contains("\"embed_pending\""), "{said}");
    expect(&call(&["run", &db]), 0);
    assert_sound(Path::new(&db));
}

#[test]
fn a_changed_file_of_a_model_is_another_recipe() {
    let (folder, db, photos) = folder(3);
    let model = copy_of("tests/data/models/yolo-v8-tiny", &folder.path().join("model"));
    expect(&call(&["add", &db, &photos]), 0);
    let detect = |more: &[&str]| {
        let mut args = vec!["run", &db, "--detector", &model, "--device", "cpu"];
        args.extend(more);
        call(&args)
    };
    expect(&detect(&[]), 0);
    fs::write(Path::new(&model).join("reference.txt"), "no part of the model").unwrap();
    expect(&detect(&[]), 0);
    fs::write(Path::new(&model).join("croprow.toml"), "[input]\npad_fill = 0\n").unwrap();
    let said = expect(&detect(&[]), 1);
    assert!(said.contains("3 of 3 finished rows") && said.contains("model_digest was"), "{said}");
}

#[test]
fn two_embedders_live_side_by_side_and_going_back_costs_nothing_twice() {
    let (folder, db, photos) = folder(3);
    let other = copy_of("tests/data/models/tiny-tokens", &folder.path().join("other"));
    fs::write(
        Path::new(&other).join("croprow.toml"),
        "[embedder]\noutput = \"last_hidden_state\"\npooling = \"mean\"\n",
    )
    .unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &[]), 0);
    let path = Path::new(&db);
    let first = number(path, "SELECT count(*) FROM embeddings");
    let regions = number(path, "SELECT sum(id * id) FROM regions");
    expect(&call(&["run", &db, "--embedder", &other, "--stale", "redo"]), 0);
    assert_eq!(number(path, "SELECT count(*) FROM embeddings"), 2 * first);
    assert_eq!(number(path, "SELECT count(DISTINCT recipe_id) FROM embeddings"), 2);
    assert_eq!(number(path, "SELECT sum(id * id) FROM regions"), regions);
    // The first one's vectors are all there: no picture is even opened.
    fs::remove_dir_all(&photos).unwrap();
    let said = expect(&run(&db, &["--stale", "redo"]), 0);
    assert!(said.contains("3 done"), "{said}");
    assert_sound(path);
}

#[test]
fn a_model_is_tested_once_and_one_that_is_wrong_at_a_size_is_refused() {
    let (folder, db) = prompted(1, 1);
    let good = copy_of(TEXT_DETECTOR, &folder.path().join("good"));
    let reference = Path::new(&good).join("reference.json");
    assert!(reference.exists(), "the export script writes it");
    expect(&call(&["run", &db, "--detector", &good, "--device", "cpu"]), 0);
    let path = Path::new(&db);
    assert_eq!(number(path, "SELECT count(*) FROM models WHERE self_test LIKE '%\"compared\":3%'"), 1);
    let (_third_folder, third) = prompted(1, 1);
    expect(&call(&["run", &third, "--detector", &good, "--device", "cpu", "--labels", "phrases"]), 0);
    // The same digest is not tested again, whatever now lies beside it.
    let text = fs::read_to_string(&reference).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    for detection in json["cases"][1]["detections"].as_array_mut().unwrap() {
        detection["box"][0] = serde_json::json!(detection["box"][0].as_f64().unwrap() + 0.3);
    }
    fs::write(&reference, json.to_string()).unwrap();
    expect(&call(&["retry", &db, "--changed"]), 0);
    expect(&call(&["run", &db, "--detector", &good, "--device", "cpu"]), 0);
    let (_other_folder, fresh) = prompted(1, 1);
    let said = expect(&call(&["run", &fresh, "--detector", &good, "--device", "cpu"]), 1);
    let (width, height) = (&json["cases"][1]["width_px"], &json["cases"][1]["height_px"]);
    assert!(said.contains(&format!("at {width}x{height}")) && said.contains("export it again"), "{said}");
    assert_eq!(number(Path::new(&fresh), "SELECT count(*) FROM images WHERE detect_attempts > 0"), 0, "before any row");
    fs::remove_file(&reference).unwrap();
    let said = expect(&call(&["run", &fresh, "--detector", &good, "--device", "cpu"]), 0);
    assert!(said.contains("no reference.json beside it"), "{said}");
}

#[test]
fn what_a_detector_cannot_do_with_a_prompt_is_said_at_the_start() {
    let (_folder, db, photos) = folder(1);
    expect(&call(&["add", &db, &photos]), 0);
    let said = expect(&run(&db, &["--prompt", "a cat."]), 1);
    assert!(said.contains("fixed classes"), "{said}");
    let said = expect(&run(&db, &["--labels", "phrases"]), 1);
    assert!(said.contains("rule of GroundingDINO"), "{said}");
    let args = ["run", &db, "--detector", TEXT_DETECTOR, "--device", "cpu", "--prompt", " . . "];
    assert!(expect(&call(&args), 1).contains("nothing to look for"));
}

#[test]
fn a_step_of_shapes_is_part_of_the_recipe_counted_as_padding_remembered_and_can_be_taken_back() {
    let (_folder, db) = prompted(4, 4);
    let path = Path::new(&db);
    let run = |more: &[&str]| {
        let mut args = vec!["run", &db, "--device", "cpu", "--batch", "1"];
        args.extend(more);
        call(&args)
    };
    let padding = || -> String {
        let conn = rusqlite::Connection::open(path).unwrap();
        let text = "SELECT printf('%.3f', summary ->> 'padding') FROM runs ORDER BY id DESC LIMIT 1";
        conn.query_row(text, [], |row| row.get(0)).unwrap()
    };
    expect(&run(&["--detector", TEXT_DETECTOR]), 0);
    let recipe = "SELECT body LIKE '%shape_step%' FROM recipes WHERE in_force";
    assert_eq!((number(path, recipe), padding()), (0, "0.000".to_owned()), "as before there were steps");
    let plain = dump(path);
    let said = expect(&run(&["--shape-step", "512"]), 1);
    assert!(said.contains("4 of 4 finished rows") && said.contains("shape_step_px was null, is 512"), "{said}");
    assert_eq!(dump(path), plain);
    let said = expect(&run(&["--shape-step", "512", "--stale", "redo"]), 0);
    assert!(said.contains("4 done"), "{said}");
    assert_eq!(number(path, recipe), 1);
    // Pictures of 1042 to 1066 by 800 pixels lie in tensors of 1536 by 1024.
    let share: f64 = padding().parse().unwrap();
    assert!((0.40..0.50).contains(&share), "{share}");
    // Remembered: nothing is stale and nothing is asked.
    expect(&run(&[]), 0);
    assert_eq!(
        number(path, "SELECT count(DISTINCT settings) FROM runs WHERE settings LIKE '%\"shape_step_px\":512%'"),
        1
    );
    expect(&run(&["--shape-step", "none", "--stale", "redo"]), 0);
    assert_eq!(dump(path), plain, "as if there had never been a step");
    assert_sound(path);
}

#[test]
fn a_step_is_refused_where_nothing_tells_the_detector_where_a_picture_ends_or_sides_are_fixed() {
    let (_folder, db, photos) = folder(1);
    expect(&call(&["add", &db, &photos]), 0);
    for (model, words) in [
        ("yolo-v8-tiny", "no pixel_mask"),
        ("yolos-tiny", "no pixel_mask"),
        ("rt_detr-tiny", "no pixel_mask"),
        ("owlvit-tiny", "no pixel_mask"),
    ] {
        let model = format!("tests/data/models/{model}");
        let prompt: &[&str] = if model.contains("owlvit") { &["--prompt", "a cat."] } else { &[] };
        let mut args = vec!["run", &db, "--device", "cpu", "--detector", &model, "--shape-step", "64"];
        args.extend(prompt);
        let said = expect(&call(&args), 1);
        assert!(said.contains(words) && said.contains("--shape-step none"), "{model}: {said}");
    }
    let said = expect(&run(&db, &["--shape-step", "1"]), 1);
    assert!(said.contains("from 2 to 1024"), "{said}");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 0, "nothing was touched");
}
