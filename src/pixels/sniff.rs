//! What a file is, by its first bytes. The name of a file never decides how it is decoded.

use std::path::Path;

/// Enough first bytes for every rule below; shorter slices work as far as they go.
pub const SNIFF_BYTES: usize = 512;

/// A container that croprow decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// JFIF, Exif or bare.
    Jpeg,
    /// Also APNG, of which the first frame is taken.
    Png,
    /// Lossy, lossless or animated.
    WebP,
    /// The first frame is taken.
    Gif,
    /// Windows bitmap.
    Bmp,
    /// The classic 32-bit kind.
    Tiff,
}

impl Format {
    /// The word that is stored beside the row.
    pub fn word(self) -> &'static str {
        match self {
            Self::Jpeg => "jpeg",
            Self::Png => "png",
            Self::WebP => "webp",
            Self::Gif => "gif",
            Self::Bmp => "bmp",
            Self::Tiff => "tiff",
        }
    }
}

/// What the first bytes say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An image that can be decoded, unless its content says otherwise.
    Image(Format),
    /// An image of a format that croprow knows by name only.
    Unsupported(&'static str),
    /// No image; what it is instead, in words.
    NotImage(String),
}

/// Names a file by its first bytes; [`SNIFF_BYTES`] of them are enough.
pub fn sniff(first_bytes: &[u8]) -> Kind {
    if let Some(format) = decodable(first_bytes) {
        return Kind::Image(format);
    }
    if let Some(name) = unsupported(first_bytes) {
        return Kind::Unsupported(name);
    }
    Kind::NotImage(in_words(first_bytes))
}

/// True for anything that is an image, decodable or not. For scans of folders.
pub fn looks_like_image(first_bytes: &[u8]) -> bool {
    !matches!(sniff(first_bytes), Kind::NotImage(_))
}

/// True where the name promises an image, in any case of letters. Formats that cannot be decoded count:
/// their rows fail with the name of the format, and nobody wonders where the pictures went.
pub fn has_image_extension(path: &Path) -> bool {
    const EXTENSIONS: [&str; 55] = [
        "jpg", "jpeg", "jpe", "jfif", "jif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff", "heic", "heif",
        "hif", "avif", "jxl", "jp2", "j2k", "j2c", "jpc", "jpf", "jpx", "jxr", "wdp", "hdp", "psd", "exr", "hdr",
        "qoi", "dds", "tga", "pnm", "pbm", "pgm", "ppm", "pam", "pfm", "cr2", "cr3", "crw", "nef", "nrw", "arw", "sr2",
        "dng", "raf", "orf", "rw2", "pef", "srw", "x3f", "3fr", "iiq",
    ];
    path.extension()
        .and_then(|extension| extension.to_str())
        .is_some_and(|extension| EXTENSIONS.iter().any(|known| known.eq_ignore_ascii_case(extension)))
}

fn decodable(b: &[u8]) -> Option<Format> {
    // Two bytes are a JPEG that ends after its first marker: truncated, not some other file.
    if b.starts_with(b"\xff\xd8\xff") || b == b"\xff\xd8" {
        Some(Format::Jpeg)
    } else if b.starts_with(b"\x89PNG\r\n\x1a\n") {
        Some(Format::Png)
    } else if b.starts_with(b"RIFF") && b.get(8..12) == Some(b"WEBP") {
        Some(Format::WebP)
    } else if b.starts_with(b"GIF87a") || b.starts_with(b"GIF89a") {
        Some(Format::Gif)
    } else if is_bmp(b) {
        Some(Format::Bmp)
    } else if is_tiff(b) {
        Some(Format::Tiff)
    } else {
        None
    }
}

/// `BM` alone begins many texts: the size of the second header must be one that exists.
fn is_bmp(b: &[u8]) -> bool {
    const HEADER_SIZES: [u8; 8] = [12, 16, 40, 52, 56, 64, 108, 124];
    b.starts_with(b"BM") && b.get(15..18) == Some(&[0, 0, 0]) && b.get(14).is_some_and(|n| HEADER_SIZES.contains(n))
}

fn is_tiff(b: &[u8]) -> bool {
    let canon_raw = b.get(8..10) == Some(b"CR");
    (b.starts_with(b"II*\0") && !canon_raw) || b.starts_with(b"MM\0*")
}

