//! The command line. The library never sees clap.

mod add;
mod apart;
mod doctor;
mod memory;
mod parse;
mod recipes;
mod retry;
mod run;
mod run_args;
mod select;
mod self_tests;
mod settings;
mod signals;
mod status;
mod talk;
mod ticker;

use clap::{Parser, Subcommand};
use croprow::error::Error;

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
    /// Runtime library, device and models: what is there, what is missing, how to mend it.
    Doctor(doctor::DoctorArgs),
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
    let result = match cli.verb {
        Verb::Add(args) => args.run(),
        Verb::Run(args) => run::run(args, cli.quiet),
        Verb::Status(args) => status::run(&args),
        Verb::Retry(args) => retry::run(&args),
        Verb::Select(args) => select::run(&args),
        Verb::Doctor(args) => doctor::run(&args),
    };
    code_of(result)
}

/// Says the last words of a process, and finds its exit code.
fn code_of(result: Result<u8, Error>) -> u8 {
    talk::end();
    result.unwrap_or_else(|error| {
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
