//! Bytes to numbers: what a file is, its header, its pixels upright, pieces of them as tensors. Knows
//! nothing of rows or models; a recipe tells what a tensor should hold.
//!
//! A file is opened twice: [`header::probe`] says what decoding will cost at which scale, and after the caller has
//! reserved that much, [`decode::decode`] does it; a third time where a region needs more pixels than that gave
//! ([`decode::decode_region`]). Whatever a file holds, the answer is a picture or a
//! [`RowError`](crate::row::RowError); decoders that panic are caught here.

pub mod decode;
pub mod header;
pub mod jpeg;
pub mod orient;
pub mod patience;
pub mod picture;
pub mod root;
pub mod sniff;
mod square;
pub mod tensor;

mod container;
mod open;
mod plan;
mod turbo;
