//! NodeGetVolumeStats: size, use and condition of a volume, also if its daemon does not answer.
//! ControllerGetVolume and ListVolumes report the same condition.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mountinfo::MountEntry;
use nix::errno::Errno;
use nix::sys::statvfs::{Statvfs, fstatvfs};
use proto::csi::volume_usage::Unit;
use proto::csi::{NodeGetVolumeStatsResponse, VolumeCondition, VolumeUsage};
use proto::mount_pod::NAMESPACE;

use crate::backend::VolumeBackend;
use crate::daemon::keeper::{Keeper, Role};
use crate::daemon::notes::{Finding, Hangs};
use crate::engine::hang::own_mount;
use crate::engine::health::{Health, health};
use crate::error::{Error, Result, Step};
use crate::journal::Journal;
use crate::kernel::bounded::Shared;
use crate::kernel::host_path::{HostPath, HostPaths};
use crate::kernel::mounts;
use crate::model::capacity::{VolumeLimits, clamped};
use crate::model::ids::VolumeId;
use crate::model::launch::LaunchId;
use crate::model::limits;
use crate::model::policies::CapacityPolicy;
use crate::model::records::StageRecord;

/// The reasons why a volume cannot be used, for VolumeCondition.
const DEAD: &str = "the volume's daemon ended: reads and writes fail with ENOTCONN";
pub(crate) const WAITS: &str = "the volume's daemon ended: reads and writes wait for another one";
const ENDED: &str =
    "the volume's daemon answered no request and was killed: reads and writes fail with ENOTCONN";
const STALLS: &str =
    "the pool's disk stalls: the volume's daemon waits for it, and reads and writes wait for the daemon";
const SILENT: &str = "the volume's daemon does not answer: reads and writes wait";
const ASTRAY: &str =
    "the volume's daemon serves another directory than the pool has now: take the volume's pods down";
const UNMOUNTED: &str = "the volume is not mounted there";

/// Interval between looks for a daemon that follows another one.
const FOLLOW_RETRY: Duration = Duration::from_millis(20);

/// Reports the use and the condition of volumes.
#[derive(Debug)]
pub(crate) struct Statistics {
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) paths: Arc<HostPaths>,
    pub(crate) keeper: Arc<dyn Keeper>,
    pub(crate) hangs: Arc<Hangs>,
    /// Measurements of volumes, which do not return while a daemon is stuck.
    pub(crate) measures: Shared<VolumeId, nix::Result<Statvfs>>,
}

impl Statistics {
    /// Size and condition of the volume that is staged or published at `volume_path`.
    pub(crate) fn of(&self, volume_id: &VolumeId, volume_path: &str) -> Result<NodeGetVolumeStatsResponse> {
        let (path, stage, health) = self.settled(volume_id, volume_path)?;
        let (usage, abnormal) = match health {
            Health::Serving(staged) | Health::Displaced(Some(staged)) => {
                let (usage, abnormal) = self.measured(volume_id, &path, &staged)?;
                (usage, abnormal.or_else(|| self.serves_other_data(volume_id, &stage)))
            }
            Health::DaemonDead => (Vec::new(), Some(self.after_end(volume_id, &stage))),
            Health::Displaced(None) | Health::Unmounted | Health::HalfDone => (Vec::new(), Some(UNMOUNTED)),
        };
        let usage = if usage.is_empty() { vec![self.unmeasured(volume_id)?] } else { usage };
        let message = abnormal.map_or_else(|| served_by(&stage), str::to_owned);
        let condition = VolumeCondition { abnormal: abnormal.is_some(), message };
        Ok(NodeGetVolumeStatsResponse { usage, volume_condition: Some(condition) })
    }

    /// The volume's size (0: nothing limits it), for a volume that cannot be measured: an answer without any
    /// usage is an error to kubelet, which then never sees the condition.
    fn unmeasured(&self, volume_id: &VolumeId) -> Result<VolumeUsage> {
        let volume = self.journal.get(volume_id)?;
        let total = match volume.policies().capacity {
            CapacityPolicy::None => 0,
            CapacityPolicy::Daemon | CapacityPolicy::Kernel => wire(volume.capacity_bytes),
        };
        Ok(VolumeUsage { total, unit: Unit::Bytes.into(), ..VolumeUsage::default() })
    }

