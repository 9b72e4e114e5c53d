//! The program's parts together: database, pipeline with fake models, the command line with real ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../support/mod.rs"]
mod support;

mod apart;
mod cli;
mod database;
mod disk;
mod doctor;
mod failures;
mod golden;
mod hostile;
mod hung;
mod ids;
mod input;
mod measurements;
mod memory;
mod models;
mod others;
mod parity;
mod pipeline;
mod pixels;
mod provenance;
mod rescue;
mod restricted;
mod scaled;
mod select;
mod staged;
mod stopping;
mod truth;
mod verify;
