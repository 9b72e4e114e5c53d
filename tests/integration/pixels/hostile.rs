//! Files that lie, and files that are odd: the process lives, and memory stays where it was.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use croprow::config::DecodeConfig;
use croprow::geometry::{BoxPx, Scale, Size};
use croprow::pixels::decode::{Redecoded, decode, decode_region};
use croprow::pixels::header::probe;
use croprow::pixels::tensor::fill;
use croprow::recipe::{Filter, Fit, ImageInput};
use croprow::row::RowCode;
use image::DynamicImage;
use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress, compress_progressive};

use super::files::*;

/// A line of `/proc/self/status`, in bytes.
pub(super) fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

pub(super) fn patched(bytes: &[u8], at: usize, patch: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + patch.len()].copy_from_slice(patch);
    bytes
}

/// Small files whose headers claim hundreds of megapixels and more.
fn liars() -> Vec<(&'static str, Vec<u8>)> {
    let image = gradient(3, 3);
    let huge = 100_000_u32;
    let still = png(&DynamicImage::ImageRgb8(image.clone()), None);
    let jpeg = jpeg(&image);
    let frame = jpeg.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    let canvas = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff".to_vec();
    let lossless = b"RIFF\x12\0\0\0WEBPVP8L\x05\0\0\0\x2f\xff\xff\xff\x0f\0".to_vec();
    vec![
        ("png", patched(&still, 16, &[huge.to_be_bytes(), huge.to_be_bytes()].concat())),
        ("wide png", patched(&still, 16, &[(1_u32 << 31) - 1, 1].map(u32::to_be_bytes).concat())),
        ("jpeg", patched(&jpeg, frame + 5, &[65_500_u16.to_be_bytes(), 65_500_u16.to_be_bytes()].concat())),
        ("bmp", patched(&bmp(&image), 18, &[huge.to_le_bytes(), huge.to_le_bytes()].concat())),
        ("gif", patched(&gif(std::slice::from_ref(&image)), 6, &[0xff; 4])),
        ("tiff", {
            let tiff = tiff(&image, 1);
            patched(&patched(&tiff, 18, &huge.to_le_bytes()), 30, &huge.to_le_bytes())
        }),
        ("webp canvas", canvas),
        ("lossless webp", lossless),
    ]
}

#[test]
fn headers_that_claim_too_much_are_refused_before_anything_is_allocated() {
    let folder = Folder::new();
    let before = status_bytes("VmHWM");
    for (name, bytes) in liars() {
        let error = open(&folder.write("liar", &bytes), &CONFIG).map(|_| ()).unwrap_err();
        assert_eq!(error.code, RowCode::TooLarge, "{name}: {}", error.message);
        assert!(error.message.contains("--max-pixels 180 MP"), "{name}: {}", error.message);
    }
    let still = png(&DynamicImage::ImageRgb8(gradient(3, 3)), None);
    let long = patched(&still, 16, &[2_000_000, 1].map(u32::to_be_bytes).concat());
    let error = open(&folder.write("long", &long), &CONFIG).map(|_| ()).unwrap_err();
    assert_eq!(error.code, RowCode::TooLarge, "few pixels, but a side that costs memory: {}", error.message);
    let grown = status_bytes("VmHWM") - before;
    assert!(grown < 64 << 20, "{grown} bytes");
}

#[test]
fn sides_of_one_pixel_are_decoded_and_resized() {
    let folder = Folder::new();
    for (width, height) in [(1, 1), (1, 5_000), (5_000, 1), (65_500, 1), (1, 65_500), (2, 3)] {
        let image = gradient(width, height);
        let dynamic = DynamicImage::ImageRgb8(image.clone());
        for bytes in [png(&dynamic, Some(&exif(6))), jpeg(&image), tiff(&image, 8)] {
            let read = open(&folder.write("thin", &bytes), &CONFIG).unwrap();
            let upright = read.facts.upright;
            for fit in [
                Fit::Squash,
                Fit::Pad { fill: 114 },
                Fit::Center { resize_shortest_px: 32 },
                Fit::Scale { shortest_px: 28, longest_px: 56, multiple_px: 1, step_px: 1 },
                Fit::Corner,
                Fit::SquareBlur,
            ] {
                for filter in [Filter::Nearest, Filter::Bilinear, Filter::Bicubic, Filter::Lanczos3] {
                    let input = ImageInput { size: Size::new(28, 28), filter, fit, mean: [0.5; 3], std: [0.5; 3] };
                    let mut out = vec![f32::NAN; input.values(upright)];
                    let placement = fill(&read.picture, BoxPx::whole(upright), &input, &mut out).unwrap().placement;
                    assert!(out.iter().all(|v| (-1.001..=1.001).contains(v)), "{width}x{height} {fit:?} {filter:?}");
                    assert!(placement.scale_x > 0.0 && placement.scale_y > 0.0);
                }
            }
        }
    }
}

