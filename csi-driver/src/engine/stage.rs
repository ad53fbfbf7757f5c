//! Staging: one FUSE mount and one daemon for each volume on this node.
//!
//! A stage has these steps, each journaled before it is done: begun, mounted, dial socket,
//! launched, handed over, serving. [`Stages::tear_down`] undoes any prefix of them: for Unstage,
//! after a failed stage, and after a kill. A volume that `park` keeps for its next stage skips
//! them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use linux::mountinfo::MountEntry;
use proto::handover::{self, Assignment, Role};

use crate::backend::VolumeBackend;
use crate::engine::daemons::{Daemons, Start};
use crate::engine::deaths::Deaths;
use crate::engine::health::{Health, health, is_served};
use crate::engine::locks::Locks;
use crate::engine::mount_point;
use crate::engine::parking::Parking;
use crate::engine::places::{place_of_stage, place_of_target};
use crate::error::{Error, Result, Step};
use crate::journal::Journal;
use crate::kernel::bounded::OneEach;
use crate::kernel::host_path::{HostPath, HostPaths};
use crate::kernel::mounts::{self, WhenBusy};
use crate::kernel::place::Place;
use crate::kernel::release::{self, FIRST_WITH_RESEND};
use crate::model::capability::{Access, MountFlag, Parsed};
use crate::model::counts::Counts;
use crate::model::ids::VolumeId;
use crate::model::policies::{CapacityPolicy, DataPath};
use crate::model::records::{Serving, StageRecord, StageSpec, Timestamp, VolumeRecord};
use crate::model::settings::LaunchSettings;

/// Stages, parks and unstages volumes, with their daemons.
#[derive(Debug)]
pub(crate) struct Stages {
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) paths: Arc<HostPaths>,
    pub(crate) daemons: Arc<Daemons>,
    pub(crate) locks: Locks,
    pub(crate) flushes: Arc<OneEach<VolumeId>>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) parking: Parking,
    pub(crate) deaths: Deaths,
}

impl Stages {
    /// NodeStageVolume.
    pub(crate) fn stage(&self, volume_id: &VolumeId, staging_path: &Path, how: &Parsed) -> Result<()> {
        let mut record = self.journal.get(volume_id)?;
        record.check_usable(volume_id)?;
        let mut settings = LaunchSettings::of(&record.parameters, record.policies(), &how.overrides);
        settings.data_path = data_path_of_stage(settings.data_path, how.access);
        let spec = StageSpec { staging_path: staging_path.to_owned(), access: how.access, settings };
        if record.stage.is_none()
            && let Some((what, reason)) = self.lacks(&spec.settings)?
        {
            return Err(Error::CannotStage { volume_id: volume_id.clone(), what, reason });
        }
        let differs_in_group = |stage: &StageRecord| {
            let access = Access { group: stage.access.group, ..spec.access };
            stage.staging_path == spec.staging_path && stage.access == access
        };
        let group = if record.stage.as_ref().is_some_and(differs_in_group) {
            self.group_of_stage(volume_id, &mut record, spec.access)?
        } else {
            spec.access.group
        };
        let spec = StageSpec { access: Access { group, ..spec.access }, ..spec };
        self.ensure_staged(volume_id, &mut record, &spec).map(drop).map_err(|error| match error {
            // The stage exists all the same and must be undone.
            Error::ServesAnother { .. } => Error::uncleared(volume_id, error),
            other => other,
        })
    }

    /// What of these settings cannot be here, and why.
    fn lacks(&self, settings: &LaunchSettings) -> Result<Option<(&'static str, &'static str)>> {
        let has_keeper = self.daemons.keeper.keeps_connections();
        if settings.data_path == DataPath::Passthrough {
            if !has_keeper {
                let reason = "the driver runs without a keeper, which registers the files";
                return Ok(Some(("dataPath passthrough", reason)));
            }
            if !self.backend.has_passthrough()? {
                let reason =
                    "the kernel has no FUSE_PASSTHROUGH (CONFIG_FUSE_PASSTHROUGH, Linux 6.9 or newer)";
                return Ok(Some(("dataPath passthrough", reason)));
            }
        }
        if settings.writeback_cache && !(has_keeper && release::is_at_least(FIRST_WITH_RESEND)) {
            let reason =
                "without a keeper and Linux 6.9, what the kernel has not sent is lost with the daemon";
            return Ok(Some(("writebackCache", reason)));
        }
        Ok(None)
    }

    /// The staging path that a call means. The path in the journal stays valid: it may date from an
    /// earlier `--kubelet-dir`.
    pub(crate) fn staging_path(&self, volume_id: &VolumeId, path: &HostPath) -> Result<PathBuf> {
        let record = self.journal.get(volume_id)?;
        let resolved = self.paths.resolve_anew(path, |path| is_staged_at(&record, path));
        let is_known = is_staged_at(&record, path.as_asked());
        resolved.map_err(|e| if is_known { Error::uncleared(volume_id, e) } else { e })
    }

