//! Snapshots, and volumes filled from snapshots or from other volumes, apart from the gRPC layer.
//!
//! A cut has these steps, each journaled before it is done: begun; writers held back (the daemon
//! lets no change through); copied into `incoming`; moved into place; writers resumed; on disk;
//! ready. A cut by reflink is not answered until it is ready; an incomplete one is repeated. A
//! blocking copy is answered while it runs; an interrupted one stays as failed until it is deleted.
//!
//! A copy holds no lock of its source, because pods come and go meanwhile. Operations that would
//! let a pod write or remove the tree check for the copy themselves ([`Locks::check_not_copied`]):
//! a first stage, Unstage, DeleteVolume, another copy.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::backend::VolumeBackend;
use crate::backend::copies::{Count, Progress};
use crate::daemon::control::{Control, PassingWrites, Paused, Quiesced};
use crate::engine::daemons::Daemons;
use crate::engine::hang::{flush, write_back};
use crate::engine::jobs::{self, Job, Jobs};
use crate::engine::locks::{Lock, Locks, VolumeGuard};
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::bounded::{OneEach, Shared};
use crate::kernel::mounts::{ConnectionMount, connection_mount};
use crate::model::counts::Counts;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::limits;
use crate::model::name::VolumeName;
use crate::model::policies::{Allowance, CapacityPolicy, DataPath};
use crate::model::records::{ParkedRecord, SnapshotPhase, SnapshotRecord, Source, Timestamp, VolumeRecord};
use crate::model::snapshot_mode::SnapshotMode;

/// The reason recorded for a copy that the driver's end interrupted.
const ENDED: &str = "the driver ended during the copy";

/// The object in which an administrator allows a copy that blocks writers.
pub(crate) const CLASS_OF_SNAPSHOTS: &str = "VolumeSnapshotClass, or for new volumes of their StorageClass";
const CLASS_OF_CLONES: &str = "new volume's StorageClass";

#[derive(Debug)]
pub(crate) struct SnapshotSpec {
    pub(crate) name: VolumeName,
    /// The id in the request; one that this driver never issued names no volume.
    pub(crate) source: String,
    pub(crate) mode: Option<SnapshotMode>,
}

/// Creates and deletes snapshots, and runs the copies that fill volumes.
#[derive(Debug)]
pub(crate) struct Snapshots {
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) locks: Locks,
    pub(crate) jobs: Jobs,
    pub(crate) stages: Arc<Stages>,
    pub(crate) daemons: Arc<Daemons>,
    pub(crate) flushes: Arc<OneEach<VolumeId>>,
    /// One at a time, which all wait for: the key of a volume would keep other work off it.
    pub(crate) pool_syncs: Shared<(), ()>,
    pub(crate) counts: Arc<Counts>,
}

impl Snapshots {
    /// CreateSnapshot. The caller holds the snapshot's lock.
    pub(crate) fn create_snapshot(
        self: &Arc<Self>,
        id: &SnapshotId,
        spec: SnapshotSpec,
    ) -> Result<SnapshotRecord> {
        if let Some(found) = self.journal.snapshots().find(id)? {
            if found.source.as_str() != spec.source {
                let name = found.name.as_str().to_owned();
                return Err(Error::SnapshotOtherwise { name, found: found.source, wanted: spec.source });
            }
            if !found.deleting && found.phase != SnapshotPhase::Begun {
                return found.check_not_failed(id).map(|()| found);
            }
            self.finish_snapshot_deletion(id).map_err(|e| Error::uncleared_snapshot(id, e))?;
        }
        let source = self.known_volume(&spec.source)?;
        let until_cut_or_begun = self.locks.hold(Lock::Volume(source.as_str()))?;
        let mut volume = self.journal.get(&source)?;
        volume.check_usable(&source)?;
        self.locks.check_not_copied(&source)?;
        let mode =
            self.backend.snapshot_mode(spec.mode.or(volume.parameters.snapshot_mode), CLASS_OF_SNAPSHOTS)?;
        let control = self.serving(&source, &mut volume, None)?;
        let used = self.used_now(&source, &volume, control.as_ref())?;
        let record = SnapshotRecord {
            name: spec.name,
            source: source.clone(),
            source_capacity_bytes: volume.capacity_bytes,
            used_bytes: used.bytes,
            used_inodes: used.inodes,
            created: Timestamp::now(),
            mode,
            phase: SnapshotPhase::Begun,
            pause_us: 0,
            from_unlimited: volume.policies().capacity == CapacityPolicy::None,
            deleting: false,
        };
        self.backend.check_no_snapshot(id)?;
        self.journal.admit_snapshot(id, &record, self.backend.room()?)?;
        let made = match mode {
            SnapshotMode::Reflink => self.cut(id, record, &volume, control, until_cut_or_begun),
            SnapshotMode::BlockingCopy => self.begin_copy(id, record, &volume, control),
        };
        made.map_err(|cause| Error::rolled_back(cause, self.finish_snapshot_deletion(id)))
    }

