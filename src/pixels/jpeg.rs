//! The markers of a JPEG file (ITU-T T.81, annex B): what its header promises, and whether its data
//! reaches an end. Decodes nothing.

use std::io::{self, BufRead, Read, Seek};

use crate::geometry::{Scale, Size};
use crate::row::RowCode;

use super::open::Refusal;

/// Bytes that are no marker are skipped between segments, as libjpeg does it; a file with more of them
/// than this is refused, so that a huge file of rubbish is not read to its end.
const GARBAGE_LIMIT: u64 = 64 * 1024;

/// One colour component of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Component {
    horizontal: u8,
    vertical: u8,
}

/// What stands before the first scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JpegHeader {
    /// As stored, before any turning.
    pub stored: Size,
    /// 1 grey, 3 YCbCr or RGB, 4 CMYK or YCCK.
    pub components: u8,
    /// Several passes over the whole picture.
    pub progressive: bool,
    /// Payload of the first Exif segment, with its `Exif\0\0`. Later ones are not looked at.
    pub exif: Option<Vec<u8>>,
    /// Bytes before the first scan.
    pub header_bytes: u64,
    /// A decoder must hold all coefficients at once: progressive, or one scan per component.
    pub needs_coefficients: bool,
    /// The components may be R, G and B themselves: a decoder stretches their planes as a whole.
    may_be_rgb: bool,
    sampling: Vec<Component>,
}

impl JpegHeader {
    /// Memory for all coefficients, 16 bits each, in whole blocks of 8 by 8. 0 where they are not held.
    pub fn coefficient_bytes(&self) -> u64 {
        if !self.needs_coefficients {
            return 0;
        }
        let blocks: u64 = self.sampling.iter().map(|c| u64::from(c.horizontal) * u64::from(c.vertical)).sum();
        self.units() * blocks * 64 * 2
    }

    /// Memory for the planes of all components before they become RGB, in whole blocks of `8 / denominator` pixels a
    /// side. Subsampled planes are decoded larger where that spares stretching them (`jpeg_calc_output_dimensions` of
    /// libjpeg-turbo); those that are still smaller are stretched row by row at full size, or else as a whole.
    pub fn plane_bytes(&self, scale: Scale) -> u64 {
        let (most_across, most_down) = self.most();
        let block = u64::from(8 / scale.denominator());
        let full = self.units() * most_across * most_down * block * block;
        let chroma = self.sampling.get(1..).unwrap_or_default();
        let by_rows = scale == Scale::FULL && !self.may_be_rgb && chroma.windows(2).all(|pair| pair[0] == pair[1]);
        let plane = |c: &Component| {
            let (across, down) = (u64::from(c.horizontal.max(1)), u64::from(c.vertical.max(1)));
            let mut side = block;
            while side < 8
                && (most_across * block) % (across * side * 2) == 0
                && (most_down * block) % (down * side * 2) == 0
            {
                side *= 2;
            }
            let own = self.units() * across * down * side * side;
            own + if own < full && !by_rows { full } else { 0 }
        };
        self.sampling.iter().map(plane).sum()
    }

    /// Largest sampling factors, across and down.
    fn most(&self) -> (u64, u64) {
        let most = |f: fn(&Component) -> u8| u64::from(self.sampling.iter().map(f).max().unwrap_or(1).max(1));
        (most(|c| c.horizontal), most(|c| c.vertical))
    }

    /// Number of MCUs of a scan that holds all components.
    fn units(&self) -> u64 {
        let (across, down) = self.most();
        u64::from(self.stored.width_px).div_ceil(8 * across) * u64::from(self.stored.height_px).div_ceil(8 * down)
    }
}

