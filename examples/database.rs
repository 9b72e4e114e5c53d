//! Everything of croprow but the models: rows of one tiny picture through the whole pipeline, with models that answer at once.
//! Prints one JSON line.
//!
//!     cargo run --release --example database -- --images 1000000 --dir FOLDER

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use croprow::db::Db;
use croprow::pipeline::measure::{cpu_time, resident_bytes};
use croprow::row::NewRow;
use support::fake::{Behaviour, Setup, run};
use support::picture;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|a| a != name).nth(1)
}

fn main() {
    let images: u64 = argument("--images").unwrap_or("100000".into()).parse().unwrap();
    let folder = PathBuf::from(argument("--dir").expect("--dir FOLDER"));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tiny.bmp");
    picture(1, 8, 8).save(&file).unwrap();
    let path = folder.join("rows.db");
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(folder.join(format!("rows.db{suffix}")));
    }
    let mut db = Db::open_or_create(&path).unwrap();
    let (added, _) = db.add(|sink| {
        (0..images).try_for_each(|i| {
            sink(NewRow { path: file.clone(), key: Some(i.to_string()), prompt: None, tag: None, stamp: None })
        })
    });
    added.unwrap();
    drop(db);
    let mut setup =
        Setup { detector: None, behaviour: Behaviour { dim: Some(384), ..Behaviour::default() }, ..Setup::default() };
    setup.config.memory_bytes = 512 << 20;
    setup.config.batch = croprow::config::Batch::Fixed(64);
    setup.config.threads = std::thread::available_parallelism().map_or(2, usize::from);
    let (began, cpu) = (Instant::now(), cpu_time());
    let sampled = std::thread::spawn(move || {
        let mut seen = Vec::new();
        while seen.len() < 100_000 {
            std::thread::sleep(Duration::from_millis(200));
            seen.push(resident_bytes());
            if DONE.load(std::sync::atomic::Ordering::SeqCst) {
                break;
            }
        }
        seen
    });
    let summary = run(&path, &setup).unwrap();
    DONE.store(true, std::sync::atomic::Ordering::SeqCst);
    let (seconds, cpu_seconds) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    assert_eq!(summary.done, images);
    let seen = sampled.join().unwrap();
    let at = |part: usize| seen[(seen.len() * part / 10).min(seen.len() - 1)];
    println!(
        r#"{{"images": {images}, "seconds": {seconds:.3}, "cpu_seconds": {cpu_seconds:.3}, "rss_at_a_fifth_bytes": {}, "rss_at_the_end_bytes": {}}}"#,
        at(2),
        at(9)
    );
}

static DONE: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
