//! What a file promises, read from its first few kilobytes: enough to refuse it, to turn it, and to
//! reserve memory before any of it is used.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use image::{ExtendedColorType, ImageDecoder};

use crate::config::DecodeConfig;
use crate::geometry::{BoxPx, IntBox, Orientation, Scale, Size};
use crate::row::{FileStamp, RowCode, RowError};

use super::container::{self, Outline};
use super::decode::FILE_BYTES_KEPT;
use super::jpeg::{self, JpegHeader};
use super::open::{Refusal, guarded, open_regular};
use super::orient;
use super::picture::scaled_box;
use super::sniff::{Format, Kind, SNIFF_BYTES, sniff};

/// One read of this size holds the header of most photos; what lies between is seeked over.
const READ_BYTES: usize = 8 * 1024;

/// A longer side is refused: resizing costs a table proportional to it, whatever the other side is.
const SIDE_MAX_PX: u32 = 1_000_000;

/// The `image` crate decodes no BMP with a longer side.
const BMP_SIDE_MAX_PX: u32 = 65_535;

/// For tables and buffers of a decoder that do not grow with the picture.
const FIXED_BYTES: u64 = 1 << 20;

/// No more of a JPEG is read than this plus [`JPEG_BYTES_PER_PIXEL`]: what comes after it is no picture.
const JPEG_BYTES_MIN: u64 = 64 << 20;

/// More than the worst compression of three components.
const JPEG_BYTES_PER_PIXEL: u64 = 12;

/// A window of more than 3/4 of a picture is decoded as the whole: it would cost a copy and spare little.
const WINDOW_PARTS: u64 = 3;
const WINDOW_DIVISOR: u64 = 4;

/// Columns and rows that a decoder adds to a window: two MCUs, whose sides are at most 32.
const WINDOW_EXTRA_PX: u32 = 80;

/// A file that may be decoded, and what that will cost.
#[derive(Clone, Debug)]
pub struct Probed {
    /// The file.
    pub path: PathBuf,
    /// Below this folder.
    pub(super) root: Option<Arc<Path>>,
    /// The file as it was when it was opened.
    pub stamp: FileStamp,
    /// The file system that it lies on, as the system numbers them; 0 where that is not told.
    pub device: u64,
    /// Container by content.
    pub format: Format,
    /// Size in the file's header.
    pub stored: Size,
    /// Size after `orientation`.
    pub upright: Size,
    /// How it must be turned.
    pub orientation: Orientation,
    /// `exif` where a tag says so (also "1: upright"), `none` where there is none that applies.
    pub orientation_source: &'static str,
    /// Colour components in the file: 1 grey, 2 grey and alpha, 3 RGB, YCbCr or a palette, 4 CMYK or alpha.
    pub components: u8,
    /// Size of the decoder's output, in bytes, at full size.
    pub(super) output_bytes: u64,
    /// Beside the output and until it is complete, in bytes, at each of [`Scale::ALL`].
    decoder_bytes: [u64; 4],
    /// What a thread may keep of the file's bytes after that.
    kept_bytes: u64,
    /// What the decoder may allocate beside its output.
    pub(super) limit_bytes: u64,
    /// What it may spend on metadata.
    pub(super) metadata_bytes: u64,
}

impl Probed {
    /// True for what can be decoded at less than full size: grey and three-component JPEGs.
    pub fn can_be_scaled(&self) -> bool {
        self.format == Format::Jpeg && matches!(self.components, 1 | 3)
    }

    /// The scale at which `decode` will decode when asked for `scale`.
    pub fn possible(&self, scale: Scale) -> Scale {
        if self.can_be_scaled() { scale } else { Scale::FULL }
    }

    /// The smallest scale at which the upright picture has `wanted` pixels on both sides; see
    /// [`wanted`](super::tensor::wanted).
    pub fn scale_for(&self, wanted: Size) -> Scale {
        self.possible(Scale::that_holds(self.upright, wanted))
    }

