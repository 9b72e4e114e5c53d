//! What a run says of itself is true: its exit code, its books, its standing still.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use croprow::config::Stale;
use croprow::db::Db;
use croprow::db::books::Deeds;
use croprow::db::claim::Tokens;
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::{NewRun, Sample};
use croprow::row::Stage;
use image::{Rgb, RgbImage};
use rusqlite::Connection;

use crate::cli::{call, expect, folder, run, runtime};
use crate::database::settle;
use crate::support::dump::{assert_sound, number};
use crate::support::root;

fn added(count: u32) -> (tempfile::TempDir, String) {
    let (folder, db, photos) = folder(count);
    expect(&call(&["add", &db, &photos]), 0);
    (folder, db)
}

#[test]
fn counters_that_are_not_what_the_run_did_end_it_with_3_and_the_remedy() {
    for tampering in [
        "DROP TRIGGER images_counted_on_update",
        "UPDATE counts SET images = images + 5",
        "INSERT INTO counts VALUES ('failed', 0, '', 0, 2)",
    ] {
        let (_folder, db) = added(10);
        Connection::open(&db).unwrap().execute_batch(tampering).unwrap();
        let said = expect(&run(&db, &[]), 3);
        assert!(said.contains("croprow: the books do not balance: "), "{tampering}: {said}");
        assert!(said.contains("croprow verify") && said.contains("error: 10 done, 0 failed"), "{tampering}: {said}");
        assert_eq!(number(Path::new(&db), "SELECT exit_code FROM runs"), 3);
    }
    let (_folder, db) = added(10);
    Connection::open(&db).unwrap().execute_batch("DROP TRIGGER images_counted_on_update").unwrap();
    let said = expect(&run(&db, &[]), 3);
    assert!(said.contains("10 rows were done by this run, but there are 0 after 0"), "{said}");
}

#[test]
fn rows_that_somebody_else_changed_are_not_held_against_the_run() {
    let (_folder, path) = added(3);
    let mut db = Db::open(Path::new(&path)).unwrap();
    let embed = Some(StoredRecipe { body: "e", model_digest: "m", model_path: Path::new("/m") });
    let new = NewRun { device: "cpu", device_note: None, runtime: "fake", settings: "{}", detect: None, embed };
    let (run, in_force) = db.begin_run(&new).unwrap();
    let books = db.open_books().unwrap();
    let deeds = Deeds { run, in_force, stale: Stale::Keep, claimed: 3, ended: 2, released: 0, done: 2, failed: 0 };
    let wrong = db.audit(&books, &deeds).unwrap().join("; ");
    assert!(wrong.contains("3 rows were claimed, 2 have an outcome and 0 were given back"), "{wrong}");
    assert!(wrong.contains("2 rows were done by this run, but there are 0 after 0"), "{wrong}");
    Connection::open(&path).unwrap().execute("DELETE FROM images WHERE id = 3", []).unwrap();
    assert_eq!(db.audit(&books, &deeds).unwrap(), Vec::<String>::new());
    // What the run itself holds and what the rows themselves say is looked at all the same.
    settle(&mut db, in_force, Stale::Keep);
    assert_eq!(db.claim_page(&mut Tokens::new(run), Stage::Embed, 0, 1).unwrap().len(), 1);
    assert_eq!(db.audit(&books, &deeds).unwrap(), ["1 rows are still marked as running"]);
}

#[test]
fn a_run_that_stands_still_is_told_by_status() {
    let (_folder, path) = added(2);
    let mut db = Db::open(Path::new(&path)).unwrap();
    let embed = Some(StoredRecipe { body: "e", model_digest: "m", model_path: Path::new("/m") });
    let new = NewRun { device: "cpu", device_note: None, runtime: "fake", settings: "{}", detect: None, embed };
    let (run, in_force) = db.begin_run(&new).unwrap();
    settle(&mut db, in_force, Stale::Keep);
    db.claim_page(&mut Tokens::new(run), Stage::Embed, 0, 1).unwrap();
    db.heartbeat(run, &Sample::default(), &[]).unwrap();
    let status = || (expect(&call(&["status", &path]), 0), expect(&call(&["status", &path, "--json"]), 0));
    let (text, json) = status();
    assert!(!text.contains("stalled") && json.contains("\"stalled_s\":null"), "{text} {json}");
    let older = |sql: &str| Connection::open(&path).unwrap().execute(sql, []).unwrap();
    older(
        "INSERT INTO samples (run_id, at, done, failed, detect_per_s, embed_per_s, slowest, rss_bytes, held_bytes)
           SELECT run_id, at - seconds, 1, 0, 0, per_s, 'embed', 0, 0
           FROM samples, (SELECT 200 AS seconds, 0 AS per_s UNION SELECT 125, 3.0 UNION SELECT 60, 0)",
    );
    let (text, json) = status();
    assert!(text.contains("stalled: no image has ended for 2 min 05 s"), "{text}");
    assert!(json.contains("\"stalled_s\":125.0"), "{json}");
    older("UPDATE samples SET embed_per_s = 1 WHERE at = (SELECT max(at) FROM samples)");
    assert!(!status().0.contains("stalled"));
    older("UPDATE samples SET embed_per_s = 0");
    db.release(run).unwrap();
    assert!(!status().0.contains("stalled"), "nothing is in flight");
}

