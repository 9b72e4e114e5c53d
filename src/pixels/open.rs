//! Opening a file without surprises, and saying in one line why it was refused.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use image::ImageError;
use image::error::LimitErrorKind;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::patience::patiently;
use super::root;
use crate::locked::FileId;
use crate::printable;
use crate::row::{FileStamp, RowCode, RowError};

/// Longer paths lose their beginning in messages; the row holds the whole path.
const PATH_CHARS: usize = 300;

/// Longer reasons are cut; decoders quote file content in some of theirs.
const REASON_CHARS: usize = 180;

/// A reason without the path: what the functions below the entry points return.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) code: RowCode,
    pub(super) reason: String,
    /// The system's number, where it was the system that refused.
    pub(super) os_error: Option<i32>,
}

impl Refusal {
    pub(super) fn new(code: RowCode, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), os_error: None }
    }

    /// The message of a row: path first, one line, fit for a terminal.
    pub(super) fn at(self, path: &Path) -> RowError {
        let reason: String = printable::line(&self.reason).chars().take(REASON_CHARS).collect();
        RowError { os_error: self.os_error, ..RowError::new(self.code, format!("{}: {reason}", shown(path))) }
    }
}

impl From<Refusal> for RowError {
    /// For what concerns no file.
    fn from(Refusal { code, reason, os_error }: Refusal) -> Self {
        Self { os_error, ..Self::new(code, reason) }
    }
}

impl From<io::Error> for Refusal {
    /// Decoders make errors of their own kinds; only the operating system's have a number.
    fn from(error: io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::UnexpectedEof => return Self::new(RowCode::Truncated, "the file ends early"),
            _ if error.raw_os_error().is_some() => RowCode::Io,
            _ => RowCode::Decode,
        };
        Self { os_error: error.raw_os_error(), ..Self::new(code, error.to_string()) }
    }
}

impl From<ImageError> for Refusal {
    fn from(error: ImageError) -> Self {
        if ends_early(&error) {
            return Self::new(RowCode::Truncated, format!("the file ends early: {error}"));
        }
        match error {
            ImageError::IoError(error) => error.into(),
            ImageError::Unsupported(_) => Self::new(RowCode::Unsupported, error.to_string()),
            ImageError::Limits(ref limits) if matches!(limits.kind(), LimitErrorKind::DimensionError) => {
                Self::new(RowCode::TooLarge, error.to_string())
            }
            ImageError::Limits(_) => Self::new(RowCode::Decode, "its content needs more memory than its size explains"),
            ImageError::Decoding(_) | ImageError::Encoding(_) | ImageError::Parameter(_) => {
                Self::new(RowCode::Decode, error.to_string())
            }
        }
    }
}

/// True where the end of the file is somewhere in the chain of causes. `gif` has a variant of its own for
/// it, which only its text tells apart.
fn ends_early(error: &ImageError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        let eof = match current.downcast_ref::<io::Error>() {
            Some(io) => io.kind() == io::ErrorKind::UnexpectedEof,
            None => current.to_string().eq_ignore_ascii_case("unexpected end of file"),
        };
        if eof {
            return true;
        }
        cause = current.source();
    }
    false
}

/// Runs `work` and turns a panic of a decoder into the row's error.
pub(super) fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, RowError>) -> Result<T, RowError> {
    // Nothing that `work` touched is used again after a panic.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic_text(panic.as_ref());
        Err(Refusal::new(RowCode::DecoderPanic, format!("the decoder panicked: {said}")).at(path))
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text,
        (None, None) => "no message",
    }
}

/// Opens a regular file for reading, below `root` where one is given. Never waits for the other end of a pipe.
///
/// # Errors
/// `outside_root`, `missing`, `permission`, `not_regular`, `not_an_image`, `bad_path` or `io`.
pub(super) fn open_regular(path: &Path, root: Option<&Path>) -> Result<(File, FileStamp), Refusal> {
    if path.as_os_str().as_bytes().contains(&0) {
        let code = if root.is_some() { RowCode::OutsideRoot } else { RowCode::BadPath };
        return Err(Refusal::new(code, "the path holds a NUL byte"));
    }
    if let Some(root) = root {
        root::check_path(root, path)?;
    }
    let is_locked = rustix::fs::stat(path).is_ok_and(|stat| FileId::new(stat.st_dev, stat.st_ino).is_locked());
    if is_locked {
        return Err(Refusal::new(RowCode::NotAnImage, "this is part of the database that the row is in"));
    }
    // NONBLOCK: a FIFO without a writer would block the thread for ever. NOCTTY: a terminal must not
    // become ours.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = patiently(|| rustix::fs::open(path, flags, Mode::empty())).map_err(refused_open)?;
    let stat = rustix::fs::fstat(&fd).map_err(refused_open)?;
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => None,
        FileType::Directory => Some("a folder"),
        FileType::Fifo => Some("a named pipe"),
        FileType::Socket => Some("a socket"),
        FileType::CharacterDevice | FileType::BlockDevice => Some("a device"),
        FileType::Symlink | FileType::Unknown => Some("no regular file"),
    };
    match kind {
        Some(what) => Err(Refusal::new(RowCode::NotRegular, format!("this is {what}, not a file"))),
        None => {
            let file = File::from(fd);
            if let Some(root) = root {
                root::check_open(root, &file)?;
            }
            Ok((file, stamp_of(&stat)))
        }
    }
}

