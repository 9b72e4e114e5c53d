//! The program itself as a process, with real ONNX files: exit codes, what it says, what it leaves.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::support::dump::{assert_sound, dump, number};
use crate::support::{picture, pictures, root};

const DETECTOR: &str = "tests/data/models/yolo-v8-tiny";
pub(crate) const EMBEDDER: &str = "tests/data/models/tiny-tokens";

pub(crate) fn croprow() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_croprow"));
    // Models are named relative to the project; the database keeps them absolute.
    command.current_dir(root()).env_remove("ORT_DYLIB_PATH").env_remove("RUST_LOG");
    command
}

pub(crate) fn call(args: &[&str]) -> Output {
    croprow().args(args).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {}", talk(output)))
}

fn talk(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
pub(crate) fn expect(output: &Output, exit_code: i32) -> String {
    let said = talk(output);
    assert_eq!(code(output), exit_code, "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

/// A folder with `count` pictures below `photos`, and a database name.
pub(crate) fn folder(count: u32) -> (tempfile::TempDir, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let photos = folder.path().join("photos");
    fs::create_dir(&photos).unwrap();
    pictures(&photos, count);
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let db = text(folder.path().join("photos.db"));
    (folder, db, text(photos))
}

pub(crate) fn run(db: &str, more: &[&str]) -> Output {
    let mut args = vec!["run", db, "--detector", DETECTOR, "--embedder", EMBEDDER, "--device", "cpu"];
    args.extend(more);
    call(&args)
}

#[test]
fn add_run_status_retry_from_nothing_to_done() {
    let (_folder, db, photos) = folder(10);
    let said = expect(&call(&["add", &db, &photos]), 0);
    assert!(said.contains("10 new"), "{said}");
    assert!(expect(&call(&["add", &db, &photos]), 0).contains("0 new, 0 changed and pending again, 10 already there"));
    let said = expect(&run(&db, &[]), 0);
    assert!(said.contains("10 done, 0 failed"), "{said}");
    assert!(said.contains("on cpu"), "{said}");
    let said = expect(&call(&["status", &db]), 0);
    assert!(said.contains("10 images") && said.contains("run 1: complete; 10 done"), "{said}");
    let json = expect(&call(&["status", &db, "--json"]), 0);
    let json: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    assert_eq!((json["images"].as_i64(), json["stages"][1]["done"].as_i64()), (Some(10), Some(10)));
    assert_eq!(json["last_run"]["device"], "cpu");
    assert!(expect(&call(&["retry", &db]), 0).contains("0 rows"));
    assert_sound(Path::new(&db));
}

#[test]
fn a_restart_needs_no_flags_and_nothing_pending_loads_no_model() {
    let (_folder, db, photos) = folder(4);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &["--box-threshold", "0.2"]), 0);
    // A runtime library that cannot be loaded would end the start, were it loaded.
    let idle = croprow().args(["run", &db]).env("ORT_DYLIB_PATH", "/nonexistent/lib.so").output().unwrap();
    assert!(expect(&idle, 0).contains("nothing is pending"));
    picture(77, 50, 50).save(Path::new(&photos).join("new.png")).unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    let said = expect(&call(&["run", &db]), 0);
    assert!(said.contains("1 done"), "{said}");
    assert_eq!(number(Path::new(&db), "SELECT count(DISTINCT settings) FROM runs"), 1);
}

#[test]
fn settings_given_while_nothing_is_pending_are_remembered() {
    let (_folder, db, photos) = folder(2);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &[]), 0);
    expect(&call(&["run", &db, "--keep", "best", "--batch", "2", "--stale", "keep"]), 0);
    picture(78, 50, 50).save(Path::new(&photos).join("new.png")).unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    expect(&call(&["run", &db]), 0);
    let last = "SELECT settings LIKE '%\"batch_size\":{\"fixed\":2}%' AND settings LIKE '%\"best\":1%' FROM runs ORDER BY id DESC LIMIT 1";
    assert_eq!(number(Path::new(&db), last), 1);
    assert_eq!(number(Path::new(&db), "SELECT count(*) <= 1 FROM regions WHERE image_id = 3"), 1);
}

