//! Lists: one path a line, or separated by NUL. Names are bytes and kept as they are, with the spaces at
//! their ends and the dashes at their beginnings. A name with a newline needs the NUL form, or JSON.

use std::io::{BufRead, Read};

use super::format::Source;
use super::record::{Fault, Rows};
use crate::error::Error;

/// Longer than any path that Linux takes (4096). Reached by files that are no lists; ends the reading.
const ENTRY_BYTES_MAX: u64 = 64 * 1024;

/// Pushes a row for every entry that is not empty.
pub(super) fn read(mut source: Source<'_>, rows: &mut Rows<'_>) -> Result<(), Error> {
    let (separator, word) = if source.nul_separated { (0, "entry") } else { (b'\n', "line") };
    let mut line = Vec::new();
    for number in 1_u64.. {
        line.clear();
        source.meter.begin();
        let mut limited = source.reader.by_ref().take(ENTRY_BYTES_MAX);
        if limited.read_until(separator, &mut line).map_err(|e| Source::io_error(&source.path, &e))? == 0 {
            break;
        }
        let too_long = line.len() as u64 == ENTRY_BYTES_MAX && line.last() != Some(&separator);
        let entry = entry_of(&line, separator);
        let taken = match entry {
            _ if too_long => Err(Fault::Entry("longer than a path can be; expected one path a line".into())),
            [] => Ok(()),
            entry => rows.entry(entry),
        };
        taken.map_err(|f| f.at(&source.path, format_args!("{word} {number}")))?;
    }
    Ok(())
}

fn entry_of(line: &[u8], separator: u8) -> &[u8] {
    let entry = line.strip_suffix(&[separator]).unwrap_or(line);
    if separator == 0 { entry } else { entry.strip_suffix(b"\r").unwrap_or(entry) }
}
