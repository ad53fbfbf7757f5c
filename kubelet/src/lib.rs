//! The minimal kubelet: from manifests to running pods with volumes, on one
//! machine, without a cluster.
//!
//! Objects come from the manifest directory and from `apply`, and meet in the
//! store; the engine makes the machine follow the store.
//!
//! Layers, each of which uses only those below it (`xtask/tests/modules.rs` tests most of that):
//!
//! - `cli` (client commands) and `run` (the daemon) know everything; `run` chooses sources and sinks.
//! - `standalone::api` and `standalone::provisioner`: the client API, and the work of a cluster's controllers.
//! - `engine`, and what it runs: `worker`, `volumes`, `eviction`, `logs`, `plugins`. They do not know who
//!   describes objects or who reads status.
//! - `source` (where objects come from) and `sink` (where status and events go).
//! - `manifest`: from text to objects.
//! - `standalone::store`: the objects, in memory and on disk.
//! - `plan` and `status`: decisions without I/O, from an object and from what the runtime has of it.
//! - `objects`: the types of the Kubernetes API. They use no other module.

mod backoff;
pub mod cli;
pub mod config;
mod container_config;
mod cri;
mod critical;
mod csi;
mod dns;
pub mod engine;
mod environment;
mod etc_hosts;
pub mod eviction;
mod expansion;
mod keyed_backoff;
pub mod logs;
pub mod manifest;
pub mod node;
pub mod objects;
mod observed;
mod plan;
mod plugins;
mod pod_cgroup;
mod resources;
pub mod run;
pub mod sink;
mod sockets;
pub mod source;
pub mod standalone;
mod status;
mod unix_channel;
mod volumes;
mod worker;
