//! What differs from one kind of daemon to the next before it serves: which backend it is, what
//! it is handed, and what the process may do.

use std::sync::Arc;

use libc::c_long;
use linux::credentials::CapabilitySet;
use linux::fs_at::DescriptorDir;
use proto::handover::assignment;

use crate::Result;
use crate::backend::Backend;
use crate::descriptors::{Descriptors, Wrong};
use crate::figures::Limits;

/// One kind of daemon.
pub trait Service: Sized {
    type Backend: Backend;
    /// What the driver hands over for this backend.
    type Assigned;

    /// All that the process holds while it serves.
    const CAPABILITIES: CapabilitySet;
    /// System calls that this backend makes, beside those that the FUSE side makes.
    const SYSTEM_CALLS: &'static [c_long];

    /// Takes what the driver assigns to this backend, and checks it.
    fn check(
        &self,
        assigned: Option<assignment::Backend>,
        descriptors: &mut Descriptors,
    ) -> std::result::Result<Self::Assigned, Wrong>;

    /// Runs once the process has given up its privileges, before it answers FUSE_INIT: the
    /// system call filter does not stand yet.
    fn open(self, assigned: Self::Assigned, terms: Terms) -> Result<Arc<Self::Backend>>;
}

/// How a volume is to be served, whatever its backend.
#[derive(Debug)]
pub struct Terms {
    pub read_only: bool,
    pub limits: Limits,
    /// Inodes, beyond which the kernel is to be asked to forget.
    pub known_inode_limit: usize,
    /// How many requests may be served at once.
    pub event_loops: usize,
    /// The process's own descriptors.
    pub descriptors: DescriptorDir,
    /// RLIMIT_NOFILE.
    pub descriptor_limit: u64,
}
