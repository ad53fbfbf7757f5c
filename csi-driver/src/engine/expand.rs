//! Growing a volume. The new size is journaled first, since every stage reads it there. Then the
//! driver sends it to the daemon that serves the volume, if there is one.

use std::sync::Arc;

use crate::backend::VolumeBackend;
use crate::engine::health::is_served;
use crate::engine::stage::Stages;
use crate::engine::statistics::Statistics;
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::model::capacity::{VolumeLimits, WantedCapacity};
use crate::model::ids::VolumeId;
use crate::model::records::VolumeRecord;

#[derive(Debug)]
pub(crate) struct Expansion {
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) statistics: Arc<Statistics>,
}

impl Expansion {
    /// ControllerExpandVolume: returns the volume's new size in bytes.
    pub(crate) fn expand(&self, volume_id: &VolumeId, wanted: WantedCapacity) -> Result<u64> {
        let mut record = self.journal.get(volume_id)?;
        record.check_usable(volume_id)?;
        if let Some(capacity_bytes) = wanted.growth(record.capacity_bytes) {
            record.capacity_bytes = capacity_bytes;
            self.journal.admit(volume_id, &record, self.backend.room()?)?;
        } else if !wanted.admits(record.capacity_bytes) {
            return Err(Error::BeyondSize {
                volume_id: volume_id.clone(),
                size_bytes: record.capacity_bytes,
                wanted: wanted.to_string(),
            });
        }
        // The new size is recorded.
        let expanded = self.backend.expand(volume_id, record.allowance());
        let limits = expanded.map_err(|e| Error::uncleared(volume_id, e))?;
        match self.resize_daemon(volume_id, &mut record, limits) {
            Ok(()) => {}
            // It has just ended: the next daemon gets the size when it is staged.
            Err(Error::NoControl { .. } | Error::ControlLost { .. }) if !is_served_now(&record)? => {}
            Err(e) => return Err(e),
        }
        Ok(record.capacity_bytes)
    }

    fn resize_daemon(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        limits: VolumeLimits,
    ) -> Result<()> {
        match self.stages.serving(volume_id, record)? {
            Some(control) => {
                control.set_capacity(limits)?;
                self.stages.stand_by_again(volume_id, record);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// NodeExpandVolume: returns the volume's size in bytes, once its daemon enforces it. Only the
    /// controller changes the size: another one is refused here.
    pub(crate) fn expand_on_node(
        &self,
        volume_id: &VolumeId,
        volume_path: &str,
        wanted: WantedCapacity,
    ) -> Result<u64> {
        self.statistics.place(volume_id, volume_path)?;
        let mut record = self.journal.get(volume_id)?;
        let size_bytes = record.capacity_bytes;
        if !wanted.admits(size_bytes) {
            let (volume_id, wanted) = (volume_id.clone(), wanted.to_string());
            return Err(Error::BeyondSize { volume_id, size_bytes, wanted });
        }
        self.resize_daemon(volume_id, &mut record, self.backend.limits(size_bytes))?;
        Ok(size_bytes)
    }
}

fn is_served_now(record: &VolumeRecord) -> Result<bool> {
    record.stage.as_ref().map_or(Ok(false), is_served)
}
