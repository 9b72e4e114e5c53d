//! What the database costs a run: `page` is claiming, `commit` is storing finished images. The database is a file on
//! a real disk, opened as a run opens it; a vector has 384 numbers.
//!
//! `CROPROW_SWEEP_ROWS=1000000 cargo bench --bench db` goes once through so many rows instead, claiming and storing in
//! turn, and tells rows per second and the greatest size of the write-ahead log.

#![allow(missing_docs, clippy::unwrap_used, reason = "a measurement, no part of the product")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use croprow::db::Db;
use croprow::db::claim::Tokens;
use croprow::db::due::InForce;
use croprow::db::recipes::StoredRecipe;
use croprow::db::runs::NewRun;
use croprow::geometry::{BoxPx, Size};
use croprow::row::{Claim, FileStamp, Finished, ImageFacts, NewRow, Outcome, Region, Stage};

/// Numbers of a vector.
const DIM: usize = 384;

/// Outcomes in one transaction, as in `pipeline/commit.rs`.
const COMMIT_ROWS: usize = 256;

/// Rows of a database that the groups work through; then a fresh one is made, untimed.
const FILL_ROWS: usize = 60_000;

struct Bench {
    _folder: tempfile::TempDir,
    path: PathBuf,
    db: Db,
    tokens: Tokens,
    in_force: InForce,
    after: i64,
}

impl Bench {
    fn new(rows: usize) -> Self {
        // Not the system's temporary folder: that may be memory.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("bench.db");
        let mut db = Db::open_or_create(&path).unwrap();
        let row = |i| NewRow {
            path: PathBuf::from(format!("/photos/some/folder/of/some/year/{i:09}.jpg")),
            key: None,
            prompt: None,
            tag: None,
            stamp: None,
        };
        db.add(|sink| (0..rows).try_for_each(|i| sink(row(i)))).0.unwrap();
        drop(db);
        let mut db = Db::open(&path).unwrap();
        let recipe = |name| Some(StoredRecipe { body: name, model_digest: name, model_path: Path::new(name) });
        let run = NewRun {
            device: "cpu",
            device_note: None,
            runtime: "none",
            settings: "{}",
            detect: recipe("d"),
            embed: recipe("e"),
        };
        let (run, in_force) = db.begin_run(&run).unwrap();
        Self { _folder: folder, path, db, tokens: Tokens::new(run), in_force, after: 0 }
    }

    fn claim(&mut self, rows: usize) -> Vec<Claim> {
        let page = self.db.claim_page(&mut self.tokens, Stage::Detect, self.after, rows).unwrap();
        self.after = page.last().map_or(self.after, |c| c.id.0);
        page
    }

    fn commit(&mut self, batch: &[Finished]) {
        let committed = self.db.commit_batch(batch, self.in_force).unwrap();
        assert_eq!(committed.done, batch.len() as u64);
    }

    fn wal_bytes(&self) -> u64 {
        let mut name = self.path.clone().into_os_string();
        name.push("-wal");
        std::fs::metadata(PathBuf::from(name)).map_or(0, |m| m.len())
    }
}

fn finished(claim: &Claim) -> Finished {
    let size = Size::new(640, 480);
    let stamp = FileStamp { size_bytes: 100_000 + claim.id.0, mtime_ns: 1_700_000_000_000_000_000 + claim.id.0 };
    let facts = ImageFacts {
        stamp,
        format: "jpeg",
        stored: size,
        upright: size,
        orientation: Default::default(),
        orientation_source: "none",
        components: 3,
        scale: croprow::geometry::Scale::FULL,
        truncated: false,
    };
    let region = Region {
        bbox: BoxPx { x0: 10.5, y0: 20.25, x1: 300.0 + (claim.id.0 % 97) as f32, y1: 400.75 },
        label: Some("cat".into()),
        score: Some(0.75),
        crop: None,
        vector: Some((0..DIM).map(|i| (i as f32 + claim.id.0 as f32).sin()).collect()),
        embedded: false,
    };
    Finished {
        id: claim.id,
        token: claim.token,
        stage: claim.stage,
        facts: Some(facts),
        stamp: Some(stamp),
        lost: None,
        outcome: Outcome::Done { raw: None, regions: vec![region], embed: Some(Ok(())) },
    }
}

fn commit(c: &mut Criterion) {
    let mut group = c.benchmark_group("commit");
    group.sampling_mode(SamplingMode::Flat).sample_size(20).throughput(Throughput::Elements(COMMIT_ROWS as u64));
    let mut bench = Bench::new(FILL_ROWS);
    group.bench_function(BenchmarkId::from_parameter(COMMIT_ROWS), |b| {
        b.iter_custom(|times| {
            let mut took = Duration::ZERO;
            for _ in 0..times {
                let mut page = bench.claim(COMMIT_ROWS);
                if page.len() < COMMIT_ROWS {
                    bench = Bench::new(FILL_ROWS);
                    page = bench.claim(COMMIT_ROWS);
                }
                let batch: Vec<Finished> = page.iter().map(finished).collect();
                let began = Instant::now();
                bench.commit(&batch);
                took += began.elapsed();
            }
            took
        });
    });
    group.finish();
}

