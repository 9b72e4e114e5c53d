//! The files of a model: which there are, whether they can be meant, and their digest. Reads no graph.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf, absolute};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::row::FileStamp;

/// How croprow feeds a model, beside the graph.
pub const CARD: &str = "croprow.toml";

/// How Hugging Face feeds a model, beside the graph.
pub const PREPROCESSOR: &str = "preprocessor_config.json";

/// How Hugging Face describes a model.
pub const CONFIG: &str = "config.json";

/// How Hugging Face cuts text into tokens.
pub const TOKENIZER: &str = "tokenizer.json";

/// Read buffer while hashing.
const HASH_CHUNK_BYTES: usize = 1 << 20;

/// The first words of a file that Git LFS left in place of the content.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A model on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// The graph. Absolute.
    pub onnx: PathBuf,
    /// Files beside it that decide results: settings and external weights. Absolute, sorted.
    pub companions: Vec<PathBuf>,
}

impl ModelFiles {
    /// The companion of that file name.
    pub fn companion(&self, name: &str) -> Option<&Path> {
        self.companions.iter().map(PathBuf::as_path).find(|p| p.file_name().is_some_and(|n| n == name))
    }
}

/// Remembers digests of files that did not change since, so that a model is hashed once and not per start.
pub trait DigestCache {
    /// SHA-256 in hex of the content of the absolute `path`, if it was stored under the same stamp.
    fn get(&mut self, path: &Path, stamp: FileStamp) -> Option<String>;

    /// Stores a digest. May forget it.
    fn put(&mut self, path: &Path, stamp: FileStamp, digest: &str);
}

/// Remembers nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCache;

impl DigestCache for NoCache {
    fn get(&mut self, _: &Path, _: FileStamp) -> Option<String> {
        None
    }

    fn put(&mut self, _: &Path, _: FileStamp, _: &str) {}
}

/// The files of the model at `model`: an `.onnx` file, or a folder with `model.onnx`, `onnx/model.onnx` or
/// exactly one `*.onnx`.
///
/// External weights are recognised by the names that exporters give them (`model.onnx_data`,
/// `model.onnx.data`, `*.onnx_data`); weights under any other name work, but do not enter the digest.
///
/// # Errors
/// Nothing there, nothing that can be chosen, an empty file, a Git LFS pointer, weights of another framework.
pub fn locate(model: &Path) -> Result<ModelFiles, Error> {
    let path = absolute(model).map_err(|e| unusable(model, &e.to_string()))?;
    let meta = fs::metadata(&path).map_err(|e| unusable(&path, &reason(&e)))?;
    let onnx = if meta.is_dir() { graph_in(&path)? } else { path };
    check_graph(&onnx)?;
    let companions = companions_of(&onnx).map_err(|e| unusable(&onnx, &reason(&e)))?;
    for companion in &companions {
        check_content(companion)?;
    }
    Ok(ModelFiles { onnx, companions })
}

/// SHA-256 in hex over name and content of all files. Moving the folder does not change it.
///
/// # Errors
/// A file cannot be read.
pub fn digest(files: &ModelFiles, cache: &mut dyn DigestCache) -> Result<String, Error> {
    let mut whole = Sha256::new();
    for path in std::iter::once(&files.onnx).chain(&files.companions) {
        let content = content_digest(path, cache).map_err(|e| unusable(path, &reason(&e)))?;
        whole.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        // The separators keep a name and a digest from running into each other.
        whole.update([0]);
        whole.update(content.as_bytes());
        whole.update(b"\n");
    }
    Ok(hex(&whole.finalize()))
}

fn content_digest(path: &Path, cache: &mut dyn DigestCache) -> io::Result<String> {
    if !std::fs::metadata(path)?.is_file() {
        // Opening a pipe would wait for somebody to write into it.
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is no regular file"));
    }
    let mut file = File::open(path)?;
    let stamp = stamp_of(&file.metadata()?);
    if let Some(known) = cache.get(path, stamp) {
        return Ok(known);
    }
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; HASH_CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => break,
            n => hasher.update(&chunk[..n]),
        }
    }
    let digest = hex(&hasher.finalize());
    cache.put(path, stamp, &digest);
    Ok(digest)
}

