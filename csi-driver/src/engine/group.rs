//! The group of a volume that several pods use (CSI: volume_mount_group, a pod's fsGroup). The
//! latest pod decides, as with kubelet for drivers without VOLUME_MOUNT_GROUP.
//!
//! Invariant: only a stage without targets and the first publish of a target change the group.
//! kubelet repeats publishes at will; if each changed the group, two pods with different groups
//! would take the volume from each other forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use linux::mountinfo::MountEntry;
use linux::tree::{self, GroupAccess};

use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step};
use crate::kernel::bounded::OneEach;
use crate::model::capability::Access;
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::VolumeRecord;

impl Stages {
    /// The group for a stage: the one that `wanted` names, or the group of the existing stage. An
    /// existing stage with another group and without targets is taken down, to be staged again.
    pub(crate) fn group_of_stage(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wanted: Access,
    ) -> Result<Option<u32>> {
        let stage = record.stage.as_ref().map(|stage| stage.access);
        let restage = record.restage.as_ref().map(|stage| stage.access);
        let Some(staged) = stage.or(restage) else { return Ok(wanted.group) };
        if !asks_for_another(wanted, staged) {
            return Ok(staged.group);
        }
        self.forget_unmounted_targets(volume_id, record)?;
        if !record.targets.is_empty() {
            return Ok(staged.group);
        }
        tracing::info!(%volume_id, group = wanted.group, "staging anew for another group");
        self.locks.check_not_copied(volume_id)?;
        self.tear_down_broken(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))?;
        Ok(wanted.group)
    }
}

/// Whether a publish or stage with `wanted` changes the group of what is staged. A pod without a
/// group uses the volume as it is, and a reader changes nothing.
pub(crate) fn asks_for_another(wanted: Access, staged: Access) -> bool {
    wanted.group.is_some() && wanted.group != staged.group && !wanted.read_only && !staged.read_only
}

/// Changes the group of a volume in use, through its mount, so that the daemon's caches see it.
/// Does nothing if the root has the group.
pub(crate) fn give_group_in_use(
    flushes: &OneEach<VolumeId>,
    volume_id: &VolumeId,
    staged: &MountEntry,
    gid: u32,
) -> Result<()> {
    let (path, minor) = (staged.mount_point.clone(), staged.minor);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let what = format!("giving volume {volume_id} to group {gid}");
    let give = move || {
        let tree = linux::mount::open_tree_clone(&path)?;
        if linux::mount::minor_of(&tree)? != minor {
            return Ok(false);
        }
        if !tree::has_group(&tree, gid, GroupAccess::ReadWrite)? {
            tree::give_group(&tree, gid, GroupAccess::ReadWrite, &stopped)?;
        }
        linux::Result::Ok(true)
    };
    // A retry only checks the files that have the group already.
    let given = flushes.within(volume_id, what, limits::GIVE_GROUP, give);
    let given = given.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
    if given.step("give volume to its group")? {
        return Ok(());
    }
    let path = &staged.mount_point;
    Err(Error::unusable("staging_target_path", path, "the volume has just been unmounted there"))
}
