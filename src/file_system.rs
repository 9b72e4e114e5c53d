//! What the system says of the file system that a path lies on: where it is mounted, what is free, and whether it is a
//! network's. Knows nothing of databases or pictures.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::printable;

/// Kinds of file systems by the numbers of statfs(2) and the kernel's `magic.h`, with the name people know.
const KINDS: [(u32, &str, Reach); 32] = [
    (0xef53, "ext", Reach::Local),
    (0x5846_5342, "xfs", Reach::Local),
    (0x9123_683e, "btrfs", Reach::Local),
    (0x2fc1_2fc1, "zfs", Reach::Local),
    (0xf2f5_2010, "f2fs", Reach::Local),
    (0xca45_1a4e, "bcachefs", Reach::Local),
    (0x0102_1994, "tmpfs", Reach::Local),
    (0x8584_58f6, "ramfs", Reach::Local),
    (0x794c_7630, "overlay", Reach::Local),
    (0x4d44, "fat", Reach::Local),
    (0x2011_bab0, "exfat", Reach::Local),
    (0x5346_544e, "ntfs", Reach::Local),
    (0x7366_746e, "ntfs3", Reach::Local),
    (0x6969, "nfs", Reach::Network),
    (0x517b, "smb", Reach::Network),
    (0xff53_4d42, "cifs", Reach::Network),
    (0xfe53_4d42, "smb2", Reach::Network),
    (0x0102_1997, "9p", Reach::Network),
    // Also virtiofs, sshfs, rclone and the folders that a desktop's containers share with it.
    (0x6573_5546, "fuse", Reach::Network),
    (0x564c, "ncp", Reach::Network),
    (0x5346_414f, "afs", Reach::Network),
    (0x6b41_4653, "afs", Reach::Network),
    (0x7375_7245, "coda", Reach::Network),
    (0x00c3_6400, "ceph", Reach::Network),
    (0x0bd0_0bd0, "lustre", Reach::Network),
    (0x4750_4653, "gpfs", Reach::Network),
    (0x1983_0326, "beegfs", Reach::Network),
    (0x7461_636f, "ocfs2", Reach::Network),
    (0x0116_1970, "gfs2", Reach::Network),
    (0x786f_4256, "vboxsf", Reach::Network),
    (0xbacb_acbc, "vmhgfs", Reach::Network),
    (0x7c7c_6673, "prl_fs", Reach::Network),
];

/// True for a folder that has nothing in it: what is left of a disk that is not mounted.
pub fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

/// Who may change files of a file system behind the kernel's back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Nobody: locks and shared memory work.
    Local,
    /// Other machines, or a host of this one: neither can be relied on.
    Network,
}

/// A file system at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The folder it is mounted at.
    pub mount_point: PathBuf,
    /// Number of its kind, as statfs(2) has it.
    pub magic: u32,
    /// What this user may still write.
    pub free_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
    /// It holds as many files as it can. False where it does not count them.
    pub lacks_inodes: bool,
}

impl FileSystem {
    /// That of `path`, or of the nearest folder above it that exists.
    ///
    /// # Errors
    /// Not even the root can be asked.
    pub fn of(path: &Path) -> io::Result<Self> {
        let absolute = std::path::absolute(path)?;
        // A link is followed: it is its target that is written to.
        let existing = absolute.ancestors().find_map(|p| p.canonicalize().ok()).ok_or(io::ErrorKind::NotFound)?;
        let stat = rustix::fs::statfs(&existing)?;
        let block_bytes = u64::try_from(stat.f_bsize).unwrap_or(0);
        Ok(Self {
            mount_point: mount_point(&existing)?,
            // The upper half of a 64-bit word is never used.
            magic: stat.f_type as u32,
            free_bytes: block_bytes.saturating_mul(stat.f_bavail),
            total_bytes: block_bytes.saturating_mul(stat.f_blocks),
            lacks_inodes: stat.f_files > 0 && stat.f_ffree == 0,
        })
    }

