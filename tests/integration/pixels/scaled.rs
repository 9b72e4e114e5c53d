//! Pictures that are decoded smaller than they are stored, and parts of pictures.

use croprow::geometry::{BoxPx, IntBox, Orientation, Scale, Size};
use croprow::pixels::decode::{Redecoded, decode, decode_region};
use croprow::pixels::header::probe;
use croprow::pixels::orient::apply;
use croprow::pixels::picture::Picture;
use croprow::pixels::tensor::{encode_crop_jpeg, fill, wanted};
use croprow::recipe::{Filter, Fit, ImageInput};
use croprow::row::RowCode;
use image::RgbImage;
use image::imageops::crop_imm;
use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress, compress_progressive};

use super::files::*;
use crate::support::root;

/// Colours that change within a block, in both directions, over shades that change slowly.
fn stripes(width: u32, height: u32) -> RgbImage {
    let (shades, specks) = (gradient(width, height), noise(width, height));
    RgbImage::from_fn(width, height, |x, y| {
        let (mut pixel, speck) = (*shades.get_pixel(x, y), specks.get_pixel(x, y));
        for c in 0..3 {
            pixel.0[c] = (pixel.0[c] / 2).saturating_add(speck.0[c] / 4);
        }
        pixel.0[((x / 5 + y / 7) % 3) as usize] = 230;
        pixel
    })
}

fn encoded(image: &RgbImage, subsampling: Subsampling, progressive: bool) -> Vec<u8> {
    let encode = if progressive { compress_progressive } else { compress };
    let (width, height) = (image.width() as usize, image.height() as usize);
    encode(image.as_raw(), width, height, PixelFormat::Rgb, 92, subsampling).unwrap()
}

fn noted(jpeg: &[u8], orientation: u16) -> Vec<u8> {
    with_segment(jpeg, 0xe1, &[b"Exif\0\0".as_slice(), &exif(orientation)].concat())
}

fn at_scale(folder: &Folder, bytes: &[u8], scale: Scale) -> Picture {
    let probed = probe(&folder.write("a.jpg", bytes), &CONFIG).unwrap();
    decode(&probed, &CONFIG, scale).unwrap().picture
}

const SAMPLINGS: [Subsampling; 5] =
    [Subsampling::S444, Subsampling::S422, Subsampling::S420, Subsampling::S440, Subsampling::S411];

#[test]
fn scaled_pictures_equal_pillows_to_the_last_bit() {
    let at = root().join("tests/data/reference/scaled");
    for name in ["444", "422", "420", "420_progressive", "444_progressive", "grey"] {
        let probed = probe(&at.join(format!("{name}.jpg")), &CONFIG).unwrap();
        for scale in Scale::ALL.into_iter().skip(1) {
            let reference = image::open(at.join(format!("{name}_{}.png", scale.denominator()))).unwrap().to_rgb8();
            let picture = decode(&probed, &CONFIG, scale).unwrap().picture;
            assert_eq!((picture.image, picture.scale), (Size::new(141, 99), scale));
            assert_eq!(difference(&picture.pixels, &reference), 0, "{name} at {scale:?}");
        }
    }
}

#[test]
fn a_turned_file_is_scaled_first_and_then_turned() {
    let folder = Folder::new();
    for (subsampling, progressive) in [(Subsampling::S420, false), (Subsampling::S444, true)] {
        let jpeg = encoded(&stripes(141, 99), subsampling, progressive);
        for scale in Scale::ALL {
            let plain = at_scale(&folder, &jpeg, scale);
            for value in 1..=8 {
                let turn = Orientation::from_exif(value.into());
                let turned = at_scale(&folder, &noted(&jpeg, value), scale);
                assert_eq!(turned.pixels, apply(plain.pixels.clone(), turn), "{value} {scale:?}");
                assert_eq!(turned.image, turn.upright(Size::new(141, 99)));
                assert_eq!(turned.window.size, turned.image.scaled(scale));
                assert_eq!(turned.bytes(), probe(&folder.path().join("a.jpg"), &CONFIG).unwrap().pixels_bytes(scale));
            }
        }
    }
}

