//! Publishing: a bind mount of the staged volume at a pod's target path.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use linux::mountinfo::MountEntry;

use crate::capability::Access;
use crate::driver::Driver;
use crate::error::{Error, Result, Step};
use crate::journal::{TargetRecord, VolumeRecord};
use crate::mounts::{self, WhenBusy};
use crate::node::stage::{Health, StageWish, uncleared};
use crate::volume::VolumeId;

const TARGET_MODE: u32 = 0o750;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PublishWish {
    pub(crate) staging_path: PathBuf,
    pub(crate) target_path: PathBuf,
    /// Read-only where the request or the capability says so.
    pub(crate) access: Access,
}

impl Driver {
    /// NodePublishVolume. A volume whose daemon died is staged anew first: kubelet
    /// does not stage again what it believes staged.
    pub(crate) fn publish(&self, volume_id: &VolumeId, wish: &PublishWish) -> Result<()> {
        let mut record = self.journal.get(volume_id)?;
        let target = &wish.target_path;
        let is_known = record.targets.contains_key(target);
        // A target that was published is there, dead or alive, whatever hinders its healing.
        let staged = self
            .staged_for(volume_id, &mut record, wish)
            .map_err(|e| if is_known { uncleared(volume_id, e) } else { e })?;
        match record.targets.get(target) {
            Some(found) if found.access != wish.access => {
                return Err(Error::PublishedOtherwise {
                    volume_id: volume_id.clone(),
                    path: target.clone(),
                    found: found.access.to_string(),
                    wanted: wish.access.to_string(),
                });
            }
            Some(found) => {
                let mount = mounts::find(target, volume_id)?;
                if found.published && mount.is_some_and(|mount| is_right(&mount, &staged, wish.access)) {
                    return Ok(());
                }
            }
            None => self.check_new_target(volume_id, &mut record, wish)?,
        }
        record.targets.insert(target.clone(), TargetRecord { access: wish.access, published: false });
        self.journal.put(volume_id, &record)?;
        self.try_publish(volume_id, &mut record, wish, &staged).map_err(|cause| {
            match self.retract(volume_id, &mut record, target) {
                Ok(()) => cause,
                Err(rollback) => Error::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) },
            }
        })
    }

    /// NodeUnpublishVolume; a target that is not published is a success.
    pub(crate) fn unpublish(&self, volume_id: &VolumeId, target: &Path) -> Result<()> {
        match self.journal.find(volume_id)? {
            Some(mut record) => self.retract(volume_id, &mut record, target),
            // Whatever the journal forgot, mountinfo still tells whose it is.
            None => mounts::unmount(target, volume_id, WhenBusy::Refuse),
        }
    }

    /// The mount to publish, healed if it must be.
    fn staged_for(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wish: &PublishWish,
    ) -> Result<MountEntry> {
        let not_staged =
            || Error::NotStaged { volume_id: volume_id.clone(), path: wish.staging_path.clone() };
        let stage = record.stage.as_ref().ok_or_else(not_staged)?;
        if stage.staging_path != wish.staging_path || stage.serving.is_none() {
            return Err(not_staged());
        }
        let stage_wish = StageWish { staging_path: stage.staging_path.clone(), access: stage.access };
        if stage.access.read_only && !wish.access.read_only {
            let (found, wanted) = (stage.access.to_string(), wish.access.to_string());
            let path = stage.staging_path.clone();
            return Err(Error::StagedOtherwise { volume_id: volume_id.clone(), path, found, wanted });
        }
        self.ensure_staged(volume_id, record, &stage_wish)
    }

    fn check_new_target(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wish: &PublishWish,
    ) -> Result<()> {
        // A mount of something else there is an error, before anything is written.
        mounts::find(&wish.target_path, volume_id)?;
        if wish.access.mode.allows_second_target() {
            return Ok(());
        }
        self.forget_unmounted_targets(volume_id, record)?;
        match record.targets.keys().next() {
            None => Ok(()),
            Some(published) => Err(Error::SecondTarget {
                volume_id: volume_id.clone(),
                published: published.clone(),
                mode: wish.access.mode,
            }),
        }
    }

    fn try_publish(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wish: &PublishWish,
        staged: &MountEntry,
    ) -> Result<()> {
        let target = &wish.target_path;
        // Of a daemon that died, or of a publish that was cut short.
        mounts::unmount(target, volume_id, WhenBusy::Detach)?;
        ensure_directory(target)?;
        linux::mount::bind(&wish.staging_path, target).step("publish volume")?;
        if wish.access.read_only != staged.is_read_only() {
            linux::mount::remount_bind(target, mounts::flags(wish.access.read_only))
                .step("publish volume")?;
        }
        let mount = mounts::find(target, volume_id)?;
        if !mount.is_some_and(|mount| is_right(&mount, staged, wish.access)) {
            return Err(Error::unusable("target_path", target, "mountinfo does not show the volume there"));
        }
        record.targets.insert(target.clone(), TargetRecord { access: wish.access, published: true });
        self.journal.put(volume_id, record)
    }

    /// Takes away mount, directory and the journal's word of them.
    pub(crate) fn retract(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        target: &Path,
    ) -> Result<()> {
        let serving = match &record.stage {
            Some(stage) => match self.health(volume_id, stage)? {
                Health::Serving(mount) => Some(mount.minor),
                Health::HalfDone | Health::Unmounted | Health::DaemonDead => None,
            },
            None => None,
        };
        let mounted = mounts::find(target, volume_id)?.map(|mount| mount.minor);
        let is_served = mounted.is_some() && mounted == serving;
        mounts::unmount(target, volume_id, if is_served { WhenBusy::Refuse } else { WhenBusy::Detach })?;
        if !record.targets.contains_key(target) {
            return Ok(());
        }
        match std::fs::remove_dir(target) {
            // What is no directory was not made here.
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(linux::Error::at("remove", target, e)).step("unpublish volume");
            }
            Ok(()) | Err(_) => {}
        }
        record.targets.remove(target);
        self.journal.put(volume_id, record)
    }
}

/// Same file system and same directory of it as the staged mount, and as writable as wanted.
fn is_right(mount: &MountEntry, staged: &MountEntry, access: Access) -> bool {
    mount.same_root(staged) && mount.is_read_only() == access.read_only
}

/// CSI spec: the caller has made the parent, the plugin makes the target. Not
/// looked at through links: a bind mount would follow one out of the pod.
fn ensure_directory(target: &Path) -> Result<()> {
    match DirBuilder::new().mode(TARGET_MODE).create(target) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => match std::fs::symlink_metadata(target) {
            Ok(found) if found.is_dir() => Ok(()),
            Ok(_) => Err(Error::unusable("target_path", target, "not a directory")),
            Err(e) => Err(Error::unusable("target_path", target, e.to_string())),
        },
        Err(e) => Err(linux::Error::at("create", target, e)).step("publish volume"),
    }
}
