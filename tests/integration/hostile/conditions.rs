//! `--where`: what it restricts, and what of it is refused.

use std::fs;
use std::path::Path;

use rusqlite::Connection;

use super::tame;
use crate::cli::{call, expect, folder, run};
use crate::support::dump::{assert_sound, dump, number, text};

/// Ten images, `n` of which have the tag `holiday`.
fn tagged(n: usize) -> (tempfile::TempDir, String) {
    let (folder, db, photos) = folder(10);
    expect(&call(&["add", &db, &photos]), 0);
    let conn = Connection::open(&db).unwrap();
    conn.execute("UPDATE images SET tag = 'holiday' WHERE id <= ?1", [n as i64]).unwrap();
    (folder, db)
}

fn states(db: &str, sql: &str) -> i64 {
    number(Path::new(db), &format!("SELECT count(*) FROM images WHERE {sql}"))
}

#[test]
fn a_condition_restricts_the_run_and_is_remembered_and_shown() {
    let (_folder, db) = tagged(4);
    let said = expect(&run(&db, &["--where", "tag = 'holiday'"]), 0);
    assert!(said.contains("detect and embed 4 images where tag = 'holiday' on cpu"), "{said}");
    assert!(said.contains("4 done, 0 failed"), "{said}");
    assert_eq!(states(&db, "detect_state = 'pending' AND tag IS NULL"), 6);
    assert_eq!(states(&db, "embed_state = 'done' AND tag = 'holiday'"), 4);
    let said = expect(&call(&["run", &db]), 0);
    assert!(said.contains("nothing is pending where tag = 'holiday' (10 images"), "{said}");
    // The connection that asks the condition can only read, and is closed before the one that clears the log away.
    assert!(!Path::new(&format!("{db}-wal")).exists(), "the log was left behind");
    // Another one, with a question to another table, and a comment at its end.
    let said = expect(
        &call(&["run", &db, "--where", "(SELECT count(*) FROM images i WHERE i.id <= images.id) > 8 -- two"]),
        0,
    );
    assert!(said.contains("2 done"), "{said}");
    assert!(expect(&call(&["run", &db, "--where", "none"]), 0).contains("4 done"));
    assert_eq!(states(&db, "embed_state = 'done'"), 10);
    assert_sound(Path::new(&db));
}

#[test]
fn the_exit_code_counts_only_rows_that_the_condition_is_about() {
    let (folder, db) = tagged(3);
    for id in [2, 7] {
        fs::write(folder.path().join(format!("photos/{:05}.png", id - 1)), "no picture").unwrap();
    }
    let said = expect(&run(&db, &["--where", "id > 5"]), 2);
    assert!(said.contains("4 done, 1 failed"), "{said}");
    expect(&call(&["run", &db, "--where", "id > 5 AND id <> 7"]), 0);
    expect(&call(&["run", &db, "--where", "tag = 'holiday' AND id <> 2"]), 0);
    expect(&call(&["run", &db, "--where", "tag = 'holiday'"]), 2);
    assert_eq!(states(&db, "detect_state = 'pending'"), 2);
}

#[test]
fn two_passes_keep_to_the_condition_too() {
    let (_folder, db) = tagged(4);
    let said = expect(&run(&db, &["--where", "tag = 'holiday'", "--staged"]), 0);
    assert!(said.contains("detect, then embed 4 images where tag"), "{said}");
    assert_eq!((states(&db, "embed_state = 'done'"), states(&db, "detect_state = 'pending'")), (4, 6));
}

#[test]
fn what_is_more_than_a_condition_is_refused_and_changes_nothing() {
    let (folder, db) = tagged(4);
    let other = folder.path().join("other.db").to_str().unwrap().to_owned();
    let before = (dump(Path::new(&db)), fs::read(&db).unwrap());
    let attach = format!("1; ATTACH '{other}' AS o");
    for condition in [
        "1; DROP TABLE images--",
        "1) UNION SELECT id FROM images WHERE (1",
        "1) OR (1",
        "1) /*",
        "1 THEN 1 END UNION SELECT CASE WHEN 1",
        "1 /*",
        "'",
        "1) --",
        "",
        "  ",
        "tag = ?1",
        "tag = \"holiday\"",
        "nothing_of_this_name = 1",
        "load_extension('/tmp/x.so')",
        "length(randomblob(1000000000)) > 0",
        "length(zeroblob(1000000000)) > 0",
        "length(printf('%.*c', 100000000, 'x')) > 0",
        "writefile('/tmp/x', 'y')",
        "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c) > 0",
        "(SELECT count(*) FROM runs) > 0",
        "(SELECT count(*) FROM sqlite_schema) > 0",
        "(SELECT count(*) FROM pragma_table_info('images')) > 0",
        "(SELECT count(*) FROM failures) > 0",
        "(DELETE FROM images RETURNING 1)",
        "count(*) > 0",
        "\u{1b}[31m",
        &attach,
    ] {
        let output = run(&db, &["--where", condition]);
        let said = expect(&output, 1);
        tame(&output);
        assert!(said.contains("--where"), "{condition}: {said}");
    }
    assert_eq!(before, (dump(Path::new(&db)), fs::read(&db).unwrap()));
    assert!(!Path::new(&other).exists());
    assert_eq!(number(Path::new(&db), "SELECT count(*) FROM runs"), 0);
}

