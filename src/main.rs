//! The command line: parse, log, verb, error chain, exit code.

mod cli;

/// The C library's allocator keeps pictures of many sizes for each thread, so that resident memory grows far beyond
/// what is in use; this one gives them back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use std::io::Write;

use croprow::model::library::TELEMETRY_SWITCH;

fn main() {
    be_silent();
    leave(cli::main());
}

/// Ends the process, whatever its threads are at.
fn leave(code: u8) -> ! {
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // Not `exit`: the teardown of a GPU runtime has been seen to abort processes whose work was done. All
    // that must be on the disk is there by now.
    signal_hook::low_level::exit(i32::from(code))
}

/// Returns to the system what both allocators keep of freed memory: this program's, and the C library's, which the
/// runtime uses and where a large model leaves hundreds of megabytes.
#[expect(unsafe_code, reason = "these calls touch nothing but free memory")]
fn give_back_freed_memory() {
    unsafe {
        libmimalloc_sys::mi_collect(true);
        #[cfg(target_env = "gnu")]
        libc::malloc_trim(0);
    }
}

/// ONNX Runtime's official library reports to its maker while it is being loaded, unless the environment
/// says no.
#[expect(unsafe_code, reason = "the only thread there is; nobody reads the environment at the same time")]
fn be_silent() {
    unsafe { std::env::set_var(TELEMETRY_SWITCH, "1") };
}
