//! Whole files through `probe`, `decode` and `fill`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bombs;
mod codes;
mod colours;
mod files;
mod hostile;
mod orientation;
mod resize;
mod scaled;
