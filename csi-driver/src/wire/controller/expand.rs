//! ControllerExpandVolume: the size that a volume is to have from now on. It
//! stands in the journal first, from which every stage takes it; a daemon that
//! serves the volume is told.

use proto::csi::{ControllerExpandVolumeRequest, ControllerExpandVolumeResponse};

use super::{required_id, wire_bytes};
use crate::engine::attach::check_usable;
use crate::engine::driver::Driver;
use crate::engine::stage::is_served;
use crate::error::{Error, Result};
use crate::model::capability::Access;
use crate::model::capacity::WantedCapacity;
use crate::model::ids::VolumeId;
use crate::model::records::VolumeRecord;
use crate::model::sizes;

pub(super) struct ExpandCall {
    pub(super) volume_id: String,
    pub(super) wanted: WantedCapacity,
}

pub(super) fn parse(request: ControllerExpandVolumeRequest) -> Result<ExpandCall> {
    let volume_id = required_id("volume_id", request.volume_id)?;
    let range = request.capacity_range.ok_or(Error::MissingField { field: "capacity_range" })?;
    let wanted = WantedCapacity::parse(Some(&range))?;
    if range == Default::default() {
        return Err(Error::MissingField { field: "capacity_range.required_bytes" });
    }
    if let Some(capability) = &request.volume_capability {
        Access::parse(Some(capability))?;
    }
    sizes::bounded_map("secrets", &request.secrets)?;
    Ok(ExpandCall { volume_id, wanted })
}

impl Driver {
    pub(super) fn expand(
        &self,
        volume_id: &VolumeId,
        wanted: WantedCapacity,
    ) -> Result<ControllerExpandVolumeResponse> {
        let mut record = self.journal.get(volume_id)?;
        check_usable(volume_id, &record)?;
        if let Some(capacity_bytes) = wanted.growth(record.capacity_bytes) {
            record.capacity_bytes = capacity_bytes;
            self.journal.admit(volume_id, &record, self.room()?)?;
        } else if !wanted.admits(record.capacity_bytes) {
            return Err(Error::BeyondSize {
                volume_id: volume_id.clone(),
                size_bytes: record.capacity_bytes,
                wanted: wanted.to_string(),
            });
        }
        match self.tell_daemon(volume_id, &mut record) {
            Ok(()) => {}
            // Just ended: the next one is told when it is staged.
            Err(Error::NoControl { .. } | Error::ControlLost { .. }) if !is_served_now(&record)? => {}
            Err(e) => return Err(e),
        }
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: wire_bytes(record.capacity_bytes),
            node_expansion_required: false,
        })
    }

    /// The daemon has the size that the journal says, if there is one.
    fn tell_daemon(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        match self.serving(volume_id, record)? {
            Some(control) => {
                control.set_capacity(record.capacity_bytes, self.pool.inode_limit(record.capacity_bytes))
            }
            None => Ok(()),
        }
    }
}

fn is_served_now(record: &VolumeRecord) -> Result<bool> {
    record.stage.as_ref().map_or(Ok(false), is_served)
}
