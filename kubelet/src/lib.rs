//! The minimal kubelet: from manifests to running pods with volumes, on one
//! machine, without a cluster.
//!
//! Objects come from the manifest directory and from `apply`, and meet in the
//! store; the engine makes the machine follow the store.

mod error_chain;
pub mod manifest;
pub mod objects;
pub mod source;
pub mod store;
