//! Who holds the descriptor of a FUSE connection beside the daemon that serves it.
//!
//! A connection ends when its last holder lets go. As long as no successor can
//! take a connection over, a second holder would turn a daemon's death from
//! ENOTCONN at once into requests that wait for ever.

use std::os::fd::OwnedFd;

use crate::model::ids::VolumeId;

/// Takes the driver's copy of a connection after the hand-over.
pub(crate) trait FdKeeper: Send + Sync + std::fmt::Debug {
    fn handed_over(&self, volume_id: &VolumeId, fuse_device: OwnedFd);
}

/// Lets go: the daemon is the only holder.
#[derive(Debug)]
pub(crate) struct LetGo;

impl FdKeeper for LetGo {
    fn handed_over(&self, _volume_id: &VolumeId, fuse_device: OwnedFd) {
        drop(fuse_device);
    }
}