/// Ten pictures, of which that many are black: their vectors are zeros, and the small detector gives NaN for them.
fn with_black(black: usize) -> (tempfile::TempDir, String) {
    let (folder, db, photos) = folder(10);
    for n in 0..black {
        RgbImage::from_pixel(20, 20, Rgb([0; 3])).save(Path::new(&photos).join(format!("{n:05}.png"))).unwrap();
    }
    expect(&call(&["add", &db, &photos]), 0);
    (folder, db)
}

#[test]
fn zero_vectors_and_nan_are_refused_and_never_stored() {
    let (_folder, db) = with_black(2);
    let model = ["--device", "cpu", "--embedder", "tests/data/models/hangs-on-white"];
    let said = expect(&call(&[&["run", &db][..], &model].concat()), 2);
    assert!(said.contains("8 done, 2 failed"), "{said}");
    assert_eq!(
        number(Path::new(&db), "SELECT count(*) FROM failures WHERE code = 'nan_output' AND stage = 'embed'"),
        2
    );
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM embeddings"), 8);
    let (_folder, nan) = with_black(2);
    let model = ["--device", "cpu", "--detector", "tests/data/models/yolo-nan-tiny"];
    let said = expect(&call(&[&["run", &nan][..], &model].concat()), 2);
    assert!(said.contains("8 done, 2 failed"), "{said}");
    assert_eq!(
        number(Path::new(&nan), "SELECT count(*) FROM failures WHERE code = 'nan_output' AND stage = 'detect'"),
        2
    );
    // A model that gives nothing else is at fault, and no row is.
    let (_folder, db) = with_black(10);
    let model = ["--device", "cpu", "--batch", "1", "--threads", "1", "--embedder", "tests/data/models/hangs-on-white"];
    let said = expect(&call(&[&["run", &db][..], &model].concat()), 3);
    assert!(said.contains("8 images in a row gave NaN, infinity or nothing but zeros"), "{said}");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM embeddings"), 0);
    assert_sound(Path::new(&db));
}

/// A library that is the runtime and ends every process that leaves by way of its destructors.
const CRASHES: &str = "
    #include <stdlib.h>
    static void crash(void) { abort(); }
    __attribute__((constructor)) static void arm(void) { atexit(crash); }
    __attribute__((destructor)) static void disarm(void) { abort(); }";

const CONTROL: &str = "
    #include <dlfcn.h>
    int main(int count, char **words) { return dlopen(words[1], RTLD_NOW) && count ? 0 : 9; }";

fn compile(folder: &Path, source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let (text, program) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&text, source).unwrap();
    let output = Command::new("cc").arg("-o").arg(&program).arg(&text).args(flags).output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

#[test]
fn a_teardown_that_crashes_does_not_change_the_exit_code() {
    let (folder, db) = added(4);
    let real = runtime();
    // The name that the loader knows it by.
    std::os::unix::fs::symlink(&real, folder.path().join("libonnxruntime.so.1")).unwrap();
    let flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", real.to_str().unwrap(), "-Wl,-rpath,$ORIGIN"];
    let library = compile(folder.path(), CRASHES, "libonnxruntime.so", &flags);
    let control = compile(folder.path(), CONTROL, "control", &["-ldl"]);
    let crashed = Command::new(control).arg(&library).output().unwrap();
    assert_eq!(crashed.status.code(), None, "a process that exits as usual is ended by a signal");
    let said = expect(&run(&db, &["--runtime", library.to_str().unwrap()]), 0);
    assert!(said.contains("4 done"), "{said}");
    fs::write(folder.path().join("photos/bad.png"), "no picture").unwrap();
    expect(
        &call(&[
            "add",
            &db,
            folder.path().join("photos").to_str().unwrap(),
            folder.path().join("photos/bad.png").to_str().unwrap(),
        ]),
        0,
    );
    expect(&call(&["run", &db]), 2);
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs WHERE exit_code IN (0, 2)"), 2);
}

fn shell(words: &str) -> Output {
    let shell = Command::new("sh").current_dir(root()).stdin(Stdio::null()).args(["-c", words]).output();
    shell.unwrap()
}

#[test]
fn nobody_who_listens_does_not_change_the_exit_code() {
    let (folder, db) = added(3);
    let program = env!("CARGO_BIN_EXE_croprow");
    let models = "--device cpu --detector tests/data/models/yolo-v8-tiny --embedder tests/data/models/tiny-tokens";
    assert_eq!(shell(&format!("exec {program} run {db} {models} --json >&-")).status.code(), Some(0));
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM images WHERE embed_state = 'done'"), 3);
    assert_eq!(shell(&format!("exec {program} run {db} --json >&- 2>&-")).status.code(), Some(0));
    let bad = folder.path().join("bad.png");
    fs::write(&bad, "no picture").unwrap();
    expect(&call(&["add", &db, bad.to_str().unwrap()]), 0);
    assert_eq!(shell(&format!("exec {program} run {db} --json >&- 2>&-")).status.code(), Some(2));
    // A reader that has gone away.
    let status = folder.path().join("status");
    let words = format!("({program} run {db} --json; echo $? > {}) | true", status.display());
    shell(&words);
    assert_eq!(fs::read_to_string(status).unwrap().trim(), "2");
}
