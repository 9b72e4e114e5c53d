//! From a record's named values, or a bare path, to a row. Knows no file format.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::{AddReport, AddRequest, ID_KEYS, PATH_KEYS, PROBLEMS_MAX, PROMPT_KEYS, Problem, TAG_KEYS, io_reason};
use crate::db::foreign::Cell;
use crate::error::Error;
use crate::pixels::root::lexical;
use crate::row::{FileStamp, NewRow};

/// Keys that are remembered for messages; a file whose keys are data must not fill the memory.
const SEEN_KEYS_MAX: usize = 24;

/// What a value can be for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Path,
    Prompt,
    Tag,
    Id,
}

impl Field {
    fn option(self) -> &'static str {
        match self {
            Self::Path => "--path-key",
            Self::Prompt => "--prompt-key",
            Self::Tag => "--tag-key",
            Self::Id => "--id-key",
        }
    }
}

/// A value as a format gives it. JSON, CSV and SQLite have these in common.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    /// Nothing: null, an empty cell.
    Null,
    /// Not always UTF-8.
    Text(Cow<'a, [u8]>),
    /// In decimal; JSON's may be beyond `i64`.
    Integer(String),
    Real(f64),
    Bool(bool),
    /// Texts only.
    List(Vec<String>),
    /// What it is instead, for the message.
    Other(&'static str),
}

impl<'a> Value<'a> {
    /// A cell of a query. `None`, a column that is not there, cannot be and counts as null.
    pub(super) fn from_sql(cell: Option<Cell<'a>>) -> Self {
        match cell {
            None | Some(Cell::Null) => Self::Null,
            Some(Cell::Integer(i)) => Self::Integer(i.to_string()),
            Some(Cell::Real(r)) => Self::Real(r),
            Some(Cell::Text(bytes) | Cell::Blob(bytes)) => Self::Text(Cow::Borrowed(bytes)),
        }
    }

    fn what(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Text(_) => "text",
            Self::Integer(_) | Self::Real(_) => "a number",
            Self::Bool(_) => "true or false",
            Self::List(_) => "a list",
            Self::Other(what) => what,
        }
    }

    /// Bytes of a path, which need not be UTF-8.
    fn into_path(self) -> Result<Cow<'a, [u8]>, String> {
        match self {
            Self::Text(bytes) => Ok(bytes),
            other => Err(format!("expected text, found {}", other.what())),
        }
    }

    fn into_prompt(self) -> Result<Option<String>, String> {
        match self {
            Self::Null => Ok(None),
            Self::Text(bytes) => utf8(bytes),
            Self::List(labels) if labels.is_empty() => Ok(None),
            Self::List(labels) => serde_json::to_string(&labels).map(Some).map_err(|e| e.to_string()),
            other => Err(format!("expected text or a list of texts, found {}", other.what())),
        }
    }

    fn into_word(self) -> Result<Option<String>, String> {
        match self {
            Self::Null => Ok(None),
            Self::Text(bytes) => utf8(bytes),
            Self::Integer(digits) => Ok(Some(digits)),
            Self::Bool(b) => Ok(Some(b.to_string())),
            // Tables with gaps turn whole numbers into 7.0. Beyond 2^53 two ids may have become one.
            Self::Real(r) if r.fract() == 0.0 && r.abs() < 9_007_199_254_740_992.0 => Ok(Some(format!("{r:.0}"))),
            Self::Real(r) => Err(format!("{r} is not a whole number that is kept exactly; write it as text")),
            other => Err(format!("expected text or a number, found {}", other.what())),
        }
    }
}

fn utf8(bytes: Cow<'_, [u8]>) -> Result<Option<String>, String> {
    let text = String::from_utf8(bytes.into_owned()).map_err(|_| "not UTF-8".to_string())?;
    Ok(Some(text).filter(|t| !t.is_empty()))
}

/// Why an entry could not be taken.
pub(super) enum Fault {
    /// What is wrong with it; the format adds where it is.
    Entry(String),
    /// The sink's own.
    Sink(Error),
}

impl Fault {
    /// The error of that source, at `place` in it.
    pub(super) fn at(self, path: &Path, place: impl fmt::Display) -> Error {
        match self {
            Self::Entry(reason) => Error::Source { path: path.to_path_buf(), reason: format!("{place}: {reason}") },
            Self::Sink(error) => error,
        }
    }
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Self::Entry(reason)
    }
}

/// The accepted names of each field, best first.
pub(super) struct Names([(Field, Vec<String>, bool); 4]);

