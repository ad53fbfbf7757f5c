//! A host for one test: private mount and network namespaces, directories of its
//! own, and the real `hawser-runtime` on a CRI socket.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "what fails here fails the test that uses it, which shows the log"
)]

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sched::CloneFlags;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use proto::cri::image_service_client::ImageServiceClient;
use proto::cri::runtime_service_client::RuntimeServiceClient;
use proto::cri::{
    ContainerConfig, ContainerEventResponse, ContainerEventType, ContainerMetadata, ContainerStatus,
    ContainerStatusRequest, CreateContainerRequest, GetEventsRequest, ImageSpec, LinuxContainerConfig,
    LinuxContainerSecurityContext, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxMetadata, PullImageRequest, RemovePodSandboxRequest,
    RunPodSandboxRequest, StartContainerRequest,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::unix::AsyncFd;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::binaries;

const DEADLINE: Duration = Duration::from_secs(20);
pub const IMAGE: &str = "demo:latest";
/// A flag of `start_with`, not of the runtime, which preloads by itself.
pub const PRELOAD: &str = "preload";

#[derive(Debug)]
pub struct Host {
    pub dir: tempfile::TempDir,
    pub cgroup: String,
    pub runtime: Option<Child>,
}

#[derive(Debug)]
pub struct Cri {
    pub runtime: RuntimeServiceClient<Channel>,
    pub images: ImageServiceClient<Channel>,
    events: Streaming<ContainerEventResponse>,
}

impl Host {
    /// With the demo image to pull and no network configuration.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert!(geteuid().is_root(), "these tests make namespaces: run them as root");
        // This thread only; what it starts inherits them.
        linux::process::unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
        linux::mount::make_private(Path::new("/")).unwrap();
        let dir = tempfile::Builder::new().prefix("hawser-runtime-test-").tempdir().unwrap();
        let cgroup = format!("/hawser-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let host = Self { dir, cgroup, runtime: None };
        for sub in ["images", "net.d", "bin", "cni", "logs"] {
            std::fs::create_dir(host.path(sub)).unwrap();
        }
        write_layout(&host.path("images/demo"), IMAGE, &demo_layer());
        host
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub async fn start(&mut self) -> Cri {
        self.start_with(&[]).await
    }

    /// With more flags.
    pub async fn start_with(&mut self, flags: &[&str]) -> Cri {
        self.start_in(&[], flags).await
    }

    /// With these variables of the environment, and no others about proxies.
    pub async fn start_in(&mut self, variables: &[(&str, &str)], flags: &[&str]) -> Cri {
        let mut command = Command::new(binaries::under_test("hawser-runtime").unwrap());
        let options = [
            ("--root-dir", "root"),
            ("--socket", "cri.sock"),
            ("--images", "images"),
            ("--cni-conf-dir", "net.d"),
            ("--cni-bin-dir", "bin"),
            ("--cni-cache-dir", "cni"),
            ("--trace-file", "trace.jsonl"),
        ];
        for (option, name) in options {
            command.arg(option).arg(self.path(name));
        }
        // Most tests pull by themselves; one asks for the contrary.
        if !flags.contains(&PRELOAD) {
            command.arg("--no-preload");
        }
        for name in ["HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"] {
            command.env_remove(name).env_remove(name.to_ascii_lowercase());
        }
        command.envs(variables.iter().copied());
        command.args(flags.iter().filter(|flag| **flag != PRELOAD));
        // The same tests through an OCI runtime: conformance sets this to runc.
        if let Some(program) = std::env::var_os("HAWSER_TEST_OCI_RUNTIME") {
            command.arg("--oci-runtime").arg(program);
        }
        let log =
            std::fs::OpenOptions::new().append(true).create(true).open(self.path("runtime.log")).unwrap();
        self.runtime = Some(command.stderr(log).spawn().unwrap());
        self.connect().await
    }

    pub async fn connect(&self) -> Cri {
        let endpoint = Endpoint::from_shared(format!("unix:{}", self.path("cri.sock").display())).unwrap();
        // The runtime sets the socket's mode once it listens.
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
        inotify.add_watch(self.dir.path(), AddWatchFlags::IN_CREATE | AddWatchFlags::IN_ATTRIB).unwrap();
        #[expect(deprecated, reason = "an OwnedFd does not change under it, and its successor is unsafe")]
        let changes = AsyncFd::new(OwnedFd::from(inotify));
        let changes = changes.unwrap();
        let until = tokio::time::Instant::now() + DEADLINE;
        let channel = loop {
            match endpoint.connect().await {
                Ok(channel) => break channel,
                Err(e) => match tokio::time::timeout_at(until, changes.readable()).await {
                    Ok(ready) => {
                        nix::unistd::read(&changes, &mut [0; 4096]).unwrap();
                        ready.unwrap().clear_ready();
                    }
                    Err(_elapsed) => panic!("connect: {e:?}\n{}", self.log()),
                },
            }
        };
        let mut runtime = RuntimeServiceClient::new(channel.clone());
        let events = runtime.get_container_events(GetEventsRequest {}).await.unwrap().into_inner();
        Cri { runtime, images: ImageServiceClient::new(channel), events }
    }

    /// kill -9: nothing can be tidied up.
    pub fn kill(&mut self) {
        let mut child = self.runtime.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // A dead runtime's socket would refuse, the next one replaces it; wait for that one.
        std::fs::remove_file(self.path("cri.sock")).unwrap();
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("runtime.log")).unwrap_or_default()
    }

    /// The pod with this name: annotation `hawser.dev/network: none`.
    pub fn pod(&self, name: &str) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.to_owned(),
                uid: format!("uid-{name}"),
                namespace: "test".to_owned(),
                attempt: 0,
            }),
            hostname: name.to_owned(),
            log_directory: self.path("logs").display().to_string(),
            annotations: HashMap::from([("hawser.dev/network".to_owned(), "none".to_owned())]),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup.clone(),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    /// Lines of a container's log without their times: `stdout F text`.
    pub fn container_log(&self, container: &str) -> Vec<String> {
        let path = self.path("logs").join(format!("{container}.log"));
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        text.lines().map(|l| l.split_once(' ').expect("time and rest").1.to_owned()).collect()
    }

    /// Nothing of any pod is left, anywhere.
    pub fn assert_clean(&self) {
        let below = |path: &Path| path.starts_with(self.dir.path());
        let mounts: Vec<_> = linux::mountinfo::read()
            .unwrap()
            .into_iter()
            .map(|m| m.mount_point)
            .filter(|p| below(p))
            .collect();
        assert_eq!(mounts, Vec::<PathBuf>::new(), "mounts");
        for dir in ["root/sandboxes", "root/netns", "root/shm", "cni/results"] {
            let left: Vec<_> =
                std::fs::read_dir(self.path(dir)).into_iter().flatten().flatten().map(|e| e.path()).collect();
            assert_eq!(left, Vec::<PathBuf>::new(), "{dir}");
        }
        let hierarchies = linux::cgroup::Hierarchies::detect().unwrap();
        for controller in ["cpu", "memory", "pids", "devices", "cpuset", "freezer", "hugetlb"] {
            if let Some(dir) = hierarchies.dir(controller, Path::new(&self.cgroup)) {
                assert!(!dir.exists(), "cgroup {}", dir.display());
            }
        }
        assert_eq!(self.shims(), Vec::<i32>::new(), "shims");
    }

    /// Pids of this host's shims. The process that holds a pod's PID namespace has a shim's command
    /// line and is in that namespace.
    pub fn shims(&self) -> Vec<i32> {
        let own = self.dir.path().as_os_str().as_encoded_bytes();
        std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| {
                let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                cmdline.starts_with(b"hawser-shim\0") && cmdline.windows(own.len()).any(|w| w == own)
            })
            .filter(|pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
                numbers.is_none_or(|numbers| numbers.split_whitespace().count() == 1)
            })
            .collect()
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut runtime) = self.runtime.take() {
            let _has_ended = runtime.kill();
            let _status = runtime.wait();
        }
        // After a failed test: the shims die, and their containers with their pid namespaces.
        for pid in self.shims() {
            for child in std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
                .unwrap_or_default()
                .split(' ')
            {
                // The last piece is empty.
                let _no_pid = child.parse().map(kill_process);
            }
            kill_process(pid);
        }
        // So that the directory can go: what is mounted below it is seen by this thread alone.
        for mount in linux::mountinfo::read().unwrap_or_default().iter().rev() {
            if mount.mount_point.starts_with(self.dir.path()) {
                let _gone_with_another =
                    linux::mount::unmount(&mount.mount_point, linux::mount::UnmountMode::Detach);
            }
        }
        if std::thread::panicking() {
            eprintln!("runtime's log:\n{}", self.log());
        }
    }
}

