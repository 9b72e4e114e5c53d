//! The files of a model: which there are, whether they can be meant, and what beside the graph decides results.

use std::fs;
use std::path::{Path, PathBuf, absolute};

pub use super::digest::{DigestCache, NoCache, digest};
use super::folder::{self, ONNX_FOLDER, is_checkpoint, reason};
use super::weights;
use crate::config::Precision;
use crate::error::Error;
use crate::printable;

/// How croprow feeds a model, beside the graph.
pub const CARD: &str = "croprow.toml";

/// How Hugging Face feeds a model, beside the graph.
pub const PREPROCESSOR: &str = "preprocessor_config.json";

/// The same for a model of pictures and text, with the picture's part inside.
pub const PROCESSOR: &str = "processor_config.json";

/// How Hugging Face describes a model.
pub const CONFIG: &str = "config.json";

/// How Hugging Face cuts text into tokens.
pub const TOKENIZER: &str = "tokenizer.json";

/// Outputs of the original model, written by the export scripts.
pub const REFERENCE: &str = "reference.json";

/// Settings beside a graph that decide results. What was only made to check an export with is none.
const COMPANIONS: [&str; 5] = [CARD, CONFIG, PREPROCESSOR, PROCESSOR, TOKENIZER];

/// A model on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// The graph. Absolute.
    pub onnx: PathBuf,
    /// The same model in other precisions, which is not used and decides nothing. Absolute.
    pub others: Vec<PathBuf>,
    /// Settings that decide results. Absolute, sorted.
    pub companions: Vec<PathBuf>,
    /// External weights of the graph. Absolute, sorted.
    pub weights: Vec<PathBuf>,
}

impl ModelFiles {
    /// The companion of that file name.
    pub fn companion(&self, name: &str) -> Option<&Path> {
        self.companions.iter().map(PathBuf::as_path).find(|p| p.file_name().is_some_and(|n| n == name))
    }

    /// Size of the graph with its external weights: at least that much memory is taken by a session.
    pub fn weights_bytes(&self) -> u64 {
        let files = std::iter::once(&self.onnx).chain(&self.weights);
        files.filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum()
    }

    /// Outputs of the original model, where they lie beside the graph or, in a hub's folder, above it.
    pub fn reference(&self) -> Option<PathBuf> {
        let folder = self.onnx.parent()?;
        let above = folder.parent().filter(|_| folder.file_name().is_some_and(|n| n == ONNX_FOLDER));
        [Some(folder), above].into_iter().flatten().map(|f| f.join(REFERENCE)).find(|p| p.is_file())
    }

    /// All files that decide results: the graph, then the others by path.
    pub fn all(&self) -> impl Iterator<Item = &Path> {
        let mut rest: Vec<&Path> = self.companions.iter().chain(&self.weights).map(PathBuf::as_path).collect();
        rest.sort_unstable();
        std::iter::once(self.onnx.as_path()).chain(rest)
    }
}

/// The files of the model at `model`: an `.onnx` file, a folder as hubs lay it out (`model.onnx`, `onnx/model.onnx`,
/// `vision_model.onnx`, with their suffixes of precision, or graphs of one other name), or a folder of the hub's
/// cache (`models--ORG--NAME`). `half` says that the device is faster with fp16, which `Precision::Auto` then
/// prefers; a file that is named itself is taken whatever its precision.
///
/// External weights are those that the graph names, whatever they are called.
///
/// # Errors
/// Nothing there, nothing that can be chosen, an absent precision, an empty or damaged file, a Git LFS pointer,
/// weights of another framework; external weights that are missing, too short or outside the model's folder.
pub fn locate(model: &Path, precision: Precision, half: bool) -> Result<ModelFiles, Error> {
    let path = absolute(model).map_err(|e| unusable(model, &e.to_string()))?;
    let meta = fs::metadata(&path).map_err(|e| unusable(&path, &reason(&e)))?;
    let (onnx, others) = if meta.is_dir() { in_folder(&path, precision, half)? } else { (path, Vec::new()) };
    check_graph(&onnx)?;
    let mut weights = weights::of(&onnx).map_err(|why| unusable(&onnx, &why))?;
    weights.sort();
    let companions = companions_of(&onnx);
    for file in &companions {
        weights::check_content(file).map_err(|why| unusable(file, &why))?;
    }
    Ok(ModelFiles { onnx, others, companions, weights })
}

/// True where `Precision::Auto` takes another graph of `model` for one device than for another. A model that
/// cannot be had is the same for all: [`locate`] says why.
pub fn depends_on_device(model: &Path) -> bool {
    let of = |half: bool| in_folder(model, Precision::Auto, half).ok().map(|(onnx, _)| onnx);
    model.is_dir() && of(true) != of(false)
}

fn in_folder(path: &Path, precision: Precision, half: bool) -> Result<(PathBuf, Vec<PathBuf>), Error> {
    let folder = folder::snapshot_of(path).map_err(|why| unusable(path, &why))?;
    let graphs = folder::graphs_in(&folder).map_err(|why| unusable(&folder, &why))?;
    let all: Vec<PathBuf> = graphs.iter().map(|g| g.path.clone()).collect();
    let onnx = folder::choose(graphs, precision, half).map_err(|why| unusable(&folder, &why))?;
    let others = all.into_iter().filter(|p| *p != onnx).collect();
    Ok((onnx, others))
}

fn check_graph(path: &Path) -> Result<(), Error> {
    if is_checkpoint(path) {
        return Err(unusable(path, "these are weights of another framework: export the model to ONNX first"));
    }
    if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("onnx")) {
        return Err(unusable(path, "not an .onnx file"));
    }
    weights::check_content(path).map_err(|why| unusable(path, &why))
}

