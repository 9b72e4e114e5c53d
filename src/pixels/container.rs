//! What the containers other than JPEG say before their pixels: size and orientation, read by hand and
//! without allocating, because the decoders trust their headers. Then the decoder itself.

use std::io::{self, BufRead, Read, Seek, SeekFrom};

use image::codecs::bmp::BmpDecoder;
use image::codecs::gif::GifDecoder;
use image::codecs::jpeg::JpegDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::tiff::TiffDecoder;
use image::codecs::webp::WebPDecoder;
use image::{ImageDecoder, ImageResult, Limits};

use crate::geometry::{Orientation, Size};
use crate::row::RowCode;

use super::open::Refusal;
use super::orient;
use super::sniff::Format;

/// A longer Exif block is not read; cameras write below 64 KiB, as JPEG's segments end there.
const EXIF_BYTES_MAX: u64 = 1 << 20;

/// What a PNG may hold beside its pixels: its chunks several times over, because the decoder copies and
/// unpacks them, and a colour profile that it inflates. Exceeding it fails the image.
const PNG_METADATA_MIN: u64 = 256 << 10;
const PNG_PROFILE: u64 = 4 << 20;
const PNG_METADATA_MAX: u64 = 64 << 20;

/// Chunks that are walked over on the way to the picture; files have a dozen. More are refused: a file of nothing but
/// empty chunks, which takes no room on a disk that stores holes, would be read for hours.
const CHUNKS_MAX: usize = 10_000;

/// A container's header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outline {
    pub(super) stored: Size,
    pub(super) orientation: Option<Orientation>,
    /// Only the first frame is decoded, but composed on a canvas.
    pub(super) animated: bool,
    /// Bytes that the decoder may spend on other things than pixels.
    pub(super) metadata_bytes: u64,
}

impl Outline {
    fn of(stored: Size) -> Self {
        Self { stored, orientation: None, animated: false, metadata_bytes: 0 }
    }
}

/// Reads the outline; the reader stands at the file's beginning.
///
/// # Errors
/// `truncated`, `decode`, `unsupported` or `io`.
pub(super) fn outline<R: BufRead + Seek>(format: Format, r: &mut R, file_bytes: u64) -> Result<Outline, Refusal> {
    match format {
        Format::Png => png(r),
        Format::WebP => webp(r, file_bytes),
        Format::Gif => gif(r),
        Format::Bmp => bmp(r),
        Format::Tiff => tiff(r),
        Format::Jpeg => Err(Refusal::new(RowCode::Decode, "a JPEG has no outline here")),
    }
}

/// The decoder for a format. Only PNG heeds `metadata_bytes` at this point.
pub(super) fn open_decoder<'a, R: BufRead + Seek + 'a>(
    format: Format,
    reader: R,
    metadata_bytes: u64,
) -> ImageResult<Box<dyn ImageDecoder + 'a>> {
    Ok(match format {
        Format::Jpeg => Box::new(JpegDecoder::new(reader)?),
        Format::Png => Box::new(PngDecoder::with_limits(reader, limits(metadata_bytes))?),
        Format::WebP => Box::new(WebPDecoder::new(reader)?),
        Format::Gif => Box::new(GifDecoder::new(reader)?),
        Format::Bmp => Box::new(BmpDecoder::new(reader)?),
        Format::Tiff => Box::new(TiffDecoder::new(reader)?),
    })
}

/// Limits that are about memory only.
pub(super) fn limits(max_alloc_bytes: u64) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(max_alloc_bytes);
    limits
}

/// PNG specification, third edition, sections 5 and 11. `eXIf` after the image data is ignored: a reader
/// of streams could not know of it in time.
fn png<R: BufRead + Seek>(r: &mut R) -> Result<Outline, Refusal> {
    r.seek_relative(8)?;
    let (mut first, mut seen) = (true, Outline::of(Size::new(0, 0)));
    let mut other_bytes = PNG_METADATA_MIN;
    for _ in 0..CHUNKS_MAX {
        let head: [u8; 8] = read_array(r)?;
        let length = u64::from(be_u32(&head, 0));
        let mut left = length + 4;
        match &head[4..] {
            b"IHDR" if first => {
                let sides: [u8; 8] = read_array(r)?;
                seen.stored = Size::new(be_u32(&sides, 0), be_u32(&sides, 4));
                left = left.saturating_sub(8);
            }
            _ if first => return Err(Refusal::new(RowCode::Decode, "a PNG that does not begin with its header")),
            b"IDAT" | b"IEND" => {
                seen.metadata_bytes = other_bytes.min(PNG_METADATA_MAX);
                return Ok(seen);
            }
            b"eXIf" if seen.orientation.is_none() && length <= EXIF_BYTES_MAX => {
                seen.orientation = orient::from_exif_block(&read_vec(r, length)?);
                left = 4;
            }
            b"iCCP" => other_bytes += PNG_PROFILE,
            _ => {}
        }
        first = false;
        other_bytes += 4 * length;
        skip(r, left)?;
    }
    Err(too_many_chunks())
}

fn too_many_chunks() -> Refusal {
    Refusal::new(RowCode::Decode, format!("more than {CHUNKS_MAX} chunks before its picture"))
}

