//! Whole files through `probe`, `decode` and `fill`.

mod codes;
mod colours;
mod files;
mod hostile;
mod orientation;
mod resize;
