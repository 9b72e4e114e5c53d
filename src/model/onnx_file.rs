//! Which other files a graph takes its weights from. Walks the protobuf of an `.onnx` file without loading it:
//! weights are skipped by seeking, nothing is allocated by a length that the file claims, nesting is bounded.
//! Knows nothing of what the graph computes, and follows no path.
//!
//! Source of the field numbers: `onnx.proto` (IR version 13).

use std::collections::BTreeMap;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom};

/// Read buffer. Graphs of a million small nodes are read through it once.
const BUFFER_BYTES: usize = 1 << 16;

/// Graphs inside graphs inside graphs: what exporters write stays below ten. Beyond it the file is refused.
const DEPTH_MOST: usize = 64;

/// Longest key, number or path that is read. A longer one is refused.
const TEXT_BYTES_MOST: u64 = 4096;

/// Different files of one graph. Exporters write one, splitters some dozens; more is refused.
const FILES_MOST: usize = 10_000;

/// `TensorProto.DataLocation.EXTERNAL`.
const EXTERNAL: u64 = 1;

/// External weights by the path that the graph writes, each with the bytes that its file must have.
pub(super) type Locations = BTreeMap<String, u64>;

/// The external weights that a graph names.
///
/// # Errors
/// What is no protobuf or ends too early gives `InvalidData`; the text is a fragment for a message.
pub(super) fn external_data(file: impl Read + Seek) -> io::Result<Locations> {
    let mut walker = Walker::new(file)?;
    let end = walker.end;
    walker.message(Kind::Model, end, 0)?;
    Ok(walker.found)
}

/// The messages on the way to a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Function,
    Graph,
    Node,
    Attribute,
    Sparse,
    Tensor,
}

impl Kind {
    /// What field `number` holds, where it can lead to a tensor.
    fn of_field(self, number: u64) -> Option<Self> {
        match (self, number) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) => Some(Self::Graph),
            (Self::Model, 25) => Some(Self::Function),
            (Self::Graph, 1) | (Self::Function, 7) => Some(Self::Node),
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) | (Self::Sparse, 1 | 2) => Some(Self::Tensor),
            (Self::Graph, 15) | (Self::Attribute, 22 | 23) => Some(Self::Sparse),
            (Self::Node, 5) | (Self::Function, 11) => Some(Self::Attribute),
            _ => None,
        }
    }
}

/// What a field begins with.
enum Field {
    Number {
        number: u64,
        value: u64,
    },
    /// Ends at that position of the file.
    Bytes {
        number: u64,
        end: u64,
    },
    /// Of a fixed length, and passed over.
    Skipped,
}

/// What one tensor says of its weights.
#[derive(Default)]
struct External {
    is_external: bool,
    location: Option<String>,
    offset: u64,
    length: u64,
}

struct Walker<F> {
    file: BufReader<F>,
    at: u64,
    end: u64,
    found: Locations,
}

impl<F: Read + Seek> Walker<F> {
    fn new(mut file: F) -> io::Result<Self> {
        let end = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        Ok(Self { file: BufReader::with_capacity(BUFFER_BYTES, file), at: 0, end, found: Locations::new() })
    }

    /// Reads the fields up to `end` and goes into those that can lead to a tensor.
    fn message(&mut self, kind: Kind, end: u64, depth: usize) -> io::Result<()> {
        if depth > DEPTH_MOST {
            return Err(invalid("graphs are nested too deeply"));
        }
        let mut external = External::default();
        while self.at < end {
            match self.field(end)? {
                Field::Bytes { number, end } => match kind.of_field(number) {
                    Some(inner) => self.message(inner, end, depth + 1)?,
                    None if kind == Kind::Tensor && number == 13 => self.entry(end, &mut external)?,
                    None => self.skip_to(end)?,
                },
                Field::Number { number: 14, value } if kind == Kind::Tensor => {
                    external.is_external = value == EXTERNAL;
                }
                Field::Number { .. } | Field::Skipped => {}
            }
        }
        if external.is_external { self.remember(external) } else { Ok(()) }
    }