#[test]
fn no_prefix_and_no_flipped_byte_gets_past_probe_and_decode() {
    let folder = Folder::new();
    let mut codes: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
    for (name, bytes) in one_of_each() {
        assert!(open(&folder.write("whole", &bytes), &CONFIG).is_ok(), "{name}");
        // Every prefix of the headers, and some of the data's; as many flips as seconds allow.
        for end in (0..bytes.len()).filter(|end| *end < 200 || end % 7 == 0 || bytes.len() - end < 10) {
            let result = open(&folder.write("prefix", &bytes[..end]), &USE_TRUNCATED);
            let code = result.map_or_else(|e| e.code.word(), |_| "decoded");
            *codes.entry((name, "prefix", code)).or_default() += 1;
        }
        for at in (0..bytes.len()).filter(|at| *at < 150 || at % 5 == 0) {
            for mask in [0x80, 0xff] {
                let flipped = patched(&bytes, at, &[bytes[at] ^ mask]);
                // Small, so that a flipped size cannot make this test slow.
                let config = DecodeConfig { max_pixels: 1_000_000, ..USE_TRUNCATED };
                let result = open(&folder.write("flipped", &flipped), &config);
                let code = result.map_or_else(|e| e.code.word(), |_| "decoded");
                *codes.entry((name, "flip", code)).or_default() += 1;
            }
        }
    }
    for ((name, kind, code), count) in &codes {
        println!("{name:12} {kind:6} {code:14} {count}");
    }
}

/// A process of its own, because the high water mark is the process's.
#[test]
fn decoding_stays_below_the_memory_it_announced() {
    let folder = Folder::new();
    let image = gradient(2400, 1600);
    let dynamic = DynamicImage::ImageRgb8(image.clone());
    let turned = |jpeg: &[u8]| with_segment(jpeg, 0xe1, &[b"Exif\0\0".as_slice(), &exif(6)].concat());
    let encoded =
        |encode: Encode, sampling| encode(image.as_raw(), 2400, 1600, PixelFormat::Rgb, 90, sampling).unwrap();
    let files = [
        ("turned.jpg", turned(&jpeg(&image))),
        ("420.jpg", encoded(compress, Subsampling::S420)),
        ("422.jpg", turned(&encoded(compress, Subsampling::S422))),
        ("progressive.jpg", encoded(compress_progressive, Subsampling::S420)),
        ("rgb.png", png(&dynamic, None)),
        ("rgba16.png", png(&DynamicImage::ImageRgba16(dynamic.to_rgba16()), None)),
        ("lossless.webp", webp(&dynamic, Some(&exif(6)))),
        ("rgb.bmp", bmp(&image)),
        ("rgb.tiff", tiff(&image, 6)),
        ("one.gif", gif(std::slice::from_ref(&image))),
    ];
    for (name, bytes) in files {
        let path = folder.write(name, &bytes);
        let kinds = if name.ends_with(".jpg") { Scale::ALL.len() + 1 } else { 1 };
        for kind in 0..kinds {
            decode_apart(name, &path, kind);
        }
    }
}

type Encode = fn(&[u8], usize, usize, PixelFormat, u8, Subsampling) -> libjpeg_turbo_rs::Result<Vec<u8>>;

/// `kind` is a place in [`Scale::ALL`], or what follows for a region.
fn decode_apart(name: &str, path: &Path, kind: usize) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "pixels::hostile::one_decode_in_a_process_of_its_own", "--nocapture", "--test-threads=1"]);
    child.env("CROPROW_TEST_DECODE", path).env("CROPROW_TEST_DECODE_KIND", kind.to_string());
    let said = String::from_utf8_lossy(&child.output().unwrap().stdout).into_owned();
    let number = |word: &str| -> u64 {
        said.split(word).nth(1).and_then(|s| s.split_whitespace().next()).unwrap().parse().unwrap()
    };
    let (used, worst) = (number("used="), number("worst="));
    println!("{name}, {kind}: {used} of {worst} bytes announced");
    assert!(used <= worst + (1 << 20), "{name}, {kind}: {used} of {worst}");
    assert!(used * 4 + (2 << 20) >= worst, "{name}, {kind}: announces far more than it takes: {used} of {worst}");
}

#[test]
fn one_decode_in_a_process_of_its_own() {
    let Some(path) = std::env::var_os("CROPROW_TEST_DECODE") else { return };
    let kind: usize = std::env::var("CROPROW_TEST_DECODE_KIND").unwrap().parse().unwrap();
    let probed = probe(path.as_ref(), &CONFIG).unwrap();
    // Near the bottom, where the most rows are made and thrown away.
    let region = BoxPx { x0: 900.0, y0: 1100.0, x1: 1500.0, y1: 1500.0 };
    // The program's own pages are none of a file's.
    for bytes in [jpeg(&gradient(40, 24)), include_bytes!("../../data/images/progressive.jpg").to_vec()] {
        open(&Folder::new().write("first.jpg", &bytes), &CONFIG).unwrap();
    }
    let before = status_bytes("VmRSS");
    let (pixels, worst) = match Scale::ALL.get(kind) {
        Some(scale) => (decode(&probed, &CONFIG, *scale).unwrap().picture, probed.worst_bytes(*scale)),
        None => match decode_region(&probed, &CONFIG, Scale::FULL, region).unwrap() {
            Redecoded::Picture(part) => (part, probed.region_bytes(Scale::FULL, region)),
            Redecoded::FileChanged => panic!("it did not"),
        },
    };
    let used = status_bytes("VmHWM") - before;
    println!("used={used} worst={worst} {:?}", pixels.window);
}
