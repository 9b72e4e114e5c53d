//! Small files that unfold into much: deep compression, profiles, texts, frames, scans. Memory and time stay small.

use std::process::Command;
use std::time::{Duration, Instant};

use croprow::row::RowCode;
use image::{DynamicImage, GrayImage, RgbImage};
use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress_progressive};

use super::files::*;
use super::hostile::{patched, status_bytes};

/// What decoding may add to the process, whatever the file unfolds to.
const GROWTH_BYTES: u64 = 64 << 20;

/// What unfolds.
const UNFOLDED_BYTES: usize = 400 << 20;

/// A zlib stream of so many zeros.
fn zlib_of_zeros(bytes: usize) -> Vec<u8> {
    let side = bytes.isqrt() as u32;
    let image = png(&DynamicImage::ImageLuma8(GrayImage::new(side, side)), None);
    chunks(&image).filter(|(kind, _)| kind == b"IDAT").flat_map(|(_, data)| data.to_vec()).collect()
}

pub(super) fn chunks(png: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    let mut rest = &png[8..];
    std::iter::from_fn(move || {
        let length = u32::from_be_bytes(*rest.first_chunk()?) as usize;
        let (kind, data) = (rest[4..8].try_into().unwrap(), &rest[8..8 + length]);
        rest = &rest[12 + length..];
        Some((kind, data))
    })
}

pub(super) fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let checked = [kind.as_slice(), data].concat();
    [&(data.len() as u32).to_be_bytes()[..], &checked, &crc32(&checked).to_be_bytes()].concat()
}

fn crc32(bytes: &[u8]) -> u32 {
    let table: Vec<u32> = (0..256)
        .map(|n| (0..8).fold(n, |c: u32, _| if c & 1 == 1 { (c >> 1) ^ 0xedb8_8320 } else { c >> 1 }))
        .collect();
    !bytes.iter().fold(!0_u32, |crc, byte| (crc >> 8) ^ table[usize::from((crc as u8) ^ byte)])
}

/// A small PNG with other chunks after its header, and perhaps with other pixels.
pub(super) fn png_with(extra: &[u8], pixels: Option<&[u8]>) -> Vec<u8> {
    let plain = png(&DynamicImage::ImageRgb8(gradient(16, 16)), None);
    let mut bytes = plain[..33].to_vec();
    bytes.extend(extra);
    for (kind, data) in chunks(&plain).skip(1) {
        bytes.extend(chunk(&kind, if kind == *b"IDAT" { pixels.unwrap_or(data) } else { data }));
    }
    bytes
}

/// A deflated TIFF of 16 by 16 grey pixels in one strip; the count of its offsets is `strips`, and the directory after
/// its only one lies at `next`.
fn tiff_of(strip: &[u8], strips: u32, next: u32) -> Vec<u8> {
    let entry = |tag: u16, kind: u16, count: u32, value: u32| {
        [&tag.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes(), &value.to_le_bytes()].concat()
    };
    let entries = [
        entry(256, 4, 1, 16),
        entry(257, 4, 1, 16),
        entry(258, 3, 1, 8),
        entry(259, 3, 1, 8),
        entry(262, 3, 1, 1),
        entry(273, 4, strips, 8 + 2 + 10 * 12 + 4),
        entry(277, 3, 1, 1),
        entry(278, 4, 1, 16),
        entry(279, 4, strips, strip.len() as u32),
        entry(339, 3, 1, 1),
    ];
    let mut bytes = b"II*\0\x08\0\0\0\x0a\0".to_vec();
    bytes.extend(entries.concat());
    bytes.extend(next.to_le_bytes());
    bytes.extend(strip);
    bytes
}

