//! Whatever a file's samples are, they become the right RGB8.

use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngEncoder;
use image::codecs::webp::WebPEncoder;
use image::{
    DynamicImage, GrayAlphaImage, GrayImage, ImageBuffer, ImageEncoder, Luma, LumaA, Rgb, RgbImage, Rgba, RgbaImage,
};
use libjpeg_turbo_rs::{ColorSpace, Encoder, PixelFormat, Subsampling};

use super::bombs::{chunk, chunks};
use super::files::*;
use super::hostile::patched;

fn read(name: &str, bytes: &[u8]) -> RgbImage {
    let folder = Folder::new();
    open(&folder.write(name, bytes), &CONFIG).unwrap().picture.pixels
}

#[test]
fn sixteen_bits_are_scaled_and_not_clipped() {
    let levels = [0_u16, 128, 129, 257, 32_768, 40_000, 65_406, 65_407, 65_535];
    let expected: Vec<u8> = levels.iter().map(|v| (f64::from(*v) / 257.0).round() as u8).collect();
    let grey = ImageBuffer::from_fn(levels.len() as u32, 2, |x, _| Luma([levels[x as usize]]));
    let read_grey = read("grey16.png", &png(&DynamicImage::ImageLuma16(grey), None));
    let rgb = ImageBuffer::from_fn(levels.len() as u32, 2, |x, _| Rgb([levels[x as usize], 0, 65_535]));
    let read_rgb = read("rgb16.png", &png(&DynamicImage::ImageRgb16(rgb), None));
    for (x, level) in expected.into_iter().enumerate() {
        assert_eq!(read_grey.get_pixel(x as u32, 1).0, [level; 3]);
        assert_eq!(read_rgb.get_pixel(x as u32, 1).0, [level, 0, 255]);
    }
    let levels = [0_u16, 300, 32_768, 65_535, 40_000, 128];
    // Two pixels of six samples, as four pixels of twelve bytes.
    let bytes = levels.iter().flat_map(|v| v.to_le_bytes()).collect();
    let eight = tiff(&RgbImage::from_raw(4, 1, bytes).unwrap(), 1);
    let bits = eight.windows(6).position(|w| w == [8, 0, 8, 0, 8, 0]).unwrap();
    let sixteen = patched(&patched(&eight, bits, &[16, 0, 16, 0, 16, 0]), 18, &2_u32.to_le_bytes());
    assert_eq!(read("rgb16.tif", &sixteen).into_raw(), [0, 1, 128, 255, 156, 0]);
}

#[test]
fn transparent_pixels_become_white_whatever_colour_hides_there() {
    let rgba = RgbaImage::from_fn(3, 2, |x, _| Rgba([200, 0, 100, [0, 128, 255][x as usize]]));
    let expected = [[255, 255, 255], [227, 127, 177], [200, 0, 100]];
    let dynamic = DynamicImage::ImageRgba8(rgba.clone());
    let sixteen = DynamicImage::ImageRgba16(dynamic.to_rgba16());
    for (name, bytes) in
        [("a.png", png(&dynamic, None)), ("a.webp", webp(&dynamic, None)), ("16.png", png(&sixteen, None))]
    {
        let read = read(name, &bytes);
        for (x, expected) in expected.iter().enumerate() {
            assert_eq!(read.get_pixel(x as u32, 1).0, *expected, "{name} {x}");
        }
    }
    let grey = GrayAlphaImage::from_fn(3, 2, |x, _| LumaA([100, [0, 128, 255][x as usize]]));
    let read = read("la.png", &png(&DynamicImage::ImageLumaA8(grey), None));
    assert_eq!(read.as_raw()[..9], [255, 255, 255, 177, 177, 177, 100, 100, 100]);
}

#[test]
fn grey_files_become_grey_pixels() {
    let grey = GrayImage::from_fn(33, 17, |x, y| Luma([(3 * x + 5 * y) as u8]));
    let expected = DynamicImage::ImageLuma8(grey.clone()).to_rgb8();
    assert_eq!(read("grey.png", &png(&DynamicImage::ImageLuma8(grey.clone()), None)), expected);
    let mut bytes = Vec::new();
    JpegEncoder::new_with_quality(&mut bytes, 100).encode_image(&grey).unwrap();
    let folder = Folder::new();
    let upright = open(&folder.write("grey.jpg", &bytes), &CONFIG).unwrap();
    assert_eq!(upright.facts.components, 1);
    assert!(difference(&upright.picture.pixels, &expected) <= 4);
}

