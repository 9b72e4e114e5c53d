//! Folders that files were read below. So that a folder that is gone can be told from a disk of which nothing was read.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Folders that are remembered. Of more, the deepest are forgotten, and from then on all of that depth count as read.
const FOLDERS: usize = 4096;

/// The folders of all files that were read, with all above them.
#[derive(Debug)]
pub(super) struct SeenFolders {
    folders: HashSet<PathBuf>,
    /// Components of a path that are remembered; the root is one.
    depth: usize,
}

impl Default for SeenFolders {
    fn default() -> Self {
        Self { folders: HashSet::new(), depth: usize::MAX }
    }
}

impl SeenFolders {
    /// A file in this folder was read.
    pub(super) fn add(&mut self, folder: &Path) {
        // Mostly it is known, and with it all above.
        if self.folders.contains(folder) {
            return;
        }
        let too_deep = depth(folder).saturating_sub(self.depth);
        for above in folder.ancestors().skip(too_deep) {
            if self.folders.contains(above) {
                break;
            }
            self.folders.insert(above.to_owned());
        }
        while self.folders.len() > FOLDERS {
            let deepest = self.folders.iter().map(|folder| depth(folder)).max().unwrap_or(0);
            self.depth = deepest.saturating_sub(1);
            self.folders.retain(|folder| depth(folder) < deepest);
        }
    }

    /// The uppermost folder on the way to `folder`, itself among them, below which nothing was read; `folder` where
    /// something was, or that is not known any more.
    pub(super) fn unread_above<'a>(&self, folder: &'a Path) -> &'a Path {
        let way: Vec<&Path> = folder.ancestors().collect();
        let mut known = way.into_iter().rev().take(self.depth);
        known.find(|above| !self.folders.contains(*above)).unwrap_or(folder)
    }
}

fn depth(folder: &Path) -> usize {
    folder.components().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unread<'a>(seen_folders: &SeenFolders, folder: &'a str) -> &'a str {
        seen_folders.unread_above(Path::new(folder)).to_str().unwrap()
    }

    #[test]
    fn of_a_disk_nothing_of_which_was_read_it_is_the_disk_that_is_named() {
        let mut seen_folders = SeenFolders::default();
        assert_eq!(unread(&seen_folders, "/mnt/archive/2019"), "/", "nothing was read at all");
        seen_folders.add(Path::new("/home/me/pictures/a"));
        seen_folders.add(Path::new("/home/me/pictures/b/c"));
        assert_eq!(unread(&seen_folders, "/mnt/archive/2019"), "/mnt");
        seen_folders.add(Path::new("/mnt/other"));
        assert_eq!(unread(&seen_folders, "/mnt/archive/2019"), "/mnt/archive");
        assert_eq!(unread(&seen_folders, "/home/me/pictures/gone"), "/home/me/pictures/gone");
        assert_eq!(unread(&seen_folders, "/home/me/pictures/b/gone/deep"), "/home/me/pictures/b/gone");
        assert_eq!(unread(&seen_folders, "/home/me/pictures/b"), "/home/me/pictures/b", "files were read below it");
    }

    #[test]
    fn of_many_folders_the_deepest_are_forgotten_and_count_as_read() {
        let mut seen_folders = SeenFolders::default();
        for n in 0..3 * FOLDERS {
            seen_folders.add(Path::new(&format!("/photos/{}/{n}", n % 7)));
            assert!(seen_folders.folders.len() <= FOLDERS);
        }
        assert_eq!(unread(&seen_folders, "/mnt/archive/2019"), "/mnt");
        assert_eq!(unread(&seen_folders, "/photos/8/1"), "/photos/8", "that deep all is known");
        assert_eq!(unread(&seen_folders, "/photos/3/unread/deep"), "/photos/3/unread/deep");
        // Ten thousand beside one another, too: then nothing is known but the root.
        (0..2 * FOLDERS).for_each(|n| seen_folders.add(Path::new(&format!("/{n}"))));
        assert!(seen_folders.folders.len() <= FOLDERS);
        assert_eq!(unread(&seen_folders, "/mnt/archive/2019"), "/mnt/archive/2019");
    }
}
