//! Test support for suites of the CSI driver: the driver in a sandbox, and its callers.

pub mod data_path;
pub mod programs;
pub mod scene;
pub mod snapshots;
