//! Parking: a volume's daemon waits on this node for the next user, if the volume's class or its
//! mount options ask for it (`mountPodDeleteDelaySeconds`).
//!
//! A parked volume is mounted nowhere. The driver holds a detached mount of it, and with it the
//! FUSE connection. The next stage attaches that mount at its own path. When the mount is closed,
//! by the driver or by the driver's end, the daemon sees an unmount and ends as usual.
//!
//! Invariant: a volume is staged or parked, never both. A parked volume is usable only while a
//! driver holds its mount. If the journal records a parked volume and no driver holds its mount,
//! the first operation that finds it ends it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mountinfo::MountEntry;

use crate::daemon::watch;
use crate::engine::each_volume::work_on_each;
use crate::engine::hang::flush;
use crate::engine::health::{Health, health};
use crate::engine::locks::Lock;
use crate::engine::places::place_of_stage;
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::kernel::mounts::{self, WhenBusy};
use crate::kernel::place::Place;
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{ParkedRecord, Serving, StageRecord, StageSpec, Timestamp, VolumeRecord};

impl Stages {
    /// The end of NodeUnstageVolume for a volume whose daemon may wait. False for any other volume;
    /// then nothing was changed.
    pub(crate) fn park(self: &Arc<Self>, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<bool> {
        let Some((stage, serving)) = self.parkable(volume_id, record)? else { return Ok(false) };
        let (mount, pidfd) = match self.detached(volume_id, &stage.staging_path, serving) {
            Ok((mount, Some(pidfd))) => (mount, pidfd),
            Ok((_, None)) => return Ok(false),
            Err(error) => {
                tracing::warn!(%volume_id, error = chain(&error), "the volume is not parked");
                return Ok(false);
            }
        };
        let delay = Duration::from_secs(stage.settings.delete_delay_seconds.into());
        let Some(place) = place_of_stage(&self.paths, volume_id, &stage)? else { return Ok(false) };
        record.stage = None;
        record.parked = Some(ParkedRecord { stage, until: Timestamp::now().after(delay) });
        self.journal.put(volume_id, record)?;
        if let Err(error) = mounts::unmount(&place, volume_id, WhenBusy::Refuse) {
            tracing::info!(%volume_id, error = chain(&error), "the volume is still in use: not parked");
            drop(mount);
            return self.end_parked(volume_id, record).map(|()| true);
        }
        self.daemons.watch.stop(volume_id);
        let ending = tokio::spawn(end_in_time(self.clone(), volume_id.clone(), pidfd, delay)).abort_handle();
        if !self.parking.hold(volume_id, mount, ending.clone()) {
            ending.abort();
            return self.end_parked(volume_id, record).map(|()| true);
        }
        tracing::info!(%volume_id, pid = serving.daemon.pid, seconds = delay.as_secs(), "parked");
        Ok(true)
    }

    /// The stage, if its daemon may wait and is healthy.
    fn parkable(
        &self,
        volume_id: &VolumeId,
        record: &VolumeRecord,
    ) -> Result<Option<(StageRecord, Serving)>> {
        let is_asked = |stage: &&StageRecord| stage.settings.delete_delay_seconds > 0 && stage.data.is_some();
        let Some(stage) = record.stage.as_ref().filter(is_asked) else { return Ok(None) };
        match (stage.serving, health(volume_id, stage)?) {
            (Some(serving), Health::Serving(_)) => Ok(Some((stage.clone(), serving))),
            _ => Ok(None),
        }
    }

    /// Returns a detached mount of what is mounted at `path`, and the daemon's pidfd.
    fn detached(
        &self,
        volume_id: &VolumeId,
        path: &Path,
        serving: Serving,
    ) -> Result<(OwnedFd, Option<OwnedFd>)> {
        let (mounted, what) = (path.to_owned(), format!("syncfs of volume {volume_id}"));
        let (minor, asking) = (serving.connection_minor, self.daemons.hangs.asking(volume_id));
        let detach = move || {
            let _ours = asking;
            // Unlike umount(2), detaching does not flush writes through mappings, so flush them
            // first.
            flush(&mounted, minor)
        };
        let mount = self.flushes.within(volume_id, what, limits::SYNCFS, detach)?.step("park volume")?;
        Ok((mount, serving.daemon.open().step("watch daemon")?))
    }

    /// Attaches the mount of a parked volume, staged according to `spec`. `None` if none is parked
    /// any more; one that does not match the spec is ended.
    pub(crate) fn unpark(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        spec: &StageSpec,
    ) -> Result<Option<MountEntry>> {
        let Some(parked) = record.parked.clone() else { return Ok(None) };
        if let Some(reason) = self.why_not(volume_id, record, &parked.stage, spec)? {
            tracing::info!(%volume_id, reason, "ending the parked daemon");
            self.locks.check_not_copied(volume_id)?;
            self.end_parked(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))?;
            return Ok(None);
        }
        let place = self.empty_staging_path(&spec.staging_path, volume_id)?;
        let stage = StageRecord {
            staging_path: spec.staging_path.clone(),
            settings: spec.settings.clone(),
            ..parked.stage
        };
        let staged = VolumeRecord { stage: Some(stage), parked: None, ..record.clone() };
        // Held until the journal has it: if the write fails, the volume stays parked.
        self.journal.put(volume_id, &staged)?;
        *record = staged;
        let attached = match self.parking.take(volume_id) {
            Some(mount) => self.attach_mount(volume_id, record, &mount, &place),
            // The driver is stopping and has closed the mount.
            None => Err(Error::ControlLost { volume_id: volume_id.clone(), what: "its stage" }),
        };
        attached.map(Some).map_err(|cause| self.undo_stage(volume_id, record, &place, cause))
    }