fn stamp_of(meta: &fs::Metadata) -> FileStamp {
    let since = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    FileStamp {
        size_bytes: i64::try_from(meta.len()).unwrap_or(i64::MAX),
        mtime_ns: i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut out, byte| {
        // Writing to a String cannot fail.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

fn graph_in(folder: &Path) -> Result<PathBuf, Error> {
    for usual in ["model.onnx", "onnx/model.onnx"] {
        let path = folder.join(usual);
        if path.is_file() {
            return Ok(path);
        }
    }
    let names = names_in(folder).map_err(|e| unusable(folder, &reason(&e)))?;
    let graphs: Vec<&String> = names.iter().filter(|n| n.ends_with(".onnx")).collect();
    match graphs.as_slice() {
        [only] => Ok(folder.join(only)),
        [] => {
            let export = names.iter().any(|n| is_checkpoint(Path::new(n)));
            let advice = if export { "; export the model to ONNX first" } else { "" };
            Err(unusable(folder, &format!("no model.onnx in this folder, there is {}{advice}", listed(&names))))
        }
        _ => Err(unusable(folder, &format!("more than one model in this folder, name one of {}", listed(&graphs)))),
    }
}

fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// A folder can hold thousands of names; a message cannot.
fn listed<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 12;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match names.len() {
        0 => "nothing".to_owned(),
        n if n > SHOWN => format!("{} and {} more", shown.join(", "), n - SHOWN),
        _ => shown.join(", "),
    }
}

fn is_checkpoint(path: &Path) -> bool {
    const OTHERS: [&str; 10] = ["pt", "pth", "safetensors", "ckpt", "bin", "h5", "tflite", "engine", "plan", "weights"];
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| OTHERS.contains(&e.to_ascii_lowercase().as_str()))
}

fn check_graph(path: &Path) -> Result<(), Error> {
    if is_checkpoint(path) {
        return Err(unusable(path, "these are weights of another framework: export the model to ONNX first"));
    }
    if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("onnx")) {
        return Err(unusable(path, "not an .onnx file"));
    }
    check_content(path)
}

fn check_content(path: &Path) -> Result<(), Error> {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|f| f.take(LFS_POINTER.len() as u64).read_to_end(&mut head));
    read.map_err(|e| unusable(path, &reason(&e)))?;
    if head.is_empty() {
        return Err(unusable(path, "the file is empty; fetch it again"));
    }
    if head == LFS_POINTER {
        return Err(unusable(path, "this is a Git LFS pointer and not the content; run `git lfs pull` in its folder"));
    }
    Ok(())
}

