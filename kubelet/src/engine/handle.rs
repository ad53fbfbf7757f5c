//! Requests of clients to a running engine.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use proto::cri;
use proto::kubelet::{AttachRequest, AttachedAt, ExecRequest, PortForwardRequest};
use tokio::sync::{mpsc, oneshot};

use super::{Config, Error};
use crate::capacity::admission::Capacity;
use crate::capacity::critical::serves_volumes;
use crate::capacity::pressure::NodePressure;
use crate::clients::cri::Cri;
use crate::command_line::called_as::called_as;
use crate::engine::runtime_health::RuntimeHealth;
use crate::objects::{ContainerState, ContainerStatus, EventType, Object, Pod, PodPhase, RestartPolicy};
use crate::sink::Sinks;
use crate::store::{self, Store};
use crate::volumes::Volumes;
use crate::worker::Tools;

/// Clones refer to the same engine.
#[derive(Debug, Clone)]
pub struct Handle {
    store: Store,
    sinks: Sinks,
    volumes: Volumes,
    log_dir: PathBuf,
    capacity: Capacity,
    pressure: NodePressure,
    runtime_health: RuntimeHealth,
    requests: mpsc::Sender<Request>,
}

/// Why a client gets no streams.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error(transparent)]
    Container(#[from] LogPathError),
    #[error(
        "container \"{container}\" in pod \"{pod}\" is not running ({state}): see '{} describe pod {pod}'",
        called_as()
    )]
    NotRunning { pod: String, container: String, state: String },
    /// kubectl's words.
    #[error("unable to forward port because pod is not running. Current status={phase:?}")]
    PodNotRunning { phase: PodPhase },
    #[error("pod \"{pod}\" is not running")]
    NoSandbox { pod: String },
    #[error(transparent)]
    Runtime(#[from] crate::clients::cri::Error),
    #[error("the kubelet is being stopped")]
    Ending,
}

/// What a client's streams are for.
#[derive(Debug)]
pub(crate) enum Streams {
    Exec(cri::ExecRequest),
    Attach(cri::AttachRequest),
    /// Without ports: each stream names its own.
    PortForward {
        pod: String,
        pod_uid: String,
        ports: Vec<i32>,
    },
}

/// Work that only the engine's own loop can do.
#[derive(Debug)]
pub(super) enum Request {
    /// Removes the resources that all pods share, after the last pod is gone.
    ReleaseNode(oneshot::Sender<Result<(), Error>>),
    /// Asks the runtime for a URL.
    Streams(Streams, oneshot::Sender<Result<String, StreamError>>),
    /// Connects a client with the runtime.
    Runtime(oneshot::Sender<Cri>),
}

/// The log of one instance of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerLog {
    pub path: PathBuf,
    pub pod_uid: String,
    pub container: String,
    /// The restart count of the container while it writes this log.
    pub instance: u32,
}

/// Why a container has no log.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LogPathError {
    #[error("pods \"{pod}\" not found in namespace \"{namespace}\"")]
    NoPod { namespace: String, pod: String },
    #[error("container {container} is not valid for pod {pod}: it has {}", names.join(", "))]
    NoContainer { pod: String, container: String, names: Vec<String> },
    #[error("a container name must be specified for pod {pod}, choose one of: [{}]", names.join(" "))]
    Ambiguous { pod: String, names: Vec<String> },
    #[error("container \"{container}\" in pod \"{pod}\" is waiting to start: {why}")]
    NotStarted { pod: String, container: String, why: String },
    #[error("previous terminated container \"{container}\" in pod \"{pod}\" not found")]
    NoPrevious { pod: String, container: String },
}

impl Handle {
    pub(super) fn new(
        store: Store,
        sinks: Sinks,
        volumes: Volumes,
        log_dir: PathBuf,
        capacity: Capacity,
        requests: mpsc::Sender<Request>,
    ) -> Self {
        let (pressure, runtime_health) = (NodePressure::default(), RuntimeHealth::default());
        Self { store, sinks, volumes, log_dir, capacity, pressure, runtime_health, requests }
    }