/// Images by name. Sources: the formats' specifications; for raw files the signatures of `file(1)`.
fn unsupported(b: &[u8]) -> Option<&'static str> {
    const MAGIC: [(&[u8], &str); 34] = [
        (b"II+\0", "bigtiff"),
        (b"MM\0+", "bigtiff"),
        (b"\xff\x0a", "jxl"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "jp2"),
        (b"\xff\x4f\xff\x51", "j2k"),
        (b"8BPS", "psd"),
        (b"\0\0\x01\0", "ico"),
        (b"\0\0\x02\0", "cur"),
        (b"icns", "icns"),
        (b"\x76\x2f\x31\x01", "exr"),
        (b"#?RADIANCE", "hdr"),
        (b"#?RGBE", "hdr"),
        (b"qoif", "qoi"),
        (b"DDS ", "dds"),
        (b"farbfeld", "farbfeld"),
        (b"II\xbc\x01", "jpeg-xr"),
        (b"II*\0", "cr2"),
        (b"II\x1a\0\0\0HEAPCCDR", "crw"),
        (b"FUJIFILMCCD-RAW", "raf"),
        (b"IIRO", "orf"),
        (b"IIRS", "orf"),
        (b"MMOR", "orf"),
        (b"IIU\0", "rw2"),
        (b"FOVb", "x3f"),
        (b"\0MRM", "mrw"),
        (b"BPG\xfb", "bpg"),
        (b"FLIF", "flif"),
        (b"gimp xcf", "xcf"),
        (b"AT&TFORM", "djvu"),
        (b"SIMPLE  =", "fits"),
        (b"PF\n", "pfm"),
        (b"Pf\n", "pfm"),
        (b"\x0a\x05\x01\x08", "pcx"),
    ];
    let by_magic = MAGIC.iter().find(|(magic, _)| b.starts_with(magic)).map(|(_, name)| *name);
    by_magic
        .or_else(|| iso_media_image(b))
        .or_else(|| is_pnm(b).then_some("pnm"))
        .or_else(|| is_svg(b).then_some("svg"))
}

/// HEIF and its relatives say what they are in a list of brands (ISO/IEC 14496-12, `ftyp`).
fn iso_media_image(b: &[u8]) -> Option<&'static str> {
    let brands = iso_media_brands(b)?;
    let has = |wanted: &[&[u8; 4]]| brands.chunks_exact(4).any(|brand| wanted.iter().any(|w| brand == *w));
    if has(&[b"avif", b"avis"]) {
        Some("avif")
    } else if has(&[b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"]) {
        Some("heic")
    } else if has(&[b"crx "]) {
        Some("cr3")
    } else {
        None
    }
}

fn iso_media_brands(b: &[u8]) -> Option<&[u8]> {
    if b.get(4..8) != Some(b"ftyp") {
        return None;
    }
    let length = u32::from_be_bytes(*b.first_chunk()?) as usize;
    b.get(8..length.clamp(12, b.len().max(12)))
}

fn is_pnm(b: &[u8]) -> bool {
    matches!(b, [b'P', b'1'..=b'7', c, ..] if c.is_ascii_whitespace())
}

fn is_svg(b: &[u8]) -> bool {
    let text = without_bom(b);
    starts_with_word(text, b"<svg") || (starts_with_word(text, b"<?xml") && text.windows(4).any(|w| w == b"<svg"))
}

/// What is no image, in the words of the message.
fn in_words(b: &[u8]) -> String {
    const MAGIC: [(&[u8], &str); 17] = [
        (b"version https://git-lfs", "a git-lfs pointer; fetch the file with `git lfs pull`"),
        (b"%PDF-", "pdf"),
        (b"\x1f\x8b", "gzip"),
        (b"PK\x03\x04", "zip"),
        (b"PK\x05\x06", "zip"),
        (b"7z\xbc\xaf\x27\x1c", "7z"),
        (b"Rar!", "rar"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh", "bzip2"),
        (b"SQLite format 3\0", "an SQLite database"),
        (b"\x93NUMPY", "a NumPy array"),
        (b"PAR1", "Parquet"),
        (b"RIFF", "RIFF without a WebP image"),
        (b"\x1aE\xdf\xa3", "Matroska video"),
        (b"OggS", "Ogg"),
        (b"\x7fELF", "a program"),
    ];
    if let Some((_, word)) = MAGIC.iter().find(|(magic, _)| b.starts_with(magic)) {
        return (*word).to_owned();
    }
    let text = without_bom(b);
    if starts_with_word(text, b"<!doctype html") || starts_with_word(text, b"<html") || starts_with_word(text, b"<head")
    {
        "HTML".to_owned()
    } else if starts_with_word(text, b"<?xml") {
        "XML".to_owned()
    } else if text.starts_with(b"{") || text.starts_with(b"[") {
        "JSON".to_owned()
    } else if iso_media_brands(b).is_some() {
        "video (ISO media)".to_owned()
    } else if !b.is_empty() && b.iter().all(|byte| *byte == 0) {
        "zeros".to_owned()
    } else if is_text(b) {
        "text".to_owned()
    } else {
        let hex: Vec<String> = b.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        format!("unknown content, first bytes {}", hex.join(" "))
    }
}

/// After a byte order mark and white space.
fn without_bom(b: &[u8]) -> &[u8] {
    b.strip_prefix(b"\xef\xbb\xbf").unwrap_or(b).trim_ascii_start()
}

fn starts_with_word(b: &[u8], word: &[u8]) -> bool {
    b.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word))
}

