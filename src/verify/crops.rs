//! Crop files: those that rows name, and those that no row names.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use super::damage::{Damage, Report};
use super::rows::{Fault, Mend};
use crate::config::{DecodeConfig, MAX_PIXELS_DEFAULT};
use crate::db::Db;
use crate::db::verify::{StoredImage, StoredRegion};
use crate::error::Error;
use crate::file_system::is_empty;
use crate::geometry::{BoxPx, Scale, Size};
use crate::pipeline::crop_file::{image_of, is_left_over};
use crate::pixels::decode::decode;
use crate::pixels::header::probe;
use crate::pixels::picture::crop_box;
use crate::printable;
use crate::recipe::{Decode, Truncated};
use crate::row::{RowCode, RowError};

/// A region keeps its stored box while new ones are as close as this, and its crop may be of the new one.
const SAME_BOX_PX: f32 = 0.01;

/// Larger crops are decoded one after the other: their pixels take three bytes each, and there is no budget here.
const ALONE_PIXELS: u64 = MAX_PIXELS_DEFAULT;

/// What is wrong with a crop, and in words.
type Wrong = (Damage, String);

/// Where crops may lie: the folder of the last run first, then those of runs before.
pub(super) struct Folders {
    folders: Vec<PathBuf>,
    /// Held while a large crop is decoded.
    large: Mutex<()>,
}

impl Folders {
    pub(super) fn of(folders: &[PathBuf]) -> Self {
        Self { folders: folders.to_vec(), large: Mutex::new(()) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// Where the file of that name is. It is missing only where all folders can be looked into.
    fn find(&self, name: &str) -> Result<PathBuf, Wrong> {
        let mut unknown = None;
        for folder in &self.folders {
            let path = folder.join(name);
            match path.symlink_metadata() {
                Ok(_) => return Ok(path),
                Err(e) => unknown = unknown.or(not_told(folder, &path, &e)),
            }
        }
        Err(unknown.unwrap_or_else(|| (Damage::CropMissing, name.to_owned())))
    }
}

/// What is to be said where `error` does not mean that the file is missing from `folder`.
fn not_told(folder: &Path, path: &Path, error: &io::Error) -> Option<Wrong> {
    if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) {
        return Some((Damage::CropUnreadable, format!("{}: {error}", printable::path(path))));
    }
    let reason = match folder.metadata() {
        Ok(metadata) if metadata.is_dir() && !is_empty(folder) => return None,
        Ok(metadata) if metadata.is_dir() => "it is empty".to_owned(),
        Ok(_) => "not a folder".to_owned(),
        Err(e) => e.to_string(),
    };
    Some((Damage::CropFolder, format!("{}: {reason}", printable::path(folder))))
}

/// All that is wrong with the crops of an image.
pub(super) fn faults(image: &StoredImage, folders: &Folders) -> Vec<Fault> {
    if folders.is_empty() || !image.is_done {
        return Vec::new();
    }
    let check = |region: &StoredRegion| {
        let name = region.crop.as_deref()?;
        let (damage, reason) = check(image, region, name, folders).err()?;
        let what = format!("region {}: {reason}", region.id);
        let mend = match damage {
            // What cannot be looked at may be all right.
            Damage::CropFolder | Damage::CropUnreadable => Mend::Nothing,
            Damage::CropName => Mend::Crop(region.id, None),
            _ => Mend::Crop(region.id, folders.find(name).ok()),
        };
        Some(Fault { damage, what, mend })
    };
    image.regions.iter().filter_map(check).collect()
}

fn check(image: &StoredImage, region: &StoredRegion, name: &str, folders: &Folders) -> Result<(), Wrong> {
    if image_of(name) != Some(image.id) {
        return Err((Damage::CropName, name.to_owned()));
    }
    let path = folders.find(name)?;
    let sizes = image.size.and_then(|size| sizes_of(region.bbox, size));
    let config = config_of(sizes);
    let wrong = |error: RowError| match damage_of(error.code) {
        // Its folder may be gone since.
        Damage::CropMissing => folders.find(name).err().unwrap_or((Damage::CropMissing, error.message)),
        damage => (damage, error.message),
    };
    let BoxPx { x0, y0, x1, y1 } = region.bbox;
    let other_size =
        |is: &str| (Damage::CropSize, format!("{} is {is} for {x0} {y0} {x1} {y1}", printable::path(&path)));
    let probed = probe(&path, &config).map_err(|error| match error.code {
        RowCode::TooLarge => other_size("too large"),
        _ => wrong(error),
    })?;
    let is_large = probed.upright.pixels() > ALONE_PIXELS;
    let _alone = is_large.then(|| folders.large.lock().unwrap_or_else(PoisonError::into_inner));
    let crop = decode(&probed, &config, Scale::FULL).map_err(wrong)?.facts.upright;
    match sizes {
        Some(sizes) if !sizes.allow(crop) => Err(other_size(&format!("{}x{}", crop.width_px, crop.height_px))),
        _ => Ok(()),
    }
}

/// What a crop that is refused with `code` is.
fn damage_of(code: RowCode) -> Damage {
    match code {
        RowCode::Missing => Damage::CropMissing,
        RowCode::Empty => Damage::CropEmpty,
        // Of the disk, of its permissions, of memory: not of the file.
        RowCode::Permission | RowCode::Io | RowCode::TooLarge | RowCode::TimedOut => Damage::CropUnreadable,
        _ => Damage::CropUndecodable,
    }
}

/// Sizes that a crop may have.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    least: Size,
    most: Size,
}