fn kill_process(pid: i32) {
    let _has_ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
}

impl Cri {
    pub async fn pull(&mut self, image: &str) -> Result<String, tonic::Status> {
        let request = PullImageRequest { image: Some(image_spec(image)), ..Default::default() };
        self.images.pull_image(request).await.map(|r| r.into_inner().image_ref)
    }

    pub async fn run_pod(&mut self, config: &PodSandboxConfig) -> Result<String, tonic::Status> {
        let request = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        self.runtime.run_pod_sandbox(request).await.map(|r| r.into_inner().pod_sandbox_id)
    }

    pub async fn create(&mut self, pod: &str, config: ContainerConfig) -> Result<String, tonic::Status> {
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: Some(config),
            sandbox_config: None,
        };
        self.runtime.create_container(request).await.map(|r| r.into_inner().container_id)
    }

    pub async fn start(&mut self, container: &str) -> Result<(), tonic::Status> {
        let request = StartContainerRequest { container_id: container.to_owned() };
        self.runtime.start_container(request).await.map(drop)
    }

    /// Creates, starts, waits for the end.
    pub async fn run(&mut self, pod: &str, config: ContainerConfig) -> ContainerStatus {
        let id = self.create(pod, config).await.unwrap();
        self.start(&id).await.unwrap();
        self.ended(&id).await
    }

    /// Waits for the event that says so; what a container's status is then.
    pub async fn ended(&mut self, container: &str) -> ContainerStatus {
        self.event(container, ContainerEventType::ContainerStoppedEvent).await;
        self.status(container).await
    }

    pub async fn event(&mut self, container: &str, kind: ContainerEventType) -> ContainerEventResponse {
        let wanted = async {
            loop {
                let event = self.events.message().await.unwrap().expect("the stream does not end");
                if event.container_id == container && event.container_event_type() == kind {
                    return event;
                }
            }
        };
        tokio::time::timeout(DEADLINE, wanted).await.unwrap_or_else(|_| panic!("no {kind:?} for {container}"))
    }

    pub async fn status(&mut self, container: &str) -> ContainerStatus {
        let request = ContainerStatusRequest { container_id: container.to_owned(), verbose: false };
        self.runtime.container_status(request).await.unwrap().into_inner().status.unwrap()
    }

    pub async fn remove_pod(&mut self, pod: &str) {
        let request = RemovePodSandboxRequest { pod_sandbox_id: pod.to_owned() };
        self.runtime.remove_pod_sandbox(request).await.unwrap();
    }
}