/// Settings may lie one folder higher: Hugging Face keeps graphs in `onnx/` and settings beside that folder.
fn companions_of(onnx: &Path) -> Vec<PathBuf> {
    let Some(folder) = onnx.parent() else { return Vec::new() };
    let mut folders = vec![folder];
    if folder.file_name().is_some_and(|n| n == ONNX_FOLDER) {
        folders.extend(folder.parent());
    }
    let place = |name: &str| folders.iter().map(|f| f.join(name)).find(|p| p.is_file());
    let mut found: Vec<PathBuf> = COMPANIONS.iter().filter_map(|name| place(name)).collect();
    found.sort();
    found
}

pub(super) fn unusable(path: &Path, why: &str) -> Error {
    let path = absolute(path).unwrap_or_else(|_| path.to_path_buf());
    Error::StartUp(format!("model {}: {why}", printable::path(&path)))
}

#[cfg(test)]
mod tests {
    use super::super::onnx_file::sample::{model, tensor};
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

    fn located(model: &Path) -> Result<ModelFiles, Error> {
        locate(model, Precision::Auto, false)
    }

    fn refusal(model: &Path) -> String {
        located(model).unwrap_err().to_string()
    }

    #[test]
    fn a_folder_with_model_onnx_is_that_model_its_settings_and_its_weights() {
        let graph = model(&[tensor(&[("location", "anything")])]);
        let dir = folder(&[
            ("model.onnx", &graph),
            ("model_fp16.onnx", b""),
            ("other.onnx", b""),
            ("other.onnx_data", b"w"),
            ("anything", b"w"),
            ("croprow.toml", b"t"),
            ("reference.json", b"r"),
        ]);
        let files = located(dir.path()).unwrap();
        assert_eq!(files.onnx, dir.path().join("model.onnx"));
        assert_eq!(files.others, [dir.path().join("model_fp16.onnx")]);
        assert_eq!(files.companions, [dir.path().join("croprow.toml")]);
        assert_eq!(files.weights, [dir.path().join("anything")]);
        let all = ["model.onnx", "anything", "croprow.toml"].map(|n| dir.path().join(n));
        assert!(files.all().eq(all.iter().map(PathBuf::as_path)));
    }

    #[test]
    fn a_hub_folder_keeps_its_settings_above_the_graph() {
        let names = [CONFIG, PREPROCESSOR, PROCESSOR, TOKENIZER];
        let mut content: Vec<(&str, &[u8])> = names.iter().map(|n| (*n, b"{}".as_slice())).collect();
        let graph = model(&[]);
        content.push(("onnx/model.onnx", &graph));
        let dir = folder(&content);
        for at in ["", "onnx", "onnx/model.onnx"] {
            let files = located(&dir.path().join(at)).unwrap();
            assert_eq!(files.onnx, dir.path().join("onnx/model.onnx"));
            assert_eq!(files.companions, names.map(|n| dir.path().join(n)));
            assert_eq!(files.companion(PREPROCESSOR), Some(dir.path().join(PREPROCESSOR).as_path()));
        }
    }

    #[test]
    fn only_a_folder_with_both_precisions_depends_on_the_device() {
        let graph = model(&[]);
        let dir = folder(&[("onnx/model.onnx", &graph), ("onnx/model_fp16.onnx", &graph)]);
        assert!(depends_on_device(dir.path()));
        assert!(!depends_on_device(&dir.path().join("onnx/model.onnx")));
        assert!(!depends_on_device(&dir.path().join("absent")));
        let half = locate(dir.path(), Precision::Auto, true).unwrap();
        assert_eq!(half.onnx, dir.path().join("onnx/model_fp16.onnx"));
        fs::remove_file(dir.path().join("onnx/model.onnx")).unwrap();
        assert!(!depends_on_device(dir.path()));
    }

    #[test]
    fn files_that_cannot_be_a_graph_are_refused_with_the_remedy() {
        let dir = folder(&[
            ("empty.onnx", b""),
            ("lfs.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            ("text.onnx", b"<html>not found</html>"),
            ("best.pt", b"PK"),
            ("notes.txt", b"n"),
        ]);
        fs::create_dir(dir.path().join("folder.onnx")).unwrap();
        std::os::unix::fs::symlink("blobs/gone", dir.path().join("link.onnx")).unwrap();
        for (name, remedy) in [
            ("empty.onnx", "the file is empty"),
            ("lfs.onnx", "git lfs pull"),
            ("text.onnx", "cut short or damaged; fetch it again"),
            ("best.pt", "export the model to ONNX first"),
            ("notes.txt", "not an .onnx file"),
            ("absent.onnx", "no such file or folder"),
            ("link.onnx", "no such file or folder"),
            ("folder.onnx", "no model.onnx in this folder"),
        ] {
            let text = refusal(&dir.path().join(name));
            assert!(text.contains(remedy) && text.contains(name), "{text}");
        }
    }

    #[test]
    fn a_git_lfs_pointer_in_place_of_the_weights_is_refused() {
        let graph = model(&[tensor(&[("location", "model.onnx.data"), ("length", "5000")])]);
        let pointer = b"version https://git-lfs.github.com/spec/v1\n";
        let dir = folder(&[("model.onnx", &graph), ("model.onnx.data", pointer)]);
        let text = refusal(dir.path());
        assert!(text.contains("model.onnx.data: this is a Git LFS pointer"), "{text}");
    }

    #[test]
    fn a_relative_path_is_reported_as_an_absolute_one() {
        assert!(refusal(Path::new("no-such-model.onnx")).starts_with("model /"));
    }
}
