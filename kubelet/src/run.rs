//! `hawser-kubelet run`: starts and stops the daemon's parts.

mod memory;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proto::kubelet::GetRequest;
use proto::kubelet::kubelet_client::KubeletClient;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::capacity::admission::Capacity;
use crate::clients::unix_channel;
use crate::config::{RootDir, RunArgs, http_socket_in, socket_in};
use crate::endpoints::{self, Endpoints};
use crate::engine::eviction::ImageGc;
use crate::engine::log_rotation;
use crate::engine::{self, EmbeddedRuntime, RuntimeEndpoint};
use crate::node::{self, Node};
use crate::objects::Kind;
use crate::sink::Sinks;
use crate::source::{self, DirectorySource, ObjectSource};
use crate::standalone::api::{self, Api, ClientSocket, Stopping};
use crate::standalone::provisioner::Provisioner;
use crate::store::{self, Store};

/// The time limit for open client calls and sources at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for the root directory's lock if the kubelet that holds it does not answer.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// A working kubelet answers within milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "hawser-kubelet run creates mounts, namespaces and cgroups: run it as root (sudo hawser-kubelet run …)"
    )]
    NotRoot,
    #[error("--{flag} {}", path.display())]
    Path {
        flag: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("--{flag}: {problem}")]
    Eviction { flag: &'static str, problem: String },
    #[error("read the host name: set --node-name NAME instead")]
    HostName(#[source] io::Error),
    #[error("start the daemon's threads and signals")]
    Process(#[source] io::Error),
    #[error(transparent)]
    Node(#[from] node::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Api(#[from] api::Error),
    #[error(transparent)]
    Endpoints(#[from] endpoints::Error),
    #[error(transparent)]
    Engine(#[from] engine::Error),
    #[error(transparent)]
    Memory(linux::Error),
}

/// Runs until SIGTERM, SIGINT or a client's `stop`.
pub fn run(args: RunArgs) -> Result<(), Error> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    memory::limit_heaps().map_err(Error::Memory)?;
    trace::init("hawser-kubelet", &args.log, args.trace_file.as_deref()).map_err(|source| Error::Path {
        flag: "log or --trace-file",
        path: args.trace_file.clone().unwrap_or_else(|| args.log.clone().into()),
        source,
    })?;
    let threads = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Process)?;
    let result = threads.block_on(run_parts(args));
    // A blocked system call (a dead mount) must not delay the exit.
    threads.shutdown_timeout(SHUTDOWN_TIMEOUT);
    result
}

async fn run_parts(args: RunArgs) -> Result<(), Error> {
    // Install signal handlers before any side effect.
    let (stopping, stopped) = watch::channel(Stopping::No);
    let ended = end_of(&stopping, stopped)?;
    let node = claim(&args.root).await?;
    let root = node.root().to_owned();
    let node_name = node_name(args.node_name.as_deref())?;
    let store = Store::open(&root, &node_name)?;
    store.set_capacity(Capacity::of_machine(&root, args.max_pods));
    let manifests = absolute("manifests", &args.manifests)?;
    let state_file = root.join("hawser").join("manifests.json");
    let directory = DirectorySource::new(source::Config { dir: manifests, state_file }, store.clone());
    let mut sources: Vec<Box<dyn ObjectSource>> = vec![Box::new(directory)];
    for source in &mut sources {
        tokio::select! {
            () = source.report_all() => {}
            // A directory that does not answer must not delay the exit.
            () = ended.clone().wait() => return Ok(()),
        }
    }
    let sinks = Sinks::new(store.clone(), Vec::new());
    let (engine, handle) = engine::new(engine_config(&args, node, node_name)?, store.clone(), sinks);

    // This source has no objects at first; it starts once it can answer.
    let (listener, socket) = api::listen(&socket_in(&root))?;
    let clients = Api { store: store.clone(), engine: handle, stopping: stopping.clone() };
    let (http_listener, http_socket) = api::listen(&http_socket_in(&root))?;
    let endpoints = Endpoints::new(clients.clone(), root.clone(), http_listener, args.endpoints.listener());
    let endpoints = endpoints.await?;
    sources.push(Box::new(ClientSocket::new(clients, listener)));
    let mut following = JoinSet::new();
    following.spawn(endpoints.serve(Box::pin(ended.clone().wait())));
    for source in sources {
        following.spawn(source.follow(Box::pin(ended.clone().wait())));
    }
    // Until the kubelet ends: it is not awaited.
    let _memory = tokio::spawn(memory::give_back_after_work());
    let provision = |plugins, volumes| Provisioner::new(store, plugins, volumes).run();
    let result = engine.run(provision, ended.wait()).await;
    stopping.send_replace(Stopping::Now);
    let all_end = async { while following.join_next().await.is_some() {} };
    // A source that is still busy is aborted.
    let _elapsed = tokio::time::timeout(SHUTDOWN_TIMEOUT, all_end).await;
    // Remove the socket, so that clients find none instead of one that refuses connections.
    for socket in [socket, http_socket] {
        let _may_be_gone = std::fs::remove_file(&socket);
    }
    Ok(result?)
}

/// Claims the root directory. A kubelet killed by SIGKILL holds the lock until the kernel has ended
/// its process: wait for that, but not for a working kubelet.
async fn claim(root: &RootDir) -> Result<Node, Error> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let mut is_announced = false;
    loop {
        match Node::claim(&root.path) {
            Err(node::Error::Locked { .. }) if Instant::now() < deadline && !is_served(root).await => {
                if !std::mem::replace(&mut is_announced, true) {
                    tracing::warn!(
                        root_dir = %root.path.display(),
                        "another hawser-kubelet holds the root directory and does not answer: \
                         waiting up to {} s until it exits",
                        LOCK_TIMEOUT.as_secs()
                    );
                }
                tokio::time::sleep(LOCK_PAUSE).await;
            }
            claimed => return Ok(claimed?),
        }
    }
}

/// Whether a kubelet answers on the root directory's socket.
async fn is_served(root: &RootDir) -> bool {
    let ask = async {
        let channel = unix_channel::connect(&root.socket()).await.ok()?;
        let request = GetRequest { kind: Kind::Node.to_string(), ..GetRequest::default() };
        KubeletClient::new(channel).get(request).await.ok()
    };
    tokio::time::timeout(ANSWER_TIMEOUT, ask).await.is_ok_and(|answer| answer.is_some())
}

/// Resolves when the daemon must stop.
#[derive(Debug, Clone)]
struct End(watch::Receiver<Stopping>);

impl End {
    async fn wait(mut self) {
        // The sender lives as long as the daemon: an error also means stop.
        let _sender_gone = self.0.wait_for(|stopping| *stopping == Stopping::Now).await;
    }
}

fn end_of(stopping: &watch::Sender<Stopping>, stopped: watch::Receiver<Stopping>) -> Result<End, Error> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Process)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Process)?;
    let stopping = stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stopping.send_replace(Stopping::Now);
    });
    Ok(End(stopped))
}