    /// NodeUnstageVolume. A volume that is not staged is a success.
    pub(crate) fn unstage(self: &Arc<Self>, volume_id: &VolumeId, path: &HostPath) -> Result<()> {
        let mut record = self.journal.find(volume_id)?;
        let is_known = |path: &Path| record.as_ref().is_some_and(|record| is_staged_at(record, path));
        let staging_path = self.paths.find(path, is_known)?;
        if let Some(record) = &mut record {
            self.end_released(volume_id, record)?;
        }
        let Some(path) = staging_path else { return Ok(()) };
        if record.as_ref().is_some_and(|record| record.targets.contains_key(&path)) {
            // Published there, and not staged.
            return Ok(());
        }
        let Some(mut record) = record.filter(|record| is_staged_at(record, &path)) else {
            let Some(place) = self.paths.place("staging_target_path", &path)? else { return Ok(()) };
            // Even if the journal lost the entry, mountinfo shows whose mount it is.
            return mounts::unmount_own(&place, volume_id, WhenBusy::Refuse);
        };
        // kubelet never unstages a published volume. It would end a pod's I/O.
        self.forget_unmounted_targets(volume_id, &mut record)?;
        if let Some(path) = record.targets.keys().next() {
            return Err(Error::StillPublished { volume_id: volume_id.clone(), path: path.clone() });
        }
        record.restage = None;
        if record.stage.as_ref().is_none_or(|stage| stage.staging_path != path) {
            // A publish has taken it down and could not stage it anew.
            return self.journal.put(volume_id, &record);
        }
        self.locks.check_not_copied(volume_id)?;
        if self.park(volume_id, &mut record)? {
            return Ok(());
        }
        self.tear_down(volume_id, &mut record)
    }

