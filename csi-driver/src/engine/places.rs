//! Where the mounts are that the journal has.

use std::path::Path;

use crate::error::{Error, Result};
use crate::kernel::host_path::HostPaths;
use crate::kernel::mounts;
use crate::kernel::place::Place;
use crate::model::ids::VolumeId;
use crate::model::records::{StageRecord, VolumeRecord};

/// [`place_of_mount`] of a stage.
pub(crate) fn place_of_stage(
    paths: &HostPaths,
    volume_id: &VolumeId,
    stage: &StageRecord,
) -> Result<Option<Place>> {
    place_of_mount(paths, volume_id, ("staging_target_path", &stage.staging_path), &[])
}

/// [`place_of_mount`] of a target.
pub(crate) fn place_of_target(
    paths: &HostPaths,
    volume_id: &VolumeId,
    record: &VolumeRecord,
    target: &Path,
) -> Result<Option<Place>> {
    place_of_mount(paths, volume_id, ("target_path", target), &record.mount_points_beside(target))
}

/// The place of a mount that the journal has. `None` where there is none to take away: its
/// directory is gone; or the path leads through a link, and the volume is mounted at `others`
/// alone, as after a restart of a machine whose directories were moved, or where a pod has removed
/// the directory in a mount namespace of its own.
pub(crate) fn place_of_mount(
    paths: &HostPaths,
    volume_id: &VolumeId,
    (field, path): (&'static str, &Path),
    others: &[&Path],
) -> Result<Option<Place>> {
    match paths.place(field, path) {
        Err(Error::PathChanged { .. }) if !mounts::is_mounted_beside(volume_id, others)? => Ok(None),
        found => found,
    }
}
