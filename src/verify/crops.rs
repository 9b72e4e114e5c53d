//! Crop files: those that rows name, and those that no row names.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::damage::{Damage, Report};
use super::rows::{Fault, Mend};
use crate::config::{DecodeConfig, MAX_PIXELS_DEFAULT};
use crate::db::Db;
use crate::db::verify::{StoredImage, StoredRegion};
use crate::error::Error;
use crate::geometry::{BoxPx, Scale, Size};
use crate::pipeline::crop_file::{image_of, is_left_over};
use crate::pixels::decode::decode;
use crate::pixels::header::probe;
use crate::pixels::picture::crop_box;
use crate::printable;
use crate::recipe::{Decode, Truncated};
use crate::row::RowCode;

/// A region keeps its stored box while new ones are as close as this, and its crop may be of the new one.
const SAME_BOX_PX: f32 = 0.01;

/// Crops were written by this program, whole or not at all.
const CROP: DecodeConfig =
    DecodeConfig { max_pixels: MAX_PIXELS_DEFAULT, truncated: Truncated::Fail, mode: Decode::Exact };

/// Where crops may lie: the folder of the last run first, then those of runs before.
pub(super) struct Folders(Vec<PathBuf>);

impl Folders {
    pub(super) fn of(folders: &[PathBuf]) -> Self {
        Self(folders.to_vec())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.0.iter().map(|folder| folder.join(name)).find(|path| path.symlink_metadata().is_ok())
    }
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
        let file = if damage == Damage::CropName { None } else { folders.find(name) };
        Some(Fault { damage, what, mend: Mend::Crop(region.id, file) })
    };
    image.regions.iter().filter_map(check).collect()
}

fn check(image: &StoredImage, region: &StoredRegion, name: &str, folders: &Folders) -> Result<(), (Damage, String)> {
    if image_of(name) != Some(image.id) {
        return Err((Damage::CropName, name.to_owned()));
    }
    let path = folders.find(name).ok_or_else(|| (Damage::CropMissing, name.to_owned()))?;
    let picture = probe(&path, &CROP).and_then(|probed| decode(&probed, &CROP, Scale::FULL)).map_err(|error| {
        let damage = match error.code {
            RowCode::Missing => Damage::CropMissing,
            RowCode::Empty => Damage::CropEmpty,
            _ => Damage::CropUndecodable,
        };
        (damage, error.message)
    })?;
    let (crop, Some(size)) = (picture.facts.upright, image.size) else { return Ok(()) };
    if is_size_of(crop, region.bbox, size) {
        return Ok(());
    }
    let BoxPx { x0, y0, x1, y1 } = region.bbox;
    let reason = format!("{} is {}x{} for {x0} {y0} {x1} {y1}", printable::path(&path), crop.width_px, crop.height_px);
    Err((Damage::CropSize, reason))
}

/// True where a crop of that size may be of that box in an image of size `image`.
fn is_size_of(crop: Size, bbox: BoxPx, image: Size) -> bool {
    let wider = |by: f32| BoxPx { x0: bbox.x0 - by, y0: bbox.y0 - by, x1: bbox.x1 + by, y1: bbox.y1 + by };
    let (Some(least), Some(most)) = (crop_box(image, wider(-SAME_BOX_PX)), crop_box(image, wider(SAME_BOX_PX))) else {
        // A box that is none has been reported as such.
        return true;
    };
    (least.size.width_px..=most.size.width_px).contains(&crop.width_px)
        && (least.size.height_px..=most.size.height_px).contains(&crop.height_px)
}

/// Looks for files of our own that nothing names. A file that is younger than a live run may be its next row's.
pub(super) fn check_folders(db: &Db, folders: &Folders, report: &mut Report) -> Result<(), Error> {
    let live_since = db.live_since()?;
    for folder in &folders.0 {
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
