//! Each way in which a file can fail has its code.

use croprow::geometry::Scale;
use croprow::pixels::decode::decode;
use croprow::pixels::header::probe;
use croprow::row::RowCode;
use image::DynamicImage;

use super::files::*;

#[test]
fn content_decides_and_not_the_name() {
    let folder = Folder::new();
    let png_bytes = png(&DynamicImage::ImageRgb8(gradient(8, 8)), None);
    let read = open(&folder.write("really_a_png.jpg", &png_bytes), &CONFIG).unwrap();
    assert_eq!(read.facts.format, "png");
    let read = open(&folder.write("really_a_jpeg.PNG", &jpeg(&gradient(8, 8))), &CONFIG).unwrap();
    assert_eq!(read.facts.format, "jpeg");
    let read = open(&folder.write("no_extension", &jpeg(&gradient(8, 8))), &CONFIG).unwrap();
    assert_eq!(read.facts.format, "jpeg");
}

#[test]
fn what_is_no_image_says_what_it_is() {
    let folder = Folder::new();
    let cases: [(&[u8], RowCode, &str); 9] = [
        (b"", RowCode::Empty, "empty"),
        (b"<!DOCTYPE html><title>404</title>", RowCode::NotAnImage, "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", RowCode::NotAnImage, "git lfs pull"),
        (b"{\"error\":\"gone\"}", RowCode::NotAnImage, "JSON"),
        (&[0; 1024], RowCode::NotAnImage, "zeros"),
        (b"\x01\x02\x03\x04", RowCode::NotAnImage, "01 02 03 04"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", RowCode::Unsupported, "heic"),
        (b"\xff\xd8", RowCode::Truncated, "ends early"),
        (b"\xff\xd8\xff\xd9", RowCode::Decode, "no picture"),
    ];
    for (bytes, expected, word) in cases {
        let error = open(&folder.write("photo.jpg", bytes), &CONFIG).map(|_| ()).unwrap_err();
        assert_eq!(error.code, expected, "{}", error.message);
        assert!(error.message.contains(word), "{}", error.message);
    }
}

#[test]
fn paths_that_are_no_files_have_their_codes() {
    let folder = Folder::new();
    assert_eq!(code(&folder.path().join("gone.jpg")), RowCode::Missing);
    assert_eq!(code(folder.path()), RowCode::NotRegular);
    let fifo = folder.path().join("pipe.jpg");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert_eq!(code(&fifo), RowCode::NotRegular);
    let name = "\u{1f4f7} a'b\"c%20 -–é 写真.jpg";
    assert!(open(&folder.write(name, &jpeg(&gradient(8, 8))), &CONFIG).is_ok());
}

#[test]
fn a_truncated_jpeg_fails_or_is_used_as_far_as_it_goes() {
    let folder = Folder::new();
    let image = noise(200, 150);
    let whole = jpeg(&image);
    let cuts = [whole.len() / 10, whole.len() / 2, whole.len() * 9 / 10, whole.len() * 99 / 100, whole.len() - 2];
    for cut in cuts {
        let path = folder.write("cut.jpg", &whole[..cut]);
        assert_eq!(code(&path), RowCode::Truncated, "{cut}");
        let read = open(&path, &USE_TRUNCATED).unwrap();
        assert!(read.facts.truncated, "{cut}");
    }
    let read = open(&folder.write("whole.jpg", &whole), &USE_TRUNCATED).unwrap();
    assert!(!read.facts.truncated);
    let without_end = open(&folder.write("cut.jpg", &whole[..whole.len() - 2]), &USE_TRUNCATED).unwrap();
    assert_eq!(without_end.picture, read.picture);
    // The thumbnail's end is not the picture's.
    let thumbnail = [b"Exif\0\0".as_slice(), &exif(1), &jpeg(&gradient(16, 16))].concat();
    let with_thumbnail = with_segment(&whole, 0xe1, &thumbnail);
    assert!(open(&folder.write("thumb.jpg", &with_thumbnail), &CONFIG).is_ok());
    assert_eq!(code(&folder.write("thumb.jpg", &with_thumbnail[..with_thumbnail.len() / 2])), RowCode::Truncated);
}

#[test]
fn other_formats_that_end_early_are_truncated() {
    let folder = Folder::new();
    let image = noise(60, 40);
    let dynamic = DynamicImage::ImageRgb8(image.clone());
    let files = [
        ("png", png(&dynamic, None)),
        ("webp", webp(&dynamic, None)),
        ("webp with exif", webp(&dynamic, Some(&exif(3)))),
        ("gif", gif(std::slice::from_ref(&image))),
        ("bmp", bmp(&image)),
        ("tiff", tiff(&image, 1)),
    ];
    for (name, bytes) in files {
        for percent in [10, 50, 90] {
            let path = folder.write("cut", &bytes[..bytes.len() * percent / 100]);
            assert_eq!(code(&path), RowCode::Truncated, "{name} {percent} %");
            assert!(open(&path, &USE_TRUNCATED).is_err(), "{name}: only JPEGs are used as far as they go");
        }
    }
}

#[test]
fn what_follows_the_first_picture_is_ignored() {
    let folder = Folder::new();
    let (first, second) = (jpeg(&gradient(40, 24)), jpeg(&noise(16, 16)));
    let expected = open(&folder.write("first.jpg", &first), &CONFIG).unwrap().picture;
    for tail in [b"trailing garbage".as_slice(), &second, &second[..second.len() / 2], &[0; 4096]] {
        let read = open(&folder.write("tail.jpg", &[&first, tail].concat()), &CONFIG).unwrap();
        assert!(read.picture == expected);
    }
    // Several pictures of a camera, or one and its map of gains: an index that names the others, and they follow.
    let several = [with_segment(&first, 0xe2, b"MPF\0II*\0\x08\0\0\0"), second].concat();
    assert!(open(&folder.write("several.mpo", &several), &CONFIG).unwrap().picture == expected);
    let image = png(&DynamicImage::ImageRgb8(gradient(40, 24)), None);
    assert!(open(&folder.write("tail.png", &[&image, b"more".as_slice()].concat()), &CONFIG).is_ok());
}

#[test]
fn jpegs_of_other_codings_are_unsupported_by_name() {
    let folder = Folder::new();
    let whole = jpeg(&gradient(16, 16));
    let frame = whole.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    for (marker, precision, name) in [(0xc9, 8, "arithmetic-coded"), (0xc3, 8, "lossless"), (0xc1, 12, "12-bit")] {
        let mut patched = whole.clone();
        patched[frame + 1] = marker;
        patched[frame + 4] = precision;
        let error = open(&folder.write("odd.jpg", &patched), &CONFIG).map(|_| ()).unwrap_err();
        assert_eq!(error.code, RowCode::Unsupported);
        assert!(error.message.contains(name), "{}", error.message);
    }
    let mut cielab = tiff(&gradient(16, 16), 1);
    let photometric = cielab.windows(4).position(|w| w == [6, 1, 3, 0]).unwrap();
    cielab[photometric + 8] = 8;
    assert_eq!(code(&folder.write("lab.tif", &cielab)), RowCode::Unsupported);
}

#[test]
fn a_file_that_changed_after_its_probe_is_probed_again() {
    let folder = Folder::new();
    let path = folder.write("a.png", &png(&DynamicImage::ImageRgb8(gradient(40, 24)), None));
    let probed = probe(&path, &CONFIG).unwrap();
    let smaller = jpeg(&gradient(20, 10));
    folder.write("a.png", &smaller);
    let read = decode(&probed, &CONFIG, Scale::FULL).unwrap();
    assert_eq!((read.facts.format, read.picture.pixels.dimensions()), ("jpeg", (20, 10)));
    assert_eq!(read.facts.stamp.size_bytes, smaller.len() as i64);
    assert_ne!(read.facts.stamp, probed.stamp);
    folder.write("a.png", &jpeg(&gradient(2000, 1000)));
    assert_eq!(decode(&probed, &CONFIG, Scale::FULL).map(|_| ()).unwrap_err().code, RowCode::Io);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(decode(&probed, &CONFIG, Scale::FULL).map(|_| ()).unwrap_err().code, RowCode::Missing);
}
