//! Finds and loads the ONNX Runtime library. Looks at fixed places only, never at the current directory
//! nor along the loader's search path, where a stranger's library could lie.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf, absolute};
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, error, fmt};

use ort::environment::{Environment, EnvironmentBuilder, GlobalThreadPoolOptions};
use ort::logging::{LogLevel, LoggerFunction};

use super::elf;
use crate::config::Device;
use crate::error::Error;
use crate::printable;

/// File name of the library.
pub const LIBRARY: &str = "libonnxruntime.so";

/// Names the library where no flag does.
pub const VARIABLE: &str = "ORT_DYLIB_PATH";

/// The runtime's own switch, from 1.29 on: where it is not `1` when the library starts, the official builds queue
/// a description of the process, its sessions and errors under `~/.cache/Microsoft` and send it to Microsoft.
/// [`Environment`] can only turn off what comes after its first report, so the executable has to set this.
pub const TELEMETRY_SWITCH: &str = "ORT_DISABLE_TELEMETRY";

/// How far above the executable a checkout with a demo may lie: `target/<profile>/deps/x` is four steps.
const CHECKOUT_STEPS: usize = 4;

/// The loaded library. One per process; clones share it.
#[derive(Clone)]
pub struct Runtime {
    pub(super) env: Environment,
    /// The library file. Absolute.
    pub path: PathBuf,
    /// Its version, such as `1.31.1`.
    pub version: String,
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("path", &self.path).field("version", &self.version).finish_non_exhaustive()
    }
}

/// ONNX Runtime allows one environment per process, ever. Kept here and never dropped: taking it down at
/// exit has aborted processes whose work was done.
static LOADED: Mutex<Option<Runtime>> = Mutex::new(None);

/// Loads the library. `flag` and `ORT_DYLIB_PATH` are decisive where given; otherwise the library lies beside
/// the executable, or in the demo's folder of a checkout. All sessions share one pool of `threads` threads,
/// which do not spin while they wait; the thread that calls a session counts as one of them.
///
/// A second call in one process gives the first one's runtime, with the first one's threads.
///
/// # Errors
/// No library, one that the loader refuses, one that is too old or something else. Never panics.
pub fn load(flag: Option<&Path>, device: Device, threads: usize) -> Result<Runtime, Error> {
    let surroundings = Surroundings {
        flag: flag.map(Path::to_path_buf),
        variable: env::var_os(VARIABLE).filter(|v| !v.is_empty()),
        executable: env::current_exe().ok(),
    };
    let path = find(&surroundings, device)?;
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    match loaded.as_ref() {
        Some(runtime) if runtime.path == path => Ok(runtime.clone()),
        Some(runtime) => Err(Error::StartUp(format!(
            "runtime library {}: this process already uses {}",
            printable::path(&path),
            printable::path(&runtime.path)
        ))),
        None => Ok(loaded.insert(start(&path, threads)?).clone()),
    }
}

/// What decides where the library is looked for.
struct Surroundings {
    flag: Option<PathBuf>,
    variable: Option<OsString>,
    executable: Option<PathBuf>,
}

fn find(surroundings: &Surroundings, device: Device) -> Result<PathBuf, Error> {
    let places = places(surroundings, device)?;
    if let Some(found) = places.iter().find(|p| p.is_file()) {
        return Ok(found.clone());
    }
    let list: String = places.iter().map(|p| format!("\n  {}", printable::path(p))).collect();
    let list = if list.is_empty() { "\n  (no place to look at)".to_owned() } else { list };
    Err(Error::StartUp(format!(
        "no ONNX Runtime library; looked at:{list}\nfetch it with scripts/fetch-runtime.sh, or name it with \
         --runtime FILE or {VARIABLE}"
    )))
}

fn places(surroundings: &Surroundings, device: Device) -> Result<Vec<PathBuf>, Error> {
    if let Some(flag) = &surroundings.flag {
        return Ok(vec![file_of(absolute(flag).unwrap_or_else(|_| flag.clone()))]);
    }
    if let Some(variable) = surroundings.variable.as_ref().map(PathBuf::from) {
        if variable.is_relative() {
            return Err(Error::StartUp(format!("{VARIABLE}={}: must be an absolute path", printable::path(&variable))));
        }
        return Ok(vec![file_of(variable)]);
    }
    let Some(folder) = surroundings.executable.as_deref().and_then(Path::parent) else {
        return Ok(Vec::new());
    };
    let mut places = vec![folder.join(LIBRARY), folder.join("lib").join(LIBRARY)];
    let checkout = folder.ancestors().take(CHECKOUT_STEPS).find(|f| f.join("Cargo.toml").is_file());
    if let Some(demo) = checkout.map(|f| f.join(".demo")) {
        if device != Device::Cpu {
            places.push(demo.join("runtime-cuda").join(LIBRARY));
        }
        places.push(demo.join("runtime").join(LIBRARY));
    }
    Ok(places)
}

