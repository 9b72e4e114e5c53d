//! From a file to upright RGB8 pixels.
//!
//! 16-bit samples are scaled, never clipped. Alpha is composited on white, because the colours under
//! transparent pixels are arbitrary. CMYK is what the `image` crate makes of it (it takes the values as
//! inverted, as Adobe stores them and as Pillow reads them); JPEGs cut out of PDFs come out dark. Colour
//! profiles are not applied. Of an animation the first frame is taken. Nothing is repaired: only JPEGs that
//! end early can be used as far as they go.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};

use image::{ColorType, ImageDecoder, RgbImage};

use crate::config::DecodeConfig;
use crate::geometry::{BoxPx, IntBox, Scale, Size};
use crate::recipe::Truncated;
use crate::row::{ImageFacts, RowCode, RowError};

use super::container;
use super::header::{Probed, jpeg_bytes_max, probe_opened};
use super::jpeg;
use super::open::{Refusal, guarded, open_regular};
use super::orient;
use super::picture::{Picture, scaled_box};
use super::sniff::Format;
use super::turbo::{self, Stored};

/// Decoders other than JPEG's read the file in pieces of this size.
const READ_BYTES: usize = 64 * 1024;

/// A JPEG of more passes over its picture is refused: each takes the time of the whole picture and may be ten bytes
/// long. Encoders write a dozen; libjpeg-turbo's own tools stop at this number when told to be strict.
const SCANS_MAX: usize = 500;

/// A thread keeps the buffer for a file's bytes up to this size, beside what its images have reserved; a larger one
/// is given back after use.
pub const FILE_BYTES_KEPT: u64 = 8 << 20;

/// A decoded picture.
#[derive(Clone, Debug)]
pub struct Upright {
    /// All of the image, of the size `facts.upright` scaled.
    pub picture: Picture,
    /// What was learned on the way.
    pub facts: ImageFacts,
}

/// What a second decode found.
#[derive(Clone, Debug)]
pub enum Redecoded {
    /// At least the pixels that were asked for.
    Picture(Picture),
    /// Not the file that was probed; boxes in its picture mean nothing in this one.
    FileChanged,
}

/// Decodes a file at `scale` and turns it upright; at full size where it cannot be scaled. Holds at most
/// `probed.worst_bytes(scale)`; a file that has grown beyond that since it was probed is refused.
///
/// # Errors
/// Those of [`probe`](super::header::probe), and `truncated` where the data ends early (unless
/// `config.truncated` is `Use` and the file a JPEG), `decode`, `unsupported`, `decoder_panic`. Every message
/// begins with the path.
pub fn decode(probed: &Probed, config: &DecodeConfig, scale: Scale) -> Result<Upright, RowError> {
    guarded(&probed.path, || decode_file(probed, config, scale).map_err(|refusal| refusal.at(&probed.path)))
}

/// Decodes at least the pixels of `region`, in pixels of the upright image at full size, once more and at another
/// scale. Of a JPEG that can be scaled only the region is kept, unless it is most of the picture; of all else the
/// whole, at full size. Holds at most [`Probed::region_bytes`]. Every pixel equals that of [`decode`].
///
/// # Errors
/// Those of [`decode`], and `nan_output` for a region that is no box in the image.
pub fn decode_region(
    probed: &Probed,
    config: &DecodeConfig,
    scale: Scale,
    region: BoxPx,
) -> Result<Redecoded, RowError> {
    let decode = || {
        let (file, stamp) = open_regular(&probed.path, probed.root.as_deref())?;
        if stamp != probed.stamp {
            return Ok(Redecoded::FileChanged);
        }
        let scale = probed.possible(scale);
        let Some(part) = probed.window(scale, region) else {
            return if scaled_box(probed.upright, scale, region).is_some() {
                Ok(Redecoded::Picture(decode_opened(file, probed, config, scale)?.picture))
            } else {
                Err(no_box(probed.upright, region))
            };
        };
        decode_window(file, probed, config, scale, part).map(Redecoded::Picture)
    };
    guarded(&probed.path, || decode().map_err(|refusal: Refusal| refusal.at(&probed.path)))
}

/// Where a region is no part of an image.
pub(super) fn no_box(image: Size, region: BoxPx) -> Refusal {
    let BoxPx { x0, y0, x1, y1 } = region;
    let reason = format!("a region {x0} {y0} {x1} {y1} that is no box in {}x{}", image.width_px, image.height_px);
    Refusal::new(RowCode::NanOutput, reason)
}

