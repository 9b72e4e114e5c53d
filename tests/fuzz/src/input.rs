//! Rows from strangers, and conditions.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use croprow::db::Db;
use croprow::error::Error;
use croprow::input::{AddRequest, Format, STDIN, read_with};
use croprow::pixels::root::lexical;
use croprow::row::NewRow;

/// Where files are written that must have a name.
fn scratch() -> PathBuf {
    let shared = Path::new("/dev/shm");
    let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    folder.join(format!("croprow-fuzz-{}", std::process::id()))
}

/// Lists, JSON, JSONL, CSV and whole SQLite files.
pub fn importers(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let formats = [None, Some(Format::List), Some(Format::Json), Some(Format::Jsonl), Some(Format::Csv)];
    let contained = kind & 0x40 != 0;
    let mut request = AddRequest { root: contained.then(|| "/photos".into()), ..AddRequest::default() };
    let path = scratch();
    if kind % 6 == 5 {
        std::fs::write(&path, rest).expect("a file");
        request.from_sqlite = Some((path, "SELECT * FROM t".to_owned()));
    } else {
        request.from = vec![STDIN.into()];
        request.from_format = formats[usize::from(kind % 6)];
    }
    let mut rows = 0;
    let mut sink = |row: NewRow| {
        rows += 1;
        check(&row, contained);
        Ok::<(), Error>(())
    };
    let mut stdin = rest;
    match read_with(&request, &mut stdin, &mut sink) {
        Ok(report) => assert_eq!(report.rows, rows),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn check(row: &NewRow, contained: bool) {
    let path = &row.path;
    assert!(path.is_absolute() && !path.as_os_str().as_encoded_bytes().contains(&0), "{path:?}");
    if contained {
        assert!(lexical(path).is_some_and(|plain| plain.starts_with("/photos")), "{path:?}");
    }
    assert!(row.key.as_ref().is_none_or(|key| !key.is_empty()));
}

/// A database, and how many rows it must go on having.
struct Held(Db);

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

const ROWS: u64 = 20;

/// Whatever the condition says, nothing changes, and no row is counted twice.
pub fn conditions(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    HELD.with_borrow_mut(|held| {
        let Held(db) = held.get_or_insert_with(|| {
            let path = scratch().with_extension("db");
            let _ = std::fs::remove_file(&path);
            let mut db = Db::open_or_create(&path).expect("a database");
            let row = |n| NewRow {
                path: format!("/p/{n}").into(),
                key: None,
                prompt: None,
                tag: Some("x".into()),
                stamp: None,
            };
            db.add(|sink| (0..ROWS).try_for_each(|n| sink(row(n)))).0.expect("rows");
            Held(db)
        });
        if db.restrict(Some(text)).is_err() {
            return;
        }
        if let Ok(tally) = db.tally_in_scope() {
            assert!(tally.iter().map(|(_, images)| images).sum::<u64>() <= ROWS, "{text}");
        }
        let all: u64 = db.tally().expect("a database").iter().map(|(_, images)| images).sum();
        assert_eq!(all, ROWS, "{text}");
    });
}