#[test]
fn cmyk_and_progressive_files_are_read() {
    let expected = RgbImage::from_fn(40, 24, |x, y| Rgb([6 * x as u8, 10 * y as u8, 128]));
    let folder = Folder::new();
    let cases = [
        ("cmyk.jpg", include_bytes!("../../data/images/cmyk.jpg").as_slice(), 4),
        ("progressive.jpg", include_bytes!("../../data/images/progressive.jpg"), 3),
        ("lossy.webp", include_bytes!("../../data/images/lossy.webp"), 3),
    ];
    for (name, bytes, components) in cases {
        let read = open(&folder.write(name, bytes), &CONFIG).unwrap();
        assert_eq!(read.facts.components, components, "{name}");
        let worst = difference(&read.picture.pixels, &expected);
        assert!(worst <= 24, "{name}: {worst}");
    }
}

#[test]
fn every_format_equals_the_decoder_alone() {
    let folder = Folder::new();
    let image = gradient(33, 17);
    let dynamic = DynamicImage::ImageRgb8(image.clone());
    let files = [
        ("jpeg", jpeg(&image)),
        ("png", png(&dynamic, None)),
        ("webp", webp(&dynamic, None)),
        ("bmp", bmp(&image)),
        ("gif", gif(std::slice::from_ref(&image))),
        ("tiff", tiff(&image, 1)),
    ];
    for (format, bytes) in files {
        let read = open(&folder.write("image", &bytes), &CONFIG).unwrap();
        assert_eq!(read.facts.format, format);
        // Two JPEG decoders round differently.
        let most = if format == "jpeg" { 4 } else { 0 };
        let theirs = plainly(&bytes);
        let differences = read.picture.pixels.as_raw().iter().zip(theirs.as_raw()).map(|(a, b)| a.abs_diff(*b));
        assert!(differences.max() <= Some(most), "{format}");
    }
}

#[test]
fn the_first_frame_of_an_animation_is_taken() {
    let frames = [RgbImage::from_pixel(20, 10, Rgb([255, 0, 0])), RgbImage::from_pixel(20, 10, Rgb([0, 0, 255]))];
    assert_eq!(read("two.gif", &gif(&frames)), frames[0]);
    let animated = include_bytes!("../../data/images/animated.webp");
    assert!(read("two.webp", animated).pixels().all(|p| p.0[0] > 240 && p.0[2] < 16));
    let [red, blue] = [&frames[0], &frames[1]].map(|frame| png(&DynamicImage::ImageRgb8(frame.clone()), None));
    let data = |png: &[u8]| -> Vec<u8> {
        chunks(png).filter(|(kind, _)| kind == b"IDAT").flat_map(|(_, data)| data.to_vec()).collect()
    };
    let control = |sequence: u32| {
        let numbers = [sequence, 20, 10, 0, 0].map(u32::to_be_bytes).concat();
        chunk(b"fcTL", &[numbers, vec![0, 1, 0, 1, 0, 0]].concat())
    };
    let animated = [
        red[..33].to_vec(),
        chunk(b"acTL", &[2_u32, 0].map(u32::to_be_bytes).concat()),
        control(0),
        chunk(b"IDAT", &data(&red)),
        control(1),
        chunk(b"fdAT", &[2_u32.to_be_bytes().to_vec(), data(&blue)].concat()),
        chunk(b"IEND", &[]),
    ];
    assert_eq!(read("two.png", &animated.concat()), frames[0]);
}

/// An uncompressed PNG of one row: bits of a sample, colour type, what stands before the pixels, and their bytes.
fn one_row(width: u32, [depth, kind]: [u8; 2], before: &[u8], row: &[u8]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &1_u32.to_be_bytes(), &[depth, kind, 0, 0, 0]].concat();
    let filtered = [&[0_u8][..], row].concat();
    let (a, b) = filtered.iter().fold((1_u32, 0_u32), |(a, b), byte| (a + u32::from(*byte), a + b + u32::from(*byte)));
    let length = filtered.len() as u16;
    let (length, check) = ([length, !length].map(u16::to_le_bytes).concat(), (b << 16 | a).to_be_bytes());
    let zlib = [&[0x78_u8, 1, 1][..], &length, &filtered, &check].concat();
    let chunks = [chunk(b"IHDR", &header), before.to_vec(), chunk(b"IDAT", &zlib), chunk(b"IEND", &[])];
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunks.concat()].concat()
}

#[test]
fn few_bits_palettes_and_transparent_colours_become_rgb() {
    let bilevel = one_row(3, [1, 0], &[], &[0b1010_0000]);
    assert_eq!(read("bilevel.png", &bilevel).into_raw(), [255, 255, 255, 0, 0, 0, 255, 255, 255]);
    let four_levels = one_row(4, [2, 0], &[], &[0b0001_1011]);
    assert_eq!(read("levels.png", &four_levels).into_raw(), [0, 0, 0, 85, 85, 85, 170, 170, 170, 255, 255, 255]);
    let colours = chunk(b"PLTE", &[255, 0, 0, 0, 255, 0, 0, 0, 255]);
    let palette = one_row(3, [2, 3], &colours, &[0b0001_1000]);
    assert_eq!(read("palette.png", &palette).into_raw(), [255, 0, 0, 0, 255, 0, 0, 0, 255]);
    // Green is transparent, blue half of it.
    let with_alpha = [colours, chunk(b"tRNS", &[255, 0, 128])].concat();
    let palette = one_row(3, [2, 3], &with_alpha, &[0b0001_1000]);
    assert_eq!(read("palette.png", &palette).into_raw(), [255, 0, 0, 255, 255, 255, 127, 127, 255]);
    let keyed = one_row(3, [8, 0], &chunk(b"tRNS", &[0, 7]), &[7, 8, 200]);
    assert_eq!(read("keyed.png", &keyed).into_raw(), [255, 255, 255, 8, 8, 8, 200, 200, 200]);
}

