//! CSI Identity.

use std::sync::Arc;
use std::time::Duration;

use proto::csi::identity_server::Identity;
use proto::csi::plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
use proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};
use tonic::{Request, Response, Status};

use crate::engine::driver::Driver;
use crate::error::Error;
use crate::wire::call::refused;

/// About as long as a liveness probe waits.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct IdentityService(pub(crate) Arc<Driver>);

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _request: Request<GetPluginInfoRequest>,
    ) -> std::result::Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.0.config.driver_name.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: std::collections::HashMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<GetPluginCapabilitiesRequest>,
    ) -> std::result::Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let services = [
            (service::Type::ControllerService, self.0.config.mode.has_controller()),
            (service::Type::VolumeAccessibilityConstraints, self.0.wire_topology().is_some()),
        ];
        let services = services.into_iter().filter(|(_, is_offered)| *is_offered);
        let services = services.map(|(service, _)| Type::Service(Service { r#type: service.into() }));
        let expansion =
            Type::VolumeExpansion(VolumeExpansion { r#type: volume_expansion::Type::Online.into() });
        let capability = |offered| PluginCapability { r#type: Some(offered) };
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities: services.chain([expansion]).map(capability).collect(),
        }))
    }

    async fn probe(
        &self,
        _request: Request<ProbeRequest>,
    ) -> std::result::Result<Response<ProbeResponse>, Status> {
        let readiness = self.0.readiness.clone();
        let asked = tokio::task::spawn_blocking(move || readiness.check(PROBE_LIMIT)).await;
        match asked.unwrap_or(Err(Error::Panicked { operation: "csi.Probe" })) {
            Ok(()) => Ok(Response::new(ProbeResponse { ready: Some(true) })),
            Err(error) => Err(refused("csi.Probe", &error)),
        }
    }
}