#[test]
fn a_failed_add_makes_no_database() {
    let (folder, db, photos) = folder(1);
    expect(&call(&["add", &db, "/nonexistent/typo"]), 1);
    assert!(!Path::new(&db).exists());
    fs::write(folder.path().join("bad.json"), "[{\"path\": \"a.jpg\"}, oops").unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    expect(&call(&["add", &db, "--from", folder.path().join("bad.json").to_str().unwrap()]), 1);
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM images"), 1);
}

#[test]
fn other_settings_are_never_mixed_silently() {
    let (_folder, db, photos) = folder(6);
    expect(&call(&["add", &db, &photos]), 0);
    expect(&run(&db, &[]), 0);
    let before = dump(Path::new(&db));
    let said = expect(&call(&["run", &db, "--box-threshold", "0.7"]), 1);
    assert!(
        said.contains("6 of 6 finished rows")
            && said.contains("(6 from their stored candidates, without the model)")
            && said.contains("--stale redo")
            && said.contains("--stale keep"),
        "{said}"
    );
    assert!(said.contains("selection.box_threshold was 0.3"), "{said}");
    assert_eq!(dump(Path::new(&db)), before);
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 1, "nothing was touched");
    expect(&call(&["run", &db, "--box-threshold", "0.7", "--stale", "keep"]), 0);
    assert_eq!(dump(Path::new(&db)), before);
    let said = expect(&call(&["run", &db, "--box-threshold", "0.7", "--stale", "redo"]), 0);
    assert!(said.contains("6 images selected again") && said.contains("without a model"), "{said}");
    let said = expect(&run(&db, &["--truncated", "use", "--stale", "redo"]), 0);
    assert!(said.contains("6 done"), "{said}");
    // The question is answered now: no flags, no question.
    expect(&call(&["run", &db]), 0);
    assert_sound(Path::new(&db));
}

#[test]
fn every_kind_of_bad_file_has_its_code_and_every_good_one_is_done() {
    let (folder, db, photos) = folder(8);
    let at = |name: &str| folder.path().join(name);
    fs::write(at("empty.jpg"), b"").unwrap();
    fs::write(at("page.jpg"), b"<html><body>not found</body></html>").unwrap();
    picture(1, 300, 200).save(at("whole.jpg")).unwrap();
    let jpeg = fs::read(at("whole.jpg")).unwrap();
    fs::write(at("cut.jpg"), &jpeg[..jpeg.len() / 2]).unwrap();
    fs::write(at("bomb.png"), bomb()).unwrap();
    fs::create_dir(at("x.jpg")).unwrap();
    picture(2, 60, 40).save_with_format(at("png-named.jpg"), image::ImageFormat::Png).unwrap();
    picture(3, 60, 40).save(at("secret.jpg")).unwrap();
    fs::set_permissions(at("secret.jpg"), fs::Permissions::from_mode(0o000)).unwrap();
    let names = [
        "empty.jpg",
        "page.jpg",
        "cut.jpg",
        "bomb.png",
        "x.jpg",
        "png-named.jpg",
        "secret.jpg",
        "whole.jpg",
        "gone.jpg",
    ];
    let mut list: Vec<String> = names.iter().map(|n| at(n).to_str().unwrap().to_owned()).collect();
    list.extend((0..8).map(|n| format!("{photos}/{n:05}.png")));
    fs::write(at("list.txt"), list.join("\n")).unwrap();
    expect(&call(&["add", &db, "--from", at("list.txt").to_str().unwrap()]), 0);

    let output = as_nobody(folder.path(), &db);
    let said = expect(&output, 2);
    assert!(said.contains("10 done, 7 failed"), "{said}");
    for (name, wanted) in [
        ("empty.jpg", "empty"),
        ("page.jpg", "not_an_image"),
        ("cut.jpg", "truncated"),
        ("bomb.png", "too_large"),
        ("x.jpg", "not_regular"),
        ("secret.jpg", "permission"),
        ("gone.jpg", "missing"),
    ] {
        let sql = format!(
            "SELECT count(*) FROM failures WHERE path LIKE '%/{name}' AND code = '{wanted}' AND message LIKE '%{name}%'"
        );
        assert_eq!(number(Path::new(&db), &sql), 1, "{name} should be {wanted}:\n{}", talk(&call(&["status", &db])));
    }
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM images WHERE embed_state = 'done'"), 10);
    assert_sound(Path::new(&db));
    // Failed rows remain: the exit code says so though nothing is pending.
    expect(&call(&["run", &db]), 2);
    fs::set_permissions(at("secret.jpg"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(expect(&call(&["retry", &db, "--code", "permission"]), 0).contains("1 rows"));
    assert!(expect(&call(&["run", &db]), 2).contains("1 done"));
}

/// Runs as an unprivileged user where this is root, for whom no file is unreadable.
fn as_nobody(folder: &Path, db: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_croprow"));
    let mut args = vec!["run", db, "--device", "cpu"];
    let (mut detector, mut embedder, mut runtime) = (root().join(DETECTOR), root().join(EMBEDDER), runtime());
    if rustix::process::geteuid().is_root() {
        // The checkout itself may lie where nobody can read.
        let here = folder.join("for-nobody");
        copy_folder(&detector, &here.join("detector"));
        copy_folder(&embedder, &here.join("embedder"));
        fs::copy(&runtime, here.join("libonnxruntime.so")).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_croprow"), here.join("croprow")).unwrap();
        (detector, embedder, runtime) = (here.join("detector"), here.join("embedder"), here.join("libonnxruntime.so"));
        for entry in [folder, Path::new(db)] {
            rustix::fs::chown(entry, Some(rustix::fs::Uid::from_raw(65534)), None).unwrap();
        }
        command = Command::new(here.join("croprow"));
        command.uid(65534).gid(65534);
    }
    let models = [detector, embedder, runtime].map(|p| p.to_str().unwrap().to_owned());
    args.extend(["--detector", &models[0], "--embedder", &models[1], "--runtime", &models[2]]);
    command.current_dir("/").args(args).output().unwrap()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

pub(crate) fn runtime() -> PathBuf {
    fs::canonicalize(root().join(".demo/runtime/libonnxruntime.so"))
        .expect("run scripts/test.sh: it fetches the runtime")
}

/// A PNG of 74 bytes that claims 100000 x 100000 pixels.
fn bomb() -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(kind);
        bytes.extend(data);
        bytes.extend(crc32(&[kind.as_slice(), data].concat()).to_be_bytes());
    };
    let mut header = Vec::new();
    header.extend(100_000_u32.to_be_bytes());
    header.extend(100_000_u32.to_be_bytes());
    header.extend([8, 2, 0, 0, 0]);
    chunk(b"IHDR", &header);
    chunk(b"IDAT", &[0x78, 0x9c, 0x63, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    chunk(b"IEND", &[]);
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xedb8_8320 } else { c >> 1 })
    };
    !bytes.iter().fold(!0, step)
}