/// Reads up to the first scan, skipping what it does not need.
///
/// # Errors
/// `unsupported` names the coding; `truncated` where the file ends first; `decode` where no frame comes
/// before the first scan or the end; `io`.
pub(super) fn read_header<R: BufRead + Seek>(reader: &mut R) -> Result<JpegHeader, Refusal> {
    let mut start = [0; 2];
    reader.read_exact(&mut start)?;
    let mut frame: Option<Frame> = None;
    let (mut exif, mut adobe) = (None, false);
    loop {
        let marker = next_marker(reader)?;
        adobe |= marker == 0xee;
        match marker {
            // Parameterless: TEM, restarts, a second start.
            0x01 | 0xd0..=0xd8 => continue,
            0xd9 => return Err(Refusal::new(RowCode::Decode, "no picture before the end marker")),
            _ => {}
        }
        let length = segment_length(reader)?;
        match marker {
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf | 0xf7 => {
                // The first frame is the picture; more of them are the decoder's to refuse.
                let read = read_frame(reader, marker, length)?;
                frame.get_or_insert(read);
            }
            0xe1 if exif.is_none() => exif = read_exif(reader, length)?,
            0xda => {
                let frame = frame.ok_or_else(|| Refusal::new(RowCode::Decode, "a scan before any frame header"))?;
                return finish(reader, frame, exif, adobe);
            }
            _ => reader.seek_relative(length)?,
        }
    }
}

struct Frame {
    stored: Size,
    progressive: bool,
    named_rgb: bool,
    sampling: Vec<Component>,
}

/// At the first scan's header: its number of components tells whether the scan holds all of the picture.
fn finish<R: BufRead + Seek>(
    reader: &mut R,
    frame: Frame,
    exif: Option<Vec<u8>>,
    adobe: bool,
) -> Result<JpegHeader, Refusal> {
    let mut in_scan = [0; 1];
    reader.read_exact(&mut in_scan)?;
    Ok(JpegHeader {
        stored: frame.stored,
        components: frame.sampling.len() as u8,
        progressive: frame.progressive,
        exif,
        header_bytes: reader.stream_position()?,
        needs_coefficients: frame.progressive || usize::from(in_scan[0]) < frame.sampling.len(),
        may_be_rgb: adobe || frame.named_rgb,
        sampling: frame.sampling,
    })
}

/// The byte after one or more 0xFF. Other bytes are skipped.
fn next_marker<R: Read>(reader: &mut R) -> Result<u8, Refusal> {
    let mut byte = [0; 1];
    let mut after_ff = false;
    for _ in 0..GARBAGE_LIMIT {
        reader.read_exact(&mut byte)?;
        match byte[0] {
            0xff => after_ff = true,
            0 => after_ff = false,
            marker if after_ff => return Ok(marker),
            _ => {}
        }
    }
    Err(Refusal::new(RowCode::Decode, "no marker where one is due"))
}

/// Bytes that follow the length field.
fn segment_length<R: Read>(reader: &mut R) -> Result<i64, Refusal> {
    let mut length = [0; 2];
    reader.read_exact(&mut length)?;
    match u16::from_be_bytes(length) {
        0 | 1 => Err(Refusal::new(RowCode::Decode, "a segment with an impossible length")),
        n => Ok(i64::from(n) - 2),
    }
}

fn read_frame<R: BufRead>(reader: &mut R, marker: u8, length: i64) -> Result<Frame, Refusal> {
    let mut payload = vec![0; length as usize];
    reader.read_exact(&mut payload)?;
    let unsupported = |what: &str| Err(Refusal::new(RowCode::Unsupported, format!("{what} is not supported")));
    match marker {
        0xc0..=0xc2 => {}
        0xc3 => return unsupported("lossless JPEG"),
        0xc9..=0xcb | 0xcd..=0xcf => return unsupported("arithmetic-coded JPEG"),
        0xf7 => return unsupported("JPEG-LS"),
        _ => return unsupported("hierarchical JPEG"),
    }
    let [precision, h1, h0, w1, w0, count, components @ ..] = payload.as_slice() else {
        return Err(Refusal::new(RowCode::Decode, "a frame header that is too short"));
    };
    if *precision != 8 {
        return unsupported(&format!("{precision}-bit JPEG"));
    }
    let sampling: Vec<Component> = components
        .chunks_exact(3)
        .take(usize::from(*count))
        .map(|c| Component { horizontal: c[1] >> 4, vertical: c[1] & 15 })
        .collect();
    if sampling.is_empty() || sampling.len() != usize::from(*count) {
        return Err(Refusal::new(RowCode::Decode, "a frame header without its components"));
    }
    let stored = Size::new(u32::from(u16::from_be_bytes([*w1, *w0])), u32::from(u16::from_be_bytes([*h1, *h0])));
    let named_rgb = components.chunks_exact(3).map(|c| c[0]).eq(*b"RGB");
    Ok(Frame { stored, progressive: marker == 0xc2, named_rgb, sampling })
}

