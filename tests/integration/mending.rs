//! `verify --repair` mends what is damaged and touches nothing that may be all right: crops whose disk is not there, files
//! that cannot be read, and a database whose file is damaged.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use croprow::db::Db;
use croprow::error::Error;
use croprow::verify::{Damage, Options, Report, mend, verify};

use crate::cli::{call, expect};
use crate::support::dump::number;
use crate::verify::{Finished, crops, destroy_index, first_crop, free, kinds, look};

/// The damage of a database, after which nothing of it may be mended.
#[track_caller]
fn nothing_is_mended(db: &Path, expected: &[Damage]) -> Report {
    let states = || {
        let sql = "SELECT (SELECT count(*) FROM images WHERE 'pending' IN (detect_state, embed_state)) * 1000000
                        + (SELECT count(*) FROM regions WHERE crop IS NOT NULL)";
        number(db, sql)
    };
    let (report, before) = (look(db), states());
    assert_eq!(kinds(&report), expected, "{report:#?}");
    let mended = mend(&mut Db::open(db).unwrap(), &report).unwrap();
    assert_eq!((mended.images, mended.dangling), (0, 0));
    assert_eq!(states(), before);
    report
}

#[test]
fn crops_whose_folder_is_not_there_are_not_judged() {
    let finished = Finished::new();
    let db = finished.copy("unmounted");
    let elsewhere = crops(&db).with_file_name("elsewhere");
    let crop_count = number(&db, "SELECT count(*) FROM regions WHERE crop IS NOT NULL") as u64;
    fs::rename(crops(&db), &elsewhere).unwrap();
    let report = nothing_is_mended(&db, &[Damage::CropFolder]);
    assert_eq!((report.findings[0].count, report.crops), (crop_count, crop_count));
    // Also where another folder is there, and some of them are in it.
    let some = look_in(&db, &[crops(&db), elsewhere.clone()]);
    assert!(some.is_sound(), "{some:#?}");
    let name = first_crop(&db).strip_prefix(crops(&db)).unwrap().to_owned();
    fs::remove_file(elsewhere.join(name)).unwrap();
    let some = look_in(&db, &[crops(&db), elsewhere.clone()]);
    assert_eq!((kinds(&some), some.findings[0].count), (vec![Damage::CropFolder], 1));
    let alone = look_in(&db, &[elsewhere]);
    assert_eq!(kinds(&alone), [Damage::CropMissing]);
    // Through the program: said, and nothing is done.
    let (text, folder) = (db.to_str().unwrap(), crops(&db));
    let said = expect(&call(&["verify", text, "--repair", "--crops", folder.to_str().unwrap()]), 2);
    assert!(said.contains(&format!("{crop_count} x crop_folder: ")) && said.contains("--crops DIR"), "{said}");
    assert!(said.contains("No such file or directory") && said.contains("0 images are pending again"), "{said}");
}

fn look_in(db: &Path, crop_folders: &[PathBuf]) -> Report {
    let options = Options { crop_folders: crop_folders.to_vec(), examples: 5, threads: 2 };
    verify(&Db::open_read_only(db).unwrap(), &options, &mut |_| {}).unwrap()
}

#[test]
fn a_crop_that_cannot_be_read_is_left_where_it_is() {
    let finished = Finished::new();
    let db = finished.copy("unreadable");
    let crop = first_crop(&db);
    fs::remove_file(&crop).unwrap();
    // Root may read everything; what nobody can is a link to itself.
    symlink(crop.file_name().unwrap(), &crop).unwrap();
    nothing_is_mended(&db, &[Damage::CropUnreadable]);
    assert!(crop.symlink_metadata().is_ok());
}

/// A grey JPEG of that side, a multiple of 8: two bits for each block, which say that all of it is like the one before.
fn blank_jpeg(side: u16) -> Vec<u8> {
    let one_code = |class: u8| {
        // One code of one bit, for the symbol 0: no difference, and no more coefficients.
        let counts: Vec<u8> = (0..16).map(|length| u8::from(length == 0)).collect();
        [&[0xff, 0xc4, 0, 20, class << 4][..], &counts, &[0]].concat()
    };
    let [high, low] = side.to_be_bytes();
    let blocks = usize::from(side / 8).pow(2);
    assert!(side.is_multiple_of(8) && blocks.is_multiple_of(4), "no padding is written");
    [
        &[0xff, 0xd8, 0xff, 0xdb, 0, 67, 0][..],
        &[1; 64],
        &[0xff, 0xc0, 0, 11, 8, high, low, high, low, 1, 1, 0x11, 0],
        &one_code(0),
        &one_code(1),
        &[0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0],
        &vec![0; blocks / 4],
        &[0xff, 0xd9],
    ]
    .concat()
}

#[test]
fn a_crop_may_be_as_large_as_its_row_says_and_no_larger() {
    let finished = Finished::new();
    let db = finished.copy("large");
    // Of a run with a larger --max-pixels than the default.
    let side = 13_504;
    fs::write(first_crop(&db), blank_jpeg(side)).unwrap();
    let with_box = |side: u16| {
        let sql = format!(
            "UPDATE regions SET x0 = 0, y0 = 0, x1 = {side}, y1 = {side} WHERE id = (SELECT min(id) FROM regions);
             UPDATE images SET width_px = {side}, height_px = {side}
             WHERE id = (SELECT image_id FROM regions ORDER BY id LIMIT 1)"
        );
        free(&db).execute_batch(&sql).unwrap();
    };
    with_box(side);
    let report = look(&db);
    assert!(report.is_sound(), "{report:#?}");
    with_box(side - 8);
    let report = look(&db);
    assert_eq!(kinds(&report), [Damage::CropSize], "{report:#?}");
    assert!(report.findings[0].examples[0].contains("too large"), "{report:#?}");
}

#[test]
fn nothing_is_written_to_a_file_that_is_damaged_itself() {
    let finished = Finished::new();
    let db = finished.copy("broken");
    fs::remove_file(first_crop(&db)).unwrap();
    destroy_index(&db);
    let before = fs::read(&db).unwrap();
    let report = look(&db);
    assert_eq!(kinds(&report), [Damage::Structure, Damage::CropMissing]);
    let text = db.to_str().unwrap();
    let said = expect(&call(&["verify", text, "--repair", "--crops", crops(&db).to_str().unwrap()]), 2);
    assert!(said.contains("nothing was mended") && said.contains(".recover") && said.contains("backup"), "{said}");
    assert!(said.contains("x structure: ") && !said.contains("pending again, "), "{said}");
    assert!(fs::read(&db).unwrap() == before, "something was written");
    let refused = mend(&mut Db::open(&db).unwrap(), &report).unwrap_err();
    assert!(matches!(&refused, Error::Unreadable { .. }) && refused.to_string().contains(".recover"), "{refused}");
    assert_eq!(number(&db, "SELECT count(*) FROM regions WHERE crop IS NULL"), 0);
}
