//! `bench`: figures, never judged by a test.

pub(crate) mod cni;
pub(crate) mod csi;
mod observe;
pub(crate) mod pod_start;
mod statistics;
