//! The container runtime: CRI v1 over one unix socket, for the embedded runtime, containerd and
//! CRI-O.
//!
//! - Every call that changes something is a span `cri.<Method>`; read-only calls are spans at debug
//!   level.
//! - Every call has a deadline.
//! - Every error names the method and its object.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::cri::{
    self, image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient,
};
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};
use tracing::{Instrument, Span, debug_span, info_span};

use crate::clients::unix_channel;

/// kubelet's `runtimeRequestTimeout`.
const DEADLINE: Duration = Duration::from_secs(120);
/// kubelet has none. The runtime ends a pull that stands still.
const PULL_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) const POD_NAME_LABEL: &str = "io.kubernetes.pod.name";
pub(crate) const POD_NAMESPACE_LABEL: &str = "io.kubernetes.pod.namespace";
pub(crate) const POD_UID_LABEL: &str = "io.kubernetes.pod.uid";
pub(crate) const CONTAINER_NAME_LABEL: &str = "io.kubernetes.container.name";
/// The image of a container as its manifest named it: it shows a later change.
pub(crate) const IMAGE_ANNOTATION: &str = "hawser.dev/image";

/// The runtime refused a CRI call or did not answer in time.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{method} {object}: rpc error: code = {code:?} desc = {message}")]
pub struct Error {
    pub method: &'static str,
    /// The pod, container or image it was for.
    pub object: String,
    pub code: Code,
    pub message: String,
}

impl Error {
    /// Whether the embedded runtime's StopContainer reports that the container survived SIGKILL.
    pub(crate) fn is_survival(&self) -> bool {
        self.method == "StopContainer" && self.code == Code::FailedPrecondition
    }

    /// Whether the runtime does not have this call.
    pub(crate) fn is_unimplemented(&self) -> bool {
        self.code == Code::Unimplemented
    }
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// A connection to the runtime; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Cri {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

/// What a runtime says of itself in its Status.
#[derive(Debug, Default)]
pub(crate) struct Abilities {
    /// Descriptions of the records that our own runtime set aside.
    pub(crate) unreadable_records: Vec<String>,
    /// Mounts can be read-only with everything below them.
    pub(crate) recursive_read_only: bool,
}

impl Cri {
    /// Connects to `socket` at the first call.
    pub(crate) fn new(socket: &Path) -> Self {
        let channel = unix_channel::connect_lazily(socket);
        // A list contains every pod's labels and annotations, up to 512 KiB each; tonic's default
        // is 4 MiB.
        let limit = 512 << 20;
        Self {
            runtime: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(limit),
            images: ImageServiceClient::new(channel).max_decoding_message_size(limit),
        }
    }

    pub(crate) async fn version(&self) -> Result<cri::VersionResponse> {
        let mut runtime = self.runtime.clone();
        let request = cri::VersionRequest { version: "v1".to_owned() };
        call("Version", "", DEADLINE, async move { runtime.version(request).await }).await
    }

    pub(crate) async fn abilities(&self) -> Result<Abilities> {
        let mut runtime = self.runtime.clone();
        let request = cri::StatusRequest { verbose: true };
        let status = call("Status", "", DEADLINE, async move { runtime.status(request).await }).await?;
        let records = status.info.get("unreadableRecords");
        // The kubelet's pods name no RuntimeClass, so they get the handler without a name.
        let handler = status.runtime_handlers.into_iter().find(|handler| handler.name.is_empty());
        let features = handler.and_then(|handler| handler.features);
        Ok(Abilities {
            unreadable_records: records.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default(),
            recursive_read_only: features.is_some_and(|features| features.recursive_read_only_mounts),
        })
    }

    /// Returns the sandbox's id.
    pub(crate) async fn run_pod_sandbox(&self, config: cri::PodSandboxConfig) -> Result<String> {
        let mut runtime = self.runtime.clone();
        let object = sandbox_name(&config);
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        let reply =
            call("RunPodSandbox", &object, DEADLINE, async move { runtime.run_pod_sandbox(request).await });
        Ok(reply.await?.pod_sandbox_id)
    }

    /// `pod` appears in spans and errors.
    pub(crate) async fn stop_pod_sandbox(&self, id: &str, pod: &str) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        call("StopPodSandbox", pod, DEADLINE, async move { runtime.stop_pod_sandbox(request).await })
            .await
            .map(drop)
            .or_else(unknown_is_done)
    }