/// UTF-8 without control characters; a character cut off at the end of the slice does not matter.
fn is_text(b: &[u8]) -> bool {
    let mut chunks = b.utf8_chunks();
    let Some(first) = chunks.next() else { return false };
    let clean = first.valid().chars().all(|c| !c.is_control() || c.is_ascii_whitespace());
    clean
        && !first.valid().is_empty()
        && chunks.next().is_none()
        && (first.invalid().is_empty() || b.len() == SNIFF_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodable_formats_are_known_by_their_bytes() {
        let cases: [(&[u8], Format); 9] = [
            (b"\xff\xd8\xff\xe0", Format::Jpeg),
            (b"\xff\xd8", Format::Jpeg),
            (b"\x89PNG\r\n\x1a\n\0\0", Format::Png),
            (b"RIFF\x10\0\0\0WEBPVP8 ", Format::WebP),
            (b"GIF89a\x01\0", Format::Gif),
            (b"GIF87a\x01\0", Format::Gif),
            (b"BM\0\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0", Format::Bmp),
            (b"II*\0\x08\0\0\0", Format::Tiff),
            (b"MM\0*\0\0\0\x08", Format::Tiff),
        ];
        for (bytes, format) in cases {
            assert_eq!(sniff(bytes), Kind::Image(format), "{bytes:?}");
        }
    }

    #[test]
    fn unsupported_images_have_a_name() {
        let cases: [(&[u8], &str); 14] = [
            (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heic"),
            (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "avif"),
            (b"\0\0\0\x18ftypavif\0\0\0\0", "avif"),
            (b"\0\0\0\x18ftypcrx \0\0\0\x01crx isom", "cr3"),
            (b"\xff\x0a\xfa\x1f", "jxl"),
            (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl"),
            (b"\0\0\0\x0cjP  \r\n\x87\n", "jp2"),
            (b"\xff\x4f\xff\x51\0\x2f", "j2k"),
            (b"II+\0\x08\0", "bigtiff"),
            (b"II*\0\x10\0\0\0CR\x02\0", "cr2"),
            (b"8BPS\0\x01", "psd"),
            (b"P6\n2 2\n255\n", "pnm"),
            (b"<?xml version=\"1.0\"?>\n<svg xmlns=\"x\">", "svg"),
            (b" <SVG>", "svg"),
        ];
        for (bytes, name) in cases {
            assert_eq!(sniff(bytes), Kind::Unsupported(name), "{bytes:?}");
        }
    }

    #[test]
    fn other_content_is_named_in_words() {
        let cases: [(&[u8], &str); 12] = [
            (b"\n<!DOCTYPE html><p>", "HTML"),
            (b"\xef\xbb\xbf<html lang=en>", "HTML"),
            (b"<?xml version=\"1.0\"?><Error/>", "XML"),
            (b"{\"error\": 404}", "JSON"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid",
                "a git-lfs pointer; fetch the file with `git lfs pull`",
            ),
            (b"\x1f\x8b\x08", "gzip"),
            (b"PK\x03\x04", "zip"),
            (b"%PDF-1.7", "pdf"),
            (b"BMW is a car, and this is text", "text"),
            (&[0; 512], "zeros"),
            (b"\n\xff\xd8\xff\xe0", "unknown content, first bytes 0a ff d8 ff e0"),
            (b"\0\0\0\x18ftypisom\0\0\0\0", "video (ISO media)"),
        ];
        for (bytes, words) in cases {
            assert_eq!(sniff(bytes), Kind::NotImage(words.to_owned()), "{bytes:?}");
        }
    }

    #[test]
    fn a_scan_takes_unsupported_images_too() {
        assert!(looks_like_image(b"\0\0\0\x18ftypheic\0\0\0\0"));
        assert!(!looks_like_image(b"<html>"));
        for name in ["a.JPG", "b.heic", "c.Tiff", "d.NEF"] {
            assert!(has_image_extension(Path::new(name)), "{name}");
        }
        for name in ["a.txt", "jpg", ".jpg", "b.html", "c"] {
            assert!(!has_image_extension(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn no_prefix_of_anything_makes_it_panic() {
        let long = [b"\0\0\0\x18ftypheic\0\0\0\0mif1".as_slice(), &[0xff; 600]].concat();
        for end in 0..long.len() {
            sniff(&long[..end]);
            sniff(&long[end..]);
        }
    }
}
