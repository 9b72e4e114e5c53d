//! Which format a file of rows is in, by its name and its first bytes. Reads nothing else of it.

use std::cell::Cell;
use std::io::{self, BufReader, Chain, Cursor, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::record::Names;
use super::{io_reason, source_error};
use crate::error::Error;

/// What decides the format. A list whose first NUL comes later counts as one path a line.
const HEAD_BYTES: u64 = 64 * 1024;

/// One record is held while it is read. A longer one, which is mostly a quote that nobody closed, ends the reading.
pub(super) const RECORD_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Size of the reads after the head.
const BUFFER_BYTES: usize = 256 * 1024;

/// How a file of rows is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One path a line, or NUL-separated as `find -print0` writes them. Bytes, not text.
    List,
    /// An array of objects, or of paths.
    Json,
    /// One object, or one path in quotes, a line.
    Jsonl,
    /// A header and records, separated by comma, semicolon or tab.
    Csv,
}

/// Beginnings of files that are given for a list by mistake, and what helps.
const MISTAKEN: [(&[u8], &str); 8] = [
    (b"\xff\xd8\xff", "is a JPEG, not a list; give it without --from"),
    (b"\x89PNG", "is a PNG, not a list; give it without --from"),
    (b"SQLite format 3\0", "is an SQLite database; give it with --from-sqlite and --query"),
    (b"PAR1\x15", "is a Parquet file; convert it to CSV or JSONL"),
    (b"PK\x03\x04", "is a ZIP archive or a spreadsheet; convert it to CSV"),
    (b"\x1f\x8b", "is compressed; pipe it through `zcat` into `--from -`"),
    (b"\xff\xfe", "is UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16; save it as UTF-8"),
];

/// In a table of one column there is no delimiter to tell it from a list. These words tell; `file` and
/// `image` could be names in a list.
const SINGLE_COLUMNS: [&str; 3] = ["path", "image_path", "filename"];

/// An opened file of rows, its format known.
pub(super) struct Source<'a> {
    /// For messages.
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// NUL bytes separate the paths of a list.
    pub(super) nul_separated: bool,
    /// Of a table.
    pub(super) delimiter: u8,
    pub(super) reader: BufReader<Metered<'a>>,
    pub(super) meter: Meter,
}

/// What may still be read for the record at hand.
#[derive(Clone)]
pub(super) struct Meter(Rc<Cell<u64>>);

impl Meter {
    /// The next record begins.
    pub(super) fn begin(&self) {
        self.0.set(RECORD_BYTES_MAX);
    }
}

/// The head and the rest of a file, with an end where a record has none.
pub(super) struct Metered<'a> {
    inner: Chain<Cursor<Vec<u8>>, &'a mut dyn Read>,
    meter: Meter,
}

impl Read for Metered<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.meter.0.get();
        if left == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a record longer than {RECORD_BYTES_MAX} bytes; is there a quote that is never closed?"),
            ));
        }
        let read = self.inner.read(out)?;
        self.meter.0.set(left.saturating_sub(read as u64));
        Ok(read)
    }
}

impl<'a> Source<'a> {
    /// Reads the head. A byte order mark is dropped.
    pub(super) fn open(
        path: &Path,
        reader: &'a mut dyn Read,
        given: Option<Format>,
        names: &Names,
    ) -> Result<Self, Error> {
        let mut head = Vec::new();
        (&mut *reader).take(HEAD_BYTES).read_to_end(&mut head).map_err(|e| source_error(path, io_reason(&e)))?;
        if let Some((_, what)) = MISTAKEN.iter().find(|(magic, _)| head.starts_with(magic)) {
            return Err(source_error(path, (*what).into()));
        }
        if head.starts_with(b"\xef\xbb\xbf") {
            head.drain(..3);
        }
        let table = Table::of(&head, names);
        let meter = Meter(Rc::new(Cell::new(RECORD_BYTES_MAX)));
        let inner = Cursor::new(head.clone()).chain(reader);
        Ok(Self {
            path: path.to_path_buf(),
            format: given.unwrap_or_else(|| detect(path, &head, &table)),
            nul_separated: head.contains(&0),
            delimiter: table.delimiter,
            reader: BufReader::with_capacity(BUFFER_BYTES, Metered { inner, meter: meter.clone() }),
            meter,
        })
    }

    /// An error of reading, not of what was read.
    pub(super) fn io_error(path: &Path, error: &std::io::Error) -> Error {
        source_error(path, io_reason(error))
    }
}

