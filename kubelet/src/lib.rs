//! The minimal kubelet: runs pods with volumes from manifests, on one machine, without a cluster.
//!
//! Sources write objects from the manifest directory and from `apply` to the store. The engine
//! makes the machine match the store.
//!
//! The layers, from what users call down to plain data; each uses only those below it
//! (`xtask/tests/modules.rs` has the list of which):
//!
//! - `cli`: the client commands.
//! - `run`: the daemon; it chooses sources and sinks.
//! - `endpoints`: kubelet's HTTP endpoints.
//! - `standalone`: the client API, and the work of a cluster's controllers.
//! - `source`: where objects come from.
//! - `manifest`: parses text to objects. `config`: flags. The layers below use neither of these, nor
//!   `source`.
//! - `engine`: starts a worker for each pod, rotates logs and evicts pods.
//! - `worker`: brings one pod to its desired state; probes, hooks and image pulls.
//! - `container_config`: converts a pod to CRI.
//! - `volumes`: mounts the volumes of pods. `pod_state`: what a pod needs next, and what it reports.
//! - `clients`: calls the runtime and CSI drivers. `sink`: where status and events go.
//! - `store`: the objects, in memory and on disk.
//! - `capacity`: whether the node has room for a pod.
//! - `pod`: the names, fields, limits and cgroup of a pod.
//! - `node`: the root directory and the machine. `logs`: where the logs of containers are.
//!   `backoff`: pauses between attempts. `command_line`: the syntax of what users type.
//! - `objects`: the types of the Kubernetes API. They use no other module.

mod backoff;
pub mod capacity;
pub mod cli;
mod clients;
pub mod command_line;
pub mod config;
mod container_config;
pub mod endpoints;
pub mod engine;
mod logs;
pub mod manifest;
pub mod node;
pub mod objects;
mod pod;
mod pod_state;
pub mod run;
pub mod sink;
pub mod source;
pub mod standalone;
pub mod store;
mod volumes;
mod worker;