/// An animation of 16 by 16 whose first frame is of another size.
fn gif_with_frame(width: u16, height: u16) -> Vec<u8> {
    let plain = gif(&[gradient(16, 16), noise(16, 16)]);
    let frame = plain.windows(5).position(|w| w == [0x2c, 0, 0, 0, 0]).unwrap();
    patched(&plain, frame + 5, &[width.to_le_bytes(), height.to_le_bytes()].concat())
}

/// A canvas of 16 by 16 whose first frame claims another size.
fn webp_with_frame(width: u32, height: u32) -> Vec<u8> {
    let still = webp(&DynamicImage::ImageRgb8(gradient(16, 16)), None);
    let le24 = |n: u32| n.to_le_bytes()[..3].to_vec();
    let frame = [vec![0; 6], le24(width - 1), le24(height - 1), vec![0; 4], still[12..].to_vec()].concat();
    let piece =
        |kind: &[u8], data: &[u8]| [kind, &(data.len() as u32).to_le_bytes(), data, &vec![0; data.len() % 2]].concat();
    let body = [
        b"WEBP".to_vec(),
        piece(b"VP8X", &[vec![2, 0, 0, 0], le24(15), le24(15)].concat()),
        piece(b"ANIM", &[0; 6]),
        piece(b"ANMF", &frame),
    ]
    .concat();
    piece(b"RIFF", &body)
}

