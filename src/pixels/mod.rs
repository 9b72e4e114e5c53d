//! Bytes to numbers: what a file is, its header, its pixels upright, pieces of them as tensors. Knows
//! nothing of rows or models; a recipe tells what a tensor should hold.

pub mod decode;
pub mod header;
pub mod jpeg;
pub mod orient;
pub mod sniff;
pub mod tensor;
