//! What administrators look at: doctor, views, metrics.

pub mod doctor;
pub(crate) mod metrics;
mod page;
pub mod views;
