//! The kernel as safe Rust. The modules, by what they are about:
//!
//! - Mounts: `mount`, `mountinfo`, `rootfs` (a container's root).
//! - Processes: `process`, `program` and `bare_start` (short-lived ones), `pid_namespace`,
//!   `credentials`, `peer_process`, `disk_wait`, `memory` (of this process, and its pages), `procfs`.
//! - Control groups: `cgroup`; `device_rules` and `bpf` for the devices of a group.
//! - Network: `netns`, `netlink`, `interface`; `sysctl` for kernel settings of all kinds.
//! - Files: `atomic_file`, `lock`, `shared_file`; by descriptor or in trees that others change:
//!   `fs_at`, `beneath`, `tree`, `disk_usage`.
//! - File systems: `project_quota`, `fsxattr`, `btrfs`, `xfs`, `fuse_backing`.
//! - Descriptors and data between processes: `fd_passing`, `descriptor`, `pipes`, `shared_memory`,
//!   `terminal`.
//! - For the others: `error`, `ioctl`, `random`.
//!
//! Invariant: of the products, only this crate has `unsafe`, except for one call of fuser's
//! (`volume-fs/src/filesystem/passthrough.rs`); `xtask/tests/dependencies.rs` tests that. Each module
//! that needs it has its own `#![expect(unsafe_code)]`. No module knows CNI, CSI or Kubernetes.

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
