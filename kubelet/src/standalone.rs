//! What a kubelet needs to live without an API server.
//!
//! In a cluster, the API server has the objects, controllers bind claims and create
//! volumes, and `kubectl` talks to the server. Here `store` has the objects, `provisioner`
//! does the work of these controllers, and `api` answers the client commands. What a node
//! does in a cluster as well is not here: pods, volumes, drivers, eviction, logs.
//!
//! Invariant: the rest of the crate takes only the store from here, and from it only
//! objects and their changes. `run` alone knows `provisioner` and `api`.

pub mod api;
pub(crate) mod provisioner;
pub mod store;
