//! ControllerExpandVolume, the gRPC side.

use proto::csi::ControllerExpandVolumeRequest;

use super::required_id;
use crate::error::{Error, Result};
use crate::model::capability::Access;
use crate::model::capacity::WantedCapacity;
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
