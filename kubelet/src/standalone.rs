//! The parts that replace a cluster's control plane.
//!
//! In a cluster, the API server has the objects, controllers bind claims and create volumes, and
//! `kubectl` talks to the server. Here `store` has the objects, `provisioner` does the work of
//! these controllers, and `api` serves the client commands. A node's own work is elsewhere: pods,
//! volumes, drivers, eviction, logs.
//!
//! Invariant: the rest of the crate uses only the store from here, and only its objects and
//! changes. Only `run` uses `provisioner` and `api`.

pub mod api;
pub(crate) mod provisioner;
pub mod store;