/// A process of its own, because the high water mark is the process's.
#[test]
fn files_that_unfold_into_much_take_little_memory_and_time() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "pixels::bombs::every_bomb_in_a_process_of_its_own", "--nocapture"]);
    let output = child.env("CROPROW_TEST_BOMBS", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success() && said.contains("tall.bmp"), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_bomb_in_a_process_of_its_own() {
    if std::env::var_os("CROPROW_TEST_BOMBS").is_none() {
        return;
    }
    let folder = Folder::new();
    let deep = zlib_of_zeros(UNFOLDED_BYTES);
    assert!(deep.len() < 2 << 20, "{}", deep.len());
    let text = |kind: &[u8; 4]| chunk(kind, &[b"Comment\0\0".as_slice(), &deep].concat());
    let international = chunk(b"iTXt", &[b"Comment\0\x01\0\0\0".as_slice(), &deep].concat());
    let many_texts = text(b"zTXt").repeat(8);
    let endless = chunk(b"acTL", &[u32::MAX.to_be_bytes(), 0_u32.to_be_bytes()].concat());
    // The name of each, and the code it must have; none: it is decoded or refused, as its decoder likes.
    let files: [(&str, Vec<u8>, Option<RowCode>); 13] = [
        ("text.png", png_with(&text(b"zTXt"), None), None),
        ("texts.png", png_with(&many_texts, None), None),
        ("itext.png", png_with(&international, None), None),
        ("profile.png", png_with(&text(b"iCCP"), None), None),
        ("deep.png", png_with(&[], Some(&deep)), None),
        ("endless.png", png_with(&endless, None), None),
        ("deep.tif", tiff_of(&deep, 1, 0), None),
        ("strips.tif", tiff_of(&zlib_of_zeros(300), u32::MAX, 0), Some(RowCode::Decode)),
        ("cycle.tif", tiff_of(&zlib_of_zeros(300), 1, 8), None),
        ("wide.gif", gif_with_frame(u16::MAX, u16::MAX), None),
        ("frame.webp", webp_with_frame(1 << 24, 1 << 24), Some(RowCode::Decode)),
        (
            "wide.bmp",
            patched(&bmp(&gradient(3, 3)), 18, &[70_000_u32.to_le_bytes(), 10_u32.to_le_bytes()].concat()),
            Some(RowCode::TooLarge),
        ),
        (
            "tall.bmp",
            patched(&bmp(&gradient(3, 3)), 18, &[10_u32.to_le_bytes(), (-70_000_i32).to_le_bytes()].concat()),
            Some(RowCode::TooLarge),
        ),
    ];
    for (name, bytes, wanted) in files {
        let path = folder.write(name, &bytes);
        // Begins the mark anew: making the files took more.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let (before, began) = (status_bytes("VmHWM"), Instant::now());
        let found = open(&path, &CONFIG).map(|upright| upright.facts.upright.pixels());
        let grown = status_bytes("VmHWM").saturating_sub(before);
        println!("{name}: {} bytes, {found:?}, {grown} bytes, {:?}", bytes.len(), began.elapsed());
        match (&found, wanted) {
            (Ok(pixels), None) => assert_eq!(*pixels, 256, "{name}"),
            (Err(error), None) => assert_ne!(error.code, RowCode::DecoderPanic, "{name}: {error}"),
            (found, Some(code)) => assert_eq!(found.as_ref().unwrap_err().code, code, "{name}"),
        }
        assert!(grown < GROWTH_BYTES, "{name}: {grown} bytes");
        assert!(began.elapsed() < Duration::from_secs(20), "{name}: {:?}", began.elapsed());
    }
}

#[test]
fn holes_of_terabytes_are_not_walked_over() {
    let folder = Folder::new();
    let riff =
        [b"RIFF".as_slice(), &0xffff_fff0_u32.to_le_bytes(), b"WEBPVP8X\x0a\0\0\0\x08\0\0\0\x0f\0\0\x0f\0\0"].concat();
    let plain = png(&DynamicImage::ImageRgb8(gradient(16, 16)), None);
    for (name, head, length) in [
        ("hole.png", &plain[..33], 1_u64 << 42),
        ("hole.webp", &riff, 1 << 32),
        ("hole.jpg", &[0xff, 0xd8, 0xff, 0xe0, 0, 4, 0, 0], 1 << 42),
        ("hole.gif", b"GIF89a\x10\0\x10\0\0\0\0", 1 << 42),
        ("hole.tif", b"II*\0\x08\0\0\0", 1 << 42),
        ("hole.bmp", b"BM", 1 << 42),
    ] {
        let path = folder.write(name, head);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let began = Instant::now();
        let error = open(&path, &CONFIG).map(|_| ()).unwrap_err();
        println!("{name}: {error}");
        assert!(began.elapsed() < Duration::from_secs(5), "{name}: {:?}", began.elapsed());
    }
}

#[test]
fn an_animation_costs_what_its_first_frame_costs() {
    let folder = Folder::new();
    let image = noise(400, 400);
    let frames: Vec<RgbImage> = (0..40).map(|_| image.clone()).collect();
    let time = |bytes: &[u8]| {
        let path = folder.write("moving.gif", bytes);
        let times = (0..5).map(|_| {
            let began = Instant::now();
            assert_eq!(open(&path, &CONFIG).unwrap().facts.upright.pixels(), 160_000);
            began.elapsed()
        });
        times.min().unwrap()
    };
    let (one, forty) = (time(&gif(&frames[..1])), time(&gif(&frames)));
    assert!(forty < 3 * one + Duration::from_millis(20), "{one:?} and {forty:?}");
}

#[test]
fn a_jpeg_of_endless_scans_is_refused_and_an_ordinary_progressive_one_is_not() {
    let folder = Folder::new();
    let image = gradient(64, 64);
    let plain = compress_progressive(image.as_raw(), 64, 64, PixelFormat::Rgb, 90, Subsampling::S420).unwrap();
    assert!(open(&folder.write("plain.jpg", &plain), &CONFIG).is_ok());
    let last = plain.windows(2).rposition(|w| w == [0xff, 0xda]).unwrap();
    let (head, scan) = plain[..plain.len() - 2].split_at(last);
    let bomb = [head, &scan.repeat(100_000), &[0xff, 0xd9]].concat();
    let path = folder.write("bomb.jpg", &bomb);
    let began = Instant::now();
    let error = open(&path, &CONFIG).map(|_| ()).unwrap_err();
    assert!(error.code == RowCode::Decode && error.message.contains("scans; 500"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(10));
}
