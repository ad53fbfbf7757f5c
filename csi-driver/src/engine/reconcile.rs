//! What a new driver does about leftovers of an earlier one before it listens.
//!
//! It leaves alone everything that is published and served. A volume that cannot be repaired is
//! logged, and its next operation tries again.
//!
//! Invariant: no volume waits for another volume's daemon, and one limit applies to the wait for
//! all daemons together. Work that takes longer continues in the background, holding the volume's
//! lock.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::backend::VolumeBackend;
use crate::daemon::dial::{self, DialDir};
use crate::daemon::keeper::Role;
use crate::daemon::launcher::Launched;
use crate::engine::daemons::Daemons;
use crate::engine::each_volume::work_on_each;
use crate::engine::health::{Health, health, is_served};
use crate::engine::locks::Locks;
use crate::engine::provision::Provisioner;
use crate::engine::publish::Targets;
use crate::engine::snapshots::Snapshots;
use crate::engine::stage::Stages;
use crate::error::{Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::mounts;
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, LaunchKey, ProcessId};
use crate::model::records::VolumeRecord;

/// Repairs what an earlier driver left.
#[derive(Debug)]
pub(crate) struct Reconciler {
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) daemons: Arc<Daemons>,
    pub(crate) locks: Locks,
    pub(crate) stages: Arc<Stages>,
    pub(crate) targets: Arc<Targets>,
    pub(crate) provisioner: Arc<Provisioner>,
    pub(crate) snapshots: Arc<Snapshots>,
}

/// The volumes on this node, and the launches of their daemons.
struct Known<'a> {
    /// Staged or parked, or being staged.
    volumes: BTreeSet<&'a VolumeId>,
    /// Their launches, as far as the journal records them.
    launches: HashMap<LaunchKey, Option<&'a LaunchId>>,
    /// The launches that the volumes' directories record, also without the journal.
    recorded: HashMap<LaunchKey, VolumeId>,
}

impl<'a> Known<'a> {
    fn new(volumes: &'a [(VolumeId, VolumeRecord)], run_dir: &Path) -> Result<Self> {
        let staged = || volumes.iter().filter_map(|(id, record)| Some((id, record.stage_or_parked()?)));
        let recorded = dial::list(run_dir).step("list dial directories")?.into_iter().filter_map(|key| {
            let launch = DialDir::of(run_dir, &key).recorded_launch()?;
            Some((launch, key.volume_id()?))
        });
        Ok(Self {
            volumes: staged().map(|(id, _)| id).collect(),
            launches: staged().map(|(id, stage)| (stage.launch_key(id), stage.launch.as_ref())).collect(),
            recorded: recorded.collect(),
        })
    }

    /// The volume that a launch is for, or that has a directory of this name.
    fn volume_of(&self, key: &LaunchKey) -> Option<VolumeId> {
        self.recorded.get(key).cloned().or_else(|| key.volume_id())
    }
}

impl Reconciler {
    /// Waits up to `limit` for all daemons that it ends, together. Fails only if the machine's
    /// state cannot be read. Must be called in a tokio context.
    pub(crate) fn reconcile(self: &Arc<Self>, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        self.stages.adopt_takeovers()?;
        let volumes = self.journal.list();
        // First, so that no kubelet starts the pod of an unknown launch.
        self.remove_unknown_launches(&volumes, deadline)?;
        self.forget_unused_descriptors();
        // Asked once: otherwise every volume would wait for a pool that does not answer.
        let is_pool_there = self.backend.check_present().is_ok();
        let mut unsettled = Vec::new();
        for (volume_id, record) in volumes {
            if is_pool_there {
                self.report_if_other_data(&volume_id, &record);
            }
            if !self.is_settled(&volume_id, &record) {
                unsettled.push(volume_id);
            } else if let Err(error) = self.reconcile_volume(&volume_id) {
                tracing::warn!(%volume_id, error = chain(&error), "could not repair the volume");
            }
        }
        if !work_on_each(self, &self.locks, unsettled, deadline, "repair the volume", Self::reconcile_volume)
        {
            tracing::warn!("some volumes are still being repaired");
        }
        self.snapshots.reconcile();
        self.remove_unknown_dial_dirs()?;
        // Volumes of a pool that is away, damaged or read-only have users all the same, and every call that
        // needs the pool reports the error.
        if let Err(error) = self.backend.sweep() {
            tracing::error!(error = chain(&error), "leftovers in the pool are not removed");
        }
        Ok(())
    }

