//! The state of a staged volume, as the kernel shows it.

use linux::mountinfo::MountEntry;

use crate::error::{Error, Result, Step};
use crate::kernel::mounts::{self, ConnectionMount};
use crate::model::ids::VolumeId;
use crate::model::records::StageRecord;

/// The state of a stage, as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// The stage is incomplete: the driver was killed, or it failed and could not roll back.
    HalfDone,
    /// Another program unmounted it everywhere, or the machine was rebooted.
    Unmounted,
    /// Another program unmounted the volume from its staging path, or mounted something over it. It
    /// is still served where it is published; `None` if no path leads there either.
    Displaced(Option<Box<MountEntry>>),
    /// Its daemon ended, or its connection was aborted.
    DaemonDead,
    Serving(Box<MountEntry>),
}

pub(crate) fn health(volume_id: &VolumeId, stage: &StageRecord) -> Result<Health> {
    let Some(serving) = stage.serving else { return Ok(Health::HalfDone) };
    let staged = match mounts::find(&stage.staging_path, volume_id) {
        Ok(staged) => staged.filter(|mount| mount.minor == serving.connection_minor),
        Err(Error::ForeignMount { .. }) => None,
        Err(e) => return Err(e),
    };
    let is_served = is_served(stage)?;
    Ok(match staged {
        Some(mount) if is_served => Health::Serving(Box::new(mount)),
        Some(_) => Health::DaemonDead,
        None if !is_served => Health::Unmounted,
        None => match mounts::connection_mount(volume_id, serving.connection_minor)? {
            ConnectionMount::At(mount) => Health::Displaced(Some(mount)),
            ConnectionMount::Hidden => Health::Displaced(None),
            ConnectionMount::Nowhere => Health::Unmounted,
        },
    })
}

/// Whether processes may use what the stage serves.
pub(crate) fn is_in_use(volume_id: &VolumeId, stage: &StageRecord) -> Result<bool> {
    match health(volume_id, stage)? {
        // Left by a reboot or by a killed stage.
        Health::HalfDone => Ok(false),
        // Served but mounted nowhere: processes with open files still write to it.
        Health::Unmounted => is_served(stage),
        Health::Serving(_) | Health::Displaced(_) | Health::DaemonDead => Ok(true),
    }
}

/// Whether a daemon answers requests to the volume, wherever it is mounted.
pub(crate) fn is_served(stage: &StageRecord) -> Result<bool> {
    match stage.serving {
        Some(serving) if !stage.aborted => serving.daemon.is_alive().step("look at daemon"),
        Some(_) | None => Ok(false),
    }
}
