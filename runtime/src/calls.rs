//! The CRI calls. `server` has checked their form; a module here decides and acts.
//!
//! - Pods: `sandbox`. Containers: `container`, `update` (limits). `namespaces` decides for both.
//! - Programs and streams in containers: `exec`, `attach`.
//! - Images: `image_pull`.
//! - Answers about what exists: `stats` (use of resources), `info` (additions of `verbose`).

pub(crate) mod attach;
pub(crate) mod container;
pub(crate) mod exec;
pub(crate) mod image_pull;
pub(crate) mod info;
mod namespaces;
pub(crate) mod sandbox;
pub(crate) mod stats;
pub(crate) mod update;
