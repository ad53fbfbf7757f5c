//! CSI Node, the gRPC side. Checks come in the order that callers rely on: first the request
//! (INVALID_ARGUMENT), then the volume (NOT_FOUND), then paths.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use proto::csi::node_server::Node;
use proto::csi::node_service_capability::{Rpc, Type, rpc};
use proto::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability,
    NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse,
    NodeUnstageVolumeRequest, NodeUnstageVolumeResponse,
};
use tonic::{Request, Response, Status};

use crate::engine::driver::Driver;
use crate::engine::locks::Lock;
use crate::engine::publish::{self, PublishSpec};
use crate::error::{Error, Result};
use crate::kernel::host_path::HostPath;
use crate::model::capability::{Access, Parsed};
use crate::model::capacity::WantedCapacity;
use crate::model::ids::VolumeId;
use crate::wire::call::{UNPUBLISH, refused, run};
use crate::wire::controller::{find_volume, required, required_id};

#[derive(Debug)]
pub(crate) struct NodeService(pub(crate) Arc<Driver>);

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_get_info(
        &self,
        _request: Request<NodeGetInfoRequest>,
    ) -> std::result::Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.0.config.node_id.clone(),
            max_volumes_per_node: self.0.config.max_volumes.into(),
            accessible_topology: self.0.wire_topology(),
        }))
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<NodeGetCapabilitiesRequest>,
    ) -> std::result::Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let offered = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::ExpandVolume,
            rpc::Type::VolumeCondition,
            rpc::Type::SingleNodeMultiWriter,
            rpc::Type::VolumeMountGroup,
        ];
        let capability =
            |t: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: t.into() })) };
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: offered.into_iter().map(capability).collect(),
        }))
    }

    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> std::result::Result<Response<NodeStageVolumeResponse>, Status> {
        let name = "csi.NodeStageVolume";
        let stage = parse_stage(request.into_inner()).map_err(|e| refused(name, &e))?;
        let volume_id = stage.volume_id.clone();
        run(&self.0, name, Lock::Volume(&volume_id), move |driver| {
            let id = find_volume(driver, &stage.volume_id)?;
            let allowed = driver.attachments.check_attachment(&id, &stage.publish_context)?;
            let how = Parsed { access: allowed.limit_stage(stage.how.access), ..stage.how };
            driver.stages.stage(&id, &driver.stages.staging_path(&id, &stage.staging_path)?, &how)
        })
        .await?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> std::result::Result<Response<NodeUnstageVolumeResponse>, Status> {
        let name = "csi.NodeUnstageVolume";
        let NodeUnstageVolumeRequest { volume_id, staging_target_path } = request.into_inner();
        let path = parse_undo(&volume_id, "staging_target_path", &staging_target_path)
            .map_err(|e| refused(name, &e))?;
        if let Some(id) = VolumeId::parse(&volume_id) {
            self.0.daemons.waits.abandon(&id);
            run(&self.0, name, Lock::Volume(&volume_id), move |driver| driver.stages.unstage(&id, &path))
                .await?;
        }
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> std::result::Result<Response<NodePublishVolumeResponse>, Status> {
        let name = "csi.NodePublishVolume";
        let publish = parse_publish(request.into_inner()).map_err(|e| refused(name, &e))?;
        let volume_id = publish.volume_id.clone();
        run(&self.0, name, Lock::Volume(&volume_id), move |driver| {
            let id = find_volume(driver, &publish.volume_id)?;
            let allowed = driver.attachments.check_attachment(&id, &publish.publish_context)?;
            let staging_path = match &publish.staging_path {
                Some(path) => driver.stages.staging_path(&id, path)?,
                None => return Err(Error::NotStaged { volume_id: id, path: PathBuf::new() }),
            };
            let asked = publish.target_path.as_asked().to_owned();
            publish::check_apart(&staging_path, &asked)?;
            let target_path = driver.targets.target_path(&id, &publish.target_path)?;
            let asked = (asked != target_path).then_some(asked);
            // Earlier drivers did not limit a publish by its attachment: what they published stays so
            // until its pod ends.
            let access = if driver.targets.is_recorded_with(&id, &target_path, publish.access)? {
                publish.access
            } else {
                allowed.limit(publish.access)
            };
            driver.targets.publish(&id, &PublishSpec { staging_path, target_path, asked, access })
        })
        .await?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> std::result::Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let name = UNPUBLISH;
        let NodeUnpublishVolumeRequest { volume_id, target_path } = request.into_inner();
        let path = parse_undo(&volume_id, "target_path", &target_path).map_err(|e| refused(name, &e))?;
        if let Some(id) = VolumeId::parse(&volume_id) {
            run(&self.0, name, Lock::Volume(&volume_id), move |driver| driver.targets.unpublish(&id, &path))
                .await?;
        }
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> std::result::Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let name = "csi.NodeGetVolumeStats";
        let NodeGetVolumeStatsRequest { volume_id, volume_path, .. } = request.into_inner();
        let volume_id = required_id("volume_id", volume_id).map_err(|e| refused(name, &e))?;
        let volume_path = required("volume_path", volume_path).map_err(|e| refused(name, &e))?;
        let id = volume_id.clone();
        let stats = run(&self.0, name, Lock::Nothing(&volume_id), move |driver| {
            driver.statistics.of(&find_volume(driver, &id)?, &volume_path)
        })
        .await?;
        Ok(Response::new(stats))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> std::result::Result<Response<NodeExpandVolumeResponse>, Status> {
        let name = "csi.NodeExpandVolume";
        let expand = parse_expand(request.into_inner()).map_err(|e| refused(name, &e))?;
        let volume_id = expand.volume_id.clone();
        let capacity_bytes = run(&self.0, name, Lock::Volume(&volume_id), move |driver| {
            let id = find_volume(driver, &expand.volume_id)?;
            driver.expansion.expand_on_node(&id, &expand.volume_path, expand.wanted)
        })
        .await?;
        let capacity_bytes = i64::try_from(capacity_bytes).unwrap_or(i64::MAX);
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes }))
    }
}

