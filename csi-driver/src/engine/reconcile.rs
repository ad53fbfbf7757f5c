//! What a new driver does about what an earlier one left, before it listens.
//!
//! Nothing that is published and served is touched. A volume that cannot be put
//! in order is logged, and its next operation tries again.
//!
//! Invariant: no volume waits for the daemon of another one, and one limit holds for the
//! driver's wait for all daemons together. What takes longer goes on beside its calls,
//! with the volume's lock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::VolumeBackend;
use crate::daemon::dial;
use crate::daemon::launcher::Launched;
use crate::engine::daemons::Daemons;
use crate::engine::health::{Health, health, is_served};
use crate::engine::locks::Locks;
use crate::engine::provision::Provisioner;
use crate::engine::publish::Targets;
use crate::engine::side_by_side::work_on_each;
use crate::engine::snapshots::Snapshots;
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::mounts;
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, ProcessId};
use crate::model::records::VolumeRecord;

/// Puts in order what an earlier driver left.
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

impl Reconciler {
    /// Waits `limit` for all the daemons together that it ends. Needs the runtime's context.
    /// Fails only where the machine cannot be looked at.
    pub(crate) fn reconcile(self: &Arc<Self>, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        let volumes = self.journal.list();
        // First, so that no kubelet starts the pod of a launch that is not awaited.
        self.remove_unknown_launches(&volumes, deadline)?;
        // A pool that does not answer is waited for once, and not by every volume.
        let is_pool_there = self.backend.check_present().is_ok();
        let mut unsettled = Vec::new();
        for (volume_id, record) in volumes {
            if is_pool_there {
                self.say_if_astray(&volume_id, &record);
            }
            if !self.is_settled(&volume_id, &record) {
                unsettled.push(volume_id);
            } else if let Err(error) = self.reconcile_volume(&volume_id) {
                tracing::warn!(%volume_id, error = chain(&error), "could not be put in order");
            }
        }
        if !work_on_each(self, &self.locks, unsettled, deadline, Self::reconcile_volume) {
            tracing::warn!("some volumes are still being put in order");
        }
        self.snapshots.reconcile();
        self.remove_unknown_dial_dirs()?;
        match self.backend.sweep() {
            // Each call that needs the pool says so, until it is back.
            Err(away @ Error::PoolAway { .. }) => {
                tracing::error!(error = chain(&away), "not swept");
                Ok(())
            }
            swept => swept,
        }
    }

    fn remove_unknown_launches(&self, volumes: &[(VolumeId, VolumeRecord)], deadline: Instant) -> Result<()> {
        // What is staged, or being staged, with its launch as far as the journal had come.
        let known: HashMap<&VolumeId, Option<&LaunchId>> = volumes
            .iter()
            .filter_map(|(id, record)| {
                let parked = record.parked.as_ref().map(|parked| &parked.stage);
                Some((id, record.stage.as_ref().or(parked)?.launch.as_ref()))
            })
            .collect();
        let mut strays = Vec::new();
        for launched in self.daemons.launcher.list().step("list launches")? {
            let volume_id = launched.volume_id.clone();
            match self.look_at_launch(&known, launched) {
                Ok(stray) => strays.extend(stray.map(|process| (volume_id, process))),
                // Its volume's next operation tries again; other volumes do not wait for that.
                Err(error) => {
                    tracing::error!(%volume_id, error = chain(&error), "a launch could not be put in order");
                }
            }
        }
        for (volume_id, process) in strays {
            if let Err(error) = self.end_stray(&known, &volume_id, process, deadline) {
                tracing::error!(%volume_id, error = chain(&error), "a stray daemon could not be ended");
            }
        }
        Ok(())
    }

