//! Which graph of a folder is meant. Hubs keep one model in several precisions, told apart by the file's name, on
//! top or in `onnx/`; their cache keeps a folder per revision. Opens no graph.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::config::Precision;

/// Below the folder of a model: where hubs keep its graphs.
pub(super) const ONNX_FOLDER: &str = "onnx";

/// Names of graphs without their suffix, the preferred first. CLIP and SigLIP are also exported in halves, and the
/// half that sees is all that an embedder needs.
const USUAL: [&str; 2] = ["vision_model", "model"];

/// Suffixes of the hub (`transformers.js`), and the order in which `auto` takes what is there on the CPU.
const SUFFIXES: [(Precision, &str); 8] = [
    (Precision::Fp32, ""),
    (Precision::Fp16, "_fp16"),
    (Precision::Quantized, "_quantized"),
    (Precision::Int8, "_int8"),
    (Precision::Uint8, "_uint8"),
    (Precision::Q4, "_q4"),
    (Precision::Q4f16, "_q4f16"),
    (Precision::Bnb4, "_bnb4"),
];

/// A graph in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GraphFile {
    pub path: PathBuf,
    pub precision: Precision,
    /// Relative to the folder, for messages.
    name: String,
    stem: String,
}

/// The graphs that are the same model, one for each precision.
///
/// # Errors
/// There is none, or it is not clear which. The text is a fragment for a message about the folder.
pub(super) fn graphs_in(folder: &Path) -> Result<Vec<GraphFile>, String> {
    let top = names_in(folder).map_err(|e| reason(&e))?;
    let below = folder.join(ONNX_FOLDER);
    let inner = if below.is_dir() { names_in(&below).map_err(|e| reason(&e))? } else { Vec::new() };
    let mut all: Vec<GraphFile> = top.iter().filter_map(|n| candidate(folder, n, n)).collect();
    all.extend(inner.iter().filter_map(|n| candidate(&below, n, &format!("{ONNX_FOLDER}/{n}"))));
    let mut stems: Vec<&str> = all.iter().map(|c| c.stem.as_str()).collect();
    stems.sort_unstable();
    stems.dedup();
    let stem = match (USUAL.iter().find(|u| stems.contains(u)), stems.as_slice()) {
        (Some(usual), _) => (*usual).to_owned(),
        (None, [only]) => (*only).to_owned(),
        (None, []) => {
            let export = top.iter().any(|n| is_checkpoint(Path::new(n)));
            let advice = if export { "; export the model to ONNX first" } else { "" };
            return Err(format!("no model.onnx in this folder, there is {}{advice}", listed(&top)));
        }
        (None, _) => {
            let names: Vec<&str> = all.iter().map(|c| c.name.as_str()).collect();
            return Err(format!("more than one model in this folder, name one of {}", listed(&names)));
        }
    };
    all.retain(|c| c.stem == stem);
    // What lies on top comes first; the same precision again, in `onnx/`, is a copy that is never taken.
    let mut graphs: Vec<GraphFile> = Vec::new();
    for (precision, _) in SUFFIXES {
        graphs.extend(all.iter().find(|c| c.precision == precision).cloned());
    }
    Ok(graphs)
}

/// The one of `graphs` that is wanted. `half` where the device is faster with fp16.
///
/// # Errors
/// A precision was asked for that is not there; the text lists those that are.
pub(super) fn choose(graphs: Vec<GraphFile>, wanted: Precision, half: bool) -> Result<PathBuf, String> {
    let of = |precision: Precision| graphs.iter().find(|c| c.precision == precision);
    let chosen = match wanted {
        Precision::Auto if half => of(Precision::Fp16).or(graphs.first()),
        Precision::Auto => graphs.first(),
        asked => of(asked),
    };
    chosen.map(|c| c.path.clone()).ok_or_else(|| {
        let there: Vec<String> = graphs.iter().map(|c| format!("{} ({})", word(c.precision), c.name)).collect();
        format!(
            "no {} graph in this folder; --precision can be {}; it counts for both models, a graph that is named itself \
             (FOLDER/onnx/model_int8.onnx) is taken whatever its precision",
            word(wanted),
            there.join(", ")
        )
    })
}