#[test]
fn a_start_that_fails_says_why_and_touches_nothing() {
    let (folder, db, photos) = folder(2);
    expect(&call(&["add", &db, &photos]), 0);
    let broken = folder.path().join("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("model.onnx"), b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        .unwrap();
    let broken = broken.to_str().unwrap().to_owned();
    for (args, reason) in [
        (vec!["run", &db], "nothing to run"),
        (vec!["run", &db, "--detector", "/nonexistent/model"], "/nonexistent/model"),
        (vec!["run", &db, "--detector", &broken], "git lfs pull"),
        (
            vec!["run", &db, "--detector", DETECTOR, "--runtime", "/nonexistent/libonnxruntime.so"],
            "scripts/fetch-runtime.sh",
        ),
        (vec!["run", &db, "--detector", DETECTOR, "--device", "cuda"], "CUDA"),
        (vec!["run", &db, "--detector", DETECTOR, "--device", "gpu"], "auto, cpu, cuda"),
        (vec!["run", "/nonexistent/photos.db"], "croprow add"),
        (vec!["status", "/nonexistent/photos.db"], "croprow add"),
        (vec!["add", &db], "nothing to add"),
        (vec!["run", &db, "--detector", DETECTOR, "--batch", "100000000"], "--batch 100000000: give 1 to 4096"),
        (vec!["frobnicate"], "unrecognized subcommand"),
    ] {
        let began = Instant::now();
        let said = expect(&call(&args), 1);
        assert!(said.contains(reason), "{args:?}: {said}");
        assert!(began.elapsed() < Duration::from_secs(5), "{args:?} took {:?}", began.elapsed());
    }
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 0);
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM recipes"), 0);
}

