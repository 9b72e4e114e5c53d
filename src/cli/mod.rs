//! The command line. The library never sees clap.

mod add;
mod apart;
mod doctor;
mod ending;
mod memory;
mod open_files;
mod parse;
mod plan;
mod recipes;
mod rescue;
mod retry;
mod room;
mod run;
mod run_args;
mod select;
mod self_tests;
mod settings;
mod signals;
mod status;
mod talk;
mod ticker;
mod until;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Parser, Subcommand};
use croprow::db::Opening;
use croprow::db::refuse::explained;
use croprow::error::Error;
use signal_hook::consts::SIGXFSZ;

pub(crate) use talk::{clear_screen, hush, print, print_json, say};

/// Works through an SQLite file of images: finds objects, crops them, embeds the crops, and never loses a
/// finished row.
#[derive(Parser)]
#[command(name = "croprow", version, max_term_width = 100, after_help = HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    /// Say more; twice for everything. RUST_LOG sets it per module.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Say errors only, and draw no progress.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Work on a database on NFS, SMB, 9p, FUSE and the like, where databases are damaged
    #[arg(long, global = true)]
    allow_network_filesystem: bool,
}

const HELP: &str = "A first run:
  croprow add photos.db ~/Pictures
  croprow run photos.db --detector yolo.onnx --embedder dinov2/
  croprow status photos.db

Exit codes: 0 done, 1 not started (command line, configuration, start-up), 2 done but failed rows remain,
3 stopped by a fault of the system, 75 start me again, 130/143 stopped by a signal.";

#[derive(Subcommand)]
enum Verb {
    /// Put images in: folders, files, lists, JSON, CSV, another SQLite. The same twice is one row.
    Add(add::AddArgs),
    /// Work until nothing is pending. Remembers its settings: a restart needs no flags.
    Run(run_args::RunArgs),
    /// Progress, rate, time left, failures.
    Status(status::StatusArgs),
    /// Bring failed and quarantined rows back to pending.
    Retry(retry::RetryArgs),
    /// Apply other thresholds or another selection rule to the stored candidates: no model is run.
    Select(select::SelectArgs),
    /// Check what is stored: counters, rows, vectors, crops; and mend it.
    Verify(verify::VerifyArgs),
    /// Runtime library, device and models: what is there, what is missing, how to mend it.
    Doctor(doctor::DoctorArgs),
}

impl Verb {
    /// The database that the verb is about.
    fn database(&self) -> Option<&Path> {
        match self {
            Self::Add(args) => Some(&args.db),
            Self::Run(args) => Some(&args.db),
            Self::Status(args) => Some(&args.db),
            Self::Retry(args) => Some(&args.db),
            Self::Select(args) => Some(&args.db),
            Self::Verify(args) => Some(&args.db),
            Self::Doctor(_) => None,
        }
    }
}

/// Runs the verb and says what went wrong. Returns the process's exit code.
pub(crate) fn main() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            if error.use_stderr() {
                // It quotes the command line, and a shell puts names of files there.
                talk::complain(error.render().to_string().trim_end());
                return 1;
            }
            let _ = error.print();
            return 0;
        }
    };
    talk::start(cli.verbose, cli.quiet);
    ALLOW_NETWORK.store(cli.allow_network_filesystem, Ordering::Relaxed);
    outlive_file_size_limits();
    let database = cli.verb.database().map(ToOwned::to_owned);
    open_files::raise_limit();
    let result = match cli.verb {
        Verb::Add(args) => signals::listen().and_then(|()| args.run()),
        Verb::Run(args) => signals::listen().and_then(|()| run::run(args, cli.quiet)),
        Verb::Status(args) => status::run(&args),
        Verb::Retry(args) => retry::run(&args),
        Verb::Select(args) => select::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Doctor(args) => doctor::run(&args),
    };
    code_of(database.as_deref(), result)
}

/// Says the last words of a process that works on `database`, and finds its exit code.
fn code_of(database: Option<&Path>, result: Result<u8, Error>) -> u8 {
    talk::end();
    result.unwrap_or_else(|error| {
        let error = match database {
            Some(path) => explained(path, error),
            None => error,
        };
        talk::complain(&format!("croprow: {}", with_sources(&error)));
        if let Some(hint) = error.hint() {
            talk::complain(&format!("         {hint}"));
        }
        error.exit_code()
    })
}

/// The error and its sources, without saying the same twice.
fn with_sources(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A file that grows beyond `ulimit -f` is an error of that file and not the end of the process.
fn outlive_file_size_limits() {
    // Where it cannot be set the system's own way is kept.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// `--allow-network-filesystem`.
static ALLOW_NETWORK: AtomicBool = AtomicBool::new(false);

/// What the user insists on when a database is opened for writing.
pub(crate) fn opening() -> Opening {
    Opening { allow_network: ALLOW_NETWORK.load(Ordering::Relaxed) }
}
