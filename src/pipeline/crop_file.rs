//! Crops as JPEG files. A file has its final name only when all of it is on the disk, and its row is
//! committed after that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fsync, mkdirat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::fault;
use crate::pixels::picture::Picture;
use crate::pixels::tensor::encode_crop_jpeg;
use crate::printable;
use crate::row::{Claim, Region};

/// Quality of crops, 1..=100.
const JPEG_QUALITY: u8 = 92;

/// Before the user's mask.
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// What a file is called until it is complete. `prepare_folder` removes those of dead processes.
const UNFINISHED: &str = ".croprow-tmp";

/// Writes the crop of a region below `folder` and returns its name there, or `None` where the region
/// cannot be encoded. The name is made of the image's id and a digest of its path, box and label: the same
/// region has the same name after a restart, and no name comes from a label or a source's name.
///
/// # Errors
/// The folder cannot be written: that is no fault of the image.
pub(super) fn write_crop(
    folder: &Path,
    claim: &Claim,
    region: &Region,
    picture: &Picture,
) -> Result<Option<String>, Error> {
    let jpeg = match encode_crop_jpeg(picture, region.bbox, JPEG_QUALITY) {
        Ok(jpeg) => jpeg,
        Err(error) => {
            log::warn!("{}: no crop file: {error}", printable::path(&claim.path));
            return Ok(None);
        }
    };
    let (shard, name) = name(claim, region);
    write_durably(folder, &shard, &name, &jpeg).map_err(|e| {
        Error::System(format!(
            "cannot write the crop {shard}/{name} in {}: {e}; free space or mend the folder, then run again",
            printable::path(folder)
        ))
    })?;
    Ok(Some(format!("{shard}/{name}")))
}

/// Folder and name of a crop.
fn name(claim: &Claim, region: &Region) -> (String, String) {
    let mut digest = Sha256::new();
    digest.update(claim.path.as_os_str().as_bytes());
    digest.update([0]);
    digest.update(region.label.as_deref().unwrap_or_default());
    // Whole pixels: the low bits of a box change with its neighbours in the batch.
    for edge in [region.bbox.x0, region.bbox.y0, region.bbox.x1, region.bbox.y1] {
        digest.update((edge.round() as i64).to_le_bytes());
    }
    let hex: String = digest.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect();
    // 256 folders keep each small at a million crops.
    (hex[..2].to_owned(), format!("{}-{hex}.jpg", claim.id))
}

/// Writes `shard/name` below `folder`. Both folders are held open and entered by no link, so that none that is laid
/// meanwhile leads elsewhere.
fn write_durably(folder: &Path, shard: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let folder = enter(CWD, folder)?;
    match mkdirat(&folder, shard, FOLDER_MODE) {
        Err(Errno::EXIST) => {}
        made => made?,
    }
    let shard = enter(folder.as_fd(), Path::new(shard))?;
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let unfinished = format!("{}-{serial}{UNFINISHED}", std::process::id());
    let written = (|| {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&shard, &unfinished, flags, FILE_MODE)?);
        file.write_all(bytes)?;
        file.sync_all()?;
        fault::point("crop.file_written");
        match statat(&shard, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if FileType::from_raw_mode(there.st_mode) != FileType::RegularFile => {
                return Err(io::Error::other("something that is no regular file has its name"));
            }
            Ok(_) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        renameat(&shard, &unfinished, &shard, name)?;
        fsync(&shard)?;
        fault::point("crop.file_named");
        Ok(())
    })();
    if written.is_err() {
        let _ = unlinkat(&shard, &unfinished, AtFlags::empty());
    }
    written
}

/// Opens a folder that is one itself, not a link to one.
fn enter(at: BorrowedFd<'_>, folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, folder, flags, Mode::empty()).map_err(|e| match e {
        Errno::NOTDIR | Errno::LOOP => not_a_folder(),
        other => other.into(),
    })
}

fn not_a_folder() -> io::Error {
    io::Error::new(io::ErrorKind::NotADirectory, "is a symbolic link or a file, not a folder")
}

fn create_folder(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if fs::symlink_metadata(folder)?.is_dir() {
                Ok(())
            } else {
                Err(not_a_folder())
            }
        }
        other => other,
    }
}

