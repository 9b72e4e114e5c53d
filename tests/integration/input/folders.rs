//! Folders and files by name.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use croprow::input::{AddRequest, read};

use super::*;

#[test]
fn a_folder_gives_its_images_by_name_and_content_in_a_stable_order() {
    let (_keep, dir) = tree();
    for name in ["b.JPG", "a/z.png", "a/deep/er/x.webp", "c.txt", "d", "e.dat", "empty.jpg"] {
        let content: &[u8] = if name == "d" {
            JPEG
        } else if name == "empty.jpg" {
            b""
        } else {
            b"text"
        };
        write(&dir, name, content);
    }
    let (rows, report) = run(&folders(&[&dir])).unwrap();
    let found: Vec<_> = rows.iter().map(|r| r.path.strip_prefix(&dir).unwrap().to_str().unwrap()).collect();
    assert_eq!(found, ["a/deep/er/x.webp", "a/z.png", "b.JPG", "d", "empty.jpg"]);
    assert_eq!((report.folders, report.not_images, report.unreadable), (4, 2, 0));
}

#[test]
fn a_file_that_is_named_is_taken_whatever_it_is_and_carries_its_stamp() {
    let (_keep, dir) = tree();
    let text = write(&dir, ".hidden.txt", b"12345");
    let (rows, _) = run(&folders(&[&text])).unwrap();
    let modified = text.metadata().unwrap().modified().unwrap();
    let since = modified.duration_since(std::time::UNIX_EPOCH).unwrap();
    let stamp = rows[0].stamp.unwrap();
    assert_eq!((rows[0].path.as_path(), stamp.size_bytes), (text.as_path(), 5));
    assert_eq!(i128::from(stamp.mtime_ns), i128::try_from(since.as_nanos()).unwrap());
}

#[test]
fn a_source_that_does_not_exist_is_told_before_anything_is_read() {
    let (_keep, dir) = tree();
    write(&dir, "a.jpg", JPEG);
    let mut pushed = 0;
    let error = read(&folders(&[&dir, &dir.join("nope")]), &mut |_| {
        pushed += 1;
        Ok(())
    });
    assert!(error.unwrap_err().to_string().ends_with("nope: no such file or folder"));
    assert_eq!(pushed, 0);
}

#[test]
fn hidden_names_are_passed_over() {
    let (_keep, dir) = tree();
    for name in [".thumbs/a.jpg", "._b.jpg", "c.jpg"] {
        write(&dir, name, JPEG);
    }
    assert_eq!(paths(run(&folders(&[&dir]))), [dir.join("c.jpg")]);
}

#[test]
fn loops_of_links_end_and_each_real_file_is_found_once() {
    let (_keep, dir) = tree();
    write(&dir, "sub/a.jpg", JPEG);
    symlink(&dir, dir.join("sub/parent")).unwrap();
    symlink(dir.join("two"), dir.join("one")).unwrap();
    symlink(dir.join("one"), dir.join("two")).unwrap();
    let (rows, report) = run(&folders(&[&dir])).unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((report.folders, report.unreadable), (2, 2));
    assert_eq!(report.problems[0].path, dir.join("one"));
}

#[test]
fn a_folder_reached_by_two_names_is_entered_once() {
    let (_keep, dir) = tree();
    write(&dir, "sub/a.jpg", JPEG);
    symlink(dir.join("sub"), dir.join("link")).unwrap();
    let (rows, report) = run(&folders(&[&dir.join("link"), &dir, &dir.join("sub")])).unwrap();
    assert_eq!(rows.len(), 1, "a link that was named is followed, and the folder behind it not read again");
    assert_eq!(rows[0].path, dir.join("link/a.jpg"));
    assert_eq!(report.folders, 2);
}

#[test]
fn a_link_to_a_file_is_a_row_under_its_own_path() {
    let (_keep, dir) = tree();
    let real = write(&dir, "real.jpg", JPEG);
    symlink(&real, dir.join("link.jpg")).unwrap();
    symlink("nowhere.jpg", dir.join("dangling.jpg")).unwrap();
    let (rows, report) = run(&folders(&[&dir])).unwrap();
    assert_eq!(rows.iter().map(|r| &r.path).collect::<Vec<_>>(), [&dir.join("link.jpg"), &real]);
    assert_eq!(rows[0].stamp, rows[1].stamp);
    assert_eq!((report.unreadable, report.problems[0].reason.as_str()), (1, "no such file or folder"));
}

#[test]
fn pipes_are_passed_over_without_being_opened() {
    let (_keep, dir) = tree();
    for name in ["pipe", "pipe.jpg"] {
        rustix::fs::mknodat(rustix::fs::CWD, dir.join(name), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    }
    symlink("pipe", dir.join("link.jpg")).unwrap();
    let (rows, report) = run(&folders(&[&dir])).unwrap();
    assert_eq!((rows.len(), report.not_images), (0, 3));
}

#[test]
fn a_folder_that_may_not_be_read_is_reported_and_the_scan_goes_on() {
    use std::os::unix::fs::PermissionsExt;
    let (_keep, dir) = tree();
    write(&dir, "a/x.jpg", JPEG);
    write(&dir, "b/y.jpg", JPEG);
    fs::set_permissions(dir.join("a"), fs::Permissions::from_mode(0o000)).unwrap();
    let is_root = fs::read_dir(dir.join("a")).is_ok();
    let (rows, report) = run(&folders(&[&dir])).unwrap();
    fs::set_permissions(dir.join("a"), fs::Permissions::from_mode(0o700)).unwrap();
    if is_root {
        return; // root may read everything
    }
    assert_eq!(rows.len(), 1);
    assert_eq!(report.problems[0].reason, "permission denied");
}

#[test]
fn names_that_are_not_utf_8_survive_from_folders_and_lists() {
    let (_keep, dir) = tree();
    let name = OsStr::from_bytes(b"caf\xe9 \xff\n.jpg");
    let path = write(&dir, name, JPEG);
    assert_eq!(paths(run(&folders(&[&dir]))), [path.as_path()]);

    let list = [path.as_os_str().as_bytes(), b"\0"].concat();
    let list = write(&dir, "list", &list);
    assert_eq!(paths(run(&AddRequest { from: vec![list], ..AddRequest::default() })), [path]);
}
