//! The CRI services, in a thin layer: validate, call, translate.
//!
//! Invariant: every change runs as a separate task, so that a caller that hangs up (kubelet's
//! deadlines, kill -9) does not leave it incomplete.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use proto::cri::image_service_server::ImageService;
use proto::cri::runtime_service_server::RuntimeService;
use proto::cri::{
    AttachRequest, AttachResponse, CgroupDriver, ContainerEventResponse, ContainerStatsRequest,
    ContainerStatsResponse, ContainerStatusRequest, ContainerStatusResponse, CreateContainerRequest,
    CreateContainerResponse, ExecRequest, ExecResponse, ExecSyncRequest, ExecSyncResponse, GetEventsRequest,
    Image as CriImage, ImageFsInfoRequest, ImageFsInfoResponse, ImageSpec, ImageStatusRequest,
    ImageStatusResponse, Int64Value, LinuxRuntimeConfiguration, ListContainerStatsRequest,
    ListContainerStatsResponse, ListContainersRequest, ListContainersResponse, ListImagesRequest,
    ListImagesResponse, ListPodSandboxRequest, ListPodSandboxResponse, ListPodSandboxStatsRequest,
    ListPodSandboxStatsResponse, PodSandboxStatsRequest, PodSandboxStatsResponse, PodSandboxStatusRequest,
    PodSandboxStatusResponse, PortForwardRequest, PortForwardResponse, PullImageRequest, PullImageResponse,
    RemoveContainerRequest, RemoveContainerResponse, RemoveImageRequest, RemoveImageResponse,
    RemovePodSandboxRequest, RemovePodSandboxResponse, ReopenContainerLogRequest, ReopenContainerLogResponse,
    RunPodSandboxRequest, RunPodSandboxResponse, RuntimeCondition, RuntimeConfigRequest,
    RuntimeConfigResponse, RuntimeFeatures, RuntimeHandler, RuntimeHandlerFeatures, RuntimeStatus,
    StartContainerRequest, StartContainerResponse, StatusRequest, StatusResponse, StopContainerRequest,
    StopContainerResponse, StopPodSandboxRequest, StopPodSandboxResponse, UpdateContainerResourcesRequest,
    UpdateContainerResourcesResponse, UpdatePodSandboxResourcesRequest, UpdatePodSandboxResourcesResponse,
    UpdateRuntimeConfigRequest, UpdateRuntimeConfigResponse, VersionRequest, VersionResponse,
};
use tokio::sync::{broadcast, watch};
use tonic::{Request, Response, Status};
use tracing::{Instrument, Span, info_span};

use crate::blocking::blocking;
use crate::calls::{attach, container, exec, image_pull, info, sandbox, stats, update};
use crate::error::{Error, Result, chain};
use crate::images::Image;
use crate::runtime::state::selected;
use crate::runtime::status;
use crate::runtime::{Event, Runtime};
use crate::server::streaming::Streaming;
use crate::shim::protocol::now;

const NAME: &str = "hawser";
const CRI_VERSION: &str = "v1";
const MAX_LOGGED_BYTES: usize = 256;

#[derive(Debug, Clone)]
pub(crate) struct Service {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) streaming: Arc<Streaming>,
    /// Becomes true when the server stops, which ends its event streams.
    pub(crate) ending: watch::Receiver<bool>,
}

type Reply<T> = std::result::Result<Response<T>, Status>;

/// Runs to the end even if the caller hangs up. Only this function logs refused calls.
async fn detached<T: Send + 'static>(
    span: Span,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> std::result::Result<T, Status> {
    let logged = async {
        let result = work.await;
        if let Err(error) = &result {
            tracing::warn!(error = %chain(error), "refused");
        }
        result
    };
    match tokio::spawn(logged.instrument(span)).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(Error::Task { task: "call" }.into()),
    }
}

