//! Staging: one FUSE mount and one daemon a volume on this node.
//!
//! Order of steps, each named in the journal before it is done: begun, mounted,
//! dial socket, launched, handed over, serving. [`Driver::tear_down`] undoes any
//! prefix of them, for Unstage, for a failed stage, and after a kill. A volume that
//! `park` keeps for its next stage needs none of them then.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mountinfo::MountEntry;
use proto::handover::Assignment;

use crate::backend::pool::open_usage_file;
use crate::daemon::dial::DialDir;
use crate::daemon::handover::{self, Offer};
use crate::daemon::launcher::LaunchSpec;
use crate::engine::driver::Driver;
use crate::engine::mount_point;
use crate::error::{Error, Result, Step};
use crate::kernel::bounded;
use crate::kernel::host_path::HostPath;
use crate::kernel::mounts::{self, WhenBusy, Whereabouts};
use crate::kernel::nonce::new_nonce;
use crate::kernel::place::Place;
use crate::model::capability::{Access, Parsed};
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{DataId, Serving, StageRecord, VolumeRecord};
use crate::model::settings::LaunchSettings;

const OWN_REQUESTS_AGAIN: Duration = Duration::from_millis(20);

/// Where a stage stands, seen from the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// The driver was killed, or failed and could not roll back, half-way.
    HalfDone,
    /// Somebody else unmounted it everywhere, or the machine was rebooted.
    Unmounted,
    /// Somebody else unmounted it, or mounted something on it, where it was staged. It
    /// is served where it is published; `None` where no path leads to that either.
    Displaced(Option<Box<MountEntry>>),
    /// Or nobody's any more: its connection was aborted.
    DaemonDead,
    Serving(Box<MountEntry>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StageWish {
    pub(crate) staging_path: PathBuf,
    pub(crate) access: Access,
    pub(crate) settings: LaunchSettings,
}

impl StageWish {
    /// What was staged once, to be staged anew.
    pub(crate) fn again(stage: &StageRecord) -> Self {
        Self {
            staging_path: stage.staging_path.clone(),
            access: stage.access,
            settings: stage.settings.clone(),
        }
    }
}

impl Driver {
    /// NodeStageVolume.
    pub(crate) fn stage(&self, volume_id: &VolumeId, staging_path: &Path, how: &Parsed) -> Result<()> {
        let mut record = self.journal.get(volume_id)?;
        if record.deleting {
            return Err(Error::BeingDeleted { volume_id: volume_id.clone() });
        }
        if !record.filled {
            return Err(Error::Unfilled { volume_id: volume_id.clone() });
        }
        let wish = StageWish {
            staging_path: staging_path.to_owned(),
            access: how.access,
            settings: LaunchSettings::of(&record.parameters, &how.overrides),
        };
        let differs_in_group = |stage: &StageRecord| {
            let access = Access { group: stage.access.group, ..wish.access };
            stage.staging_path == wish.staging_path && stage.access == access
        };
        let group = if record.stage.as_ref().is_some_and(differs_in_group) {
            self.group_of_stage(volume_id, &mut record, wish.access)?
        } else {
            wish.access.group
        };
        let wish = StageWish { access: Access { group, ..wish.access }, ..wish };
        self.ensure_staged(volume_id, &mut record, &wish).map(drop).map_err(|error| match error {
            // The stage is there all the same, and is to be taken back.
            Error::ServesAnother { .. } => uncleared(volume_id, error),
            other => other,
        })
    }

    /// Where a call wants the volume's stage. The one that the journal knows stays usable: it
    /// may be of an earlier `--kubelet-dir`.
    pub(crate) fn staging_path(&self, volume_id: &VolumeId, path: &HostPath) -> Result<PathBuf> {
        let record = self.journal.get(volume_id)?;
        let resolved = self.paths.resolve_anew(path, |path| is_staged_at(&record, path));
        let is_known = is_staged_at(&record, path.as_asked());
        resolved.map_err(|e| if is_known { uncleared(volume_id, e) } else { e })
    }

    /// NodeUnstageVolume; a volume that is not staged is a success.
    pub(crate) fn unstage(self: &Arc<Self>, volume_id: &VolumeId, path: &HostPath) -> Result<()> {
        let mut record = self.journal.find(volume_id)?;
        let is_known = |path: &Path| record.as_ref().is_some_and(|record| is_staged_at(record, path));
        let staging_path = self.paths.find(path, is_known)?;
        if let Some(record) = &mut record {
            self.end_let_go(volume_id, record)?;
        }
        let is_here = |record: &VolumeRecord| {
            record.stage.as_ref().is_some_and(|stage| Some(&stage.staging_path) == staging_path.as_ref())
        };
        let Some(mut record) = record.filter(is_here) else {
            let Some(path) = staging_path else { return Ok(()) };
            let Some(place) = self.paths.place("staging_target_path", &path)? else { return Ok(()) };
            // Whatever the journal forgot, mountinfo still tells whose it is.
            return mounts::unmount_own(&place, volume_id, WhenBusy::Refuse);
        };
        // kubelet never asks for this. To obey would end a pod's I/O.
        self.forget_unmounted_targets(volume_id, &mut record)?;
        if let Some(path) = record.targets.keys().next() {
            return Err(Error::StillPublished { volume_id: volume_id.clone(), path: path.clone() });
        }
        self.check_not_copied(volume_id)?;
        if self.park(volume_id, &mut record)? {
            return Ok(());
        }
        self.tear_down(volume_id, &mut record)
    }

    /// Drops references whose mounts somebody else took away: an operator, or a reboot.
    pub(crate) fn forget_unmounted_targets(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
    ) -> Result<()> {
        let mut unmounted = Vec::new();
        for target in record.targets.keys() {
            // Beneath something else it is its pod's still.
            if !mounts::is_mounted(target, volume_id)? && !self.is_mounted_at(volume_id, record, target)? {
                unmounted.push(target.clone());
            }
        }
        if unmounted.is_empty() {
            return Ok(());
        }
        record.targets.retain(|target, _| !unmounted.contains(target));
        self.journal.put(volume_id, record)
    }

    /// Whether it is mounted at `target` for what the journal has to say, or may be: mountinfo
    /// shows another path while a pod has renamed a directory on the way.
    fn is_mounted_at(&self, volume_id: &VolumeId, record: &VolumeRecord, target: &Path) -> Result<bool> {
        match self.place_of_target(volume_id, record, target) {
            Ok(Some(place)) => match mounts::find_at(&place, volume_id) {
                Err(Error::ForeignMount { .. }) => Ok(false),
                found => Ok(found?.is_some()),
            },
            Ok(None) => Ok(false),
            Err(Error::PathChanged { .. }) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// The mount that serves the volume: the one there is, if it is healthy, or a new one.
    pub(crate) fn ensure_staged(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wish: &StageWish,
    ) -> Result<MountEntry> {
        if let Some(stage) = record.stage.clone() {
            match self.health(volume_id, &stage)? {
                Health::Serving(mount) => {
                    same_stage(volume_id, &stage, wish)?;
                    return self.check_data(volume_id, &stage).map(|()| *mount);
                }
                Health::Displaced(mount) => {
                    same_stage(volume_id, &stage, wish)?;
                    self.check_data(volume_id, &stage)?;
                    return self.put_in_place(volume_id, &stage, mount.as_deref());
                }
                broken @ (Health::HalfDone | Health::Unmounted | Health::DaemonDead) => {
                    tracing::info!(%volume_id, state = ?broken, "staging anew");
                    self.tear_down(volume_id, record).map_err(|e| uncleared(volume_id, e))?;
                }
            }
        }
        if let Some(mount) = self.unpark(volume_id, record, wish)? {
            return Ok(mount);
        }
        self.stage_anew(volume_id, record, wish)
    }

    pub(crate) fn health(&self, volume_id: &VolumeId, stage: &StageRecord) -> Result<Health> {
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
            None => match mounts::whereabouts(volume_id, serving.connection_minor)? {
                Whereabouts::At(mount) => Health::Displaced(Some(mount)),
                Whereabouts::Hidden => Health::Displaced(None),
                Whereabouts::Nowhere => Health::Unmounted,
            },
        })
    }

    fn stage_anew(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wish: &StageWish,
    ) -> Result<MountEntry> {
        // Its writers are not held back: there was no daemon when the copy began.
        self.check_not_copied(volume_id)?;
        let place = self.empty_staging_path(&wish.staging_path, volume_id)?;
        record.stage = Some(StageRecord {
            staging_path: wish.staging_path.clone(),
            access: wish.access,
            launch: None,
            serving: None,
            settings: wish.settings.clone(),
            data: None,
            aborted: false,
        });
        self.journal.put(volume_id, record)?;
        self.try_stage(volume_id, record, wish, &place)
            .map_err(|cause| self.undo_stage(volume_id, record, &place, cause))
    }

    /// [`Self::tear_down`] of a stage that failed with `cause`, at the place that it was begun at.
    pub(crate) fn undo_stage(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        place: &Place,
        cause: Error,
    ) -> Error {
        match self.tear_down_at(volume_id, record, Some(place)) {
            Ok(()) => cause,
            Err(rollback) => Error::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) },
        }
    }

    /// CSI spec: the caller has made the staging path, a directory; on it we mount.
    pub(crate) fn empty_staging_path(&self, path: &Path, volume_id: &VolumeId) -> Result<Place> {
        let field = "staging_target_path";
        let place = self.paths.place(field, path)?.ok_or_else(|| mount_point::parent_missing(field, path))?;
        // A mount of the volume that the journal does not have, as when the journal was lost.
        mounts::unmount(&place, volume_id, WhenBusy::AbortNow)?;
        mount_point::close(&place)?;
        Ok(place)
    }

    fn try_stage(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        wish: &StageWish,
        place: &Place,
    ) -> Result<MountEntry> {
        let span = tracing::info_span!("stage.mount").entered();
        let data = self.open_data(volume_id)?;
        if let Some(gid) = wish.access.group.filter(|_| !wish.access.read_only) {
            // Nobody else is in the volume yet.
            self.pool.give_group(volume_id, gid)?;
        }
        let fuse_device = linux::mount::open_fuse_device().step("open FUSE connection")?;
        let mount = mounts::mount(&fuse_device, volume_id, place, wish.access)?;
        drop(span);

        let span = tracing::info_span!("stage.launch").entered();
        let dial = DialDir::of(&self.config.run_dir, volume_id);
        let sockets = dial.listen().step("listen for daemon")?;
        let nonce = new_nonce()?;
        let inode_limit = self.pool.inode_limit(record.capacity_bytes);
        let spec = LaunchSpec { volume_id, nonce: &nonce, settings: &wish.settings, inode_limit };
        let described = self.launcher.describe(spec);
        let launch = self.launcher.ensure(spec).map_err(|source| {
            let (volume_id, launch) = (volume_id.clone(), described.clone());
            Error::Launch { volume_id, launch, source }
        })?;
        let process = launch.process();
        self.update_stage(volume_id, record, |stage| {
            (stage.launch, stage.data) = (Some(launch), Some(data.id));
        })?;
        drop(span);

        let span = tracing::info_span!("stage.hand_over").entered();
        let offer = Offer {
            volume_id,
            nonce: &nonce,
            launch: &described,
            process,
            assignment: Assignment {
                volume_name: record.name.as_str().to_owned(),
                capacity_bytes: record.capacity_bytes,
                read_only: wish.access.read_only,
                threads: wish.settings.threads,
                inode_limit,
                known_inode_limit: wish.settings.known_inodes(),
            },
            fuse_device: fuse_device.as_fd(),
            tree: data.tree.as_fd(),
            control: sockets.control.as_fd(),
            metrics: sockets.metrics.as_fd(),
            usage: data.usage.as_fd(),
        };
        let served = handover::hand_over(
            &sockets.dial,
            &offer,
            self.launcher.patience(),
            &self.waits.begin(volume_id)?,
        )
        .map_err(|error| self.with_last_words(error))?;
        // The daemon alone holds its listeners and the connection from here on.
        drop(sockets);
        self.hangs.found(volume_id, None);
        self.keeper.handed_over(volume_id, fuse_device);
        let serving = Serving { connection_minor: mount.minor, daemon: served.daemon };
        self.update_stage(volume_id, record, |stage| stage.serving = Some(serving))?;
        drop(span);
        tracing::info!(pid = served.daemon.pid, max_write_bytes = served.max_write_bytes, "served");
        self.watch.start(volume_id, served.daemon, served.pidfd);
        Ok(mount)
    }

    /// A daemon that ended has written why, if the driver itself keeps its log.
    fn with_last_words(&self, error: Error) -> Error {
        match error {
            Error::DaemonEnded { volume_id, launch, log: None } => {
                let log = self.launcher.last_words(&volume_id);
                Error::DaemonEnded { volume_id, launch, log }
            }
            other => other,
        }
    }

    /// Mounts a volume that is served elsewhere where it is staged, once more. Its
    /// daemon and its pods do not notice.
    pub(crate) fn put_in_place(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        served: Option<&MountEntry>,
    ) -> Result<MountEntry> {
        let path = &stage.staging_path;
        let hidden = || Error::unusable("staging_target_path", path, "something is mounted on the volume");
        let served = served.ok_or_else(hidden)?;
        tracing::info!(%volume_id, path = %path.display(), "unmounted by somebody: mounted again");
        let field = "staging_target_path";
        let place = self.paths.place(field, path)?.ok_or_else(|| mount_point::parent_missing(field, path))?;
        // What somebody else mounted there is an error, and stays.
        match mounts::find_at(&place, volume_id)? {
            // A pod had renamed a directory on the way, and has put it back.
            Some(mount) if mount.same_root(served) => return Ok(mount),
            Some(_) => return Err(Error::unusable(field, path, "an old mount of the volume is there")),
            None => mount_point::close(&place)?,
        }
        let tree = mounts::copy(served, "mount volume again")?;
        place.attach(&tree, "mount volume again")?;
        // The copy has the flags of the target.
        let remounted = linux::mount::remount_bind_at(&tree, path, mounts::flags(stage.access));
        drop(tree);
        let seen = remounted.step("mount volume again").and_then(|()| mounts::find_at(&place, volume_id));
        let cause = match seen {
            Ok(Some(mount)) if mount.same_root(served) => return Ok(mount),
            Ok(_) => Error::unusable(field, path, "a directory of the volume came to the place of its root"),
            Err(cause) => cause,
        };
        match mounts::unmount_own(&place, volume_id, WhenBusy::Hide) {
            Ok(()) => Err(cause),
            Err(rollback) => Err(Error::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) }),
        }
    }

    /// A pool that does not answer costs its caller no more than the limit.
    fn open_data(&self, volume_id: &VolumeId) -> Result<Data> {
        self.pool.check_present()?;
        let (dir, usage) = (self.pool.data_dir(volume_id), self.pool.usage_path(volume_id));
        let open = move || {
            let tree = linux::mount::open_tree_clone(&dir)?;
            let found = rustix::fs::fstat(&tree).map_err(|e| linux::Error::at("stat", &dir, e))?;
            let id = DataId { device: found.st_dev, inode: found.st_ino };
            Ok(Data { tree, id, usage: open_usage_file(&usage)? })
        };
        bounded::within(format!("open volume {volume_id} in the pool"), limits::POOL, open)?
            .step("open volume")
    }

    fn update_stage(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        change: impl FnOnce(&mut StageRecord),
    ) -> Result<()> {
        if let Some(stage) = &mut record.stage {
            change(stage);
        }
        self.journal.put(volume_id, record)
    }

    /// Takes away mount, launch, daemon, dial directory and the journal's word of
    /// them, as far as there are any. May be repeated after any failure.
    pub(crate) fn tear_down(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        let Some(stage) = &record.stage else { return Ok(()) };
        let place = self.place_of_stage(volume_id, stage)?;
        self.tear_down_at(volume_id, record, place.as_ref())
    }

    pub(crate) fn place_of_stage(&self, volume_id: &VolumeId, stage: &StageRecord) -> Result<Option<Place>> {
        self.place_of_mount(volume_id, ("staging_target_path", &stage.staging_path), &[])
    }

    fn tear_down_at(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        place: Option<&Place>,
    ) -> Result<()> {
        let Some(stage) = &record.stage else { return Ok(()) };
        self.take_away(volume_id, stage, place)?;
        record.stage = None;
        self.journal.put(volume_id, record).map_err(|e| uncleared(volume_id, e))
    }

    /// [`Self::tear_down`], but for the journal. Without a `place` nothing is mounted there.
    pub(crate) fn take_away(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        place: Option<&Place>,
    ) -> Result<()> {
        self.watch.stop(volume_id);
        let daemon = stage.serving.map(|serving| serving.daemon);
        let is_served = is_served(stage)?;
        let when_busy = if is_served { WhenBusy::Abort } else { WhenBusy::AbortNow };
        match place.map_or(Ok(()), |place| mounts::unmount(place, volume_id, when_busy)) {
            // Beneath it there is nothing of the volume's.
            Err(Error::ForeignMount { .. }) if !mounts::is_mounted(&stage.staging_path, volume_id)? => {}
            outcome => outcome?,
        }
        if let Some(serving) = stage.serving {
            self.end_own_requests(volume_id, serving)?;
        }
        if let Some(launch) = &stage.launch {
            self.launcher.remove(launch).step("remove launch")?;
            // A daemon that never got the connection has nothing to finish.
            let grace = if is_served { stage.settings.grace_seconds } else { 0 };
            let grace = Duration::from_secs(grace.into());
            for process in [daemon, launch.process()].into_iter().flatten() {
                if !process.end(grace).step("end daemon")? {
                    return Err(Error::DaemonLives { volume_id: volume_id.clone(), pid: process.pid });
                }
            }
        }
        self.launcher.clear(volume_id).step("clear launch")?;
        DialDir::of(&self.config.run_dir, volume_id).remove().step("remove dial directory")
    }

    /// Requests of ours wait in mounts of their own, without which the daemon would see its
    /// end now. What was written through mappings is written when the last of them goes.
    fn end_own_requests(&self, volume_id: &VolumeId, serving: Serving) -> Result<()> {
        let deadline = Instant::now() + limits::UNMOUNT;
        while self.hangs.own_requests(volume_id) > 0 {
            if Instant::now() >= deadline || !serving.daemon.is_alive().step("look at daemon")? {
                // What waits keeps the connection's number from being another's.
                let waits = || Ok(self.hangs.own_requests(volume_id) > 0);
                return mounts::abort_connection(serving.connection_minor, waits);
            }
            std::thread::park_timeout(OWN_REQUESTS_AGAIN);
        }
        Ok(())
    }

    /// ABORTED, with the progress, while the volume is being copied.
    pub(crate) fn check_not_copied(&self, volume_id: &VolumeId) -> Result<()> {
        match self.jobs.copying(volume_id.as_str()) {
            Some(job) => Err(job.under_way(format!("volume {volume_id}"))),
            None => Ok(()),
        }
    }
}

