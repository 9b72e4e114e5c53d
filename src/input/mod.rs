//! Sources of rows: files, folders, lists, JSON, JSONL, CSV, another SQLite. One call of [`read`] pushes
//! every row into a sink and holds no more than one folder's names or one record at a time.
//!
//! Files that a list names are neither opened nor stat-ed; a list may name a million files on a slow mount.
//! This module does not write: the sink takes rows and `db` writes them in chunks; an `Err` ends the reading
//! and drops the chunk at hand. All SQL, that of other people's files too, is in `db`.

mod delimited;
mod format;
mod json;
mod list;
mod record;
mod walk;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::db::foreign::Foreign;
use crate::error::Error;
use crate::locked::is_locked;
use crate::row::NewRow;
pub use format::Format;
use format::Source;
use record::Rows;

/// A list given by this name is standard input.
pub const STDIN: &str = "-";

/// Where to find rows, and what to give to those that do not say it themselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AddRequest {
    /// Files, taken whatever they are, and folders, searched for images. Relative to the current directory.
    pub sources: Vec<PathBuf>,
    /// Lists, JSON, JSONL or CSV files; [`STDIN`] at most once.
    pub from: Vec<PathBuf>,
    /// The format of every file in `from`. `None`: each by its name and content.
    pub from_format: Option<Format>,
    /// Another SQLite file and one SELECT; its columns are named like the keys of a JSON object.
    pub from_sqlite: Option<(PathBuf, String)>,
    /// Names of keys or columns.
    pub keys: Keys,
    /// Prompt of the rows that bring none.
    pub prompt: Option<String>,
    /// Tag of the rows that bring none.
    pub tag: Option<String>,
    /// Relative paths of `from` and `from_sqlite` begin here, and none of their paths may lead out of it.
    /// `None`: they begin in the current directory and may lead anywhere.
    pub root: Option<PathBuf>,
}

/// The user's names for keys of objects and columns of tables. `None`: the first that is there of the names
/// in [`PATH_KEYS`], [`PROMPT_KEYS`], [`TAG_KEYS`], [`ID_KEYS`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Keys {
    /// The file.
    pub path: Option<String>,
    /// The row's prompt: text, or a list of labels that becomes the JSON text of that list.
    pub prompt: Option<String>,
    /// The row's tag.
    pub tag: Option<String>,
    /// The user's own identity of the row.
    pub id: Option<String>,
}

/// Keys that name the file, best first.
pub const PATH_KEYS: [&str; 5] = ["path", "image_path", "file", "filename", "image"];
/// Keys that hold a prompt, best first.
pub const PROMPT_KEYS: [&str; 2] = ["prompt", "pred_classes"];
/// Keys that hold a tag.
pub const TAG_KEYS: [&str; 1] = ["tag"];
/// Keys that hold the user's identity of a row, best first.
pub const ID_KEYS: [&str; 2] = ["key", "id"];

/// After so many problems only their number is kept.
pub const PROBLEMS_MAX: usize = 5;

/// What [`read`] came across.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AddReport {
    /// Rows given to the sink.
    pub rows: u64,
    /// Folders entered, each real folder once.
    pub folders: u64,
    /// Files in folders that are no images, and things that are no files. Hidden names are not counted.
    pub not_images: u64,
    /// Files and folders within the sources that could not be read. The rest was.
    pub unreadable: u64,
    /// The first [`PROBLEMS_MAX`] of the unreadable.
    pub problems: Vec<Problem>,
}

/// Something that could not be read.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// What. May hold control characters: escape it before a terminal sees it.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// Pushes the rows of all sources into `sink`, in a stable order: `sources`, `from`, `from_sqlite`, each as
/// given. A path that is named twice is pushed twice.
///
/// # Errors
/// A source that does not exist or cannot be understood, with the line or element; a key of the user's that
/// no record has; a path that leaves the root; the first error of `sink`. Rows may have been pushed before.
pub fn read(request: &AddRequest, sink: &mut dyn FnMut(NewRow) -> Result<(), Error>) -> Result<AddReport, Error> {
    read_with(request, &mut io::stdin().lock(), sink)
}

/// [`read`] with something else for standard input.
///
/// # Errors
/// As [`read`].
pub fn read_with(
    request: &AddRequest,
    stdin: &mut dyn Read,
    sink: &mut dyn FnMut(NewRow) -> Result<(), Error>,
) -> Result<AddReport, Error> {
    check_sources(request)?;
    let mut rows = Rows::new(request, sink)?;
    walk::read(&request.sources, &mut rows)?;
    for path in &request.from {
        if path.as_os_str() == STDIN {
            read_records(Path::new("standard input"), &mut *stdin, request.from_format, &mut rows)?;
        } else {
            if is_locked(path) {
                return Err(source_error(path, "is part of the database itself; name a list".into()));
            }
            let mut file = File::open(path).map_err(|e| source_error(path, io_reason(&e)))?;
            read_records(path, &mut file, request.from_format, &mut rows)?;
        }
    }
    if let Some((path, query)) = &request.from_sqlite {
        read_sqlite(path, query, &mut rows)?;
    }
    rows.finish()
}

/// A wrong name at the end of the command line is told before a folder is searched for an hour.
fn check_sources(request: &AddRequest) -> Result<(), Error> {
    let is_stdin = |path: &&PathBuf| path.as_os_str() == STDIN;
    if request.from.iter().filter(is_stdin).count() > 1 {
        return Err(Error::Usage("standard input (--from -) can be read only once".into()));
    }
    for path in &request.sources {
        let kind = path.metadata().map_err(|e| source_error(path, io_reason(&e)))?.file_type();
        if !kind.is_file() && !kind.is_dir() {
            return Err(source_error(path, "neither a file nor a folder".into()));
        }
    }
    let sqlite = request.from_sqlite.iter().map(|(path, _)| path);
    for path in request.from.iter().filter(|p| !is_stdin(p)).chain(sqlite) {
        if path.metadata().map_err(|e| source_error(path, io_reason(&e)))?.is_dir() {
            return Err(source_error(path, "is a folder; give it without --from to search it for images".into()));
        }
    }
    Ok(())
}

fn read_records(path: &Path, reader: &mut dyn Read, format: Option<Format>, rows: &mut Rows<'_>) -> Result<(), Error> {
    let source = Source::open(path, reader, format, rows.names())?;
    match source.format {
        Format::List => list::read(source, rows),
        Format::Json => json::read_array(source, rows),
        Format::Jsonl => json::read_lines(source, rows),
        Format::Csv => delimited::read(source, rows),
    }
}

fn read_sqlite(path: &Path, query: &str, rows: &mut Rows<'_>) -> Result<(), Error> {
    let foreign = Foreign::open(path, query)?;
    let columns = foreign.columns()?;
    let header = rows.header(columns.iter().map(String::as_str)).map_err(|f| f.at(path, "the query"))?;
    let mut number = 0_u64;
    foreign.for_each(&mut |cells| {
        number += 1;
        rows.tabular(&header, |column| record::Value::from_sql(cells.get(column).copied()))
            .map_err(|f| f.at(path, format_args!("row {number} of the query")))
    })
}

fn source_error(path: &Path, reason: String) -> Error {
    Error::Source { path: path.to_path_buf(), reason }
}

fn io_reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or folder".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        _ => error.to_string(),
    }
}
