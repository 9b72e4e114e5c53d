//! Files made in the tests, and what becomes of them.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use croprow::config::{DecodeConfig, MAX_PIXELS_DEFAULT};
use croprow::geometry::Scale;
use croprow::pixels::decode::{Upright, decode};
use croprow::pixels::header::probe;
use croprow::recipe::Truncated;
use croprow::row::{RowCode, RowError};
use image::codecs::bmp::BmpEncoder;
use image::codecs::gif::GifEncoder;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngEncoder;
use image::codecs::webp::WebPEncoder;
use image::{DynamicImage, ImageEncoder, Rgb, RgbImage};
use tempfile::TempDir;

pub(crate) const CONFIG: DecodeConfig =
    DecodeConfig { max_pixels: MAX_PIXELS_DEFAULT, truncated: Truncated::Fail, mode: croprow::recipe::Decode::Exact };
pub(crate) const USE_TRUNCATED: DecodeConfig = DecodeConfig { truncated: Truncated::Use, ..CONFIG };

/// A folder that goes with the test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Probes and decodes; the message of an error must begin with the path and be one short line.
pub(crate) fn open(path: &Path, config: &DecodeConfig) -> Result<Upright, RowError> {
    let result = probe(path, config).and_then(|probed| {
        let upright = decode(&probed, config, Scale::FULL)?;
        assert_eq!(upright.picture.pixels.dimensions(), (probed.upright.width_px, probed.upright.height_px));
        assert_eq!(upright.facts.upright, probed.upright);
        assert_eq!(upright.picture.bytes(), probed.pixels_bytes(Scale::FULL));
        assert!(probed.worst_bytes(Scale::FULL) > probed.pixels_bytes(Scale::FULL));
        Ok(upright)
    });
    if let Err(error) = &result {
        assert!(error.message.starts_with(&path.display().to_string()), "{}", error.message);
        assert!(error.message.len() <= 500 && !error.message.contains('\n'), "{}", error.message);
    }
    result
}

pub(crate) fn code(path: &Path) -> RowCode {
    open(path, &CONFIG).map(|u| u.facts).unwrap_err().code
}

/// Different in both directions, smooth enough for JPEG.
pub(crate) fn gradient(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([(240 * x / width) as u8, (240 * y / height) as u8, 128]))
}

pub(crate) fn noise(width: u32, height: u32) -> RgbImage {
    let mut state = 1_u32;
    RgbImage::from_fn(width, height, |_, _| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Rgb([(state >> 24) as u8, (state >> 16) as u8, (state >> 8) as u8])
    })
}

/// Encodes with an Exif block where the format has a place for it.
fn encode_with(image: &DynamicImage, exif: Option<&[u8]>, mut encoder: impl ImageEncoder) {
    if let Some(exif) = exif {
        encoder.set_exif_metadata(exif.to_vec()).unwrap();
    }
    image.write_with_encoder(encoder).unwrap();
}

pub(crate) fn jpeg(image: &RgbImage) -> Vec<u8> {
    let mut bytes = Vec::new();
    JpegEncoder::new_with_quality(&mut bytes, 95).encode_image(image).unwrap();
    bytes
}

pub(crate) fn png(image: &DynamicImage, exif: Option<&[u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_with(image, exif, PngEncoder::new(&mut bytes));
    bytes
}

pub(crate) fn webp(image: &DynamicImage, exif: Option<&[u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_with(image, exif, WebPEncoder::new_lossless(&mut bytes));
    bytes
}

pub(crate) fn bmp(image: &RgbImage) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_with(&DynamicImage::ImageRgb8(image.clone()), None, BmpEncoder::new(&mut bytes));
    bytes
}

pub(crate) fn gif(frames: &[RgbImage]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new(&mut bytes);
    for frame in frames {
        encoder.encode_frame(image::Frame::new(DynamicImage::ImageRgb8(frame.clone()).to_rgba8())).unwrap();
    }
    drop(encoder);
    bytes
}

/// An Exif block, or the head of a TIFF, with the orientation as a SHORT.
pub(crate) fn exif(orientation: u16) -> Vec<u8> {
    let mut block = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01".to_vec();
    block.extend(orientation.to_be_bytes());
    block.extend([0; 6]);
    block
}

/// The segment goes right after the file's first marker.
pub(crate) fn with_segment(jpeg: &[u8], marker: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, marker], &length, payload, &jpeg[2..]].concat()
}

/// Uncompressed RGB of one strip.
pub(crate) fn tiff(image: &RgbImage, orientation: u16) -> Vec<u8> {
    let long = |tag: u16, value: u32| {
        [&tag.to_le_bytes()[..], &4u16.to_le_bytes(), &1u32.to_le_bytes(), &value.to_le_bytes()].concat()
    };
    let short = |tag: u16, value: u16| {
        [&tag.to_le_bytes()[..], &3u16.to_le_bytes(), &1u32.to_le_bytes(), &value.to_le_bytes(), &[0, 0]].concat()
    };
    let (width, height) = image.dimensions();
    const ENTRIES: u32 = 10;
    let after = 10 + 12 * ENTRIES + 4;
    let bits = [&258u16.to_le_bytes()[..], &3u16.to_le_bytes(), &3u32.to_le_bytes(), &after.to_le_bytes()].concat();
    let mut bytes = b"II*\0\x08\0\0\0".to_vec();
    bytes.extend((ENTRIES as u16).to_le_bytes());
    for entry in [
        long(256, width),
        long(257, height),
        bits,
        short(259, 1),
        short(262, 2),
        long(273, after + 6),
        short(274, orientation),
        short(277, 3),
        long(278, height),
        long(279, 3 * width * height),
    ] {
        bytes.extend(entry);
    }
    bytes.extend([0, 0, 0, 0, 8, 0, 8, 0, 8, 0]);
    bytes.extend(image.as_raw());
    bytes
}

/// One small valid file of every format that can be decoded.
pub(crate) fn one_of_each() -> Vec<(&'static str, Vec<u8>)> {
    let image = gradient(12, 9);
    let dynamic = DynamicImage::ImageRgb8(image.clone());
    vec![
        ("jpeg", with_segment(&jpeg(&image), 0xe1, &[b"Exif\0\0".as_slice(), &exif(6)].concat())),
        ("progressive", include_bytes!("../../data/images/progressive.jpg").to_vec()),
        ("cmyk", include_bytes!("../../data/images/cmyk.jpg").to_vec()),
        ("png", png(&dynamic, Some(&exif(6)))),
        ("png16", png(&DynamicImage::ImageRgba16(dynamic.to_rgba16()), None)),
        ("webp", webp(&dynamic, Some(&exif(6)))),
        ("lossy webp", include_bytes!("../../data/images/lossy.webp").to_vec()),
        ("gif", gif(&[image.clone(), noise(12, 9)])),
        ("bmp", bmp(&image)),
        ("tiff", tiff(&image, 6)),
    ]
}

/// Greatest difference of any two samples.
pub(crate) fn difference(a: &RgbImage, b: &RgbImage) -> u8 {
    assert_eq!(a.dimensions(), b.dimensions());
    a.as_raw().iter().zip(b.as_raw()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

/// Decodes with the `image` crate alone.
pub(crate) fn plainly(bytes: &[u8]) -> RgbImage {
    image::ImageReader::new(Cursor::new(bytes)).with_guessed_format().unwrap().decode().unwrap().to_rgb8()
}