#[tonic::async_trait]
impl RuntimeService for Service {
    async fn version(&self, _request: Request<VersionRequest>) -> Reply<VersionResponse> {
        Ok(Response::new(VersionResponse {
            version: "0.1.0".to_owned(), // of the kubelet's runtime API; the same since Kubernetes 1.5
            runtime_name: NAME.to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: CRI_VERSION.to_owned(),
        }))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Reply<StatusResponse> {
        let condition = |kind: &str, problem: Option<String>| RuntimeCondition {
            r#type: kind.to_owned(),
            status: problem.is_none(),
            reason: if problem.is_some() { "NetworkPluginNotReady".to_owned() } else { String::new() },
            message: problem.unwrap_or_default(),
        };
        let verbose = request.into_inner().verbose;
        let network = self.runtime.cni.network().err().map(|e| chain(&e));
        let features = RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: false };
        Ok(Response::new(StatusResponse {
            status: Some(RuntimeStatus {
                conditions: vec![condition("RuntimeReady", None), condition("NetworkReady", network)],
            }),
            info: if verbose { info::of_runtime(&self.runtime) } else { HashMap::new() },
            runtime_handlers: vec![RuntimeHandler { name: String::new(), features: Some(features) }],
            features: Some(RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
        }))
    }

    async fn runtime_config(&self, _request: Request<RuntimeConfigRequest>) -> Reply<RuntimeConfigResponse> {
        let linux = LinuxRuntimeConfiguration { cgroup_driver: CgroupDriver::Cgroupfs.into() };
        Ok(Response::new(RuntimeConfigResponse { linux: Some(linux) }))
    }

    async fn run_pod_sandbox(&self, request: Request<RunPodSandboxRequest>) -> Reply<RunPodSandboxResponse> {
        let (runtime, request) = (Arc::clone(&self.runtime), request.into_inner());
        let pod = request
            .config
            .as_ref()
            .and_then(|c| c.metadata.as_ref())
            .map(|m| format!("{}/{}", m.namespace, m.name));
        let span = info_span!("cri.RunPodSandbox", pod);
        let pod_sandbox_id = detached(span, async move { sandbox::run(&runtime, request).await }).await?;
        Ok(Response::new(RunPodSandboxResponse { pod_sandbox_id }))
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<StopPodSandboxRequest>,
    ) -> Reply<StopPodSandboxResponse> {
        let (runtime, id) = (Arc::clone(&self.runtime), request.into_inner().pod_sandbox_id);
        let span = info_span!("cri.StopPodSandbox", pod_sandbox_id = id);
        detached(span, async move { sandbox::stop(&runtime, &id).await }).await?;
        Ok(Response::new(StopPodSandboxResponse {}))
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<RemovePodSandboxRequest>,
    ) -> Reply<RemovePodSandboxResponse> {
        let (runtime, id) = (Arc::clone(&self.runtime), request.into_inner().pod_sandbox_id);
        let span = info_span!("cri.RemovePodSandbox", pod_sandbox_id = id);
        detached(span, async move { sandbox::remove(&runtime, &id).await }).await?;
        Ok(Response::new(RemovePodSandboxResponse {}))
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<PodSandboxStatusRequest>,
    ) -> Reply<PodSandboxStatusResponse> {
        let request = request.into_inner();
        let sandbox = self.runtime.sandbox(&request.pod_sandbox_id)?;
        let containers = self.runtime.containers_of(&sandbox.id);
        Ok(Response::new(PodSandboxStatusResponse {
            status: Some(status::sandbox_status(&sandbox)),
            info: if request.verbose { info::of_sandbox(&self.runtime, &sandbox) } else { HashMap::new() },
            containers_statuses: containers.iter().map(|c| status::container_status(c)).collect(),
            timestamp: now(),
        }))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<ListPodSandboxRequest>,
    ) -> Reply<ListPodSandboxResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        let wanted_state = filter.state.as_ref().map(|s| s.state);
        // Filtered before anything is copied: a kubelet asks for one pod of many.
        let items = self.runtime.sandboxes_with(&filter.label_selector).into_iter().filter(|sandbox| {
            sandbox.id.starts_with(&filter.id)
                && wanted_state.is_none_or(|state| i32::from(sandbox.state()) == state)
                && sandbox.has_labels(&filter.label_selector)
        });
        let items = items.map(|sandbox| status::sandbox_item(&sandbox));
        Ok(Response::new(ListPodSandboxResponse { items: items.collect() }))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Reply<CreateContainerResponse> {
        let (runtime, request) = (Arc::clone(&self.runtime), request.into_inner());
        let name = request.config.as_ref().and_then(|c| c.metadata.as_ref()).map(|m| m.name.clone());
        let span =
            info_span!("cri.CreateContainer", container = name, pod_sandbox_id = request.pod_sandbox_id);
        let container_id = detached(span, async move { container::create(&runtime, request).await }).await?;
        Ok(Response::new(CreateContainerResponse { container_id }))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Reply<StartContainerResponse> {
        let (runtime, id) = (Arc::clone(&self.runtime), request.into_inner().container_id);
        let span = info_span!("cri.StartContainer", container_id = id);
        detached(span, async move { container::start(&runtime, &id).await }).await?;
        Ok(Response::new(StartContainerResponse {}))
    }

    async fn stop_container(&self, request: Request<StopContainerRequest>) -> Reply<StopContainerResponse> {
        let request = request.into_inner();
        let (runtime, id) = (Arc::clone(&self.runtime), request.container_id);
        let timeout = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
        let span = info_span!("cri.StopContainer", container_id = id);
        detached(span, async move { container::stop(&runtime, &id, timeout).await }).await?;
        Ok(Response::new(StopContainerResponse {}))
    }

    async fn remove_container(
        &self,
        request: Request<RemoveContainerRequest>,
    ) -> Reply<RemoveContainerResponse> {
        let (runtime, id) = (Arc::clone(&self.runtime), request.into_inner().container_id);
        let span = info_span!("cri.RemoveContainer", container_id = id);
        detached(span, async move { container::remove(&runtime, &id).await }).await?;
        Ok(Response::new(RemoveContainerResponse {}))
    }

    async fn list_containers(
        &self,
        request: Request<ListContainersRequest>,
    ) -> Reply<ListContainersResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        let wanted_state = filter.state.as_ref().map(|s| s.state);
        let containers =
            self.runtime.containers_with(&filter.label_selector).into_iter().filter(|container| {
                let record = &container.record;
                record.id.starts_with(&filter.id)
                    && record.sandbox_id.starts_with(&filter.pod_sandbox_id)
                    && wanted_state.is_none_or(|state| i32::from(container.state().cri()) == state)
                    && selected(&record.config.labels, &filter.label_selector)
            });
        let containers = containers.map(|container| status::container_item(&container));
        Ok(Response::new(ListContainersResponse { containers: containers.collect() }))
    }

    async fn container_status(
        &self,
        request: Request<ContainerStatusRequest>,
    ) -> Reply<ContainerStatusResponse> {
        let request = request.into_inner();
        let container = self.runtime.container(&request.container_id)?;
        let info = if request.verbose {
            let sandbox = self.runtime.sandbox(&container.record.sandbox_id)?;
            info::of_container(&self.runtime, &container, &sandbox.container_dir(&container.id))
        } else {
            HashMap::new()
        };
        Ok(Response::new(ContainerStatusResponse {
            status: Some(status::container_status(&container)),
            info,
        }))
    }

    async fn reopen_container_log(
        &self,
        request: Request<ReopenContainerLogRequest>,
    ) -> Reply<ReopenContainerLogResponse> {
        let (runtime, id) = (Arc::clone(&self.runtime), request.into_inner().container_id);
        let span = info_span!("cri.ReopenContainerLog", container_id = id);
        detached(span, async move { container::reopen_log(&runtime, &id).await }).await?;
        Ok(Response::new(ReopenContainerLogResponse {}))
    }

    async fn exec_sync(&self, request: Request<ExecSyncRequest>) -> Reply<ExecSyncResponse> {
        let request = request.into_inner();
        // Not detached: the program is killed if the caller goes away.
        let span = info_span!("cri.ExecSync", container_id = request.container_id);
        let mut ending = self.ending.clone();
        let answer = tokio::select! {
            answer = exec::sync(&self.runtime, request).instrument(span) => answer,
            // An end of the runtime waits for its calls.
            _ending = ending.wait_for(|ending| *ending) => Err(Error::Ending),
        };
        Ok(Response::new(answer.inspect_err(|error| tracing::debug!(error = %chain(error), "refused"))?))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Reply<ExecResponse> {
        let request = request.into_inner();
        // The URL is of this container, whose id may be a prefix here.
        let container_id = exec::check(&self.runtime, &request)?;
        Ok(Response::new(ExecResponse { url: self.streaming.exec(ExecRequest { container_id, ..request })? }))
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Reply<AttachResponse> {
        let request = request.into_inner();
        let container_id = attach::check(&self.runtime, &request)?;
        let url = self.streaming.attach(AttachRequest { container_id, ..request })?;
        Ok(Response::new(AttachResponse { url }))
    }

    async fn port_forward(&self, request: Request<PortForwardRequest>) -> Reply<PortForwardResponse> {
        let PortForwardRequest { pod_sandbox_id, port } = request.into_inner();
        let sandbox = self.runtime.sandbox(&pod_sandbox_id)?;
        sandbox.ready()?;
        let ports = port.into_iter().map(port_number).collect::<Result<_>>()?;
        Ok(Response::new(PortForwardResponse { url: self.streaming.port_forward(sandbox, ports)? }))
    }

    async fn list_container_stats(
        &self,
        request: Request<ListContainerStatsRequest>,
    ) -> Reply<ListContainerStatsResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        Ok(Response::new(ListContainerStatsResponse { stats: stats::list(&self.runtime, filter).await? }))
    }

    async fn container_stats(
        &self,
        request: Request<ContainerStatsRequest>,
    ) -> Reply<ContainerStatsResponse> {
        let found = stats::of_container(&self.runtime, &request.into_inner().container_id).await?;
        Ok(Response::new(ContainerStatsResponse { stats: Some(found) }))
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<PodSandboxStatsRequest>,
    ) -> Reply<PodSandboxStatsResponse> {
        let found = stats::of_pod(&self.runtime, &request.into_inner().pod_sandbox_id).await?;
        Ok(Response::new(PodSandboxStatsResponse { stats: Some(found) }))
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<ListPodSandboxStatsRequest>,
    ) -> Reply<ListPodSandboxStatsResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        Ok(Response::new(ListPodSandboxStatsResponse {
            stats: stats::list_pods(&self.runtime, filter).await?,
        }))
    }

    async fn update_container_resources(
        &self,
        request: Request<UpdateContainerResourcesRequest>,
    ) -> Reply<UpdateContainerResourcesResponse> {
        let (runtime, request) = (Arc::clone(&self.runtime), request.into_inner());
        let span = info_span!("cri.UpdateContainerResources", container_id = request.container_id);
        detached(span, async move { update::container(&runtime, request).await }).await?;
        Ok(Response::new(UpdateContainerResourcesResponse {}))
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<UpdatePodSandboxResourcesRequest>,
    ) -> Reply<UpdatePodSandboxResourcesResponse> {
        let (runtime, request) = (Arc::clone(&self.runtime), request.into_inner());
        let span = info_span!("cri.UpdatePodSandboxResources", pod_sandbox_id = request.pod_sandbox_id);
        detached(span, async move { update::sandbox(&runtime, request).await }).await?;
        Ok(Response::new(UpdatePodSandboxResourcesResponse {}))
    }

    /// The network's configuration is a file of CNI, as for containerd with such a file: the range of
    /// pods' addresses that kubelet knows is only logged.
    async fn update_runtime_config(
        &self,
        request: Request<UpdateRuntimeConfigRequest>,
    ) -> Reply<UpdateRuntimeConfigResponse> {
        let network = request.into_inner().runtime_config.and_then(|config| config.network_config);
        let pod_cidr = trace::shortened(network.unwrap_or_default().pod_cidr, MAX_LOGGED_BYTES);
        tracing::info!(pod_cidr, "the network configuration decides about addresses");
        Ok(Response::new(UpdateRuntimeConfigResponse {}))
    }

    async fn get_container_events(
        &self,
        _request: Request<GetEventsRequest>,
    ) -> Reply<tonic::codegen::BoxStream<ContainerEventResponse>> {
        // One at a time: with its statuses, an event of a pod with many containers takes megabytes.
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        tokio::spawn(forward(self.runtime.events(), self.ending.clone(), sender));
        Ok(Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))))
    }
}

