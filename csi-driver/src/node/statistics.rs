//! NodeGetVolumeStats: size, use and condition of a volume, also of one whose
//! daemon does not answer; and the condition that ControllerGetVolume tells.

use std::path::{Path, PathBuf};

use linux::mountinfo::MountEntry;
use nix::errno::Errno;
use nix::sys::statvfs::{Statvfs, statvfs};
use proto::csi::volume_usage::Unit;
use proto::csi::{NodeGetVolumeStatsResponse, VolumeCondition, VolumeUsage};

use crate::driver::Driver;
use crate::error::{Error, Result, Step};
use crate::host_path::HostPath;
use crate::journal::StageRecord;
use crate::limits;
use crate::mounts;
use crate::node::stage::Health;
use crate::volume::VolumeId;

/// Why a volume cannot be used, as VolumeCondition tells it.
const DEAD: &str = "the volume's daemon ended: reads and writes fail with ENOTCONN";
const SILENT: &str = "the volume's daemon does not answer: reads and writes wait";
const ASTRAY: &str =
    "the volume's daemon serves another directory than the pool has now: take the volume's pods down";
const UNMOUNTED: &str = "the volume is not mounted there";

impl Driver {
    /// Size and condition of the volume that is staged or published at `volume_path`.
    pub(crate) fn statistics(
        &self,
        volume_id: &VolumeId,
        volume_path: &str,
    ) -> Result<NodeGetVolumeStatsResponse> {
        let (path, stage) = self.place(volume_id, volume_path)?;
        let (usage, abnormal) = match self.health(volume_id, &stage)? {
            Health::Serving(staged) | Health::Displaced(Some(staged)) => {
                let (usage, abnormal) = self.measured(volume_id, &path, &staged)?;
                (usage, abnormal.or_else(|| self.astray(volume_id, &stage)))
            }
            Health::DaemonDead => (Vec::new(), Some(DEAD)),
            Health::Displaced(None) | Health::Unmounted | Health::HalfDone => (Vec::new(), Some(UNMOUNTED)),
        };
        let message = abnormal.unwrap_or("served").to_owned();
        let condition = VolumeCondition { abnormal: abnormal.is_some(), message };
        Ok(NodeGetVolumeStatsResponse { usage, volume_condition: Some(condition) })
    }

    /// `volume_path` resolved, and the stage behind it. Anything that is no place of
    /// the volume's, be it a path or not, is NOT_FOUND.
    pub(crate) fn place(&self, volume_id: &VolumeId, volume_path: &str) -> Result<(PathBuf, StageRecord)> {
        let not_there = || Error::NotAtPath { volume_id: volume_id.clone(), path: volume_path.into() };
        let path = HostPath::parse("volume_path", volume_path).map_err(|_| not_there())?;
        let record = self.journal.get(volume_id)?;
        let path = match record.targets_asked_at(path.as_asked()).pop() {
            Some(target) => target,
            None => path.resolve()?,
        };
        let is_target = record.targets.contains_key(&path);
        let stage = record.stage.filter(|stage| is_target || stage.staging_path == path);
        Ok((path, stage.ok_or_else(not_there)?))
    }

    /// What is wrong with what is mounted and served, for who asks of no path.
    pub(crate) fn ailment(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        staged: &MountEntry,
    ) -> Result<Option<&'static str>> {
        let (_, abnormal) = self.measured(volume_id, &staged.mount_point, staged)?;
        Ok(abnormal.or_else(|| self.astray(volume_id, stage)))
    }

    fn astray(&self, volume_id: &VolumeId, stage: &StageRecord) -> Option<&'static str> {
        self.check_data(volume_id, stage).is_err().then_some(ASTRAY)
    }

    /// What the daemon says, or what is wrong with it.
    fn measured(
        &self,
        volume_id: &VolumeId,
        path: &Path,
        staged: &MountEntry,
    ) -> Result<(Vec<VolumeUsage>, Option<&'static str>)> {
        // On a bare directory statvfs(2) would measure the node's own disk.
        match mounts::find(path, volume_id) {
            Ok(Some(mount)) if mount.minor == staged.minor => {}
            Ok(_) | Err(Error::ForeignMount { .. }) => return Ok((Vec::new(), Some(UNMOUNTED))),
            Err(e) => return Err(e),
        }
        let place = path.to_owned();
        let what = format!("statvfs {}", path.display());
        match self.measures.within(volume_id, what, limits::STATISTICS, move || statvfs(&place)) {
            Ok(Ok(fs)) => Ok((usage(&fs), None)),
            Ok(Err(Errno::ENOTCONN | Errno::ECONNABORTED)) => Ok((Vec::new(), Some(DEAD))),
            Ok(Err(e)) => Err(linux::Error::at("statvfs", path, e)).step("measure volume"),
            Err(Error::Deadline { .. }) => Ok((Vec::new(), Some(SILENT))),
            Err(e) => Err(e),
        }
    }
}

fn usage(fs: &Statvfs) -> Vec<VolumeUsage> {
    let wire = |count: u64, unit: u64| i64::try_from(count.saturating_mul(unit)).unwrap_or(i64::MAX);
    let block = fs.fragment_size();
    vec![
        VolumeUsage {
            available: wire(fs.blocks_available(), block),
            total: wire(fs.blocks(), block),
            used: wire(fs.blocks().saturating_sub(fs.blocks_free()), block),
            unit: Unit::Bytes.into(),
        },
        VolumeUsage {
            available: wire(fs.files_available(), 1),
            total: wire(fs.files(), 1),
            used: wire(fs.files().saturating_sub(fs.files_free()), 1),
            unit: Unit::Inodes.into(),
        },
    ]
}
