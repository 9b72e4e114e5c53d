//! `croprow add`: its command line. The sources are read by `croprow::input`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};
use croprow::db::Db;
use croprow::db::add::Added;
use croprow::error::Error;
use croprow::input::{AddReport, AddRequest, Format, Keys, STDIN, read};
use croprow::printable;

use super::{opening, print, say};

const EXAMPLES: &str = "\
Examples:
  croprow add photos.db ~/Pictures                         every image below a folder
  find /data -name '*.jpg' -print0 | croprow add photos.db --from -
  croprow add photos.db --from rows.csv --prompt-key caption --root /data
  croprow add photos.db --from-sqlite lib.db --query 'SELECT file AS path, id FROM items'

Folders are searched by name and content; names that begin with a dot and links to folders are passed over.
Files that a list names are not looked at before `croprow run`. A row that is there stays as it is,
unless its prompt changed or a folder scan finds its file changed: then it is pending again.";

/// Put images in: folders, files, lists, JSON, JSONL, CSV, another SQLite. Can be repeated.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
#[command(group(ArgGroup::new("records").args(["from", "from_sqlite"]).multiple(true)))]
pub(crate) struct AddArgs {
    /// The database; made if it does not exist
    pub(crate) db: PathBuf,

    /// Images, and folders to search for images
    #[arg(value_name = "SOURCE")]
    pub(crate) sources: Vec<PathBuf>,

    /// A list of paths (one a line, or NUL-separated), JSON, JSONL or CSV; `-` is standard input; repeatable
    #[arg(long, value_name = "FILE")]
    pub(crate) from: Vec<PathBuf>,

    /// The format of every --from, where name and content mislead
    #[arg(long, value_name = "FORMAT", requires = "from")]
    pub(crate) from_format: Option<FromFormat>,

    /// Another SQLite file, opened for reading only
    #[arg(long, value_name = "FILE", requires = "query")]
    pub(crate) from_sqlite: Option<PathBuf>,

    /// One SELECT on --from-sqlite; its columns are named as the keys below
    #[arg(long, value_name = "SQL", requires = "from_sqlite")]
    pub(crate) query: Option<String>,

    /// Key or column of the path [default: the first there is of path, image_path, file, filename, image]
    #[arg(long, value_name = "KEY", requires = "records")]
    pub(crate) path_key: Option<String>,

    /// Key or column of the prompt; a list of labels will do [default: prompt, pred_classes]
    #[arg(long, value_name = "KEY", requires = "records")]
    pub(crate) prompt_key: Option<String>,

    /// Key or column of the tag [default: tag]
    #[arg(long, value_name = "KEY", requires = "records")]
    pub(crate) tag_key: Option<String>,

    /// Key or column of your own identity of a row [default: key, id]
    #[arg(long, value_name = "KEY", requires = "records")]
    pub(crate) id_key: Option<String>,

    /// Prompt of the rows that bring none
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,

    /// Tag of the rows that bring none
    #[arg(long, value_name = "TEXT")]
    pub(crate) tag: Option<String>,

    /// Where relative paths of --from and --from-sqlite begin, and what no path may lead out of
    #[arg(long, value_name = "DIR", requires = "records")]
    pub(crate) root: Option<PathBuf>,
}

/// `--from-format`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FromFormat {
    /// One path a line, or NUL-separated
    List,
    /// An array of objects or of paths
    Json,
    /// One object or quoted path a line
    Jsonl,
    /// A header and records; comma, semicolon or tab
    Csv,
}

impl AddArgs {
    /// Adds, and says what was added.
    ///
    /// # Errors
    /// A source cannot be read, or the database cannot be used. Rows of earlier chunks stay, and
    /// their number is told; a database made for nothing is removed.
    pub(crate) fn run(self) -> Result<u8, Error> {
        let (path, request) = self.into_request()?;
        let is_new = !path.exists();
        let mut db = Db::open_or_create_with(&path, opening())?;
        let mut report = AddReport::default();
        log::info!("reading the sources");
        let (result, added) = db.add(|sink| {
            report = read(&request, sink)?;
            Ok(())
        });
        if let Err(error) = result {
            let before = added.new + added.changed + added.known;
            if before > 0 {
                say(&format!("{before} rows before it are in the database; the same command again adds the rest"));
            } else if is_new {
                db.remove();
            }
            return Err(error);
        }
        for problem in &report.problems {
            say(&format!("passed over: {}: {}", printable::path(&problem.path), problem.reason));
        }
        let shown = report.problems.len() as u64;
        if report.unreadable > shown {
            say(&format!("and {} more that cannot be read", report.unreadable - shown));
        }
        let passed_over = if report.not_images == 0 {
            String::new()
        } else {
            format!("; {} files that are no images passed over", report.not_images)
        };
        let Added { new, changed, known } = added;
        print(&format!("{new} new, {changed} changed and pending again, {known} already there{passed_over}\n"))?;
        if report.rows == 0 {
            say("nothing was found to add");
        }
        Ok(0)
    }

