//! JSON, JSONL and CSV.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

use croprow::input::Keys;

use super::*;

#[test]
fn a_json_array_of_paths_keeps_newlines_in_names() {
    assert_eq!(paths(plain(r#"["a\nb.jpg", "\u00e9.jpg"]"#)), ["/r/a\nb.jpg", "/r/é.jpg"].map(PathBuf::from));
}

#[test]
fn json_objects_give_their_known_keys_and_the_best_name_wins() {
    let json = r#"[
        {"image": {"bytes": [1, 2]}, "path": "a", "pred_classes": ["a cat", "b"], "id": 7, "x": {"y": [null]}},
        {"filename": "b", "file": "c", "prompt": "dog. cat", "pred_classes": ["z"], "tag": true, "key": "k", "id": 1},
        {"image_path": "d", "pred_classes": [], "tag": null, "id": 12345678901234567890}
    ]"#;
    let expected = [
        ["/r/a", "7", r#"["a cat","b"]"#, "-"],
        ["/r/c", "k", "dog. cat", "true"],
        ["/r/d", "12345678901234567890", "-", "-"],
    ];
    assert_eq!(fields(plain(json)), expected);
}

#[test]
fn the_given_prompt_and_tag_are_for_rows_that_bring_none() {
    let request = AddRequest { prompt: Some("cat".into()), tag: Some("t".into()), ..AddRequest::default() };
    let json = r#"[{"path": "a", "prompt": ""}, {"path": "b", "prompt": "dog", "tag": "u"}, "c"]"#;
    let expected = [["/r/a", "-", "cat", "t"], ["/r/b", "-", "dog", "u"], ["/r/c", "-", "cat", "t"]];
    assert_eq!(fields(piped(json, request)), expected);
}

#[test]
fn malformed_json_is_told_with_its_element_and_line() {
    for (json, message) in [
        ("[\"a\",\n 5]", "element 2, line 2, column 3: invalid type: integer `5`, expected an object or a path"),
        ("[{\"path\": \"a\"},\n {\"path\": \"b\"", "element 2, line 2, column 13: EOF while parsing an object"),
        ("[{\"path\": 3}]", "element 1, line 1, column 12: path: expected text, found a number"),
        ("[{\"path\": null}]", "element 1, line 1, column 15: path: expected text, found nothing"),
        (
            "[{\"path\": \"a\", \"prompt\": [1]}]",
            "prompt: expected text or a list of texts, found a list of other things",
        ),
        ("[{\"path\": \"a\", \"id\": 1.5}]", "id: 1.5 is not a whole number"),
        ("[{\"path\": \"\"}]", "path: the path is empty"),
        ("[\"a\\u0000b\"]", "a path cannot hold a NUL byte"),
        ("[\"a\"] [\"b\"]", "trailing characters"),
    ] {
        let text = reason(plain(json));
        assert!(text.starts_with("standard input: ") && text.contains(message), "{json}: {text}");
    }
    let text = reason(piped("{\"images\": []}", format(Format::Json)));
    assert!(text.contains("line 1: invalid type: map, expected an array of objects or of paths"), "{text}");
}

#[test]
fn a_bad_line_of_jsonl_is_told_by_its_number() {
    let lines = "{\"path\": \"a\"}\r\n\n{\"path\": \"b\"\n{\"path\": \"c\"}\n";
    assert_eq!(
        reason(plain(lines)),
        "standard input: line 3: column 12: EOF while parsing an object; expected one object a line"
    );
    assert_eq!(paths(plain("{\"path\": \"a\"}\n\n{\"file\": \"b\"}")), ["/r/a", "/r/b"].map(PathBuf::from));
    let text = reason(plain("{\"path\": \"a\"} {\"path\": \"b\"}\n"));
    assert!(text.contains("line 1: column 15: trailing characters"), "{text}");
}

#[test]
fn csv_takes_commas_semicolons_tabs_and_quotes() {
    let comma = "id,path,prompt,tag\r\n1,\"a, \"\"b\"\".jpg\",\"two\nlines\",\r\n2,c.jpg,,x\r\n";
    let expected = [["/r/a, \"b\".jpg", "1", "two\nlines", "-"], ["/r/c.jpg", "2", "-", "x"]];
    assert_eq!(fields(plain(comma)), expected);
    assert_eq!(fields(plain("tag;file\n\"a;b\";c,d.jpg\n")), [["/r/c,d.jpg", "-", "-", "a;b"]]);
    assert_eq!(fields(plain("\u{feff}path\ttag\n a.jpg \tx\n")), [["/r/ a.jpg ", "-", "-", "x"]]);
    assert_eq!(fields(plain("path\na.jpg\n\nb.jpg")), [["/r/a.jpg", "-", "-", "-"], ["/r/b.jpg", "-", "-", "-"]]);
    assert_eq!(paths(plain(b"path,tag\ncaf\xe9.jpg,x\n")), [Path::new(OsStr::from_bytes(b"/r/caf\xe9.jpg"))]);
}

#[test]
fn malformed_csv_is_told_with_its_line() {
    for (csv, message) in [
        ("path,tag\na,b\nc\n", "line 3: 1 cells, expected 2 as in the header"),
        ("path,tag\na,\"b\nc,d\n", "line 2: a quote in this record is never closed"),
        (
            "tag,x\na,b\n",
            "line 1: no column for the path: expected path, image_path, file, filename, image; seen: \"tag\", \"x\"",
        ),
        ("path,tag\n,b\n", "line 2: path: expected text, found nothing"),
        ("", "the table is empty"),
    ] {
        let text = reason(piped(csv, format(Format::Csv)));
        assert!(text.contains(message), "{csv}: {text}");
    }
    let text = reason(piped(b"path,tag\na,\xff\n", AddRequest::default()));
    assert!(text.ends_with("line 2: tag: not UTF-8"), "{text}");
}

#[test]
fn keys_can_be_named_and_one_may_serve_two_fields() {
    let text = |s: &str| Some(s.to_string());
    let keys = Keys { path: text("src"), prompt: text("label"), tag: text("label"), id: text("n") };
    let request = AddRequest { keys, ..AddRequest::default() };
    let expected = [["/r/a", "1", "cat", "cat"]];
    assert_eq!(fields(piped(r#"[{"path": "no", "src": "a", "label": "cat", "n": 1.0}]"#, request.clone())), expected);
    assert_eq!(fields(piped("src;n;label\na;1;cat\n", request)), expected);
}

#[test]
fn a_key_that_no_record_has_is_an_error_that_lists_the_keys_seen() {
    let named = |prompt: &str| AddRequest {
        keys: Keys { prompt: Some(prompt.into()), ..Keys::default() },
        ..AddRequest::default()
    };
    assert_eq!(
        reason(piped(r#"[{"path": "a", "text": "b"}]"#, named("caption"))),
        r#"--prompt-key caption: no record has it; keys seen: "path", "text""#
    );
    assert!(reason(piped("a.jpg\n", named("caption"))).contains("no source has keys"));
    assert_eq!(piped("[]", named("caption")).unwrap().0.len(), 0);
    assert_eq!(piped(r#"[{"path": "a"}, {"path": "b", "caption": "c"}]"#, named("caption")).unwrap().0.len(), 2);

    let path = AddRequest { keys: Keys { path: Some("src".into()), ..Keys::default() }, ..AddRequest::default() };
    let text = reason(piped("[{\"a\\u001b\": 1}]", path));
    assert!(text.contains(r#"no key for the path: expected src; seen: "a\u{1b}""#), "{text}");
}

#[test]
fn a_record_without_an_end_ends_the_reading_before_it_fills_the_memory() {
    for (begin, given) in [
        ("path\n\"", Format::Csv),
        ("[\"", Format::Json),
        ("[{\"path\": \"a\", \"other\": \"", Format::Json),
        ("\"", Format::Jsonl),
        ("", Format::List),
    ] {
        let mut endless = begin.as_bytes().chain(std::io::repeat(b'x').take(1 << 40));
        let request = AddRequest { from: vec!["-".into()], ..format(given) };
        let error = read_with(&request, &mut endless, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("longer than"), "{given:?}: {error}");
    }
    // Many short ones are not one long one.
    let rows = format!("path\n{}", format!("photos/{}.jpg\n", "n".repeat(1_000)).repeat(100_000));
    let request = AddRequest { from: vec!["-".into()], ..AddRequest::default() };
    assert_eq!(read_with(&request, &mut rows.as_bytes(), &mut |_| Ok(())).unwrap().rows, 100_000);
}