/// The word of `--precision`.
fn word(precision: Precision) -> &'static str {
    match precision {
        Precision::Auto => "auto",
        Precision::Fp32 => "fp32",
        Precision::Fp16 => "fp16",
        Precision::Int8 => "int8",
        Precision::Uint8 => "uint8",
        Precision::Quantized => "quantized",
        Precision::Q4 => "q4",
        Precision::Q4f16 => "q4f16",
        Precision::Bnb4 => "bnb4",
    }
}

/// The folder that holds the files: of a hub cache (`models--ORG--NAME`, with `snapshots`) that of the revision
/// that `refs/main` names, else of the only one there is; any other folder itself.
///
/// # Errors
/// A cache without that revision. The text is a fragment for a message about the folder.
pub(super) fn snapshot_of(folder: &Path) -> Result<PathBuf, String> {
    let snapshots = folder.join("snapshots");
    if !snapshots.is_dir() || !folder.join("blobs").is_dir() {
        return Ok(folder.to_path_buf());
    }
    if let Ok(revision) = fs::read_to_string(folder.join("refs/main")) {
        let name = Path::new(revision.trim());
        // A revision is one name; anything else would lead elsewhere.
        let is_name = name.components().count() == 1 && name.file_name().is_some();
        let path = snapshots.join(name);
        return match is_name && path.is_dir() {
            true => Ok(path),
            false => Err(format!(
                "a hub cache whose refs/main names the revision {name:?}, which is not in snapshots/: fetch it again"
            )),
        };
    }
    let revisions = names_in(&snapshots).map_err(|e| reason(&e))?;
    match revisions.as_slice() {
        [only] => Ok(snapshots.join(only)),
        [] => Err("a hub cache without a revision: fetch the model again".to_owned()),
        several => Err(format!("a hub cache of several revisions, name one of snapshots/{}", listed(several))),
    }
}

