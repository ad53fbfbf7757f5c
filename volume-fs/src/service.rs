//! The differences between kinds of daemons before they serve: the backend, its part of the
//! assignment, and the privileges of the process.

use std::sync::Arc;

use keeper::daemon::Removed;
use libc::c_long;
use linux::credentials::CapabilitySet;
use linux::fs_at::DescriptorDir;
use proto::handover::assignment;
pub use proto::handover::{Capacity, DataPath};

use crate::Result;
use crate::backend::Backend;
use crate::descriptors::{Descriptors, Wrong};
use crate::figures::Limits;
use crate::state::Region;

/// One kind of daemon.
pub trait Service: Sized {
    type Backend: Backend;
    /// The backend's part of the assignment: how it reaches the volume's data.
    type Storage;

    /// All capabilities of the process while it serves.
    const CAPABILITIES: CapabilitySet;
    /// This backend's system calls, in addition to those of the FUSE side.
    const SYSTEM_CALLS: &'static [c_long];
    /// Only for a daemon that makes its own namespaces (`--confine`). In a mount pod, the pod's
    /// manifest decides.
    const NETWORK: Network;

    /// Takes and checks the backend's part of the driver's assignment.
    fn check(
        &self,
        backend: Option<assignment::Backend>,
        descriptors: &mut Descriptors,
    ) -> std::result::Result<Self::Storage, Wrong>;

    /// Called after the process has dropped its privileges and before it answers FUSE_INIT. The
    /// system call filter is not installed yet.
    fn open(self, storage: Self::Storage, terms: Terms) -> Result<Arc<Self::Backend>>;
}

/// What a daemon reaches from its network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// Nothing: an own network namespace, whose only interface (lo) is down.
    None,
    /// The node's network: for a backend with remote storage.
    Node,
}

/// The conditions for serving a volume, with any backend.
#[derive(Debug)]
pub struct Terms {
    pub volume: VolumeTerms,
    pub process: Process,
    /// `None`: no other daemon will continue this one's connection.
    pub succession: Option<Succession>,
}

/// What the driver assigns of a volume.
#[derive(Debug, Clone, Copy)]
pub struct VolumeTerms {
    pub read_only: bool,
    pub limits: Limits,
    /// The limit above which the kernel is asked to forget inodes.
    pub known_inode_limit: usize,
    pub data_path: DataPath,
    pub capacity: Capacity,
    /// Other programs change the volume's directory.
    pub changed_from_outside: bool,
    /// The kernel keeps what is written and sends it later.
    pub writeback_cache: bool,
}

/// What the process has.
#[derive(Debug)]
pub struct Process {
    /// Most requests that are served at the same time.
    pub event_loops: usize,
    /// The process's own descriptors.
    pub descriptors: DescriptorDir,
    /// RLIMIT_NOFILE.
    pub descriptor_limit: u64,
}

/// How a daemon continues the connection of an earlier one, and leaves it to a later one.
#[derive(Debug)]
pub struct Succession {
    /// The backend writes down here what a successor needs.
    pub state: Region,
    /// Of the state table: what the backend writes must be in the form of this version, so that a
    /// daemon of the release before can continue.
    pub version: u64,
    /// Holds the files that cannot be opened by name any more.
    pub removed: Removed,
    /// The state is an earlier daemon's.
    pub continues: bool,
}
