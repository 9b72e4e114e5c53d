//! A database as text, without what differs between two runs that did the same: ids, times, attempts.

use std::fmt::Write;
use std::path::Path;

use rusqlite::types::Value;
use rusqlite::{Connection, OpenFlags};

/// Every image with its states, facts, regions and vectors, ordered by path. Equal text means equal results,
/// bit for bit.
pub fn dump(db: &Path) -> String {
    let conn = Connection::open_with_flags(db, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let mut text = String::new();
    let mut images = conn
        .prepare(
            "SELECT id, path, key, tag, prompt, detect_state, detect_code, embed_state, embed_code, format, width_px,
                    height_px, orientation, truncated FROM images ORDER BY path",
        )
        .unwrap();
    let mut rows = images.query([]).unwrap();
    while let Some(row) = rows.next().unwrap() {
        let fields: Vec<String> = (1..14).map(|i| show(row.get(i).unwrap())).collect();
        writeln!(text, "{}", fields.join(" | ")).unwrap();
        for region in regions(&conn, row.get(0).unwrap()) {
            writeln!(text, "    {region}").unwrap();
        }
    }
    text
}

fn regions(conn: &Connection, image: i64) -> Vec<String> {
    let mut lines: Vec<String> = conn
        .prepare(
            "SELECT r.label, r.score, r.x0, r.y0, r.x1, r.y1, r.crop IS NOT NULL, e.dim, e.vector
             FROM regions r LEFT JOIN embeddings e ON e.region_id = r.id WHERE r.image_id = ?1",
        )
        .unwrap()
        .query_map([image], |r| Ok((0..9).map(|i| show(r.get(i).unwrap())).collect::<Vec<_>>().join(" ")))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    lines.sort();
    lines
}

fn show(value: Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Integer(i) => i.to_string(),
        Value::Real(r) => format!("{r:?}"),
        Value::Text(t) => t,
        Value::Blob(b) => b.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// The one text that `sql` gives.
pub fn text(db: &Path, sql: &str) -> String {
    let conn = Connection::open_with_flags(db, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    conn.query_row(sql, [], |r| r.get(0)).unwrap()
}

/// One number out of a database.
pub fn number(db: &Path, sql: &str) -> i64 {
    let conn = Connection::open_with_flags(db, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    conn.query_row(sql, [], |r| r.get(0)).unwrap()
}

/// The counters equal a count of the rows, and no row holds what it should not.
pub fn assert_sound(db: &Path) {
    let conn = Connection::open_with_flags(db, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let check: String = conn.query_row("PRAGMA integrity_check", [], |r| r.get(0)).unwrap();
    assert_eq!(check, "ok");
    let recount = "SELECT ifnull(detect_state, ''), ifnull(detect_recipe_id, 0), ifnull(embed_state, ''),
                          ifnull(embed_recipe_id, 0), count(*) FROM images GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4";
    let counted = "SELECT * FROM counts WHERE images > 0 ORDER BY 1, 2, 3, 4";
    let table = |sql: &str| -> Vec<String> {
        let mut statement = conn.prepare(sql).unwrap();
        let rows =
            statement.query_map([], |r| Ok((0..5).map(|i| show(r.get(i).unwrap())).collect::<Vec<_>>().join(" ")));
        rows.unwrap().map(Result::unwrap).collect()
    };
    assert_eq!(table(counted), table(recount));
    for (what, sql) in [
        ("a region without its image", "SELECT count(*) FROM regions WHERE image_id NOT IN (SELECT id FROM images)"),
        (
            "a vector without its region",
            "SELECT count(*) FROM embeddings WHERE region_id NOT IN (SELECT id FROM regions)",
        ),
        (
            "a region of an image that failed",
            "SELECT count(*) FROM regions r JOIN images i ON i.id = r.image_id WHERE i.detect_state = 'failed'",
        ),
        (
            "an embedded image that lacks a vector",
            "SELECT count(*) FROM images i JOIN regions r ON r.image_id = i.id WHERE i.embed_state = 'done'
             AND NOT EXISTS (SELECT 1 FROM embeddings e WHERE e.region_id = r.id AND e.recipe_id = i.embed_recipe_id)",
        ),
        (
            "the same region twice",
            "SELECT count(*) FROM (SELECT 1 FROM regions GROUP BY image_id, label, x0, y0, x1, y1 HAVING count(*) > 1)",
        ),
    ] {
        assert_eq!(number(db, sql), 0, "{what}");
    }
}
