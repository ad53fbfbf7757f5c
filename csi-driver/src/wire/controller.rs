//! CSI Controller, the gRPC side.

mod attach;
mod expand;
mod list;
pub(crate) mod snapshots;
mod validate;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use proto::csi::controller_server::Controller;
use proto::csi::controller_service_capability::{Rpc, Type, rpc};
use proto::csi::volume_content_source::{self, SnapshotSource, VolumeSource};
use proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerServiceCapability,
    ControllerUnpublishVolumeRequest, ControllerUnpublishVolumeResponse, CreateSnapshotRequest,
    CreateSnapshotResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteSnapshotRequest,
    DeleteSnapshotResponse, DeleteVolumeRequest, DeleteVolumeResponse, GetCapacityRequest,
    GetCapacityResponse, GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, Topology, TopologyRequirement,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume, VolumeContentSource,
};
use tonic::{Request, Response, Status};

use crate::engine::driver::Driver;
use crate::engine::locks::Lock;
use crate::engine::provision::VolumeSpec;
use crate::error::{Error, Result};
use crate::model::capability::Access;
use crate::model::capacity::{InodeRoom, WantedCapacity};
use crate::model::ids::VolumeId;
use crate::model::name::VolumeName;
use crate::model::parameters::Parameters;
use crate::model::records::{Source, VolumeRecord};
use crate::model::sizes;
use crate::model::topology::{self, Segment};
use crate::wire::call::{refused, refused_creation, run, run_creation};