/// The segment's payload where it is Exif; APP1 also carries XMP.
fn read_exif<R: BufRead>(reader: &mut R, length: i64) -> io::Result<Option<Vec<u8>>> {
    let mut payload = vec![0; length as usize];
    reader.read_exact(&mut payload)?;
    Ok(payload.starts_with(b"Exif\0").then_some(payload))
}

/// True where the picture's data is followed by its end marker. A thumbnail's end inside a segment does
/// not count, nor does what comes after the end: trailing bytes, a second picture, a video.
///
/// Decoders fill what is missing with grey and say nothing, so this is the only sign of a file that was
/// cut. Data that is damaged in its middle is not noticed.
pub fn ends_properly(bytes: &[u8]) -> bool {
    walk(bytes).ends
}

/// The markers after the header.
pub(super) struct Walk {
    /// See [`ends_properly`].
    pub(super) ends: bool,
    /// Passes over the picture before its end.
    pub(super) scans: usize,
}

pub(super) fn walk(bytes: &[u8]) -> Walk {
    let mut at = 2;
    let mut scans = 0;
    while let Some(marker_at) = find_marker(bytes, at) {
        let marker = bytes[marker_at];
        at = marker_at + 1;
        match marker {
            0xd9 => return Walk { ends: scans > 0, scans },
            0x01 | 0xd0..=0xd8 => {}
            // Inside a scan only these may follow; any other marker there is damage that decoders pass over.
            0xc4 | 0xcc | 0xda..=0xdd | 0xe0..=0xef | 0xfe => {
                scans += usize::from(marker == 0xda);
                at = segment_end(bytes, at);
            }
            _ if scans > 0 => {}
            _ => at = segment_end(bytes, at),
        }
    }
    Walk { ends: false, scans }
}

/// Index of the byte after the next run of 0xFF that is not a stuffed zero.
fn find_marker(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += bytes.get(at..)?.iter().position(|b| *b == 0xff)?;
        while bytes.get(at) == Some(&0xff) {
            at += 1;
        }
        if *bytes.get(at)? != 0 {
            return Some(at);
        }
    }
}

