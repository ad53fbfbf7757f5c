//! ControllerPublishVolume and ControllerUnpublishVolume, the gRPC side.

use std::collections::HashMap;
use std::sync::Arc;

use proto::csi::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse,
};
use tonic::{Response, Status};

use super::{find_volume, required, required_id};
use crate::engine::attach::ATTACHMENT_KEY;
use crate::engine::driver::Driver;
use crate::engine::locks::Lock;
use crate::error::Result;
use crate::model::capability::Access;
use crate::model::ids::VolumeId;
use crate::model::sizes::{self, MAX_NODE_ID_BYTES};
use crate::wire::call::{refused, run};

struct PublishCall {
    volume_id: String,
    node_id: String,
    access: Access,
}

pub(super) async fn publish(
    driver: &Arc<Driver>,
    request: ControllerPublishVolumeRequest,
) -> std::result::Result<Response<ControllerPublishVolumeResponse>, Status> {
    let name = "csi.ControllerPublishVolume";
    offered(driver, "ControllerPublishVolume")?;
    let call = parse_publish(request).map_err(|e| refused(name, &e))?;
    let volume_id = call.volume_id.clone();
    let nonce = run(driver, name, Lock::Volume(&volume_id), move |driver| {
        driver.attachments.attach(&find_volume(driver, &call.volume_id)?, &call.node_id, call.access)
    })
    .await?;
    let publish_context = HashMap::from([(ATTACHMENT_KEY.to_owned(), nonce)]);
    Ok(Response::new(ControllerPublishVolumeResponse { publish_context }))
}

pub(super) async fn unpublish(
    driver: &Arc<Driver>,
    request: ControllerUnpublishVolumeRequest,
) -> std::result::Result<Response<ControllerUnpublishVolumeResponse>, Status> {
    let name = "csi.ControllerUnpublishVolume";
    offered(driver, "ControllerUnpublishVolume")?;
    let ControllerUnpublishVolumeRequest { volume_id, node_id, .. } = request;
    let volume_id = required_id("volume_id", volume_id).map_err(|e| refused(name, &e))?;
    if let Some(id) = VolumeId::parse(&volume_id) {
        run(driver, name, Lock::Volume(&volume_id), move |driver| {
            driver.attachments.detach(&id, Some(node_id.as_str()).filter(|node| !node.is_empty()))
        })
        .await?;
    }
    Ok(Response::new(ControllerUnpublishVolumeResponse {}))
}

/// CSI spec: a call without its capability is UNIMPLEMENTED.
fn offered(driver: &Driver, rpc: &str) -> std::result::Result<(), Status> {
    let refusal = || Status::unimplemented(format!("{rpc}: the driver runs without --attach"));
    if driver.config.attach { Ok(()) } else { Err(refusal()) }
}

fn parse_publish(request: ControllerPublishVolumeRequest) -> Result<PublishCall> {
    let volume_id = required_id("volume_id", request.volume_id)?;
    let node_id = required("node_id", request.node_id)?;
    sizes::bounded_by("node_id", &node_id, MAX_NODE_ID_BYTES)?;
    let access = Access::parse(request.volume_capability.as_ref())?;
    sizes::bounded_map("secrets", &request.secrets)?;
    sizes::bounded_map("volume_context", &request.volume_context)?;
    let access = Access { read_only: access.read_only || request.readonly, ..access };
    Ok(PublishCall { volume_id, node_id, access })
}
