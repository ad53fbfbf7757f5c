//! For administrators: the command line, doctor, views, metrics.

pub(crate) mod admin;
pub mod cli;
pub mod doctor;
pub(crate) mod metrics;
mod sub_paths;
pub mod upgrade;
pub mod views;