    /// Ends a parked volume whose mount an Unstage or a failed Stage released without ending the
    /// rest.
    pub(crate) fn end_released(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        if record.parked.is_some() && !self.parking.holds(volume_id) {
            self.end_parked(volume_id, record)?;
        }
        Ok(())
    }

    /// Why the parked daemon differs from the one that a new stage would start.
    fn why_not(
        &self,
        volume_id: &VolumeId,
        record: &VolumeRecord,
        parked: &StageRecord,
        spec: &StageSpec,
    ) -> Result<Option<&'static str>> {
        let Some(serving) = parked.serving.filter(|_| self.parking.holds(volume_id)) else {
            return Ok(Some("its connection has ended"));
        };
        if parked.access != spec.access || !parked.settings.is_same_daemon(&spec.settings) {
            return Ok(Some("another access or other settings are wanted"));
        }
        if !serving.daemon.is_alive().step("look at daemon")? {
            return Ok(Some("it has ended"));
        }
        if let Some(launch) = &parked.launch
            && !self.daemons.launcher.stands(launch).step("look at launch")?
        {
            return Ok(Some("its pod's manifest was removed"));
        }
        // As for any stage: an unavailable pool is an error, and the daemon stays parked.
        self.backend.check_present()?;
        // While the daemon holds its directory open, no other directory can have the same numbers.
        if parked.data != Some(self.backend.data_id(volume_id)?) {
            return Ok(Some("the volume's directory is another one"));
        }
        // The size may have changed while the volume was parked, and quotas may have been off. The
        // answer also shows that the daemon works.
        let limits = self.backend.expand(volume_id, record.allowance())?;
        let resized =
            self.daemons.control(volume_id, limits::CONTROL).and_then(|control| control.set_capacity(limits));
        Ok(resized.err().map(|error| {
            tracing::warn!(%volume_id, error = chain(&error), "the parked daemon does not answer");
            "it does not answer"
        }))
    }

    fn attach_mount(
        &self,
        volume_id: &VolumeId,
        record: &VolumeRecord,
        mount: &OwnedFd,
        place: &Place,
    ) -> Result<MountEntry> {
        let gone = || Error::UnknownVolume { volume_id: volume_id.to_string() };
        let stage = record.stage.as_ref().ok_or_else(gone)?;
        let seen = mounts::attach(mount, volume_id, place)?;
        match stage.serving {
            Some(serving) if seen.minor == serving.connection_minor => {
                self.daemons.watch(volume_id, serving)?;
                self.stand_by_again(volume_id, record);
                tracing::info!(pid = serving.daemon.pid, "served by the parked daemon");
                Ok(seen)
            }
            Some(_) | None => {
                let (field, path) = ("staging_target_path", &stage.staging_path);
                Err(Error::unusable(field, path, "the parked mount is not seen there"))
            }
        }
    }

    /// Ends what the journal records as parked: connection, launch, daemon, directory. A volume
    /// that is not parked is a success. May be repeated after any failure.
    pub(crate) fn end_parked(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        let Some(parked) = &record.parked else { return Ok(()) };
        self.parking.release(volume_id);
        let place = place_of_stage(&self.paths, volume_id, &parked.stage)?;
        self.take_away(volume_id, &parked.stage, place.as_ref())?;
        record.parked = None;
        self.journal.put(volume_id, record).map_err(|e| Error::uncleared(volume_id, e))?;
        drop(self.parking.take(volume_id));
        Ok(())
    }

    /// The volume's lock is held; its state may have changed since it was parked.
    fn end_if_parked(&self, volume_id: &VolumeId) -> Result<()> {
        match self.journal.find(volume_id)? {
            Some(mut record) => self.end_parked(volume_id, &mut record),
            None => Ok(()),
        }
    }

    /// Called when the driver stops, since it can no longer hold the mounts. Endings that take too
    /// long continue without it; the next driver finds them in the journal.
    pub(crate) fn end_all_parked(self: &Arc<Self>) {
        self.parking.close();
        let volumes = self.journal.list().into_iter();
        let parked = volumes.filter_map(|(volume_id, record)| record.parked.map(|_| volume_id));
        let deadline = Instant::now() + limits::LAST_CALLS;
        if !work_on_each(self, &self.locks, parked, deadline, "end the parked daemon", Self::end_if_parked) {
            tracing::warn!("some parked daemons are still ending");
        }
    }
}