/// Makes the folder of crops and removes unfinished files that dead processes left in it.
///
/// # Errors
/// It cannot be made, or is a symbolic link.
pub fn prepare_folder(folder: &Path) -> Result<PathBuf, Error> {
    let failed = |e: io::Error| {
        Error::StartUp(format!("--crops {}: {e}; name a folder that can be written", printable::path(folder)))
    };
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    create_folder(folder).map_err(failed)?;
    for shard in fs::read_dir(folder).map_err(failed)?.flatten() {
        if !shard.file_type().is_ok_and(|t| t.is_dir()) {
            continue;
        }
        for file in fs::read_dir(shard.path()).map_err(failed)?.flatten() {
            if is_left_over(&file.file_name().to_string_lossy()) {
                let _ = fs::remove_file(file.path());
            }
        }
    }
    Ok(folder.to_owned())
}

/// An unfinished file whose process is gone.
fn is_left_over(name: &str) -> bool {
    let pid = name.strip_suffix(UNFINISHED).and_then(|stem| stem.split('-').next());
    pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::geometry::BoxPx;
    use crate::row::{ImageId, Stage, Token};

    fn claim() -> Claim {
        let path = PathBuf::from("/photos/\"><img src=x>.jpg");
        Claim {
            id: ImageId(7),
            token: Token(1),
            stage: Stage::Detect,
            path,
            prompt: None,
            seen: None,
            scale: None,
            regions: None,
        }
    }

    fn region(x0: f32) -> Region {
        let bbox = BoxPx { x0, y0: 0.0, x1: 8.0, y1: 8.0 };
        Region { bbox, label: Some("../../etc".into()), score: Some(0.5), crop: None, vector: None, embedded: false }
    }

    #[test]
    fn a_crop_is_written_whole_and_named_by_id_and_digest() {
        let folder = tempfile::tempdir().unwrap();
        let pixels = Picture::full(image::RgbImage::from_pixel(16, 16, image::Rgb([200, 10, 10])));
        let name = write_crop(folder.path(), &claim(), &region(1.0), &pixels).unwrap().unwrap();
        assert!(name[3..].starts_with("7-") && name.ends_with(".jpg") && !name.contains(".."), "{name}");
        assert_eq!(image::open(folder.path().join(&name)).unwrap().width(), 7);
        let again = write_crop(folder.path(), &claim(), &region(1.2), &pixels).unwrap().unwrap();
        assert_eq!(again, name, "low bits of a box must not make a second file");
        assert_ne!(write_crop(folder.path(), &claim(), &region(3.0), &pixels).unwrap().unwrap(), name);
        let left: Vec<_> = walk(folder.path()).into_iter().filter(|n| n.ends_with(UNFINISHED)).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn crops_are_never_written_through_a_symbolic_link() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let link = folder.path().join("crops");
        symlink(elsewhere.path(), &link).unwrap();
        assert!(matches!(prepare_folder(&link), Err(Error::StartUp(_))));
        let pixels = Picture::full(image::RgbImage::new(16, 16));
        let write = |folder: &Path| write_crop(folder, &claim(), &region(1.0), &pixels).map_err(|e| e.to_string());
        assert!(write(&link).unwrap_err().contains("symbolic link"), "the folder became a link after the start");
        let (shard, name) = name(&claim(), &region(1.0));
        symlink(elsewhere.path(), folder.path().join(&shard)).unwrap();
        assert!(write(folder.path()).unwrap_err().contains("symbolic link"));
        fs::remove_file(folder.path().join(&shard)).unwrap();
        fs::create_dir(folder.path().join(&shard)).unwrap();
        fs::write(elsewhere.path().join("precious"), "as it was").unwrap();
        symlink(elsewhere.path().join("precious"), folder.path().join(&shard).join(&name)).unwrap();
        assert!(write(folder.path()).unwrap_err().contains("no regular file"));
        assert_eq!(walk(elsewhere.path()), ["precious"]);
        assert_eq!(fs::read_to_string(elsewhere.path().join("precious")).unwrap(), "as it was");
        assert_eq!(walk(folder.path().join(&shard).as_path()), [name], "nothing unfinished is left");
    }

    #[test]
    fn unfinished_files_of_dead_processes_are_removed_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let shard = folder.path().join("ab");
        fs::create_dir(&shard).unwrap();
        let own = format!("{}-0{UNFINISHED}", std::process::id());
        for name in ["4194304-3.croprow-tmp", &own, "notes.croprow-tmp", "1-aa.jpg"] {
            fs::write(shard.join(name), b"x").unwrap();
        }
        prepare_folder(folder.path()).unwrap();
        let mut left = walk(folder.path());
        left.sort();
        assert_eq!(left, {
            let mut kept = vec!["1-aa.jpg".to_owned(), own, "notes.croprow-tmp".to_owned()];
            kept.sort();
            kept
        });
    }

    fn walk(folder: &Path) -> Vec<String> {
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                names.extend(walk(&entry.path()));
            } else {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        names
    }
}
