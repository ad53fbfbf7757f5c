//! How a staged volume is, seen from the kernel.

use linux::mountinfo::MountEntry;

use crate::error::{Error, Result, Step};
use crate::kernel::mounts::{self, ConnectionMount};
use crate::model::ids::VolumeId;
use crate::model::records::StageRecord;

/// Where a stage stands, seen from the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// The driver was killed, or failed and could not roll back, half-way.
    HalfDone,
    /// Another program unmounted it everywhere, or the machine was rebooted.
    Unmounted,
    /// Another program unmounted it, or mounted something on it, where it was staged. It
    /// is served where it is published; `None` where no path leads to that either.
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

/// Whether a daemon answers what is asked of the volume, wherever it is mounted.
pub(crate) fn is_served(stage: &StageRecord) -> Result<bool> {
    match stage.serving {
        Some(serving) if !stage.aborted => serving.daemon.is_alive().step("look at daemon"),
        Some(_) | None => Ok(false),
    }
}