impl Names {
    pub(super) fn new(request: &AddRequest) -> Self {
        let of = |field, given: &Option<String>, default: &[&str]| match given {
            Some(name) => (field, vec![name.clone()], true),
            None => (field, default.iter().map(ToString::to_string).collect(), false),
        };
        let keys = &request.keys;
        Self([
            of(Field::Path, &keys.path, &PATH_KEYS),
            of(Field::Prompt, &keys.prompt, &PROMPT_KEYS),
            of(Field::Tag, &keys.tag, &TAG_KEYS),
            of(Field::Id, &keys.id, &ID_KEYS),
        ])
    }

    /// The fields that a key is for, with its rank among the names of each: 0 is the best. One key may be
    /// the prompt and the tag.
    fn of_key<'n>(&'n self, key: &'n str) -> impl Iterator<Item = (usize, usize)> + 'n {
        let rank = move |names: &[String]| names.iter().position(|n| n == key);
        self.0.iter().enumerate().filter_map(move |(field, (_, names, _))| Some((field, rank(names)?)))
    }

    /// The key may name the file.
    pub(super) fn is_path(&self, key: &str) -> bool {
        self.0[0].1.iter().any(|n| n == key)
    }

    /// The user said that this key names the file.
    pub(super) fn is_given_path(&self, key: &str) -> bool {
        self.0[0].2 && self.is_path(key)
    }
}

/// The columns of a table that are of use, by field.
pub(super) struct Header([Option<usize>; 4]);

/// The values of one record that are of use, by field, with the rank of the key they came under.
#[derive(Default)]
pub(super) struct Record<'a>([Option<(usize, Value<'a>)>; 4]);

/// Receives entries from the formats, makes rows of them and pushes these into the sink.
pub(super) struct Rows<'a> {
    base: Base,
    names: Names,
    prompt: Option<String>,
    tag: Option<String>,
    sink: &'a mut dyn FnMut(NewRow) -> Result<(), Error>,
    report: AddReport,
    /// By field: some record had a key for it.
    met: [bool; 4],
    seen: Vec<String>,
    /// A file that could have had keys had no record to show them.
    empty_record_source: bool,
}