    /// Takes back a launch that the journal does not know; its process, which was killed.
    fn look_at_launch(
        &self,
        known: &HashMap<&VolumeId, Option<&LaunchId>>,
        launched: Launched,
    ) -> Result<Option<ProcessId>> {
        let Launched { volume_id, id } = launched;
        // One whose entry cannot be read may be serving: it stays until the entry is mended.
        if known.get(&volume_id) == Some(&Some(&id)) || self.journal.find(&volume_id).is_err() {
            self.daemons.launcher.adopt(&volume_id).step("adopt launch")?;
            return Ok(None);
        }
        // Of a journal that was lost, or is another one: pods may use it.
        if !known.contains_key(&volume_id) && mounts::is_mounted_anywhere(&volume_id)? {
            tracing::error!(%volume_id, launch = ?id, "the journal does not know who serves this volume: it is left alone");
            return Ok(None);
        }
        tracing::info!(%volume_id, launch = ?id, "removing a launch that the journal does not know");
        self.daemons.launcher.remove(&id).step("remove launch")?;
        match id.process() {
            Some(process) => process.kill().map(|()| Some(process)).step("end daemon"),
            None => Ok(None),
        }
    }

    fn end_stray(
        &self,
        known: &HashMap<&VolumeId, Option<&LaunchId>>,
        volume_id: &VolumeId,
        process: ProcessId,
        deadline: Instant,
    ) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if !process.is_gone_within(left).step("end daemon")? {
            // In a wait that nothing interrupts; other volumes do not wait for it.
            tracing::error!(%volume_id, pid = process.pid, "lives on after SIGKILL");
            return Ok(());
        }
        // Which volume a process serves it says itself, by its arguments, and a daemon that was
        // taken over may name another one: what the journal knows of a volume is left alone here.
        if known.contains_key(volume_id) {
            return Ok(());
        }
        self.daemons.launcher.clear(volume_id).step("clear launch")
    }

    /// Whether its daemon, if it has one, serves it and is only to be watched. Anything
    /// else may have to wait for the daemon.
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
        let cut_short: Vec<_> =
            record.targets.iter().filter(|(_, t)| !t.published).map(|(path, _)| path.clone()).collect();
        for target in cut_short {
            self.targets.retract(volume_id, &mut record, &target)?;
        }
        if let Some(stage) = record.stage.clone() {
            match health(volume_id, &stage)? {
                Health::Serving(_) => self.adopt(volume_id, &record)?,
                Health::Displaced(served) => {
                    self.adopt(volume_id, &record)?;
                    // Its pods are served all the same; the next stage or publish tries again.
                    self.stages.put_in_place(volume_id, &stage, served.as_deref())?;
                }
                // Whoever has it open, or in a mount namespace of its own, is served.
                Health::Unmounted if is_served(&stage)? && !record.targets.is_empty() => {
                    tracing::warn!(%volume_id, "the volume is served, and mounted nowhere any more");
                    self.adopt(volume_id, &record)?;
                }
                // Its pods have ENOTCONN already; the next stage, publish or unstage clears it.
                Health::DaemonDead => tracing::error!(%volume_id, "the volume's daemon is dead"),
                Health::HalfDone | Health::Unmounted => self.stages.tear_down(volume_id, &mut record)?,
            }
        }
        if record.deleting { self.provisioner.finish_deletion(volume_id) } else { Ok(()) }
    }

    /// Whose daemon lives, and serves what the pool had once. It is left to its pods; no
    /// stage and no publish gets it any more.
    fn say_if_astray(&self, volume_id: &VolumeId, record: &VolumeRecord) {
        let served = record.stage.as_ref().filter(|stage| is_served(stage).unwrap_or(true));
        if let Some(Err(error)) = served.map(|stage| self.backend.check_serves(volume_id, stage.data)) {
            tracing::error!(%volume_id, error = chain(&error), "adopted for its pods alone");
        }
    }

    fn adopt(&self, volume_id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        match record.stage.as_ref().and_then(|stage| stage.serving) {
            Some(serving) => self.daemons.watch(volume_id, serving),
            None => Ok(()),
        }
    }

    fn remove_unknown_dial_dirs(&self) -> Result<()> {
        let known = self.journal.ids();
        for volume_id in dial::list(&self.daemons.run_dir).step("list dial directories")? {
            let is_staged = known.contains(&volume_id)
                && self
                    .journal
                    .find(&volume_id)
                    .map_or(true, |r| r.is_some_and(|r| r.stage.is_some() || r.parked.is_some()));
            if !is_staged && !mounts::is_mounted_anywhere(&volume_id)? {
                self.daemons.dial(&volume_id).remove().step("remove dial directory")?;
            }
        }
        Ok(())
    }
}