impl Sizes {
    fn allow(self, crop: Size) -> bool {
        (self.least.width_px..=self.most.width_px).contains(&crop.width_px)
            && (self.least.height_px..=self.most.height_px).contains(&crop.height_px)
    }
}

/// What a crop of that box in an image of size `image` may be. `None` for a box that is none, which has been reported as
/// such.
fn sizes_of(bbox: BoxPx, image: Size) -> Option<Sizes> {
    let wider = |by: f32| BoxPx { x0: bbox.x0 - by, y0: bbox.y0 - by, x1: bbox.x1 + by, y1: bbox.y1 + by };
    let (least, most) = (crop_box(image, wider(-SAME_BOX_PX))?, crop_box(image, wider(SAME_BOX_PX))?);
    Some(Sizes { least: least.size, most: most.size })
}

/// Crops were written by this program, whole or not at all, and as large as their row says: whatever `--max-pixels` was.
fn config_of(sizes: Option<Sizes>) -> DecodeConfig {
    let max_pixels = sizes.map_or(MAX_PIXELS_DEFAULT, |sizes| sizes.most.pixels());
    DecodeConfig { max_pixels, truncated: Truncated::Fail, mode: Decode::Exact }
}

/// Looks for files of our own that nothing names. A file that is younger than a live run may be its next row's.
pub(super) fn check_folders(db: &Db, folders: &Folders, report: &mut Report) -> Result<(), Error> {
    let live_since = db.live_since()?;
    for folder in &folders.folders {
        // A folder that is gone holds no orphans; what is missing from it has been told.
        let Ok(shards) = fs::read_dir(folder) else { continue };
        for shard in shards.flatten().filter(|shard| shard.file_type().is_ok_and(|t| t.is_dir())) {
            let shard_name = shard.file_name();
            let (Ok(files), Some(shard_name)) = (fs::read_dir(shard.path()), shard_name.to_str()) else { continue };
            for file in files.flatten() {
                let file_name = file.file_name();
                let Some(file_name) = file_name.to_str() else { continue };
                let name = format!("{shard_name}/{file_name}");
                if is_left_over(&file.path()) {
                    report.add(Damage::CropUnfinished, printable::path(&file.path()));
                } else if let Some(image) = image_of(&name)
                    && !is_younger(&file.path(), live_since)
                    && !db.names_crop(image, &name)?
                {
                    report.add(Damage::CropOrphan, printable::path(&file.path()));
                }
            }
        }
    }
    Ok(())
}

fn is_younger(path: &Path, than: Option<f64>) -> bool {
    let Some(than) = than else { return false };
    let modified = fs::symlink_metadata(path).and_then(|m| m.modified());
    modified.is_ok_and(|at| at.duration_since(UNIX_EPOCH).is_ok_and(|at| at.as_secs_f64() >= than))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_crop_is_missing_only_where_every_folder_can_be_looked_into() {
        let outer = tempfile::tempdir().unwrap();
        let at = |name: &str| outer.path().join(name);
        let find = |names: &[&str]| {
            let folders: Vec<PathBuf> = names.iter().map(|name| at(name)).collect();
            Folders::of(&folders).find("ab/1-ab.jpg").map_err(|(damage, _)| damage)
        };
        fs::create_dir_all(at("full/ab")).unwrap();
        fs::create_dir(at("empty")).unwrap();
        fs::write(at("full/ab/1-ab.jpg"), "x").unwrap();
        fs::write(at("file"), "x").unwrap();
        symlink("loop", at("loop")).unwrap();
        fs::create_dir_all(at("other/cd")).unwrap();
        assert_eq!(find(&["other"]), Err(Damage::CropMissing));
        assert_eq!(find(&["empty"]), Err(Damage::CropFolder), "what a disk leaves that is not mounted");
        assert_eq!(find(&["other", "gone"]), Err(Damage::CropFolder));
        assert_eq!(find(&["gone", "other"]), Err(Damage::CropFolder));
        assert_eq!(find(&["file"]), Err(Damage::CropFolder));
        assert_eq!(find(&["gone", "full"]), Ok(at("full/ab/1-ab.jpg")), "an old folder that is not wanted any more");
        // As any error but "not there": no permission, a failing disk.
        assert_eq!(find(&["loop"]), Err(Damage::CropUnreadable));
    }

    #[test]
    fn only_what_was_read_of_a_file_makes_it_a_damaged_one() {
        for code in [RowCode::Permission, RowCode::Io, RowCode::TooLarge] {
            assert_eq!(damage_of(code), Damage::CropUnreadable, "{code}");
        }
        for code in [RowCode::Truncated, RowCode::Decode, RowCode::NotAnImage, RowCode::NotRegular] {
            assert_eq!(damage_of(code), Damage::CropUndecodable, "{code}");
        }
    }

    #[test]
    fn the_limit_of_a_crop_is_what_its_row_says() {
        let image = Size::new(40_000, 20_000);
        let limit = |bbox| config_of(sizes_of(bbox, image)).max_pixels;
        assert_eq!(limit(BoxPx::whole(image)), 800_000_000);
        let small = limit(BoxPx { x0: 10.0, y0: 10.0, x1: 20.0, y1: 30.0 });
        assert!((200..=12 * 22).contains(&small), "{small}");
        assert_eq!(limit(BoxPx { x0: 20.0, y0: 10.0, x1: 10.0, y1: 30.0 }), MAX_PIXELS_DEFAULT);
    }
}