/// Boxes at the picture's edges, of one pixel, across an MCU's border, and of fractions.
fn regions(image: Size) -> Vec<BoxPx> {
    let (w, h) = (image.width_px as f32, image.height_px as f32);
    [
        [0.0, 0.0, 1.0, 1.0],
        [w - 1.0, h - 1.0, w, h],
        [0.0, h / 2.0, w / 3.0, h],
        [w / 2.0, 0.0, w, h / 3.0],
        [16.0, 16.0, 32.0, 32.0],
        [31.0, 47.0, 33.0, 49.0],
        [w * 0.31, h * 0.23, w * 0.71, h * 0.66],
        [32.0, 0.0, 48.0, h],
        [0.0, 33.3, w, 64.7],
        [-5.0, -5.0, 20.0, 20.0],
    ]
    .map(|[x0, y0, x1, y1]| BoxPx { x0, y0, x1, y1 })
    .to_vec()
}

#[test]
fn a_region_decoded_alone_equals_the_same_place_of_the_whole() {
    let folder = Folder::new();
    let (mut windows, mut pixels, mut of) = (0, 0, 0);
    for subsampling in SAMPLINGS {
        for progressive in [false, true] {
            let jpeg = encoded(&stripes(203, 149), subsampling, progressive);
            for value in 1..=8 {
                // All scales and all turns, but not all of them with all.
                for scale in Scale::ALL.into_iter().take(if value == 1 || value == 6 { 4 } else { 1 }) {
                    let probed = probe(&folder.write("a.jpg", &noted(&jpeg, value)), &CONFIG).unwrap();
                    let whole = decode(&probed, &CONFIG, scale).unwrap().picture;
                    for region in regions(probed.upright) {
                        let part = match decode_region(&probed, &CONFIG, scale, region).unwrap() {
                            Redecoded::Picture(part) => part,
                            Redecoded::FileChanged => panic!("it did not"),
                        };
                        let said = format!("{subsampling:?} {progressive} {value} {scale:?} {region:?}");
                        assert!(part.holds(region), "{said}: {:?}", part.window);
                        let IntBox { x, y, size } = part.window;
                        let same = crop_imm(&whole.pixels, x, y, size.width_px, size.height_px).to_image();
                        assert_eq!(difference(&part.pixels, &same), 0, "{said}: {:?}", part.window);
                        assert!(part.bytes() <= probed.region_bytes(scale, region), "{said}");
                        windows += usize::from(part.window != whole.window);
                        (pixels, of) = (pixels + size.pixels(), of + whole.window.size.pixels());
                    }
                }
            }
        }
    }
    assert!(windows > 1000 && pixels * 2 < of, "{windows} windows, {pixels} of {of} pixels: it decodes the whole");
}

#[test]
fn a_second_decode_notices_another_file_and_a_region_that_is_none() {
    let folder = Folder::new();
    let jpeg = encoded(&stripes(64, 64), Subsampling::S420, false);
    let probed = probe(&folder.write("a.jpg", &jpeg), &CONFIG).unwrap();
    let region = BoxPx { x0: 3.0, y0: 3.0, x1: 9.0, y1: 9.0 };
    for none in [BoxPx { x0: f32::NAN, ..region }, BoxPx { x0: 70.0, x1: 80.0, ..region }, BoxPx { y1: 1.0, ..region }]
    {
        let error = decode_region(&probed, &CONFIG, Scale::FULL, none).unwrap_err();
        assert_eq!(error.code, RowCode::NanOutput, "{}", error.message);
    }
    folder.write("a.jpg", &[jpeg, vec![0]].concat());
    let again = decode_region(&probed, &CONFIG, Scale::FULL, region).unwrap();
    assert!(matches!(again, Redecoded::FileChanged), "its boxes are those of another picture");
    std::fs::remove_file(folder.path().join("a.jpg")).unwrap();
    assert_eq!(decode_region(&probed, &CONFIG, Scale::FULL, region).unwrap_err().code, RowCode::Missing);
}