#[test]
fn the_runtime_library_is_never_taken_from_the_current_folder() {
    let (folder, db, photos) = folder(1);
    expect(&call(&["add", &db, &photos]), 0);
    let here = folder.path().join("here");
    fs::create_dir(&here).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_croprow"), here.join("croprow")).unwrap();
    let trap = folder.path().join("trap");
    fs::create_dir(&trap).unwrap();
    fs::copy(runtime(), trap.join("libonnxruntime.so")).unwrap();
    let detector = root().join(DETECTOR);
    let output = Command::new(here.join("croprow"))
        .args(["run", &db, "--device", "cpu", "--detector", detector.to_str().unwrap()])
        .current_dir(&trap)
        .env_remove("ORT_DYLIB_PATH")
        .env("LD_LIBRARY_PATH", &trap)
        .output()
        .unwrap();
    assert!(expect(&output, 1).contains("libonnxruntime.so"));
}

#[test]
fn the_auto_device_says_in_one_line_why_it_is_the_cpu() {
    if Path::new("/dev/nvidia0").exists() {
        return;
    }
    let (_folder, db, photos) = folder(2);
    expect(&call(&["add", &db, &photos]), 0);
    let said = expect(&call(&["run", &db, "--detector", DETECTOR]), 0);
    let lines: Vec<&str> = said.lines().filter(|l| l.to_lowercase().contains("cuda") || l.contains("GPU")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert_eq!(number(Path::new(&db), "SELECT device = 'cpu' AND device_note IS NOT NULL FROM runs"), 1);
}

#[test]
fn a_signal_stops_softly_with_its_code_and_the_next_run_finishes() {
    for (signal, wanted) in [("-INT", 130), ("-TERM", 143)] {
        let (_folder, db, photos) = folder(600);
        expect(&call(&["add", &db, &photos]), 0);
        let args = ["run", &db, "--detector", DETECTOR, "--embedder", EMBEDDER, "--device", "cpu", "--batch", "1"];
        let child = croprow().args(args).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let began = Instant::now();
        while number(Path::new(&db), "SELECT count(*) FROM images WHERE detect_state = 'done'") == 0 {
            assert!(began.elapsed() < Duration::from_secs(60), "it does nothing");
            std::thread::sleep(Duration::from_millis(2));
        }
        let asked = Instant::now();
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(asked.elapsed() < Duration::from_secs(10), "took {:?}", asked.elapsed());
        let said = expect(&output, wanted);
        assert!(said.contains("stopped"), "{said}");
        assert_eq!(number(Path::new(&db), "SELECT count(*) FROM images WHERE token IS NOT NULL"), 0, "{said}");
        assert_sound(Path::new(&db));
        expect(&call(&["run", &db]), 0);
        assert_eq!(number(Path::new(&db), "SELECT count(*) FROM images WHERE embed_state = 'done'"), 600);
    }
}

#[test]
fn crops_never_leave_their_folder() {
    let (folder, db, photos) = folder(3);
    expect(&call(&["add", &db, &photos]), 0);
    let elsewhere = folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let link = folder.path().join("crops");
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    let said = expect(&run(&db, &["--crops", link.to_str().unwrap()]), 1);
    assert!(said.contains("symbolic link"), "{said}");
    let crops = folder.path().join("real/crops");
    expect(&run(&db, &["--crops", crops.to_str().unwrap()]), 0);
    let regions = number(Path::new(&db), "SELECT count(*) FROM regions");
    assert!(regions > 0);
    assert_eq!(number(Path::new(&db), "SELECT count(DISTINCT crop) FROM regions"), regions);
}

#[test]
fn a_folder_of_crops_that_is_gone_is_not_made_again() {
    let (folder, db, photos) = folder(3);
    expect(&call(&["add", &db, &photos]), 0);
    let crops = folder.path().join("disk/crops");
    expect(&run(&db, &["--crops", crops.to_str().unwrap()]), 0);
    fs::rename(folder.path().join("disk"), folder.path().join("away")).unwrap();
    picture(77, 50, 50).save(Path::new(&photos).join("new.png")).unwrap();
    expect(&call(&["add", &db, &photos]), 0);
    let said = expect(&call(&["run", &db]), 1);
    assert!(said.contains("bring its disk back") && !crops.exists(), "{said}");
    let other = folder.path().join("other");
    expect(&call(&["run", &db, "--crops", other.to_str().unwrap(), "--limit", "1"]), 0);
    fs::rename(folder.path().join("away"), folder.path().join("disk")).unwrap();
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM images WHERE embed_state = 'done'"), 4);
}
