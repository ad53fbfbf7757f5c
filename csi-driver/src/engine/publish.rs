//! Publishing: a bind mount of the staged volume at a pod's target path.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use linux::mountinfo::MountEntry;
use rustix::io::Errno;

use crate::engine::daemons::Daemons;
use crate::engine::group::give_group_in_use;
use crate::engine::health::is_served;
use crate::engine::mount_point;
use crate::engine::places::place_of_target;
use crate::engine::stage::{Stages, is_staged_at};
use crate::engine::takeover::Takeover;
use crate::error::{Error, Result, Step};
use crate::journal::Journal;
use crate::kernel::bounded::OneEach;
use crate::kernel::host_path::{HostPath, HostPaths};
use crate::kernel::mounts::{self, WhenBusy};
use crate::kernel::place::Place;
use crate::model::capability::{Access, MountFlag};
use crate::model::ids::VolumeId;
use crate::model::records::{StageSpec, TargetRecord, VolumeRecord};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PublishSpec {
    pub(crate) staging_path: PathBuf,
    pub(crate) target_path: PathBuf,
    /// The path in the request, if links led from it to `target_path`.
    pub(crate) asked: Option<PathBuf>,
    /// Read-only if the request, the capability or the attachment is.
    pub(crate) access: Access,
}

impl PublishSpec {
    /// The journal entry before the mount is made.
    fn target(&self, owes_group: bool) -> TargetRecord {
        TargetRecord { access: self.access, published: false, asked: self.asked.clone(), owes_group }
    }
}

/// What is mounted before a publish.
struct Found<'a> {
    place: &'a Place,
    staged: &'a MountEntry,
    /// At the place, by a daemon that died or by an interrupted publish.
    left: Option<MountEntry>,
}

/// The mounts of volumes at the target paths of pods.
#[derive(Debug)]
pub(crate) struct Targets {
    pub(crate) journal: Arc<Journal>,
    pub(crate) paths: Arc<HostPaths>,
    pub(crate) daemons: Arc<Daemons>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) flushes: Arc<OneEach<VolumeId>>,
}

impl Targets {
    /// NodePublishVolume. If the volume's daemon died, it is staged again first: kubelet does not
    /// repeat NodeStageVolume for a volume that it considers staged.
    pub(crate) fn publish(&self, volume_id: &VolumeId, spec: &PublishSpec) -> Result<()> {
        check_apart(&spec.staging_path, &spec.target_path)?;
        let mut record = self.journal.get(volume_id)?;
        let target = &spec.target_path;
        self.daemons.hangs.left_or_stays(volume_id, target);
        let is_known = record.targets.contains_key(target);
        // A target that was published stays so, dead or alive, even if the repair fails.
        let staged = self
            .staged_for(volume_id, &mut record, spec)
            .map_err(|e| if is_known { Error::uncleared(volume_id, e) } else { e })?;
        if let Some(found) = record.targets.get(target).filter(|found| found.access != spec.access) {
            return Err(Error::PublishedOtherwise {
                volume_id: volume_id.clone(),
                path: target.clone(),
                found: found.access.to_string(),
                wanted: spec.access.to_string(),
            });
        }
        let Some(place) = self.paths.place("target_path", target)? else {
            // The mount disappeared together with its directory.
            self.forget_target(volume_id, &mut record, target)?;
            return Err(mount_point::parent_missing("target_path", target));
        };
        // A mount of something else is an error, found before anything is written.
        let mounted = mounts::find_at(&place, volume_id)?;
        match record.targets.get(target) {
            Some(found) => {
                let is_right = |mount| is_right(mount, &staged, spec.access);
                if found.published && mounted.as_ref().is_some_and(is_right) {
                    return Ok(());
                }
            }
            None => {
                if mounted.is_none() {
                    mount_point::check(&place)?;
                }
                self.check_new_target(volume_id, &mut record, spec)?;
            }
        }
        // Only the first publish changes the group; a repeated one only if the first was
        // interrupted.
        let is_owed = record.targets.get(target).is_none_or(|found| found.owes_group);
        let owes_group = is_owed && Self::begin_group(&mut record, spec);
        record.targets.insert(target.clone(), spec.target(owes_group));
        self.journal.put(volume_id, &record)?;
        self.try_publish(
            volume_id,
            &mut record,
            spec,
            Found { place: &place, staged: &staged, left: mounted },
        )
        .map_err(|cause| Error::rolled_back(cause, self.retract_at(volume_id, &mut record, &place)))
    }