    /// Clones the tree while the daemon, if there is one, holds its writers back. They resume after
    /// the cut: flushing to disk may take long if other volumes write much to the pool.
    fn cut(
        &self,
        id: &SnapshotId,
        mut record: SnapshotRecord,
        volume: &VolumeRecord,
        control: Option<Control>,
        until_cut: VolumeGuard,
    ) -> Result<SnapshotRecord> {
        let pause = self.hold_back(&record.source, volume, None, control)?;
        let at = pause.as_ref().map_or_else(Timestamp::now, |pause| pause.at);
        let progress = Progress::default();
        progress.bound(volume.allowance());
        let (count, paused) = self.renewing(&record.source, pause, &progress, |progress| {
            self.backend.snapshot(id, &record.source, record.mode, progress)
        })?;
        drop(until_cut);
        self.backend.sync()?;
        record.created = at;
        record.used_bytes = within_capacity(id, count.bytes, record.source_capacity_bytes);
        record.used_inodes = count.inodes;
        record.pause_us = microseconds(paused);
        record.phase = SnapshotPhase::Ready;
        self.journal.snapshots().put(id, &record)?;
        tracing::info!(snapshot_id = %id, pause_us = record.pause_us, bytes = count.bytes, "snapshot is ready");
        Ok(record)
    }

    /// Begins a copy that holds the writers back until it ends.
    fn begin_copy(
        self: &Arc<Self>,
        id: &SnapshotId,
        mut record: SnapshotRecord,
        volume: &VolumeRecord,
        control: Option<Control>,
    ) -> Result<SnapshotRecord> {
        let pause = self.hold_back(&record.source, volume, None, control)?;
        record.created = pause.as_ref().map_or_else(Timestamp::now, |pause| pause.at);
        if let Some(pause) = pause.as_ref().filter(|_| volume.policies().capacity == CapacityPolicy::Daemon) {
            record.used_bytes = pause.used_bytes.min(volume.capacity_bytes);
            record.used_inodes = pause.used_inodes;
        }
        record.phase = SnapshotPhase::Copying;
        self.journal.snapshots().put(id, &record)?;
        let (this, id, answered) = (self.clone(), id.clone(), record.clone());
        let (source, total_bytes, allowed) = (record.source.clone(), record.used_bytes, volume.allowance());
        self.jobs.start(id.clone().as_str(), source.as_str(), total_bytes, move |progress| {
            progress.bound(allowed);
            let copied = jobs::caught(|| this.copy(&id, &mut record, pause, progress));
            if let Err(error) = &copied {
                record.phase = SnapshotPhase::Failed { reason: chain(error) };
                this.journal.snapshots().put_finding(&id, &record);
                this.backend.delete_snapshot(&id)?;
            }
            copied
        })?;
        Ok(answered)
    }

    fn copy(
        &self,
        id: &SnapshotId,
        record: &mut SnapshotRecord,
        pause: Option<Quiesced>,
        progress: &Progress,
    ) -> Result<()> {
        let (count, paused) = self.renewing(&record.source, pause, progress, |progress| {
            self.backend.snapshot(id, &record.source, record.mode, progress)
        })?;
        self.backend.sync()?;
        record.used_bytes = within_capacity(id, count.bytes, record.source_capacity_bytes);
        record.used_inodes = count.inodes;
        record.pause_us = microseconds(paused);
        record.phase = SnapshotPhase::Ready;
        self.journal.snapshots().put(id, record)?;
        tracing::info!(snapshot_id = %id, pause_us = record.pause_us, bytes = count.bytes, "snapshot is ready");
        Ok(())
    }

