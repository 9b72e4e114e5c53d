//! Files: headers, and decoding as a whole, at a scale and in a window.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use croprow::config::DecodeConfig;
use croprow::geometry::{BoxPx, Scale};
use croprow::pixels::decode::{Redecoded, decode, decode_region};
use croprow::pixels::header::{Probed, probe};
use croprow::pixels::{jpeg, orient, sniff};
use croprow::recipe::{Decode, Truncated};
use croprow::row::{RowCode, RowError};
use rustix::fs::{MemfdFlags, memfd_create};

/// Decoded at most: time goes into content and not into size.
const DECODED_PIXELS: u64 = 1 << 18;

/// A file in memory.
struct Memory {
    _file: std::os::fd::OwnedFd,
    path: PathBuf,
}

fn file_of(data: &[u8]) -> Memory {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a file in memory");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    std::fs::write(&path, data).expect("memory");
    Memory { _file: file, path }
}

fn config(max_pixels: u64) -> DecodeConfig {
    DecodeConfig { max_pixels, truncated: Truncated::Use, mode: Decode::Exact }
}

/// The message must be fit for a terminal and a row.
fn check(error: &RowError) {
    assert!(error.message.len() < 2_000 && !error.message.chars().any(char::is_control), "{:?}", error.message);
}

/// Everything that is read before memory is reserved.
pub fn header(data: &[u8]) {
    sniff::sniff(data);
    jpeg::ends_properly(data);
    orient::from_exif_block(data);
    let file = file_of(data);
    match probe(&file.path, &config(180_000_000)) {
        Ok(probed) => {
            for scale in Scale::ALL {
                assert!(probed.worst_bytes(scale) >= probed.pixels_bytes(scale));
            }
            assert!(probed.upright.pixels() > 0 && probed.upright.pixels() <= 180_000_000);
        }
        Err(error) => check(&error),
    }
}

/// The last bytes choose scale and window; behind the end marker they are no part of the picture.
pub fn jpeg(data: &[u8]) {
    if data.len() < 8 || !data.starts_with(&[0xff, 0xd8]) {
        return;
    }
    let [kind, x, y, w, h] = *data.last_chunk::<5>().expect("length was looked at");
    let scale = Scale::ALL[usize::from(kind & 3)];
    let file = file_of(data);
    let Some(probed) = probed(&file) else { return };
    let config = config(DECODED_PIXELS);
    let whole = match decode(&probed, &config, scale) {
        Ok(whole) => whole.picture,
        Err(error) => return settled(&error),
    };
    assert_eq!(whole.bytes(), probed.pixels_bytes(scale));
    if kind & 4 == 0 {
        return;
    }
    let (across, down) = (probed.upright.width_px as f32 / 256.0, probed.upright.height_px as f32 / 256.0);
    let (x0, y0) = (f32::from(x) * across, f32::from(y) * down);
    let region = BoxPx { x0, y0, x1: x0 + f32::from(w) * across + 1.0, y1: y0 + f32::from(h) * down + 1.0 };
    match decode_region(&probed, &config, scale, region) {
        Ok(Redecoded::Picture(part)) => {
            let (window, pixels) = (part.window, &part.pixels);
            assert_eq!((pixels.width(), pixels.height()), (window.size.width_px, window.size.height_px));
            for (px, py, pixel) in pixels.enumerate_pixels() {
                assert_eq!(*pixel, *whole.pixels.get_pixel(window.x + px, window.y + py), "{px} {py} of {window:?}");
            }
        }
        Ok(Redecoded::FileChanged) => panic!("nobody changed it"),
        Err(error) => settled(&error),
    }
}

/// All other formats.
pub fn formats(data: &[u8]) {
    if data.starts_with(&[0xff, 0xd8]) {
        return;
    }
    let file = file_of(data);
    let Some(probed) = probed(&file) else { return };
    match decode(&probed, &config(DECODED_PIXELS), Scale::FULL) {
        Ok(whole) => assert_eq!(whole.picture.bytes(), probed.pixels_bytes(Scale::FULL)),
        Err(error) => settled(&error),
    }
}

fn probed(file: &Memory) -> Option<Probed> {
    probe(&file.path, &config(DECODED_PIXELS)).inspect_err(check).ok()
}

/// A decoder that panics is caught; told where somebody wants to know.
fn settled(error: &RowError) {
    check(error);
    if error.code == RowCode::DecoderPanic && std::env::var_os("CROPROW_FUZZ_PANICS").is_some() {
        eprintln!("{error}");
    }
}