struct StageCall {
    volume_id: String,
    staging_path: HostPath,
    how: Parsed,
    publish_context: HashMap<String, String>,
}

fn parse_stage(request: NodeStageVolumeRequest) -> Result<StageCall> {
    Ok(StageCall {
        volume_id: required_id("volume_id", request.volume_id)?,
        staging_path: HostPath::parse("staging_target_path", &request.staging_target_path)?,
        how: Parsed::parse(request.volume_capability.as_ref())?,
        publish_context: request.publish_context,
    })
}

struct PublishCall {
    volume_id: String,
    staging_path: Option<HostPath>,
    target_path: HostPath,
    access: Access,
    publish_context: HashMap<String, String>,
}

fn parse_publish(request: NodePublishVolumeRequest) -> Result<PublishCall> {
    let volume_id = required_id("volume_id", request.volume_id)?;
    let target_path = HostPath::parse("target_path", &request.target_path)?;
    let access = Access::parse(request.volume_capability.as_ref())?;
    // A missing path is not a fault of the request: the volume is not staged (CSI spec,
    // FAILED_PRECONDITION).
    let staging_path = match request.staging_target_path.as_str() {
        "" => None,
        path => Some(HostPath::parse("staging_target_path", path)?),
    };
    let access = Access { read_only: access.read_only || request.readonly, ..access };
    let publish_context = request.publish_context;
    Ok(PublishCall { volume_id, staging_path, target_path, access, publish_context })
}

struct ExpandCall {
    volume_id: String,
    volume_path: String,
    wanted: WantedCapacity,
}

fn parse_expand(request: NodeExpandVolumeRequest) -> Result<ExpandCall> {
    if let Some(capability) = &request.volume_capability {
        Access::parse(Some(capability))?;
    }
    Ok(ExpandCall {
        volume_id: required_id("volume_id", request.volume_id)?,
        volume_path: required("volume_path", request.volume_path)?,
        wanted: WantedCapacity::parse(request.capacity_range.as_ref())?,
    })
}

fn parse_undo(volume_id: &str, field: &'static str, path: &str) -> Result<HostPath> {
    if volume_id.is_empty() {
        return Err(Error::MissingField { field: "volume_id" });
    }
    HostPath::parse(field, path)
}
