//! CSI Controller: the wire side of volumes' coming and going.

use std::collections::HashMap;
use std::sync::Arc;

use proto::csi::controller_server::Controller;
use proto::csi::controller_service_capability::{Rpc, Type, rpc};
use proto::csi::validate_volume_capabilities_response::Confirmed;
use proto::csi::{
    ControllerGetCapabilitiesRequest, ControllerGetCapabilitiesResponse, ControllerServiceCapability,
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, DeleteVolumeResponse, GetCapacityRequest,
    GetCapacityResponse, Topology, TopologyRequirement, ValidateVolumeCapabilitiesRequest,
    ValidateVolumeCapabilitiesResponse, Volume,
};
use tonic::{Request, Response, Status};

use crate::capability::Access;
use crate::capacity::WantedCapacity;
use crate::config::Config;
use crate::driver::{Driver, Lock, refused, run};
use crate::error::{Error, Result};
use crate::parameters::Parameters;
use crate::provision::VolumeWish;
use crate::volume::{VolumeId, VolumeName};

#[derive(Debug)]
pub(crate) struct ControllerService(pub(crate) Arc<Driver>);

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn controller_get_capabilities(
        &self,
        _request: Request<ControllerGetCapabilitiesRequest>,
    ) -> std::result::Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let offered =
            [rpc::Type::CreateDeleteVolume, rpc::Type::GetCapacity, rpc::Type::SingleNodeMultiWriter];
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
        let wish = parse_create(request.into_inner(), &self.0.config).map_err(|e| refused(name, &e))?;
        let id = VolumeId::for_name(&wish.name);
        let volume_id = id.clone();
        let record =
            run(&self.0, name, Lock::Volume(id.as_str()), move |driver| driver.create(&volume_id, wish))
                .await?;
        Ok(Response::new(CreateVolumeResponse {
            volume: Some(Volume {
                capacity_bytes: wire_bytes(record.capacity_bytes),
                volume_id: id.into(),
                accessible_topology: vec![this_node(&self.0.config)],
                ..Default::default()
            }),
        }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> std::result::Result<Response<DeleteVolumeResponse>, Status> {
        let name = "csi.DeleteVolume";
        let volume_id =
            required("volume_id", request.into_inner().volume_id).map_err(|e| refused(name, &e))?;
        // What this driver never gave out does not exist: deleted.
        if let Some(id) = VolumeId::parse(&volume_id) {
            run(&self.0, name, Lock::Volume(&volume_id), move |driver| driver.delete(&id)).await?;
        }
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> std::result::Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let result = validate(&self.0, request.into_inner());
        result.map(Response::new).map_err(|e| refused("csi.ValidateVolumeCapabilities", &e))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> std::result::Result<Response<GetCapacityResponse>, Status> {
        let request = request.into_inner();
        let driver = self.0.clone();
        let free = tokio::task::spawn_blocking(move || driver.free_bytes(&request)).await;
        let free = free.unwrap_or(Err(Error::Panicked { operation: "GetCapacity" }));
        let available_capacity = wire_bytes(free.map_err(|e| refused("csi.GetCapacity", &e))?);
        Ok(Response::new(GetCapacityResponse { available_capacity, ..Default::default() }))
    }
}

impl Driver {
    /// What a volume as described could claim now; 0 where it could not be at all.
    fn free_bytes(&self, request: &GetCapacityRequest) -> Result<u64> {
        let is_elsewhere = request
            .accessible_topology
            .as_ref()
            .is_some_and(|topology| !includes_node(topology, &self.config));
        let is_supported = request.volume_capabilities.iter().all(|c| Access::parse(Some(c)).is_ok())
            && Parameters::parse(&request.parameters).is_ok();
        if is_elsewhere || !is_supported {
            return Ok(0);
        }
        Ok(self.pool.capacity_bytes()?.saturating_sub(self.journal.committed_bytes()))
    }
}

fn parse_create(request: CreateVolumeRequest, config: &Config) -> Result<VolumeWish> {
    let name = VolumeName::parse(&request.name)?;
    Access::parse_all(&request.volume_capabilities)?;
    let parameters = Parameters::parse(&request.parameters)?;
    if let Some(key) = request.mutable_parameters.keys().next() {
        let known = "none: MODIFY_VOLUME is not offered".to_owned();
        return Err(Error::UnknownParameter { name: key.clone(), known });
    }
    if request.volume_content_source.is_some() {
        return Err(Error::invalid("volume_content_source", "", "snapshots and clones are not offered"));
    }
    let capacity = WantedCapacity::parse(request.capacity_range.as_ref())?;
    check_topology(request.accessibility_requirements.as_ref(), config)?;
    Ok(VolumeWish { name, capacity, parameters })
}

/// CSI spec: the volume must be accessible from at least one of `requisite`.
fn check_topology(requirement: Option<&TopologyRequirement>, config: &Config) -> Result<()> {
    let requisite = requirement.map_or(&[][..], |r| &r.requisite);
    if requisite.is_empty() || requisite.iter().any(|topology| includes_node(topology, config)) {
        return Ok(());
    }
    Err(Error::OutOfTopology { key: config.topology_key(), node_id: config.node_id.clone() })
}

fn includes_node(topology: &Topology, config: &Config) -> bool {
    let key = config.topology_key();
    topology.segments.iter().all(|(k, v)| *k == key && *v == config.node_id)
}

/// Where the volumes of this pool can be used.
pub(crate) fn this_node(config: &Config) -> Topology {
    Topology { segments: HashMap::from([(config.topology_key(), config.node_id.clone())]) }
}

fn validate(
    driver: &Driver,
    request: ValidateVolumeCapabilitiesRequest,
) -> Result<ValidateVolumeCapabilitiesResponse> {
    let volume_id = required("volume_id", request.volume_id)?;
    if request.volume_capabilities.is_empty() {
        return Err(Error::MissingField { field: "volume_capabilities" });
    }
    find_volume(driver, &volume_id)?;
    let unsupported = Access::parse_all(&request.volume_capabilities)
        .map(drop)
        .and_then(|()| Parameters::parse(&request.parameters).map(drop))
        .err();
    Ok(match unsupported {
        Some(reason) => ValidateVolumeCapabilitiesResponse { confirmed: None, message: reason.to_string() },
        None => ValidateVolumeCapabilitiesResponse {
            confirmed: Some(Confirmed {
                volume_context: request.volume_context,
                volume_capabilities: request.volume_capabilities,
                parameters: request.parameters,
                mutable_parameters: HashMap::new(),
            }),
            message: String::new(),
        },
    })
}

/// The id of a volume that exists.
pub(crate) fn find_volume(driver: &Driver, volume_id: &str) -> Result<VolumeId> {
    let unknown = || Error::UnknownVolume { volume_id: volume_id.to_owned() };
    let id = VolumeId::parse(volume_id).ok_or_else(unknown)?;
    driver.journal.find(&id)?.map(|_| id).ok_or_else(unknown)
}

pub(crate) fn required(field: &'static str, value: String) -> Result<String> {
    if value.is_empty() { Err(Error::MissingField { field }) } else { Ok(value) }
}

fn wire_bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
