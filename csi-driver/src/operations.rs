//! For administrators: doctor, views, metrics.

pub(crate) mod admin;
pub mod doctor;
pub(crate) mod metrics;
pub mod views;
