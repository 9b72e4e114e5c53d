//! `verify`: every kind of damage is planted and named, a sound database has none, and what can be mended is.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use croprow::db::Db;
use croprow::recipe::{Decode, EmbedRecipe};
use croprow::verify::{Damage, Options, Report, mend, verify};
use rusqlite::Connection;

use crate::cli::{call, expect, folder};
use crate::support::dump::{assert_sound, dump, number};
use crate::support::fake::{Behaviour, Setup, database, run};
use crate::support::{picture, pictures};

const IMAGES: u32 = 20;

/// A finished database with crops, and what it looks like.
pub(crate) struct Finished {
    folder: tempfile::TempDir,
    expected: String,
}

impl Finished {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = pictures(folder.path(), IMAGES);
        let db = folder.path().join("sound.db");
        database(&db, &files);
        fs::create_dir(folder.path().join("sound")).unwrap();
        run(&db, &setup(&db)).unwrap();
        let expected = dump(&db);
        Self { folder, expected }
    }

    /// A copy of database and crops, for damage of its own.
    pub(crate) fn copy(&self, name: &str) -> PathBuf {
        let db = self.folder.path().join(format!("{name}.db"));
        let sound = Connection::open(self.folder.path().join("sound.db")).unwrap();
        sound.execute("VACUUM INTO ?1", [db.to_str().unwrap()]).unwrap();
        for shard in fs::read_dir(self.folder.path().join("sound")).unwrap().flatten() {
            let to = self.folder.path().join(name).join(shard.file_name());
            fs::create_dir_all(&to).unwrap();
            for file in fs::read_dir(shard.path()).unwrap().flatten() {
                fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        }
        db
    }
}

pub(crate) fn crops(db: &Path) -> PathBuf {
    db.with_extension("")
}

fn setup(db: &Path) -> Setup {
    let mut setup = Setup::default();
    setup.config.crops = Some(crops(db));
    setup
}

pub(crate) fn look(db: &Path) -> Report {
    let options = Options { crop_folders: vec![crops(db)], examples: 5, threads: 2 };
    verify(&Db::open_read_only(db).unwrap(), &options, &mut |_| {}).unwrap()
}

pub(crate) fn kinds(report: &Report) -> Vec<Damage> {
    report.findings.iter().map(|f| f.damage).collect()
}

/// A connection that nothing holds back.
pub(crate) fn free(db: &Path) -> Connection {
    let conn = Connection::open(db).unwrap();
    conn.execute_batch("PRAGMA foreign_keys = OFF; PRAGMA ignore_check_constraints = ON").unwrap();
    conn
}

fn sql(statement: &'static str) -> impl Fn(&Path) {
    move |db| {
        let changed = free(db).execute(statement, []).unwrap();
        assert!(changed > 0, "nothing was planted by {statement}");
    }
}

/// The file of the first crop.
pub(crate) fn first_crop(db: &Path) -> PathBuf {
    let name: String = free(db).query_row("SELECT crop FROM regions ORDER BY id LIMIT 1", [], |r| r.get(0)).unwrap();
    crops(db).join(name)
}

fn overwrite(content: impl Fn(Vec<u8>) -> Vec<u8>) -> impl Fn(&Path) {
    move |db| {
        let crop = first_crop(db);
        fs::write(&crop, content(fs::read(&crop).unwrap())).unwrap();
    }
}

/// Fills the first page of an index with nothing.
pub(crate) fn destroy_index(db: &Path) {
    let conn = free(db);
    let page: u64 =
        conn.query_row("SELECT rootpage FROM sqlite_schema WHERE name = 'regions_by_label'", [], |r| r.get(0)).unwrap();
    let size: u64 = conn.query_row("PRAGMA page_size", [], |r| r.get(0)).unwrap();
    drop(conn);
    let file = fs::OpenOptions::new().write(true).open(db).unwrap();
    file.write_all_at(&vec![0; size as usize], (page - 1) * size).unwrap();
}

