//! The external weights of a graph as files: each must be there, whole, and inside the model's folder. A graph
//! from a stranger could otherwise have any file of this machine read as numbers.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use super::folder::reason;
use super::onnx_file;
use crate::printable;

/// The first words of a file that Git LFS left in place of the content.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// The files of external weights that the graph at `onnx` names. Absolute where `onnx` is.
///
/// # Errors
/// The graph cannot be walked, or names a file that is missing, too short or not to be followed. The text is a
/// fragment for a message about the graph.
pub(super) fn of(onnx: &Path) -> Result<Vec<PathBuf>, String> {
    let file = File::open(onnx).map_err(|e| e.to_string())?;
    let locations = onnx_file::external_data(file).map_err(|e| match e.kind() {
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
            format!("the file is cut short or damaged; fetch it again ({e})")
        }
        _ => e.to_string(),
    })?;
    let Some(folder) = onnx.parent() else { return Ok(Vec::new()) };
    locations.iter().map(|(location, needed)| one(folder, location, *needed)).collect()
}

fn one(folder: &Path, location: &str, needed_bytes: u64) -> Result<PathBuf, String> {
    let relative = Path::new(location);
    if relative.is_absolute() {
        return Err(format!("it names its external weights by an absolute path, which is refused: {location}"));
    }
    let stays = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
    if !relative.components().all(stays) {
        return Err(outside(location));
    }
    let path = folder.join(relative);
    let damaged = |why: &str| {
        format!(
            "its external weights are missing or damaged: {location} {why}; fetch it again into {}",
            printable::path(folder)
        )
    };
    let meta = match fs::metadata(&path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == ErrorKind::NotFound => return Err(damaged("is not there")),
        Err(e) => return Err(damaged(&format!("cannot be read ({e})"))),
    };
    if !is_inside(folder, &path).map_err(|e| damaged(&format!("cannot be read ({e})")))? {
        return Err(outside(location));
    }
    check_content(&path).map_err(|why| format!("{location}: {why}"))?;
    if meta.len() < needed_bytes {
        return Err(damaged(&format!("has {} bytes and must have {needed_bytes}", meta.len())));
    }
    Ok(path)
}

/// What is wrong with a file whatever it should hold.
///
/// # Errors
/// It cannot be read, is empty, or is a Git LFS pointer. The text is a fragment for a message about the file.
pub(super) fn check_content(path: &Path) -> Result<(), String> {
    if !fs::metadata(path).map_err(|e| reason(&e))?.is_file() {
        // Opening a pipe would wait for somebody to write into it.
        return Err("is no regular file".to_owned());
    }
    let mut head = Vec::new();
    let read = File::open(path).and_then(|f| f.take(LFS_POINTER.len() as u64).read_to_end(&mut head));
    read.map_err(|e| reason(&e))?;
    if head.is_empty() {
        return Err("the file is empty; fetch it again".to_owned());
    }
    if head == LFS_POINTER {
        return Err("this is a Git LFS pointer and not the content; run `git lfs pull` in its folder".to_owned());
    }
    Ok(())
}

/// True where the file that `path` leads to lies in `folder`, or among the blobs of the hub cache that `folder`
/// is a snapshot of: `NAME/snapshots/REVISION/...` links to `NAME/blobs`.
fn is_inside(folder: &Path, path: &Path) -> std::io::Result<bool> {
    let (folder, real) = (folder.canonicalize()?, path.canonicalize()?);
    let snapshots = folder.ancestors().find(|f| f.file_name().is_some_and(|n| n == "snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|name| name.join("blobs"));
    Ok(real.starts_with(&folder) || blobs.is_some_and(|blobs| real.starts_with(blobs)))
}

fn outside(location: &str) -> String {
    format!(
        "its external weights lie outside the model's folder, which is refused: {location}; put the files themselves \
         into one folder (`hf download NAME --local-dir FOLDER`)"
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::onnx_file::sample::{model, tensor};
    use super::*;

    fn graph(location: &str) -> Vec<u8> {
        model(&[tensor(&[("location", location), ("offset", "8"), ("length", "92")])])
    }

    fn with(location: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("g.onnx"), graph(location)).unwrap();
        dir
    }

    #[test]
    fn weights_of_any_name_and_in_a_folder_below_are_found() {
        for location in ["weights", "./weights", "parts/0.bin"] {
            let dir = with(location);
            fs::create_dir(dir.path().join("parts")).unwrap();
            fs::write(dir.path().join(location), [0; 100]).unwrap();
            assert_eq!(of(&dir.path().join("g.onnx")).unwrap(), [dir.path().join(location)]);
        }
    }

    #[test]
    fn missing_and_short_weights_are_refused_by_name_with_the_remedy() {
        let dir = with("weights.bin");
        let text = of(&dir.path().join("g.onnx")).unwrap_err();
        assert!(text.contains("weights.bin is not there; fetch it again into /"), "{text}");
        fs::write(dir.path().join("weights.bin"), [0; 99]).unwrap();
        let text = of(&dir.path().join("g.onnx")).unwrap_err();
        assert!(text.contains("weights.bin has 99 bytes and must have 100"), "{text}");
    }

    #[test]
    fn locations_that_leave_the_folder_are_refused() {
        let outer = tempfile::tempdir().unwrap();
        fs::write(outer.path().join("secret"), [0; 100]).unwrap();
        let folder = outer.path().join("model");
        fs::create_dir(&folder).unwrap();
        symlink("../secret", folder.join("link")).unwrap();
        symlink("..", folder.join("up")).unwrap();
        let absolute = printable::path(&outer.path().join("secret"));
        for (location, words) in [
            ("../secret", "outside the model's folder"),
            ("a/../../secret", "outside the model's folder"),
            ("link", "outside the model's folder"),
            ("up/secret", "outside the model's folder"),
            (absolute.as_str(), "an absolute path, which is refused"),
        ] {
            fs::write(folder.join("g.onnx"), graph(location)).unwrap();
            let text = of(&folder.join("g.onnx")).unwrap_err();
            assert!(text.contains(words), "{location}: {text}");
        }
    }

    #[test]
    fn blobs_of_the_same_hub_cache_are_followed_and_others_are_not() {
        let cache = tempfile::tempdir().unwrap();
        for name in ["models--a--b", "models--c--d"] {
            fs::create_dir_all(cache.path().join(name).join("blobs")).unwrap();
            fs::create_dir_all(cache.path().join(name).join("snapshots/0/onnx")).unwrap();
            fs::write(cache.path().join(name).join("blobs/w"), [0; 100]).unwrap();
        }
        let folder = cache.path().join("models--a--b/snapshots/0/onnx");
        fs::write(cache.path().join("models--a--b/blobs/g"), graph("w.onnx_data")).unwrap();
        symlink("../../../blobs/g", folder.join("g.onnx")).unwrap();
        symlink("../../../blobs/w", folder.join("w.onnx_data")).unwrap();
        assert_eq!(of(&folder.join("g.onnx")).unwrap(), [folder.join("w.onnx_data")]);
        fs::remove_file(folder.join("w.onnx_data")).unwrap();
        symlink("../../../../models--c--d/blobs/w", folder.join("w.onnx_data")).unwrap();
        assert!(of(&folder.join("g.onnx")).unwrap_err().contains("outside the model's folder"));
    }
}
