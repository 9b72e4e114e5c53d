//! What can be seen in a process of its own only: the runtime library is loaded once per process.

use super::refused::folder_with;
use super::*;

/// Runs an ignored test of this file alone, with `library` and `home` in its environment.
fn child(test: &str, library: &Path, home: &Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("models::children::{test}"), "--ignored", "--nocapture", "--test-threads", "1"])
        .env(LIBRARY_FOR_CHILD, library)
        .env(library::TELEMETRY_SWITCH, "1")
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME")
        .env_remove("ORT_DYLIB_PATH")
        .output()
        .unwrap()
}

/// What a load of `library` says, from a child that neither panicked at large nor hung.
fn refusal(library: &Path) -> String {
    let begun = Instant::now();
    let output = child("child_says_what_a_library_is", library, Path::new("/"));
    assert!(begun.elapsed() < REFUSED_WITHIN, "{:?}", begun.elapsed());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let refused = text.split_once("REFUSED: ").unwrap_or_else(|| panic!("{text}")).1;
    refused.split("\nEND").next().unwrap().to_owned()
}

fn compiled(folder: &Path, name: &str, source: &str) -> PathBuf {
    let (c, so) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    fs::write(&c, source).unwrap();
    let cc = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&so).arg(&c).status().unwrap();
    assert!(cc.success());
    so
}

/// A library that says it is ONNX Runtime of that version and has no API to give.
fn stub(version: &str) -> String {
    format!(
        "static const char *version(void) {{ return \"{version}\"; }}\n\
         static const void *api(unsigned v) {{ (void)v; return 0; }}\n\
         static struct {{ const void *(*a)(unsigned); const char *(*v)(void); }} base = {{ api, version }};\n\
         void *OrtGetApiBase(void) {{ return &base; }}\n"
    )
}

#[test]
#[ignore = "started by the others as a child"]
fn child_says_what_a_library_is() {
    let Some(path) = std::env::var_os(LIBRARY_FOR_CHILD) else {
        return;
    };
    match library::load(Some(Path::new(&path)), Device::Cpu, 2) {
        Ok(runtime) => println!("LOADED: {}", runtime.version),
        Err(error) => println!("REFUSED: {error}\nEND (code {})", error.exit_code()),
    }
}

#[test]
fn a_library_that_cannot_be_used_is_refused_quickly_with_path_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    let text_file = folder.path().join("text.so");
    fs::write(&text_file, "not a library\n".repeat(100)).unwrap();
    let alien = fs::read(root(".demo/runtime/libonnxruntime.so")).unwrap();
    let short = folder.path().join("short.so");
    fs::write(&short, &alien[..4096]).unwrap();
    let foreign = compiled(folder.path(), "foreign", "int answer(void) { return 42; }");
    let mut bytes = fs::read(&foreign).unwrap();
    // The number of a processor that nobody has here: SPARC.
    bytes[18..20].copy_from_slice(&43_u16.to_le_bytes());
    fs::write(&foreign, bytes).unwrap();
    for (path, words) in [
        (folder.path().join("absent.so"), "no ONNX Runtime library; looked at"),
        (text_file, "the loader refuses it"),
        (short, "the file is cut short; fetch it again"),
        (foreign, "it is built for another processor; fetch the one for this machine"),
        (compiled(folder.path(), "old", &stub("1.5.0")), "it is ONNX Runtime 1.5.0, needed is 1.31 or newer"),
        (compiled(folder.path(), "other", "int answer(void) { return 42; }"), "not an ONNX Runtime library"),
        (compiled(folder.path(), "hollow", &stub("1.31.0")), "does not answer as an ONNX Runtime library does"),
        (
            compiled(folder.path(), "null", "void *OrtGetApiBase(void) { return 0; }"),
            "does not answer as an ONNX Runtime",
        ),
    ] {
        let text = refusal(&path);
        assert!(text.contains(words), "{text}");
        assert!(text.contains(&path.display().to_string()), "{text}");
    }
    assert!(refusal(&folder.path().join("absent.so")).contains("scripts/fetch-runtime.sh"));
    assert!(refusal(&folder.path().join("text.so")).contains("invalid ELF header"), "the loader's own reason");
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
#[ignore = "started by the others as a child"]
fn child_counts_threads() {
    if std::env::var_os(LIBRARY_FOR_CHILD).is_none() {
        return;
    }
    let before = threads();
    let runtime = library::load(None, Device::Cpu, 4).unwrap();
    let loaded = threads();
    let (cpu, config) = (EffectiveDevice::cpu(None), detect_config(selection(0.3)));
    let open = |name: &str| {
        let files = locate(&root(".demo/models").join(name), Precision::Auto, false).unwrap();
        detector::load(&files, &config, &runtime, &cpu).unwrap().0
    };
    let mut detectors = [open("yolov3-tiny"), open("yolov3-tiny-v5")];
    for detector in &mut detectors {
        detections(detector.as_mut(), &Array4::zeros((2, 3, 416, 416)), 0.3);
    }
    println!("THREADS: {} {}", loaded - before, threads() - loaded);
}

#[test]
fn all_sessions_share_one_pool_and_the_caller_is_one_of_its_threads() {
    let output = child("child_counts_threads", Path::new("any"), Path::new("/"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("THREADS: 3 0"), "{output:?}");
}

#[test]
#[ignore = "started by the others as a child"]
fn child_fails_loudly_inside_the_runtime() {
    if std::env::var_os(LIBRARY_FOR_CHILD).is_none() {
        return;
    }
    let (mut detector, _) = yolo(&tiny("yolo-v8-tiny")).unwrap();
    let error = detector.detect(&Array4::zeros((1, 3, 8, 8)), &[], 0.3).unwrap_err();
    println!("FAILED: {error}");
    assert!(embedder(folder_with(b"not a graph").path()).is_err());
}

#[test]
fn the_runtime_prints_and_keeps_nothing_on_its_own() {
    let home = tempfile::tempdir().unwrap();
    let output = child("child_fails_loudly_inside_the_runtime", Path::new("any"), home.path());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("FAILED: Got invalid dimensions for input: images"), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    // Telemetry would be queued there.
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}