    /// Waits for the daemon that follows one that has ended, as long as for the answer of one that serves.
    fn settled(&self, volume_id: &VolumeId, volume_path: &str) -> Result<(PathBuf, StageRecord, Health)> {
        let deadline = Instant::now() + limits::STATISTICS;
        loop {
            let (path, stage) = self.place(volume_id, volume_path)?;
            let health = health(volume_id, &stage)?;
            let is_being_followed = health == Health::DaemonDead && self.is_followed(volume_id, &stage);
            if !is_being_followed || Instant::now() >= deadline {
                return Ok((path, stage, health));
            }
            std::thread::park_timeout(FOLLOW_RETRY);
        }
    }

    /// What users of a volume see whose daemon has ended.
    pub(crate) fn after_end(&self, volume_id: &VolumeId, stage: &StageRecord) -> &'static str {
        if self.is_followed(volume_id, stage) { WAITS } else { self.why_dead(volume_id) }
    }

    /// Whether another daemon can continue the connection.
    pub(crate) fn is_followed(&self, volume_id: &VolumeId, stage: &StageRecord) -> bool {
        !stage.aborted && self.keeper.list(volume_id).is_ok_and(|held| held.contains(&Role::Connection))
    }

    /// Resolves `volume_path` and finds its stage. Anything that is not a path of the volume is
    /// NOT_FOUND.
    pub(crate) fn place(&self, volume_id: &VolumeId, volume_path: &str) -> Result<(PathBuf, StageRecord)> {
        let not_there = || Error::NotAtPath { volume_id: volume_id.clone(), path: volume_path.into() };
        let path = HostPath::parse("volume_path", volume_path).map_err(|_| not_there())?;
        let record = self.journal.get(volume_id)?;
        let stage = record.stage.as_ref().ok_or_else(not_there)?;
        let is_place = |path: &Path| record.targets.contains_key(path) || stage.staging_path == path;
        let path = match record.targets_asked_at(path.as_asked()).pop() {
            Some(target) => target,
            None => match self.paths.find(&path, is_place) {
                Ok(resolved) => resolved.ok_or_else(not_there)?,
                Err(Error::UnusablePath { .. }) => return Err(not_there()),
                Err(error) => return Err(error),
            },
        };
        if is_place(&path) { Ok((path, stage.clone())) } else { Err(not_there()) }
    }

    /// The problem with a mounted and served volume, if any, for callers that name no path.
    pub(crate) fn problem(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        staged: &MountEntry,
    ) -> Result<Option<&'static str>> {
        let (_, abnormal) = self.measured(volume_id, &staged.mount_point, staged)?;
        Ok(abnormal.or_else(|| self.serves_other_data(volume_id, stage)))
    }

    fn serves_other_data(&self, volume_id: &VolumeId, stage: &StageRecord) -> Option<&'static str> {
        self.backend.check_serves(volume_id, stage.data).is_err().then_some(ASTRAY)
    }

    /// The daemon's figures, or the problem with the daemon.
    fn measured(
        &self,
        volume_id: &VolumeId,
        path: &Path,
        staged: &MountEntry,
    ) -> Result<(Vec<VolumeUsage>, Option<&'static str>)> {
        // Without a mount, statvfs(2) would measure the node's own disk.
        match mounts::find(path, volume_id) {
            Ok(Some(mount)) if mount.minor == staged.minor => {}
            Ok(_) | Err(Error::ForeignMount { .. }) => return Ok((Vec::new(), Some(UNMOUNTED))),
            Err(e) => return Err(e),
        }
        if self.hangs.finding(volume_id) == Some(Finding::DiskStalls) {
            return Ok((Vec::new(), Some(STALLS)));
        }
        let (place, minor) = (path.to_owned(), staged.minor);
        let (what, hangs, id) =
            (format!("statvfs {}", path.display()), self.hangs.clone(), volume_id.clone());
        let measure = move || {
            let _ours = hangs.asking(&id);
            own_mount(&place, minor).map_err(|e| e.errno()).and_then(fstatvfs)
        };
        match self.measures.within(volume_id, what, limits::STATISTICS, measure) {
            Ok(Ok(fs)) => {
                let volume = self.journal.get(volume_id)?;
                let limits = match volume.policies().capacity {
                    // Its figures are those of the pool.
                    CapacityPolicy::None => VolumeLimits { bytes: 0, inodes: 0 },
                    CapacityPolicy::Daemon | CapacityPolicy::Kernel => {
                        self.backend.limits(volume.capacity_bytes)
                    }
                };
                Ok((usage(Figures::of(&fs), limits), None))
            }
            Ok(Err(Errno::ENOTCONN | Errno::ECONNABORTED)) => {
                Ok((Vec::new(), Some(self.why_dead(volume_id))))
            }
            // Unmounted since the check.
            Ok(Err(Errno::ENODEV | Errno::ENOENT)) => Ok((Vec::new(), Some(UNMOUNTED))),
            Ok(Err(e)) => Err(linux::Error::at("statvfs", path, e)).step("measure volume"),
            Err(Error::Deadline { .. }) => Ok((Vec::new(), Some(SILENT))),
            Err(e) => Err(e),
        }
    }

    pub(crate) fn why_dead(&self, volume_id: &VolumeId) -> &'static str {
        if self.hangs.finding(volume_id) == Some(Finding::Ended) { ENDED } else { DEAD }
    }
}

