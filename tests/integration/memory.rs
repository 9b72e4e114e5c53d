//! Memory of the program itself, as the system counts it, and what it does when there is not enough.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress};

use crate::cli::{EMBEDDER, call, croprow, expect};
use crate::support::dump::{assert_sound, number};
use crate::support::{picture, root};

/// Beyond `--memory`: crops that wait, buffers of the runtime, what the allocator has not given back yet.
const SLACK_BYTES: u64 = 150 << 20;

/// `count` JPEGs of 12 megapixels; the file is the same, the names are not.
fn large_photos(folder: &Path, count: usize) {
    let (width, height) = (4000, 3000);
    let pixels = picture(7, width, height);
    let jpeg =
        compress(pixels.as_raw(), width as usize, height as usize, PixelFormat::Rgb, 85, Subsampling::S420).unwrap();
    fs::create_dir_all(folder).unwrap();
    for i in 0..count {
        fs::write(folder.join(format!("{i:03}.jpg")), &jpeg).unwrap();
    }
}

/// Runs the program to its end and returns the most memory that was resident, and what it said.
fn peak_bytes(args: &[&str]) -> (u64, String) {
    let mut child = croprow().args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let ended = loop {
        // The high-water mark only grows, so the last look before the end is near it.
        if let Some(line) =
            fs::read_to_string(&status).unwrap_or_default().lines().find_map(|l| l.strip_prefix("VmHWM:"))
        {
            peak = line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10;
        }
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert!(ended.success(), "{said}");
    (peak, said)
}

#[test]
fn memory_stays_within_the_budget_however_many_large_photos_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, photos: usize, memory: &str| {
        let (db, pictures) = (folder.path().join(format!("{name}.db")), folder.path().join(name));
        let (db, pictures) = (db.to_str().unwrap(), pictures.to_str().unwrap());
        large_photos(Path::new(pictures), photos);
        expect(&call(&["add", db, pictures]), 0);
        let exact = ["--decode", "exact", "--threads", "8", "--device", "cpu"];
        peak_bytes(&[&["run", db, "--embedder", EMBEDDER, "--memory", memory, "--batch", "4"][..], &exact].concat())
    };
    // Each photo needs about 72 MiB: one of them is the baseline, and 256 MiB hold three.
    let (baseline, _) = run("one", 1, "256MiB");
    let (peak, said) = run("many", 24, "256MiB");
    assert!(peak <= baseline + (256 << 20) + SLACK_BYTES, "{} MiB over {} MiB: {said}", peak >> 20, baseline >> 20);
    assert!(!said.contains("alone"), "{said}");
    // Eight threads would hold eight of them, were it not for the budget.
    assert!(peak - baseline < 6 * (72 << 20), "{} MiB over {} MiB", peak >> 20, baseline >> 20);
}

#[test]
fn an_image_larger_than_the_budget_is_worked_on_alone_and_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let (db, pictures) = (folder.path().join("photos.db"), folder.path().join("photos"));
    large_photos(&pictures, 3);
    picture(1, 64, 48).save(pictures.join("small.png")).unwrap();
    let db = db.to_str().unwrap();
    expect(&call(&["add", db, pictures.to_str().unwrap()]), 0);
    let args = ["run", db, "--embedder", EMBEDDER, "--device", "cpu", "--memory", "16MiB", "--decode", "exact"];
    let said = expect(&call(&args), 0);
    assert_eq!(said.matches("it is worked on alone").count(), 3, "{said}");
    assert!(said.contains("000.jpg: needs"), "{said}");
    assert_eq!(number(Path::new(db), "SELECT count(*) FROM images WHERE embed_state = 'done'"), 4);
}

/// The system refuses memory to the whole process; only large requests, which are the runtime's, do not fit.
#[test]
fn a_process_without_memory_for_its_batch_takes_a_smaller_one_and_remembers_it() {
    let folder = tempfile::tempdir().unwrap();
    let (db, pictures) = (folder.path().join("photos.db"), folder.path().join("photos"));
    fs::create_dir(&pictures).unwrap();
    // One batch, shared by two sessions: whatever is decoded is decoded before memory is short, so that nothing but the runtime asks for it then.
    for i in 0..32 {
        picture(i, 200, 150).save(pictures.join(format!("{i}.png"))).unwrap();
    }
    let db = db.to_str().unwrap();
    expect(&call(&["add", db, pictures.to_str().unwrap()]), 0);
    let limited = |kib: u64, args: &str| {
        let program = env!("CARGO_BIN_EXE_croprow");
        let mut shell = Command::new("sh");
        shell.current_dir(root()).arg("-c").arg(format!("ulimit -d {kib} && exec {program} {args}"));
        shell.output().unwrap()
    };
    let detector = root().join(".demo/models/yolov3-tiny");
    assert!(detector.exists(), "the trained models are missing: run scripts/test.sh, it fetches them");
    let args =
        format!("-v run {db} --detector {} --device cpu --threads 2 --memory 256MiB --batch 32", detector.display());
    let said = expect(&limited(LIMIT_KIB, &args), 0);
    assert!(said.contains("no memory for a batch of ") && said.contains("trying halves"), "{said}");
    assert_eq!(number(Path::new(db), "SELECT count(*) FROM images WHERE detect_state = 'done'"), 32);
    let learnt = number(Path::new(db), "SELECT images FROM batch_sizes WHERE shape = '416x416'");
    assert!((1..32).contains(&learnt), "{learnt}");
    assert_sound(Path::new(db));
}

/// Writable memory of the process: enough for the model and a few images, not for thirty-two.
const LIMIT_KIB: u64 = 700 << 10;
