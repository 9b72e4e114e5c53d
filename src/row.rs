//! What travels through the pipeline: claims, facts, regions, outcomes. Plain data, no I/O.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::candidate::{Kept, Vocabulary};
use crate::geometry::{BoxPx, Orientation, Scale, Size};
use crate::printable;

/// `images.id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId(pub i64);

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Proof of a claim. A result is stored only while its row still carries the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub i64);

/// A step that has a state column of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Finding regions.
    Detect,
    /// One vector per region.
    Embed,
}

impl Stage {
    /// Every stage, in the order of the flow.
    pub const ALL: [Stage; 2] = [Stage::Detect, Stage::Embed];

    /// The word used in SQL, on the command line and in messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Detect => "detect",
            Self::Embed => "embed",
        }
    }
}

/// Values of `detect_state` and `embed_state`. NULL (`None`) means that the stage is not due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Waits for a worker.
    Pending,
    /// Claimed by a live worker.
    Running,
    /// Results are stored.
    Done,
    /// Ended with a code; `retry` brings it back.
    Failed,
    /// Set aside because it killed its worker; `retry` brings it back.
    Quarantined,
}

impl State {
    /// Every state, in the order of a row's life.
    pub const ALL: [State; 5] = [State::Pending, State::Running, State::Done, State::Failed, State::Quarantined];

    /// The word used in SQL, on the command line and in messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Quarantined => "quarantined",
        }
    }

    /// The state of that word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.word() == word)
    }
}

/// A row that this process may work on until its token is taken away.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The row.
    pub id: ImageId,
    /// Proof of the claim.
    pub token: Token,
    /// The first stage that is due; the later ones follow in the same pass.
    pub stage: Stage,
    /// The file. Bytes as the user gave them; not always UTF-8.
    pub path: PathBuf,
    /// The row's own prompt.
    pub prompt: Option<String>,
    /// Size and time of the file when its regions were made. `None` before the first decode.
    pub seen: Option<FileStamp>,
    /// Scale of the picture that its regions were found in. `None` before `detect`.
    pub scale: Option<Scale>,
    /// Regions that `detect` stored, where only `embed` is due and a detector made them.
    pub regions: Option<Vec<Region>>,
}

/// Size and time of a file, to notice that it changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Length of the file.
    pub size_bytes: i64,
    /// Modification time in nanoseconds since 1970.
    pub mtime_ns: i64,
}

impl FileStamp {
    /// The stamp of a file that was stat-ed.
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            size_bytes: i64::try_from(metadata.size()).unwrap_or(i64::MAX),
            mtime_ns: metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()),
        }
    }
}

/// What decoding learned about a file. Stored beside the row.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageFacts {
    /// The file as it was when it was opened.
    pub stamp: FileStamp,
    /// Container by content, lower case: `jpeg`, `png`, ...
    pub format: &'static str,
    /// Size in the file's header.
    pub stored: Size,
    /// Size after `orientation`; the frame of every box.
    pub upright: Size,
    /// What was applied.
    pub orientation: Orientation,
    /// Where it came from: `exif` or `none`.
    pub orientation_source: &'static str,
    /// Colour components in the file: 1 grey, 3 RGB or YCbCr, 4 CMYK or alpha.
    pub components: u8,
    /// At which scale it was decoded as a whole.
    pub scale: Scale,
    /// The file ends early; its lower part is filling. Only with `--truncated use`.
    pub truncated: bool,
}

/// A candidate that was selected.
#[derive(Clone, Debug, PartialEq)]
pub struct Detection {
    /// Where, in pixels of the upright image.
    pub bbox: BoxPx,
    /// The user's or the model's word.
    pub label: String,
    /// 0..=1.
    pub score: f32,
}

/// A box of an image that was selected, or the whole image where no detector is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// In pixels of the upright image.
    pub bbox: BoxPx,
    /// The user's or the model's word; `None` for the whole image.
    pub label: Option<String>,
    /// 0..=1; `None` for the whole image.
    pub score: Option<f32>,
    /// JPEG of the region below `--crops`, relative to that folder.
    pub crop: Option<String>,
    /// The embedding, once there is one. Length = the embedder's dimension.
    pub vector: Option<Vec<f32>>,
    /// The vector of the recipe in force is stored already; nothing is to be done for it.
    pub embedded: bool,
}

impl Region {
    /// The whole of an image of that size.
    pub fn whole(size: Size) -> Self {
        Self { bbox: BoxPx::whole(size), label: None, score: None, crop: None, vector: None, embedded: false }
    }
}

impl From<Detection> for Region {
    fn from(detection: Detection) -> Self {
        let Detection { bbox, label, score } = detection;
        Self { bbox, label: Some(label), score: Some(score), crop: None, vector: None, embedded: false }
    }
}

/// What `detect` found, before any threshold.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    /// As they are stored.
    pub kept: Kept,
    /// What their label numbers mean.
    pub vocabulary: Arc<Vocabulary>,
}

/// The one outcome of a claim.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The row.
    pub id: ImageId,
    /// Proof of the claim.
    pub token: Token,
    /// The stage the claim began with.
    pub stage: Stage,
    /// What decoding learned, where it came that far.
    pub facts: Option<ImageFacts>,
    /// The file as it was, also where decoding failed.
    pub stamp: Option<FileStamp>,
    /// Where the file could not be read, why that may not be its own fault.
    pub lost: Option<Lost>,
    /// How it ended.
    pub outcome: Outcome,
}