fn page(c: &mut Criterion) {
    let mut group = c.benchmark_group("page");
    group.sampling_mode(SamplingMode::Flat).sample_size(20);
    for rows in [64, 256, 1024] {
        let mut bench = Bench::new(FILL_ROWS);
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_with_input(BenchmarkId::from_parameter(rows), &rows, |b, &rows| {
            b.iter_custom(|times| {
                let mut took = Duration::ZERO;
                for _ in 0..times {
                    let began = Instant::now();
                    let page = bench.claim(rows);
                    took += began.elapsed();
                    if page.len() < rows {
                        bench = Bench::new(FILL_ROWS);
                    }
                }
                took
            });
        });
    }
    group.finish();
}

/// Time on a core that this thread has had, and time it was ready and waited for one that others had.
fn core_times() -> [Duration; 2] {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let mut numbers = schedstat.split_ascii_whitespace().map(|n| Duration::from_nanos(n.parse().unwrap()));
    [numbers.next().unwrap(), numbers.next().unwrap()]
}

/// How long a step took: by the clock, on a core, and waiting for a core that other programs had. The rest is the disk.
#[derive(Default)]
struct Took {
    wall: Duration,
    core: Duration,
    crowded: Duration,
}

impl Took {
    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let (cores, wall) = (core_times(), Instant::now());
        let result = work();
        self.wall += wall.elapsed();
        let now = core_times();
        self.core += now[0] - cores[0];
        self.crowded += now[1] - cores[1];
        result
    }

    fn print(&self, what: &str, rows: usize) {
        let us = |took: Duration| took.as_secs_f64() * 1e6 / rows as f64;
        let alone = self.wall - self.crowded.min(self.wall);
        println!(
            "{what:<8} {:>7.0} rows/s; us a row: {:.1} by the clock, {:.1} on a core, {:.1} while others had it",
            1e6 / us(alone),
            us(self.wall),
            us(self.core),
            us(self.crowded)
        );
    }
}

/// Once through all rows. Outcomes are made outside of the measured time.
fn sweep(rows: usize) {
    let page_rows: usize = std::env::var("CROPROW_SWEEP_PAGE").map_or(256, |v| v.parse().unwrap());
    let began = Instant::now();
    let mut bench = Bench::new(rows);
    println!("add      {:>7.0} rows/s", rows as f64 / began.elapsed().as_secs_f64());
    let (mut claims, mut commits) = (Took::default(), Took::default());
    let (mut wal_bytes, mut slowest, mut done) = (0, Duration::ZERO, 0);
    let mut waiting: Vec<Finished> = Vec::new();
    let mut tenth = (0, Duration::ZERO);
    loop {
        let page = claims.time(|| bench.claim(page_rows));
        waiting.extend(page.iter().map(finished));
        while waiting.len() >= COMMIT_ROWS || (page.is_empty() && !waiting.is_empty()) {
            let rest = waiting.split_off(waiting.len().min(COMMIT_ROWS));
            let before = commits.wall;
            commits.time(|| bench.commit(&waiting));
            slowest = slowest.max(commits.wall - before);
            done += waiting.len();
            waiting = rest;
        }
        wal_bytes = wal_bytes.max(bench.wal_bytes());
        if done - tenth.0 >= rows / 10 {
            let per_s = (done - tenth.0) as f64 / (commits.wall - tenth.1).as_secs_f64();
            println!("  {done:>9} rows: commit {per_s:>7.0} rows/s");
            tenth = (done, commits.wall);
        }
        if page.is_empty() {
            break;
        }
    }
    assert_eq!(done, rows);
    claims.print("claim", rows);
    commits.print("commit", rows);
    let both = Took {
        wall: claims.wall + commits.wall,
        core: claims.core + commits.core,
        crowded: claims.crowded + commits.crowded,
    };
    both.print("together", rows);
    println!(
        "slowest commit {:.1} ms, log at most {:.1} MiB",
        slowest.as_secs_f64() * 1e3,
        wal_bytes as f64 / 1048576.0
    );
}

fn main() {
    if let Ok(rows) = std::env::var("CROPROW_SWEEP_ROWS") {
        return sweep(rows.parse().unwrap());
    }
    let mut criterion = Criterion::default().configure_from_args();
    commit(&mut criterion);
    page(&mut criterion);
    criterion.final_summary();
}
