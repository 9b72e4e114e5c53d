//! Shows how a run goes: a bar on a terminal, a line now and then elsewhere. Counts this run's work only.

use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use croprow::pipeline::progress::{Progress, Rates};
use indicatif::{ProgressBar, ProgressStyle};

use super::say;
use super::status::duration;

/// Between two looks at the counters.
const LOOK: Duration = Duration::from_millis(250);

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Shows progress until it is dropped.
pub(crate) struct Ticker {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// `images` wait for this run.
    pub(crate) fn start(progress: Arc<Progress>, images: u64, threads: usize, quiet: bool) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        let show = move || {
            if stderr().is_terminal() {
                draw_bar(&progress, images, threads, &seen);
            } else {
                print_lines(&progress, images, threads, &seen);
            }
        };
        // Without a thread there is nothing to see, and the run goes on.
        let thread = if quiet { None } else { std::thread::Builder::new().name("ticker".into()).spawn(show).ok() };
        Self { over, thread }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn draw_bar(progress: &Progress, images: u64, threads: usize, over: &AtomicBool) {
    let bar = ProgressBar::new(images);
    if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    let mut rates = Rates::new(progress, threads);
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK);
        let ended = Progress::get(&progress.ended);
        bar.set_length(progress.total(images));
        bar.set_position(ended);
        bar.set_message(describe(progress, &mut rates, images));
    }
    bar.finish_and_clear();
}

fn print_lines(progress: &Progress, images: u64, threads: usize, over: &AtomicBool) {
    let mut rates = Rates::new(progress, threads);
    let mut last = Instant::now();
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK);
        if last.elapsed() >= LINE_EVERY {
            last = Instant::now();
            let ended = Progress::get(&progress.ended);
            say(&format!("{ended} of {} images, {}", progress.total(images), describe(progress, &mut rates, images)));
        }
    }
}

fn describe(progress: &Progress, rates: &mut Rates, images: u64) -> String {
    let rate = rates.sample(progress);
    let left = progress.total(images).saturating_sub(Progress::get(&progress.ended)) as f64;
    let eta = if rate.ended_per_s > 0.0 { duration(left / rate.ended_per_s) } else { "?".into() };
    let failed = match Progress::get(&progress.failed) {
        0 => String::new(),
        n => format!(", {n} failed"),
    };
    format!("{:.1} images/s, {eta} left{failed}, busiest: {}", rate.ended_per_s, rate.slowest.word())
}
