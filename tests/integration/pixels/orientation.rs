//! One upright picture, stored in all eight ways.

use croprow::geometry::{Orientation, Size};
use croprow::pixels::orient::apply;
use image::{DynamicImage, RgbImage};

use super::files::*;

/// As a camera that notes `value` would have stored it.
fn stored(upright: &RgbImage, value: u16) -> RgbImage {
    let inverse = match value {
        6 => 8,
        8 => 6,
        other => other,
    };
    apply(upright.clone(), Orientation::from_exif(inverse.into()))
}

#[test]
fn all_eight_orientations_give_the_same_upright_picture() {
    let folder = Folder::new();
    let upright = gradient(40, 24);
    for value in 1..=8 {
        let picture = stored(&upright, value);
        let dynamic = DynamicImage::ImageRgb8(picture.clone());
        let block = exif(value);
        let prefixed = [b"Exif\0\0".as_slice(), &block].concat();
        let doubled = [b"Exif\0\0".as_slice(), &prefixed].concat();
        let files = [
            ("exif.jpg", with_segment(&jpeg(&picture), 0xe1, &prefixed), 8),
            ("doubled.jpg", with_segment(&jpeg(&picture), 0xe1, &doubled), 8),
            ("exif.png", png(&dynamic, Some(&block)), 0),
            ("bare.webp", webp(&dynamic, Some(&block)), 0),
            ("prefixed.webp", webp(&dynamic, Some(&prefixed)), 0),
            ("tag.tiff", tiff(&picture, value), 0),
        ];
        for (name, bytes, tolerance) in files {
            let read = open(&folder.write(name, &bytes), &CONFIG).unwrap();
            assert!(difference(&read.picture.pixels, &upright) <= tolerance, "{name} {value}");
            assert_eq!(read.facts.orientation.exif(), value as u8, "{name}");
            assert_eq!(read.facts.orientation_source, "exif", "{name}");
            assert_eq!(read.facts.upright, Size::new(40, 24), "{name} {value}");
            assert_eq!(read.facts.stored, Size::new(picture.width(), picture.height()), "{name} {value}");
        }
    }
}

#[test]
fn values_that_are_none_leave_the_picture_as_it_is() {
    let folder = Folder::new();
    let picture = gradient(40, 24);
    for value in [0, 9, 65_535] {
        let block = [b"Exif\0\0".as_slice(), &exif(value)].concat();
        let path = folder.write("odd.jpg", &with_segment(&jpeg(&picture), 0xe1, &block));
        let read = open(&path, &CONFIG).unwrap();
        assert_eq!((read.facts.orientation, read.facts.orientation_source), (Orientation::Upright, "none"));
    }
    let path = folder.write("garbage.jpg", &with_segment(&jpeg(&picture), 0xe1, b"Exif\0\0\x7f\x00garbage"));
    assert_eq!(open(&path, &CONFIG).unwrap().facts.orientation, Orientation::Upright);
}

#[test]
fn the_first_of_two_exif_blocks_counts() {
    let folder = Folder::new();
    let picture = jpeg(&gradient(40, 24));
    let second_one = with_segment(&picture, 0xe1, &[b"Exif\0\0".as_slice(), &exif(1)].concat());
    let first_six = with_segment(&second_one, 0xe1, &[b"Exif\0\0".as_slice(), &exif(6)].concat());
    let read = open(&folder.write("two.jpg", &first_six), &CONFIG).unwrap();
    assert_eq!(read.facts.orientation, Orientation::Rotate90);
}

#[test]
fn an_exif_chunk_after_the_image_data_of_a_png_is_ignored() {
    let folder = Folder::new();
    let with = png(&DynamicImage::ImageRgb8(gradient(40, 24)), Some(&exif(6)));
    let find = |name: &[u8]| with.windows(4).position(|w| w == name).unwrap() - 4;
    let (chunk, end) = (find(b"eXIf"), find(b"IEND"));
    let chunk_end = chunk + 12 + exif(6).len();
    let moved = [&with[..chunk], &with[chunk_end..end], &with[chunk..chunk_end], &with[end..]].concat();
    let before = open(&folder.write("before.png", &with), &CONFIG).unwrap();
    let after = open(&folder.write("after.png", &moved), &CONFIG).unwrap();
    assert_eq!(before.facts.orientation, Orientation::Rotate90);
    assert_eq!((after.facts.orientation, after.facts.orientation_source), (Orientation::Upright, "none"));
}