fn decode_file(probed: &Probed, config: &DecodeConfig, scale: Scale) -> Result<Upright, Refusal> {
    let (mut file, stamp) = open_regular(&probed.path, probed.root.as_deref())?;
    if stamp == probed.stamp {
        return decode_opened(file, probed, config, scale);
    }
    let fresh = probe_opened(&probed.path, &file, stamp, config)?;
    if fresh.worst_bytes(scale) > probed.worst_bytes(scale) {
        return Err(Refusal::new(RowCode::Io, "the file grew while it waited to be decoded; run again"));
    }
    file.seek(SeekFrom::Start(0))?;
    decode_opened(file, &fresh, config, scale)
}

fn decode_opened(file: File, probed: &Probed, config: &DecodeConfig, scale: Scale) -> Result<Upright, Refusal> {
    let scale = probed.possible(scale);
    let (pixels, truncated) = match probed.format {
        Format::Jpeg => decode_jpeg(file, probed, config, scale)?,
        _ => (decode_other(file, probed)?, false),
    };
    let pixels = orient::apply(pixels, probed.orientation);
    let facts = ImageFacts {
        stamp: probed.stamp,
        format: probed.format.word(),
        stored: probed.stored,
        upright: probed.upright,
        orientation: probed.orientation,
        orientation_source: probed.orientation_source,
        components: probed.components,
        scale,
        truncated,
    };
    Ok(Upright { picture: Picture::scaled(pixels, probed.upright, scale), facts })
}

fn decode_jpeg(file: File, probed: &Probed, config: &DecodeConfig, scale: Scale) -> Result<(RgbImage, bool), Refusal> {
    if probed.components == 4 {
        let mut bytes = Vec::new();
        read_jpeg(file, probed, &mut bytes)?;
        let cut = refuse_cut(&bytes, config)?;
        let decoder = container::open_decoder(Format::Jpeg, Whole(Cursor::new(bytes)), 0);
        let pixels = decoder.map_err(Refusal::from).and_then(|decoder| read_pixels(decoder, probed));
        return Ok((pixels.map_err(|refusal| too_early(refusal, cut))?, cut));
    }
    with_jpeg(file, probed, config, |bytes| turbo::whole(bytes, probed, scale))
        .map(|(stored, truncated)| (stored.pixels, truncated))
}

/// `part` in pixels of the upright picture at `scale`.
fn decode_window(
    file: File,
    probed: &Probed,
    config: &DecodeConfig,
    scale: Scale,
    part: IntBox,
) -> Result<Picture, Refusal> {
    let as_stored = probed.orientation.inverse().turned(part, probed.upright.scaled(scale));
    let (stored, _) = with_jpeg(file, probed, config, |bytes| turbo::window(bytes, probed, scale, as_stored))?;
    let pixels = orient::apply(stored.pixels, probed.orientation);
    Ok(Picture { pixels, image: probed.upright, scale, window: part })
}

/// Runs a decoder over a JPEG's bytes, in this thread's buffer: fresh pages for each file would cost more than
/// reading it. The flag says that the data ends early.
fn with_jpeg(
    file: File,
    probed: &Probed,
    config: &DecodeConfig,
    decode: impl FnOnce(&[u8]) -> Result<Stored, Refusal>,
) -> Result<(Stored, bool), Refusal> {
    // Taken out, so that a panic loses the buffer and nothing else.
    let mut bytes = FILE_BYTES.take();
    bytes.clear();
    let decoded = read_jpeg(file, probed, &mut bytes).and_then(|()| {
        let cut = refuse_cut(&bytes, config)?;
        let stored = decode(&bytes).map_err(|refusal| too_early(refusal, cut))?;
        if stored.short && config.truncated == Truncated::Fail {
            // The end is there, but a scan before it stops short.
            return Err(ends_early());
        }
        let truncated = cut || stored.short;
        Ok((stored, truncated))
    });
    if bytes.capacity() as u64 <= FILE_BYTES_KEPT {
        FILE_BYTES.set(bytes);
    }
    decoded
}

