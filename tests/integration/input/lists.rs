//! Lists of paths, standard input, and what is no list.

use std::io::Read;

use super::*;

#[test]
fn a_list_is_taken_as_it_is_and_its_files_are_not_looked_at() {
    let list = "\u{feff}a.jpg\r\n\r\n /no/b.jpg \n-x %20 \"q\".jpg\n\n日本🐈.jpg";
    let (rows, report) = piped(list, AddRequest::default()).unwrap_or_else(|e| panic!("{e}"));
    let found: Vec<_> = rows.iter().map(|r| r.path.to_str().unwrap()).collect();
    assert_eq!(found, ["/r/a.jpg", "/r/ /no/b.jpg ", "/r/-x %20 \"q\".jpg", "/r/日本🐈.jpg"]);
    assert!(rows.iter().all(|r| r.stamp.is_none() && r.key.is_none()));
    assert_eq!(report, AddReport { rows: 4, ..AddReport::default() });
}

#[test]
fn nul_separates_names_that_hold_newlines() {
    assert_eq!(paths(plain("a\nb.jpg\0c\r\0\0d\0")), ["/r/a\nb.jpg", "/r/c\r", "/r/d"].map(PathBuf::from));
}

#[test]
fn without_a_root_relative_paths_begin_in_the_current_directory() {
    let request = AddRequest { from: vec!["-".into()], ..AddRequest::default() };
    let mut found = Vec::new();
    let mut stdin: &[u8] = b"./a//b.jpg\n/x/../y.jpg\n../c.jpg\n";
    let mut sink = |row: NewRow| {
        found.push(row.path);
        Ok(())
    };
    read_with(&request, &mut stdin, &mut sink).unwrap();
    let here = std::env::current_dir().unwrap();
    // `..` stays: behind a link it is not what it seems.
    assert_eq!(found, [here.join("a/b.jpg"), "/x/../y.jpg".into(), here.join("../c.jpg")]);
}

#[test]
fn a_path_that_leaves_the_root_is_refused_by_name() {
    for bad in ["../x.jpg", "a/../../x.jpg", "/etc/x.jpg", "/r/../x.jpg", "/rr/x.jpg", "/r/a/../../x"] {
        let text = reason(plain(format!("ok.jpg\n{bad}\n")));
        assert_eq!(text, format!("standard input: line 2: {bad:?} leads out of the root \"/r\""));
    }
    assert_eq!(plain("a/../x.jpg\n/r/x.jpg\n/r/a/../x.jpg\n/../r/x.jpg\n").unwrap().0.len(), 4);
    assert!(reason(plain(r#"[{"path": "../x"}]"#)).contains("element 1"), "JSON too");
}

#[test]
fn files_that_are_no_lists_are_refused_with_what_helps() {
    for (content, message) in
        [(JPEG, "is a JPEG, not a list"), (b"SQLite format 3\0....", "--from-sqlite"), (b"\xff\xfea\0b\0", "UTF-16")]
    {
        assert!(reason(plain(content)).contains(message));
    }
    let long = "x".repeat(70_000);
    assert!(reason(plain(long)).contains("line 1: longer than a path can be"));
    assert!(reason(plain("a\n".repeat(40_000) + "b\0c\n")).contains("line 40001: \"b\\0c\": a path cannot hold"));
    let (_keep, dir) = tree();
    assert!(reason(run(&AddRequest { from: vec![dir], ..AddRequest::default() })).contains("is a folder"));
}

#[test]
fn standard_input_is_read_once_and_to_its_end_in_small_pieces() {
    struct Dribble(Vec<u8>);
    impl Read for Dribble {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let n = self.0.len().min(buffer.len()).min(3);
            buffer[..n].copy_from_slice(&self.0[..n]);
            self.0.drain(..n);
            Ok(n)
        }
    }
    let twice = AddRequest { from: vec!["-".into(), "-".into()], ..AddRequest::default() };
    assert!(reason(run(&twice)).contains("only once"));

    let request = AddRequest { from: vec!["-".into()], ..AddRequest::default() };
    let mut rows = 0;
    let mut stdin = Dribble("/a/b.jpg\n".repeat(9000).into_bytes());
    read_with(&request, &mut stdin, &mut |_| {
        rows += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!(rows, 9000);
}

#[test]
fn an_error_of_the_sink_ends_the_reading_unchanged() {
    let (_keep, dir) = tree();
    let image = write(&dir, "a.jpg", JPEG);
    let json = write(&dir, "j", b"[\"a\", \"b\"]");
    let csv = write(&dir, "c", b"path,tag\na,b\n");
    for (sources, from) in
        [(vec![dir.clone()], vec![]), (vec![image], vec![]), (vec![], vec![json]), (vec![], vec![csv])]
    {
        let request = AddRequest { sources, from, ..AddRequest::default() };
        let error = read(&request, &mut |_| Err(Error::System("disk full".into()))).unwrap_err();
        assert!(matches!(error, Error::System(_)), "{error}");
    }
}