#[test]
fn what_is_no_grey_or_colour_jpeg_is_decoded_at_full_size() {
    let folder = Folder::new();
    let region = BoxPx { x0: 1.0, y0: 1.0, x1: 3.0, y1: 3.0 };
    for (name, bytes) in one_of_each() {
        let probed = probe(&folder.write("a", &bytes), &CONFIG).unwrap();
        let can = matches!(name, "jpeg" | "progressive");
        let expected = if can { Scale::QUARTER } else { Scale::FULL };
        assert_eq!(probed.possible(Scale::QUARTER), expected, "{name}");
        assert_eq!(probed.scale_for(Size::new(1, 1)), if can { Scale::EIGHTH } else { Scale::FULL }, "{name}");
        let picture = decode(&probed, &CONFIG, Scale::QUARTER).unwrap().picture;
        assert_eq!(picture.scale, expected, "{name}");
        let Ok(Redecoded::Picture(part)) = decode_region(&probed, &CONFIG, Scale::FULL, region) else { panic!() };
        assert!(part.holds(region) && part.scale == Scale::FULL, "{name}");
        assert_eq!(part.window == IntBox::whole(probed.upright), !can, "{name}");
    }
}

#[test]
fn a_short_scan_is_found_at_every_scale() {
    let folder = Folder::new();
    let jpeg = encoded(&stripes(203, 149), Subsampling::S420, false);
    let short = [&jpeg[..jpeg.len() / 2], &[0xff, 0xd9]].concat();
    let probed = probe(&folder.write("a.jpg", &short), &CONFIG).unwrap();
    let region = BoxPx { x0: 0.0, y0: 0.0, x1: 20.0, y1: 20.0 };
    for scale in Scale::ALL {
        assert_eq!(decode(&probed, &CONFIG, scale).map(|_| ()).unwrap_err().code, RowCode::Truncated, "{scale:?}");
        assert!(decode(&probed, &USE_TRUNCATED, scale).unwrap().facts.truncated, "{scale:?}");
        assert_eq!(decode_region(&probed, &CONFIG, scale, region).unwrap_err().code, RowCode::Truncated, "{scale:?}");
        assert!(decode_region(&probed, &USE_TRUNCATED, scale, region).is_ok(), "{scale:?}");
    }
}

/// Mean and greatest difference of two tensors, in grey levels.
fn apart(a: &[f32], b: &[f32]) -> (f32, f32) {
    let each = || a.iter().zip(b).map(|(a, b)| (a - b).abs() * 255.0);
    (each().sum::<f32>() / a.len() as f32, each().fold(0.0, f32::max))
}

fn input(fit: Fit, filter: Filter) -> ImageInput {
    ImageInput { size: Size::new(16, 16), filter, fit, mean: [0.0; 3], std: [1.0; 3] }
}

fn filled(picture: &Picture, region: BoxPx, input: &ImageInput) -> (Vec<f32>, croprow::pixels::tensor::Placed) {
    let mut out = vec![f32::NAN; input.values(Size::new(700, 420))];
    let placed = fill(picture, region, input, &mut out).unwrap();
    (out, placed)
}

