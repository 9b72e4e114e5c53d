//! croprow works through an SQLite file of images: rows in, regions and vectors out.
//!
//! ```text
//! images: pending                                                             images: done
//!     |                                                                            ^
//!     v                                                                            |
//!   read -> decode -> detect -> select + crop -> embed -> commit -----------------+
//! ```
//!
//! [`pipeline::run`] is the page to read first. It claims pages of rows through [`db`], turns bytes into
//! tensors with [`pixels`], asks the sessions of [`model`], and commits results and states together.
//! [`input`] brings rows into a database, [`verify`] checks what is in it. [`config`], [`recipe`], [`candidate`], [`geometry`],
//! [`printable`], [`row`] and [`error`] are plain data that everything may use, and so is what [`file_system`] says of a path.
//! [`locked`] knows the files that nobody but SQLite may open. [`fault`] is for tests.
//!
//! Imports run one way: `verify -> pipeline, input -> db, pixels, model -> config, recipe, candidate, row,
//! geometry, printable, error, file_system, locked, fault`.

pub mod verify;

pub mod pipeline;

pub mod input;

pub mod db;
pub mod model;
pub mod pixels;

pub mod candidate;
pub mod config;
pub mod error;
pub mod fault;
pub mod file_system;
pub mod geometry;
pub mod locked;
pub mod printable;
pub mod recipe;
pub mod row;
