//! CSV as RFC 4180 has it, with a header, separated by comma, semicolon or tab. Paths are bytes; the other
//! cells are UTF-8.

use std::borrow::Cow;
use std::io::{Cursor, Read};

use csv::ByteRecord;

use super::format::Source;
use super::record::{Fault, Rows, Value};
use crate::error::Error;

/// A last record put behind the file. `csv` takes the end of the file for a closing quote; where this line
/// does not come out as a record of its own, a quote in the file was never closed and has swallowed rows.
const SENTINEL: &[u8] = b"\x01end of the table\x01";

/// Pushes a row for every record.
pub(super) fn read(source: Source<'_>, rows: &mut Rows<'_>) -> Result<(), Error> {
    let Source { path, meter, delimiter, reader, .. } = source;
    let end = [b"\n", SENTINEL].concat();
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .delimiter(delimiter)
        .from_reader(reader.chain(Cursor::new(end)));
    let mut record = ByteRecord::new();
    let mut header = None;
    let mut width = 0;
    loop {
        meter.begin();
        let more = reader.read_byte_record(&mut record).map_err(|e| csv_error(&path, e))?;
        if !more || (record.len() == 1 && &record[0] == SENTINEL) {
            break;
        }
        let line = record.position().map_or(0, csv::Position::line);
        let place = format_args!("line {line}");
        if record.iter().next_back().is_some_and(|cell| cell.ends_with(SENTINEL)) {
            return Err(Fault::Entry("a quote in this record is never closed".into()).at(&path, place));
        }
        let Some(known) = &header else {
            width = record.len();
            let names: Vec<_> = record.iter().map(|cell| String::from_utf8_lossy(cell.trim_ascii())).collect();
            header = Some(rows.header(names.iter().map(AsRef::as_ref)).map_err(|f| f.at(&path, place))?);
            continue;
        };
        if record.len() != width {
            let reason = format!("{} cells, expected {width} as in the header", record.len());
            return Err(Fault::Entry(reason).at(&path, place));
        }
        rows.tabular(known, |column| value(record.get(column))).map_err(|f| f.at(&path, place))?;
    }
    if header.is_none() {
        return Err(Fault::Entry("the table is empty: expected a header".into()).at(&path, "line 1"));
    }
    Ok(())
}

fn value(cell: Option<&[u8]>) -> Value<'_> {
    match cell {
        None | Some([]) => Value::Null,
        Some(bytes) => Value::Text(Cow::Borrowed(bytes)),
    }
}

fn csv_error(path: &std::path::Path, error: csv::Error) -> Error {
    match error.into_kind() {
        csv::ErrorKind::Io(e) => Source::io_error(path, &e),
        other => super::source_error(path, format!("{other:?}")),
    }
}