fn say_that_vectors_are_normalised(db: &Path) {
    let recipe = EmbedRecipe {
        model_digest: "m".into(),
        adapter_version: 1,
        crop_fit: None,
        normalize: Some(true),
        decode: Decode::Scaled,
    };
    let body = serde_json::to_string(&recipe).unwrap();
    free(db).execute("UPDATE recipes SET body = ?1 WHERE stage = 'embed'", [body]).unwrap();
}

/// What is planted, what is found of it, and whether mending and another run make it good.
type Plant = (&'static [Damage], Box<dyn Fn(&Path)>, bool);

fn in_rows() -> Vec<Plant> {
    use Damage as D;
    vec![
        (
            &[D::Dangling, D::VectorLacking],
            Box::new(sql("UPDATE embeddings SET recipe_id = 999 WHERE region_id = 3")),
            true,
        ),
        (
            &[D::RegionWithoutImage],
            Box::new(sql("INSERT INTO regions (image_id, x0, y0, x1, y1) VALUES (9999, 0, 0, 1, 1)")),
            true,
        ),
        (
            &[D::VectorWithoutRegion],
            Box::new(sql("INSERT INTO embeddings SELECT 9999, recipe_id, dim, dtype, vector FROM embeddings LIMIT 1")),
            true,
        ),
        (
            &[D::CandidatesWithoutImage],
            Box::new(sql(
                "INSERT INTO candidates SELECT 9999, recipe_id, vocabulary_id, count, packed FROM candidates LIMIT 1",
            )),
            true,
        ),
        (&[D::Counts], Box::new(sql("UPDATE counts SET images = images + 1")), true),
        (&[D::Counts], Box::new(sql("DELETE FROM counts")), true),
        (&[D::States], Box::new(sql("UPDATE images SET detect_code = 'io' WHERE id = 2")), true),
        (&[D::States], Box::new(sql("UPDATE images SET token = 7 WHERE id = 2")), true),
        (&[D::States], Box::new(sql("UPDATE images SET embed_state = 'finished' WHERE id = 2")), true),
        (
            &[D::Abandoned],
            Box::new(sql(
                "UPDATE images SET embed_state = 'running', embed_recipe_id = NULL, run_id = 1, token = 5 WHERE id = 4",
            )),
            true,
        ),
        (&[D::DoneWithoutRecipe], Box::new(sql("UPDATE images SET detect_recipe_id = NULL WHERE id = 5")), true),
        (
            &[D::DoneWithoutRecipe],
            Box::new(sql("UPDATE images SET detect_recipe_id = embed_recipe_id WHERE id = 5")),
            true,
        ),
        (
            &[D::DoneWithoutRegion],
            Box::new(sql("UPDATE images SET detect_state = NULL, detect_recipe_id = NULL
                          WHERE id = (SELECT min(id) FROM images WHERE id NOT IN (SELECT image_id FROM regions))")),
            true,
        ),
        (&[D::VectorLacking], Box::new(sql("DELETE FROM embeddings WHERE region_id = 2")), true),
        (&[D::VectorLength], Box::new(sql("UPDATE embeddings SET vector = zeroblob(31) WHERE region_id = 2")), true),
        (
            &[D::VectorLength],
            Box::new(sql("UPDATE embeddings SET vector = substr(vector, 1, 16), dim = 4 WHERE region_id = 2")),
            true,
        ),
        (&[D::VectorLength], Box::new(sql("UPDATE embeddings SET dtype = 'f64' WHERE region_id = 2")), true),
        (
            &[D::VectorNotFinite],
            Box::new(sql(
                "UPDATE embeddings SET vector = CAST(substr(vector, 1, 28) || x'0000c07f' AS BLOB) WHERE region_id = 2",
            )),
            true,
        ),
        (
            &[D::VectorNotFinite],
            Box::new(sql(
                "UPDATE embeddings SET vector = CAST(x'000080ff' || substr(vector, 5) AS BLOB) WHERE region_id = 2",
            )),
            true,
        ),
        (&[D::VectorZero], Box::new(sql("UPDATE embeddings SET vector = zeroblob(32) WHERE region_id = 2")), true),
        (&[D::VectorNorm], Box::new(say_that_vectors_are_normalised), false),
        (&[D::Candidates], Box::new(sql("UPDATE candidates SET packed = x'09' WHERE image_id = 3")), true),
        (&[D::Candidates], Box::new(sql("UPDATE candidates SET count = count + 1 WHERE image_id = 3")), true),
        (&[D::Candidates], Box::new(sql("UPDATE candidates SET vocabulary_id = 77 WHERE image_id = 3")), true),
        (&[D::Candidates], Box::new(sql("UPDATE candidates SET recipe_id = 77 WHERE image_id = 3")), true),
        (&[D::RegionReversed], Box::new(sql("UPDATE regions SET x0 = x1, x1 = x0 WHERE id = 3")), true),
        (&[D::RegionOutside, D::CropSize], Box::new(sql("UPDATE regions SET x1 = x1 + 5000 WHERE id = 3")), true),
        (&[D::RegionScore], Box::new(sql("UPDATE regions SET score = 1.5 WHERE id = 3")), true),
        (
            &[D::VectorLacking, D::RegionTwice],
            Box::new(sql("INSERT INTO regions (image_id, label, score, x0, y0, x1, y1)
                          SELECT image_id, label, score, x0, y0, x1, y1 FROM regions WHERE id = 3")),
            true,
        ),
    ]
}

fn in_files() -> Vec<Plant> {
    use Damage as D;
    vec![
        (&[D::Structure], Box::new(destroy_index), false),
        (
            &[D::CropName, D::CropOrphan],
            Box::new(sql("UPDATE regions SET crop = '../../../etc/passwd' WHERE id = 1")),
            true,
        ),
        (&[D::CropMissing], Box::new(|db| fs::remove_file(first_crop(db)).unwrap()), true),
        (&[D::CropFolder], Box::new(|db| fs::rename(crops(db), crops(db).with_extension("elsewhere")).unwrap()), false),
        (
            &[D::CropUnreadable],
            Box::new(|db| {
                let crop = first_crop(db);
                fs::remove_file(&crop).unwrap();
                std::os::unix::fs::symlink(crop.file_name().unwrap(), &crop).unwrap();
            }),
            false,
        ),
        (&[D::CropEmpty], Box::new(overwrite(|_| Vec::new())), true),
        (&[D::CropUndecodable], Box::new(overwrite(|bytes| bytes[..bytes.len() / 2].to_vec())), true),
        (&[D::CropUndecodable], Box::new(overwrite(|bytes| vec![0; bytes.len()])), true),
        (&[D::CropUndecodable], Box::new(overwrite(|_| b"<html>404</html>".to_vec())), true),
        (
            &[D::CropUndecodable],
            Box::new(|db| {
                fs::remove_file(first_crop(db)).unwrap();
                fs::create_dir(first_crop(db)).unwrap();
            }),
            false,
        ),
        (
            &[D::CropSize],
            Box::new(|db| {
                picture(1, 3, 3).save(first_crop(db)).unwrap();
            }),
            true,
        ),
        (
            &[D::CropOrphan],
            Box::new(|db| {
                fs::create_dir_all(crops(db).join("ab")).unwrap();
                fs::write(crops(db).join("ab/3-ab00000000000000.jpg"), b"x").unwrap();
                // Not ours: the user's own files are nobody's business.
                fs::write(crops(db).join("ab/notes.jpg"), b"x").unwrap();
                fs::write(crops(db).join("index.html"), b"x").unwrap();
            }),
            false,
        ),
        (
            &[D::CropUnfinished],
            Box::new(|db| {
                fs::create_dir_all(crops(db).join("ab")).unwrap();
                let unfinished = crops(db).join("ab/7-1-00000000-3.croprow-tmp");
                fs::write(&unfinished, b"x").unwrap();
                let an_hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
                fs::File::options().write(true).open(unfinished).unwrap().set_modified(an_hour_ago).unwrap();
            }),
            false,
        ),
    ]
}

#[test]
fn a_sound_database_has_no_damage_and_is_not_touched() {
    let finished = Finished::new();
    let db = finished.copy("looked-at");
    let before = fs::read(&db).unwrap();
    let report = look(&db);
    assert!(report.is_sound() && report.notes.is_empty(), "{report:?}");
    assert_eq!((report.images, report.regions), (20, number(&db, "SELECT count(*) FROM regions") as u64));
    assert_eq!((report.vectors, report.crops), (report.regions, report.regions));
    assert_eq!(fs::read(&db).unwrap(), before);
    // Where no folder is known, that is said and is no damage.
    let options = Options { crop_folders: Vec::new(), examples: 5, threads: 1 };
    let report = verify(&Db::open_read_only(&db).unwrap(), &options, &mut |_| {}).unwrap();
    assert!(report.is_sound() && report.notes.len() == 1 && report.crops == 0, "{report:?}");
}

#[test]
fn a_suspect_that_has_ended_or_is_gone_is_no_damage_and_goes_where_something_is_mended() {
    let finished = Finished::new();
    let db = finished.copy("suspected");
    sql("INSERT INTO suspects (image_id, run_id, at) VALUES (1, 1, 0), (9999, 1, 0)")(&db);
    assert!(look(&db).is_sound(), "{:?}", look(&db));
    sql("INSERT INTO suspects (image_id, run_id, at) VALUES (2, 99, 0)")(&db);
    let report = look(&db);
    assert_eq!(kinds(&report), [Damage::Dangling], "{report:?}");
    mend(&mut Db::open(&db).unwrap(), &report).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM suspects WHERE image_id = 1"), 1);
    assert_eq!(number(&db, "SELECT count(*) FROM suspects"), 1);
    assert!(look(&db).is_sound(), "{:?}", look(&db));
}

#[test]
fn nothing_is_mended_under_a_worker_that_is_only_silent() {
    let finished = Finished::new();
    let db = finished.copy("silent");
    sql("UPDATE runs SET ended_at = NULL, ended_how = NULL, exit_code = NULL, host = 'elsewhere', heartbeat_at = 0")(
        &db,
    );
    sql("UPDATE counts SET images = images + 1")(&db);
    let report = look(&db);
    assert_eq!(kinds(&report), [Damage::Counts]);
    let refused = mend(&mut Db::open(&db).unwrap(), &report).unwrap_err();
    assert!(refused.to_string().contains("is at work"), "{refused}");
}

#[test]
fn every_kind_of_damage_is_named_and_what_can_be_mended_is() {
    let finished = Finished::new();
    let mut seen = Vec::new();
    for (number, (expected, plant, is_mended)) in in_rows().into_iter().chain(in_files()).enumerate() {
        let db = finished.copy(&format!("planted-{number}"));
        plant(&db);
        let report = look(&db);
        assert_eq!(kinds(&report), expected, "plant {number}: {report:#?}");
        for finding in &report.findings {
            assert!(finding.count >= 1 && !finding.examples.is_empty() && finding.examples.len() <= 5, "{finding:?}");
        }
        seen.extend_from_slice(expected);
        if is_mended {
            mend(&mut Db::open(&db).unwrap(), &report).unwrap();
            if !expected.contains(&Damage::CropName) {
                assert_eq!(kinds(&look(&db)), [], "plant {number} {expected:?} was not mended");
            }
            run(&db, &setup(&db)).unwrap();
            assert_sound(&db);
            assert!(dump(&db) == finished.expected, "plant {number} {expected:?}:\n{}", dump(&db));
            assert_eq!(kinds(&look(&db)), [], "plant {number} {expected:?}");
        }
    }
    for damage in Damage::ALL {
        assert!(seen.contains(&damage), "{damage:?} was never planted");
    }
}

#[test]
fn beside_a_run_that_writes_crops_nothing_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let files = pictures(folder.path(), 150);
    let db = folder.path().join("busy.db");
    database(&db, &files);
    fs::create_dir(crops(&db)).unwrap();
    let mut setup = setup(&db);
    setup.behaviour = Behaviour { call: Duration::from_millis(5), ..Behaviour::default() };
    let over = AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        let runner = scope.spawn(|| {
            run(&db, &setup).unwrap();
            over.store(true, Ordering::SeqCst);
        });
        let mut looks = 0;
        while !over.load(Ordering::SeqCst) {
            let report = look(&db);
            assert!(report.is_sound(), "{report:#?}");
            let live = number(&db, "SELECT count(*) FROM images WHERE token IS NOT NULL") > 0;
            if live && looks == 0 {
                let refused = mend(&mut Db::open(&db).unwrap(), &report).unwrap_err();
                assert!(refused.to_string().contains("is at work"), "{refused}");
            }
            looks += usize::from(live);
        }
        runner.join().unwrap();
        looks
    });
    assert!(looks > 0, "never looked while it ran");
    assert!(look(&db).is_sound());
}

#[test]
fn the_program_says_what_is_damaged_how_to_mend_it_and_by_its_exit_code() {
    let (folder, db, photos) = folder(8);
    let crops = folder.path().join("crops");
    expect(&call(&["add", &db, &photos]), 0);
    expect(&crate::cli::run(&db, &["--crops", crops.to_str().unwrap(), "--normalize", "yes"]), 0);
    let said = expect(&call(&["verify", &db]), 0);
    assert!(said.contains("sound; 8 images"), "{said}");
    let path = Path::new(&db);
    // The folder of crops is known from the settings.
    let name: String = free(path).query_row("SELECT crop FROM regions LIMIT 1", [], |r| r.get(0)).unwrap();
    fs::write(crops.join(name), b"").unwrap();
    sql("UPDATE counts SET images = images + 3")(path);
    let said = expect(&call(&["verify", &db]), 2);
    for words in ["x counts: counters differ", "1 x crop_empty: crop files are empty", "--repair", "damaged; 8 images"]
    {
        assert!(said.contains(words), "{words} in {said}");
    }
    let json = expect(&call(&["verify", &db, "--json"]), 2);
    let json: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    assert_eq!((json["sound"].as_bool(), json["damage"][0]["kind"].as_str()), (Some(false), Some("counts")));
    assert_eq!(json["damage"][1]["examples"].as_array().map(Vec::len), Some(1));
    let said = expect(&call(&["verify", &db, "--repair"]), 0);
    assert!(said.contains("1 images are pending again") && said.contains("sound"), "{said}");
    let said = expect(&call(&["run", &db]), 0);
    assert!(said.contains("1 done"), "{said}");
    expect(&call(&["verify", &db]), 0);
    expect(&call(&["verify", &db, "--examples", "0"]), 1);
    expect(&call(&["verify", "/nonexistent.db"]), 1);
    for (name, bytes) in [
        ("empty.db", vec![]),
        ("text.db", b"no database".to_vec()),
        ("broken.db", {
            let mut bytes = fs::read(&db).unwrap();
            bytes[100..4000].fill(0xa5);
            bytes
        }),
    ] {
        let broken = folder.path().join(name);
        fs::write(&broken, &bytes).unwrap();
        let said = expect(&call(&["verify", broken.to_str().unwrap()]), 3);
        assert!(said.contains(name), "{said}");
        assert_eq!(fs::read(&broken).unwrap(), bytes);
    }
}
