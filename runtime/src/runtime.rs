//! The state behind the CRI services: all sandboxes, all containers, the image store, and the
//! receivers of events.
//!
//! `state` has one sandbox and one container, and their records on disk; `status` shows them as CRI
//! messages.

pub(crate) mod created_groups;
pub(crate) mod group;
mod objects;
pub(crate) mod pulls;
pub(crate) mod samples;
pub(crate) mod state;
pub(crate) mod status;
mod waiters;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use linux::cgroup::Hierarchies;
use linux::lock::FileLock;
use proto::cri::{ContainerEventResponse, ContainerEventType};
use tokio::sync::broadcast;

use crate::Config;
use crate::cni::{Cni, NetworkList};
use crate::disk::mount_dir::MountDir;
use crate::disk::record;
use crate::disk::trash::Trash;
use crate::error::{Error, Result, chain};
use crate::images::ImageStore;
use crate::registry::Registries;
use crate::shim::log::LogCeiling;
use crate::shim::protocol::{Answer, Message, ShimStatus, now};
use crate::shim_client::{Listener, empty_mounts};
use crate::spec::CgroupLimits;
use created_groups::CreatedGroups;
use objects::Objects;
use pulls::Pulls;
use samples::Tree;
use state::{Container, Ended, Phase, RunState, Sandbox, former_shm, locked};
use waiters::Waiters;

/// A receiver that lags by more events is disconnected, and must list anew.
const EVENTS_KEPT: usize = 4096;

/// An event of a container and its pod. The statuses are added when it is sent: thousands of events
/// of a pod with hundreds of containers may wait.
#[derive(Debug)]
pub(crate) struct Event {
    container_id: String,
    kind: ContainerEventType,
    created_at: i64,
    sandbox: Option<Arc<Sandbox>>,
    containers: Vec<Arc<Container>>,
}

