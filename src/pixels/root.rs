//! `--root`: the folder that no file of a row may lie outside of, whatever its path and the links on it say.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;

use super::open::{Refusal, refused_open};
use crate::printable;
use crate::row::RowCode;

/// Refuses a path before anything is opened: opening a device of a stranger's choice can have effects of its own.
/// `root` is absolute and without links.
///
/// # Errors
/// `outside_root`; `missing`, `permission` or `io` where the root itself is not there any more. A file that is missing or
/// cannot be reached is no matter of this function, as long as the words of its path stay in the root.
pub(super) fn check_path(root: &Path, path: &Path) -> Result<(), Refusal> {
    match path.canonicalize() {
        Ok(real) if real.starts_with(root) => Ok(()),
        Ok(real) => Err(outside(root, &real)),
        Err(_) => {
            // Without it no link that leads into it can be followed, and its files would all seem to lie outside.
            root.metadata().map_err(|e| not_there(root, &e))?;
            // What there is of the way to it decides, so that a root that is given by a link has its files.
            let Some(plain) = lexical(path) else { return Err(outside(root, path)) };
            let real = plain.ancestors().find_map(|folder| Some((folder, folder.canonicalize().ok()?)));
            let leads_to = real.map(|(folder, real)| match plain.strip_prefix(folder) {
                Ok(rest) => real.join(rest),
                Err(_) => real,
            });
            if leads_to.is_some_and(|to| to.starts_with(root)) { Ok(()) } else { Err(outside(root, &plain)) }
        }
    }
}

/// Refuses a file that is open already: a link may have been laid after [`check_path`].
///
/// # Errors
/// `outside_root`; `io` where the system does not tell where an open file lies.
pub(super) fn check_open(root: &Path, file: &File) -> Result<(), Refusal> {
    let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|e| Refusal::new(RowCode::Io, format!("cannot tell whether the file lies in --root: {e}")))?;
    if real.starts_with(root) { Ok(()) } else { Err(outside(root, &real)) }
}

fn not_there(root: &Path, error: &io::Error) -> Refusal {
    let refused = refused_open(Errno::from_io_error(error).unwrap_or(Errno::IO));
    Refusal { reason: format!("--root {} cannot be looked at: {error}", printable::path(root)), ..refused }
}

fn outside(root: &Path, real: &Path) -> Refusal {
    let reason = format!("leads out of --root {} to {}", printable::path(root), printable::path(real));
    Refusal::new(RowCode::OutsideRoot, reason)
}

/// `path` without `.` and `..`, or `None` where `..` goes above its beginning. What a link makes of `..` is
/// another matter.
pub fn lexical(path: &Path) -> Option<PathBuf> {
    let mut depth = 0_usize;
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir if depth == 0 && path.is_absolute() => {}
            Component::ParentDir => {
                depth = depth.checked_sub(1)?;
                plain.pop();
            }
            Component::Normal(name) => {
                depth += 1;
                plain.push(name);
            }
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => plain.push(component),
        }
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_what_really_lies_in_the_root_is_inside() {
        let outer = tempfile::tempdir().unwrap();
        let outer = outer.path().canonicalize().unwrap();
        let root = outer.join("root");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(outer.join("secret"), "x").unwrap();
        fs::write(root.join("a/in"), "x").unwrap();
        symlink(outer.join("secret"), root.join("out")).unwrap();
        symlink("..", root.join("a/up")).unwrap();
        symlink("../..", root.join("a/upper")).unwrap();
        symlink(root.join("a/in"), outer.join("back")).unwrap();
        symlink(&root, outer.join("alias")).unwrap();
        symlink(outer.join("nothing"), root.join("dangling")).unwrap();
        let inside = |path: PathBuf| match check_path(&root, &path) {
            Ok(()) => true,
            Err(refusal) => {
                assert_eq!(refusal.code, RowCode::OutsideRoot);
                false
            }
        };
        // A link to nothing is missing, wherever that nothing is.
        let there = ["root/a/in", "root/a/../a/in", "root/a/up/a/in", "back", "alias/a/in"];
        for path in there.into_iter().chain(["alias/gone", "root/gone", "root/dangling"]) {
            assert!(inside(outer.join(path)), "{path}");
        }
        for path in ["secret", "root/../secret", "root/out", "root/a/upper/secret", "gone", "root/../gone", "root2/x"] {
            assert!(!inside(outer.join(path)), "{path}");
        }
        assert!(!inside(PathBuf::from("/etc/passwd")) && !inside(PathBuf::from("../../etc/passwd")));
        // The disk of the root is gone, and with it what links lead to.
        fs::rename(&root, outer.join("elsewhere")).unwrap();
        for path in ["alias/a/in", "root/a/in", "back"] {
            assert_eq!(check_path(&root, &outer.join(path)).unwrap_err().code, RowCode::Missing, "{path}");
        }
        assert!(!inside(outer.join("secret")) && !inside(PathBuf::from("/etc/passwd")));
        fs::rename(outer.join("elsewhere"), &root).unwrap();
        assert!(check_open(&root, &File::open(root.join("a/in")).unwrap()).is_ok());
        assert_eq!(check_open(&root, &File::open(root.join("out")).unwrap()).unwrap_err().code, RowCode::OutsideRoot);
    }
}