    /// What a keeper in another process holds for volumes that are not on this node. An earlier driver
    /// may have unstaged one while the keeper did not answer.
    fn forget_unused_descriptors(&self) {
        let keeper = &self.daemons.keeper;
        let forget = |volume_id: &VolumeId| {
            keeper.forget_connection(volume_id)?;
            keeper.forget(volume_id, Role::ParkedMount)
        };
        match keeper.volumes() {
            Ok(held) => {
                for volume_id in held.iter().filter(|id| self.is_unused(id)) {
                    if let Err(error) = forget(volume_id) {
                        tracing::error!(%volume_id, error = chain(&error), "the keeper still holds its descriptors");
                    }
                }
            }
            // Another program may start it later. On a node without volumes, as at its first start, it holds
            // nothing of them.
            Err(error) if error.errno() == Errno::ENOTCONN && self.journal.ids().is_empty() => {
                tracing::info!(error = chain(&error), "no keeper answers");
            }
            Err(error) if error.errno() == Errno::ENOTCONN => {
                tracing::warn!(
                    error = chain(&error),
                    "no keeper answers: a keeper that comes later keeps the descriptors of unused volumes until the \
                     driver's next start"
                );
            }
            Err(error) => tracing::error!(error = chain(&error), "the keeper does not list what it holds"),
        }
    }

    /// Neither staged nor parked. A volume whose entry cannot be read may be served.
    fn is_unused(&self, volume_id: &VolumeId) -> bool {
        let found = self.journal.find(volume_id);
        found.is_ok_and(|record| record.is_none_or(|record| record.stage_or_parked().is_none()))
    }

    fn remove_unknown_launches(&self, volumes: &[(VolumeId, VolumeRecord)], deadline: Instant) -> Result<()> {
        self.daemons.launcher.remove_leftovers().step("remove half-written launches")?;
        let known = Known::new(volumes, &self.daemons.run_dir)?;
        let mut strays = Vec::new();
        for launched in self.daemons.launcher.list().step("list launches")? {
            let key = launched.key.clone();
            match self.look_at_launch(&known, launched) {
                Ok(stray) => strays.extend(stray.map(|process| (key, process))),
                // The volume's next operation tries again; other volumes do not wait for it.
                Err(error) => {
                    tracing::error!(%key, error = chain(&error), "could not check a launch");
                }
            }
        }
        for (key, process) in strays {
            if let Err(error) = self.end_stray(&known, &key, process, deadline) {
                tracing::error!(%key, error = chain(&error), "a stray daemon could not be ended");
            }
        }
        Ok(())
    }

    /// Removes a launch that the journal does not record. Returns its process, which was killed.
    fn look_at_launch(&self, known: &Known<'_>, launched: Launched) -> Result<Option<ProcessId>> {
        let Launched { key, id } = launched;
        let volume_id = known.volume_of(&key);
        let is_unreadable = |volume_id: &VolumeId| self.journal.find(volume_id).is_err();
        // A volume with an unreadable entry may be served: it stays until the entry is repaired.
        if known.launches.get(&key) == Some(&Some(&id)) || volume_id.as_ref().is_some_and(is_unreadable) {
            self.daemons.launcher.adopt(&key).step("adopt launch")?;
            return Ok(None);
        }
        // From a lost journal, or from another driver's: pods may use the volume.
        if let Some(volume_id) = volume_id.filter(|volume_id| !known.volumes.contains(volume_id))
            && mounts::is_mounted_anywhere(&volume_id)?
        {
            tracing::error!(%volume_id, launch = ?id, "the volume is served without a journal entry: leaving it alone");
            return Ok(None);
        }
        tracing::info!(%key, launch = ?id, "removing a launch without a journal entry");
        self.daemons.launcher.remove(&id).step("remove launch")?;
        match id.process() {
            Some(process) => process.kill().map(|()| Some(process)).step("end daemon"),
            None => Ok(None),
        }
    }