    /// Stops and removes every pod:
    /// - first the consumers, whose volumes' mount pods end with them;
    /// - then the staged volumes without a consumer;
    /// - then the remaining mount pods.
    ///
    /// No pod gets more than `longest_grace` seconds to stop. `progress` receives a line for each
    /// step.
    pub async fn stop_pods(&self, longest_grace: u64, mut progress: impl FnMut(String)) -> Result<(), Error> {
        self.stop_pods_that(|pod| !serves_volumes(pod), longest_grace, &mut progress).await;
        self.volumes.unmount_unused(&mut progress).await;
        self.stop_pods_that(|_| true, longest_grace, &mut progress).await;
        let (answer, answered) = oneshot::channel();
        if self.requests.send(Request::ReleaseNode(answer)).await.is_err() {
            return Ok(());
        }
        answered.await.unwrap_or(Ok(()))
    }

    async fn stop_pods_that(
        &self,
        wanted: impl Fn(&Pod) -> bool,
        longest_grace: u64,
        progress: &mut impl FnMut(String),
    ) {
        let mut changes = self.store.subscribe();
        let mut announced = BTreeSet::new();
        loop {
            let pods: Vec<Arc<Pod>> = self.store.pods().into_iter().filter(|p| wanted(p)).collect();
            for pod in &pods {
                let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
                if announced.insert(name.clone()) {
                    progress(format!("stopping pod {name}"));
                }
                if let Err(error) = self.mark_deleted(pod, longest_grace) {
                    progress(format!("stopping pod {name}: {}", linux::chain(&error)));
                }
            }
            if pods.is_empty() {
                return;
            }
            // A lagging receiver also means: check all pods again.
            let _lagging = changes.recv().await;
        }
    }

    fn mark_deleted(&self, pod: &Pod, longest_grace: u64) -> Result<(), store::Error> {
        let grace = pod.spec.termination_grace_period_seconds.min(longest_grace);
        if pod.metadata.deletion_grace_period_seconds.is_some_and(|given| given <= grace) {
            return Ok(());
        }
        self.store.mark_pod_deleted(&pod.metadata.namespace, &pod.metadata.name, Some(grace)).map(drop)
    }

    /// Marks a claim for deletion; `false` if it does not exist. The claim is removed once no pod
    /// uses it, and its data too if the reclaim policy is Delete.
    pub fn delete_claim(&self, namespace: &str, name: &str) -> Result<bool, store::Error> {
        self.store.mark_claim_deleted(namespace, name)
    }

    /// Marks a volume for deletion; `false` if it does not exist. The object is removed once no
    /// claim is bound to it. The data stays, unless it goes with a deleted claim: then it goes first.
    pub fn delete_volume(&self, name: &str) -> Result<bool, store::Error> {
        self.store.mark_volume_deleted(name)
    }

    /// What the node offers to pods.
    pub(crate) fn capacity(&self) -> Capacity {
        self.capacity.clone()
    }

    /// The node's conditions but Ready.
    pub(crate) fn pressure(&self) -> &NodePressure {
        &self.pressure
    }

    pub(crate) fn runtime_health(&self) -> &RuntimeHealth {
        &self.runtime_health
    }

    pub(crate) fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// The log of a container's newest instance, or of the one before it. An empty `container` means
    /// the pod's only container.
    pub fn container_log(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        previous: bool,
    ) -> Result<ContainerLog, LogPathError> {
        let missing = || LogPathError::NoPod { namespace: namespace.to_owned(), pod: pod.to_owned() };
        let pod = self.store.pod(namespace, pod).ok_or_else(missing)?;
        let container = one_container(&pod, container)?;
        let status = pod.status.of_container(container);
        let (pod_name, container_name) = (pod.metadata.name.clone(), container.to_owned());
        let Some(status) = status.filter(|s| !s.container_id.is_empty()) else {
            let why = why_no_log(status);
            return Err(LogPathError::NotStarted { pod: pod_name, container: container_name, why });
        };
        let instance = match (previous, status.restart_count.checked_sub(1)) {
            (false, _) => status.restart_count,
            (true, Some(before)) => before,
            (true, None) => {
                return Err(LogPathError::NoPrevious { pod: pod_name, container: container_name });
            }
        };
        let dir = crate::logs::log_directory(&self.log_dir, &pod.metadata);
        let path = dir.join(crate::logs::log_path(container, instance));
        let pod_uid = pod.metadata.uid.clone();
        Ok(ContainerLog { path, pod_uid, container: container_name, instance })
    }