    /// What remains after `decode`: three bytes a pixel.
    pub fn pixels_bytes(&self, scale: Scale) -> u64 {
        3 * self.stored.scaled(self.possible(scale)).pixels()
    }

    /// Upper bound of the host memory that `decode` holds at any moment, in bytes.
    pub fn worst_bytes(&self, scale: Scale) -> u64 {
        let pixels_bytes = self.pixels_bytes(scale);
        // The conversion to RGB8 works in the output's own buffer.
        let output = if self.can_be_scaled() { pixels_bytes } else { self.output_bytes.max(pixels_bytes) };
        self.worst(scale, output, pixels_bytes)
    }

    /// Upper bound of the host memory that `decode_region` holds at any moment; `worst_bytes` where the region is
    /// no box or most of the picture.
    pub fn region_bytes(&self, scale: Scale, region: BoxPx) -> u64 {
        let scale = self.possible(scale);
        let Some(part) = self.window(scale, region) else { return self.worst_bytes(scale) };
        let stored = self.orientation.inverse().turned(part, self.upright.scaled(scale));
        // Rows from the picture's top to an MCU below the window, then those of the window once more.
        let width = u64::from(stored.size.width_px + WINDOW_EXTRA_PX);
        let rows = u64::from(stored.y + stored.size.height_px + WINDOW_EXTRA_PX);
        let pixels_bytes = 3 * width * u64::from(stored.size.height_px);
        self.worst(scale, 3 * width * rows + pixels_bytes, pixels_bytes)
    }

    /// A turn needs a second picture, when the decoder is gone already.
    fn worst(&self, scale: Scale, output_bytes: u64, pixels_bytes: u64) -> u64 {
        let decoding = self.decoder_bytes[self.possible(scale).index()] + output_bytes;
        let turning = if self.orientation.swaps_sides() { 2 * pixels_bytes + self.kept_bytes } else { 0 };
        FIXED_BYTES + decoding.max(turning)
    }

    /// The part of the upright picture at `scale` that a second decode is for. `None` where the whole is decoded, or
    /// the region is no box.
    pub(super) fn window(&self, scale: Scale, region: BoxPx) -> Option<IntBox> {
        let part = scaled_box(self.upright, scale, region)?;
        let whole = self.upright.scaled(scale).pixels();
        (self.can_be_scaled() && part.size.pixels() * WINDOW_DIVISOR <= whole * WINDOW_PARTS).then_some(part)
    }
}

/// Opens a file, names it by its content and reads its header. Allocates nothing that grows with what the
/// header claims.
///
/// # Errors
/// `missing`, `permission`, `not_regular`, `bad_path`, `io`, `empty`, `not_an_image`, `unsupported`,
/// `too_large`, `truncated` where the file ends inside its header, `decode`, `decoder_panic`. Every message
/// begins with the path.
pub fn probe(path: &Path, config: &DecodeConfig) -> Result<Probed, RowError> {
    probe_below(path, None, config)
}

/// The same for a file that must lie below `root`, now and whenever it is opened again. `root` is absolute and without
/// links.
///
/// # Errors
/// Those of [`probe`], and `outside_root`.
pub fn probe_below(path: &Path, root: Option<&Arc<Path>>, config: &DecodeConfig) -> Result<Probed, RowError> {
    guarded(path, || {
        let (file, stamp) = open_regular(path, root.map(Arc::as_ref)).map_err(|r| r.at(path))?;
        let probed = probe_opened(path, &file, stamp, config).map_err(|r| r.at(path))?;
        let device = file.metadata().map_or(0, |metadata| metadata.dev());
        Ok(Probed { root: root.cloned(), device, ..probed })
    })
}