/// End of the segment whose length field is at `at`; the end of the file where that is missing.
fn segment_end(bytes: &[u8], at: usize) -> usize {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<2>()) {
        Some(length) => at + usize::from(u16::from_be_bytes(*length)).max(2),
        None => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// SOI, an Exif segment, a frame of 5 by 3 with 2x2 sampling, a scan, an end.
    fn tiny(sof: u8) -> Vec<u8> {
        let mut bytes = vec![0xff, 0xd8];
        bytes.extend(b"\xff\xe1\x00\x0eExif\0\0one\xff\xd9!");
        bytes.extend([0xff, sof, 0, 17, 8, 0, 3, 0, 5, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1]);
        bytes.extend(b"\xff\xe1\x00\x0bExif\0\0two");
        bytes.extend([0xff, 0xda, 0, 12, 3, 1, 0, 2, 0x11, 3, 0x11, 0, 63, 0]);
        bytes.extend([0x12, 0xff, 0, 0x34, 0xff, 0xd0, 0x56, 0xff, 0xff, 0xd1, 0x78, 0xff, 0xd9]);
        bytes
    }

    fn header(bytes: &[u8]) -> Result<JpegHeader, Refusal> {
        read_header(&mut Cursor::new(bytes))
    }

    #[test]
    fn the_header_is_read_and_the_first_exif_wins() {
        let h = header(&tiny(0xc0)).unwrap();
        assert_eq!((h.stored, h.components, h.progressive), (Size::new(5, 3), 3, false));
        assert_eq!(h.exif.as_deref(), Some(b"Exif\0\0one\xff\xd9!".as_slice()));
        assert_eq!(h.coefficient_bytes(), 0);
    }

    #[test]
    fn a_progressive_file_costs_its_coefficients_in_whole_blocks() {
        let h = header(&tiny(0xc2)).unwrap();
        assert!(h.progressive);
        assert_eq!(h.coefficient_bytes(), 6 * 64 * 2);
    }

    #[test]
    fn a_sequential_file_with_one_scan_per_component_costs_them_too() {
        let mut bytes = tiny(0xc0);
        let scan = bytes.windows(2).position(|w| w == [0xff, 0xda]).unwrap();
        bytes[scan + 4] = 1;
        assert_eq!(header(&bytes).unwrap().coefficient_bytes(), 6 * 64 * 2);
    }

    #[test]
    fn planes_cost_what_they_take_at_each_scale() {
        // One MCU of 16 by 16: 4:2:0 is 1.5 samples a pixel at full size, and 3 where the colour planes are decoded
        // at the size of the picture.
        let bytes = |file: &[u8]| Scale::ALL.map(|scale| header(file).unwrap().plane_bytes(scale));
        assert_eq!(bytes(&tiny(0xc0)), [384, 192, 48, 12]);
        let adobe = [&tiny(0xc0)[..2], b"\xff\xee\0\x0eAdobe\0\0\0\0\0\0\0", &tiny(0xc0)[2..]].concat();
        assert_eq!(bytes(&adobe)[0], 384 + 2 * 256, "components that may be RGB are stretched as a whole");
        // 4:2:2 cannot be decoded larger: two planes are stretched.
        let mut wide = tiny(0xc0);
        let frame = wide.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
        wide[frame + 11] = 0x21;
        assert_eq!(bytes(&wide), [128 + 2 * 64, 32 + 2 * (16 + 32), 8 + 2 * (4 + 8), 2 + 2 * (1 + 2)]);
    }

    #[test]
    fn codings_that_cannot_be_decoded_are_named() {
        let cases = [
            (0xc3, "lossless JPEG"),
            (0xc5, "hierarchical JPEG"),
            (0xc9, "arithmetic-coded JPEG"),
            (0xca, "arithmetic-coded JPEG"),
            (0xf7, "JPEG-LS"),
        ];
        for (sof, name) in cases {
            let refusal = header(&tiny(sof)).unwrap_err();
            assert_eq!(refusal.code, RowCode::Unsupported);
            assert!(refusal.reason.starts_with(name), "{}", refusal.reason);
        }
        let mut twelve = tiny(0xc1);
        let frame = twelve.windows(2).position(|w| w == [0xff, 0xc1]).unwrap();
        twelve[frame + 4] = 12;
        assert_eq!(header(&twelve).unwrap_err().reason, "12-bit JPEG is not supported");
    }

    #[test]
    fn every_prefix_of_the_header_is_truncated() {
        let bytes = tiny(0xc0);
        let scan = bytes.windows(2).position(|w| w == [0xff, 0xda]).unwrap();
        for end in 0..scan + 5 {
            assert_eq!(header(&bytes[..end]).unwrap_err().code, RowCode::Truncated, "{end}");
        }
    }

    #[test]
    fn no_prefix_ends_properly_and_the_whole_does() {
        let bytes = tiny(0xc0);
        for end in 0..bytes.len() {
            assert!(!ends_properly(&bytes[..end]), "{end}");
        }
        assert!(ends_properly(&bytes));
    }

    #[test]
    fn what_follows_the_end_does_not_matter() {
        for tail in [b"\0\0\0".as_slice(), b"\xff\xff\xff", b"trailing", &tiny(0xc0)[..40]] {
            assert!(ends_properly(&[&tiny(0xc0), tail].concat()));
        }
    }

    #[test]
    fn several_scans_with_tables_between_them_are_walked() {
        let mut bytes = tiny(0xc2);
        bytes.truncate(bytes.len() - 2);
        // A table whose payload looks like an end, then a second scan.
        bytes.extend([0xff, 0xc4, 0, 4, 0xff, 0xd9]);
        bytes.extend([0xff, 0xda, 0, 8, 1, 1, 0, 1, 5, 0, 0x9a]);
        assert!(!ends_properly(&bytes));
        bytes.extend([0xff, 0xd9]);
        assert!(ends_properly(&bytes));
    }

    #[test]
    fn rubbish_without_a_marker_is_not_read_for_ever() {
        let mut bytes = vec![0xff, 0xd8];
        bytes.resize(1 << 20, 0x41);
        let mut cursor = Cursor::new(&bytes);
        assert_eq!(read_header(&mut cursor).unwrap_err().code, RowCode::Decode);
        assert!(cursor.position() < 100_000);
    }
}
