//! The `local` backend: a POSIX file system over a directory of a pool on the node, which arrives
//! as a descriptor of a detached mount. `volume-fs` has the FUSE side.
//!
//! [`service`] says what the process is handed and may do, `backend` answers requests: it has
//! every change go through the gate, which is shut for a count and for a snapshot. `volume` is
//! the file system, `nodes` knows which file a node id is, `pruner` has the kernel forget them,
//! `directory` and `handles` are what is open. `quota` knows what the volume uses, which `count`
//! finds out and `usage_file` keeps. `volume/state.rs` writes down what a successor needs of nodes, handles and charges.
//!
//! Invariant: no path of the host is ever used; every name is one component
//! below a descriptor inside the volume, and no symbolic link is followed.

mod attributes;
mod backend;
mod count;
mod directory;
mod errno;
mod handles;
mod nodes;
mod pruner;
mod quota;
pub mod service;
mod usage_file;
mod volume;
mod xattrs;

pub use crate::service::LocalService;