    /// NodeUnpublishVolume; a target that is not published is a success.
    pub(crate) fn unpublish(&self, volume_id: &VolumeId, path: &HostPath) -> Result<()> {
        let mut record = self.journal.find(volume_id)?;
        let mut targets =
            record.as_ref().map(|record| record.targets_asked_at(path.as_asked())).unwrap_or_default();
        if targets.is_empty() {
            let is_known =
                |path: &Path| record.as_ref().is_some_and(|record| record.targets.contains_key(path));
            targets.extend(self.paths.find(path, is_known)?);
        }
        targets.iter().try_for_each(|target| match &mut record {
            // Staged there, and not published.
            Some(record) if is_staged_at(record, target) => Ok(()),
            Some(record) => {
                let retracted = self
                    .free_of_users(volume_id, record, target)
                    .and_then(|()| self.retract(volume_id, record, target));
                match &retracted {
                    // The watch for hung daemons finds out why.
                    Err(Error::Busy { .. } | Error::Deadline { .. }) => {
                        self.daemons.hangs.leaving(volume_id, target);
                    }
                    Ok(()) | Err(_) => self.daemons.hangs.left_or_stays(volume_id, target),
                }
                retracted
            }
            // Even if the journal lost the entry, mountinfo shows whose mount it is.
            None => match self.paths.place("target_path", target)? {
                Some(place) => mounts::unmount_own(&place, volume_id, WhenBusy::Refuse),
                None => Ok(()),
            },
        })
    }

    /// If the volume's daemon has died and another one may follow, unmounts a target without users.
    /// One with users waits for that daemon: to end the connection would cost all pods their I/O.
    fn free_of_users(&self, volume_id: &VolumeId, record: &mut VolumeRecord, target: &Path) -> Result<()> {
        let Some((stage, _)) = self.stages.orphaned(record)? else { return Ok(()) };
        let Some(place) = place_of_target(&self.paths, volume_id, record, target)? else { return Ok(()) };
        if matches!(mounts::find_at(&place, volume_id), Ok(None) | Err(Error::ForeignMount { .. })) {
            return Ok(());
        }
        // Only a daemon takes what the kernel has not sent, and NodeUnstageVolume may be next.
        if !stage.settings.writeback_cache && mounts::unmount_own(&place, volume_id, WhenBusy::Refuse).is_ok()
        {
            return Ok(());
        }
        match self.stages.attempt_takeover(volume_id, record) {
            Ok(Takeover::Nothing | Takeover::Done) => Ok(()),
            // Not even one that waits for a stopped keeper: the end of the connection would end that too.
            Ok(Takeover::Failed(error)) | Err(error) => Err(Error::uncleared(volume_id, error)),
        }
    }

    /// The target path that a call means. A path in the journal stays valid: it may date from an
    /// earlier `--kubelet-dir`.
    pub(crate) fn target_path(&self, volume_id: &VolumeId, path: &HostPath) -> Result<PathBuf> {
        let record = self.journal.get(volume_id)?;
        let resolved = self.paths.resolve_anew(path, |known| record.targets.contains_key(known));
        let is_known = !record.targets_asked_at(path.as_asked()).is_empty();
        resolved.map_err(|e| if is_known { Error::uncleared(volume_id, e) } else { e })
    }

    /// Whether the journal records this target with exactly this access.
    pub(crate) fn is_recorded_with(
        &self,
        volume_id: &VolumeId,
        target: &Path,
        access: Access,
    ) -> Result<bool> {
        let record = self.journal.get(volume_id)?;
        Ok(record.targets.get(target).is_some_and(|found| found.access == access))
    }