    /// The database and what to add to it.
    ///
    /// # Errors
    /// Nothing to add was given, or standard input in the wrong place.
    pub(crate) fn into_request(self) -> Result<(PathBuf, AddRequest), Error> {
        let not_empty = |text: &String| !text.is_empty();
        let request = AddRequest {
            sources: self.sources,
            from: self.from,
            from_format: self.from_format.map(|format| match format {
                FromFormat::List => Format::List,
                FromFormat::Json => Format::Json,
                FromFormat::Jsonl => Format::Jsonl,
                FromFormat::Csv => Format::Csv,
            }),
            from_sqlite: self.from_sqlite.zip(self.query),
            keys: Keys { path: self.path_key, prompt: self.prompt_key, tag: self.tag_key, id: self.id_key },
            prompt: self.prompt.filter(not_empty),
            tag: self.tag.filter(not_empty),
            root: self.root,
        };
        if request.sources.is_empty() && request.from.is_empty() && request.from_sqlite.is_none() {
            return Err(Error::Usage(
                "nothing to add: give folders or files, --from FILE with a list, JSON or CSV, or --from-sqlite FILE \
                 --query SQL"
                    .into(),
            ));
        }
        if request.sources.iter().any(|source| source.as_os_str() == STDIN) {
            return Err(Error::Usage(
                "a list on standard input is given as --from -; a file of that name as ./-".into(),
            ));
        }
        Ok((self.db, request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        add: AddArgs,
    }

    fn parse(line: &[&str]) -> Result<AddArgs, clap::error::ErrorKind> {
        let words = ["add"].iter().chain(line);
        Cli::try_parse_from(words).map(|cli| cli.add).map_err(|e| e.kind())
    }

    #[test]
    fn every_flag_reaches_the_request() {
        let line = [
            "x.db",
            "a",
            "b",
            "--from",
            "-",
            "--from",
            "l.csv",
            "--from-format",
            "csv",
            "--from-sqlite",
            "y.db",
            "--query",
            "SELECT 1",
            "--path-key",
            "p",
            "--prompt-key",
            "q",
            "--tag-key",
            "t",
            "--id-key",
            "i",
            "--prompt",
            "cat",
            "--tag",
            "old",
            "--root",
            "/r",
        ];
        let (db, request) = parse(&line).unwrap().into_request().unwrap();
        assert_eq!(db, PathBuf::from("x.db"));
        let text = |s: &str| Some(s.to_string());
        let expected = AddRequest {
            sources: vec!["a".into(), "b".into()],
            from: vec!["-".into(), "l.csv".into()],
            from_format: Some(Format::Csv),
            from_sqlite: Some(("y.db".into(), "SELECT 1".into())),
            keys: Keys { path: text("p"), prompt: text("q"), tag: text("t"), id: text("i") },
            prompt: text("cat"),
            tag: text("old"),
            root: Some("/r".into()),
        };
        assert_eq!(request, expected);
    }

    #[test]
    fn nothing_to_add_says_what_to_give() {
        let error = parse(&["x.db"]).unwrap().into_request().unwrap_err();
        assert!(matches!(&error, Error::Usage(text) if text.contains("--from FILE")), "{error}");
    }

    #[test]
    fn a_dash_among_the_sources_is_refused_with_what_was_meant() {
        let error = parse(&["x.db", "-"]).unwrap().into_request().unwrap_err();
        assert!(error.to_string().contains("--from -"), "{error}");
    }

    #[test]
    fn flags_that_need_another_are_refused_alone() {
        for line in [
            &["x.db", "--query", "SELECT 1"][..],
            &["x.db", "--from-sqlite", "y.db"],
            &["x.db", "a", "--path-key", "p"],
            &["x.db", "a", "--root", "/r"],
            &["x.db", "a", "--from-format", "csv"],
        ] {
            assert_eq!(parse(line).err(), Some(clap::error::ErrorKind::MissingRequiredArgument), "{line:?}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