    /// `ext`, `nfs`, ...; `None` for a kind that is not in the table.
    pub fn kind(&self) -> Option<&'static str> {
        self.entry().map(|(_, name, _)| name)
    }

    /// Unknown kinds are taken for local ones.
    pub fn reach(&self) -> Reach {
        self.entry().map_or(Reach::Local, |(_, _, reach)| reach)
    }

    fn entry(&self) -> Option<(u32, &'static str, Reach)> {
        KINDS.into_iter().find(|(magic, ..)| *magic == self.magic)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}) has {} free of {}",
            printable::path(&self.mount_point),
            self.kind().unwrap_or("file system"),
            Bytes(self.free_bytes),
            Bytes(self.total_bytes)
        )?;
        if self.lacks_inodes { f.write_str(", and no room for another file") } else { Ok(()) }
    }
}

/// A size for people: `0 bytes`, `900 bytes`, `2.0 MiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 0..1024 => write!(f, "{bytes} bytes"),
            bytes @ 1024..1_048_576 => write!(f, "{:.1} KiB", bytes as f64 / 1024.0),
            bytes @ 1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", bytes as f64 / 1_048_576.0),
            bytes => write!(f, "{:.1} GiB", bytes as f64 / 1_073_741_824.0),
        }
    }
}

/// The highest folder above `path` with the same device number.
fn mount_point(path: &Path) -> io::Result<PathBuf> {
    let device = path.metadata()?.dev();
    let on_it = |p: &&Path| p.metadata().is_ok_and(|m| m.dev() == device);
    let folder = path.ancestors().take_while(on_it).filter(|p| p.is_dir()).last();
    Ok(folder.unwrap_or(path).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_kind(magic: u32) -> FileSystem {
        FileSystem { mount_point: "/mnt/x".into(), magic, free_bytes: 0, total_bytes: 2 << 20, lacks_inodes: false }
    }

    #[test]
    fn network_file_systems_are_known_by_their_numbers() {
        // Of linux/magic.h and statfs(2).
        for (magic, kind) in [
            (0x6969, "nfs"),
            (0x517b, "smb"),
            (0xff53_4d42, "cifs"),
            (0xfe53_4d42, "smb2"),
            (0x0102_1997, "9p"),
            (0x6573_5546, "fuse"),
            (0x00c3_6400, "ceph"),
            (0x786f_4256, "vboxsf"),
        ] {
            assert_eq!((of_kind(magic).kind(), of_kind(magic).reach()), (Some(kind), Reach::Network));
        }
        for magic in [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0x1234_5678] {
            assert_eq!(of_kind(magic).reach(), Reach::Local, "{magic:x}");
        }
        for (place, (magic, ..)) in KINDS.iter().enumerate() {
            assert!(KINDS[..place].iter().all(|(other, ..)| other != magic), "{magic:x} is in the table twice");
        }
    }

    #[test]
    fn a_file_system_is_found_for_files_that_are_not_there_yet() {
        let folder = tempfile::tempdir().unwrap();
        let here = FileSystem::of(folder.path()).unwrap();
        let there = FileSystem::of(&folder.path().join("not/yet/photos.db")).unwrap();
        assert_eq!((&here.mount_point, here.magic), (&there.mount_point, there.magic));
        assert!(folder.path().canonicalize().unwrap().starts_with(&here.mount_point) && here.total_bytes > 0);
        let proc = FileSystem::of(Path::new("/proc/self/status")).unwrap();
        assert_eq!(proc.mount_point, Path::new("/proc"));
    }

    #[test]
    fn a_full_file_system_is_described_by_place_and_room() {
        assert_eq!(of_kind(0x0102_1994).to_string(), "/mnt/x (tmpfs) has 0 bytes free of 2.0 MiB");
        let full = FileSystem { lacks_inodes: true, free_bytes: 5 << 30, ..of_kind(7) };
        assert_eq!(full.to_string(), "/mnt/x (file system) has 5.0 GiB free of 2.0 MiB, and no room for another file");
    }
}
