//! The engine: makes the machine match the store.
//!
//! It starts the embedded runtime, watches for drivers, rotates logs, keeps the node from running out
//! of disk, memory and processes, and runs one worker per pod. It makes no decisions about a pod: it only gives each pod a worker and wakes that worker.
//!
//! Stopping the engine leaves pods running. The runtime's lists and the volumes' files hold all
//! state that a worker needs, and the next engine reads it there. Only [`Handle::stop_pods`] stops
//! pods.

pub mod eviction;
pub mod log_rotation;

mod events;
mod handle;
mod orphans;
mod preload;
mod runtime_health;
mod runtime_process;
mod workers;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::capacity::admission::{Admission, Capacity};
use crate::clients::cri::{Abilities, Cri};
use crate::clients::plugins::Plugins;
use crate::node::Node;
use crate::objects::{EventType, ObjectRef};
use crate::pod::cgroup::Hierarchies;
use crate::sink::Sinks;
use crate::store::{Store, UNREADABLE_RECORD};
use crate::volumes::Volumes;
use crate::worker::{FileWork, Starts, Tools, host_ip};
use workers::Workers;

pub(crate) use handle::Streams;
pub use handle::{ContainerLog, Handle, LogPathError, StreamError};
pub use runtime_process::{EmbeddedRuntime, RuntimeEndpoint};

/// The embedded runtime answers in milliseconds; a remote one may still be starting.
const RUNTIME_DEADLINE: Duration = Duration::from_secs(30);

/// Why the engine cannot start, or why it stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Node(#[from] crate::node::Error),
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    #[error("container runtime at {} does not answer: is it running, and is this its socket?", socket.display())]
    Runtime {
        socket: PathBuf,
        #[source]
        source: crate::clients::cri::Error,
    },
    #[error("embedded container runtime")]
    Embedded(#[source] runtime::Error),
    #[error("embedded container runtime ended")]
    EmbeddedEnded,
    #[error(transparent)]
    Cgroup(crate::pod::cgroup::Error),
    #[error("reconstruct volumes")]
    Reconstruct(#[source] crate::volumes::Error),
}

/// The engine's configuration.
#[derive(Debug)]
pub struct Config {
    /// The claimed root directory; claim it before opening the store.
    pub node: Node,
    pub node_name: String,
    pub runtime: RuntimeEndpoint,
    /// `/var/log/pods`.
    pub log_dir: PathBuf,
    /// Absolute within each hierarchy, such as `/hawser`.
    pub cgroup_root: String,
    /// The maximum number of pods.
    pub max_pods: u32,
    /// The maximum number of processes and threads in one pod; `None` means the node's limit.
    pub pod_pids_limit: Option<i64>,
    /// RuntimeDefault for pods without a seccomp profile.
    pub seccomp_default: bool,
    pub logs: log_rotation::Limits,
    pub image_gc: eviction::ImageGc,
    pub pressure: crate::capacity::pressure::PressureLimits,
}

/// An engine that is ready to run.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    store: Store,
    sinks: Sinks,
    plugins: Plugins,
    volumes: Volumes,
    tasks: mpsc::Receiver<handle::Request>,
    handle: Handle,
}

/// Returns an engine that follows `store` and reports to `sinks`, and a handle for the client API.
pub fn new(config: Config, store: Store, sinks: Sinks) -> (Engine, Handle) {
    let plugins = Plugins::new();
    let volumes = Volumes::new(config.node.root(), store.clone(), sinks.clone(), plugins.clone());
    let (requests, tasks) = mpsc::channel(8);
    let capacity = Capacity::of_machine(config.node.root(), config.max_pods);
    let handle = Handle::new(
        store.clone(),
        sinks.clone(),
        volumes.clone(),
        config.log_dir.clone(),
        capacity,
        requests,
    );
    let engine = Engine { config, store, sinks, plugins, volumes, tasks, handle: handle.clone() };
    (engine, handle)
}

impl Engine {
    /// Runs until `shutdown`, which leaves pods as they are.
    ///
    /// `controller` does the work of a cluster's controllers. It starts after the volumes of an
    /// earlier kubelet are reconstructed: before that, a volume in use would look unused.
    pub(crate) async fn run<F>(
        mut self,
        controller: impl FnOnce(Plugins, Volumes) -> F,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), Error>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut background = JoinSet::new();
        let socket = self.config.runtime.start(&mut background)?;
        let cri = Cri::new(&socket);
        let runtime_name = self.await_runtime(&cri, &socket, &mut background).await?;
        let runtime_health = self.handle.runtime_health().clone();
        runtime_health.has_answered();
        background.spawn(never_ends(runtime_health.watch(cri.clone())));
        let abilities = self.abilities(&cri).await;
        let pods_on_disk = self.volumes.reconstruct().map_err(Error::Reconstruct)?;

        let registry = self.config.node.root().join("plugins_registry");
        background.spawn(never_ends(self.plugins.clone().watch(registry)));
        background.spawn(never_ends(controller(self.plugins.clone(), self.volumes.clone())));
        background.spawn(never_ends(self.volumes.clone().ask_drivers()));
        background.spawn(never_ends(self.volumes.clone().keep_measuring()));
        background.spawn(never_ends(self.volumes.clone().republish()));
        background.spawn(never_ends(self.volumes.clone().keep_configuration_current()));