thread_local! {
    static FILE_BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

fn read_jpeg(file: File, probed: &Probed, bytes: &mut Vec<u8>) -> Result<(), Refusal> {
    let most = jpeg_bytes_max(probed.stored);
    let expected = probed.stamp.size_bytes.unsigned_abs().min(most) as usize;
    if bytes.capacity() <= expected {
        // Given back first: it would be held beside the new one.
        *bytes = Vec::new();
        // One more than expected, or `read_to_end` doubles the buffer to see the end.
        bytes.reserve_exact(expected + 1);
    }
    file.take(most).read_to_end(bytes)?;
    Ok(())
}

/// Decoders take a JPEG that was cut and fill the rest with grey, so the end is looked for first. True where it is
/// not there and that is allowed. A file of endlessly many scans is refused here, too.
fn refuse_cut(bytes: &[u8], config: &DecodeConfig) -> Result<bool, Refusal> {
    let jpeg::Walk { ends, scans } = jpeg::walk(bytes);
    if scans > SCANS_MAX {
        return Err(Refusal::new(RowCode::Decode, format!("a JPEG of {scans} scans; {SCANS_MAX} are the most")));
    }
    let cut = !ends;
    if cut && config.truncated == Truncated::Fail { Err(ends_early()) } else { Ok(cut) }
}

fn ends_early() -> Refusal {
    let reason = "the JPEG's data ends early; --truncated use takes it as far as it goes";
    Refusal::new(RowCode::Truncated, reason)
}

/// What a decoder says of a file that was cut is for lack of data.
fn too_early(refusal: Refusal, cut: bool) -> Refusal {
    if cut && refusal.code == RowCode::Decode {
        return Refusal::new(RowCode::Truncated, format!("the JPEG's data ends too early: {}", refusal.reason));
    }
    refusal
}

fn decode_other(file: File, probed: &Probed) -> Result<RgbImage, Refusal> {
    let reader = BufReader::with_capacity(READ_BYTES, file);
    let mut decoder = container::open_decoder(probed.format, reader, probed.metadata_bytes)?;
    decoder.set_limits(container::limits(probed.limit_bytes))?;
    read_pixels(decoder, probed)
}

/// The decoder must still promise what was reserved for it: a failed allocation ends the process and
/// cannot be caught.
fn read_pixels(decoder: Box<dyn ImageDecoder + '_>, probed: &Probed) -> Result<RgbImage, Refusal> {
    let (width, height) = decoder.dimensions();
    let output_bytes = decoder.total_bytes();
    if (width, height) != (probed.stored.width_px, probed.stored.height_px) || output_bytes > probed.output_bytes {
        return Err(Refusal::new(RowCode::Decode, "its headers disagree about its size"));
    }
    let color = decoder.color_type();
    let pixels = probed.stored.pixels() as usize;
    let output_bytes = output_bytes as usize;
    let mut buffer = zeros(output_bytes.max(3 * pixels))?;
    decoder.read_image(&mut buffer[..output_bytes])?;
    into_rgb8(&mut buffer, color, pixels)?;
    buffer.truncate(3 * pixels);
    buffer.shrink_to_fit();
    RgbImage::from_raw(width, height, buffer)
        .ok_or_else(|| Refusal::new(RowCode::Decode, "its pixels do not fill its size"))
}

/// Zeroed memory. `vec!` takes fresh pages from the system without writing to them, but ends the process
/// where there are none; so the same size is asked for first in a way that may be refused.
pub(super) fn zeros(bytes: usize) -> Result<Vec<u8>, Refusal> {
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| {
        Refusal::new(RowCode::TooLarge, format!("{bytes} bytes of memory for its pixels cannot be had"))
    })?;
    Ok(vec![0; bytes])
}

/// Converts `pixels` pixels at the beginning of the buffer to RGB8, in place.
fn into_rgb8(buffer: &mut [u8], color: ColorType, pixels: usize) -> Result<(), Refusal> {
    match color {
        ColorType::Rgb8 => {}
        ColorType::L8 => widen(buffer, pixels, |[v]: [u8; 1]| [v; 3]),
        ColorType::La8 => widen(buffer, pixels, |[v, a]: [u8; 2]| [on_white(v, a); 3]),
        ColorType::L16 => widen(buffer, pixels, |p: [u8; 2]| [scaled(sample16(&p, 0)); 3]),
        ColorType::La16 => narrow(buffer, pixels, |p: [u8; 4]| [on_white16(&p, 0, 1); 3]),
        ColorType::Rgba8 => {
            narrow(buffer, pixels, |[r, g, b, a]: [u8; 4]| [on_white(r, a), on_white(g, a), on_white(b, a)]);
        }
        ColorType::Rgb16 => narrow(buffer, pixels, |p: [u8; 6]| [0, 1, 2].map(|c| scaled(sample16(&p, c)))),
        ColorType::Rgba16 => narrow(buffer, pixels, |p: [u8; 8]| [0, 1, 2].map(|c| on_white16(&p, c, 3))),
        ColorType::Rgb32F => narrow(buffer, pixels, |p: [u8; 12]| [0, 1, 2].map(|c| unit_to_u8(sample32(&p, c)))),
        ColorType::Rgba32F => narrow(buffer, pixels, |p: [u8; 16]| {
            let alpha = sample32(&p, 3).clamp(0.0, 1.0);
            [0, 1, 2].map(|c| unit_to_u8(sample32(&p, c).clamp(0.0, 1.0) * alpha + (1.0 - alpha)))
        }),
        other => {
            return Err(Refusal::new(RowCode::Unsupported, format!("pixels of the kind {other:?} are not supported")));
        }
    }
    Ok(())
}

