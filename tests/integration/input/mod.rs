//! Sources of rows, with real files in temporary folders. What the tests have in common.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod folders;
mod lists;
mod records;
mod round_trip;
mod sqlite;

use std::fs;
use std::path::{Path, PathBuf};

use croprow::error::Error;
use croprow::input::{AddReport, AddRequest, Format, read, read_with};
use croprow::row::NewRow;
use tempfile::TempDir;

const JPEG: &[u8] = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00";

type Outcome = Result<(Vec<NewRow>, AddReport), Error>;

fn run(request: &AddRequest) -> Outcome {
    let mut rows = Vec::new();
    let report = read(request, &mut |row| {
        rows.push(row);
        Ok(())
    })?;
    assert_eq!(report.rows, rows.len() as u64);
    Ok((rows, report))
}

/// Reads `content` as standard input, relative to `/r`, which does not exist.
fn piped(content: impl AsRef<[u8]>, request: AddRequest) -> Outcome {
    let request = AddRequest { from: vec!["-".into()], root: Some("/r".into()), ..request };
    let mut rows = Vec::new();
    let mut stdin = content.as_ref();
    let report = read_with(&request, &mut stdin, &mut |row| {
        rows.push(row);
        Ok(())
    })?;
    Ok((rows, report))
}

fn format(format: Format) -> AddRequest {
    AddRequest { from_format: Some(format), ..AddRequest::default() }
}

fn plain(content: impl AsRef<[u8]>) -> Outcome {
    piped(content, AddRequest::default())
}

fn reason(outcome: Outcome) -> String {
    outcome.unwrap_err().to_string()
}

fn paths(outcome: Outcome) -> Vec<PathBuf> {
    outcome.unwrap().0.into_iter().map(|row| row.path).collect()
}

/// `(path, key, prompt, tag)`, with a dash for nothing.
fn fields(outcome: Outcome) -> Vec<[String; 4]> {
    let word = |text: Option<String>| text.unwrap_or("-".into());
    let row = |r: NewRow| [r.path.to_str().unwrap().into(), word(r.key), word(r.prompt), word(r.tag)];
    outcome.unwrap().0.into_iter().map(row).collect()
}

fn folders(sources: &[&Path]) -> AddRequest {
    AddRequest { sources: sources.iter().map(|p| p.to_path_buf()).collect(), ..AddRequest::default() }
}

fn write(dir: &Path, name: impl AsRef<Path>, content: &[u8]) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    path
}

fn tree() -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().canonicalize().unwrap();
    (dir, path)
}