fn is_staged_at(record: &VolumeRecord, path: &Path) -> bool {
    record.stage.as_ref().is_some_and(|stage| stage.staging_path == path)
}

/// Whether somebody answers what is asked of the volume, wherever it is mounted.
pub(crate) fn is_served(stage: &StageRecord) -> Result<bool> {
    match stage.serving {
        Some(serving) if !stage.aborted => serving.daemon.is_alive().step("look at daemon"),
        Some(_) | None => Ok(false),
    }
}

pub(crate) fn uncleared(volume_id: &VolumeId, source: Error) -> Error {
    Error::Uncleared { volume_id: volume_id.clone(), source: Box::new(source) }
}

/// What of the pool a volume's daemon gets.
struct Data {
    /// The volume's directory, as a mount of its own that no path leads to.
    tree: OwnedFd,
    id: DataId,
    usage: OwnedFd,
}

fn same_stage(volume_id: &VolumeId, stage: &StageRecord, wish: &StageWish) -> Result<()> {
    if stage.staging_path != wish.staging_path {
        return Err(Error::StagedElsewhere {
            volume_id: volume_id.clone(),
            staged: stage.staging_path.clone(),
            wanted: wish.staging_path.clone(),
        });
    }
    if stage.access != wish.access {
        return Err(Error::StagedOtherwise {
            volume_id: volume_id.clone(),
            path: stage.staging_path.clone(),
            found: stage.access.to_string(),
            wanted: wish.access.to_string(),
        });
    }
    Ok(())
}