/// What Y, Cb and Cr are in R, G and B, as JFIF has it.
fn from_ycc(Rgb([y, cb, cr]): Rgb<u8>) -> [u8; 3] {
    let [y, cb, cr] = [f32::from(y), f32::from(cb) - 128.0, f32::from(cr) - 128.0];
    [y + 1.402 * cr, y - 0.344_136 * cb - 0.714_136 * cr, y + 1.772 * cb].map(|v| v.round() as u8)
}

#[test]
fn four_inks_are_read_as_pillow_reads_them_with_and_without_a_marker() {
    let cmyk = include_bytes!("../../data/images/cmyk.jpg").as_slice();
    // The first segment is Adobe's; its last byte says that inks are stored as they are.
    assert!(cmyk[2..].starts_with(b"\xff\xee\0\x0eAdobe") && cmyk[17] == 0);
    let inks = read("cmyk.jpg", cmyk);
    assert_eq!(read("bare.jpg", &[&cmyk[..2], &cmyk[18..]].concat()), inks);
    // The same numbers as YCCK. There is no black in them, so that the other three were R, G and B before.
    let ycck = read("ycck.jpg", &patched(cmyk, 17, &[2]));
    let expected =
        RgbImage::from_fn(40, 24, |x, y| Rgb(from_ycc(*inks.get_pixel(x, y)).map(|inverted| 255 - inverted)));
    let worst = difference(&ycck, &expected);
    assert!(worst <= 3, "{worst}");
}

#[test]
fn every_coding_of_a_jpeg_gives_the_picture_that_was_encoded() {
    let image = gradient(200, 150);
    let coded = |sampling| Encoder::new(image.as_raw(), 200, 150, PixelFormat::Rgb).quality(95).subsampling(sampling);
    let mut files = vec![
        ("restarts", coded(Subsampling::S420).restart_blocks(3)),
        ("restarts of rows", coded(Subsampling::S444).restart_rows(1)),
        ("rgb", coded(Subsampling::S444).colorspace(ColorSpace::Rgb)),
    ];
    for sampling in [Subsampling::S444, Subsampling::S422, Subsampling::S420, Subsampling::S440, Subsampling::S411] {
        files.extend([("sequential", coded(sampling)), ("progressive", coded(sampling).progressive(true))]);
    }
    for (number, (name, encoder)) in files.into_iter().enumerate() {
        let bytes = encoder.encode().unwrap();
        let holds = |word: &[u8]| bytes.windows(word.len()).any(|w| w == word);
        assert_eq!((holds(b"\xff\xdd"), holds(b"Adobe")), (name.starts_with("restarts"), name == "rgb"), "{name}");
        let worst = difference(&read("coded.jpg", &bytes), &image);
        assert!(worst <= 8, "{number}, {name}: {worst}");
    }
}

/// With a colour profile, whatever its bytes mean.
fn encode(image: &DynamicImage, profile: Option<&RgbImage>, mut encoder: impl ImageEncoder) {
    if let Some(profile) = profile {
        encoder.set_icc_profile(profile.as_raw().clone()).unwrap();
    }
    image.write_with_encoder(encoder).unwrap();
}

#[test]
fn a_large_colour_profile_costs_nothing_and_is_not_applied() {
    let image = DynamicImage::ImageRgb8(gradient(40, 24));
    // 400 kB that cannot be compressed.
    let profile = noise(400, 334);
    let encoded = |profile: Option<&RgbImage>| {
        let (mut jpeg, mut png, mut webp): (Vec<u8>, Vec<u8>, Vec<u8>) = Default::default();
        encode(&image, profile, JpegEncoder::new_with_quality(&mut jpeg, 95));
        encode(&image, profile, PngEncoder::new(&mut png));
        encode(&image, profile, WebPEncoder::new_lossless(&mut webp));
        [jpeg, png, webp]
    };
    for (with, without) in encoded(Some(&profile)).iter().zip(&encoded(None)) {
        assert!(with.len() > 350_000 && without.len() < 5_000, "{} {}", with.len(), without.len());
        assert_eq!(read("with", with), read("without", without));
    }
}