pub fn image_spec(image: &str) -> ImageSpec {
    ImageSpec { image: image.to_owned(), ..Default::default() }
}

/// As the kubelet asks: a pid namespace for each container.
pub fn namespaces() -> NamespaceOption {
    NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() }
}

/// A container of the demo image; its log is `<name>.log`.
pub fn container(name: &str, command: &[&str]) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(image_spec(IMAGE)),
        command: command.iter().map(|w| (*w).to_owned()).collect(),
        log_path: format!("{name}.log"),
        linux: Some(LinuxContainerConfig {
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: Some(namespaces()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Waits for something that has no event of its own.
pub async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    eventually_within(DEADLINE, what, async || look()).await
}

/// [`eventually`], with a limit of its own, for what may take a call to see.
pub async fn eventually_within<T>(
    limit: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(started.elapsed() < limit, "{what} has not happened");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The static demo program.
pub fn demo_program() -> Vec<u8> {
    std::fs::read(binaries::find("demo-app").unwrap()).unwrap()
}

/// One layer: the static demo program, and what /etc a program expects.
pub fn demo_layer() -> Vec<u8> {
    layer(&[
        ("demo-app", 0o755, &demo_program()),
        ("etc/passwd", 0o644, b"root:x:0:0::/root:/bin/sh\nweb:x:33:34::/srv:/bin/sh\n"),
        ("etc/group", 0o644, b"root:x:0:\nweb:x:34:\n"),
        ("plain-file", 0o644, b"not a program"),
    ])
}

pub fn layer(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    layer_with_links(files, &[])
}

/// `links`: name and where it leads.
pub fn layer_with_links(files: &[(&str, u32, &[u8])], links: &[(&str, &str)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let header = |mode, size| {
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(size);
        header
    };
    for (name, mode, content) in files {
        tar.append_data(&mut header(*mode, content.len() as u64), name, *content).unwrap();
    }
    for (name, leads_to) in links {
        let mut header = header(0o777, 0);
        header.set_entry_type(tar::EntryType::Symlink);
        tar.append_link(&mut header, name, leads_to).unwrap();
    }
    tar.into_inner().unwrap()
}

pub fn digest_of(bytes: &[u8]) -> String {
    let hash = base16ct::lower::encode_string(&Sha256::digest(bytes));
    format!("sha256:{hash}")
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An OCI image layout with one image of one gzipped layer. Returns the layer's blob.
pub fn write_layout(dir: &Path, name: &str, layer: &[u8]) -> PathBuf {
    write_layout_with_history(dir, name, layer, "[]")
}

/// `history`: of the configuration, as JSON.
pub fn write_layout_with_history(dir: &Path, name: &str, layer: &[u8], history: &str) -> PathBuf {
    write_layout_with(dir, name, layer, |mut config| {
        config["history"] = "HISTORY".into();
        config.to_string().replace("\"HISTORY\"", history)
    })
}

/// `text`: of the configuration.
pub fn write_layout_with(
    dir: &Path,
    name: &str,
    layer: &[u8],
    text: impl FnOnce(Value) -> String,
) -> PathBuf {
    let blobs = dir.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        let digest = digest_of(bytes);
        std::fs::write(blobs.join(&digest["sha256:".len()..]), bytes).unwrap();
        (digest, bytes.len())
    };
    let descriptor = |kind: &str, (digest, size): (String, usize)| -> Value {
        json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest, "size": size})
    };
    let blob = put(&gzip(layer));
    let blob_path = blobs.join(&blob.0["sha256:".len()..]);
    let config = json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Entrypoint": ["/demo-app"], "Cmd": ["print", "from the image"], "Env": ["GREETING=hello"]},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
    });
    let config = text(config);
    let manifest = json!({
        "schemaVersion": 2,
        "config": descriptor("config.v1+json", put(config.as_bytes())),
        "layers": [descriptor("layer.v1.tar+gzip", blob)],
    });
    let mut entry = descriptor("manifest.v1+json", put(manifest.to_string().as_bytes()));
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": name});
    std::fs::write(dir.join("index.json"), json!({"schemaVersion": 2, "manifests": [entry]}).to_string())
        .unwrap();
    std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    blob_path
}
