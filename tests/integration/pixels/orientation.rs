//! One upright picture, stored in all eight ways.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use croprow::geometry::{Orientation, Size};
use croprow::pixels::orient::apply;
use image::{DynamicImage, RgbImage};
use rusqlite::Connection;

use super::bombs::{chunk, png_with};
use super::files::*;
use crate::support::dump::{assert_sound, number};
use crate::support::fake::{Setup, database, run};
use crate::support::picture;

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

#[test]
fn orientation_in_xmp_or_in_a_text_is_ignored() {
    let folder = Folder::new();
    let jpeg = jpeg(&gradient(40, 24));
    let name = b"http://ns.adobe.com/xap/1.0/\0".as_slice();
    let packet = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'>\
        <rdf:RDF xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#'><rdf:Description \
        xmlns:tiff='http://ns.adobe.com/tiff/1.0/' tiff:Orientation='6'/></rdf:RDF></x:xmpmeta>";
    let xmp = with_segment(&jpeg, 0xe1, &[name, packet].concat());
    let block = [b"Exif\0\0".as_slice(), &exif(6)].concat();
    // As ImageMagick writes it: a name, a length, and the block in hexadecimal digits.
    let digits: String = block.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("Raw profile type exif\0\nexif\n{:8}\n{digits}\n", block.len());
    let files = [
        ("xmp.jpg", xmp),
        ("xmp.png", png_with(&chunk(b"iTXt", &[b"XML:com.adobe.xmp\0\0\0\0\0".as_slice(), packet].concat()), None)),
        ("text.png", png_with(&chunk(b"tEXt", text.as_bytes()), None)),
    ];
    for (name, bytes) in files {
        let facts = open(&folder.write(name, &bytes), &CONFIG).unwrap().facts;
        assert_eq!((facts.orientation, facts.orientation_source), (Orientation::Upright, "none"), "{name}");
    }
    // Before an Exif block it is in nobody's way.
    let both = with_segment(&with_segment(&jpeg, 0xe1, &block), 0xe1, &[name, packet].concat());
    let facts = open(&folder.write("both.jpg", &both), &CONFIG).unwrap().facts;
    assert_eq!((facts.orientation, facts.orientation_source), (Orientation::Rotate90, "exif"));
}

#[test]
fn rows_boxes_vectors_and_crops_of_all_eight_are_those_of_the_upright_picture() {
    let folder = Folder::new();
    let mut files = Vec::new();
    for n in 0..9 {
        let upright = picture(n, 61, 43);
        for value in 1..=8 {
            let bytes = png(&DynamicImage::ImageRgb8(stored(&upright, value)), Some(&exif(value)));
            files.push(folder.write(&format!("{n}-{value}.png"), &bytes));
        }
    }
    let (db, crops) = (folder.path().join("photos.db"), folder.path().join("crops"));
    fs::create_dir(&crops).unwrap();
    database(&db, &files);
    let mut setup = Setup::default();
    setup.config.crops = Some(crops.clone());
    assert_eq!(run(&db, &setup).unwrap().done, 72);
    let frames = "SELECT count(*) FROM images WHERE width_px = 61 AND height_px = 43 AND orientation_source = 'exif'
        AND components = 3 AND orientation = CAST(substr(path, -5, 1) AS INTEGER)
        AND stored_width_px = iif(orientation < 5, 61, 43) AND stored_height_px = iif(orientation < 5, 43, 61)";
    assert_eq!(number(&db, frames), 72);
    // The picture's number stands seven characters before the end of its name.
    let unlike = "SELECT count(*) FROM (
        SELECT 1 FROM regions r JOIN images i ON i.id = r.image_id JOIN embeddings e ON e.region_id = r.id
        GROUP BY substr(path, -7, 1), label, score, x0, y0, x1, y1, vector HAVING count(*) <> 8)";
    assert_eq!(number(&db, unlike), 0);
    let conn = Connection::open(&db).unwrap();
    let mut statement = conn
        .prepare(
            "SELECT substr(path, -7, 1) || printf(' %s %f %f', label, x0, y0), crop
             FROM regions r JOIN images i ON i.id = r.image_id",
        )
        .unwrap();
    let rows = statement.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?))).unwrap();
    let mut contents = BTreeMap::<String, BTreeSet<Vec<u8>>>::new();
    for (region, crop) in rows.map(Result::unwrap) {
        contents.entry(region).or_default().insert(fs::read(crops.join(crop)).unwrap());
    }
    assert!(contents.len() > 3 && contents.values().all(|same| same.len() == 1), "{:?}", contents.keys());
    assert_sound(&db);
}
