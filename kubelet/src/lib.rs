//! The minimal kubelet: from manifests to running pods with volumes, on one
//! machine, without a cluster.
//!
//! Objects come from the manifest directory and from `apply`, and meet in the
//! store; the engine makes the machine follow the store.

pub mod api;
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
mod provisioner;
mod resources;
pub mod run;
pub mod sink;
mod sockets;
pub mod source;
mod status;
pub mod store;
mod unix_channel;
mod volumes;
mod worker;
