//! JSON arrays and lines, element by element: a file of a million objects is never held as a whole. What an
//! element has beside the known keys is skipped without being kept.

use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, Read};
use std::path::Path;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::format::{Meter, RECORD_BYTES_MAX, Source};
use super::record::{Fault, Record, Rows, Value};
use super::source_error;
use crate::error::Error;

/// Pushes a row for every element of the one array in the file.
pub(super) fn read_array(source: Source<'_>, rows: &mut Rows<'_>) -> Result<(), Error> {
    let path = source.path;
    let mut json = serde_json::Deserializer::from_reader(source.reader);
    let mut array = Array { rows, elements: 0, fault: None, meter: source.meter };
    let result = json.deserialize_seq(&mut array).and_then(|()| json.end());
    let (elements, fault) = (array.elements, array.fault);
    if elements == 0 {
        rows.no_records();
    }
    let Err(error) = result else { return Ok(()) };
    if error.is_io() {
        return Err(source_error(&path, error.to_string()));
    }
    let place = format!("element {elements}, line {}, column {}", error.line(), error.column());
    let place = if elements == 0 { format!("line {}", error.line()) } else { place };
    Err(fault.unwrap_or_else(|| Fault::Entry(message(&error))).at(&path, place))
}

/// Pushes a row for every line that is not blank.
pub(super) fn read_lines(mut source: Source<'_>, rows: &mut Rows<'_>) -> Result<(), Error> {
    let mut line = Vec::new();
    let mut any = false;
    for number in 1_u64.. {
        line.clear();
        source.meter.begin();
        let mut limited = source.reader.by_ref().take(RECORD_BYTES_MAX);
        if limited.read_until(b'\n', &mut line).map_err(|e| Source::io_error(&source.path, &e))? == 0 {
            break;
        }
        if line.len() as u64 == RECORD_BYTES_MAX {
            return Err(source_error(&source.path, format!("line {number}: longer than {RECORD_BYTES_MAX} bytes")));
        }
        if !line.trim_ascii().is_empty() {
            any = true;
            read_line(&line, number, &source.path, rows)?;
        }
    }
    if !any {
        rows.no_records();
    }
    Ok(())
}

fn read_line(line: &[u8], number: u64, path: &Path, rows: &mut Rows<'_>) -> Result<(), Error> {
    let mut json = serde_json::Deserializer::from_slice(line.trim_ascii_end());
    let mut fault = None;
    let result = Element { rows, fault: &mut fault }.deserialize(&mut json).and_then(|()| json.end());
    let Err(error) = result else { return Ok(()) };
    let fault = fault.unwrap_or_else(|| {
        Fault::Entry(format!("column {}: {}; expected one object a line", error.column(), message(&error)))
    });
    Err(fault.at(path, format_args!("line {number}")))
}

/// `serde_json`'s message without its place, which is counted from elsewhere.
fn message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_string()
}

/// The whole array.
struct Array<'r, 'a> {
    rows: &'r mut Rows<'a>,
    /// Begun, the one that failed included.
    elements: u64,
    fault: Option<Fault>,
    meter: Meter,
}

impl<'de> Visitor<'de> for &mut Array<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects or of paths")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            self.elements += 1;
            self.meter.begin();
            if seq.next_element_seed(Element { rows: self.rows, fault: &mut self.fault })?.is_none() {
                self.elements -= 1;
                return Ok(());
            }
        }
    }
}

/// One element: an object, or a path. What croprow says against it goes to `fault`, because an error of
/// `serde` cannot carry it.
struct Element<'r, 'a> {
    rows: &'r mut Rows<'a>,
    fault: &'r mut Option<Fault>,
}

impl Element<'_, '_> {
    fn settle<E: serde::de::Error>(self, taken: Result<(), Fault>) -> Result<(), E> {
        taken.map_err(|fault| {
            *self.fault = Some(fault);
            E::custom("not taken")
        })
    }
}

impl<'de> DeserializeSeed<'de> for Element<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Element<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a path")
    }

    fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<(), E> {
        let taken = self.rows.entry(path.as_bytes());
        self.settle(taken)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut record = Record::default();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if self.rows.wants(&key) {
                let value = map.next_value_seed(ValueSeed)?;
                self.rows.fill(&mut record, &key, &value);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        let taken = self.rows.record(record);
        self.settle(taken)
    }
}

/// The value of a known key.
struct ValueSeed;

impl<'de> DeserializeSeed<'de> for ValueSeed {
    type Value = Value<'static>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed {
    type Value = Value<'static>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, v: bool) -> Result<Self::Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<Self::Value, E> {
        Ok(Value::Integer(v.to_string()))
    }

    fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Self::Value, E> {
        Ok(Value::Integer(v.to_string()))
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Self::Value, E> {
        Ok(Value::Real(v))
    }

    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Self::Value, E> {
        Ok(Value::Text(Cow::Owned(v.as_bytes().to_vec())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut texts = Vec::new();
        let mut only_texts = true;
        while let Some(value) = seq.next_element_seed(ValueSeed)? {
            match value {
                Value::Text(bytes) => {
                    texts.push(String::from_utf8(bytes.into_owned()).map_err(A::Error::custom)?);
                }
                _ => only_texts = false,
            }
        }
        Ok(if only_texts { Value::List(texts) } else { Value::Other("a list of other things") })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Other("an object"))
    }
}