/// Size and time as `fstat` gave them. Times beyond the year 2262 are held at the end of the range.
fn stamp_of(stat: &rustix::fs::Stat) -> FileStamp {
    let nanos = i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec);
    let mtime_ns = nanos.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64;
    FileStamp { size_bytes: stat.st_size, mtime_ns }
}

pub(super) fn refused_open(errno: Errno) -> Refusal {
    let code = match errno {
        Errno::NOENT | Errno::NOTDIR => RowCode::Missing,
        Errno::ACCESS | Errno::PERM => RowCode::Permission,
        // What `open` says of a socket, and of a device without a driver.
        Errno::NXIO => RowCode::NotRegular,
        Errno::NAMETOOLONG => RowCode::BadPath,
        _ => RowCode::Io,
    };
    Refusal { os_error: Some(errno.raw_os_error()), ..Refusal::new(code, reason_of(errno)) }
}

fn reason_of(errno: Errno) -> String {
    io::Error::from(errno).to_string()
}

/// A path for messages of bounded length. Not for opening files.
fn shown(path: &Path) -> String {
    let text = printable::path(path);
    let too_many = text.chars().count().saturating_sub(PATH_CHARS);
    if too_many == 0 { text } else { format!("...{}", text.chars().skip(too_many).collect::<String>()) }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_message_is_one_line_of_bounded_length() {
        let path = PathBuf::from("x/".repeat(2_000) + "end.jpg");
        let error = Refusal::new(RowCode::Decode, "line\n".repeat(1_000)).at(&path);
        assert!(error.message.chars().count() <= 500, "{}", error.message.chars().count());
        assert!(!error.message.contains('\n'));
        assert!(error.message.contains("end.jpg: line"));
    }

    #[test]
    fn a_panic_becomes_the_rows_error_with_its_text() {
        let path = Path::new("a.tif");
        let formatted = guarded::<()>(path, || panic!("assertion {} failed", 7)).unwrap_err();
        assert_eq!(formatted.code, RowCode::DecoderPanic);
        assert_eq!(formatted.message, "a.tif: the decoder panicked: assertion 7 failed");
        let plain = guarded::<()>(path, || panic!("plain")).unwrap_err();
        assert_eq!(plain.message, "a.tif: the decoder panicked: plain");
    }

    #[test]
    fn what_is_no_regular_file_is_told_apart() {
        let code = |path: &Path| open_regular(path, None).map(|_| ()).unwrap_err().code;
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(code(dir.path()), RowCode::NotRegular);
        assert_eq!(code(Path::new("/dev/null")), RowCode::NotRegular);
        assert_eq!(code(&dir.path().join("gone.jpg")), RowCode::Missing);
        let file = dir.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        assert_eq!(code(&file.join("below.jpg")), RowCode::Missing);
        assert_eq!(code(Path::new("a\0b")), RowCode::BadPath);
        assert_eq!(code(&dir.path().join("n".repeat(300))), RowCode::BadPath);
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(code(&socket), RowCode::NotRegular);
    }

    #[test]
    fn a_pipe_without_a_writer_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("pipe.jpg");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(open_regular(&fifo, None).map(|_| ()).unwrap_err().code, RowCode::NotRegular);
    }

    #[test]
    fn refusals_of_open_have_their_codes() {
        assert_eq!(refused_open(Errno::ACCESS).code, RowCode::Permission);
        assert_eq!(refused_open(Errno::PERM).code, RowCode::Permission);
        assert_eq!(refused_open(Errno::LOOP).code, RowCode::Io);
        assert_eq!(refused_open(Errno::STALE).code, RowCode::Io);
        let error = refused_open(Errno::MFILE).at(Path::new("/photos/a.jpg"));
        assert_eq!((error.code, error.os_error), (RowCode::Io, Some(Errno::MFILE.raw_os_error())));
    }
}