/// A pool that does not answer within this time is away.
const CAPACITY_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct ControllerService(pub(crate) Arc<Driver>);

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn controller_get_capabilities(
        &self,
        _request: Request<ControllerGetCapabilitiesRequest>,
    ) -> std::result::Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let mut offered = vec![
            rpc::Type::CreateDeleteVolume,
            rpc::Type::ListVolumes,
            rpc::Type::GetCapacity,
            rpc::Type::CreateDeleteSnapshot,
            rpc::Type::ListSnapshots,
            rpc::Type::CloneVolume,
            rpc::Type::GetSnapshot,
            rpc::Type::ExpandVolume,
            rpc::Type::VolumeCondition,
            rpc::Type::GetVolume,
            rpc::Type::SingleNodeMultiWriter,
        ];
        if self.0.config.attach {
            offered.extend([
                rpc::Type::PublishUnpublishVolume,
                rpc::Type::PublishReadonly,
                rpc::Type::ListVolumesPublishedNodes,
            ]);
        }
        let capability =
            |t: rpc::Type| ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: t.into() })) };
        Ok(Response::new(ControllerGetCapabilitiesResponse {
            capabilities: offered.into_iter().map(capability).collect(),
        }))
    }

    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> std::result::Result<Response<CreateVolumeResponse>, Status> {
        let name = "csi.CreateVolume";
        let request = request.into_inner();
        let created = request.name.clone();
        // A volume with content can be made only where its source is.
        let may_choose = request.volume_content_source.is_none()
            && request
                .accessibility_requirements
                .as_ref()
                .is_some_and(|wanted| !wanted.requisite.is_empty() || !wanted.preferred.is_empty());
        let spec = parse_create(request, &self.0).map_err(|e| refused_creation(name, &created, &e))?;
        let id = VolumeId::for_name(&spec.name);
        let volume_id = id.clone();
        let record = run_creation(&self.0, name, (Lock::Volume(id.as_str()), &created), move |driver| {
            let made = driver.provisioner.create(&volume_id, spec);
            made.map_err(|e| if may_choose { on_this_node(e, driver.backend.topology()) } else { e })
        })
        .await?;
        let volume = wire_volume(&id, &record, &self.0);
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> std::result::Result<Response<DeleteVolumeResponse>, Status> {
        let name = "csi.DeleteVolume";
        let volume_id =
            required_id("volume_id", request.into_inner().volume_id).map_err(|e| refused(name, &e))?;
        // An id that this driver never issued does not exist: deleted.
        if let Some(id) = VolumeId::parse(&volume_id) {
            run(&self.0, name, Lock::Volume(&volume_id), move |driver| driver.provisioner.delete(&id))
                .await?;
        }
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> std::result::Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let result = validate::validate(&self.0, request.into_inner());
        result.map(Response::new).map_err(|e| refused("csi.ValidateVolumeCapabilities", &e))
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> std::result::Result<Response<ListVolumesResponse>, Status> {
        let (driver, request) = (self.0.clone(), request.into_inner());
        let work = tokio::task::spawn_blocking(move || driver.list_volumes(&request));
        let listed = work.await.unwrap_or(Err(Error::Panicked { operation: "ListVolumes" }));
        listed.map(Response::new).map_err(|e| refused("csi.ListVolumes", &e))
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> std::result::Result<Response<ControllerGetVolumeResponse>, Status> {
        let name = "csi.ControllerGetVolume";
        let volume_id =
            required_id("volume_id", request.into_inner().volume_id).map_err(|e| refused(name, &e))?;
        let id = volume_id.clone();
        let volume = run(&self.0, name, Lock::Nothing(&volume_id), move |driver| {
            driver.get_volume(&find_volume(driver, &id)?)
        });
        volume.await.map(Response::new)
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> std::result::Result<Response<CreateSnapshotResponse>, Status> {
        snapshots::create(&self.0, request.into_inner()).await
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> std::result::Result<Response<DeleteSnapshotResponse>, Status> {
        snapshots::delete(&self.0, request.into_inner()).await
    }

    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> std::result::Result<Response<ListSnapshotsResponse>, Status> {
        snapshots::list(&self.0, &request.into_inner())
    }

    async fn get_snapshot(
        &self,
        request: Request<GetSnapshotRequest>,
    ) -> std::result::Result<Response<GetSnapshotResponse>, Status> {
        snapshots::get(&self.0, request.into_inner())
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> std::result::Result<Response<ControllerExpandVolumeResponse>, Status> {
        let name = "csi.ControllerExpandVolume";
        let call = expand::parse(request.into_inner()).map_err(|e| refused(name, &e))?;
        let volume_id = call.volume_id.clone();
        let expanded = run(&self.0, name, Lock::Volume(&volume_id), move |driver| {
            driver.expansion.expand(&find_volume(driver, &call.volume_id)?, call.wanted)
        });
        Ok(Response::new(ControllerExpandVolumeResponse {
            capacity_bytes: wire_bytes(expanded.await?),
            node_expansion_required: false,
        }))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> std::result::Result<Response<ControllerPublishVolumeResponse>, Status> {
        attach::publish(&self.0, request.into_inner()).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> std::result::Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        attach::unpublish(&self.0, request.into_inner()).await
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> std::result::Result<Response<GetCapacityResponse>, Status> {
        let (driver, request) = (self.0.clone(), request.into_inner());
        let measure = tokio::task::spawn_blocking(move || driver.capacity(&request));
        let capacity = match tokio::time::timeout(CAPACITY_LIMIT, measure).await {
            Ok(Ok(capacity)) => capacity,
            Ok(Err(_panic)) => Err(Error::Panicked { operation: "GetCapacity" }),
            Err(_elapsed) => Err(Error::PoolAway {
                path: self.0.config.pool.clone(),
                reason: format!("it does not answer within {} s", CAPACITY_LIMIT.as_secs()),
            }),
        };
        capacity.map(Response::new).map_err(|e| refused("csi.GetCapacity", &e))
    }
}

impl Driver {
    /// The topology of all volumes, and of this node; `None`: every node reaches them.
    pub(crate) fn wire_topology(&self) -> Option<Topology> {
        self.backend.topology().segments().map(|segments| Topology { segments })
    }

    /// The bytes that a volume with these properties could claim now; 0 if it could not be created.
    fn capacity(&self, request: &GetCapacityRequest) -> Result<GetCapacityResponse> {
        sizes::bounded_map("parameters", &request.parameters)?;
        let reaches = |wanted: &Topology| self.backend.topology().reaches(&wanted.segments);
        let is_elsewhere = request.accessible_topology.as_ref().is_some_and(|wanted| !reaches(wanted));
        // Parameters do not change the capacity. CreateVolume reports wrong ones, and those that this node
        // cannot have, in the claim's events; 0 here would look like a full pool and hide that.
        let is_supported = request.volume_capabilities.iter().all(|c| Access::parse(Some(c)).is_ok());
        if is_elsewhere || !is_supported {
            return Ok(GetCapacityResponse::default());
        }
        let room = self.backend.room()?;
        let bytes_left = room.promised_bytes.saturating_sub(self.journal.committed_bytes());
        let inodes_last =
            |inodes: InodeRoom| inodes.bytes_left(self.journal.committed_inodes(inodes.bytes_each));
        let available = bytes_left.min(room.inodes.map_or(u64::MAX, inodes_last));
        Ok(GetCapacityResponse {
            available_capacity: wire_bytes(available),
            maximum_volume_size: Some(wire_bytes(available.min(room.pool_bytes))),
            minimum_volume_size: Some(1),
        })
    }
}

fn parse_create(request: CreateVolumeRequest, driver: &Driver) -> Result<VolumeSpec> {
    let name = VolumeName::parse(&request.name)?;
    Access::parse_all(&request.volume_capabilities)?;
    sizes::bounded_map("parameters", &request.parameters)?;
    sizes::bounded_map("secrets", &request.secrets)?;
    let parameters = Parameters::parse(&request.parameters)?;
    if let Some(key) = request.mutable_parameters.keys().next() {
        let known = "none: MODIFY_VOLUME is not offered".to_owned();
        return Err(Error::UnknownParameter { name: key.clone(), known });
    }
    let capacity = WantedCapacity::parse(request.capacity_range.as_ref())?;
    check_topology(request.accessibility_requirements.as_ref(), driver.backend.topology())?;
    let source = request.volume_content_source.map(snapshots::parse_source).transpose()?;
    Ok(VolumeSpec { name, capacity, parameters, source })
}

/// The volume as CreateVolume and all later calls describe it.
fn wire_volume(id: &VolumeId, record: &VolumeRecord, driver: &Driver) -> Volume {
    Volume {
        capacity_bytes: wire_bytes(record.capacity_bytes),
        volume_id: id.to_string(),
        volume_context: HashMap::new(),
        content_source: record.source.as_ref().map(wire_source),
        accessible_topology: driver.wire_topology().into_iter().collect(),
    }
}

fn wire_source(source: &Source) -> VolumeContentSource {
    VolumeContentSource {
        r#type: Some(match source {
            Source::Snapshot(id) => {
                volume_content_source::Type::Snapshot(SnapshotSource { snapshot_id: id.to_string() })
            }
            Source::Volume(id) => {
                volume_content_source::Type::Volume(VolumeSource { volume_id: id.to_string() })
            }
        }),
    }
}

/// CSI spec: the volume must be accessible from at least one of `requisite`.
fn check_topology(requirement: Option<&TopologyRequirement>, own: &topology::Topology) -> Result<()> {
    let requisite = requirement.map_or(&[][..], |r| &r.requisite);
    match own {
        topology::Topology::OneNode(Segment { key, value })
            if !requisite.is_empty() && !requisite.iter().any(|wanted| own.reaches(&wanted.segments)) =>
        {
            Err(Error::OutOfTopology { key: key.clone(), node_id: value.clone() })
        }
        topology::Topology::OneNode(_) | topology::Topology::EveryNode => Ok(()),
    }
}

/// CreateVolume's error for a caller that chooses nodes: external-provisioner chooses another one after
/// RESOURCE_EXHAUSTED alone.
fn on_this_node(error: Error, own: &topology::Topology) -> Error {
    match own {
        topology::Topology::OneNode(Segment { key, value }) if is_of_this_node(&error) => {
            Error::NotOnThisNode { key: key.clone(), node_id: value.clone(), source: Box::new(error) }
        }
        topology::Topology::OneNode(_) | topology::Topology::EveryNode => error,
    }
}

/// Whether the volume may be created on another node, whose pool, kernel or keeper is another one.
fn is_of_this_node(error: &Error) -> bool {
    matches!(
        error,
        Error::NoKernelQuota { .. }
            | Error::NoPassthrough { .. }
            | Error::NoKeeper
            | Error::LargerThanPool { .. }
    )
}

/// The id of an existing volume.
pub(crate) fn find_volume(driver: &Driver, volume_id: &str) -> Result<VolumeId> {
    let unknown = || Error::UnknownVolume { volume_id: volume_id.to_owned() };
    let id = VolumeId::parse(volume_id).ok_or_else(unknown)?;
    driver.journal.find(&id)?.map(|_| id).ok_or_else(unknown)
}

pub(crate) fn required(field: &'static str, value: String) -> Result<String> {
    if value.is_empty() { Err(Error::MissingField { field }) } else { Ok(value) }
}

/// An id in a request: of a volume, a snapshot or a node.
pub(crate) fn required_id(field: &'static str, value: String) -> Result<String> {
    let value = required(field, value)?;
    sizes::bounded(field, &value).map(|()| value)
}

pub(crate) fn wire_bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
