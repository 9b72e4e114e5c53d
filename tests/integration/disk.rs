//! Disks that are full, or can only be read. Each scenario is this test program once more, in a mount namespace of its own,
//! with a small tmpfs in the place of the disk; where the system does not allow that, the test says so and checks nothing.
//! Limits on the size of a file (`ulimit -f`) are tested everywhere.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use croprow::db::Db;
use croprow::db::claim::RunId;
use croprow::error::Error;
use croprow::verify::{Options, verify};
use rusqlite::Connection;

use crate::cli::{croprow, expect, folder};
use crate::support::dump::{assert_sound, dump, number};
use crate::support::fake::{Behaviour, Setup, database, run};
use crate::support::{picture, pictures};

/// Names the folder for the tmpfs to a scenario.
const PLACE: &str = "CROPROW_TEST_PLACE";

/// Runs the scenario of that name in a namespace of its own.
fn with_disk(scenario: &str) {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("disk");
    fs::create_dir(&place).unwrap();
    let may_mount = Command::new("unshare")
        .args(["-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none"])
        .arg(&place)
        .output()
        .is_ok_and(|output| output.status.success());
    if !may_mount {
        eprintln!("skipped: this system does not let a test mount a tmpfs (unshare -rm mount -t tmpfs)");
        return;
    }
    let output = Command::new("unshare")
        .arg("-rm")
        .arg(std::env::current_exe().unwrap())
        .args([&format!("disk::{scenario}"), "--exact", "--ignored", "--nocapture"])
        .env(PLACE, &place)
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// The disk of a scenario; `None` where the scenario was called by itself.
struct Disk(PathBuf);

impl Disk {
    fn new(size: &str) -> Option<Self> {
        let place = PathBuf::from(std::env::var_os(PLACE)?);
        mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "none"], &place);
        Some(Self(place))
    }

    fn again(&self, options: &str) {
        mount(&["-o", &format!("remount,{options}"), "none"], &self.0);
    }

    /// Leaves no byte.
    fn fill(&self) -> PathBuf {
        let filler = self.0.join("filler");
        let mut file = fs::OpenOptions::new().create(true).append(true).open(&filler).unwrap();
        while file.write_all(&[1; 512]).is_ok() {}
        filler
    }
}