    /// Drops targets that another program or a reboot has unmounted.
    pub(crate) fn forget_unmounted_targets(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
    ) -> Result<()> {
        let mut unmounted = Vec::new();
        for target in record.targets.keys() {
            // A mount that is covered by another one still belongs to its pod.
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

    /// Whether the target is mounted for the journal's purposes, or may be: if a pod has renamed a
    /// parent directory, mountinfo shows another path.
    fn is_mounted_at(&self, volume_id: &VolumeId, record: &VolumeRecord, target: &Path) -> Result<bool> {
        match place_of_target(&self.paths, volume_id, record, target) {
            Ok(Some(place)) => match mounts::find_at(&place, volume_id) {
                Err(Error::ForeignMount { .. }) => Ok(false),
                found => Ok(found?.is_some()),
            },
            Ok(None) => Ok(false),
            Err(Error::PathChanged { .. }) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Returns a healthy mount of the volume: the existing one or a new one.
    pub(crate) fn ensure_staged(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &StageSpec,
    ) -> Result<MountEntry> {
        self.take_over(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))?;
        if let Some(stage) = record.stage.clone() {
            match health(volume_id, &stage)? {
                Health::Serving(mount) => {
                    same_stage(volume_id, &stage, spec)?;
                    self.daemons.watch_if_unwatched(volume_id, &stage)?;
                    return self.backend.check_serves(volume_id, stage.data).map(|()| *mount);
                }
                Health::Displaced(mount) => {
                    same_stage(volume_id, &stage, spec)?;
                    self.daemons.watch_if_unwatched(volume_id, &stage)?;
                    self.backend.check_serves(volume_id, stage.data)?;
                    return self.put_in_place(volume_id, &stage, mount.as_deref());
                }
                broken @ (Health::HalfDone | Health::Unmounted | Health::DaemonDead) => {
                    tracing::info!(%volume_id, state = ?broken, "staging anew");
                    self.tear_down_broken(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))?;
                }
            }
        }
        if let Some(mount) = self.unpark(volume_id, record, spec)? {
            return Ok(mount);
        }
        self.stage_anew(volume_id, record, spec)
    }

    fn stage_anew(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &StageSpec,
    ) -> Result<MountEntry> {
        // Its writers are not held back: there was no daemon when the copy began.
        self.locks.check_not_copied(volume_id)?;
        let place = self.empty_staging_path(&spec.staging_path, volume_id)?;
        record.stage = Some(StageRecord::begin(spec.clone()));
        self.journal.put(volume_id, record)?;
        let restage = record.restage.clone();
        self.try_stage(volume_id, record, spec, &place).map_err(|cause| {
            record.restage = restage;
            self.undo_stage(volume_id, record, &place, cause)
        })
    }

    /// [`Self::tear_down`] of a stage that failed with `cause`, at the place where it began.
    pub(crate) fn undo_stage(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        place: &Place,
        cause: Error,
    ) -> Error {
        Error::rolled_back(cause, self.tear_down_at(volume_id, record, Some(place)))
    }

    /// CSI spec: the caller has created the staging path, a directory; we mount on it.
    pub(crate) fn empty_staging_path(&self, path: &Path, volume_id: &VolumeId) -> Result<Place> {
        let field = "staging_target_path";
        let place = self.paths.place(field, path)?.ok_or_else(|| mount_point::parent_missing(field, path))?;
        // A mount of the volume without a journal entry, for example after the journal was lost.
        mounts::unmount(&place, volume_id, WhenBusy::AbortNow)?;
        mount_point::close(&place)?;
        Ok(place)
    }

    fn try_stage(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &StageSpec,
        place: &Place,
    ) -> Result<MountEntry> {
        let span = tracing::info_span!("stage.mount").entered();
        let assigned = self.backend.assign(volume_id, record.allowance())?;
        for (_, directory) in assigned.descriptors.iter().filter(|(role, _)| *role == Role::Directory) {
            mounts::set_access_times(directory, spec.access)?;
        }
        if let Some(gid) = spec.access.group.filter(|_| !spec.access.read_only) {
            // The volume has no other user yet.
            self.backend.give_group(volume_id, gid)?;
        }
        let fuse_device = linux::mount::open_fuse_device().step("open FUSE connection")?;
        let mount = mounts::mount(&fuse_device, volume_id, place, spec.access)?;
        drop(span);

        let assignment = self.assignment(record, spec.access, &spec.settings);
        let data_id = assigned.id;
        let state_table = self.daemons.state_table(&spec.settings)?;
        let settings = &spec.settings;
        let wants_successors = state_table.is_some();
        let program = None;
        let start = Start { volume_id, settings, assignment, fuse_device, assigned, state_table, program };
        let keeper_socket = self.daemons.keeper_socket(&start)?;
        let served = self.daemons.start(start, keeper_socket, None, |key, launch, daemon| {
            self.update_stage(volume_id, record, |stage| {
                (stage.launch_key, stage.launch) = (Some(key.clone()), Some(launch));
                stage.handed_to = daemon;
                stage.data = Some(data_id);
            })
        })?;
        let is_sole_holder = wants_successors && !served.can_be_continued;
        if is_sole_holder {
            tracing::warn!(%volume_id, "no keeper holds the volume's connection, since this kernel is older than Linux 6.9: if its daemon ends, its pods get ENOTCONN");
        }
        let since = Some(Timestamp::now().seconds);
        let serving = Serving { connection_minor: mount.minor, daemon: served.daemon, since, is_sole_holder };
        record.restage = None;
        self.update_stage(volume_id, record, |stage| stage.serve(serving))?;
        tracing::info!(pid = served.daemon.pid, max_write_bytes = served.max_write_bytes, "served");
        self.daemons.stand_by(volume_id, &served.pidfd);
        self.daemons.watch.start(volume_id, served.daemon, served.pidfd);
        Ok(mount)
    }

    /// What a daemon of the volume gets, without the backend's part.
    pub(crate) fn assignment(
        &self,
        record: &VolumeRecord,
        access: Access,
        settings: &LaunchSettings,
    ) -> Assignment {
        let limits = self.backend.limits(record.capacity_bytes);
        Assignment {
            volume_name: record.name.as_str().to_owned(),
            capacity_bytes: limits.bytes,
            read_only: access.read_only,
            threads: settings.threads,
            inode_limit: limits.inodes,
            known_inode_limit: settings.known_inodes(),
            data_path: wire_data_path(settings.data_path).into(),
            capacity: wire_capacity(settings.capacity).into(),
            changed_from_outside: settings.changed_from_outside,
            writeback_cache: settings.writeback_cache,
            ..Assignment::default()
        }
    }

    /// Mounts a volume that is served elsewhere at its staging path again. Its daemon and its pods
    /// do not notice.
    pub(crate) fn put_in_place(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        served: Option<&MountEntry>,
    ) -> Result<MountEntry> {
        let path = &stage.staging_path;
        let hidden = || Error::unusable("staging_target_path", path, "something is mounted on the volume");
        let served = served.ok_or_else(hidden)?;
        tracing::info!(%volume_id, path = %path.display(), "another program unmounted the volume: mounted again");
        let field = "staging_target_path";
        let place = self.paths.place(field, path)?.ok_or_else(|| mount_point::parent_missing(field, path))?;
        // A mount by another program is an error, and stays.
        match mounts::find_at(&place, volume_id)? {
            // A pod had renamed a parent directory and has renamed it back.
            Some(mount) if mount.same_root(served) => return Ok(mount),
            Some(_) => return Err(Error::unusable(field, path, "an old mount of the volume is there")),
            None => mount_point::close(&place)?,
        }
        let tree = mounts::copy(served, "mount volume again")?;
        place.attach(&tree, "mount volume again")?;
        // The copy has the target's flags.
        let remounted = linux::mount::remount_bind_at(&tree, path, mounts::flags(stage.access));
        drop(tree);
        let seen = remounted.step("mount volume again").and_then(|()| mounts::find_at(&place, volume_id));
        let cause = match seen {
            Ok(Some(mount)) if mount.same_root(served) => return Ok(mount),
            Ok(_) => Error::unusable(field, path, "a directory of the volume came to the place of its root"),
            Err(cause) => cause,
        };
        Err(Error::rolled_back(cause, mounts::unmount_own(&place, volume_id, WhenBusy::Hide)))
    }

    pub(crate) fn update_stage(
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

    /// Removes mount, launch, daemon, dial directory and journal entries, as far as they exist. May
    /// be repeated after any failure.
    pub(crate) fn tear_down(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        let Some(stage) = &record.stage else { return Ok(()) };
        let place = place_of_stage(&self.paths, volume_id, stage)?;
        self.tear_down_at(volume_id, record, place.as_ref())
    }

    /// [`Self::tear_down`] of a stage that does not serve or is to change: the journal keeps what to
    /// stage anew.
    pub(crate) fn tear_down_broken(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        record.restage = record.answered_stage();
        self.tear_down(volume_id, record)
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
        self.journal.put(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))
    }

    /// [`Self::tear_down`] without the journal. Without a `place`, nothing is mounted there.
    pub(crate) fn take_away(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        place: Option<&Place>,
    ) -> Result<()> {
        self.daemons.watch.stop(volume_id);
        let is_served = is_served(stage)?;
        let when_busy = if is_served { WhenBusy::Abort } else { WhenBusy::AbortNow };
        let unmounted = match place.map_or(Ok(()), |place| mounts::unmount(place, volume_id, when_busy)) {
            // Nothing of the volume's is mounted below it.
            Err(error @ Error::ForeignMount { .. }) => mounts::is_mounted(&stage.staging_path, volume_id)
                .and_then(|is_mounted| if is_mounted { Err(error) } else { Ok(()) }),
            outcome => outcome,
        };
        if let Err(error) = unmounted {
            // Its daemon goes on serving.
            self.daemons.watch_if_unwatched(volume_id, stage)?;
            return Err(error);
        }
        // A daemon that never had the connection has nothing to finish.
        let grace =
            if is_served { Duration::from_secs(stage.settings.grace_seconds.into()) } else { Duration::ZERO };
        self.daemons.end(volume_id, stage, grace)
    }
}

/// With the mount option `sync`, the daemon answers writes of every volume: the kernel synchronises no write that it
/// passes through, unless the file was opened so (fs/fuse/passthrough.c, `fuse_passthrough_write_iter`).
fn data_path_of_stage(data_path: DataPath, access: Access) -> DataPath {
    if access.flags.contains(MountFlag::Sync) { DataPath::Daemon } else { data_path }
}

fn wire_data_path(data_path: DataPath) -> handover::DataPath {
    match data_path {
        DataPath::Daemon => handover::DataPath::Daemon,
        DataPath::Passthrough => handover::DataPath::Passthrough,
    }
}

fn wire_capacity(policy: CapacityPolicy) -> handover::Capacity {
    match policy {
        CapacityPolicy::Daemon => handover::Capacity::Daemon,
        CapacityPolicy::Kernel => handover::Capacity::Kernel,
        CapacityPolicy::None => handover::Capacity::None,
    }
}

/// Whether the volume has a stage there, or had one that the next publish is to stage anew.
pub(crate) fn is_staged_at(record: &VolumeRecord, path: &Path) -> bool {
    let stage = record.stage.iter().map(|stage| &stage.staging_path);
    stage.chain(record.restage.iter().map(|stage| &stage.staging_path)).any(|staged| staged == path)
}

fn same_stage(volume_id: &VolumeId, stage: &StageRecord, spec: &StageSpec) -> Result<()> {
    if stage.staging_path != spec.staging_path {
        return Err(Error::StagedElsewhere {
            volume_id: volume_id.clone(),
            staged: stage.staging_path.clone(),
            wanted: spec.staging_path.clone(),
        });
    }
    if stage.access != spec.access {
        return Err(Error::StagedOtherwise {
            volume_id: volume_id.clone(),
            path: stage.staging_path.clone(),
            found: stage.access.to_string(),
            wanted: spec.access.to_string(),
        });
    }
    Ok(())
}