    fn remember(&mut self, external: External) -> io::Result<()> {
        let location = external.location.ok_or_else(|| invalid("external weights without a file's name"))?;
        let needed = external
            .offset
            .checked_add(external.length)
            .ok_or_else(|| invalid("external weights of an impossible length"))?;
        let longest = self.found.entry(location).or_default();
        *longest = needed.max(*longest);
        if self.found.len() > FILES_MOST {
            return Err(invalid("too many files of external weights"));
        }
        Ok(())
    }

    /// One `StringStringEntryProto` of `external_data`.
    fn entry(&mut self, end: u64, external: &mut External) -> io::Result<()> {
        let (mut key, mut value) = (String::new(), String::new());
        while self.at < end {
            match self.field(end)? {
                Field::Bytes { number: 1, end } => key = self.text(end)?,
                Field::Bytes { number: 2, end } => value = self.text(end)?,
                Field::Bytes { end, .. } => self.skip_to(end)?,
                Field::Number { .. } | Field::Skipped => {}
            }
        }
        let count = || value.parse::<u64>().map_err(|_| invalid("external weights of an impossible length"));
        match key.as_str() {
            "location" => external.location = Some(value),
            "offset" => external.offset = count()?,
            "length" => external.length = count()?,
            _ => {}
        }
        Ok(())
    }

    fn field(&mut self, end: u64) -> io::Result<Field> {
        let key = self.varint(end)?;
        let number = key >> 3;
        match key & 7 {
            _ if number == 0 => Err(invalid("a field without a number")),
            0 => Ok(Field::Number { number, value: self.varint(end)? }),
            2 => {
                let length = self.varint(end)?;
                let field_end = self.at.checked_add(length).filter(|e| *e <= end).ok_or_else(too_early)?;
                Ok(Field::Bytes { number, end: field_end })
            }
            kind @ (1 | 5) => {
                let field_end = self.at + if kind == 1 { 8 } else { 4 };
                if field_end > end {
                    return Err(too_early());
                }
                self.skip_to(field_end)?;
                Ok(Field::Skipped)
            }
            _ => Err(invalid("a field of an unknown kind")),
        }
    }

    fn varint(&mut self, end: u64) -> io::Result<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            if self.at >= end {
                return Err(too_early());
            }
            let mut byte = [0];
            self.file.read_exact(&mut byte)?;
            self.at += 1;
            value |= u64::from(byte[0] & 0x7f) << shift;
            if byte[0] < 0x80 {
                return Ok(value);
            }
        }
        Err(invalid("a number that does not end"))
    }

    fn text(&mut self, end: u64) -> io::Result<String> {
        let length = end - self.at;
        if length > TEXT_BYTES_MOST {
            return Err(invalid("a name that is too long"));
        }
        let mut bytes = Vec::new();
        self.file.by_ref().take(length).read_to_end(&mut bytes)?;
        self.at = end;
        String::from_utf8(bytes).map_err(|_| invalid("a name that is no text"))
    }

    /// `end` lies inside the file: every length was checked against its message, and that against the file's.
    fn skip_to(&mut self, end: u64) -> io::Result<()> {
        self.file.seek_relative(end.saturating_sub(self.at) as i64)?;
        self.at = end;
        Ok(())
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why.to_owned())
}

fn too_early() -> io::Error {
    invalid("it ends too early")
}

