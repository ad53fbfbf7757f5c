//! The minimal kubelet: runs pods with volumes from manifests, on one machine, without a cluster.
//!
//! Sources write objects from the manifest directory and from `apply` to the store. The engine
//! makes the machine match the store.
//!
//! Layers, each of which uses only those below it (`xtask/tests/modules.rs` tests that):
//!
//! - `cli` (client commands) and `run` (the daemon) use everything; `run` chooses sources and
//!   sinks.
//! - `endpoints`: kubelet's HTTP endpoints.
//! - `standalone::api` and `standalone::provisioner`: the client API, and the work of a cluster's
//!   controllers.
//! - `engine`, and its parts: `worker`, `volumes`, `eviction`, `logs`, `plugins`. They do not
//!   depend on the sources of objects or the readers of status.
//! - `source` (where objects come from) and `sink` (where status and events go).
//! - `manifest`: parses text to objects.
//! - `store`: the objects, in memory and on disk.
//! - `plan` and `status`: decisions without I/O, from an object and the runtime's state of it.
//! - `objects`: the types of the Kubernetes API. They use no other module.

mod admission;
mod backoff;
mod called_as;
pub mod cli;
pub mod config;
mod container_config;
mod container_ids;
mod cri;
mod critical;
mod csi;
mod csi_secrets;
mod dns;
mod durations;
pub mod endpoints;
mod enforced_limits;
pub mod engine;
mod environment;
mod etc_hosts;
pub mod eviction;
mod expansion;
mod huge_pages;
mod jsonpath;
mod keyed_backoff;
pub mod logs;
mod machine;
pub mod manifest;
mod memory;
pub mod node;
pub mod objects;
mod observed;
mod plan;
mod plugins;
mod pod_cgroup;
mod pod_fields;
mod pod_names;
mod preemption;
pub mod pressure;
mod probe_results;
mod probes;
pub mod pull_secrets;
mod resources;
pub mod run;
mod runtime_health;
pub mod selectors;
pub mod sink;
mod sockets;
pub mod source;
pub mod standalone;
mod status;
pub mod store;
mod unix_channel;
mod volumes;
mod worker;