/// RFC 9649. A file shorter than its container says is truncated, as libwebp sees it. Frames must be as big as their canvas says: the decoder allocates by what it finds in the
/// frame and compares afterwards. The `EXIF` chunk counts where the header announces it, as in libwebp.
fn webp<R: BufRead + Seek>(r: &mut R, file_bytes: u64) -> Result<Outline, Refusal> {
    let riff: [u8; 12] = read_array(r)?;
    let end = u64::from(le_u32(&riff, 4)) + 8;
    if end > file_bytes {
        return Err(Refusal::new(RowCode::Truncated, format!("the file ends early: {file_bytes} of {end} bytes")));
    }
    let mut seen = Outline::of(Size::new(0, 0));
    let head: [u8; 8] = read_array(r)?;
    if head[..4] != *b"VP8X" {
        seen.stored = webp_frame_size(r, &head[..4])?;
        return Ok(seen);
    }
    let extended: [u8; 10] = read_array(r)?;
    seen.animated = extended[0] & 0x02 != 0;
    seen.stored = Size::new(le_u24(&extended, 4) + 1, le_u24(&extended, 7) + 1);
    let mut exif_due = extended[0] & 0x08 != 0;
    let mut frame_due = true;
    let mut at = 20 + padded(le_u32(&head, 4));
    let mut chunks = 0;
    while (exif_due || frame_due) && at + 8 <= end {
        chunks += 1;
        if chunks > CHUNKS_MAX {
            return Err(too_many_chunks());
        }
        r.seek(SeekFrom::Start(at))?;
        let head: [u8; 8] = read_array(r)?;
        let length = le_u32(&head, 4);
        match &head[..4] {
            b"EXIF" if exif_due && u64::from(length) <= EXIF_BYTES_MAX => {
                seen.orientation = orient::from_exif_block(&read_vec(r, u64::from(length))?);
                exif_due = false;
            }
            fourcc @ (b"VP8 " | b"VP8L") if frame_due => {
                same_size(seen.stored, webp_frame_size(r, fourcc)?)?;
                frame_due = false;
            }
            b"ANMF" if frame_due => {
                check_animation_frame(r)?;
                frame_due = false;
            }
            _ => {}
        }
        at += 8 + padded(length);
    }
    Ok(seen)
}

/// Where a frame stands on its canvas is the decoder's to check.
fn check_animation_frame<R: BufRead + Seek>(r: &mut R) -> Result<(), Refusal> {
    let frame: [u8; 16] = read_array(r)?;
    let size = Size::new(le_u24(&frame, 6) + 1, le_u24(&frame, 9) + 1);
    let mut head: [u8; 8] = read_array(r)?;
    if head[..4] == *b"ALPH" {
        skip(r, padded(le_u32(&head, 4)))?;
        head = read_array(r)?;
    }
    same_size(size, webp_frame_size(r, &head[..4])?)
}

fn same_size(outer: Size, inner: Size) -> Result<(), Refusal> {
    if outer == inner {
        return Ok(());
    }
    Err(Refusal::new(RowCode::Decode, "its frame has another size than its header"))
}

/// Size in the bit stream itself; the reader stands after the chunk's header.
fn webp_frame_size<R: Read>(r: &mut R, fourcc: &[u8]) -> Result<Size, Refusal> {
    match fourcc {
        b"VP8 " => {
            let frame: [u8; 10] = read_array(r)?;
            Ok(Size::new(u32::from(le_u16(&frame, 6) & 0x3fff), u32::from(le_u16(&frame, 8) & 0x3fff)))
        }
        b"VP8L" => {
            let frame: [u8; 5] = read_array(r)?;
            let bits = le_u32(&frame, 1);
            Ok(Size::new((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        _ => Err(Refusal::new(RowCode::Decode, "a WebP whose picture is missing")),
    }
}

fn gif<R: BufRead>(r: &mut R) -> Result<Outline, Refusal> {
    let screen: [u8; 10] = read_array(r)?;
    let stored = Size::new(u32::from(le_u16(&screen, 6)), u32::from(le_u16(&screen, 8)));
    Ok(Outline::of(stored))
}

/// The second header begins at byte 14; its first kind has 16-bit sides, and the height of the others may
/// be negative for rows that run downwards.
fn bmp<R: BufRead>(r: &mut R) -> Result<Outline, Refusal> {
    let head: [u8; 22] = read_array(r)?;
    let stored = if le_u32(&head, 14) == 12 {
        Size::new(u32::from(le_u16(&head, 18)), u32::from(le_u16(&head, 20)))
    } else {
        let low: [u8; 4] = read_array(r)?;
        Size::new(le_u32(&head, 18), i32::from_le_bytes(low).unsigned_abs())
    };
    Ok(Outline::of(stored))
}

fn tiff<R: BufRead + Seek>(r: &mut R) -> Result<Outline, Refusal> {
    let directory = orient::read_tiff_directory(r)?;
    if directory.raw_preview {
        return Err(Refusal::new(RowCode::Unsupported, "camera raw data in a TIFF (dng, nef, ...) is not supported"));
    }
    let stored = directory.stored.ok_or_else(|| Refusal::new(RowCode::Decode, "a TIFF without a size"))?;
    Ok(Outline { orientation: directory.orientation, ..Outline::of(stored) })
}

fn read_array<const N: usize, R: Read>(r: &mut R) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    r.read_exact(&mut array)?;
    Ok(array)
}

/// `length` comes from the file and must be bounded by the caller.
fn read_vec<R: Read>(r: &mut R, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    r.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn skip<R: BufRead + Seek>(r: &mut R, bytes: u64) -> io::Result<()> {
    // Lengths are 32 bits wide in every container.
    r.seek_relative(bytes as i64)
}

fn padded(length: u32) -> u64 {
    u64::from(length) + u64::from(length & 1)
}

fn be_u32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn le_u32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn le_u24(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], 0])
}

fn le_u16(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}