    fn end_stray(
        &self,
        known: &Known<'_>,
        key: &LaunchKey,
        process: ProcessId,
        deadline: Instant,
    ) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if !process.is_gone_within(left).step("end daemon")? {
            // In an uninterruptible wait; other volumes do not wait for it.
            tracing::error!(%key, pid = process.pid, "the daemon is still running after SIGKILL");
            return Ok(());
        }
        // A process names its launch in its arguments, and a compromised daemon may name another
        // one: so a launch in the journal is not touched here.
        if known.launches.contains_key(key) {
            return Ok(());
        }
        self.daemons.launcher.clear(key).step("clear launch")
    }

    /// Whether the volume needs no wait: its daemon, if it has one, serves it and must only be
    /// watched.
    fn is_settled(&self, volume_id: &VolumeId, record: &VolumeRecord) -> bool {
        let is_serving = |stage| matches!(health(volume_id, stage), Ok(Health::Serving(_)));
        record.parked.is_none()
            && record.targets.values().all(|target| target.published)
            && record.stage.as_ref().is_none_or(is_serving)
    }

    fn reconcile_volume(&self, volume_id: &VolumeId) -> Result<()> {
        let Some(mut record) = self.journal.find(volume_id)? else { return Ok(()) };
        // Its connection ended with the driver that held it.
        self.stages.end_parked(volume_id, &mut record)?;
        self.stages.end_given_up(volume_id, &record)?;
        let retracted = match self.stages.take_over(volume_id, &mut record) {
            Ok(_) => self.retract_cut_short(volume_id, &mut record),
            Err(error) => {
                // Without a daemon, the end of a target in use would end the volume for all of its pods.
                tracing::error!(%volume_id, error = chain(&error), "no other daemon has taken the volume over");
                Ok(())
            }
        };
        if let Some(stage) = record.stage.clone() {
            match health(volume_id, &stage)? {
                Health::Serving(_) => self.adopt(volume_id, &record)?,
                Health::Displaced(served) => {
                    self.adopt(volume_id, &record)?;
                    // Its pods are served all the same; the next stage or publish tries again.
                    self.stages.put_in_place(volume_id, &stage, served.as_deref())?;
                }
                // Served for processes that have it open or see it in their own mount namespace.
                Health::Unmounted if is_served(&stage)? && !record.targets.is_empty() => {
                    tracing::warn!(%volume_id, "the volume is served but mounted nowhere");
                    self.adopt(volume_id, &record)?;
                }
                // Its pods get ENOTCONN already; the next stage, publish or unstage repairs it.
                Health::DaemonDead => tracing::error!(%volume_id, "the volume's daemon is dead"),
                Health::HalfDone | Health::Unmounted => {
                    self.stages.tear_down_broken(volume_id, &mut record)?;
                }
            }
        }
        // Last: also where a target stays, the volume has a daemon that is watched.
        retracted?;
        // Without all of its source it was never answered. A repeated CreateVolume admits it anew; if the
        // claim is gone, none comes.
        if record.deleting || !record.filled { self.provisioner.finish_deletion(volume_id) } else { Ok(()) }
    }

    /// Removes targets of which a driver was killed while it published them.
    fn retract_cut_short(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        let is_cut_short = record.targets.iter().filter(|(_, target)| !target.published);
        let cut_short: Vec<_> = is_cut_short.map(|(path, _)| path.clone()).collect();
        let retract = |target: &PathBuf| self.targets.retract(volume_id, record, target);
        // All of them, also after one that stays.
        cut_short.iter().map(retract).fold(Ok(()), Result::and)
    }

    /// Reports a running daemon that serves other data than the pool has now. Its pods keep it; no
    /// stage or publish uses it any more.
    fn report_if_other_data(&self, volume_id: &VolumeId, record: &VolumeRecord) {
        let served = record.stage.as_ref().filter(|stage| is_served(stage).unwrap_or(true));
        if let Some(Err(error)) = served.map(|stage| self.backend.check_serves(volume_id, stage.data)) {
            tracing::error!(%volume_id, error = chain(&error), "adopted for its pods alone");
        }
    }

    fn adopt(&self, volume_id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        if let Some(stage) = &record.stage {
            self.daemons.adopt_launch(volume_id, stage);
        }
        self.daemons.copy_connection(volume_id);
        self.stages.stand_by_again(volume_id, record);
        match record.stage.as_ref().and_then(|stage| stage.serving) {
            Some(serving) => self.daemons.watch(volume_id, serving),
            None => Ok(()),
        }
    }

    fn remove_unknown_dial_dirs(&self) -> Result<()> {
        let volumes = self.journal.list();
        let known = Known::new(&volumes, &self.daemons.run_dir)?;
        for key in dial::list(&self.daemons.run_dir).step("list dial directories")? {
            if !known.launches.contains_key(&key) && !self.may_be_in_use(&known, &key)? {
                // A daemon that waited for a volume has ended with its driver.
                let cleared = self.daemons.launcher.clear(&key).step("clear launch");
                let removed = cleared
                    .and_then(|()| self.daemons.launch_dir(&key).remove().step("remove dial directory"));
                if let Err(error) = removed {
                    tracing::error!(?key, error = chain(&error), "what a daemon left is not removed");
                }
            }
        }
        Ok(())
    }

    /// Whether a directory of sockets is a volume's that is staged, may be, or is mounted.
    fn may_be_in_use(&self, known: &Known<'_>, key: &LaunchKey) -> Result<bool> {
        let Some(volume_id) = known.volume_of(key) else { return Ok(false) };
        let is_unreadable = self.journal.find(&volume_id).is_err();
        Ok(is_unreadable || known.volumes.contains(&volume_id) || mounts::is_mounted_anywhere(&volume_id)?)
    }
}