    /// DeleteSnapshot. One that does not exist is a success. The caller holds the snapshot's lock.
    pub(crate) fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let Some(mut record) = self.journal.snapshots().find(id)? else { return Ok(()) };
        if let Some(restore) = self.jobs.copying(id.as_str()) {
            return Err(restore.under_way(format!("snapshot {id}")));
        }
        if let Some(copy) = self.jobs.find(id.as_str()) {
            copy.cancel(format!("snapshot {id}"), limits::CANCEL)?;
        }
        if !record.deleting {
            record.deleting = true;
            self.journal.snapshots().put_deleting(id, &record)?;
        }
        self.finish_snapshot_deletion(id)
    }

    fn finish_snapshot_deletion(&self, id: &SnapshotId) -> Result<()> {
        self.backend.delete_snapshot(id)?;
        self.journal.snapshots().remove(id)
    }

    /// The progress of this snapshot's or volume's copy: done and total bytes.
    pub(crate) fn copied_bytes(&self, id: &str) -> Option<(u64, u64)> {
        self.jobs.find(id).map(|job| job.bytes())
    }

    /// The capacity that a claim needs for this source.
    pub(crate) fn source_bytes(&self, source: &Source) -> Result<u64> {
        Ok(match source {
            Source::Snapshot(id) => self.restorable(id)?.source_capacity_bytes,
            Source::Volume(id) => {
                let volume = self.journal.get(id)?;
                volume.check_usable(id)?;
                volume.capacity_bytes
            }
        })
    }

    /// Fills a new volume from its source. [`Error::Copying`] if it takes long: the copy continues,
    /// and the repeated call waits for it again. The caller holds the volume's lock; `record` is
    /// admitted and not filled.
    pub(crate) fn fill_volume(self: &Arc<Self>, id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        let Some(source) = record.source.clone() else { return Ok(()) };
        let job = match self.jobs.find(id.as_str()) {
            Some(job) => job,
            None => {
                // Its copy may have ended since the caller has read the record.
                *record = self.journal.get(id)?;
                if record.filled {
                    return Ok(());
                }
                match &source {
                    Source::Snapshot(snapshot) => self.begin_restore(id, snapshot)?,
                    Source::Volume(volume) => {
                        self.begin_clone(id, volume, record.parameters.snapshot_mode)?
                    }
                }
            }
        };
        job.wait(format!("volume {id} from {source}"), limits::FILL)?;
        *record = self.journal.get(id)?;
        Ok(())
    }

    fn begin_restore(self: &Arc<Self>, id: &VolumeId, snapshot: &SnapshotId) -> Result<Arc<Job>> {
        // A deletion holds this lock; a later one sees the job.
        let _until_begun = self.locks.hold(Lock::Snapshot(snapshot.as_str()))?;
        let SnapshotRecord { used_bytes, from_unlimited, .. } = self.restorable(snapshot)?;
        let (this, id, source) = (self.clone(), id.clone(), Source::Snapshot(snapshot.clone()));
        self.jobs.start(id.clone().as_str(), snapshot.as_str(), used_bytes, move |progress| {
            let allowed = this.journal.get(&id)?.allowance();
            progress.bound_new(allowed, from_unlimited);
            this.backend.fill(&id, allowed, &source, progress)?;
            this.filled(&id)
        })
    }

    fn begin_clone(
        self: &Arc<Self>,
        id: &VolumeId,
        source: &VolumeId,
        spec: Option<SnapshotMode>,
    ) -> Result<Arc<Job>> {
        let _until_begun = self.locks.hold(Lock::Volume(source.as_str()))?;
        let mut volume = self.journal.get(source)?;
        volume.check_usable(source)?;
        self.locks.check_not_copied(source)?;
        self.backend.snapshot_mode(spec, CLASS_OF_CLONES)?;
        let record = self.journal.get(id)?;
        let clone = (id, record.allowance());
        let control = self.serving(source, &mut volume, Some(clone))?;
        let used = self.used_now(source, &volume, control.as_ref())?;
        if record.capacity_bytes < volume.capacity_bytes {
            // It has grown since the clone was admitted, by an earlier driver.
            return Err(Error::SourceLarger {
                origin: Source::Volume(source.clone()).to_string(),
                source_bytes: volume.capacity_bytes,
                wanted_bytes: record.capacity_bytes,
            });
        }
        let pause = self.hold_back(source, &volume, Some(clone), control)?;
        let (this, id, source) = (self.clone(), id.clone(), source.clone());
        self.jobs.start(id.clone().as_str(), source.clone().as_str(), used.bytes, move |progress| {
            let from = Source::Volume(source.clone());
            let allowed = this.journal.get(&id)?.allowance();
            progress.bound_new(allowed, volume.policies().capacity == CapacityPolicy::None);
            progress.bound(volume.allowance());
            let (_, paused) = this.renewing(&source, pause, progress, |progress| {
                this.backend.fill(&id, allowed, &from, progress)
            })?;
            tracing::info!(volume_id = %source, pause_us = microseconds(paused), "cloned");
            this.filled(&id)
        })
    }

    fn filled(&self, id: &VolumeId) -> Result<()> {
        self.backend.sync()?;
        let mut record = self.journal.get(id)?;
        record.filled = true;
        self.journal.put(id, &record)
    }

    /// Cancels the copy that fills a volume, before the volume is deleted.
    pub(crate) fn stop_filling(&self, id: &VolumeId) -> Result<()> {
        match self.jobs.find(id.as_str()) {
            Some(job) => job.cancel(format!("volume {id}"), limits::CANCEL),
            None => Ok(()),
        }
    }

    /// Repairs an earlier driver's snapshots before the first call. An incomplete one that was
    /// never answered is removed; one that was answered is marked as failed.
    pub(crate) fn reconcile(&self) {
        for (id, record) in self.journal.snapshots().list() {
            if let Err(error) = self.reconcile_snapshot(&id, record) {
                tracing::warn!(snapshot_id = %id, error = chain(&error), "could not repair the snapshot");
            }
        }
    }

    fn reconcile_snapshot(&self, id: &SnapshotId, mut record: SnapshotRecord) -> Result<()> {
        match record.phase {
            _ if record.deleting => self.finish_snapshot_deletion(id),
            SnapshotPhase::Begun => self.finish_snapshot_deletion(id),
            SnapshotPhase::Copying => {
                record.phase = SnapshotPhase::Failed { reason: ENDED.to_owned() };
                self.journal.snapshots().put_finding(id, &record);
                self.backend.delete_snapshot(id)
            }
            SnapshotPhase::Failed { .. } if !record.phase.is_lost() => self.backend.delete_snapshot(id),
            SnapshotPhase::Ready | SnapshotPhase::Lost | SnapshotPhase::Failed { .. } => {
                self.look_for_data(id, record)
            }
        }
    }

    /// Finds out whether a complete snapshot still has its data, or has it again. Deletes nothing.
    fn look_for_data(&self, id: &SnapshotId, mut record: SnapshotRecord) -> Result<()> {
        let found = match self.backend.has_lost_snapshot(id)? {
            true => SnapshotPhase::Lost,
            false => SnapshotPhase::Ready,
        };
        if let Some(reason) = found.failure() {
            tracing::error!(snapshot_id = %id, reason, "a snapshot has failed");
        }
        if found == record.phase {
            return Ok(());
        }
        if found == SnapshotPhase::Ready {
            tracing::info!(snapshot_id = %id, "the snapshot has its data again");
        }
        record.phase = found;
        self.journal.snapshots().put_finding(id, &record);
        Ok(())
    }

    fn known_volume(&self, volume_id: &str) -> Result<VolumeId> {
        VolumeId::parse(volume_id).ok_or_else(|| Error::UnknownVolume { volume_id: volume_id.to_owned() })
    }

    fn restorable(&self, id: &SnapshotId) -> Result<SnapshotRecord> {
        let record = self.journal.snapshots().get(id)?;
        if record.deleting {
            return Err(Error::UnknownSnapshot { snapshot_id: id.to_string() });
        }
        record.check_not_failed(id)?;
        if record.phase == SnapshotPhase::Ready {
            return Ok(record);
        }
        let (done_bytes, total_bytes) = self.copied_bytes(id.as_str()).unwrap_or_default();
        Err(Error::Copying { what: format!("snapshot {id}"), done_bytes, total_bytes })
    }

    /// The bytes that a volume holds, at most its capacity. Its daemon also writes the usage file,
    /// so that is trusted no more than the daemon's reports. What nothing limits, nothing counts either: it
    /// is taken to be full.
    fn used_now(&self, id: &VolumeId, volume: &VolumeRecord, control: Option<&Control>) -> Result<Count> {
        let (capacity_bytes, policy) = (volume.capacity_bytes, volume.policies().capacity);
        if policy == CapacityPolicy::None {
            return Ok(Count { bytes: capacity_bytes, inodes: 0 });
        }
        let Some(control) = control.filter(|_| policy != CapacityPolicy::Kernel) else {
            let used = self.backend.used(id, policy)?;
            return Ok(Count { bytes: used.bytes.min(capacity_bytes), ..used });
        };
        let usage = control.usage()?;
        if usage.counting {
            // The daemon would refuse to pause, since it does not yet know what a cut would hold.
            return Err(Error::Pending { what: format!("volume {id} (its daemon counts what it holds)") });
        }
        Ok(Count { bytes: usage.used_bytes.min(capacity_bytes), inodes: usage.used_inodes })
    }

    /// A connection to the daemon that must hold changes back; `None` if there is none. A parked daemon
    /// refuses to for what was opened for writing while its volume was staged. Nothing can write
    /// to the volume now, so where that matters, the daemon is ended.
    fn serving(
        &self,
        id: &VolumeId,
        volume: &mut VolumeRecord,
        clone: Option<(&VolumeId, Allowance)>,
    ) -> Result<Option<Control>> {
        let passes = |parked: &ParkedRecord| parked.stage.settings.data_path == DataPath::Passthrough;
        if volume.parked.as_ref().is_some_and(passes) && !self.backend.cuts_at_once(id, clone)? {
            self.stages.end_parked(id, volume)?;
        }
        self.stages.serving(id, volume)
    }

    /// Stops all changes of the volume from here on, for a snapshot or for `clone`; `None` if no daemon
    /// serves it. Only where the file system cuts the volume, writes that pass the daemon by go on.
    fn hold_back(
        &self,
        id: &VolumeId,
        volume: &VolumeRecord,
        clone: Option<(&VolumeId, Allowance)>,
        control: Option<Control>,
    ) -> Result<Option<Quiesced>> {
        let Some(control) = control else {
            // No daemon can hold anything back, and files that are open are still read and written.
            let passes = volume.data_path() == DataPath::Passthrough && volume.stage.is_some();
            if passes && !self.backend.cuts_at_once(id, clone)? {
                let reason = "no daemon serves it, and the kernel may still write to it".to_owned();
                return Err(Error::DaemonCannot { volume_id: id.clone(), what: "Quiesce", reason });
            }
            if volume.parameters.writeback_cache && volume.stage.is_some() {
                let reason = "no daemon serves it, so what the kernel has kept cannot be written".to_owned();
                return Err(Error::NotWrittenBack { volume_id: id.clone(), reason });
            }
            return Ok(None);
        };
        if let Some(stage) = &volume.stage {
            // Flushes pages written through mappings to the daemon.
            let asking = self.daemons.hangs.asking(id);
            let minor = stage.serving.map(|serving| serving.connection_minor).unwrap_or_default();
            let path = match connection_mount(id, minor)? {
                ConnectionMount::At(mount) => mount.mount_point,
                ConnectionMount::Hidden | ConnectionMount::Nowhere => stage.staging_path.clone(),
            };
            let mounted = path.clone();
            let flushed =
                self.flushes.within(id, format!("syncfs of volume {id}"), limits::SYNCFS, move || {
                    let _ours = asking;
                    flush(&mounted, minor).map(drop)
                })?;
            if let Err(error) = flushed {
                tracing::warn!(volume_id = %id, error = chain(&error), "syncfs before a snapshot");
            }
            if volume.parameters.writeback_cache {
                self.write_back(id, &path, minor, &control)?;
            }
        }
        let passing = match self.backend.cuts_at_once(id, clone)? {
            true => PassingWrites::GoOn,
            false => PassingWrites::Refused,
        };
        if passing == PassingWrites::GoOn {
            // The cut needs it on the disk: so little is left to write while changes wait.
            let backend = Arc::clone(&self.backend);
            self.pool_syncs.within(&(), "sync of the pool", limits::POOL_SYNC, move || {
                // The cut repeats it, and returns its error.
                if let Err(error) = backend.sync() {
                    tracing::warn!(error = chain(&error), "sync of the pool before a cut");
                }
            })?;
        }
        control.quiesce(limits::QUIESCE, passing, self.daemons.hangs.holding_back(id)).map(Some)
    }

    /// Makes the kernel send what write(2) left in its cache, and waits for the daemon's answers: a pause
    /// would keep them out of the cut.
    fn write_back(&self, id: &VolumeId, path: &Path, minor: u32, control: &Control) -> Result<()> {
        let what = format!("write back volume {id}");
        let refused = |reason: String| Error::NotWrittenBack { volume_id: id.clone(), reason };
        let (begun, mut after) = (Instant::now(), 0);
        loop {
            let files = control.written(after)?;
            let Some(last) = files.last() else { return Ok(()) };
            after = last.node;
            let left = limits::SYNCFS.saturating_sub(begun.elapsed());
            let (path, asking) = (path.to_owned(), self.daemons.hangs.asking(id));
            let written = self.flushes.within(id, what.clone(), left, move || {
                let _ours = asking;
                write_back(&path, minor, &files)
            })?;
            for node in written.map_err(|error| refused(chain(&error)))? {
                // Its daemon may name any nodes, and take its time for each.
                if begun.elapsed() >= limits::SYNCFS {
                    return Err(Error::Deadline { what, limit: limits::SYNCFS });
                }
                // Closed meanwhile, its close(2) has sent everything.
                if control.written(node - 1)?.first().is_some_and(|file| file.node == node) {
                    return Err(refused(format!(
                        "a file that is open for writing was not found (inode {node})"
                    )));
                }
            }
        }
    }

    /// Does `work` during a pause, and renews its lease until the work ends: first when the lease is as old
    /// as between two renewals, since a slow disk may have delayed this call. Returns the pause's length. If the
    /// lease is lost, the work stops.
    fn renewing(
        &self,
        id: &VolumeId,
        pause: Option<Quiesced>,
        progress: &Progress,
        work: impl FnOnce(&Progress) -> Result<Count>,
    ) -> Result<(Count, Duration)> {
        let (count, pause) = std::thread::scope(|scope| {
            let (end, ended) = channel::<()>();
            let mut pause = pause;
            let renew = move || {
                while let Some(held) = &mut pause
                    && ended.recv_timeout(limits::QUIESCE_RENEWAL.saturating_sub(held.lease_age()))
                        == Err(RecvTimeoutError::Timeout)
                {
                    if let Err(error) = held.renew(limits::QUIESCE) {
                        progress.stop.store(true, std::sync::atomic::Ordering::Relaxed);
                        return Err(error);
                    }
                }
                Ok(pause)
            };
            let renewer = std::thread::Builder::new()
                .name("renew".to_owned())
                .spawn_scoped(scope, renew)
                .map_err(|e| linux::Error::new("start thread for the pause of", id, e))
                .step("start thread")?;
            let count = work(progress);
            drop(end);
            let renewed = renewer.join().unwrap_or(Err(Error::Panicked { operation: "renewal of a pause" }));
            // The reason for the stop says more than the stop itself.
            renewed.and_then(|pause| count.map(|count| (count, pause)))
        })?;
        let was_held = pause.is_some();
        let paused = resume_writers(id, pause)?;
        if was_held {
            self.counts.paused(paused);
        }
        Ok((count, paused))
    }
}

/// What a cut is charged. A compromised daemon can make a tree that counts more than the volume's
/// capacity, for example with many files that share blocks. Charged in full, the cut would take
/// space from other claims. Refused, the volume's user could save nothing.
fn within_capacity(id: &SnapshotId, counted_bytes: u64, capacity_bytes: u64) -> u64 {
    if counted_bytes > capacity_bytes {
        tracing::warn!(
            snapshot_id = %id,
            counted_bytes,
            capacity_bytes,
            "the snapshot counts more than its volume's capacity, and is charged with the capacity"
        );
    }
    counted_bytes.min(capacity_bytes)
}

/// Ends the pause and returns its length. A lease that ended early is an error.
fn resume_writers(id: &VolumeId, pause: Option<Quiesced>) -> Result<Duration> {
    match pause.map(Quiesced::resume).transpose()? {
        None => Ok(Duration::ZERO),
        Some(Paused { held: true, paused }) => Ok(paused),
        Some(Paused { held: false, .. }) => Err(Error::LeaseLost { volume_id: id.clone() }),
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