    /// The mount to publish, repaired if necessary.
    fn staged_for(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &PublishSpec,
    ) -> Result<MountEntry> {
        let not_staged =
            || Error::NotStaged { volume_id: volume_id.clone(), path: spec.staging_path.clone() };
        let is_here = |stage: &StageSpec| stage.staging_path == spec.staging_path;
        let mut stage = record.answered_stage().filter(is_here).ok_or_else(not_staged)?;
        check_access(volume_id, &stage, spec.access)?;
        if !record.targets.contains_key(&spec.target_path) {
            stage.access.group = self.stages.group_of_stage(volume_id, record, spec.access)?;
        }
        self.stages.ensure_staged(volume_id, record, &stage)
    }

    /// Whether this publish changes the volume's group. From here on the stage records that group,
    /// so a remount finishes what an interrupted publish did not.
    fn begin_group(record: &mut VolumeRecord, spec: &PublishSpec) -> bool {
        let Some(stage) = &mut record.stage else { return false };
        if spec.access.group.is_none() || spec.access.read_only || stage.access.read_only {
            return false;
        }
        stage.access.group = spec.access.group;
        true
    }

    fn check_new_target(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &PublishSpec,
    ) -> Result<()> {
        let is_shared = |record: &VolumeRecord| {
            record
                .targets
                .values()
                .map(|found| &found.access)
                .chain([&spec.access])
                .all(|access| access.mode.allows_second_target())
        };
        if is_shared(record) {
            return Ok(());
        }
        self.stages.forget_unmounted_targets(volume_id, record)?;
        // The existing target that forbids a second one, if there is one.
        let published =
            record.targets.iter().min_by_key(|(_, found)| found.access.mode.allows_second_target());
        match published {
            Some((published, found)) if !is_shared(record) => Err(Error::SecondTarget {
                volume_id: volume_id.clone(),
                published: published.clone(),
                mode: if found.access.mode.allows_second_target() {
                    spec.access.mode
                } else {
                    found.access.mode
                },
            }),
            Some(_) | None => Ok(()),
        }
    }

    fn try_publish(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &PublishSpec,
        Found { place, staged, left }: Found<'_>,
    ) -> Result<()> {
        let target = &spec.target_path;
        let owes_group = record.targets.get(target).is_some_and(|found| found.owes_group);
        if let Some(gid) = spec.access.group.filter(|_| owes_group) {
            give_group_in_use(&self.flushes, volume_id, staged, gid)?;
        }
        if let Some(left) = left {
            let is_served = left.minor == staged.minor;
            mounts::unmount(place, volume_id, if is_served { WhenBusy::Hide } else { WhenBusy::AbortNow })?;
        }
        mount_point::make(place)?;
        let tree = mounts::copy(staged, "publish volume")?;
        place.attach(&tree, "publish volume")?;
        // A bind mount has the flags of the staged mount.
        if !mounts::is_as_wanted(staged, spec.access) {
            let staged_flags = record.stage.as_ref().map(|stage| stage.access.flags).unwrap_or_default();
            let access = Access { flags: spec.access.flags.with(staged_flags), ..spec.access };
            linux::mount::remount_bind_at(&tree, target, mounts::flags(access)).step("publish volume")?;
        }
        let mount = mounts::find_at(place, volume_id)?;
        if !mount.is_some_and(|mount| is_right(&mount, staged, spec.access)) {
            return Err(Error::unusable("target_path", target, "mountinfo does not show the volume there"));
        }
        record.targets.insert(target.clone(), TargetRecord { published: true, ..spec.target(false) });
        self.journal.put(volume_id, record)
    }

    /// Removes mount, directory and journal entry of a target.
    pub(crate) fn retract(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        target: &Path,
    ) -> Result<()> {
        match place_of_target(&self.paths, volume_id, record, target)? {
            Some(place) => self.retract_at(volume_id, record, &place),
            None => self.forget_target(volume_id, record, target),
        }
    }