/// Settings may lie one folder higher: Hugging Face keeps graphs in `onnx/` and settings beside that folder.
fn companions_of(onnx: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(folder) = onnx.parent() else {
        return Ok(Vec::new());
    };
    let mut folders = vec![folder];
    if folder.file_name().is_some_and(|n| n == "onnx") {
        folders.extend(folder.parent());
    }
    let mut found = Vec::new();
    for settings in [CARD, CONFIG, PREPROCESSOR, TOKENIZER] {
        found.extend(folders.iter().map(|f| f.join(settings)).find(|p| p.is_file()));
    }
    let graph = onnx.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let others = names_in(folder)?;
    let split = others
        .iter()
        .filter(|n| **n == format!("{graph}_data") || **n == format!("{graph}.data") || n.ends_with(".onnx_data"));
    found.extend(split.map(|n| folder.join(n)).filter(|p| p.is_file()));
    found.sort();
    Ok(found)
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or folder".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

fn unusable(path: &Path, why: &str) -> Error {
    let path = absolute(path).unwrap_or_else(|_| path.to_path_buf());
    Error::StartUp(format!("model {}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        dir
    }

    fn refusal(model: &Path) -> String {
        locate(model).unwrap_err().to_string()
    }

    #[test]
    fn a_folder_with_model_onnx_is_that_model_and_its_companions() {
        let dir = folder(&[
            ("model.onnx", b"g"),
            ("other.onnx", b"g"),
            ("model.onnx_data", b"w"),
            ("croprow.toml", b"t"),
            ("README.md", b"r"),
        ]);
        let files = locate(dir.path()).unwrap();
        assert_eq!(files.onnx, dir.path().join("model.onnx"));
        assert_eq!(files.companions, [dir.path().join("croprow.toml"), dir.path().join("model.onnx_data")]);
    }

    #[test]
    fn a_hub_folder_keeps_its_settings_above_the_graph() {
        let dir = folder(&[("onnx/model.onnx", b"g"), ("preprocessor_config.json", b"{}")]);
        let files = locate(dir.path()).unwrap();
        assert_eq!(files.onnx, dir.path().join("onnx/model.onnx"));
        assert_eq!(files.companion(PREPROCESSOR), Some(dir.path().join("preprocessor_config.json").as_path()));
    }

    #[test]
    fn the_only_graph_of_a_folder_is_taken_and_of_two_none() {
        let dir = folder(&[("yolo.onnx", b"g"), ("notes.txt", b"n")]);
        assert_eq!(locate(dir.path()).unwrap().onnx, dir.path().join("yolo.onnx"));
        fs::write(dir.path().join("second.onnx"), b"g").unwrap();
        assert!(refusal(dir.path()).contains("name one of second.onnx, yolo.onnx"));
    }

    #[test]
    fn a_folder_without_a_graph_is_refused_with_what_is_there() {
        let dir = folder(&[("model.safetensors", b"w"), ("config.json", b"{}")]);
        let text = refusal(dir.path());
        assert!(text.contains("there is config.json, model.safetensors; export the model to ONNX first"), "{text}");
        assert!(text.contains(&dir.path().display().to_string()), "{text}");
    }

    #[test]
    fn files_that_cannot_be_a_graph_are_refused_with_the_remedy() {
        let dir = folder(&[
            ("empty.onnx", b""),
            ("lfs.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            ("best.pt", b"PK"),
            ("notes.txt", b"n"),
        ]);
        for (name, remedy) in [
            ("empty.onnx", "the file is empty"),
            ("lfs.onnx", "git lfs pull"),
            ("best.pt", "export the model to ONNX first"),
            ("notes.txt", "not an .onnx file"),
            ("absent.onnx", "no such file or folder"),
        ] {
            let text = refusal(&dir.path().join(name));
            assert!(text.contains(remedy) && text.contains(name), "{text}");
        }
    }

    #[test]
    fn a_git_lfs_pointer_in_place_of_the_weights_is_refused() {
        let dir = folder(&[("model.onnx", b"g"), ("model.onnx.data", b"version https://git-lfs.github.com/spec/v1\n")]);
        assert!(refusal(dir.path()).contains("model.onnx.data: this is a Git LFS pointer"));
    }

    #[test]
    fn a_relative_path_is_reported_as_an_absolute_one() {
        assert!(refusal(Path::new("no-such-model.onnx")).starts_with("model /"));
    }

    #[derive(Default)]
    struct Memory {
        known: HashMap<(PathBuf, i64, i64), String>,
        hits: usize,
    }

    impl DigestCache for Memory {
        fn get(&mut self, path: &Path, stamp: FileStamp) -> Option<String> {
            let found = self.known.get(&(path.to_path_buf(), stamp.size_bytes, stamp.mtime_ns)).cloned();
            self.hits += usize::from(found.is_some());
            found
        }

        fn put(&mut self, path: &Path, stamp: FileStamp, digest: &str) {
            self.known.insert((path.to_path_buf(), stamp.size_bytes, stamp.mtime_ns), digest.to_owned());
        }
    }

    #[test]
    fn a_digest_depends_on_every_file_and_not_on_the_folder() {
        let one = folder(&[("model.onnx", b"graph"), ("croprow.toml", b"a = 1")]);
        let same = folder(&[("model.onnx", b"graph"), ("croprow.toml", b"a = 1")]);
        let other = folder(&[("model.onnx", b"graph"), ("croprow.toml", b"a = 2")]);
        let of = |dir: &tempfile::TempDir| digest(&locate(dir.path()).unwrap(), &mut NoCache).unwrap();
        assert_eq!(of(&one), of(&same));
        assert_ne!(of(&one), of(&other));
        assert_eq!(of(&one).len(), 64);
    }

    #[test]
    fn a_file_that_did_not_change_is_hashed_once() {
        let dir = folder(&[("model.onnx", b"graph"), ("croprow.toml", b"a = 1")]);
        let files = locate(dir.path()).unwrap();
        let mut memory = Memory::default();
        let first = digest(&files, &mut memory).unwrap();
        assert_eq!((memory.hits, memory.known.len()), (0, 2));
        assert_eq!(digest(&files, &mut memory).unwrap(), first);
        assert_eq!(memory.hits, 2);
    }

    #[test]
    fn the_digest_of_content_is_plain_sha256() {
        assert_eq!(hex(&Sha256::digest(b"abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
