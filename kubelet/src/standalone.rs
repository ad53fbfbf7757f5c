//! The parts that replace a cluster's control plane.
//!
//! In a cluster, controllers bind claims and create volumes, and `kubectl` talks to the API server.
//! Here `provisioner` does the work of these controllers, and `api` serves the client commands. A
//! node's own work is elsewhere: pods, volumes, drivers, eviction, logs.
//!
//! Invariant: `run` uses both parts, and `endpoints` uses `api`. Nothing else uses them.

pub mod api;
pub(crate) mod provisioner;