fn port_number(port: i32) -> Result<u16> {
    let number = u16::try_from(port).ok().filter(|number| *number > 0);
    number.ok_or_else(|| Error::invalid("port", format!("{port} is not between 1 and 65535")))
}

async fn forward(
    mut events: broadcast::Receiver<Arc<Event>>,
    mut ending: watch::Receiver<bool>,
    sender: tokio::sync::mpsc::Sender<std::result::Result<ContainerEventResponse, Status>>,
) {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            _ = ending.wait_for(|ended| *ended) => return,
            () = sender.closed() => return,
        };
        let item = match event {
            Ok(event) => Ok(event.response()),
            // Missed events cannot be repeated: the receiver lists anew.
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                Err(Status::data_loss(format!("{missed} events missed, list the containers anew")))
            }
            Err(broadcast::error::RecvError::Closed) => return,
        };
        let last = item.is_err();
        if sender.send(item).await.is_err() || last {
            return;
        }
    }
}

#[tonic::async_trait]
impl ImageService for Service {
    async fn list_images(&self, request: Request<ListImagesRequest>) -> Reply<ListImagesResponse> {
        let wanted =
            request.into_inner().filter.and_then(|f| f.image).filter(|image| !image.image.is_empty());
        let images = match wanted {
            None => self.runtime.images.list(),
            Some(wanted) => self.runtime.images.resolve(&wanted)?.into_iter().collect(),
        };
        Ok(Response::new(ListImagesResponse { images: images.iter().map(cri_image).collect() }))
    }

