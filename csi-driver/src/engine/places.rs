//! Finds the mounts that the journal records.

use std::path::Path;

use crate::error::{Error, Result};
use crate::kernel::host_path::HostPaths;
use crate::kernel::mounts;
use crate::kernel::place::Place;
use crate::model::ids::VolumeId;
use crate::model::records::{StageRecord, VolumeRecord};

/// [`place_of_mount`] for a stage.
pub(crate) fn place_of_stage(
    paths: &HostPaths,
    volume_id: &VolumeId,
    stage: &StageRecord,
) -> Result<Option<Place>> {
    place_of_mount(paths, volume_id, "staging_target_path", &stage.staging_path, &[])
}

/// [`place_of_mount`] for a target.
pub(crate) fn place_of_target(
    paths: &HostPaths,
    volume_id: &VolumeId,
    record: &VolumeRecord,
    target: &Path,
) -> Result<Option<Place>> {
    place_of_mount(paths, volume_id, "target_path", target, &record.mount_points_beside(target))
}

/// The place of a mount that the journal records. `None` if there is nothing to unmount: the
/// directory is gone, or the path now leads through a link and the volume is mounted only at
/// `others`. That happens after a restart of a machine whose directories were moved, or if a pod
/// removed the directory in its own mount namespace.
pub(crate) fn place_of_mount(
    paths: &HostPaths,
    volume_id: &VolumeId,
    field: &'static str,
    path: &Path,
    others: &[&Path],
) -> Result<Option<Place>> {
    match paths.place(field, path) {
        Err(Error::PathChanged { .. }) if !mounts::is_mounted_beside(volume_id, others)? => Ok(None),
        found => found,
    }
}
