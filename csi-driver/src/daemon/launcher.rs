//! Starts the daemons of volumes: one trait with an implementation for each way.
//!
//! A request names no host path and no uid: in a cluster, the API server assigns those.

pub(crate) mod daemon_log;
pub(crate) mod group;
pub(crate) mod manifest;
pub(crate) mod memory;
pub(crate) mod needs;
pub(crate) mod process;
pub(crate) mod program;

use self::program::Program;
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, LaunchKey, ProcessId};
use crate::model::settings::LaunchSettings;

#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchSpec<'a> {
    pub key: &'a LaunchKey,
    /// `None`: the daemon is started ahead, and gets a volume later.
    pub volume_id: Option<&'a VolumeId>,
    /// Proves to the driver that a process which dials in belongs to this launch; single use.
    pub nonce: &'a str,
    pub settings: &'a LaunchSettings,
    /// Most files, directories and links of the volume; 0: no limit.
    pub inode_limit: u64,
    /// `None`: the one that the driver is configured with.
    pub program: Option<&'a Program>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launched {
    pub key: LaunchKey,
    pub id: LaunchId,
}

/// Calls may block as long as the disk or the process table does.
pub(crate) trait Launcher: Send + Sync + std::fmt::Debug {
    /// Starts one daemon with this nonce. An earlier launch with the same key must have been removed.
    fn ensure(&self, spec: LaunchSpec<'_>) -> linux::Result<LaunchId>;

    /// All launches on this node, also those of an earlier driver. Changes nothing.
    fn list(&self) -> linux::Result<Vec<Launched>>;

    /// Which launch the running `daemon` is of, also if its program has been replaced since.
    fn launch_of(&self, key: &LaunchKey, daemon: ProcessId) -> linux::Result<Option<LaunchId>>;

    /// The processes that are daemons by name and user, of any program. None of their memory is read.
    fn daemons(&self) -> linux::Result<Vec<ProcessId>>;

    /// The launch of one of [`Self::daemons`] that is known to be a daemon. `None` if there is none.
    fn launch_by(&self, daemon: ProcessId) -> linux::Result<Option<Launched>>;

    /// Removes what a driver that was killed while it wrote a launch has left.
    fn remove_leftovers(&self) -> linux::Result<()>;

    /// What a launch executes if its spec names no program.
    fn configured_program(&self) -> linux::Result<Program>;

    /// What the daemon of a launch executes. `None` if this launcher cannot start it again.
    fn program_of(&self, id: &LaunchId, daemon: ProcessId) -> linux::Result<Option<Program>>;

    /// Continues what the driver does for a running daemon of an earlier driver. May be called again.
    fn adopt(&self, key: &LaunchKey) -> linux::Result<()>;

    /// The last line that an ended daemon wrote, if the driver has its log.
    fn last_log_line(&self, key: &LaunchKey) -> Option<String>;

    /// True unless another party has removed the launch: then its process ends soon. The process of
    /// a launch that stands may also have ended.
    fn stands(&self, id: &LaunchId) -> linux::Result<bool>;

    /// Ends the launch; a missing one is a success. The daemon may run for a moment longer.
    fn remove(&self, id: &LaunchId) -> linux::Result<()>;

    /// Removes what an ended launch leaves. Its process must have ended.
    fn clear(&self, key: &LaunchKey) -> linux::Result<()>;

    /// Names the pod or process that is started, so that an administrator finds it.
    fn describe(&self, spec: LaunchSpec<'_>) -> String;
}