/// From 1/8 a tensor is off by 0.9 grey levels on average and by 8 at most. More than that are other colours, no
/// antialiasing, or a box that ends with the last column instead of within it.
#[test]
fn a_tensor_from_a_scaled_picture_is_near_that_of_the_full_one() {
    let folder = Folder::new();
    // Of 45 and 33 pixels at 1/8 the last column and row are an eighth wide.
    let (width, height) = (353, 257);
    let image = RgbImage::from_fn(width, height, |x, y| {
        let wave = |at: u32, length: f32| (128.0 + 100.0 * (at as f32 / length).sin()) as u8;
        image::Rgb([wave(x, 23.0), wave(y, 19.0), wave(x + y, 31.0)])
    });
    let jpeg = encoded(&image, Subsampling::S420, false);
    let probed = probe(&folder.write("a.jpg", &jpeg), &CONFIG).unwrap();
    let (full, small) = (at_scale(&folder, &jpeg, Scale::FULL), at_scale(&folder, &jpeg, Scale::EIGHTH));
    let whole = BoxPx::whole(probed.upright);
    for fit in [Fit::Squash, Fit::Pad { fill: 114 }, Fit::Center { resize_shortest_px: 16 }, Fit::Corner] {
        for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos3] {
            let input = input(fit, filter);
            assert_eq!(Scale::that_holds(probed.upright, wanted(probed.upright, &input, 1)), Scale::EIGHTH, "{fit:?}");
            let ((exact, exactly), (scaled, placed)) = (filled(&full, whole, &input), filled(&small, whole, &input));
            assert_eq!(placed, exactly, "boxes go back to the image at full size");
            let (mean, most) = apart(&exact, &scaled);
            println!("{fit:?} {filter:?}: {mean} {most}");
            assert!(mean < 1.2 && most < 10.0, "{fit:?} {filter:?}: {mean} {most}");
        }
    }
}

#[test]
fn a_window_gives_the_tensors_and_the_crop_file_of_the_whole() {
    let folder = Folder::new();
    let jpeg = noted(&encoded(&stripes(203, 149), Subsampling::S420, false), 6);
    let probed = probe(&folder.write("a.jpg", &jpeg), &CONFIG).unwrap();
    let region = BoxPx { x0: 40.3, y0: 51.8, x1: 101.6, y1: 120.2 };
    for scale in [Scale::FULL, Scale::HALF] {
        let whole = decode(&probed, &CONFIG, scale).unwrap().picture;
        let Ok(Redecoded::Picture(part)) = decode_region(&probed, &CONFIG, scale, region) else { panic!() };
        assert!(part.bytes() < whole.bytes() / 2);
        assert!(encode_crop_jpeg(&part, region, 92).unwrap() == encode_crop_jpeg(&whole, region, 92).unwrap());
        for fit in [Fit::Squash, Fit::Pad { fill: 1 }, Fit::Center { resize_shortest_px: 19 }, Fit::SquareBlur] {
            let input = input(fit, Filter::Bicubic);
            if fit == Fit::SquareBlur && scale != Scale::FULL {
                let error = fill(&part, region, &input, &mut [0.0; 768]).unwrap_err();
                assert_eq!(error.code, RowCode::Model, "its blur is that of the full size: {}", error.message);
                continue;
            }
            let inside = BoxPx { x0: 61.7, y0: 70.4, x1: 90.0, y1: 111.1 };
            for region in [region, inside] {
                assert!(filled(&part, region, &input) == filled(&whole, region, &input), "{fit:?} {scale:?}");
            }
        }
        let beside = BoxPx { x0: 30.0, ..region };
        let error = fill(&part, beside, &input(Fit::Squash, Filter::Bicubic), &mut [0.0; 768]).unwrap_err();
        assert_eq!(
            (error.code, encode_crop_jpeg(&part, beside, 92).unwrap_err().code),
            (RowCode::Model, RowCode::Model)
        );
    }
}

#[test]
fn what_is_wanted_is_what_the_region_is_resized_to() {
    let of = |fit, width, height| wanted(Size::new(width, height), &input(fit, Filter::Bicubic), 3);
    assert_eq!(of(Fit::Squash, 400, 100), Size::new(48, 48));
    assert_eq!(of(Fit::Pad { fill: 0 }, 400, 100), Size::new(48, 12));
    assert_eq!(of(Fit::Corner, 100, 400), Size::new(12, 48));
    assert_eq!(of(Fit::Center { resize_shortest_px: 20 }, 400, 100), Size::new(240, 60));
    assert_eq!(
        of(Fit::Scale { shortest_px: 10, longest_px: 30, multiple_px: 1, step_px: 1 }, 400, 100),
        Size::new(90, 24)
    );
    assert_eq!(of(Fit::SquareBlur, 400, 100), Size::new(400, 100));
}