fn file_of(path: PathBuf) -> PathBuf {
    if path.is_dir() { path.join(LIBRARY) } else { path }
}

/// Some failures are assertions inside `ort`; they become errors here.
fn start(path: &Path, threads: usize) -> Result<Runtime, Error> {
    let refused = |why: String| Error::StartUp(format!("runtime library {}: {why}", printable::path(path)));
    if elf::is_cut_short(path).map_err(|e| refused(e.to_string()))? {
        return Err(refused("the file is cut short; fetch it again with scripts/fetch-runtime.sh".to_owned()));
    }
    if elf::is_foreign(path).map_err(|e| refused(e.to_string()))? {
        return Err(refused(
            "it is built for another processor; fetch the one for this machine: scripts/fetch-runtime.sh".to_owned(),
        ));
    }
    if env::var_os(TELEMETRY_SWITCH).is_none_or(|v| v != "1") {
        log::warn!("ONNX Runtime may send telemetry to Microsoft: start with {TELEMETRY_SWITCH}=1");
    }
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let builder = ort::init_from(path).map_err(|e| explain(&e))?;
        environment(builder, threads).map_err(|e| format!("cannot be started: {e}"))
    }));
    let env = match outcome {
        Ok(result) => result.map_err(refused)?,
        Err(_) => {
            return Err(refused("does not answer as an ONNX Runtime library does; fetch it again".to_owned()));
        }
    };
    let version = version_of(path, ort::info());
    Ok(Runtime { env, path: path.to_path_buf(), version })
}

fn environment(builder: EnvironmentBuilder, threads: usize) -> ort::Result<Environment> {
    let pool = GlobalThreadPoolOptions::default()
        .with_intra_threads(threads.max(1))?
        .with_inter_threads(1)?
        .with_spin_control(false)?;
    let env = builder
        .with_name("croprow")
        .with_telemetry(false)
        .with_global_thread_pool(pool)
        .with_logger(logger())
        .build()?;
    env.set_log_level(level());
    Ok(env)
}

/// What the runtime says goes to the log under the target `onnxruntime`. Its errors come back as values too,
/// and its warnings concern the graph's author, so both are for `-v` and not for every user.
fn logger() -> LoggerFunction {
    Arc::new(|level, _category, _id, _location, message| {
        let level = match level {
            LogLevel::Fatal => log::Level::Error,
            LogLevel::Error | LogLevel::Warning => log::Level::Debug,
            LogLevel::Info | LogLevel::Verbose => log::Level::Trace,
        };
        log::log!(target: "onnxruntime", level, "{message}");
    })
}

/// The lowest level worth formatting inside the runtime.
pub(super) fn level() -> LogLevel {
    match log::max_level() {
        log::LevelFilter::Trace => LogLevel::Info,
        log::LevelFilter::Debug => LogLevel::Warning,
        _ => LogLevel::Fatal,
    }
}

fn explain(error: &ort::LoadDynamicError) -> String {
    use ort::LoadDynamicError as E;
    match error {
        // The message proper is "dlopen failed"; the loader's own words are its source.
        E::Dlopen { error, .. } => match error::Error::source(error) {
            Some(reason) => format!("the loader refuses it: {reason}"),
            None => format!("the loader refuses it: {error}"),
        },
        E::MissingApi { .. } => "not an ONNX Runtime library (it has no OrtGetApiBase)".to_owned(),
        E::InvalidVersionString => "not an ONNX Runtime library (its version is no text)".to_owned(),
        E::BadVersion { version_str, .. } => format!(
            "too old: it is ONNX Runtime {version_str}, needed is 1.{} or newer; fetch it with scripts/fetch-runtime.sh",
            ort::MINOR_VERSION
        ),
    }
}

