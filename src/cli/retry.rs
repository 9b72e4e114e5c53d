//! `croprow retry`.

use std::path::{Path, PathBuf};

use clap::{Args, builder::PossibleValuesParser};
use croprow::db::Db;
use croprow::error::Error;
use croprow::row::{FileStamp, RowCode};

use super::{opening, print};

/// Bring failed and quarantined rows back to pending.
#[derive(Args)]
#[command(after_help = "Examples:
  croprow retry photos.db
  croprow retry photos.db --code missing     after the disk is mounted again
  croprow retry photos.db --changed          rows whose file is another now")]
pub(crate) struct RetryArgs {
    /// The database.
    pub(crate) db: PathBuf,
    /// Only rows that failed with this code.
    #[arg(long, value_parser = PossibleValuesParser::new(RowCode::ALL.map(RowCode::word)))]
    code: Option<String>,
    /// Instead: rows whose file has another size or time than when it was decoded, whatever their state.
    #[arg(long, conflicts_with = "code")]
    changed: bool,
}

pub(crate) fn run(args: &RetryArgs) -> Result<u8, Error> {
    let mut db = Db::open_with(&args.db, opening())?;
    let rows = if args.changed {
        db.retry_changed(|path| stamp(path).ok())?
    } else {
        let code = args.code.as_deref().and_then(|word| RowCode::ALL.into_iter().find(|c| c.word() == word));
        db.retry(code)?
    };
    print(&format!("{rows} rows are pending again\n"))?;
    Ok(0)
}

fn stamp(path: &Path) -> std::io::Result<FileStamp> {
    Ok(FileStamp::of(&std::fs::metadata(path)?))
}