/// Ends a parked volume after its delay, or when its daemon has ended. Aborted when a stage takes
/// the volume or another operation has ended it.
async fn end_in_time(stages: Arc<Stages>, volume_id: VolumeId, pidfd: OwnedFd, delay: Duration) {
    tokio::select! {
        () = tokio::time::sleep(delay) => tracing::info!(%volume_id, "the parking delay is over: ending the daemon"),
        ended = watch::ended(pidfd) => match ended {
            // Expected: the operation that released the mount is about to update the journal.
            Ok(()) if !stages.parking.holds(&volume_id) => {}
            Ok(()) => {
                stages.counts.daemon_deaths.inc();
                tracing::error!(%volume_id, "the volume's daemon ended while it was parked");
            }
            Err(error) => tracing::warn!(%volume_id, %error, "cannot watch the parked daemon"),
        },
    }
    while let Err(error) = end_in_turn(&stages, &volume_id).await {
        tracing::debug!(%volume_id, error = chain(&error), "ending the parked daemon later");
        tokio::time::sleep(limits::PARKED_RETRY).await;
    }
}

async fn end_in_turn(stages: &Arc<Stages>, volume_id: &VolumeId) -> Result<()> {
    let guard = stages.locks.hold(Lock::Volume(volume_id.as_str()))?;
    stages.locks.check_not_copied(volume_id)?;
    let (stages, volume_id) = (stages.clone(), volume_id.clone());
    let work = tokio::task::spawn_blocking(move || {
        let _guard = guard;
        stages.end_if_parked(&volume_id)
    });
    work.await.unwrap_or(Err(Error::Panicked { operation: "end of a parked volume" }))
}