/// Pixels of at most 3 bytes: from the last to the first, so that none is overwritten before it is read.
fn widen<const N: usize>(buffer: &mut [u8], pixels: usize, convert: impl Fn([u8; N]) -> [u8; 3]) {
    for i in (0..pixels).rev() {
        let mut pixel = [0; N];
        pixel.copy_from_slice(&buffer[i * N..(i + 1) * N]);
        buffer[3 * i..3 * i + 3].copy_from_slice(&convert(pixel));
    }
}

/// Pixels of at least 3 bytes: from the first to the last.
fn narrow<const N: usize>(buffer: &mut [u8], pixels: usize, convert: impl Fn([u8; N]) -> [u8; 3]) {
    for i in 0..pixels {
        let mut pixel = [0; N];
        pixel.copy_from_slice(&buffer[i * N..(i + 1) * N]);
        buffer[3 * i..3 * i + 3].copy_from_slice(&convert(pixel));
    }
}

/// Straight alpha over white, rounded.
fn on_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}

/// Sample `color` with sample `alpha` over white, composited before it is scaled to 8 bits.
fn on_white16(pixel: &[u8], color: usize, alpha: usize) -> u8 {
    let (value, alpha) = (u64::from(sample16(pixel, color)), u64::from(sample16(pixel, alpha)));
    scaled(((value * alpha + 65_535 * (65_535 - alpha) + 32_767) / 65_535) as u16)
}

/// 16 bits to 8: divided by 257 and rounded.
fn scaled(value: u16) -> u8 {
    ((u32::from(value) + 128) / 257) as u8
}

/// 0..=1 to 8 bits; NaN becomes black.
fn unit_to_u8(value: f32) -> u8 {
    (value * 255.0).round() as u8
}

/// The `image` crate gives samples in the machine's byte order.
fn sample16(pixel: &[u8], index: usize) -> u16 {
    u16::from_ne_bytes([pixel[2 * index], pixel[2 * index + 1]])
}

fn sample32(pixel: &[u8], index: usize) -> f32 {
    f32::from_ne_bytes([pixel[4 * index], pixel[4 * index + 1], pixel[4 * index + 2], pixel[4 * index + 3]])
}

/// Hands its whole content over where a reader wants to the end, instead of a copy: the JPEG decoder
/// begins by reading everything into a buffer of its own.
struct Whole(Cursor<Vec<u8>>);

impl Read for Whole {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }

    fn read_to_end(&mut self, out: &mut Vec<u8>) -> io::Result<usize> {
        if self.0.position() == 0 && out.is_empty() {
            std::mem::swap(out, self.0.get_mut());
            return Ok(out.len());
        }
        self.0.read_to_end(out)
    }
}

impl BufRead for Whole {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.0.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        self.0.consume(amount);
    }
}

impl Seek for Whole {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        assert_eq!(zeros(isize::MAX as usize).unwrap_err().code, RowCode::TooLarge);
        assert_eq!(zeros(3).unwrap(), [0, 0, 0]);
    }

    #[test]
    fn pixels_are_converted_in_their_own_buffer() {
        let mut grey = vec![1, 2, 3, 0, 0, 0, 0, 0, 0];
        into_rgb8(&mut grey, ColorType::L8, 3).unwrap();
        assert_eq!(grey, [1, 1, 1, 2, 2, 2, 3, 3, 3]);
        let mut floats: Vec<u8> =
            [0.0_f32, 0.5, 1.0, f32::NAN, -1.0, 9.0].iter().flat_map(|v| v.to_ne_bytes()).collect();
        into_rgb8(&mut floats, ColorType::Rgb32F, 2).unwrap();
        assert_eq!(floats[..6], [0, 128, 255, 0, 0, 255]);
        let mut half: Vec<u8> = [1.0_f32, 0.0, 0.0, 0.5].iter().flat_map(|v| v.to_ne_bytes()).collect();
        into_rgb8(&mut half, ColorType::Rgba32F, 1).unwrap();
        assert_eq!(half[..3], [255, 128, 128]);
    }

    #[test]
    fn alpha_composites_exactly_at_its_ends() {
        for value in 0..=255 {
            assert_eq!((on_white(value, 0), on_white(value, 255)), (255, value));
        }
    }

    #[test]
    fn the_whole_content_changes_hands_without_a_copy() {
        let bytes = vec![7; 1000];
        let place = bytes.as_ptr();
        let mut out = Vec::new();
        Whole(Cursor::new(bytes)).read_to_end(&mut out).unwrap();
        assert_eq!((out.as_ptr(), out.len()), (place, 1000));
    }
}