fn detect(path: &Path, head: &[u8], table: &Table) -> Format {
    let extension = path.extension().map(|e| e.to_ascii_lowercase());
    match extension.as_ref().and_then(|e| e.to_str()) {
        Some("csv" | "tsv") => return Format::Csv,
        Some("jsonl" | "ndjson") => return Format::Jsonl,
        // Files of this name are often one object a line.
        Some("json") if head.trim_ascii_start().first() == Some(&b'{') => return Format::Jsonl,
        Some("json") => return Format::Json,
        _ => {}
    }
    // A name may begin with a bracket; one that goes on like JSON is hardly met.
    let mut signs = head.iter().filter(|b| !b.is_ascii_whitespace());
    match (signs.next(), signs.next()) {
        (Some(b'['), Some(b'{' | b'"' | b']')) => Format::Json,
        (Some(b'{'), Some(b'"')) => Format::Jsonl,
        _ if head.contains(&0) => Format::List,
        _ if table.is_certain => Format::Csv,
        _ => Format::List,
    }
}

/// The first line, read as the header of a table.
struct Table {
    delimiter: u8,
    is_certain: bool,
}

impl Table {
    fn of(head: &[u8], names: &Names) -> Self {
        let mut best = (false, 1, b',');
        let mut is_certain = false;
        for delimiter in [b',', b';', b'\t'] {
            let fields = first_record(head, delimiter);
            let has_path = fields.iter().any(|f| names.is_path(f));
            let is_alone = |f: &String| names.is_given_path(f) || SINGLE_COLUMNS.contains(&f.as_str());
            is_certain |= has_path && (fields.len() > 1 || fields.iter().any(is_alone));
            if (has_path, fields.len()) > (best.0, best.1) {
                best = (has_path, fields.len(), delimiter);
            }
        }
        Self { delimiter: best.2, is_certain }
    }
}

fn first_record(head: &[u8], delimiter: u8) -> Vec<String> {
    let end = head.iter().position(|b| *b == b'\n').unwrap_or(head.len());
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).delimiter(delimiter).from_reader(&head[..end]);
    let record = reader.byte_records().next().and_then(Result::ok).unwrap_or_default();
    record.iter().map(|f| String::from_utf8_lossy(f.trim_ascii()).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::AddRequest;

    fn found(name: &str, content: &[u8]) -> Format {
        let mut reader = content;
        let names = Names::new(&AddRequest::default());
        match Source::open(Path::new(name), &mut reader, None, &names) {
            Ok(source) => source.format,
            Err(e) => panic!("{name}: {e}"),
        }
    }

    #[test]
    fn the_content_decides_where_the_name_says_nothing() {
        for (content, format) in [
            (&b"/a/b.jpg\n/c.jpg\n"[..], Format::List),
            (b"", Format::List),
            (b"a\0b\0", Format::List),
            (b"[old] photos/a.jpg\n", Format::List),
            (b"{draft}.jpg\n", Format::List),
            (b"a, b; c.jpg\n", Format::List),
            (b"image\nfile\n", Format::List),
            (b" [\n {\"path\": \"a\"}]", Format::Json),
            (b"[\"a.jpg\"]", Format::Json),
            (b"[]", Format::Json),
            (b"{\"path\": \"a\"}\n", Format::Jsonl),
            (b"path\n/a.jpg\n", Format::Csv),
            (b"id;image\n1;/a.jpg\n", Format::Csv),
            (b"\xef\xbb\xbf\"path\",\"tag\"\r\n", Format::Csv),
        ] {
            assert_eq!(found("standard input", content), format, "{:?}", String::from_utf8_lossy(content));
        }
    }

    #[test]
    fn the_extension_decides_before_the_content() {
        assert_eq!(found("a.CSV", b"x\n"), Format::Csv);
        assert_eq!(found("a.tsv", b"x\n"), Format::Csv);
        assert_eq!(found("a.ndjson", b"\"a\""), Format::Jsonl);
        assert_eq!(found("a.json", b"[1]"), Format::Json);
        assert_eq!(found("a.json", b"{\"path\":\"x\"}\n{"), Format::Jsonl);
    }

    #[test]
    fn the_delimiter_is_the_one_that_makes_a_path_column() {
        for (header, delimiter) in [
            ("path", b','),
            ("path,tag", b','),
            ("path;a,b,c", b';'),
            ("tag\tpath", b'\t'),
            ("\"a;b;c\",path", b','),
            ("x;y;z", b';'),
        ] {
            let names = Names::new(&AddRequest::default());
            assert_eq!(Table::of(header.as_bytes(), &names).delimiter, delimiter, "{header}");
        }
    }
}