    /// The URL of a program that is to run in a container. An empty `container` means the pod's only one.
    pub async fn exec(&self, request: ExecRequest) -> Result<String, StreamError> {
        let ExecRequest { namespace, pod, container, command, stdin, tty } = request;
        let pod = self.pod(&namespace, &pod)?;
        let container_id = running_container(&pod, one_container(&pod, &container)?)?;
        let request = cri::ExecRequest { container_id, cmd: command, tty, stdin, stdout: true, stderr: !tty };
        self.streams(Streams::Exec(request)).await
    }

    /// The URL of the streams of a running container, and what they are. An empty `container` means the pod's only
    /// one.
    pub async fn attach(&self, request: AttachRequest) -> Result<AttachedAt, StreamError> {
        let AttachRequest { namespace, pod, container, stdin } = request;
        let pod = self.pod(&namespace, &pod)?;
        let name = one_container(&pod, &container)?;
        let container_id = running_container(&pod, name)?;
        let wanted = pod.spec.all_containers().find(|container| container.name == name);
        // Whether a running container has a terminal was decided when it started.
        let (tty, stdin) = wanted.map_or((false, false), |c| (c.tty, c.stdin && stdin));
        let request = cri::AttachRequest { container_id, stdin, tty, stdout: true, stderr: !tty };
        let restarts = pod.spec.restart_policy == RestartPolicy::Always;
        let url = self.streams(Streams::Attach(request)).await?;
        Ok(AttachedAt { url, container: name.to_owned(), tty, stdin, restarts })
    }

    fn pod(&self, namespace: &str, pod: &str) -> Result<Arc<Pod>, LogPathError> {
        let missing = || LogPathError::NoPod { namespace: namespace.to_owned(), pod: pod.to_owned() };
        self.store.pod(namespace, pod).ok_or_else(missing)
    }

    /// The URL of one connection to a port of a pod.
    pub async fn port_forward(&self, request: PortForwardRequest) -> Result<String, StreamError> {
        let PortForwardRequest { namespace, pod, port } = request;
        let phase = self.pod(&namespace, &pod)?.status.phase;
        if phase != PodPhase::Running {
            return Err(StreamError::PodNotRunning { phase });
        }
        self.ports_of_pod(&namespace, &pod, vec![i32::try_from(port).unwrap_or(i32::MAX)]).await
    }

    /// The URL of streams that `request` describes, for the id of a running container.
    pub(crate) async fn streams_of_container(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        request: impl FnOnce(String) -> Streams,
    ) -> Result<String, StreamError> {
        let pod = self.pod(namespace, pod)?;
        let container_id = running_container(&pod, one_container(&pod, container)?)?;
        self.streams(request(container_id)).await
    }

    /// The URL of connections to ports of a pod.
    pub(crate) async fn ports_of_pod(
        &self,
        namespace: &str,
        pod: &str,
        ports: Vec<i32>,
    ) -> Result<String, StreamError> {
        let found = self.pod(namespace, pod)?;
        let (pod, pod_uid) = (pod.to_owned(), found.metadata.uid.clone());
        self.streams(Streams::PortForward { pod, pod_uid, ports }).await
    }

    /// The runtime. Waits until the engine has started it; an answer also means that the engine's loop works.
    pub(crate) async fn runtime(&self) -> Result<Cri, StreamError> {
        let (answer, answered) = oneshot::channel();
        let asked = self.requests.send(Request::Runtime(answer)).await;
        asked.map_err(|_engine_gone| StreamError::Ending)?;
        answered.await.map_err(|_engine_gone| StreamError::Ending)
    }

    async fn streams(&self, streams: Streams) -> Result<String, StreamError> {
        let (answer, answered) = oneshot::channel();
        let asked = self.requests.send(Request::Streams(streams, answer)).await;
        asked.map_err(|_engine_gone| StreamError::Ending)?;
        answered.await.unwrap_or(Err(StreamError::Ending))
    }

    /// Records an event on the pod.
    pub fn warn(&self, pod: &Pod, reason: &str, message: &str) {
        self.sinks.record(&pod.reference(), EventType::Warning, reason, message);
    }
}

