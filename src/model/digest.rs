//! The digest of a model: over the names and the content of its files, so that provenance knows one model from
//! another whatever its folder is called.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use super::files::{ModelFiles, unusable};
use super::folder::reason;
use crate::error::Error;
use crate::row::FileStamp;

/// Read buffer while hashing.
const HASH_CHUNK_BYTES: usize = 1 << 20;

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

/// SHA-256 in hex over name and content of all files. Moving the folder does not change it.
///
/// # Errors
/// A file cannot be read.
pub fn digest(files: &ModelFiles, cache: &mut dyn DigestCache) -> Result<String, Error> {
    let mut whole = Sha256::new();
    for path in files.all() {
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::PathBuf;

    use super::super::files::locate;
    use super::super::onnx_file::sample::{model, number, tensor};
    use super::*;
    use crate::config::Precision;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    fn located(dir: &tempfile::TempDir) -> ModelFiles {
        locate(dir.path(), Precision::Auto, false).unwrap()
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
    fn a_digest_depends_on_every_file_that_decides_and_not_on_the_folder() {
        let graph = model(&[tensor(&[("location", "w")])]);
        let other = [graph.clone(), number(5, 1)].concat();
        let of = |files: &[(&str, &[u8])]| digest(&located(&folder(files)), &mut NoCache).unwrap();
        let base = [("model.onnx", graph.as_slice()), ("w", b"weights"), ("croprow.toml", b"a = 1")];
        let one = of(&base);
        assert_eq!(one.len(), 64);
        let beside: [(&str, &[u8]); 3] = [("reference.json", b"{}"), ("model_fp16.onnx", b"g"), ("README.md", b"r")];
        assert_eq!(of(&[&base[..], &beside].concat()), one);
        for (place, content) in [(0, other.as_slice()), (1, b"weighty"), (2, b"a = 2")] {
            let mut changed = base;
            changed[place].1 = content;
            assert_ne!(of(&changed), one, "{}", base[place].0);
        }
    }

    #[test]
    fn a_file_that_did_not_change_is_hashed_once() {
        let dir = folder(&[("model.onnx", &model(&[])), ("croprow.toml", b"a = 1")]);
        let files = located(&dir);
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
