//! EXIF orientation: reading it and turning pixels upright.
//!
//! Policy. The tag is taken from the first Exif block of a JPEG, from a PNG's `eXIf` chunk before the
//! image data, from a WebP's `EXIF` chunk, and from tag 274 of a TIFF's first directory. Zero, one or two
//! `Exif\0\0` prefixes are stripped. The tag may be typed SHORT or LONG; of several values the first counts;
//! 1 to 8 apply and everything else, other types and broken blocks included, is upright and no error. XMP and
//! ImageMagick's text profiles are ignored, as browsers do. Decoders are never asked to turn anything, so
//! a picture is turned once.

use std::io::{self, Read, Seek, SeekFrom};

use exif::{In, Reader, Tag, Value};
use image::RgbImage;
use image::imageops;

use crate::geometry::{Orientation, Size};

/// A first directory with more entries than this is not read; TIFF files in the wild have below 100.
const DIRECTORY_ENTRIES_MAX: u16 = 4096;

/// Side of the squares in which pixels are turned: rows of one and columns of the other side stay in cache.
const TILE: usize = 32;

/// Orientation in an Exif block (TIFF structure), `None` where it has none that applies.
pub fn from_exif_block(block: &[u8]) -> Option<Orientation> {
    let mut data = block;
    for _ in 0..2 {
        data = data.strip_prefix(b"Exif\0\0").unwrap_or(data);
    }
    let read = Reader::new().continue_on_error(true).read_raw(data.to_vec());
    let exif = read.or_else(|e| e.distill_partial_result(|_| ())).ok()?;
    let value = match &exif.get_field(Tag::Orientation, In::PRIMARY)?.value {
        Value::Short(values) => u32::from(*values.first()?),
        Value::Long(values) => *values.first()?,
        _ => return None,
    };
    (1..=8).contains(&value).then(|| Orientation::from_exif(value))
}

/// What a TIFF's first directory says beside its picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TiffDirectory {
    /// `None` where a side is missing.
    pub(super) stored: Option<Size>,
    pub(super) orientation: Option<Orientation>,
    /// The picture here is only the preview of a camera's raw data.
    pub(super) raw_preview: bool,
}

/// Reads the first directory of a TIFF file. The one entry that matters is handed to the Exif reader as a
/// block of its own, so that the whole file need not be in memory. Values kept outside of their entry
/// (several LONGs) count as none.
///
/// # Errors
/// `UnexpectedEof` where the directory lies beyond the file.
pub(super) fn read_tiff_directory<R: Read + Seek>(reader: &mut R) -> io::Result<TiffDirectory> {
    let mut head = [0; 8];
    reader.read_exact(&mut head)?;
    let little = head[0] == b'I';
    let u16_at = |b: &[u8]| if little { u16::from_le_bytes([b[0], b[1]]) } else { u16::from_be_bytes([b[0], b[1]]) };
    let u32_at = |b: &[u8]| {
        let bytes = [b[0], b[1], b[2], b[3]];
        if little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) }
    };
    reader.seek(SeekFrom::Start(u64::from(u32_at(&head[4..]))))?;
    let mut count = [0; 2];
    reader.read_exact(&mut count)?;
    let (mut directory, mut reduced, mut has_children) = (TiffDirectory::default(), false, false);
    let (mut width_px, mut height_px) = (None, None);
    for _ in 0..u16_at(&count).min(DIRECTORY_ENTRIES_MAX) {
        let mut entry = [0; 12];
        reader.read_exact(&mut entry)?;
        // A SHORT stands in the first half of the value's field.
        let value = if u16_at(&entry[2..]) == 3 { u32::from(u16_at(&entry[8..])) } else { u32_at(&entry[8..]) };
        match u16_at(&entry) {
            // NewSubfileType, bit 0: a reduced version of another picture in the file.
            254 => reduced = value & 1 == 1,
            256 => width_px = Some(value),
            257 => height_px = Some(value),
            274 => directory.orientation = from_exif_block(&single_entry_block(&head, little, &entry)),
            // SubIFDs: where cameras put the real picture.
            330 => has_children = true,
            // DNGVersion
            50706 => directory.raw_preview = true,
            _ => {}
        }
    }
    directory.stored = width_px.zip(height_px).map(|(width_px, height_px)| Size { width_px, height_px });
    directory.raw_preview |= reduced && has_children;
    Ok(directory)
}

/// A TIFF structure with one directory of one entry.
fn single_entry_block(head: &[u8; 8], little: bool, entry: &[u8; 12]) -> Vec<u8> {
    let mut block = head[..4].to_vec();
    if little {
        block.extend([8, 0, 0, 0, 1, 0]);
    } else {
        block.extend([0, 0, 0, 8, 0, 1]);
    }
    block.extend(entry);
    block.extend([0; 4]);
    block
}

/// Turns a picture upright. In place where the sides keep their places; else a second picture of the same
/// size exists for a moment.
pub fn apply(image: RgbImage, orientation: Orientation) -> RgbImage {
    let mut image = image;
    match orientation {
        Orientation::Upright => image,
        Orientation::FlipHorizontal => {
            imageops::flip_horizontal_in_place(&mut image);
            image
        }
        Orientation::Rotate180 => {
            imageops::rotate180_in_place(&mut image);
            image
        }
        Orientation::FlipVertical => {
            imageops::flip_vertical_in_place(&mut image);
            image
        }
        Orientation::Transpose => transposed(&image, false, false),
        Orientation::Rotate90 => transposed(&image, true, false),
        Orientation::Transverse => transposed(&image, true, true),
        Orientation::Rotate270 => transposed(&image, false, true),
    }
}

