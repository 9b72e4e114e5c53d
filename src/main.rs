//! The command line: parse, log, verb, error chain, exit code.

mod cli;

use std::io::Write;

fn main() {
    let code = cli::main();
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // Not `exit`: the teardown of a GPU runtime has been seen to abort processes whose work was done. All
    // that must be on the disk is there by now.
    signal_hook::low_level::exit(i32::from(code));
}