/// Names the daemon, if it is not the stage's first one: the mount pod of one that was started ahead names
/// no volume.
fn served_by(stage: &StageRecord) -> String {
    let daemon = match &stage.launch {
        Some(LaunchId::StaticPod(name)) => format!("mount pod {NAMESPACE}/{name}-*"),
        Some(LaunchId::Process(process)) => format!("process {}", process.pid),
        None => "a process".to_owned(),
    };
    match stage.takeovers {
        0 => "served".to_owned(),
        1 => format!("served by {daemon}: the previous daemon died or was upgraded"),
        takeovers => format!("served by {daemon}: {takeovers} earlier daemons died or were upgraded"),
    }
}

/// A daemon's answer to statfs: total, free, and the part of free that unprivileged users may take.
#[derive(Debug, Clone, Copy)]
struct Figures {
    block: u64,
    blocks: [u64; 3],
    files: [u64; 3],
}

impl Figures {
    fn of(fs: &Statvfs) -> Self {
        Self {
            block: fs.fragment_size(),
            blocks: [fs.blocks(), fs.blocks_free(), fs.blocks_available()],
            files: [fs.files(), fs.files_free(), fs.files_available()],
        }
    }
}

/// Limits every figure of a daemon to the volume's limits (0: none).
fn usage(figures: Figures, limits: VolumeLimits) -> Vec<VolumeUsage> {
    let usage = |unit: Unit, [total, free, available]: [u64; 3], size: u64, limit: u64| {
        let most = clamped(total.saturating_mul(size), limit);
        let used = total.saturating_sub(free).saturating_mul(size).min(most);
        VolumeUsage {
            available: wire(available.saturating_mul(size).min(most)),
            total: wire(most),
            used: wire(used),
            unit: unit.into(),
        }
    };
    vec![
        usage(Unit::Bytes, figures.blocks, figures.block, limits.bytes),
        usage(Unit::Inodes, figures.files, 1, limits.inodes),
    ]
}

fn wire(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::capacity::inode_limit;

    fn shown(figures: Figures, capacity_bytes: u64) -> Vec<(i64, i64, i64)> {
        let limits = VolumeLimits { bytes: capacity_bytes, inodes: inode_limit(capacity_bytes, 4096) };
        usage(figures, limits).iter().map(|one| (one.total, one.used, one.available)).collect()
    }

    #[test]
    fn figures_of_an_honest_daemon_are_as_it_gives_them() {
        let figures = Figures { block: 4096, blocks: [100, 40, 30], files: [2000, 1500, 1500] };
        assert_eq!(shown(figures, 100 * 4096 * 80), [(409_600, 245_760, 122_880), (2000, 500, 1500)]);
    }

    #[test]
    fn figures_that_cannot_be_true_stay_within_the_volumes_limits() {
        let most = [u64::MAX, 0, u64::MAX];
        let figures = Figures { block: u64::MAX, blocks: most, files: most };
        assert_eq!(shown(figures, 1 << 30), [(1 << 30, 1 << 30, 1 << 30), (262_144, 262_144, 262_144)]);
        let nothing = Figures { block: 0, blocks: [0, 9, 9], files: [0, 9, 9] };
        assert_eq!(shown(nothing, 1 << 30), [(0, 0, 0), (0, 0, 0)]);
    }
}
