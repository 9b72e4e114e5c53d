//! Shared by the tests: pictures, fake models behind the real traits, and dumps of a database.

#![allow(dead_code, reason = "each test target uses its own part")]

pub mod dump;
pub mod fake;

use std::path::{Path, PathBuf};

use image::{Rgb, RgbImage};

/// A picture that is unlike every other number's.
pub fn picture(number: u32, width_px: u32, height_px: u32) -> RgbImage {
    RgbImage::from_fn(width_px, height_px, |x, y| {
        let mixed = (x / 4).wrapping_mul(31) ^ (y / 4).wrapping_mul(17) ^ number.wrapping_mul(2_654_435_761);
        Rgb([(mixed >> 3) as u8, (mixed >> 9) as u8, (number * 7 + x + y) as u8])
    })
}

/// `count` PNG pictures of different shapes in `folder`, in the order of their names.
pub fn pictures(folder: &Path, count: u32) -> Vec<PathBuf> {
    (0..count)
        .map(|number| {
            let path = folder.join(format!("{number:05}.png"));
            picture(number, 40 + number % 23, 30 + number % 17).save(&path).unwrap();
            path
        })
        .collect()
}

/// A folder with `count` pictures and a database of them.
pub fn photos(count: u32) -> (tempfile::TempDir, PathBuf, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), count);
    let db = folder.path().join("photos.db");
    fake::database(&db, &files);
    (folder, db, files)
}

/// The project's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