/// Builds the bytes of small graphs for tests.
#[cfg(test)]
pub(super) mod sample {
    /// A field of bytes.
    pub(in crate::model) fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        varint(u64::from(number) << 3 | 2, &mut out);
        varint(content.len() as u64, &mut out);
        out.extend(content);
        out
    }

    pub(in crate::model) fn number(number: u8, value: u64) -> Vec<u8> {
        let mut out = Vec::new();
        varint(u64::from(number) << 3, &mut out);
        varint(value, &mut out);
        out
    }

    fn varint(mut value: u64, out: &mut Vec<u8>) {
        while value >= 0x80 {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
    }

    /// A tensor whose weights lie elsewhere.
    pub(in crate::model) fn tensor(entries: &[(&str, &str)]) -> Vec<u8> {
        let entry =
            |(key, value): &(&str, &str)| bytes(13, &[bytes(1, key.as_bytes()), bytes(2, value.as_bytes())].concat());
        [entries.iter().flat_map(entry).collect(), number(14, 1)].concat()
    }

    /// A model of nothing but those initializers.
    pub(in crate::model) fn model(tensors: &[Vec<u8>]) -> Vec<u8> {
        let graph: Vec<u8> = tensors.iter().flat_map(|t| bytes(5, t)).collect();
        [number(1, 8), bytes(7, &graph)].concat()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::sample::{bytes, model, number, tensor};
    use super::*;

    fn of(content: &[u8]) -> io::Result<Vec<(String, u64)>> {
        Ok(external_data(Cursor::new(content))?.into_iter().collect())
    }

    fn weights(location: &str, offset: &str, length: &str) -> Vec<u8> {
        tensor(&[("location", location), ("offset", offset), ("length", length)])
    }

    #[test]
    fn the_files_of_initializers_are_listed_with_the_length_they_need() {
        let inside = [bytes(9, &[7; 300]), bytes(8, b"raw")].concat();
        let graph =
            model(&[weights("a.bin", "0", "100"), weights("b/c", "4096", "8"), weights("a.bin", "100", "28"), inside]);
        assert_eq!(of(&graph).unwrap(), [("a.bin".to_owned(), 128), ("b/c".to_owned(), 4104)]);
        assert_eq!(of(&model(&[tensor(&[("location", "w")])])).unwrap(), [("w".to_owned(), 0)]);
    }

    #[test]
    fn weights_in_constants_subgraphs_functions_and_sparse_tensors_are_listed() {
        let attribute = |field: u8, content: &[u8]| bytes(5, &bytes(field, content));
        let constant = |name: &str| bytes(1, &attribute(5, &weights(name, "0", "1")));
        let branch = bytes(1, &attribute(6, &constant("branch")));
        let sparse = bytes(15, &bytes(1, &weights("sparse", "0", "1")));
        let function = bytes(7, &attribute(5, &weights("function", "0", "1")));
        let graph = [bytes(7, &[constant("constant"), branch, sparse].concat()), bytes(25, &function)].concat();
        let names: Vec<String> = of(&graph).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["branch", "constant", "function", "sparse"]);
    }

    #[test]
    fn a_tensor_that_holds_its_weights_names_no_file() {
        let stale = [bytes(13, &[bytes(1, b"location"), bytes(2, b"old")].concat()), number(14, 0)].concat();
        assert_eq!(of(&model(&[stale])).unwrap(), []);
    }

    #[test]
    fn what_is_no_graph_is_an_error_and_nothing_worse() {
        let whole = model(&[weights("a.bin", "0", "100")]);
        for cut in 3..whole.len() {
            assert!(of(&whole[..cut]).is_err(), "{cut} of {}", whole.len());
        }
        let deep = (0..200).fold(Vec::new(), |inner, _| bytes(1, &bytes(5, &bytes(6, &inner))));
        let huge = [0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
        let long = model(&[weights(&"x".repeat(5000), "0", "1")]);
        for (content, words) in [
            (bytes(7, &deep), "nested too deeply"),
            (huge.to_vec(), "ends too early"),
            (vec![0xff; 20], "does not end"),
            (b"not a graph at all".to_vec(), ""),
            (long, "too long"),
            (model(&[weights("a", "-1", "3")]), "impossible length"),
            (model(&[weights("a", "18446744073709551615", "3")]), "impossible length"),
            (model(&[tensor(&[("offset", "0")])]), "without a file's name"),
        ] {
            let text = of(&content).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked_to_an_end(content in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = of(&content);
        }

        #[test]
        fn a_graph_with_any_bytes_changed_is_walked_to_an_end(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)
        ) {
            let mut content = model(&[weights("a.bin", "0", "100"), weights("b/c", "4096", "8")]);
            for (place, value) in changes {
                let place = place.index(content.len());
                content[place] = value;
            }
            let _ = of(&content);
        }
    }
}