#[test]
fn a_condition_without_an_end_is_cut_short_and_nothing_was_begun() {
    let (_folder, db) = tagged(4);
    let cross = (0..9).map(|n| format!("images t{n}")).collect::<Vec<_>>().join(", ");
    let began = std::time::Instant::now();
    let said = expect(&run(&db, &["--where", &format!("(SELECT count(*) FROM {cross}) > 0")]), 1);
    assert!(said.contains("longer than 10 s"), "{said}");
    assert!(began.elapsed().as_secs() < 60);
    assert_eq!(states(&db, "detect_state = 'pending'"), 10);
}

/// All that is stored of the images without a tag, with the ids of their regions and vectors.
fn untagged(db: &str) -> String {
    text(
        Path::new(db),
        "SELECT group_concat(line, char(10)) FROM (
             SELECT concat_ws('|', i.id, detect_state, detect_recipe_id, detect_attempts, embed_state, embed_recipe_id, done_at,
                              r.id, r.x0, r.score, e.recipe_id, hex(e.vector)) AS line
             FROM images i LEFT JOIN regions r ON r.image_id = i.id LEFT JOIN embeddings e ON e.region_id = r.id
             WHERE tag IS NULL ORDER BY i.id, r.id, e.recipe_id)",
    )
}

const HOLIDAY: [&str; 2] = ["--where", "tag = 'holiday'"];

#[test]
fn only_rows_of_the_condition_are_done_again_with_another_recipe() {
    let (_folder, db) = tagged(4);
    expect(&run(&db, &[]), 0);
    let (before, other) = (untagged(&db), ["--candidate-floor", "0.1"]);
    let said = expect(&run(&db, &[HOLIDAY, other].concat()), 1);
    assert!(said.contains("4 of 4 finished rows were made by another recipe"), "{said}");
    let said = expect(&run(&db, &[&HOLIDAY[..], &other, &["--stale", "redo"]].concat()), 0);
    assert!(said.contains("detect and embed 4 images where tag") && said.contains("4 done, 0 failed"), "{said}");
    assert_eq!(untagged(&db), before);
    let anew = "SELECT count(DISTINCT detect_recipe_id) FROM images";
    assert_eq!(number(Path::new(&db), anew), 2);
    assert!(expect(&call(&["run", &db]), 0).contains("nothing is pending where tag = 'holiday'"));
    // What was said of those rows was not said of all.
    let said = expect(&call(&["run", &db, "--where", "none"]), 1);
    assert!(said.contains("6 of 10 finished rows were made by another recipe"), "{said}");
    assert_eq!(untagged(&db), before);
    expect(&call(&["run", &db, "--where", "none", "--stale", "redo"]), 0);
    assert_eq!(number(Path::new(&db), anew), 1);
    assert_sound(Path::new(&db));
}

#[test]
fn only_rows_of_the_condition_are_selected_again() {
    let (_folder, db) = tagged(4);
    expect(&run(&db, &["--box-threshold", "0.06"]), 0);
    let before = untagged(&db);
    let said = expect(&call(&["run", &db, "--box-threshold", "0.5", HOLIDAY[0], HOLIDAY[1]]), 1);
    assert!(said.contains("4 of 4 finished rows") && said.contains("(4 from their stored candidates"), "{said}");
    let said = expect(&call(&["run", &db, "--box-threshold", "0.5", "--stale", "redo", HOLIDAY[0], HOLIDAY[1]]), 0);
    assert!(said.contains("4 images selected again") && said.contains("nothing is pending where tag"), "{said}");
    assert_eq!(untagged(&db), before);
    assert_eq!(states(&db, "tag = 'holiday' AND id IN (SELECT image_id FROM regions WHERE score < 0.5)"), 0);
    assert!(states(&db, "tag IS NULL AND id IN (SELECT image_id FROM regions WHERE score < 0.5)") > 0);
    assert_sound(Path::new(&db));
}
