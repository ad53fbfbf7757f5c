//! The test support: a place of its own for every test (namespaces, directories, a
//! cgroup by which all its processes are known), the products as processes in
//! it, and the proof that nothing is left.
//!
//! Invariant: a test meets the real kernel or fails. Nothing here skips, and
//! nothing here starts a process that outlives its [`Sandbox`].

pub mod attacker;
pub mod binaries;
pub mod cgroups;
pub mod cni;
pub mod cni_keys;
pub mod containerd;
#[cfg(feature = "cri")]
pub mod cri;
#[cfg(feature = "csi")]
pub mod csi;
pub mod docker_registry;
mod eventually;
pub mod examples;
mod fuse_guard;
mod fuse_requests;
pub mod image;
pub mod layout;
mod leaks;
pub mod lone_driver;
pub mod loop_device;
pub mod manifests;
mod mount_table;
pub mod netlink;
pub mod network_state;
pub mod node;
pub mod node_runtime;
pub mod operations;
pub mod over_containerd;
pub mod postgres;
mod process;
pub mod random;
pub mod sandbox;
pub mod seeds;
pub mod subvolume;
pub mod trace_calls;
pub mod trace_steps;

pub use eventually::{as_soon_as, eventually};
pub use fuse_requests::wait_for_a_change;
pub use leaks::{Allowed, LeakCheck, Leaks};
pub use mount_table::mounts;
pub use node::{Keeper, Launcher, Node, NodeOptions};
pub use node_runtime::NodeRuntime;
pub use process::{Daemon, wait_until_stopped};
pub use sandbox::{Network, Sandbox};