/// The same for an open file, read from its beginning.
pub(super) fn probe_opened(
    path: &Path,
    file: &File,
    stamp: FileStamp,
    config: &DecodeConfig,
) -> Result<Probed, Refusal> {
    if stamp.size_bytes == 0 {
        return Err(Refusal::new(RowCode::Empty, "the file is empty"));
    }
    let mut reader = BufReader::with_capacity(READ_BYTES, file);
    let first_bytes = reader.fill_buf()?;
    let format = match sniff(&first_bytes[..first_bytes.len().min(SNIFF_BYTES)]) {
        Kind::Image(format) => format,
        Kind::Unsupported(name) => {
            return Err(Refusal::new(RowCode::Unsupported, format!("{name} images are not supported")));
        }
        Kind::NotImage(words) => return Err(Refusal::new(RowCode::NotAnImage, format!("no image but {words}"))),
    };
    let file_bytes = stamp.size_bytes.unsigned_abs();
    let cost = match format {
        Format::Jpeg => {
            let header = jpeg::read_header(&mut reader)?;
            check_size(header.stored, config)?;
            jpeg_cost(&header, file_bytes)
        }
        _ => {
            let outline = container::outline(format, &mut reader, file_bytes)?;
            check_size(outline.stored, config)?;
            other_cost(format, &outline, reader, file_bytes)?
        }
    };
    Ok(cost.probed(path, stamp, format))
}

fn check_size(stored: Size, config: &DecodeConfig) -> Result<(), Refusal> {
    let Size { width_px, height_px } = stored;
    if stored.pixels() == 0 {
        return Err(Refusal::new(RowCode::Decode, format!("a size of {width_px}x{height_px}")));
    }
    if stored.pixels() > config.max_pixels {
        let (has, may) = (in_words(stored.pixels()), in_words(config.max_pixels));
        let reason = format!("{has} ({width_px}x{height_px}) exceeds --max-pixels {may}; raise it with --max-pixels");
        return Err(Refusal::new(RowCode::TooLarge, reason));
    }
    if width_px.max(height_px) > SIDE_MAX_PX {
        let reason = format!("a side of {width_px}x{height_px} exceeds {SIDE_MAX_PX} px");
        return Err(Refusal::new(RowCode::TooLarge, reason));
    }
    Ok(())
}

/// Megapixels where there are some.
fn in_words(pixels: u64) -> String {
    match pixels {
        0..1_000_000 => format!("{pixels} px"),
        n if n % 1_000_000 == 0 => format!("{} MP", n / 1_000_000),
        // Rounded up, so that the greater number also looks greater.
        n => format!("{:.1} MP", n.div_ceil(100_000) as f64 / 10.0),
    }
}

/// The parts of a decode's memory.
struct Cost {
    stored: Size,
    orientation: Option<Orientation>,
    components: u8,
    output_bytes: u64,
    /// Beside the output and until it is complete, at each of [`Scale::ALL`].
    decoder_bytes: [u64; 4],
    kept_bytes: u64,
    limit_bytes: u64,
    metadata_bytes: u64,
}

impl Cost {
    fn probed(self, path: &Path, stamp: FileStamp, format: Format) -> Probed {
        let orientation = self.orientation.unwrap_or_default();
        Probed {
            path: path.to_owned(),
            root: None,
            stamp,
            device: 0,
            format,
            stored: self.stored,
            upright: orientation.upright(self.stored),
            orientation,
            orientation_source: if self.orientation.is_some() { "exif" } else { "none" },
            components: self.components,
            output_bytes: self.output_bytes,
            decoder_bytes: self.decoder_bytes,
            kept_bytes: self.kept_bytes,
            limit_bytes: self.limit_bytes,
            metadata_bytes: self.metadata_bytes,
        }
    }
}