    async fn image_status(&self, request: Request<ImageStatusRequest>) -> Reply<ImageStatusResponse> {
        let wanted = request.into_inner().image;
        image_name(wanted.clone())?;
        let image = self.runtime.images.resolve(&wanted.unwrap_or_default())?;
        Ok(Response::new(ImageStatusResponse { image: image.as_ref().map(cri_image), info: HashMap::new() }))
    }

    async fn pull_image(&self, request: Request<PullImageRequest>) -> Reply<PullImageResponse> {
        let PullImageRequest { image, auth, .. } = request.into_inner();
        let name = image_name(image)?;
        let (runtime, ending) = (Arc::clone(&self.runtime), self.ending.clone());
        let span = info_span!("cri.PullImage", image = name);
        // Callers wait here without a thread; one that hangs up stops waiting.
        let turn = runtime.pulls.turn(&name).await;
        // Not detached: a download ends if the caller goes away.
        let image = image_pull::pull(runtime, name, auth, ending, turn).instrument(span.clone()).await;
        let image = image.inspect_err(|error| {
            span.in_scope(|| tracing::warn!(error = %chain(error), "refused"));
        })?;
        Ok(Response::new(PullImageResponse { image_ref: image.id }))
    }

    async fn remove_image(&self, request: Request<RemoveImageRequest>) -> Reply<RemoveImageResponse> {
        let wanted = request.into_inner().image;
        let name = image_name(wanted.clone())?;
        let runtime = Arc::clone(&self.runtime);
        let span = info_span!("cri.RemoveImage", image = name);
        let remove = blocking("remove image", move || {
            let found = runtime.images.resolve(&wanted.unwrap_or_default())?;
            let Some(image) = found else { return Ok(()) };
            runtime.images.remove(&image.id, &|layer| runtime.uses_layer(layer))
        });
        detached(span, remove).await?;
        Ok(Response::new(RemoveImageResponse {}))
    }

    async fn image_fs_info(&self, _request: Request<ImageFsInfoRequest>) -> Reply<ImageFsInfoResponse> {
        Ok(Response::new(stats::image_fs(&self.runtime).await?))
    }
}

fn image_name(image: Option<ImageSpec>) -> Result<String> {
    image.map(|i| i.image).filter(|i| !i.is_empty()).ok_or_else(|| Error::invalid("image", "missing"))
}

fn cri_image(image: &Image) -> CriImage {
    let (uid, name) = crate::spec::user::of_image(&image.config.user);
    CriImage {
        id: image.id.clone(),
        repo_tags: image.repo_tags.clone(),
        repo_digests: image.repo_digests.clone(),
        size: image.size_bytes,
        uid: uid.map(|uid| Int64Value { value: uid.into() }),
        username: name.to_owned(),
        spec: None,
        pinned: false,
    }
}
