//! Whether a shared library is whole and for this processor. The loader maps what the header promises; touching a page
//! beyond the end of the file kills the process with SIGBUS, which no error handling sees. Half a download is enough.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Length of an ELF64 file header.
const HEADER_BYTES: usize = 64;

/// Length of an ELF64 program header.
const SEGMENT_BYTES: usize = 56;

/// `PT_LOAD`: a part of the file that is mapped.
const LOADED: u32 = 1;

/// `e_machine` of the processors that the runtime is built for; `None` on another.
const OWN_MACHINE: Option<u16> = if cfg!(target_arch = "x86_64") {
    Some(62)
} else if cfg!(target_arch = "aarch64") {
    Some(183)
} else {
    None
};

/// Beginning of a file header, up to the end of `e_machine`.
const MACHINE_BYTES: usize = 20;

/// True where a little-endian ELF64 file ends before a part that would be mapped. Any other file is left to the
/// loader, which refuses it with a reason. Source of the offsets: the System V ABI, `Elf64_Ehdr`, `Elf64_Phdr`.
///
/// # Errors
/// The file cannot be read.
pub(super) fn is_cut_short(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut header = [0; HEADER_BYTES];
    if len < HEADER_BYTES as u64 {
        return Ok(false);
    }
    file.read_exact(&mut header)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return Ok(false);
    }
    let (table_at, segments) = (u64_at(&header, 32), u16_at(&header, 56));
    if usize::from(u16_at(&header, 54)) != SEGMENT_BYTES {
        return Ok(false);
    }
    let table_bytes = usize::from(segments) * SEGMENT_BYTES;
    if table_at.saturating_add(table_bytes as u64) > len {
        return Ok(true);
    }
    let mut table = vec![0; table_bytes];
    file.seek(SeekFrom::Start(table_at))?;
    file.read_exact(&mut table)?;
    let beyond = |s: &[u8]| u32_at(s, 0) == LOADED && u64_at(s, 8).saturating_add(u64_at(s, 32)) > len;
    Ok(table.chunks_exact(SEGMENT_BYTES).any(beyond))
}

/// True for a little-endian ELF64 file of another processor, of which the loader only says that there is no such file.
///
/// # Errors
/// The file cannot be read.
pub(super) fn is_foreign(path: &Path) -> io::Result<bool> {
    let mut start = [0; MACHINE_BYTES];
    match File::open(path)?.read_exact(&mut start) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
        Ok(()) => Ok(start.starts_with(b"\x7fELF\x02\x01") && OWN_MACHINE.is_some_and(|own| own != u16_at(&start, 18))),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_executable_is_whole_and_its_first_half_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let whole = fs::read(std::env::current_exe().unwrap()).unwrap();
        let path = dir.path().join("x");
        for (len, cut_short) in [(whole.len(), false), (whole.len() / 4, true), (70, true), (10, false), (0, false)] {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(is_cut_short(&path).unwrap(), cut_short, "{len} of {}", whole.len());
        }
        fs::write(&path, "a text that is longer than the header of an ELF file, and no ELF file at all").unwrap();
        assert!(!is_cut_short(&path).unwrap());
    }
}