/// The file's bytes, its metadata three times more (the decoder copies it, and once more into its answer and on the
/// way), the coefficients where they are held at once, whatever the scale, and the planes of all components.
fn jpeg_cost(header: &JpegHeader, file_bytes: u64) -> Cost {
    let file = file_bytes.min(jpeg_bytes_max(header.stored));
    let held = file + 3 * header.header_bytes + header.coefficient_bytes();
    // The other decoder, for four components, has planes of its own.
    let Size { width_px, height_px } = header.stored;
    let four = 4 * (u64::from(width_px) + 32) * (u64::from(height_px) + 32);
    let planes = |scale| if header.components == 4 { four } else { header.plane_bytes(scale) };
    Cost {
        stored: header.stored,
        orientation: header.exif.as_deref().and_then(orient::from_exif_block),
        components: header.components,
        output_bytes: header.stored.pixels() * if header.components == 1 { 1 } else { 3 },
        decoder_bytes: Scale::ALL.map(|scale| held + planes(scale)),
        kept_bytes: file.min(FILE_BYTES_KEPT),
        limit_bytes: 0,
        metadata_bytes: 0,
    }
}

/// So much of a JPEG file is read and no more.
pub(super) fn jpeg_bytes_max(stored: Size) -> u64 {
    JPEG_BYTES_MIN + JPEG_BYTES_PER_PIXEL * stored.pixels()
}

/// Opens the decoder, which reads its header again, and asks it for the kind of its pixels.
fn other_cost(
    format: Format,
    outline: &Outline,
    mut reader: BufReader<&File>,
    file_bytes: u64,
) -> Result<Cost, Refusal> {
    let Size { width_px, height_px } = outline.stored;
    if format == Format::Bmp && width_px.max(height_px) > BMP_SIDE_MAX_PX {
        let reason = format!("a BMP of {width_px}x{height_px}; {BMP_SIDE_MAX_PX} px are its decoder's limit");
        return Err(Refusal::new(RowCode::TooLarge, reason));
    }
    std::io::Seek::rewind(&mut reader)?;
    let decoder = container::open_decoder(format, reader, outline.metadata_bytes)?;
    let (pixels, width) = (outline.stored.pixels(), u64::from(outline.stored.width_px));
    let output_bytes = decoder.total_bytes();
    let cmyk = matches!(decoder.original_color_type(), ExtendedColorType::Cmyk8 | ExtendedColorType::Cmyk16);
    let components = match format {
        Format::Gif => 3,
        _ if cmyk => 4,
        _ => decoder.color_type().channel_count(),
    };
    // VP8 works on blocks of 16 by 16.
    let blocks = (u64::from(outline.stored.width_px) + 15) * (u64::from(outline.stored.height_px) + 15);
    let (decoder_bytes, limit_bytes) = match format {
        // Chunks, and rows before and after unpacking.
        Format::Png => (outline.metadata_bytes + 64 * width, outline.metadata_bytes + 64 * width + FIXED_BYTES),
        // Lossless pixels (4 and a part), or planes (1.5) and alpha (5); with animation frame and canvas (8).
        Format::WebP => {
            let held = match (outline.animated, decoder.color_type().has_alpha()) {
                (true, _) => 13,
                (false, true) => 7,
                (false, false) => 5,
            };
            (file_bytes.min(12 * blocks + FIXED_BYTES) + held * blocks, 0)
        }
        // A first frame that is not as big as the canvas gets a buffer of its own; indices are kept, too.
        Format::Gif => (5 * pixels, 4 * pixels),
        Format::Bmp => (16 * width, 0),
        Format::Tiff => {
            let samples = if cmyk { output_bytes / 3 * 4 } else { output_bytes };
            let chunk = samples.max(file_bytes.min(4 * samples + FIXED_BYTES));
            (samples + chunk, samples + chunk)
        }
        Format::Jpeg => (0, 0),
    };
    Ok(Cost {
        stored: outline.stored,
        orientation: outline.orientation,
        components,
        output_bytes,
        decoder_bytes: [decoder_bytes; 4],
        kept_bytes: 0,
        limit_bytes,
        metadata_bytes: outline.metadata_bytes,
    })
}