fn candidate(folder: &Path, file: &str, name: &str) -> Option<GraphFile> {
    let whole = file.strip_suffix(".onnx").or_else(|| file.strip_suffix(".ONNX"))?;
    let with = |(precision, suffix): &(Precision, &'static str)| Some((whole.strip_suffix(suffix)?, *precision));
    // The bare name is a suffix of every name: it is asked last.
    let (stem, precision) = SUFFIXES.iter().rev().find_map(with)?;
    Some(GraphFile { path: folder.join(file), precision, name: name.to_owned(), stem: stem.to_owned() })
}

pub(super) fn names_in(folder: &Path) -> io::Result<Vec<String>> {
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

/// True for weights of other frameworks.
pub(super) fn is_checkpoint(path: &Path) -> bool {
    const OTHERS: [&str; 10] = ["pt", "pth", "safetensors", "ckpt", "bin", "h5", "tflite", "engine", "plan", "weights"];
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| OTHERS.contains(&e.to_ascii_lowercase().as_str()))
}

pub(super) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or folder".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        dir
    }

    fn chosen(files: &[&str], wanted: Precision, half: bool) -> Result<String, String> {
        let dir = folder(files);
        let path = choose(graphs_in(dir.path())?, wanted, half)?;
        Ok(path.strip_prefix(dir.path()).unwrap().to_string_lossy().into_owned())
    }

    #[test]
    fn auto_takes_fp32_on_the_cpu_fp16_on_a_gpu_and_else_what_is_there() {
        let both = ["onnx/model.onnx", "onnx/model_fp16.onnx", "onnx/model_int8.onnx"];
        for (files, half, expected) in [
            (&both[..], false, "onnx/model.onnx"),
            (&both, true, "onnx/model_fp16.onnx"),
            (&both[1..], false, "onnx/model_fp16.onnx"),
            (&both[2..], true, "onnx/model_int8.onnx"),
            (&["model_q4.onnx", "model_uint8.onnx"], false, "model_uint8.onnx"),
            (&["model_bnb4.onnx", "model_q4f16.onnx"], true, "model_q4f16.onnx"),
            (&["model_int8.onnx", "model_quantized.onnx"], true, "model_quantized.onnx"),
        ] {
            assert_eq!(chosen(files, Precision::Auto, half).unwrap(), expected, "{files:?}");
        }
    }

    #[test]
    fn a_precision_that_is_not_there_is_refused_with_those_that_are() {
        let files = ["model.onnx", "onnx/model_q4.onnx"];
        assert_eq!(chosen(&files, Precision::Q4, false).unwrap(), "onnx/model_q4.onnx");
        let text = chosen(&files, Precision::Fp16, false).unwrap_err();
        assert!(
            text.contains("no fp16 graph") && text.contains("fp32 (model.onnx), q4 (onnx/model_q4.onnx)"),
            "{text}"
        );
    }

    #[test]
    fn the_graph_on_top_comes_before_the_same_in_the_folder_below() {
        let files = ["model.onnx", "onnx/model.onnx", "other.onnx"];
        assert_eq!(chosen(&files, Precision::Auto, false).unwrap(), "model.onnx");
    }

    #[test]
    fn of_a_model_in_halves_the_one_that_sees_is_taken() {
        let files =
            ["onnx/model.onnx", "onnx/text_model.onnx", "onnx/vision_model.onnx", "onnx/vision_model_fp16.onnx"];
        assert_eq!(chosen(&files, Precision::Auto, false).unwrap(), "onnx/vision_model.onnx");
        assert_eq!(chosen(&files, Precision::Auto, true).unwrap(), "onnx/vision_model_fp16.onnx");
        assert_eq!(chosen(&files[1..3], Precision::Auto, true).unwrap(), "onnx/vision_model.onnx");
    }

    #[test]
    fn a_name_of_its_own_is_taken_where_it_is_the_only_one() {
        assert_eq!(
            chosen(&["yolo.onnx", "yolo_fp16.onnx", "a.txt"], Precision::Fp16, false).unwrap(),
            "yolo_fp16.onnx"
        );
        let text = chosen(&["yolo.onnx", "second.onnx"], Precision::Auto, false).unwrap_err();
        assert!(text.contains("name one of second.onnx, yolo.onnx"), "{text}");
        let text = chosen(&["model.safetensors", "config.json"], Precision::Auto, false).unwrap_err();
        assert!(text.contains("there is config.json, model.safetensors; export the model to ONNX first"), "{text}");
        assert!(chosen(&[], Precision::Auto, false).unwrap_err().contains("there is nothing"));
    }

    #[test]
    fn a_hub_cache_is_its_main_revision() {
        let dir = folder(&["blobs/x", "refs/main", "snapshots/aa/model.onnx", "snapshots/bb/model.onnx"]);
        fs::write(dir.path().join("refs/main"), "bb\n").unwrap();
        assert_eq!(snapshot_of(dir.path()).unwrap(), dir.path().join("snapshots/bb"));
        for (revision, words) in
            [("cc", "\"cc\", which is not in snapshots/"), ("../blobs", "not in snapshots/"), ("", "not in")]
        {
            fs::write(dir.path().join("refs/main"), revision).unwrap();
            let text = snapshot_of(dir.path()).unwrap_err();
            assert!(text.contains(words), "{text}");
        }
        fs::remove_dir_all(dir.path().join("refs")).unwrap();
        assert!(snapshot_of(dir.path()).unwrap_err().contains("several revisions, name one of snapshots/aa, bb"));
        fs::remove_dir_all(dir.path().join("snapshots/aa")).unwrap();
        assert_eq!(snapshot_of(dir.path()).unwrap(), dir.path().join("snapshots/bb"));
    }

    #[test]
    fn any_other_folder_is_itself() {
        let dir = folder(&["snapshots/aa/model.onnx"]);
        assert_eq!(snapshot_of(dir.path()).unwrap(), dir.path());
    }
}