fn mount(args: &[&str], place: &Path) {
    let output = Command::new("mount").args(args).arg(place).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Vectors of 16 KiB, slowly enough for several commits.
fn large() -> Setup {
    let behaviour = Behaviour { dim: Some(4096), call: Duration::from_millis(15), ..Behaviour::default() };
    Setup { behaviour, ..Setup::default() }
}

fn call(args: &[&str]) -> Output {
    croprow().args(args).output().unwrap()
}

fn assert_of_disk(error: &Error, place: &Path, room: &str) {
    let said = error.to_string();
    assert!(matches!(error, Error::Disk { .. }) && error.exit_code() == 3, "{said}");
    for words in [&format!("{} (tmpfs) has ", place.display()), &format!("free of {room}")] {
        assert!(said.contains(words.as_str()), "{words} in {said}");
    }
    assert!(error.hint().is_some_and(|hint| hint.contains("finished rows are kept")));
}

#[test]
fn a_full_disk_ends_the_run_marks_no_row_and_the_next_run_goes_on() {
    with_disk("full_disk_of_the_database");
}

#[test]
#[ignore = "a scenario of the test above"]
fn full_disk_of_the_database() {
    let Some(disk) = Disk::new("3m") else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let db = disk.0.join("photos.db");
    let undisturbed = elsewhere.path().join("undisturbed.db");
    let files = pictures(elsewhere.path(), 200);
    database(&db, &files);
    database(&undisturbed, &files);
    run(&undisturbed, &large()).unwrap();
    let error = run(&db, &large()).unwrap_err();
    assert_of_disk(&error, &disk.0, "3.0 MiB");
    let filler = disk.fill();
    let text = db.to_str().unwrap();
    let json = expect(&call(&["status", text, "--json"]), 0);
    let json: serde_json::Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((json["images"].as_i64(), json["stages"][0]["failed"].as_i64()), (Some(200), Some(0)));
    assert_eq!(number(&db, "SELECT count(*) FROM failures"), 0);
    let done = number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'");
    assert!(done > 0 && done < 200, "{done}");
    // As after a restore: the log without its shared memory, and no room for it.
    fs::remove_file(disk.0.join("photos.db-shm")).unwrap();
    disk.fill();
    let said = expect(&call(&["status", text]), 0);
    assert!(said.contains("200 images"), "{said}");
    let said = expect(&call(&["retry", text, "--code", "missing"]), 3);
    assert!(said.contains("0 bytes free of 3.0 MiB") && said.contains("free space there"), "{said}");
    // Room again.
    fs::remove_file(filler).unwrap();
    disk.again("size=64m");
    // Its process would be gone by now, and here it is this one.
    Db::open(&db).unwrap().end_run(RunId(1), "error", 3, 0, 0, None).unwrap();
    run(&db, &large()).unwrap();
    assert!(dump(&db) == dump(&undisturbed));
    assert_sound(&db);
    assert!(number(&db, "SELECT max(detect_attempts) FROM images") <= 2, "only rows in flight are done again");
}

#[test]
fn a_full_disk_of_the_crops_ends_the_run_and_leaves_no_part_of_a_file() {
    with_disk("full_disk_of_the_crops");
}

#[test]
#[ignore = "a scenario of the test above"]
fn full_disk_of_the_crops() {
    let Some(disk) = Disk::new("200k") else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let db = elsewhere.path().join("photos.db");
    let files = pictures(elsewhere.path(), 200);
    database(&db, &files);
    let crops = disk.0.join("crops");
    fs::create_dir(&crops).unwrap();
    let mut setup = Setup::default();
    setup.config.crops = Some(crops.clone());
    let error = run(&db, &setup).unwrap_err();
    assert_of_disk(&error, &disk.0, "200.0 KiB");
    let Error::Disk { path, .. } = &error else { unreachable!() };
    assert!(path.starts_with(&crops), "{}", path.display());
    assert_eq!(unfinished(&crops), 0);
    assert_eq!(number(&db, "SELECT count(*) FROM failures"), 0);
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL"), 0, "rows in flight are given back");
    let options = Options { crop_folders: vec![crops.clone()], examples: 5, threads: 2 };
    let look = || verify(&Db::open_read_only(&db).unwrap(), &options, &mut |_| {}).unwrap();
    let report = look();
    assert!(report.findings.iter().all(|f| f.damage.word() == "crop_orphan"), "{report:#?}");
    disk.again("size=64m");
    run(&db, &setup).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM images WHERE embed_state = 'done'"), 200);
    assert!(look().is_sound());
}

fn unfinished(crops: &Path) -> usize {
    let shards = fs::read_dir(crops).unwrap().flatten();
    let files = shards.flat_map(|shard| fs::read_dir(shard.path()).unwrap().flatten());
    files.filter(|file| file.file_name().to_string_lossy().ends_with(".croprow-tmp")).count()
}

#[test]
fn a_full_temporary_folder_disturbs_nothing() {
    with_disk("full_temporary_folder");
}

#[test]
#[ignore = "a scenario of the test above"]
fn full_temporary_folder() {
    let Some(disk) = Disk::new("100k") else { return };
    // Tests have their own temporary files elsewhere; only the program sees this one.
    let (_folder, db, photos) = folder(30);
    disk.fill();
    let call =
        |args: &[&str]| croprow().args(args).env("TMPDIR", &disk.0).env("SQLITE_TMPDIR", &disk.0).output().unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    let models = ["--detector", "tests/data/models/yolo-v8-tiny", "--embedder", "tests/data/models/tiny-tokens"];
    expect(&call(&[&["run", &db, "--device", "cpu"][..], &models].concat()), 0);
    expect(&call(&["select", &db, "--box-threshold", "0.5"]), 0);
    expect(&call(&["verify", &db]), 0);
    expect(&call(&["status", &db]), 0);
}

#[test]
fn a_database_that_can_only_be_read_is_read_and_not_worked_on() {
    with_disk("read_only_disk");
}

#[test]
#[ignore = "a scenario of the test above"]
fn read_only_disk() {
    let Some(disk) = Disk::new("20m") else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let finished = elsewhere.path().join("finished.db");
    database(&finished, &pictures(elsewhere.path(), 20));
    run(&finished, &Setup::default()).unwrap();
    fs::copy(&finished, disk.0.join("closed.db")).unwrap();
    // As a crash leaves it: the last rows are in the log only.
    let writer = Connection::open(&finished).unwrap();
    writer.execute("INSERT INTO images (path) VALUES ('/in-the-log.jpg')", []).unwrap();
    for (name, with_memory) in [("log.db", true), ("lone-log.db", false)] {
        for suffix in ["", "-wal", "-shm"] {
            if suffix != "-shm" || with_memory {
                fs::copy(format!("{}{suffix}", finished.display()), disk.0.join(format!("{name}{suffix}"))).unwrap();
            }
        }
    }
    drop(writer);
    disk.again("ro");
    let path = |name: &str| disk.0.join(name).to_str().unwrap().to_owned();
    let closed = path("closed.db");
    let said = expect(&call(&["status", &closed]), 0);
    assert!(said.contains("20 images"), "{said}");
    assert!(expect(&call(&["verify", &closed]), 0).contains("sound; 20 images"));
    for verb in [&["run"][..], &["retry"], &["select"], &["add", elsewhere.path().to_str().unwrap()]] {
        let said = expect(&call(&[&[verb[0], &closed][..], &verb[1..]].concat()), 1);
        assert!(said.contains("cannot be written") && said.contains("(tmpfs)"), "{verb:?}: {said}");
    }
    let said = expect(&call(&["status", &path("log.db")]), 0);
    assert!(said.contains("21 images"), "{said}");
    let said = expect(&call(&["status", &path("lone-log.db")]), 1);
    assert!(said.contains("lone-log.db-wal") && said.contains("copy both"), "{said}");
    let new = expect(&call(&["add", &path("new.db"), elsewhere.path().to_str().unwrap()]), 1);
    assert!(new.contains("new.db"), "{new}");
}

/// The program under `ulimit -f`, in KiB.
fn limited(kib: u32, args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_croprow");
    let mut command = Command::new("bash");
    command.args(["-c", &format!("ulimit -f {kib}; exec \"$0\" \"$@\""), program]).args(args);
    command.current_dir(crate::support::root()).env_remove("ORT_DYLIB_PATH").env_remove("RUST_LOG");
    command.output().unwrap()
}

#[test]
fn a_limit_on_the_size_of_files_ends_the_run_like_a_full_disk() {
    let (folder, db, photos) = folder(0);
    let photo = Path::new(&photos).join("large.png");
    picture(7, 2400, 1800).save(&photo).unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    let crops = folder.path().join("crops");
    let crops_text = crops.to_str().unwrap();
    let embedder = "tests/data/models/tiny-tokens";
    let args = ["run", &db, "--embedder", embedder, "--device", "cpu", "--crops", crops_text];
    // The crop is the whole picture and larger than that; the database is smaller.
    let said = expect(&limited(700, &args), 3);
    assert!(said.contains("cannot write") && said.contains(".jpg") && said.contains("ulimit -f"), "{said}");
    assert_eq!(unfinished(&crops), 0);
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM failures"), 0);
    let said = expect(&call(&["run", &db]), 0);
    assert!(said.contains("1 done"), "{said}");
    expect(&call(&["verify", &db]), 0);
}

#[test]
fn a_log_that_may_not_grow_ends_the_run_and_the_next_one_goes_on() {
    let (folder, db, photos) = folder(40);
    expect(&call(&["add", &db, &photos]), 0);
    let expected = folder.path().join("undisturbed.db");
    fs::copy(&db, &expected).unwrap();
    let undisturbed = expected.to_str().unwrap();
    let models = ["--detector", "tests/data/models/yolo-v8-tiny", "--embedder", "tests/data/models/tiny-tokens"];
    let args = |db| [&["run", db, "--device", "cpu", "--batch", "1"][..], &models].concat();
    expect(&call(&args(undisturbed)), 0);
    let said = expect(&limited(160, &args(&db)), 3);
    assert!(said.contains("photos.db: disk I/O error") && said.contains("free of"), "{said}");
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM failures"), 0);
    assert_sound(Path::new(&db));
    expect(&call(&["run", &db]), 0);
    assert!(dump(Path::new(&db)) == dump(&expected));
}