/// Rows become columns, in either direction, square by square: `imageops::rotate90` walks down columns and
/// misses the cache with every pixel of a photo.
fn transposed(image: &RgbImage, mirror_x: bool, mirror_y: bool) -> RgbImage {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let source = image.as_raw();
    let mut turned = RgbImage::new(image.height(), image.width());
    let target: &mut [u8] = &mut turned;
    let step = if mirror_x { -3 * width as isize } else { 3 * width as isize };
    for tile_x in (0..width).step_by(TILE) {
        for tile_y in (0..height).step_by(TILE) {
            let rows = TILE.min(height - tile_y);
            let (left, first_y) = if mirror_x { (height - tile_y - rows, tile_y + rows - 1) } else { (tile_y, tile_y) };
            for x in tile_x..(tile_x + TILE).min(width) {
                let row = if mirror_y { width - 1 - x } else { x };
                let to = 3 * (row * height + left);
                let mut from = 3 * (first_y * width + x);
                for pixel in target[to..to + 3 * rows].chunks_exact_mut(3) {
                    pixel.copy_from_slice(&source[from..from + 3]);
                    // Beyond the picture only after the last pixel, when it is not used.
                    from = from.wrapping_add_signed(step);
                }
            }
        }
    }
    turned
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// An Exif block with one directory of one orientation entry. `kind`: 1 BYTE, 3 SHORT, 4 LONG.
    fn block(little: bool, kind: u16, count: u32, value: u32) -> Vec<u8> {
        let mut b = if little { b"II*\0\x08\0\0\0\x01\0".to_vec() } else { b"MM\0*\0\0\0\x08\0\x01".to_vec() };
        let value = match (little, kind) {
            (true, _) => value.to_le_bytes(),
            (false, 1) => [value as u8, 0, 0, 0],
            (false, 3) => [(value >> 8) as u8, value as u8, 0, 0],
            (false, _) => value.to_be_bytes(),
        };
        if little {
            b.extend([274u16.to_le_bytes(), kind.to_le_bytes()].concat());
            b.extend(count.to_le_bytes());
        } else {
            b.extend([274u16.to_be_bytes(), kind.to_be_bytes()].concat());
            b.extend(count.to_be_bytes());
        }
        b.extend(value);
        b.extend([0; 4]);
        b
    }

    #[test]
    fn both_types_both_byte_orders_and_every_prefix_are_read() {
        for little in [true, false] {
            for (kind, count) in [(3, 1), (3, 2), (4, 1)] {
                for value in 1..=8 {
                    let plain = block(little, kind, count, value);
                    let expected = Some(Orientation::from_exif(value));
                    for prefixes in 0..3 {
                        let prefixed = [b"Exif\0\0".repeat(prefixes), plain.clone()].concat();
                        assert_eq!(from_exif_block(&prefixed), expected, "{little} {kind} {count} {value} {prefixes}");
                    }
                    let file = read_tiff_directory(&mut Cursor::new(&plain)).unwrap();
                    assert_eq!(file.orientation, expected, "{little} {kind} {count} {value}");
                }
            }
        }
    }

    #[test]
    fn values_out_of_range_and_garbage_are_upright() {
        for value in [0, 9, 10, 65_535] {
            assert_eq!(from_exif_block(&block(true, 3, 1, value)), None, "{value}");
        }
        for little in [true, false] {
            assert_eq!(from_exif_block(&block(little, 1, 1, 6)), None, "a tag typed BYTE");
        }
        let whole = block(true, 3, 1, 6);
        for end in 0..whole.len() {
            let cut = from_exif_block(&whole[..end]);
            assert!(matches!(cut, None | Some(Orientation::Rotate90)), "{end}");
        }
        for at in 0..whole.len() {
            let mut broken = whole.clone();
            broken[at] ^= 0xff;
            let _ = from_exif_block(&broken);
            let _ = read_tiff_directory(&mut Cursor::new(&broken));
        }
        assert_eq!(from_exif_block(b"Exif\0\0Exif\0\0"), None);
    }

    #[test]
    fn the_preview_in_a_cameras_raw_file_is_told_apart() {
        let entry = |tag: u16, value: u32| {
            [&tag.to_le_bytes()[..], &4u16.to_le_bytes(), &1u32.to_le_bytes(), &value.to_le_bytes()].concat()
        };
        let file = |entries: &[Vec<u8>]| {
            let head = [b"II*\0\x08\0\0\0".as_slice(), &(entries.len() as u16).to_le_bytes()].concat();
            read_tiff_directory(&mut Cursor::new([head, entries.concat()].concat())).unwrap().raw_preview
        };
        assert!(file(&[entry(254, 1), entry(330, 64)]));
        assert!(file(&[entry(50706, 1)]));
        assert!(!file(&[entry(254, 0), entry(330, 64)]));
        assert!(!file(&[entry(254, 1)]));
    }

    #[test]
    fn turning_equals_the_image_crate() {
        for (w, h) in [(1, 1), (1, 70), (70, 1), (33, 65), (64, 32)] {
            let image = RgbImage::from_fn(w, h, |x, y| image::Rgb([x as u8, y as u8, (x * y) as u8]));
            let cases = [
                (1, image.clone()),
                (2, imageops::flip_horizontal(&image)),
                (3, imageops::rotate180(&image)),
                (4, imageops::flip_vertical(&image)),
                (5, imageops::flip_horizontal(&imageops::rotate90(&image))),
                (6, imageops::rotate90(&image)),
                (7, imageops::flip_horizontal(&imageops::rotate270(&image))),
                (8, imageops::rotate270(&image)),
            ];
            for (value, expected) in cases {
                assert_eq!(apply(image.clone(), Orientation::from_exif(value)), expected, "{w}x{h} {value}");
            }
        }
    }
}
