//! CSI calls to one driver, as kubelet and the external provisioner make them: a new connection per
//! call, authority `localhost`, a timeout of two minutes.
//!
//! Callers need to know whether a failed call may have left a mount behind: see
//! [`Error::is_final`].

mod controller;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use proto::csi::{
    self,
    node_client::NodeClient,
    node_service_capability::{Type as NodeCapability, rpc::Type as NodeRpc},
};
use tokio::sync::OnceCell;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use tracing::{Instrument, debug_span, info_span};

use crate::clients::unix_channel;
pub(crate) use controller::ControllerCapabilities;

/// kubelet's `csiTimeout`.
const DEADLINE: Duration = Duration::from_secs(120);

/// A CSI call that the driver refused or did not answer in time, or that could not connect.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{method} of driver {driver}: rpc error: code = {code:?} desc = {message}")]
pub struct Error {
    pub driver: String,
    pub method: &'static str,
    pub code: Code,
    pub message: String,
}

impl Error {
    /// Whether the driver certainly did nothing. After any other error the volume may be partly
    /// mounted, so it needs an unpublish and unstage later (kubernetes, csi_client.go
    /// `isFinalError`).
    pub fn is_final(&self) -> bool {
        match self.code {
            Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted => false,
            Code::Ok
            | Code::Unknown
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss
            | Code::Unauthenticated => true,
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The capabilities that a node plugin reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NodeCapabilities {
    pub(crate) stage: bool,
    pub(crate) mount_group: bool,
    pub(crate) single_node_multi_writer: bool,
    pub(crate) volume_stats: bool,
    /// NodeGetVolumeStats returns it.
    pub(crate) volume_condition: bool,
    pub(crate) expand: bool,
}

/// A registered driver: its name and its socket.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    name: String,
    endpoint: PathBuf,
    /// They hold for this registration.
    controller: Arc<OnceCell<ControllerCapabilities>>,
}

impl Driver {
    pub(crate) fn new(name: &str, endpoint: &Path) -> Self {
        Self { name: name.to_owned(), endpoint: endpoint.to_owned(), controller: Arc::default() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) async fn node_get_info(&self) -> Result<csi::NodeGetInfoResponse> {
        self.node("NodeGetInfo", "", |mut node| async move {
            node.node_get_info(csi::NodeGetInfoRequest {}).await
        })
        .await
    }

    pub(crate) async fn node_capabilities(&self) -> Result<NodeCapabilities> {
        let reply = self
            .node("NodeGetCapabilities", "", |mut node| async move {
                node.node_get_capabilities(csi::NodeGetCapabilitiesRequest {}).await
            })
            .await?;
        Ok(known_capabilities(&reply))
    }

    pub(crate) async fn node_stage_volume(&self, request: csi::NodeStageVolumeRequest) -> Result<()> {
        let volume_id = request.volume_id.clone();
        self.node(
            "NodeStageVolume",
            &volume_id,
            |mut node| async move { node.node_stage_volume(request).await },
        )
        .await
        .map(drop)
    }

    pub(crate) async fn node_unstage_volume(
        &self,
        volume_id: &str,
        staging_target_path: &Path,
    ) -> Result<()> {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: staging_target_path.to_string_lossy().into_owned(),
        };
        self.node("NodeUnstageVolume", volume_id, |mut node| async move {
            node.node_unstage_volume(request).await
        })
        .await
        .map(drop)
    }

    pub(crate) async fn node_publish_volume(&self, request: csi::NodePublishVolumeRequest) -> Result<()> {
        let volume_id = request.volume_id.clone();
        self.node("NodePublishVolume", &volume_id, |mut node| async move {
            node.node_publish_volume(request).await
        })
        .await
        .map(drop)
    }

    pub(crate) async fn node_unpublish_volume(&self, volume_id: &str, target_path: &Path) -> Result<()> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: target_path.to_string_lossy().into_owned(),
        };
        self.node("NodeUnpublishVolume", volume_id, |mut node| async move {
            node.node_unpublish_volume(request).await
        })
        .await
        .map(drop)
    }