impl<'a> Rows<'a> {
    pub(super) fn new(
        request: &AddRequest,
        sink: &'a mut dyn FnMut(NewRow) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        Ok(Self {
            base: Base::new(request.root.as_deref())?,
            names: Names::new(request),
            prompt: request.prompt.clone(),
            tag: request.tag.clone(),
            sink,
            report: AddReport::default(),
            met: [false; 4],
            seen: Vec::new(),
            empty_record_source: false,
        })
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// What the walk counts.
    pub(super) fn report_mut(&mut self) -> &mut AddReport {
        &mut self.report
    }

    /// An entry that could not be read; the scan goes on.
    pub(super) fn unreadable(&mut self, path: &Path, error: &std::io::Error) {
        self.report.unreadable += 1;
        if self.report.problems.len() < PROBLEMS_MAX {
            self.report.problems.push(Problem { path: path.to_path_buf(), reason: io_reason(error) });
        }
    }

    /// A file that was found and stat-ed. `path` is absolute.
    pub(super) fn file(&mut self, path: PathBuf, stamp: FileStamp) -> Result<(), Error> {
        let (prompt, tag) = (self.prompt.clone(), self.tag.clone());
        self.push(NewRow { path, key: None, prompt, tag, stamp: Some(stamp) })
    }

    /// A path from a list, as the list has it.
    pub(super) fn entry(&mut self, path: &[u8]) -> Result<(), Fault> {
        let path = self.base.resolve(path)?;
        let (prompt, tag) = (self.prompt.clone(), self.tag.clone());
        self.push(NewRow { path, key: None, prompt, tag, stamp: None }).map_err(Fault::Sink)
    }

    /// Notes `key` and says whether its value is of use.
    pub(super) fn wants(&mut self, key: &str) -> bool {
        self.note(key);
        let mut wanted = false;
        for (field, _) in self.names.of_key(key) {
            self.met[field] = true;
            wanted = true;
        }
        wanted
    }

    /// Puts the value of `key` where it belongs. A worse name never replaces a better one.
    pub(super) fn fill<'v>(&self, record: &mut Record<'v>, key: &str, value: &Value<'v>) {
        for (field, rank) in self.names.of_key(key) {
            let slot = &mut record.0[field];
            if slot.as_ref().is_none_or(|(held, _)| rank <= *held) {
                *slot = Some((rank, value.clone()));
            }
        }
    }

    /// Finds the columns of a table.
    pub(super) fn header<'k>(&mut self, columns: impl Iterator<Item = &'k str>) -> Result<Header, Fault> {
        let mut found: [Option<(usize, usize)>; 4] = [None; 4];
        for (column, key) in columns.enumerate() {
            self.note(key);
            for (field, rank) in self.names.of_key(key) {
                self.met[field] = true;
                if found[field].is_none_or(|(held, _)| rank < held) {
                    found[field] = Some((rank, column));
                }
            }
        }
        if found[0].is_none() {
            return Err(self.no_path("column"));
        }
        Ok(Header(found.map(|f| f.map(|(_, column)| column))))
    }

    /// One line of a table; `cell` gives the value of a column.
    pub(super) fn tabular<'v>(&mut self, header: &Header, cell: impl Fn(usize) -> Value<'v>) -> Result<(), Fault> {
        self.record(Record(header.0.map(|column| column.map(|c| (0, cell(c))))))
    }

    /// One record.
    pub(super) fn record(&mut self, record: Record<'_>) -> Result<(), Fault> {
        let [path, prompt, tag, id] = record.0.map(|slot| slot.map(|(_, value)| value));
        let Some(path) = path else {
            return Err(self.no_path("key"));
        };
        let path = path.into_path().and_then(|p| self.base.resolve(&p)).map_err(|e| format!("path: {e}"))?;
        let prompt = prompt.map_or(Ok(None), Value::into_prompt).map_err(|e| format!("prompt: {e}"))?;
        let tag = tag.map_or(Ok(None), Value::into_word).map_err(|e| format!("tag: {e}"))?;
        let key = id.map_or(Ok(None), Value::into_word).map_err(|e| format!("id: {e}"))?;
        let (prompt, tag) = (prompt.or_else(|| self.prompt.clone()), tag.or_else(|| self.tag.clone()));
        self.push(NewRow { path, key, prompt, tag, stamp: None }).map_err(Fault::Sink)
    }

    /// A file of records turned out to hold none.
    pub(super) fn no_records(&mut self) {
        self.empty_record_source = true;
    }

    /// The report, once every source is read.
    pub(super) fn finish(self) -> Result<AddReport, Error> {
        let missing = |(met, (_, _, given)): &(&bool, &(Field, Vec<String>, bool))| *given && !**met;
        let Some((_, (field, names, _))) = self.met.iter().zip(&self.names.0).find(missing) else {
            return Ok(self.report);
        };
        if self.seen.is_empty() && self.empty_record_source {
            return Ok(self.report);
        }
        let seen = if self.seen.is_empty() {
            "no source has keys: they come with JSON, JSONL, CSV and SQLite".to_string()
        } else {
            format!("keys seen: {}", quoted(&self.seen))
        };
        Err(Error::Usage(format!("{} {}: no record has it; {seen}", field.option(), names.join(", "))))
    }

    fn push(&mut self, row: NewRow) -> Result<(), Error> {
        self.report.rows += 1;
        (self.sink)(row)
    }

    fn note(&mut self, key: &str) {
        if self.seen.len() < SEEN_KEYS_MAX && !self.seen.iter().any(|s| s == key) {
            self.seen.push(key.to_string());
        }
    }

    fn no_path(&self, word: &str) -> Fault {
        let seen = if self.seen.is_empty() { "none".to_string() } else { quoted(&self.seen) };
        let expected = self.names.0[0].1.join(", ");
        Fault::Entry(format!(
            "no {word} for the path: expected {expected}; seen: {seen}; --path-key NAME names another"
        ))
    }
}

/// Keys are data: control characters in them must not reach a terminal.
fn quoted(keys: &[String]) -> String {
    keys.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ")
}

/// Where relative paths begin.
struct Base {
    dir: PathBuf,
    contained: bool,
}

impl Base {
    fn new(root: Option<&Path>) -> Result<Self, Error> {
        let dir = std::path::absolute(root.unwrap_or(Path::new("."))).map_err(|e| Error::Source {
            path: root.unwrap_or(Path::new(".")).to_path_buf(),
            reason: format!("cannot be made absolute: {e}"),
        })?;
        Ok(Self { dir, contained: root.is_some() })
    }

    /// The absolute path. Links are not resolved and the disk is not asked, so the check against the root is
    /// one of words: a link below the root may still lead out of it.
    fn resolve(&self, bytes: &[u8]) -> Result<PathBuf, String> {
        let path = Path::new(OsStr::from_bytes(bytes));
        if bytes.is_empty() {
            return Err("the path is empty".into());
        }
        if bytes.contains(&0) {
            return Err(format!("{path:?}: a path cannot hold a NUL byte"));
        }
        if self.contained && self.leaves(path) {
            return Err(format!("{path:?} leads out of the root {:?}", self.dir));
        }
        std::path::absolute(self.dir.join(path)).map_err(|e| format!("{path:?}: {e}"))
    }

    fn leaves(&self, path: &Path) -> bool {
        if path.is_absolute() {
            return lexical(path).is_none_or(|p| lexical(&self.dir).is_none_or(|dir| !p.starts_with(dir)));
        }
        lexical(path).is_none()
    }
}
