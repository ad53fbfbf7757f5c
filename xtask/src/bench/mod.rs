//! `bench`: figures, never judged by a test.

pub(crate) mod cni;
mod observe;
pub(crate) mod pod_start;
mod statistics;
