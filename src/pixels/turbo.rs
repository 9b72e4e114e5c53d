//! Grey and colour JPEGs, with the numbers of libjpeg-turbo, which Pillow and most others use: every pixel equals
//! theirs, at full size and at 1/2, 1/4 and 1/8. Corrupt blocks are what libjpeg makes of them.

use image::RgbImage;
use libjpeg_turbo_rs::{DecodeWarning, Decoder, JpegError, PixelFormat, ScalingFactor};

use super::decode::zeros;
use super::header::Probed;
use super::open::Refusal;
use crate::geometry::{IntBox, Scale, Size};
use crate::row::RowCode;

/// Columns that are decoded beside a window, in pixels of the picture: colours are interpolated from a sample on
/// either side, and a row of less than three samples would not be interpolated at all.
const WINDOW_MARGIN_PX: u32 = 8;

/// A picture, or a part of one, as stored.
pub(super) struct Stored {
    pub(super) pixels: RgbImage,
    /// A scan stopped short.
    pub(super) short: bool,
}

/// All of a picture at `scale`.
pub(super) fn whole(bytes: &[u8], probed: &Probed, scale: Scale) -> Result<Stored, Refusal> {
    let decoder = decoder(bytes, probed, scale)?;
    let size = probed.stored.scaled(scale);
    let mut buffer = zeros(3 * size.pixels() as usize)?;
    let info = decoder.decode_image_into(&mut buffer).map_err(refused)?;
    if (info.width, info.height) != (size.width_px as usize, size.height_px as usize) {
        return Err(disagrees());
    }
    image(buffer, size, &info.warnings)
}

/// `part` of the picture at `scale`, in pixels of the scaled picture. Every pixel equals that of [`whole`].
pub(super) fn window(bytes: &[u8], probed: &Probed, scale: Scale, part: IntBox) -> Result<Stored, Refusal> {
    let mut decoder = decoder(bytes, probed, scale)?;
    let IntBox { x, y, size } = part;
    let left = x.saturating_sub(WINDOW_MARGIN_PX);
    let right = (x + size.width_px + WINDOW_MARGIN_PX).min(probed.stored.scaled(scale).width_px);
    decoder.set_crop_region(left as usize, y as usize, (right - left) as usize, size.height_px as usize);
    let decoded = decoder.decode_image().map_err(refused)?;
    // The decoder begins at a boundary of its own, left of what was asked for, and ends where it was told.
    let width = decoded.width;
    if decoded.height != size.height_px as usize || width < (right - left) as usize || width > right as usize {
        return Err(disagrees());
    }
    let mut buffer = decoded.data;
    let (from, columns) = (3 * (width - (right - x) as usize), 3 * size.width_px as usize);
    for row in 0..decoded.height {
        let from = 3 * width * row + from;
        buffer.copy_within(from..from + columns, columns * row);
    }
    buffer.truncate(columns * decoded.height);
    buffer.shrink_to_fit();
    image(buffer, size, &decoded.warnings)
}

fn decoder<'a>(bytes: &'a [u8], probed: &Probed, scale: Scale) -> Result<Decoder<'a>, Refusal> {
    let mut decoder = Decoder::new(bytes).map_err(refused)?;
    decoder.set_output_format(PixelFormat::Rgb);
    decoder.set_lenient(true);
    decoder.set_scale(ScalingFactor::try_new(1, scale.denominator()).map_err(refused)?);
    let header = decoder.header();
    let Size { width_px, height_px } = probed.stored;
    if (u32::from(header.width), u32::from(header.height)) != (width_px, height_px) {
        return Err(disagrees());
    }
    Ok(decoder)
}

fn image(buffer: Vec<u8>, size: Size, warnings: &[DecodeWarning]) -> Result<Stored, Refusal> {
    let short = warnings.iter().any(|w| matches!(w, DecodeWarning::TruncatedData { .. }));
    let pixels = RgbImage::from_raw(size.width_px, size.height_px, buffer)
        .ok_or_else(|| Refusal::new(RowCode::Decode, "its pixels do not fill its size"))?;
    Ok(Stored { pixels, short })
}

fn disagrees() -> Refusal {
    Refusal::new(RowCode::Decode, "its headers disagree about its size")
}

fn refused(error: JpegError) -> Refusal {
    let code = match error {
        JpegError::Unsupported(_) => RowCode::Unsupported,
        JpegError::UnexpectedEof => RowCode::Truncated,
        _ => RowCode::Decode,
    };
    Refusal::new(code, format!("the JPEG cannot be decoded: {error}"))
}
