//! The kernel as safe Rust: mounts, mountinfo, fd passing, namespaces, cgroups,
//! netlink, atomic files and locks.
//!
//! Invariant: this is the only crate with `unsafe`, and each module that needs it has its own
//! `#![expect(unsafe_code)]`. No module knows CNI, CSI or Kubernetes.

pub mod atomic_file;
pub mod bare_start;
pub mod beneath;
pub mod bpf;
pub mod btrfs;
pub mod cgroup;
pub mod credentials;
pub mod descriptor;
pub mod device_rules;
pub mod disk_usage;
pub mod disk_wait;
mod error;
pub mod fd_passing;
pub mod fs_at;
mod fsxattr;
pub mod fuse_backing;
pub mod interface;
mod ioctl;
pub mod lock;
pub mod memory;
pub mod mount;
pub mod mountinfo;
#[cfg(feature = "netlink")]
pub mod netlink;
pub mod netns;
pub mod peer_process;
pub mod pid_namespace;
pub mod pipes;
pub mod process;
pub mod procfs;
pub mod program;
pub mod project_quota;
pub mod random;
pub mod rootfs;
pub mod shared_file;
pub mod shared_memory;
pub mod sysctl;
pub mod terminal;
pub mod tree;
pub mod xfs;

pub use error::{Error, Result, chain, reason};