    pub(crate) async fn remove_pod_sandbox(&self, id: &str, pod: &str) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        call("RemovePodSandbox", pod, DEADLINE, async move { runtime.remove_pod_sandbox(request).await })
            .await
            .map(drop)
            .or_else(unknown_is_done)
    }

    /// `None` if the sandbox does not exist.
    pub(crate) async fn pod_sandbox_status(&self, id: &str) -> Result<Option<cri::PodSandboxStatus>> {
        let mut runtime = self.runtime.clone();
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        let reply =
            call("PodSandboxStatus", id, DEADLINE, async move { runtime.pod_sandbox_status(request).await });
        found(reply.await).map(|reply| reply.and_then(|r| r.status))
    }

    /// The sandboxes of one pod, or all (`None`).
    pub(crate) async fn list_pod_sandboxes(&self, pod_uid: Option<&str>) -> Result<Vec<cri::PodSandbox>> {
        let mut runtime = self.runtime.clone();
        let filter = cri::PodSandboxFilter {
            label_selector: uid_selector(pod_uid),
            ..cri::PodSandboxFilter::default()
        };
        let request = cri::ListPodSandboxRequest { filter: Some(filter) };
        let reply = call("ListPodSandbox", pod_uid.unwrap_or(""), DEADLINE, async move {
            runtime.list_pod_sandbox(request).await
        });
        Ok(reply.await?.items)
    }

    /// Returns the container's id.
    pub(crate) async fn create_container(
        &self,
        sandbox_id: &str,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> Result<String> {
        let mut runtime = self.runtime.clone();
        let name = config.metadata.as_ref().map_or("", |m| m.name.as_str());
        let object = format!("{}/{name}", sandbox_name(&sandbox_config));
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let reply =
            call(
                "CreateContainer",
                &object,
                DEADLINE,
                async move { runtime.create_container(request).await },
            );
        Ok(reply.await?.container_id)
    }

    /// `container` appears in spans and errors.
    pub(crate) async fn start_container(&self, id: &str, container: &str) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        call("StartContainer", container, DEADLINE, async move { runtime.start_container(request).await })
            .await
            .map(drop)
    }

    /// SIGTERM, then SIGKILL after `grace`; returns when the container is dead.
    pub(crate) async fn stop_container(&self, id: &str, container: &str, grace: Duration) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let timeout = i64::try_from(grace.as_secs()).unwrap_or(i64::MAX);
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        call("StopContainer", container, DEADLINE.saturating_add(grace), async move {
            runtime.stop_container(request).await
        })
        .await
        .map(drop)
        .or_else(unknown_is_done)
    }

    pub(crate) async fn remove_container(&self, id: &str) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        call("RemoveContainer", id, DEADLINE, async move { runtime.remove_container(request).await })
            .await
            .map(drop)
            .or_else(unknown_is_done)
    }

    pub(crate) async fn list_containers(&self, pod_uid: Option<&str>) -> Result<Vec<cri::Container>> {
        let mut runtime = self.runtime.clone();
        let filter =
            cri::ContainerFilter { label_selector: uid_selector(pod_uid), ..cri::ContainerFilter::default() };
        let request = cri::ListContainersRequest { filter: Some(filter) };
        let reply = call("ListContainers", pod_uid.unwrap_or(""), DEADLINE, async move {
            runtime.list_containers(request).await
        });
        Ok(reply.await?.containers)
    }

    /// `None` if the container does not exist.
    pub(crate) async fn container_status(&self, id: &str) -> Result<Option<cri::ContainerStatus>> {
        let mut runtime = self.runtime.clone();
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        let reply =
            call("ContainerStatus", id, DEADLINE, async move { runtime.container_status(request).await });
        found(reply.await).map(|reply| reply.and_then(|r| r.status))
    }

    /// Makes the runtime open a new log file after the old one was renamed.
    pub(crate) async fn reopen_container_log(&self, id: &str) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let request = cri::ReopenContainerLogRequest { container_id: id.to_owned() };
        call("ReopenContainerLog", id, DEADLINE, async move { runtime.reopen_container_log(request).await })
            .await
            .map(drop)
    }

    /// Runs a program in a container, and returns its output and exit code. The runtime kills it after
    /// `timeout`, whole seconds; `None` means no limit.
    pub(crate) async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<cri::ExecSyncResponse> {
        // Two streams of 16 MiB, kubelet's limit.
        let mut runtime = self.runtime.clone().max_decoding_message_size(33 << 20);
        let seconds = timeout.map_or(0, |timeout| i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX));
        let request = cri::ExecSyncRequest { container_id: id.to_owned(), cmd: command, timeout: seconds };
        let deadline = timeout.map_or(Duration::MAX, |timeout| DEADLINE.saturating_add(timeout));
        call("ExecSync", id, deadline, async move { runtime.exec_sync(request).await }).await
    }

    /// The URL at which the runtime takes a client's streams.
    pub(crate) async fn exec(&self, request: cri::ExecRequest) -> Result<String> {
        let mut runtime = self.runtime.clone();
        let container = request.container_id.clone();
        Ok(call("Exec", &container, DEADLINE, async move { runtime.exec(request).await }).await?.url)
    }

    pub(crate) async fn attach(&self, request: cri::AttachRequest) -> Result<String> {
        let mut runtime = self.runtime.clone();
        let container = request.container_id.clone();
        Ok(call("Attach", &container, DEADLINE, async move { runtime.attach(request).await }).await?.url)
    }

    pub(crate) async fn port_forward(&self, sandbox_id: &str, port: Vec<i32>) -> Result<String> {
        let mut runtime = self.runtime.clone();
        let request = cri::PortForwardRequest { pod_sandbox_id: sandbox_id.to_owned(), port };
        let reply =
            call("PortForward", sandbox_id, DEADLINE, async move { runtime.port_forward(request).await });
        Ok(reply.await?.url)
    }

    /// Changes limits of a created or running container; a field with its default stays as it is.
    pub(crate) async fn update_container_resources(
        &self,
        id: &str,
        resources: cri::LinuxContainerResources,
    ) -> Result<()> {
        let mut runtime = self.runtime.clone();
        let request = cri::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..cri::UpdateContainerResourcesRequest::default()
        };
        call("UpdateContainerResources", id, DEADLINE, async move {
            runtime.update_container_resources(request).await
        })
        .await
        .map(drop)
    }

    /// The writable layers of a pod's containers, by container id, as far as the runtime reports them.
    pub(crate) async fn writable_layers(&self, pod_uid: &str) -> Result<HashMap<String, Layer>> {
        let stats = self.container_stats(Some(pod_uid)).await?;
        let used = |stats: cri::ContainerStats| {
            let layer = stats.writable_layer?;
            let inodes = layer.inodes_used.map_or(0, |used| used.value);
            Some((stats.attributes?.id, Layer { bytes: layer.used_bytes?.value, inodes }))
        };
        Ok(stats.into_iter().filter_map(used).collect())
    }

    /// What the containers of one pod, or of all (`None`), use.
    pub(crate) async fn container_stats(&self, pod_uid: Option<&str>) -> Result<Vec<cri::ContainerStats>> {
        let mut runtime = self.runtime.clone();
        let filter = cri::ContainerStatsFilter {
            label_selector: uid_selector(pod_uid),
            ..cri::ContainerStatsFilter::default()
        };
        let request = cri::ListContainerStatsRequest { filter: Some(filter) };
        let reply = call("ListContainerStats", pod_uid.unwrap_or(""), DEADLINE, async move {
            runtime.list_container_stats(request).await
        });
        Ok(reply.await?.stats)
    }

    pub(crate) async fn images(&self) -> Result<Vec<cri::Image>> {
        let mut images = self.images.clone();
        let request = cri::ListImagesRequest::default();
        let reply = call("ListImages", "", DEADLINE, async move { images.list_images(request).await });
        Ok(reply.await?.images)
    }

    pub(crate) async fn remove_image(&self, id: &str) -> Result<()> {
        let mut images = self.images.clone();
        let request = cri::RemoveImageRequest { image: Some(image_spec(id)) };
        call("RemoveImage", id, DEADLINE, async move { images.remove_image(request).await }).await.map(drop)
    }

    /// The directories where the runtime stores images.
    pub(crate) async fn image_directories(&self) -> Result<Vec<PathBuf>> {
        let mut images = self.images.clone();
        let reply = call("ImageFsInfo", "", DEADLINE, async move {
            images.image_fs_info(cri::ImageFsInfoRequest::default()).await
        });
        let file_systems = reply.await?.image_filesystems.into_iter();
        Ok(file_systems.filter_map(|usage| usage.fs_id).map(|id| id.mountpoint.into()).collect())
    }

    /// What all pods have used; `None` if the runtime does not count that.
    pub(crate) async fn list_pod_stats(&self) -> Result<Option<Vec<cri::PodSandboxStats>>> {
        let mut runtime = self.runtime.clone();
        let request = cri::ListPodSandboxStatsRequest { filter: None };
        let reply = call("ListPodSandboxStats", "", DEADLINE, async move {
            runtime.list_pod_sandbox_stats(request).await
        });
        match reply.await {
            Err(error) if error.is_unimplemented() => Ok(None),
            reply => Ok(Some(reply?.stats)),
        }
    }

    /// What images take of the runtime's file systems.
    pub(crate) async fn image_file_systems(&self) -> Result<Vec<cri::FilesystemUsage>> {
        let mut images = self.images.clone();
        let reply = call("ImageFsInfo", "", DEADLINE, async move {
            images.image_fs_info(cri::ImageFsInfoRequest::default()).await
        });
        Ok(reply.await?.image_filesystems)
    }

    /// `None` if the image is not present.
    pub(crate) async fn image(&self, image: &str) -> Result<Option<cri::Image>> {
        let mut images = self.images.clone();
        let request = cri::ImageStatusRequest { image: Some(image_spec(image)), verbose: false };
        let reply =
            call("ImageStatus", image, DEADLINE, async move { images.image_status(request).await }).await?;
        Ok(reply.image)
    }

    /// Returns the image's reference for CreateContainer.
    pub(crate) async fn pull_image(
        &self,
        image: &str,
        auth: Option<cri::AuthConfig>,
        sandbox: cri::PodSandboxConfig,
    ) -> Result<String> {
        let mut images = self.images.clone();
        let request =
            cri::PullImageRequest { image: Some(image_spec(image)), auth, sandbox_config: Some(sandbox) };
        let reply =
            call("PullImage", image, PULL_DEADLINE, async move { images.pull_image(request).await }).await?;
        Ok(reply.image_ref)
    }

    /// Streams every container state change from this call on. Runtimes older than containerd 1.7
    /// return `Unimplemented`. There is no deadline: a runtime in Go answers with the first event.
    pub(crate) async fn container_events(&self) -> Result<Streaming<cri::ContainerEventResponse>> {
        let mut runtime = self.runtime.clone();
        let method = "GetContainerEvents";
        let answer =
            runtime.get_container_events(cri::GetEventsRequest {}).instrument(span_of(method, "")).await;
        answer.map(Response::into_inner).map_err(|status| refused(method, "", &status))
    }
}

