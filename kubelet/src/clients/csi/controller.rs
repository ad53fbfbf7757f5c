//! Calls of the controller service, as the external provisioner, snapshotter and resizer make them.

use std::future::Future;

use proto::csi::{
    self,
    controller_client::ControllerClient,
    controller_service_capability::{Type, rpc::Type as Rpc},
};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::{Driver, Result};
use crate::clients::csi_secrets::Secrets;

/// The capabilities that a controller plugin reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ControllerCapabilities {
    pub(crate) snapshot: bool,
    pub(crate) list_snapshots: bool,
    pub(crate) clone: bool,
    pub(crate) expand: bool,
    pub(crate) single_node_multi_writer: bool,
}

impl Driver {
    /// Asks once in a registration.
    pub(crate) async fn controller_capabilities(&self) -> Result<ControllerCapabilities> {
        let ask = async || {
            let reply = self
                .controller("ControllerGetCapabilities", "", |mut controller| async move {
                    controller.controller_get_capabilities(csi::ControllerGetCapabilitiesRequest {}).await
                })
                .await?;
            Ok(known_capabilities(&reply))
        };
        self.controller.get_or_try_init(ask).await.copied()
    }

    pub(crate) async fn create_volume(&self, request: csi::CreateVolumeRequest) -> Result<csi::Volume> {
        let name = request.name.clone();
        let reply = self
            .controller("CreateVolume", &name, |mut controller| async move {
                controller.create_volume(request).await
            })
            .await?;
        reply.volume.ok_or_else(|| self.error("CreateVolume", Code::Internal, "the reply has no volume"))
    }

    pub(crate) async fn delete_volume(&self, volume_id: &str, secrets: Secrets) -> Result<()> {
        let request =
            csi::DeleteVolumeRequest { volume_id: volume_id.to_owned(), secrets: secrets.into_map() };
        self.controller("DeleteVolume", volume_id, |mut controller| async move {
            controller.delete_volume(request).await
        })
        .await
        .map(drop)
    }

    pub(crate) async fn controller_expand_volume(
        &self,
        request: csi::ControllerExpandVolumeRequest,
    ) -> Result<csi::ControllerExpandVolumeResponse> {
        let volume_id = request.volume_id.clone();
        self.controller("ControllerExpandVolume", &volume_id, |mut controller| async move {
            controller.controller_expand_volume(request).await
        })
        .await
    }

    pub(crate) async fn create_snapshot(&self, request: csi::CreateSnapshotRequest) -> Result<csi::Snapshot> {
        let name = request.name.clone();
        let reply = self
            .controller("CreateSnapshot", &name, |mut controller| async move {
                controller.create_snapshot(request).await
            })
            .await?;
        reply
            .snapshot
            .ok_or_else(|| self.error("CreateSnapshot", Code::Internal, "the reply has no snapshot"))
    }

    pub(crate) async fn delete_snapshot(&self, snapshot_id: &str, secrets: Secrets) -> Result<()> {
        let request =
            csi::DeleteSnapshotRequest { snapshot_id: snapshot_id.to_owned(), secrets: secrets.into_map() };
        self.controller("DeleteSnapshot", snapshot_id, |mut controller| async move {
            controller.delete_snapshot(request).await
        })
        .await
        .map(drop)
    }

    /// The snapshot with this id, by ListSnapshots; `None` if the driver does not know it.
    pub(crate) async fn find_snapshot(&self, snapshot_id: &str) -> Result<Option<csi::Snapshot>> {
        let request = csi::ListSnapshotsRequest {
            snapshot_id: snapshot_id.to_owned(),
            ..csi::ListSnapshotsRequest::default()
        };
        let reply = self
            .controller("ListSnapshots", snapshot_id, |mut controller| async move {
                controller.list_snapshots(request).await
            })
            .await?;
        Ok(reply
            .entries
            .into_iter()
            .find_map(|entry| entry.snapshot.filter(|snapshot| snapshot.snapshot_id == snapshot_id)))
    }

    async fn controller<T, F>(
        &self,
        method: &'static str,
        object: &str,
        rpc: impl FnOnce(ControllerClient<Channel>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        self.call(method, object, |channel| rpc(ControllerClient::new(channel))).await
    }
}

fn known_capabilities(reply: &csi::ControllerGetCapabilitiesResponse) -> ControllerCapabilities {
    let has = |wanted: Rpc| {
        reply.capabilities.iter().any(|c| match &c.r#type {
            Some(Type::Rpc(rpc)) => rpc.r#type() == wanted,
            None => false,
        })
    };
    ControllerCapabilities {
        snapshot: has(Rpc::CreateDeleteSnapshot),
        list_snapshots: has(Rpc::ListSnapshots),
        clone: has(Rpc::CloneVolume),
        expand: has(Rpc::ExpandVolume),
        single_node_multi_writer: has(Rpc::SingleNodeMultiWriter),
    }
}
