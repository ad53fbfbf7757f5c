//! The CRI calls that a kubelet makes for a pod, one at a time.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::tests::eventually;
use anyhow::{Context, Result, ensure};
use hyper_util::rt::TokioIo;
use proto::cri;
use proto::cri::runtime_service_client::RuntimeServiceClient;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

pub(super) const PAUSE_IMAGE: &str = "hawser.dev/pause:1";
pub(super) const APP_IMAGE: &str = "hawser.dev/demo-app:1";
/// kubelet's runtime-request-timeout.
const DEADLINE: Duration = Duration::from_secs(120);
const CONTAINER_PORT: i32 = 80;

pub(super) struct Cri {
    runtime: Runtime,
    client: RuntimeServiceClient<Channel>,
    cgroup_root: PathBuf,
}

/// A pod sandbox that runs.
pub(super) struct Pod {
    id: String,
    config: cri::PodSandboxConfig,
    pub(super) ips: Vec<IpAddr>,
}

impl Cri {
    pub(super) fn connect(socket: &Path, cgroup_root: PathBuf) -> Result<Self> {
        // Of the calling thread alone: another one would be outside of the sandbox.
        let runtime = Builder::new_current_thread().enable_all().build().context("start tokio")?;
        let socket = socket.to_owned();
        let connector = service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        // A socket's path is no HTTP/2 authority.
        let endpoint = Endpoint::from_static("http://localhost");
        let channel =
            runtime.block_on(endpoint.connect_with_connector(connector)).context("dial containerd")?;
        Ok(Self { runtime, client: RuntimeServiceClient::new(channel), cgroup_root })
    }

    /// One call, bounded in time.
    fn call<T>(
        &self,
        what: &str,
        reply: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T> {
        let bounded = async { tokio::time::timeout(DEADLINE, reply).await };
        let answer = self.runtime.block_on(bounded).with_context(|| format!("{what}: no answer"))?;
        let answer =
            answer.map_err(|status| anyhow::anyhow!("{what}: {:?}: {}", status.code(), status.message()));
        answer.map(tonic::Response::into_inner)
    }

    fn client(&self) -> RuntimeServiceClient<Channel> {
        self.client.clone()
    }

    pub(super) fn ensure_network_ready(&self) -> Result<()> {
        let status = self.call("Status", self.client().status(cri::StatusRequest { verbose: false }))?;
        let conditions = status.status.unwrap_or_default().conditions;
        let network = conditions.iter().find(|condition| condition.r#type == "NetworkReady");
        ensure!(network.is_some_and(|condition| condition.status), "{network:?}");
        Ok(())
    }

    /// A pod whose port 80 is the host's `host_port`.
    pub(super) fn run_pod(&self, name: &str, host_port: i32) -> Result<Pod> {
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: name.to_owned(),
                uid: format!("uid-{name}"),
                namespace: "default".to_owned(),
                attempt: 0,
            }),
            hostname: name.to_owned(),
            log_directory: String::new(),
            port_mappings: vec![cri::PortMapping {
                protocol: cri::Protocol::Tcp.into(),
                container_port: CONTAINER_PORT,
                host_port,
                host_ip: String::new(),
            }],
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_root.display().to_string(),
                ..cri::LinuxPodSandboxConfig::default()
            }),
            ..cri::PodSandboxConfig::default()
        };
        let request =
            cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        let id = self.call("RunPodSandbox", self.client().run_pod_sandbox(request))?.pod_sandbox_id;
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: false };
        let status = self.call("PodSandboxStatus", self.client().pod_sandbox_status(request))?;
        let network =
            status.status.and_then(|status| status.network).context("a status without a network")?;
        let more = network.additional_ips.into_iter().map(|ip| ip.ip);
        let ips =
            [network.ip].into_iter().chain(more).map(|ip| ip.parse().with_context(|| format!("ip {ip:?}")));
        Ok(Pod { id, config, ips: ips.collect::<Result<_>>()? })
    }

    fn create(&self, pod: &Pod, name: &str, args: &[&str], mounts: Vec<cri::Mount>) -> Result<String> {
        let image = cri::ImageSpec { image: APP_IMAGE.to_owned(), ..cri::ImageSpec::default() };
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            image: Some(image),
            command: vec!["/demo-app".to_owned()],
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            mounts,
            ..cri::ContainerConfig::default()
        };
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: pod.id.clone(),
            config: Some(config),
            sandbox_config: Some(pod.config.clone()),
        };
        let id = self.call("CreateContainer", self.client().create_container(request))?.container_id;
        let request = cri::StartContainerRequest { container_id: id.clone() };
        self.call("StartContainer", self.client().start_container(request))?;
        Ok(id)
    }

    /// A web server on port 80 of both families, with the files of `content`.
    pub(super) fn start_server(&self, pod: &Pod, content: &Path) -> Result<()> {
        let mount = cri::Mount {
            container_path: "/data".to_owned(),
            host_path: content.display().to_string(),
            readonly: true,
            ..cri::Mount::default()
        };
        self.create(pod, "server", &["serve", "[::]:80", "/data"], vec![mount]).map(drop)
    }

    /// Runs demo-app with `args` in the pod; it has to succeed.
    pub(super) fn run_to_end(&self, pod: &Pod, name: &str, args: &[&str]) -> Result<()> {
        let id = self.create(pod, name, args, Vec::new())?;
        eventually(&format!("{args:?} ends"), DEADLINE, || {
            let request = cri::ContainerStatusRequest { container_id: id.clone(), verbose: false };
            let status = self.call("ContainerStatus", self.client().container_status(request))?;
            let status = status.status.context("no status")?;
            let exited = status.state() == cri::ContainerState::ContainerExited;
            ensure!(exited, "{:?}", status.state());
            Ok(status.exit_code)
        })
        .and_then(|code| {
            ensure!(code == 0, "exit code {code}");
            Ok(())
        })
    }

    pub(super) fn stop_pod(&self, pod: &Pod) -> Result<()> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: pod.id.clone() };
        self.call("StopPodSandbox", self.client().stop_pod_sandbox(request)).map(drop)
    }

    pub(super) fn remove_pod(&self, pod: &Pod) -> Result<()> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: pod.id.clone() };
        self.call("RemovePodSandbox", self.client().remove_pod_sandbox(request)).map(drop)
    }
}
