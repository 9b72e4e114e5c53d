//! From a file to upright RGB8 pixels.
//!
//! 16-bit samples are scaled, never clipped. Alpha is composited on white, because the colours under
//! transparent pixels are arbitrary. CMYK is what the `image` crate makes of it (it takes the values as
//! inverted, as Adobe stores them and as Pillow reads them); JPEGs cut out of PDFs come out dark. Colour
//! profiles are not applied. Of an animation the first frame is taken. Nothing is repaired: only JPEGs that
//! end early can be used as far as they go.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};

use image::{ColorType, ImageDecoder, RgbImage};
use libjpeg_turbo_rs::{DecodeWarning, Decoder, JpegError, PixelFormat};

use crate::config::DecodeConfig;
use crate::geometry::Size;
use crate::recipe::Truncated;
use crate::row::{ImageFacts, RowCode, RowError};

use super::container;
use super::header::{Probed, jpeg_bytes_max, probe_opened};
use super::jpeg;
use super::open::{Refusal, guarded, open_regular};
use super::orient;
use super::sniff::Format;

/// Decoders other than JPEG's read the file in pieces of this size.
const READ_BYTES: usize = 64 * 1024;

/// A decoded picture.
#[derive(Clone, Debug)]
pub struct Upright {
    /// Interleaved RGB, 8 bits, of the size `facts.upright`.
    pub pixels: RgbImage,
    /// What was learned on the way.
    pub facts: ImageFacts,
}

/// Decodes a file and turns it upright. Holds at most `probed.worst_bytes`; a file that has grown beyond
/// that since it was probed is refused.
///
/// # Errors
/// Those of [`probe`](super::header::probe), and `truncated` where the data ends early (unless
/// `config.truncated` is `Use` and the file a JPEG), `decode`, `unsupported`, `decoder_panic`. Every message
/// begins with the path.
pub fn decode(probed: &Probed, config: &DecodeConfig) -> Result<Upright, RowError> {
    guarded(&probed.path, || decode_file(probed, config).map_err(|refusal| refusal.at(&probed.path)))
}

fn decode_file(probed: &Probed, config: &DecodeConfig) -> Result<Upright, Refusal> {
    let (mut file, stamp) = open_regular(&probed.path)?;
    let mut probed = probed.clone();
    if stamp != probed.stamp {
        let fresh = probe_opened(&probed.path, &file, stamp, config)?;
        if fresh.worst_bytes > probed.worst_bytes {
            return Err(Refusal::new(RowCode::Io, "the file grew while it waited to be decoded; run again"));
        }
        file.seek(SeekFrom::Start(0))?;
        probed = fresh;
    }
    let (pixels, truncated) = match probed.format {
        Format::Jpeg => decode_jpeg(file, &probed, config)?,
        _ => (decode_other(file, &probed)?, false),
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
        truncated,
    };
    Ok(Upright { pixels, facts })
}

/// Decoders take a JPEG that was cut and fill the rest with grey, so the end is looked for first.
fn decode_jpeg(file: File, probed: &Probed, config: &DecodeConfig) -> Result<(RgbImage, bool), Refusal> {
    let most = jpeg_bytes_max(probed.stored);
    let expected = probed.stamp.size_bytes.unsigned_abs().min(most) as usize;
    // One more than expected, or `read_to_end` doubles the buffer to see the end.
    let mut bytes = Vec::with_capacity(expected + 1);
    file.take(most).read_to_end(&mut bytes)?;
    let cut = !jpeg::ends_properly(&bytes);
    let ends_early = || {
        let reason = "the JPEG's data ends early; --truncated use takes it as far as it goes";
        Refusal::new(RowCode::Truncated, reason)
    };
    if cut && config.truncated == Truncated::Fail {
        return Err(ends_early());
    }
    let decoded = if probed.components == 4 {
        let decoder = container::open_decoder(Format::Jpeg, Whole(Cursor::new(bytes)), 0);
        let pixels = decoder.map_err(Refusal::from).and_then(|decoder| read_pixels(decoder, probed));
        pixels.map(|pixels| (pixels, false))
    } else {
        decode_ycc(&bytes, probed)
    };
    match decoded {
        Err(refusal) if cut && refusal.code == RowCode::Decode => {
            Err(Refusal::new(RowCode::Truncated, format!("the JPEG's data ends too early: {}", refusal.reason)))
        }
        // The end is there, but a scan before it stops short.
        Ok((_, true)) if config.truncated == Truncated::Fail => Err(ends_early()),
        decoded => decoded.map(|(pixels, short)| (pixels, cut || short)),
    }
}

/// Grey and colour JPEGs, with the numbers of libjpeg-turbo, which Pillow and most others use: every pixel
/// equals theirs. The flag says that a scan stopped short. Corrupt blocks are what libjpeg makes of them.
fn decode_ycc(bytes: &[u8], probed: &Probed) -> Result<(RgbImage, bool), Refusal> {
    let mut decoder = Decoder::new(bytes).map_err(jpeg_refused)?;
    decoder.set_output_format(PixelFormat::Rgb);
    decoder.set_lenient(true);
    let Size { width_px, height_px } = probed.stored;
    let header = decoder.header();
    if (u32::from(header.width), u32::from(header.height)) != (width_px, height_px) {
        return Err(Refusal::new(RowCode::Decode, "its headers disagree about its size"));
    }
    let mut buffer = zeros(probed.pixels_bytes as usize)?;
    let info = decoder.decode_image_into(&mut buffer).map_err(jpeg_refused)?;
    let short = info.warnings.iter().any(|w| matches!(w, DecodeWarning::TruncatedData { .. }));
    let pixels = RgbImage::from_raw(width_px, height_px, buffer)
        .ok_or_else(|| Refusal::new(RowCode::Decode, "its pixels do not fill its size"))?;
    Ok((pixels, short))
}

fn jpeg_refused(error: JpegError) -> Refusal {
    let code = match error {
        JpegError::Unsupported(_) => RowCode::Unsupported,
        JpegError::UnexpectedEof => RowCode::Truncated,
        _ => RowCode::Decode,
    };
    Refusal::new(code, format!("the JPEG cannot be decoded: {error}"))
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
fn zeros(bytes: usize) -> Result<Vec<u8>, Refusal> {
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
