//! How a volume's daemon comes to run: one trait, and the ways behind it.
//!
//! No host path and no uid stand in what a launcher is asked for: where pods
//! come from a cluster, it is the cluster that assigns those.

pub(crate) mod daemon_log;
pub(crate) mod group;
pub(crate) mod manifest;
mod memory;
pub(crate) mod needs;
pub(crate) mod process;

use crate::model::ids::VolumeId;
use crate::model::launch::LaunchId;
use crate::model::settings::LaunchSettings;

#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchSpec<'a> {
    pub volume_id: &'a VolumeId,
    /// Proves to the driver that it is this launch that dials in; single use.
    pub nonce: &'a str,
    pub settings: &'a LaunchSettings,
    /// Most files, directories and links of the volume; 0: no limit.
    pub inode_limit: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launched {
    pub volume_id: VolumeId,
    pub id: LaunchId,
}

/// Calls may block; each is bounded by the disk or by the process table.
pub(crate) trait Launcher: Send + Sync + std::fmt::Debug {
    /// Sees to it that one daemon for the volume is started with this nonce.
    /// An earlier launch of the same volume must have been removed.
    fn ensure(&self, spec: LaunchSpec<'_>) -> linux::Result<LaunchId>;

    /// All there are on this node, also those that an earlier driver started.
    fn list(&self) -> linux::Result<Vec<Launched>>;

    /// Goes on with what the driver does for a daemon while it runs. Called once for each
    /// launch that an earlier driver left.
    fn adopt(&self, volume_id: &VolumeId) -> linux::Result<()>;

    /// The last line that an ended daemon wrote, where the driver has its log.
    fn last_log_line(&self, volume_id: &VolumeId) -> Option<String>;

    /// Whether nobody has taken the launch back: one that somebody else took back is
    /// ending, or about to. The process may have ended all the same.
    fn stands(&self, id: &LaunchId) -> linux::Result<bool>;

    /// Sees to it that the launch ends; one that is gone is a success. The
    /// daemon may live on for a moment.
    fn remove(&self, id: &LaunchId) -> linux::Result<()>;

    /// Removes what a launch leaves behind. Its process must have ended.
    fn clear(&self, volume_id: &VolumeId) -> linux::Result<()>;

    /// The words for who is started, with what somebody needs to look for it.
    fn describe(&self, spec: LaunchSpec<'_>) -> String;
}