impl Event {
    pub(crate) fn response(&self) -> ContainerEventResponse {
        let statuses = self.containers.iter().map(|container| status::container_status(container));
        ContainerEventResponse {
            container_id: self.container_id.clone(),
            container_event_type: self.kind.into(),
            created_at: self.created_at,
            pod_sandbox_status: self.sandbox.as_ref().map(|sandbox| status::sandbox_status(sandbox)),
            containers_statuses: statuses.collect(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) root_dir: PathBuf,
    pub(crate) oci_runtime: Option<PathBuf>,
    pub(crate) allow_without_device_control: bool,
    pub(crate) log_ceiling: Option<LogCeiling>,
    pub(crate) cgroups: CgroupLimits,
    /// Where control groups are mounted, in the form of mountinfo.
    pub(crate) cgroup_mounts: Vec<u8>,
    pub(crate) cni: Cni,
    pub(crate) images: ImageStore,
    pub(crate) images_usage: Tree,
    pub(crate) registries: Registries,
    pub(crate) trash: Arc<Trash>,
    /// The sandboxes' network namespaces, by id.
    pub(crate) netns: MountDir,
    /// What the sandboxes' containers have at /dev/shm, by id.
    pub(crate) shm: MountDir,
    pub(crate) pulls: Pulls,
    /// Programs that exec has started, and their exit codes.
    pub(crate) execs: Waiters<i32>,
    /// Clients that are attached to containers, and why that ended.
    pub(crate) attachments: Waiters<Option<String>>,
    pub(crate) boot_id: String,
    /// The last pod's.
    network: Mutex<Option<Arc<NetworkList>>>,
    sandboxes: Mutex<Objects<Sandbox>>,
    containers: Mutex<Objects<Container>>,
    events: broadcast::Sender<Arc<Event>>,
    created_cgroups: Mutex<CreatedGroups>,
    /// Descriptions of unreadable records.
    unreadable: Mutex<Vec<String>>,
    shim_is_lost: ShimIsLost,
    itself: Weak<Runtime>,
    _lock: FileLock,
}

/// Called when a shim ends although its pod should run.
pub(crate) type ShimIsLost = fn(Arc<Runtime>, Arc<Sandbox>);

impl Runtime {
    /// Opens the root directory; [`crate::start::adopt`] then reads its contents.
    pub(crate) fn open(config: &Config, shim_is_lost: ShimIsLost) -> Result<Arc<Self>> {
        record::ensure_dir(&config.root_dir)?;
        let root_dir =
            config.root_dir.canonicalize().map_err(|e| Error::io("resolve", &config.root_dir, e))?;
        let lock = FileLock::try_exclusive_after_kill(&root_dir.join("lock"), 0o600)?
            .ok_or_else(|| Error::Locked { root_dir: root_dir.clone() })?;
        record::ensure_dir(&root_dir.join("sandboxes"))?;
        let netns = MountDir::open(root_dir.join("netns"));
        let shm = MountDir::open(root_dir.join("shm"));
        let boot_id_path = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id =
            std::fs::read_to_string(boot_id_path).map_err(|e| Error::io("read", boot_id_path, e))?;
        let trash = Arc::new(Trash::open(root_dir.join("trash"))?);
        let images = ImageStore::open(&root_dir.join("images"), config, Arc::clone(&trash))?;
        let registries = Registries::open(root_dir.join("images/downloads"), config, &trash)?;
        let created_cgroups = CreatedGroups::open(&root_dir);
        if let Err(error) = empty_mounts() {
            // The start of a pod tries again, and reports it.
            tracing::warn!(error = %chain(&error), "mount namespace for containers");
        }
        let cgroup_mounts = Hierarchies::table()?;
        let hierarchies = Hierarchies::of_table(&cgroup_mounts)?;
        let v2 = hierarchies.has_in_v2("memory");
        // Where machines have both versions, OCI runtimes use v1 alone.
        let is_in_reach = config.oci_runtime.is_none() || hierarchies.has_in_v2("hugetlb") == v2;
        let cgroups = CgroupLimits { v2, huge_pages: hierarchies.has("hugetlb") && is_in_reach };
        Ok(Arc::new_cyclic(|itself| Self {
            oci_runtime: config.oci_runtime.clone(),
            allow_without_device_control: config.allow_without_device_control,
            log_ceiling: config.log_ceiling,
            cgroups,
            cgroup_mounts,
            cni: Cni {
                conf_dir: config.cni_conf_dir.clone(),
                bin_dir: config.cni_bin_dir.clone(),
                cache_dir: config.cni_cache_dir.clone(),
            },
            images,
            images_usage: Tree::of_images(),
            registries,
            trash,
            netns,
            shm,
            pulls: Pulls::default(),
            execs: Waiters::default(),
            attachments: Waiters::default(),
            boot_id: boot_id.trim().to_owned(),
            network: Mutex::default(),
            sandboxes: Mutex::default(),
            containers: Mutex::default(),
            events: broadcast::Sender::new(EVENTS_KEPT),
            created_cgroups: Mutex::new(created_cgroups),
            unreadable: Mutex::default(),
            shim_is_lost,
            itself: itself.clone(),
            root_dir,
            _lock: lock,
        }))
    }

    /// Moves an unreadable record to `unreadable/`, so that an administrator can find the cause.
    /// Its place is free afterwards. If it cannot be moved, the next start finds it again.
    pub(crate) fn set_aside(&self, path: &Path, name: &str, why: &Error, outcome: &str) {
        let dir = self.root_dir.join("unreadable");
        let place = dir.join(name);
        let failed = |e| Error::io("set aside", path, e);
        let moved = record::ensure_dir(&dir).and_then(|()| match std::fs::rename(path, &place) {
            // Of an earlier record: a file and a directory do not replace each other.
            Err(e) if is_in_the_way(&e) => {
                record::remove(&place)?;
                std::fs::rename(path, &place).map_err(failed)
            }
            moved => moved.map_err(failed),
        });
        let place = match moved {
            Ok(()) => format!("it is kept as {}", place.display()),
            Err(error) => chain(&error),
        };
        self.report_unreadable(format!("{}: {outcome}; {place}", chain(why)));
    }

    pub(crate) fn report_unreadable(&self, message: String) {
        tracing::error!("{message}");
        locked(&self.unreadable).push(message);
    }

    pub(crate) fn unreadable(&self) -> Vec<String> {
        locked(&self.unreadable).clone()
    }

    pub(crate) fn listener(&self) -> Arc<dyn Listener> {
        Arc::new(ShimListener(self.itself.clone()))
    }

    pub(crate) fn events(&self) -> broadcast::Receiver<Arc<Event>> {
        self.events.subscribe()
    }

    pub(crate) fn sandboxes(&self) -> Vec<Arc<Sandbox>> {
        locked(&self.sandboxes).all().cloned().collect()
    }

    /// Those that may have all of these labels.
    pub(crate) fn sandboxes_with(&self, labels: &HashMap<String, String>) -> Vec<Arc<Sandbox>> {
        locked(&self.sandboxes).candidates(labels)
    }

    pub(crate) fn containers(&self) -> Vec<Arc<Container>> {
        locked(&self.containers).all().cloned().collect()
    }

    /// Those that may have all of these labels.
    pub(crate) fn containers_with(&self, labels: &HashMap<String, String>) -> Vec<Arc<Container>> {
        locked(&self.containers).candidates(labels)
    }

    pub(crate) fn containers_of(&self, sandbox: &str) -> Vec<Arc<Container>> {
        locked(&self.containers).of_owner(sandbox)
    }

    /// The list that the pod before has in memory, if that is equal: it takes about 10 KiB.
    pub(crate) fn shared_network(&self, list: NetworkList) -> Arc<NetworkList> {
        let mut known = locked(&self.network);
        match &*known {
            Some(known) if **known == list => Arc::clone(known),
            _ => Arc::clone(known.insert(Arc::new(list))),
        }
    }

    /// By id, or by a unique prefix of one.
    pub(crate) fn find_sandbox(&self, id: &str) -> Option<Arc<Sandbox>> {
        locked(&self.sandboxes).find(id)
    }

    pub(crate) fn find_container(&self, id: &str) -> Option<Arc<Container>> {
        locked(&self.containers).find(id)
    }

    pub(crate) fn sandbox(&self, id: &str) -> Result<Arc<Sandbox>> {
        self.find_sandbox(id).ok_or_else(|| Error::NotFound { kind: "pod sandbox", id: id.to_owned() })
    }

    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>> {
        self.find_container(id).ok_or_else(|| Error::NotFound { kind: "container", id: id.to_owned() })
    }

    pub(crate) fn insert_sandbox(&self, sandbox: Arc<Sandbox>) {
        let labels = sandbox.labels();
        insert(&mut locked(&self.sandboxes), &labels, sandbox);
    }

    /// If its pod's attempt has a sandbox already, returns that, and changes nothing.
    pub(crate) fn insert_new_sandbox(&self, sandbox: &Arc<Sandbox>) -> Option<Arc<Sandbox>> {
        let labels = sandbox.labels();
        let mut sandboxes = locked(&self.sandboxes);
        let of_pod = sandboxes.of_owner(sandbox.pod_uid());
        let known = of_pod.into_iter().find(|known| known.metadata == sandbox.metadata);
        if known.is_none() {
            insert(&mut sandboxes, &labels, Arc::clone(sandbox));
        }
        known
    }

    /// What the sandbox's containers have at /dev/shm.
    pub(crate) fn shm_dir(&self, sandbox: &Sandbox) -> PathBuf {
        let former = former_shm(&sandbox.dir);
        if former.is_dir() { former } else { self.shm.entry(&sandbox.id) }
    }

    pub(crate) fn forget_sandbox(&self, id: &str) {
        locked(&self.sandboxes).remove(id);
    }

    pub(crate) fn insert_container(&self, container: Arc<Container>) {
        let (id, labels) = (container.id.clone(), container.record.config.labels.clone());
        let sandbox = container.record.sandbox_id.clone();
        locked(&self.containers).insert(&id, &sandbox, &labels, container);
    }

    pub(crate) fn forget_container(&self, id: &str) {
        locked(&self.containers).remove(id);
    }

    /// Whether an existing container uses the layer.
    pub(crate) fn uses_layer(&self, digest: &str) -> bool {
        locked(&self.containers).all().any(|container| container.record.layers.iter().any(|l| l == digest))
    }

    /// Makes the parent group of a pod's containers. Records the groups that did not exist, to be
    /// removed with the last pod that needs them.
    pub(crate) fn ensure_cgroup_parent(&self, path: &Path) -> Result<()> {
        let mut created = locked(&self.created_cgroups);
        let hierarchies = Hierarchies::of_table(&self.cgroup_mounts)?;
        let missing = hierarchies.missing_parents(path);
        if !missing.is_empty() {
            // Recorded first, so that a runtime killed at this point finds them after its restart.
            created.announce(&missing)?;
        }
        let made = match self.oci_runtime {
            None => hierarchies.ensure_parent_of_containers(path)?,
            Some(_) => hierarchies.ensure_parent_everywhere(path)?,
        };
        created.add(made);
        Ok(())
    }

    /// Removes those of our groups that no pod needs.
    pub(crate) fn remove_unused_cgroups(&self) {
        // First: a pod whose group was made since then would not be among those below.
        let mut created = locked(&self.created_cgroups);
        // All groups above it too, without the leading slash.
        let mut needed: HashSet<PathBuf> = HashSet::new();
        for sandbox in self.sandboxes() {
            if let Some(parent) = sandbox.live_cgroup_parent() {
                let above = parent.ancestors().filter_map(|path| path.strip_prefix("/").ok());
                needed.extend(above.filter(|path| !path.as_os_str().is_empty()).map(Path::to_owned));
            }
        }
        // Below any hierarchy: `/sys/fs/cgroup/memory/hawser` is `hawser`.
        let is_needed = |dir: &Path| {
            let mut names = dir.components();
            std::iter::from_fn(|| names.next().map(|_| names.as_path())).any(|rest| needed.contains(rest))
        };
        created.remove_unused(is_needed);
    }

    /// Sends an event to all receivers.
    pub(crate) fn announce(&self, id: &str, sandbox_id: &str, kind: ContainerEventType) {
        self.send_event(id, sandbox_id, kind, self.find_sandbox(sandbox_id));
    }

    /// The event of a sandbox that is gone. It has the sandbox's last status, so that a receiver knows the pod:
    /// otherwise a kubelet must look at every pod.
    pub(crate) fn announce_removed(&self, sandbox: Arc<Sandbox>) {
        let id = sandbox.id.clone();
        self.send_event(&id, &id, ContainerEventType::ContainerDeletedEvent, Some(sandbox));
    }

    fn send_event(
        &self,
        id: &str,
        sandbox_id: &str,
        kind: ContainerEventType,
        sandbox: Option<Arc<Sandbox>>,
    ) {
        let event = Event {
            container_id: id.to_owned(),
            kind,
            created_at: now(),
            sandbox,
            containers: self.containers_of(sandbox_id),
        };
        // It fails if there is no receiver, which is no error.
        let _receiver_gone = self.events.send(Arc::new(event));
    }

    fn started(&self, id: &str, status: &ShimStatus) {
        let Some(container) = self.find_container(id) else { return };
        let has_begun = container.state.send_if_modified(|state| {
            let begins = !matches!(state, RunState::Exited(_));
            if begins {
                *state = running(status);
            }
            begins
        });
        if !has_begun {
            // The runtime has given its start up, and another instance may run.
            tokio::spawn(async move { group::end_left_over(&container).await });
            return;
        }
        self.announce(id, &container.record.sandbox_id, ContainerEventType::ContainerStartedEvent);
    }

    pub(crate) fn exited(&self, id: &str, status: &ShimStatus) {
        let Some(container) = self.find_container(id) else { return };
        let Some(ended) = ended(status) else { return };
        // A slow shim may report an exit that was already noticed.
        if !matches!(container.state(), RunState::Exited(_)) {
            self.end(&container, ended);
        }
    }

    /// Marks a container as exited and sends the event.
    pub(crate) fn end(&self, container: &Container, ended: Ended) {
        container.state.send_replace(RunState::Exited(ended));
        self.announce(&container.id, &container.record.sandbox_id, ContainerEventType::ContainerStoppedEvent);
    }
}

/// Whether rename(2) fails for what is at the new path.
fn is_in_the_way(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, IsADirectory, NotADirectory};
    matches!(error.kind(), AlreadyExists | DirectoryNotEmpty | IsADirectory | NotADirectory)
}

fn insert(sandboxes: &mut Objects<Sandbox>, labels: &HashMap<String, String>, sandbox: Arc<Sandbox>) {
    let new = Arc::clone(&sandbox);
    sandboxes.insert(&new.id, new.pod_uid(), labels, sandbox);
}

/// The state of a container whose program runs.
pub(crate) fn running(status: &ShimStatus) -> RunState {
    RunState::Running {
        pid: status.pid,
        started_at: status.started_at,
        not_enforced: status.not_enforced.clone(),
    }
}

/// The reason of a container whose program never ran, as in containerd.
pub(crate) const START_ERROR: &str = "StartError";

/// A container's exit, as CRI describes it; `None` while it runs.
pub(crate) fn ended(status: &ShimStatus) -> Option<Ended> {
    let exit = status.exit.as_ref()?;
    if let Some(problem) = &exit.start_problem {
        return Some(Ended {
            started_at: 0,
            finished_at: exit.finished_at,
            code: exit.code,
            reason: START_ERROR.to_owned(),
            message: problem.clone(),
        });
    }
    let reason = match (exit.oom_killed, exit.code) {
        (true, _) => "OOMKilled",
        (false, 0) => "Completed",
        (false, _) => "Error",
    };
    Some(Ended {
        started_at: status.started_at,
        finished_at: exit.finished_at,
        code: exit.code,
        reason: reason.to_owned(),
        message: String::new(),
    })
}

/// Receives shims' messages without keeping the runtime alive.
struct ShimListener(Weak<Runtime>);

impl Listener for ShimListener {
    fn heard(&self, _sandbox: &str, message: &Message) {
        let Some(runtime) = self.0.upgrade() else { return };
        match message {
            Message::Answer { answer: Answer::Started { container, status, .. }, .. } => {
                runtime.started(container, status);
            }
            Message::Exited { container, status } => runtime.exited(container, status),
            Message::ExecEnded { exec, code } => runtime.execs.ended(exec, *code),
            Message::Detached { attach, problem } => runtime.attachments.ended(attach, problem.clone()),
            Message::Answer { .. } => {}
        }
    }

    fn lost(&self, sandbox: &str) {
        let Some(runtime) = self.0.upgrade() else { return };
        runtime.execs.lost(sandbox);
        runtime.attachments.lost(sandbox);
        let Some(sandbox) = runtime.find_sandbox(sandbox) else { return };
        // Expected: the sandbox is being stopped.
        if sandbox.record().phase != Phase::Ready {
            return;
        }
        (runtime.shim_is_lost)(Arc::clone(&runtime), sandbox);
    }
}