/// Why a file that cannot be read may not be to blame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Files that were read before, in the same run and the same place, cannot be read any more either. Holds the
    /// uppermost folder that is gone.
    Place(PathBuf),
    /// The folder of the file is not there.
    Folder {
        /// The uppermost folder on the way to it that is gone.
        gone: PathBuf,
        /// The uppermost folder on the way to it below which no file was read in this run; `gone` where there is none.
        unread: PathBuf,
    },
    /// The system was short of something and could not open the file. Holds the row's message.
    Shortage(String),
}

/// How the work on a row ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// `detect` (if it was due) is done with these regions. `embed` says how the second stage ended.
    Done {
        /// What the regions were selected from, where `detect` ran.
        raw: Option<Raw>,
        /// All regions of the image, with vectors where `embed` is `Some(Ok)`.
        regions: Vec<Region>,
        /// `None`: no embedder in this run.
        embed: Option<Result<(), RowError>>,
    },
    /// The stage of the claim failed.
    Failed(RowError),
    /// The file is not the one whose regions are stored: the row begins anew.
    FileChanged,
}

impl Outcome {
    /// The error of the stage that failed.
    pub fn error(&self) -> Option<&RowError> {
        match self {
            Self::Failed(error) | Self::Done { embed: Some(Err(error)), .. } => Some(error),
            Self::Done { .. } | Self::FileChanged => None,
        }
    }
}

/// Why a row failed. It goes into the row and the run goes on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct RowError {
    /// Stable word for queries and `retry --code`.
    pub code: RowCode,
    /// Names the path, the reason and, where there is one, the remedy.
    pub message: String,
    /// The system's number (`errno`), where it was the system that refused something.
    pub os_error: Option<i32>,
}

impl RowError {
    /// An error of that code. The message becomes one line that is fit for a terminal, wherever it is read.
    pub fn new(code: RowCode, message: impl AsRef<str>) -> Self {
        Self { code, message: printable::line(message.as_ref()), os_error: None }
    }

    /// The same error, naming the file where the message does not name it yet.
    pub fn at(mut self, path: &Path) -> Self {
        let path = printable::path(path);
        if !self.message.contains(&path) {
            self.message = format!("{path}: {}", self.message);
        }
        self
    }
}

/// Stable words for failures of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowCode {
    /// No such file.
    Missing,
    /// The file may not be read.
    Permission,
    /// A folder, pipe, socket or device.
    NotRegular,
    /// Zero bytes.
    Empty,
    /// The content is no image.
    NotAnImage,
    /// An image in a format that croprow does not decode.
    Unsupported,
    /// The file ends early.
    Truncated,
    /// More pixels than `--max-pixels`.
    TooLarge,
    /// The decoder refused the content.
    Decode,
    /// The decoder panicked.
    DecoderPanic,
    /// The file could not be read for another reason.
    Io,
    /// Neither the disk nor the decoder gave an answer within `--decode-limit`.
    TimedOut,
    /// The path cannot name a file.
    BadPath,
    /// The file does not lie below `--root`.
    OutsideRoot,
    /// The row's prompt, or the lack of one.
    Prompt,
    /// The model gave NaN, infinity or a zero vector.
    NanOutput,
    /// The model refused this image alone and took others.
    Model,
    /// The process died three times while this row was alone in it.
    KilledWorker,
}

impl RowCode {
    /// Every code, for `retry --code` and the README.
    pub const ALL: [RowCode; 18] = [
        Self::Missing,
        Self::Permission,
        Self::NotRegular,
        Self::Empty,
        Self::NotAnImage,
        Self::Unsupported,
        Self::Truncated,
        Self::TooLarge,
        Self::Decode,
        Self::DecoderPanic,
        Self::Io,
        Self::TimedOut,
        Self::BadPath,
        Self::OutsideRoot,
        Self::Prompt,
        Self::NanOutput,
        Self::Model,
        Self::KilledWorker,
    ];

    /// The word used in SQL and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Permission => "permission",
            Self::NotRegular => "not_regular",
            Self::Empty => "empty",
            Self::NotAnImage => "not_an_image",
            Self::Unsupported => "unsupported",
            Self::Truncated => "truncated",
            Self::TooLarge => "too_large",
            Self::Decode => "decode",
            Self::DecoderPanic => "decoder_panic",
            Self::Io => "io",
            Self::TimedOut => "timed_out",
            Self::BadPath => "bad_path",
            Self::OutsideRoot => "outside_root",
            Self::Prompt => "prompt",
            Self::NanOutput => "nan_output",
            Self::Model => "model",
            Self::KilledWorker => "killed_worker",
        }
    }
}

impl fmt::Display for RowCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A row as a source gives it, before it is in the database.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRow {
    /// The file, absolute. Bytes as the source gave them; not always UTF-8.
    pub path: PathBuf,
    /// The user's own identity of the row. Without it the path is the identity.
    pub key: Option<String>,
    /// The row's own prompt.
    pub prompt: Option<String>,
    /// A word of the user's, carried along for queries.
    pub tag: Option<String>,
    /// Size and time now, where the source stat-ed the file (folders do, lists do not).
    pub stamp: Option<FileStamp>,
}