fn engine_config(args: &RunArgs, node: Node, node_name: String) -> Result<engine::Config, Error> {
    Ok(engine::Config {
        runtime: runtime_endpoint(args, node.root())?,
        node,
        node_name,
        log_dir: absolute("log-dir", &args.log_dir)?,
        cgroup_root: cgroup_root(args),
        seccomp_default: args.seccomp_default,
        max_pods: args.max_pods,
        pod_pids_limit: (args.pod_pids_limit > 0).then(|| args.pod_pids_limit.into()),
        logs: log_rotation::Limits {
            max_size: args.container_log_max_size,
            max_files: args.container_log_max_files.into(),
        },
        image_gc: ImageGc {
            high_percent: args.image_gc_high_threshold.into(),
            low_percent: args.image_gc_low_threshold.min(args.image_gc_high_threshold).into(),
            min_age: Duration::from_secs(args.minimum_image_ttl),
        },
        pressure: args
            .eviction
            .limits()
            .map_err(|problem| Error::Eviction { flag: "eviction-soft", problem })?,
    })
}

fn runtime_endpoint(args: &RunArgs, root: &Path) -> Result<RuntimeEndpoint, Error> {
    if let Some(socket) = &args.container_runtime_endpoint {
        return Ok(RuntimeEndpoint::Remote(socket.clone()));
    }
    let private = root.join("hawser");
    let config = runtime::Config {
        root_dir: Node::runtime_dir(root),
        images_dir: absolute("images", &args.images)?,
        cni_conf_dir: absolute("cni-conf-dir", &args.cni_conf_dir)?,
        cni_bin_dir: absolute("cni-bin-dir", &args.cni_bin_dir)?,
        cni_cache_dir: private.join("cni"),
        oci_runtime: args.oci_runtime.clone(),
        cgroup_root: cgroup_root(args).into(),
        image_limits: args.image_limits.clone(),
        registries: args.registries.clone(),
        // The engine imports images itself.
        preload_images: false,
        allow_without_device_control: args.allow_without_device_control,
        // The kubelet rotates at half of it, every 10 s or more often.
        log_ceiling: Some(runtime::LogCeiling {
            bytes: args.container_log_max_size.saturating_mul(2),
            files: args.container_log_max_files.into(),
        }),
    };
    Ok(RuntimeEndpoint::Embedded(Box::new(EmbeddedRuntime { socket: private.join("runtime.sock"), config })))
}

fn cgroup_root(args: &RunArgs) -> String {
    format!("/{}", args.cgroup_root.trim_matches('/'))
}

fn absolute(flag: &'static str, path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::Path { flag, path: path.to_owned(), source })
}

/// Like kubelet: the host name in lower case.
fn node_name(given: Option<&str>) -> Result<String, Error> {
    match given {
        Some(name) => Ok(name.to_owned()),
        None => {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").map_err(Error::HostName)?;
            Ok(host.trim().to_lowercase())
        }
    }
}
