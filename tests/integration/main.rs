//! The program's parts together: database, pipeline with fake models, the command line with real ones.

#[path = "../support/mod.rs"]
mod support;

mod cli;
mod database;
mod input;
mod models;
mod parity;
mod pipeline;
mod pixels;