/// `ort` does not hand out the full version. The file's own name carries it (`libonnxruntime.so.1.31.1`, mostly
/// behind a link), the build information sometimes does.
fn version_of(path: &Path, build: &str) -> String {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let named = real.file_name().and_then(|n| n.to_str()).and_then(|n| n.split_once(".so.")).map(|(_, v)| v.to_owned());
    let branch = || build.split_once("git-branch=rel-").and_then(|(_, rest)| rest.split(',').next()).map(str::to_owned);
    let looks_right = |v: &String| v.starts_with(|c: char| c.is_ascii_digit()) && v.contains('.');
    named.filter(looks_right).or_else(branch).unwrap_or_else(|| format!("1.{} or newer", ort::MINOR_VERSION))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn nothing_said(executable: &Path) -> Surroundings {
        Surroundings { flag: None, variable: None, executable: Some(executable.to_path_buf()) }
    }

    fn checkout() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("Cargo.toml"), "").unwrap();
        for folder in [".demo/runtime", ".demo/runtime-cuda", "target/debug/deps"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        fs::write(dir.path().join(".demo/runtime").join(LIBRARY), "x").unwrap();
        dir
    }

    #[test]
    fn a_checkout_lends_its_demo_library_to_the_binary_and_to_tests() {
        let dir = checkout();
        for executable in ["target/debug/croprow", "target/debug/deps/models-1234"] {
            let found = find(&nothing_said(&dir.path().join(executable)), Device::Auto).unwrap();
            assert_eq!(found, dir.path().join(".demo/runtime").join(LIBRARY));
        }
    }

    #[test]
    fn the_cuda_library_is_preferred_unless_the_cpu_is_asked_for() {
        let dir = checkout();
        let cuda = dir.path().join(".demo/runtime-cuda").join(LIBRARY);
        fs::write(&cuda, "x").unwrap();
        let at = nothing_said(&dir.path().join("target/debug/croprow"));
        assert_eq!(find(&at, Device::Cuda(0)).unwrap(), cuda);
        assert_eq!(find(&at, Device::Auto).unwrap(), cuda);
        assert_eq!(find(&at, Device::Cpu).unwrap(), dir.path().join(".demo/runtime").join(LIBRARY));
    }

    #[test]
    fn a_library_beside_the_binary_comes_before_the_demo() {
        let dir = checkout();
        fs::create_dir_all(dir.path().join("target/debug/lib")).unwrap();
        let beside = dir.path().join("target/debug/lib").join(LIBRARY);
        fs::write(&beside, "x").unwrap();
        assert_eq!(find(&nothing_said(&dir.path().join("target/debug/croprow")), Device::Cpu).unwrap(), beside);
    }

    #[test]
    fn a_flag_or_a_variable_that_names_nothing_is_an_error_and_not_a_hint() {
        let dir = checkout();
        let mut at = nothing_said(&dir.path().join("target/debug/croprow"));
        at.variable = Some("/no/such/variable.so".into());
        let text = find(&at, Device::Cpu).unwrap_err().to_string();
        assert!(text.contains("/no/such/variable.so") && !text.contains(".demo"), "{text}");
        at.flag = Some("/no/such/flag.so".into());
        let text = find(&at, Device::Cpu).unwrap_err().to_string();
        assert!(text.contains("/no/such/flag.so") && !text.contains("variable.so"), "{text}");
    }

    #[test]
    fn a_bare_name_in_the_variable_is_refused() {
        let mut at = nothing_said(Path::new("/opt/croprow/croprow"));
        at.variable = Some(LIBRARY.into());
        assert!(find(&at, Device::Cpu).unwrap_err().to_string().contains("must be an absolute path"));
    }

    #[test]
    fn a_missing_library_is_told_with_every_place_and_the_remedy() {
        let text = find(&nothing_said(Path::new("/opt/croprow/croprow")), Device::Auto).unwrap_err().to_string();
        for part in ["/opt/croprow/libonnxruntime.so", "/opt/croprow/lib/libonnxruntime.so", "scripts/fetch-runtime.sh"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_version_comes_from_the_file_or_from_the_build() {
        let build = "ORT Build Info: git-branch=rel-1.19.0, git-commit-id=26250ae, build type=Release";
        assert_eq!(version_of(Path::new("/x/libonnxruntime.so.1.31.1"), build), "1.31.1");
        assert_eq!(version_of(Path::new("/x/libonnxruntime.so"), build), "1.19.0");
        assert_eq!(version_of(Path::new("/x/libonnxruntime.so"), "?"), format!("1.{} or newer", ort::MINOR_VERSION));
    }
}
