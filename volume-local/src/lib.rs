//! The `local` backend: a POSIX file system over a directory of a pool on the node, passed as a
//! descriptor of a detached mount. `volume-fs` has the FUSE side.
//!
//! [`service`] lists the descriptors and privileges of the process. `backend` answers requests;
//! every change passes the gate, which is shut for a count and for a snapshot. `volume` is the file
//! system. `nodes` finds the file of a node id, and `pruner` makes the kernel forget inodes. `trust`
//! decides how long the kernel may use an answer. `directory` and `handles` hold open files. `backings` has
//! those that the kernel reads and writes itself, and `ender` ends what the keeper has registered for it.
//! `capacity` is the policy that enforces the volume's limits: today the daemon's own `quota`, which `count`
//! fills and `usage_file` stores.
//!
//! If this process is killed, another daemon continues its connection. `state_table` is shared memory
//! in which nodes, handles and requests in progress are written down as they change; the keeper holds
//! descriptors of files without a name. `volume/recovery.rs` restores all of it, and `sweeper`
//! corrects the counts of lookups.
//!
//! Invariant: no path of the host is ever used. Every name is one component below a descriptor
//! inside the volume, and no symbolic link is followed.

mod attributes;
mod backend;
mod backings;
mod capacity;
mod charge;
mod count;
mod directory;
mod ender;
mod errno;
mod handles;
mod held_back;
mod keeper_socket;
mod loops_at_rest;
mod nodes;
mod place;
mod pruner;
mod quota;
mod rest;
pub mod service;
mod state_table;
mod sweeper;
mod trust;
mod usage_file;
mod volume;
mod xattrs;

pub use crate::service::LocalService;
