//! What another program writes in a format comes back unchanged.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use proptest::prelude::*;

use super::*;

/// Anything that a name can be in text, and some things that formats are bad at.
fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[^/\0]{1,20}", "[ \"',;\t\r\n\\\\#=@\\[{-]{1,6}x"]
        .prop_filter("dots are no names", |s| s != "." && s != "..")
}

proptest! {
    #[test]
    fn csv_gives_back_any_names(names in prop::collection::vec((name(), name()), 1..8), delimiter in prop::sample::select(vec![b',', b';', b'\t'])) {
        let mut writer = csv::WriterBuilder::new().delimiter(delimiter).from_writer(Vec::new());
        writer.write_record(["path", "tag"]).unwrap();
        for (path, tag) in &names {
            writer.write_record([path, tag]).unwrap();
        }
        let rows = piped(writer.into_inner().unwrap(), AddRequest::default()).unwrap().0;
        let found: Vec<_> = rows.into_iter().map(|r| (r.path, r.tag.unwrap())).collect();
        let expected: Vec<_> = names.into_iter().map(|(path, tag)| (Path::new("/r").join(path), tag)).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn json_gives_back_any_names(names in prop::collection::vec((name(), name()), 1..8)) {
        let objects: Vec<_> = names.iter().map(|(p, k)| serde_json::json!({"key": k, "path": p})).collect();
        let expected: Vec<_> = names.into_iter().map(|(path, key)| (Path::new("/r").join(path), key)).collect();
        let lines: String = objects.iter().map(|o| format!("{o}\n")).collect();
        for content in [serde_json::to_string_pretty(&objects).unwrap(), lines] {
            let rows = piped(content, AddRequest::default()).unwrap().0;
            let found: Vec<_> = rows.into_iter().map(|r| (r.path, r.key.unwrap())).collect();
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn lists_give_back_any_bytes(names in prop::collection::vec(prop::collection::vec(1_u8.., 1..20), 1..8)) {
        let name = |bytes: &[u8]| bytes.iter().map(|b| if *b == b'/' { b'_' } else { *b }).chain(*b"x").collect();
        // The first bytes of a file tell what it is (a byte order mark, gzip, ...): they are an ordinary name's.
        let names: Vec<Vec<u8>> = std::iter::once(b"first".to_vec()).chain(names.iter().map(|n| name(n))).collect();
        let mut list = names.join(&0);
        list.push(0);
        let expected: Vec<_> = names.iter().map(|n| Path::new("/r").join(OsStr::from_bytes(n))).collect();
        prop_assert_eq!(paths(piped(list, format(Format::List))), expected);
    }

    #[test]
    fn no_content_makes_it_panic(content in prop::collection::vec(any::<u8>(), 0..300), kind in 0..5_usize) {
        let format = [None, Some(Format::List), Some(Format::Json), Some(Format::Jsonl), Some(Format::Csv)][kind];
        let _ = piped(content, AddRequest { from_format: format, ..AddRequest::default() });
    }
}