    fn retract_at(&self, volume_id: &VolumeId, record: &mut VolumeRecord, place: &Place) -> Result<()> {
        let is_known = record.targets.contains_key(place.path());
        let mounted = match mounts::find_at(place, volume_id) {
            // This volume was never published here; the mount belongs to something else.
            Err(Error::ForeignMount { .. }) if !is_known => return Ok(()),
            mounted => mounted?,
        };
        let minor = mounted.as_ref().map(|mount| mount.minor);
        let is_served = minor.is_some() && minor == served_connection(record)?;
        let when_busy = if is_served { WhenBusy::Refuse } else { WhenBusy::AbortNow };
        match (mounts::unmount_found(place, volume_id, mounted, when_busy), minor) {
            (Err(Error::Busy { .. }), Some(minor)) if self.daemons.is_hung(volume_id, minor)? => {
                self.give_up(volume_id, record)?;
                mounts::unmount(place, volume_id, WhenBusy::AbortNow)?;
            }
            (outcome, _) => outcome?,
        }
        if !is_known {
            return mount_point::remove_left(place);
        }
        match place.remove_dir() {
            // We create only empty directories, so leave anything else alone.
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::NOTEMPTY | Errno::EXIST) => {}
            // The kernel also returns EROFS if the directory does not exist.
            Err(Errno::ROFS) if place.stat().is_err_and(|errno| errno == Errno::NOENT) => {}
            Err(e) => return Err(linux::Error::at("remove", place.path(), e)).step("unpublish volume"),
        }
        self.forget_target(volume_id, record, place.path())
    }

    fn forget_target(&self, volume_id: &VolumeId, record: &mut VolumeRecord, target: &Path) -> Result<()> {
        if record.targets.remove(target).is_none() {
            return Ok(());
        }
        self.journal.put(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))
    }

    /// Called before the connection of a hung daemon is aborted: the next call then finds a volume
    /// without a daemon, and serves it again.
    fn give_up(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        let Some(stage) = &mut record.stage else { return Ok(()) };
        stage.aborted = true;
        let daemon = stage.serving.map(|serving| serving.daemon);
        self.journal.put(volume_id, record)?;
        if let Some(daemon) = daemon
            && !daemon.end(Duration::ZERO).step("end daemon")?
        {
            // In a frozen cgroup or an uninterruptible wait: it ends when that is over.
            tracing::warn!(%volume_id, "the hung daemon does not end");
        }
        Ok(())
    }
}

/// Refuses a target inside the volume, or above it: its mount would be mistaken for the stage.
pub(crate) fn check_apart(staging: &Path, target: &Path) -> Result<()> {
    if target.starts_with(staging) || staging.starts_with(target) {
        let reason = format!("not apart from staging_target_path {}", staging.display());
        return Err(Error::invalid("target_path", target.to_string_lossy(), reason));
    }
    Ok(())
}

/// The same file system and directory as the staged mount, with the requested flags.
fn is_right(mount: &MountEntry, staged: &MountEntry, access: Access) -> bool {
    mount.same_root(staged) && mounts::is_as_wanted(mount, access)
}

/// Refuses access that differs in what the file system was mounted with: a publish cannot change
/// that.
fn check_access(volume_id: &VolumeId, stage: &StageSpec, wanted: Access) -> Result<()> {
    let is_synced = |access: Access| access.flags.contains(MountFlag::Sync);
    // A mount has one rule for access times, and every publish inherits the stage's flags.
    let rules = [MountFlag::Noatime, MountFlag::Relatime];
    let has = |access: Access, flag| access.flags.contains(flag);
    let contradicts = rules.iter().any(|&flag| has(wanted, flag) && !has(stage.access, flag))
        && rules.iter().any(|&flag| has(stage.access, flag));
    if (stage.access.read_only && !wanted.read_only)
        || (is_synced(wanted) && !is_synced(stage.access))
        || contradicts
    {
        return Err(Error::StagedOtherwise {
            volume_id: volume_id.clone(),
            path: stage.staging_path.clone(),
            found: stage.access.to_string(),
            wanted: wanted.to_string(),
        });
    }
    Ok(())
}

/// The connection whose daemon runs, wherever it is mounted.
fn served_connection(record: &VolumeRecord) -> Result<Option<u32>> {
    match &record.stage {
        Some(stage) if is_served(stage)? => Ok(stage.serving.map(|serving| serving.connection_minor)),
        Some(_) | None => Ok(None),
    }
}