/// What a container's writable layer takes on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

pub(crate) fn image_spec(image: &str) -> cri::ImageSpec {
    cri::ImageSpec {
        image: image.to_owned(),
        user_specified_image: image.to_owned(),
        ..cri::ImageSpec::default()
    }
}

async fn call<T>(
    method: &'static str,
    object: &str,
    deadline: Duration,
    reply: impl Future<Output = std::result::Result<Response<T>, Status>>,
) -> Result<T> {
    let span = span_of(method, object);
    let outcome = tokio::time::timeout(deadline, reply).instrument(span).await;
    match outcome {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(refused(method, object, &status)),
        Err(_) => Err(Error {
            method,
            object: object.to_owned(),
            code: Code::DeadlineExceeded,
            message: format!("no answer within {} s", deadline.as_secs()),
        }),
    }
}

fn refused(method: &'static str, object: &str, status: &Status) -> Error {
    Error { method, object: object.to_owned(), code: status.code(), message: unix_channel::text(status) }
}

fn span_of(method: &str, object: &str) -> Span {
    let name = format!("cri.{method}");
    match method {
        "RunPodSandbox" | "StopPodSandbox" | "RemovePodSandbox" => {
            info_span!("cri", span = name, pod = object)
        }
        "CreateContainer"
        | "StartContainer"
        | "StopContainer"
        | "RemoveContainer"
        | "ReopenContainerLog"
        | "UpdateContainerResources" => {
            info_span!("cri", span = name, container = object)
        }
        "PullImage" | "RemoveImage" => info_span!("cri", span = name, image = object),
        _ => debug_span!("cri", span = name, object),
    }
}

/// Stop and Remove of an unknown object succeed, even if an older runtime reports an error.
fn unknown_is_done(error: Error) -> Result<()> {
    if error.code == Code::NotFound { Ok(()) } else { Err(error) }
}

fn found<T>(reply: Result<T>) -> Result<Option<T>> {
    match reply {
        Ok(reply) => Ok(Some(reply)),
        Err(e) if e.code == Code::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn uid_selector(pod_uid: Option<&str>) -> HashMap<String, String> {
    pod_uid.map(|uid| (POD_UID_LABEL.to_owned(), uid.to_owned())).into_iter().collect()
}

fn sandbox_name(config: &cri::PodSandboxConfig) -> String {
    config.metadata.as_ref().map_or_else(String::new, |m| format!("{}/{}", m.namespace, m.name))
}
