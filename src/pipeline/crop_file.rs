//! Crops as JPEG files. A file has its final name only when all of it is on the disk, and its row is
//! committed after that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fsync, mkdirat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::db::process::ProcessId;
use crate::error::Error;
use crate::fault;
use crate::pixels::picture::Picture;
use crate::pixels::tensor::encode_crop_jpeg;
use crate::printable;
use crate::row::{Claim, ImageId, Region};

/// Quality of crops, 1..=100.
const JPEG_QUALITY: u8 = 92;

/// Before the user's mask.
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// What a file is called until it is complete. `prepare_folder` removes those of dead processes.
const UNFINISHED: &str = ".croprow-tmp";

/// An unfinished file from another host, boot or container is left over after this: writing one takes a moment.
const LEFT_OVER_AFTER: Duration = Duration::from_secs(600);

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
    write_durably(folder, &shard, &name, &jpeg).map_err(|e| Error::disk(&folder.join(&shard).join(&name), e))?;
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
    let digest = hex(&digest.finalize()[..8]);
    // 256 folders keep each small at a million crops.
    (digest[..2].to_owned(), format!("{}-{digest}.jpg", claim.id))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes `shard/name` below `folder`. Both folders are held open and entered by no link, so that none that is laid
/// meanwhile leads elsewhere.
fn write_durably(folder: &Path, shard: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
    let folder = enter(CWD, folder)?;
    match mkdirat(&folder, shard, FOLDER_MODE) {
        Err(Errno::EXIST) => {}
        // Its name has to outlive a power cut, so that the files in it do.
        made => made.and_then(|()| fsync(&folder))?,
    }
    let shard = enter(folder.as_fd(), Path::new(shard))?;
    let unfinished = unfinished_name();
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

/// Makes a folder whose name outlives a power cut, so that the files in it do.
fn create_folder(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if fs::symlink_metadata(folder)?.is_dir() {
                Ok(())
            } else {
                Err(not_a_folder())
            }
        }
        Ok(()) => match folder.parent() {
            Some(parent) if parent != Path::new("") => File::open(parent)?.sync_all(),
            _ => Ok(()),
        },
        other => other,
    }
}

/// Process, its start, where its number means something, and a number: no other writer has the same, also after a
/// restart with the same process number, and in another container.
fn unfinished_name() -> String {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let own = Writer::own();
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    format!("{}-{}-{}-{serial}{UNFINISHED}", own.pid, own.started, own.place)
}

/// Who writes an unfinished file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Writer {
    pid: i64,
    /// Start of the process in clock ticks since boot.
    started: i64,
    /// Digest of host, boot and namespace, in which the number of a process means something.
    place: String,
}

impl Writer {
    fn own() -> &'static Self {
        static OWN: OnceLock<Writer> = OnceLock::new();
        OWN.get_or_init(|| {
            let ProcessId { host, boot_id, pid, started } = ProcessId::own();
            Self { pid, started, place: hex(&Sha256::digest(format!("{host} {boot_id}"))[..4]) }
        })
    }

    fn of(name: &str) -> Option<Self> {
        let mut parts = name.strip_suffix(UNFINISHED)?.split('-');
        let (pid, started, place) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?, parts.next()?);
        parts.next()?.parse::<u64>().ok()?;
        parts.next().is_none().then(|| Self { pid, started, place: place.to_owned() })
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
            if is_left_over(&file.path()) {
                let _ = fs::remove_file(file.path());
            }
        }
    }
    Ok(folder.to_owned())
}

/// The image that a name below the folder of crops speaks of; `None` for a name that this program does not give.
pub fn image_of(name: &str) -> Option<ImageId> {
    let (shard, file) = name.split_once('/')?;
    let (id, digest) = file.strip_suffix(".jpg")?.rsplit_once('-')?;
    let hex = |text: &str, length| text.len() == length && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let number: i64 = id.parse().ok()?;
    (hex(shard, 2) && hex(digest, 16) && digest.starts_with(shard) && number.to_string() == id)
        .then_some(ImageId(number))
}

/// An unfinished file whose process is gone: at once where that can be told from here, else when it is old.
pub fn is_left_over(path: &Path) -> bool {
    let Some(writer) = path.file_name().and_then(|name| Writer::of(name.to_str()?)) else { return false };
    if writer.place == Writer::own().place {
        return ProcessId::is_gone(writer.pid, writer.started);
    }
    let age = fs::symlink_metadata(path).and_then(|m| m.modified()).map(|at| at.elapsed().unwrap_or_default());
    age.is_ok_and(|age| age >= LEFT_OVER_AFTER)
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
        let own = unfinished_name();
        let Writer { pid, started, place } = Writer::own();
        // A process that is gone, one that had our number before us, one in another container.
        let dead = format!("4194304-1-{place}-3{UNFINISHED}");
        let earlier = format!("{pid}-{}-{place}-3{UNFINISHED}", started - 1);
        let (elsewhere, old) = (format!("7-1-00000000-3{UNFINISHED}"), format!("8-1-00000000-3{UNFINISHED}"));
        for name in [&dead, &earlier, &elsewhere, &old, &own, "notes.croprow-tmp", "1-aa.jpg"] {
            fs::write(shard.join(name), b"x").unwrap();
        }
        let long_ago = std::time::SystemTime::now() - 2 * LEFT_OVER_AFTER;
        File::options().write(true).open(shard.join(&old)).unwrap().set_modified(long_ago).unwrap();
        prepare_folder(folder.path()).unwrap();
        let mut left = walk(folder.path());
        left.sort();
        assert_eq!(left, {
            let mut kept = vec!["1-aa.jpg".to_owned(), own, elsewhere, "notes.croprow-tmp".to_owned()];
            kept.sort();
            kept
        });
    }

    #[test]
    fn a_crop_of_another_writer_is_recognised_by_its_name_alone() {
        assert_eq!(image_of("9a/3-9a259eb0d81776aa.jpg"), Some(ImageId(3)));
        assert_eq!(image_of("9a/-3-9a259eb0d81776aa.jpg"), Some(ImageId(-3)));
        for name in [
            "9a/3-8a259eb0d81776aa.jpg",
            "9a/03-9a259eb0d81776aa.jpg",
            "9a/3-9A259eb0d81776aa.jpg",
            "9a/../9a/3-9a259eb0d81776aa.jpg",
            "../../etc/passwd",
            "9a/3-9a259eb0d81776aa.png",
            "3-9a259eb0d81776aa.jpg",
            "",
        ] {
            assert_eq!(image_of(name), None, "{name}");
        }
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