        self.preload(&cri, &mut background);
        let tools = Arc::new(self.tools(cri.clone(), runtime_name, &abilities)?);
        background.spawn(never_ends(log_rotation::keep_rotating(Arc::clone(&tools), self.config.logs)));
        background.spawn(never_ends(eviction::watch_limits(Arc::clone(&tools))));
        let limits = std::mem::take(&mut self.config.pressure);
        let pressure = self.handle.pressure().clone();
        let watch = eviction::watch_node(Arc::clone(&tools), self.config.image_gc, limits, pressure);
        background.spawn(never_ends(watch));
        let mut workers = Workers::new(Arc::clone(&tools));
        let mut container_events = events::subscribe(cri, &mut background);
        let mut changes = self.store.subscribe();
        orphans::expect_running(&tools).await;
        for orphan in orphans::find(&tools, pods_on_disk).await {
            workers.tear_down(orphan);
        }
        workers.follow(&self.store);
        self.volumes.unstage_unused();

        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                change = changes.recv() => workers.on_change(&self.store, change),
                Some(event) = container_events.recv() => workers.on_event(&event),
                Some(uid) = workers.ended() => workers.remove(&uid, &self.store),
                Some(request) = self.tasks.recv() => request.answer(&self.config, &tools).await,
                Some(ended) = background.join_next() => return Err(ended.unwrap_or(Error::EmbeddedEnded)),
            }
        }
        self.config.runtime.end(&socket);
        info!(pods = self.store.pods().len(), "engine stopped; its pods keep running");
        Ok(())
    }

    /// A handle on this engine.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// The kubelet does not manage the images of a remote runtime.
    fn preload(&self, cri: &Cri, background: &mut JoinSet<Error>) {
        let RuntimeEndpoint::Embedded(embedded) = &self.config.runtime else { return };
        let config = &embedded.config;
        let (images_dir, limits) = (config.images_dir.clone(), config.image_limits.clone());
        background.spawn(never_ends(preload::follow(cri.clone(), images_dir, limits)));
    }

    fn tools(&self, cri: Cri, runtime_name: String, abilities: &Abilities) -> Result<Tools, Error> {
        Ok(Tools {
            cri,
            runtime_name,
            images: match &self.config.runtime {
                RuntimeEndpoint::Embedded(embedded) => {
                    Some((embedded.config.images_dir.clone(), embedded.config.image_limits.clone()))
                }
                RuntimeEndpoint::Remote(_) => None,
            },
            host_ip: host_ip(),
            store: self.store.clone(),
            sinks: self.sinks.clone(),
            volumes: self.volumes.clone(),
            hierarchies: Hierarchies::mounted()?,
            node_name: self.config.node_name.clone(),
            cgroup_root: self.config.cgroup_root.clone(),
            pod_pids_limit: self.config.pod_pids_limit,
            seccomp_default: self.config.seccomp_default,
            recursive_read_only: abilities.recursive_read_only,
            log_dir: self.config.log_dir.clone(),
            root_dir: self.config.node.root().to_owned(),
            starts: Starts::new(),
            admission: Admission::new(
                &self.config.node_name,
                self.handle.capacity(),
                self.handle.pressure().clone(),
            ),
            file_work: FileWork::default(),
        })
    }

    /// Records events for the embedded runtime's unreadable records. Other runtimes report none.
    async fn abilities(&self, cri: &Cri) -> Abilities {
        let node = ObjectRef::node(&self.config.node_name);
        let abilities = cri.abilities().await.unwrap_or_else(|error| {
            warn!(%error, "cannot get the runtime's status");
            Abilities::default()
        });
        for record in &abilities.unreadable_records {
            self.sinks.record(&node, EventType::Warning, UNREADABLE_RECORD, record);
        }
        abilities
    }

    /// Returns the runtime's name.
    async fn await_runtime(
        &self,
        cri: &Cri,
        socket: &Path,
        background: &mut JoinSet<Error>,
    ) -> Result<String, Error> {
        // The embedded runtime answers or ends, even if an interrupted network plugin delays it.
        let deadline = matches!(self.config.runtime, RuntimeEndpoint::Remote(_))
            .then(|| tokio::time::Instant::now() + RUNTIME_DEADLINE);
        let mut pause = crate::backoff::Backoff::new(Duration::from_millis(1), Duration::from_millis(200));
        loop {
            let source = match cri.version().await {
                Ok(version) => {
                    info!(
                        name = version.runtime_name,
                        version = version.runtime_version,
                        "container runtime"
                    );
                    return Ok(version.runtime_name);
                }
                Err(error) => error,
            };
            if deadline.is_some_and(|deadline| tokio::time::Instant::now() > deadline) {
                return Err(Error::Runtime { socket: socket.to_owned(), source });
            }
            tokio::select! {
                () = tokio::time::sleep(pause.step()) => {}
                Some(ended) = background.join_next() => return Err(ended.unwrap_or(Error::EmbeddedEnded)),
            }
        }
    }
}

async fn never_ends(task: impl Future<Output = ()>) -> Error {
    task.await;
    std::future::pending().await
}
