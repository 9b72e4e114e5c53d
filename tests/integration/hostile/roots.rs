//! Paths that lead out of `--root`, and links in the way of what is written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::tame;
use crate::cli::{call, expect, run};
use crate::support::dump::{assert_sound, number};
use crate::support::picture;

#[test]
fn rows_that_lead_out_of_the_root_fail_and_their_neighbours_are_done() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    fs::create_dir_all(root.join("sub")).unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let db = at("photos.db");
    picture(1, 50, 40).save(root.join("sub/in.png")).unwrap();
    picture(2, 50, 40).save(folder.path().join("secret.png")).unwrap();
    symlink(root.join("sub/in.png"), root.join("inward.png")).unwrap();
    symlink("../secret.png", root.join("outward.png")).unwrap();
    symlink("..", root.join("up")).unwrap();
    symlink(&root, folder.path().join("alias")).unwrap();
    let inside = ["root/sub/in.png", "root/sub/../sub/in.png", "root/inward.png", "alias/sub/in.png"];
    let outside = ["secret.png", "root/../secret.png", "root/outward.png", "root/up/secret.png", "gone.png"];
    let mut paths: Vec<String> = inside.iter().chain(&outside).map(|name| at(name)).collect();
    paths.extend(["/etc/passwd".to_owned(), "/dev/zero".to_owned()]);
    fs::write(at("list"), paths.join("\n")).unwrap();
    expect(&call(&["add", &db, "--from", &at("list")]), 0);
    let conn = rusqlite::Connection::open(&db).unwrap();
    let with_nul = format!("{}\0.png", at("root/sub/in.png"));
    conn.execute("INSERT INTO images (path) VALUES (?1)", [with_nul]).unwrap();
    drop(conn);

    let output = run(&db, &["--root", &at("alias")]);
    assert!(expect(&output, 2).contains("4 done, 8 failed"), "{}", tame(&output));
    tame(&output);
    let coded = |code: &str| number(Path::new(&db), &format!("SELECT count(*) FROM failures WHERE code = '{code}'"));
    assert_eq!(coded("outside_root"), 8);
    let told = "SELECT count(*) FROM failures WHERE message LIKE '%leads out of --root%/root to %secret.png'";
    assert_eq!(number(Path::new(&db), told), 4);
    // A restart needs no flag, and a root that is taken away lets them in.
    expect(&call(&["retry", &db, "--code", "outside_root"]), 0);
    assert!(expect(&call(&["run", &db]), 2).contains("0 done, 8 failed"));
    assert_eq!(coded("outside_root"), 8);
    expect(&call(&["retry", &db, "--code", "outside_root"]), 0);
    assert!(expect(&call(&["run", &db, "--root", "none"]), 2).contains("4 done, 4 failed"));
    assert_eq!((coded("outside_root"), coded("bad_path"), coded("not_regular")), (0, 1, 1));
    assert_sound(Path::new(&db));
    let said = expect(&call(&["run", &db, "--root", &at("nowhere")]), 1);
    assert!(said.contains("--root"), "{said}");
}