/// Its id, as the runtime knows it.
fn running_container(pod: &Pod, container: &str) -> Result<String, StreamError> {
    let status = pod.status.of_container(container);
    let running = status.filter(|status| matches!(status.state, ContainerState::Running(_)));
    let id = running.and_then(|status| status.container_id.split_once("://")).map(|(_, id)| id.to_owned());
    let state = || status.map_or_else(|| "waiting".to_owned(), |status| in_words(&status.state));
    id.ok_or_else(|| StreamError::NotRunning {
        pod: pod.metadata.name.clone(),
        container: container.to_owned(),
        state: state(),
    })
}

/// `waiting: CrashLoopBackOff`, `terminated: Completed, exit code 0`.
fn in_words(state: &ContainerState) -> String {
    match state {
        ContainerState::Waiting(waiting) if waiting.reason.is_empty() => "waiting".to_owned(),
        ContainerState::Waiting(waiting) => format!("waiting: {}", waiting.reason),
        // Its id is not known yet.
        ContainerState::Running(_) => "starting".to_owned(),
        ContainerState::Terminated(ended) => {
            format!("terminated: {}, exit code {}", ended.reason, ended.exit_code)
        }
    }
}

/// The words are kubelet's where it has any (`validateContainerLogStatus`).
fn why_no_log(status: Option<&ContainerStatus>) -> String {
    let Some(ContainerState::Waiting(waiting)) = status.map(|status| &status.state) else {
        return "it has no log yet".to_owned();
    };
    match (waiting.reason.as_str(), waiting.message.as_str()) {
        ("ErrImagePull", _) => "image can't be pulled".to_owned(),
        ("ImagePullBackOff", _) => "trying and failing to pull image".to_owned(),
        ("", _) => "it has no log yet".to_owned(),
        (reason, "") => reason.to_owned(),
        (reason, message) => format!("{reason}: {message}"),
    }
}

fn one_container<'a>(pod: &'a Pod, wanted: &str) -> Result<&'a str, LogPathError> {
    let names: Vec<&str> = pod.spec.all_containers().map(|c| c.name.as_str()).collect();
    let owned = || names.iter().map(|n| (*n).to_owned()).collect();
    match (wanted, pod.spec.containers.as_slice()) {
        ("", [only]) => Ok(&only.name),
        ("", _) => Err(LogPathError::Ambiguous { pod: pod.metadata.name.clone(), names: owned() }),
        _ => names.iter().copied().find(|n| *n == wanted).ok_or_else(|| LogPathError::NoContainer {
            pod: pod.metadata.name.clone(),
            container: wanted.to_owned(),
            names: owned(),
        }),
    }
}

impl Streams {
    async fn url(self, cri: &Cri) -> Result<String, StreamError> {
        match self {
            Self::Exec(request) => Ok(cri.exec(request).await?),
            Self::Attach(request) => Ok(cri.attach(request).await?),
            Self::PortForward { pod, pod_uid, ports } => {
                let sandboxes = cri.list_pod_sandboxes(Some(&pod_uid)).await?;
                let ready =
                    sandboxes.iter().find(|found| found.state() == cri::PodSandboxState::SandboxReady);
                let sandbox = ready.ok_or(StreamError::NoSandbox { pod })?;
                Ok(cri.port_forward(&sandbox.id, ports).await?)
            }
        }
    }
}

impl Request {
    pub(super) async fn answer(self, config: &Config, tools: &Tools) {
        let answer = match self {
            Self::ReleaseNode(answer) => answer,
            Self::Runtime(answer) => {
                let _client_gone = answer.send(tools.cri.clone());
                return;
            }
            Self::Streams(streams, answer) => {
                let cri = tools.cri.clone();
                // A runtime that does not answer stops nothing else.
                tokio::spawn(async move {
                    let _client_gone = answer.send(streams.url(&cri).await);
                });
                return;
            }
        };
        let released = tools.remove_shared_cgroups().await;
        let released = released.map_err(Error::Cgroup).and_then(|()| Ok(config.node.unshare()?));
        // The caller may be gone.
        let _receiver_gone = answer.send(released);
    }
}
