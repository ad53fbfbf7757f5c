//! CSI calls as kubelet makes them: a connection of its own for each.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use hyper_util::rt::TokioIo;
use proto::csi::controller_client::ControllerClient;
use proto::csi::node_client::NodeClient;
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use proto::csi::{
    CapacityRange, CreateSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest, DeleteVolumeRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
    VolumeCapability,
};
use tokio::net::UnixStream;
use tokio::runtime::Builder;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};
use tower::service_fn;

const VOLUME_BYTES: i64 = 64 << 20;

#[derive(Debug, Clone)]
pub(super) struct Client {
    socket: PathBuf,
    kubelet_dir: PathBuf,
}

/// A volume and where it belongs on this node.
pub(super) struct Volume {
    id: String,
    pub(super) globalmount: PathBuf,
    pub(super) target: PathBuf,
}

impl Volume {
    /// Its files in the pool.
    pub(super) fn data(&self, pool: &Path) -> PathBuf {
        pool.join("volumes").join(&self.id).join("data")
    }

    /// Where its daemon shows its metrics.
    pub(super) fn metrics(&self, run_dir: &Path) -> PathBuf {
        run_dir.join(self.id.trim_start_matches("vol-")).join("prom.sock")
    }
}

impl Client {
    pub(super) fn new(socket: PathBuf, kubelet_dir: PathBuf) -> Self {
        Self { socket, kubelet_dir }
    }

    fn call<T>(
        &self,
        what: &str,
        call: impl AsyncFnOnce(Channel) -> Result<Response<T>, Status>,
    ) -> Result<T> {
        let socket = self.socket.clone();
        // The connection is closed with its runtime, whose making is a few hundredths of a millisecond.
        let runtime = Builder::new_current_thread().enable_all().build().context("start tokio")?;
        let answer = runtime.block_on(async {
            let connector = service_fn(move |_| {
                let socket = socket.clone();
                async move { UnixStream::connect(socket).await.map(TokioIo::new) }
            });
            let endpoint = Endpoint::from_static("http://localhost");
            let channel = endpoint.connect_with_connector(connector).await.context("dial the driver")?;
            anyhow::Ok(call(channel).await)
        })?;
        let answer = answer.map_err(|status| anyhow!("{what}: {:?}: {}", status.code(), status.message()));
        answer.map(Response::into_inner)
    }

    /// CreateVolume; the node's directories are not made yet.
    pub(super) fn create(&self, name: &str) -> Result<Volume> {
        self.create_of(name, VOLUME_BYTES)
    }

    pub(super) fn create_of(&self, name: &str, required_bytes: i64) -> Result<Volume> {
        self.create_with(name, required_bytes, &[])
    }

    pub(super) fn create_with(
        &self,
        name: &str,
        required_bytes: i64,
        parameters: &[(&str, &str)],
    ) -> Result<Volume> {
        let parameters = parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            parameters: parameters.collect(),
            ..Default::default()
        };
        let reply = self.call("CreateVolume", async |channel| {
            ControllerClient::new(channel).create_volume(request).await
        })?;
        let id = reply.volume.context("CreateVolume answers without a volume")?.volume_id;
        let stage = self.kubelet_dir.join("plugins/kubernetes.io/csi").join(::tests::node::DRIVER).join(&id);
        let target = self.kubelet_dir.join("pods").join(name).join("volumes/kubernetes.io~csi/pv/mount");
        Ok(Volume { id, globalmount: stage.join("globalmount"), target })
    }

    /// The directories that kubelet makes before it calls.
    pub(super) fn make_directories(volume: &Volume) -> Result<()> {
        let parent = volume.target.parent().context("a target has a parent")?;
        for dir in [&volume.globalmount, parent] {
            fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        Ok(())
    }

    pub(super) fn stage(&self, volume: &Volume) -> Result<()> {
        let request = NodeStageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(&volume.globalmount),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.call("NodeStageVolume", async |channel| {
            NodeClient::new(channel).node_stage_volume(request).await
        })?;
        Ok(())
    }

    pub(super) fn publish(&self, volume: &Volume) -> Result<()> {
        let request = NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(&volume.globalmount),
            target_path: text(&volume.target),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.call("NodePublishVolume", async |channel| {
            NodeClient::new(channel).node_publish_volume(request).await
        })?;
        Ok(())
    }

    pub(super) fn unpublish(&self, volume: &Volume) -> Result<()> {
        let request =
            NodeUnpublishVolumeRequest { volume_id: volume.id.clone(), target_path: text(&volume.target) };
        self.call("NodeUnpublishVolume", async |channel| {
            NodeClient::new(channel).node_unpublish_volume(request).await
        })?;
        Ok(())
    }

    pub(super) fn unstage(&self, volume: &Volume) -> Result<()> {
        let request = NodeUnstageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(&volume.globalmount),
        };
        self.call("NodeUnstageVolume", async |channel| {
            NodeClient::new(channel).node_unstage_volume(request).await
        })?;
        Ok(())
    }

    pub(super) fn delete(&self, volume: &Volume) -> Result<()> {
        let request = DeleteVolumeRequest { volume_id: volume.id.clone(), ..Default::default() };
        self.call("DeleteVolume", async |channel| {
            ControllerClient::new(channel).delete_volume(request).await
        })?;
        Ok(())
    }

    /// The snapshot's id.
    pub(super) fn create_snapshot(&self, volume: &Volume, name: &str) -> Result<String> {
        let request = CreateSnapshotRequest {
            source_volume_id: volume.id.clone(),
            name: name.to_owned(),
            ..Default::default()
        };
        let reply = self.call("CreateSnapshot", async |channel| {
            ControllerClient::new(channel).create_snapshot(request).await
        })?;
        let snapshot = reply.snapshot.context("CreateSnapshot answers without a snapshot")?;
        anyhow::ensure!(snapshot.ready_to_use, "snapshot {name} is not ready on a pool that shares blocks");
        Ok(snapshot.snapshot_id)
    }

    pub(super) fn delete_snapshot(&self, id: &str) -> Result<()> {
        let request = DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
        self.call("DeleteSnapshot", async |channel| {
            ControllerClient::new(channel).delete_snapshot(request).await
        })?;
        Ok(())
    }
}

fn capability() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() }),
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