    pub(crate) async fn node_volume_stats(
        &self,
        volume_id: &str,
        volume_path: &Path,
    ) -> Result<csi::NodeGetVolumeStatsResponse> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: volume_id.to_owned(),
            volume_path: volume_path.to_string_lossy().into_owned(),
            staging_target_path: String::new(),
        };
        self.node("NodeGetVolumeStats", volume_id, |mut node| async move {
            node.node_get_volume_stats(request).await
        })
        .await
    }

    /// Grows the file system of a volume that is mounted at `request.volume_path`.
    pub(crate) async fn node_expand_volume(&self, request: csi::NodeExpandVolumeRequest) -> Result<()> {
        let volume_id = request.volume_id.clone();
        self.node(
            "NodeExpandVolume",
            &volume_id,
            |mut node| async move { node.node_expand_volume(request).await },
        )
        .await
        .map(drop)
    }

    async fn node<T, F>(
        &self,
        method: &'static str,
        object: &str,
        rpc: impl FnOnce(NodeClient<Channel>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        self.call(method, object, |channel| rpc(NodeClient::new(channel))).await
    }

    async fn call<T, F>(
        &self,
        method: &'static str,
        object: &str,
        rpc: impl FnOnce(Channel) -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let name = format!("csi.{method}");
        let span = match method {
            // Called repeatedly for every volume.
            "NodeGetVolumeStats" => debug_span!("csi", span = name, volume_id = object),
            _ => info_span!("csi", span = name, driver = self.name, volume_id = object),
        };
        let reply = async {
            let channel = unix_channel::connect(&self.endpoint)
                .await
                .map_err(|e| Status::unavailable(format!("dial {}: {e}", self.endpoint.display())))?;
            rpc(channel).await
        };
        match tokio::time::timeout(DEADLINE, reply).instrument(span).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.error(method, status.code(), &unix_channel::text(&status))),
            Err(_) => {
                let message = format!("no answer within {} s", DEADLINE.as_secs());
                Err(self.error(method, Code::DeadlineExceeded, &message))
            }
        }
    }

    fn error(&self, method: &'static str, code: Code, message: &str) -> Error {
        Error { driver: self.name.clone(), method, code, message: message.to_owned() }
    }
}

fn known_capabilities(reply: &csi::NodeGetCapabilitiesResponse) -> NodeCapabilities {
    let has = |wanted: NodeRpc| {
        reply.capabilities.iter().any(|c| match &c.r#type {
            Some(NodeCapability::Rpc(rpc)) => rpc.r#type() == wanted,
            None => false,
        })
    };
    NodeCapabilities {
        stage: has(NodeRpc::StageUnstageVolume),
        mount_group: has(NodeRpc::VolumeMountGroup),
        single_node_multi_writer: has(NodeRpc::SingleNodeMultiWriter),
        volume_stats: has(NodeRpc::GetVolumeStats),
        volume_condition: has(NodeRpc::GetVolumeStats) && has(NodeRpc::VolumeCondition),
        expand: has(NodeRpc::ExpandVolume),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: Code) -> Error {
        Error { driver: "d".to_owned(), method: "NodeStageVolume", code, message: "why".to_owned() }
    }

    #[test]
    fn an_error_after_which_something_may_be_mounted_is_not_final() {
        for code in [
            Code::Cancelled,
            Code::DeadlineExceeded,
            Code::Unavailable,
            Code::ResourceExhausted,
            Code::Aborted,
        ] {
            assert!(!error(code).is_final(), "{code:?}");
        }
        for code in [Code::Internal, Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition] {
            assert!(error(code).is_final(), "{code:?}");
        }
    }

    #[tokio::test]
    async fn a_missing_socket_is_unavailable_and_names_the_path() {
        let driver = Driver::new("csi.example.com", Path::new("/nonexistent/csi.sock"));
        let error = driver.node_get_info().await.unwrap_err();
        assert_eq!(error.code, Code::Unavailable);
        assert!(error.message.contains("/nonexistent/csi.sock"), "{}", error.message);
        assert!(!error.is_final());
    }
}
