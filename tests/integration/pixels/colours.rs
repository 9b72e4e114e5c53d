//! Whatever a file's samples are, they become the right RGB8.

use image::{DynamicImage, GrayAlphaImage, GrayImage, ImageBuffer, Luma, LumaA, Rgb, RgbImage, Rgba, RgbaImage};

use super::files::*;

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
    image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, 100).encode_image(&grey).unwrap();
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
}
