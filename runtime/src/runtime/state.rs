//! The runtime's state: sandboxes and containers, in memory and as records on disk.
//!
//! Layout below the root directory: `sandboxes/<id>/sandbox.json`,
//! `sandboxes/<id>/containers/<id>/container.json` beside the OCI bundle, and the shim's
//! `status.json` there, which is authoritative for a started container.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::cri::{
    ContainerConfig, ContainerState, LinuxContainerResources, PodSandboxConfig, PodSandboxMetadata,
    PodSandboxState,
};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, watch};

use crate::cni::NetworkList;
use crate::disk::record;
use crate::error::{Error, Result};
use crate::runtime::samples::{Processor, Samples};
use crate::shim_client::{ProcessId, ShimClient};
use crate::spec::pod;
use crate::spec::user::User;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// RunPodSandbox has not finished; the next start undoes it.
    Creating,
    Ready,
    /// A part of it is gone (the shim, the machine): not ready, and must be taken down.
    Broken,
    /// Only its directory is left.
    Stopped,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SandboxRecord {
    pub(crate) id: String,
    pub(crate) phase: Phase,
    /// Nanoseconds since 1970.
    pub(crate) created_at: i64,
    pub(crate) runtime_handler: String,
    /// The request's configuration.
    #[serde(with = "message")]
    pub(crate) config: PodSandboxConfig,
    /// The boot in which its processes and mounts exist.
    pub(crate) boot_id: String,
    /// `None`: the host's network.
    pub(crate) netns: Option<PathBuf>,
    /// The network of ADD, for DEL. `None`: no CNI.
    pub(crate) network: Option<Arc<NetworkList>>,
    /// Without prefix length, the primary one first.
    pub(crate) ips: Vec<String>,
    /// Also after its end, until the pod is taken down.
    pub(crate) shim: Option<ProcessId>,
}

#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) dir: PathBuf,
    /// The record's, which never changes.
    pub(crate) metadata: Option<PodSandboxMetadata>,
    record: Mutex<SandboxRecord>,
    /// The record's.
    phase: watch::Sender<Phase>,
    shim: Mutex<Option<Arc<ShimClient>>>,
    pub(crate) processor: Processor,
    /// One of the pod's layers is measured at a time.
    pub(crate) layer_turn: Arc<Semaphore>,
    /// Held while the sandbox or a part of it is made or taken down. StopContainer does not take
    /// it, since it waits.
    pub(crate) changing: tokio::sync::Mutex<()>,
}

impl Sandbox {
    pub(crate) fn new(dir: PathBuf, record: SandboxRecord) -> Self {
        Self {
            id: record.id.clone(),
            dir,
            metadata: record.config.metadata.clone(),
            phase: watch::Sender::new(record.phase),
            record: Mutex::new(record),
            shim: Mutex::new(None),
            processor: Processor::default(),
            layer_turn: Arc::new(Semaphore::new(1)),
            changing: tokio::sync::Mutex::new(()),
        }
    }

    pub(crate) fn record(&self) -> SandboxRecord {
        locked(&self.record).clone()
    }

    /// The record of a sandbox whose pod runs.
    pub(crate) fn ready(&self) -> Result<SandboxRecord> {
        let record = self.record();
        if record.phase == Phase::Ready {
            return Ok(record);
        }
        let (id, state) = (self.id.clone(), format!("{:?}", record.phase).to_lowercase());
        Err(Error::WrongState { kind: "pod sandbox", id, state, wanted: "ready" })
    }

    /// Returns once the pod does not run any more.
    pub(crate) async fn runs_no_more(&self) {
        let mut phases = self.phase.subscribe();
        let _sender_is_here = phases.wait_for(|phase| *phase != Phase::Ready).await;
    }

    pub(crate) fn labels(&self) -> HashMap<String, String> {
        locked(&self.record).config.labels.clone()
    }

    /// Whether the pod has all of `wanted`.
    pub(crate) fn has_labels(&self, wanted: &HashMap<String, String>) -> bool {
        selected(&locked(&self.record).config.labels, wanted)
    }

    /// Empty if the sandbox has no metadata.
    pub(crate) fn pod_uid(&self) -> &str {
        self.metadata.as_ref().map_or("", |metadata| &metadata.uid)
    }

    /// `None` after it is stopped.
    pub(crate) fn live_cgroup_parent(&self) -> Option<PathBuf> {
        let record = locked(&self.record);
        (record.phase != Phase::Stopped).then(|| pod::cgroup_parent(&record.config))
    }

    /// Changes the record in memory and on disk.
    pub(crate) fn update(&self, change: impl FnOnce(&mut SandboxRecord)) -> Result<()> {
        let mut record = locked(&self.record);
        change(&mut record);
        self.phase.send_replace(record.phase);
        record::save(&self.dir.join("sandbox.json"), &*record)
    }

    /// [`Self::update`] while the sandbox is taken down. A full disk must not stop that: the next
    /// start detects an outdated record by looking for the shim.
    pub(crate) fn update_on_the_way_down(&self, change: impl FnOnce(&mut SandboxRecord)) {
        if let Err(error) = self.update(change) {
            tracing::warn!(sandbox = self.id, error = %crate::error::chain(&error), "the record could not be written: kept in memory only");
        }
    }

    pub(crate) fn state(&self) -> PodSandboxState {
        if locked(&self.record).phase == Phase::Ready {
            PodSandboxState::SandboxReady
        } else {
            PodSandboxState::SandboxNotready
        }
    }

    pub(crate) fn shim(&self) -> Option<Arc<ShimClient>> {
        locked(&self.shim).clone()
    }

    pub(crate) fn set_shim(&self, shim: Option<ShimClient>) {
        *locked(&self.shim) = shim.map(Arc::new);
    }

    pub(crate) fn container_dir(&self, id: &str) -> PathBuf {
        crate::shim::protocol::container_dir(&self.dir, id)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RunState {
    Created,
    Running {
        pid: i32,
        started_at: i64,
        /// Requirements of the specification that this machine does not enforce.
        not_enforced: Option<String>,
    },
    Exited(Ended),
}

/// Times in nanoseconds since 1970; `started_at` is 0 if it never ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) started_at: i64,
    pub(crate) finished_at: i64,
    pub(crate) code: i32,
    /// `Completed`, `Error`, `OOMKilled`, `StartError`.
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl RunState {
    pub(crate) fn cri(&self) -> ContainerState {
        match self {
            Self::Created => ContainerState::ContainerCreated,
            Self::Running { .. } => ContainerState::ContainerRunning,
            Self::Exited(_) => ContainerState::ContainerExited,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self, Self::Running { .. })
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ContainerRecord {
    pub(crate) id: String,
    pub(crate) sandbox_id: String,
    /// Nanoseconds since 1970.
    pub(crate) created_at: i64,
    #[serde(with = "message")]
    pub(crate) config: ContainerConfig,
    pub(crate) image_id: String,
    /// Name and digest.
    pub(crate) image_ref: String,
    /// The image's first name with a tag; empty if it had none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) image_tag: String,
    /// Digests, lowest first.
    pub(crate) layers: Vec<String>,
    /// Directories that the image expects: absolute, without `.` and `..`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) image_volumes: Vec<PathBuf>,
    pub(crate) user: User,
    pub(crate) cgroup_path: PathBuf,
    /// Signal number for StopContainer.
    pub(crate) stop_signal: i32,
    pub(crate) log_path: Option<PathBuf>,
    pub(crate) warnings: Vec<String>,
    /// Set if the shim's status.json does not have it: never started, or lost.
    pub(crate) ended: Option<Ended>,
}

#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: String,
    pub(crate) record: ContainerRecord,
    pub(crate) state: watch::Sender<RunState>,
    /// Whether a StartContainer waits for its program: the state is still Created.
    pub(crate) is_starting: watch::Sender<bool>,
    pub(crate) samples: Samples,
    /// The record's, until the first update.
    updated: Mutex<Option<UpdatedResources>>,
}

/// `resources.json` beside the record: limits of UpdateContainerResources. They count, and not those
/// in the record's configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UpdatedResources {
    #[serde(with = "message")]
    pub(crate) resources: LinuxContainerResources,
}

impl UpdatedResources {
    pub(crate) const FILE: &str = "resources.json";
}

impl Container {
    pub(crate) fn new(record: ContainerRecord, state: RunState) -> Self {
        Self {
            id: record.id.clone(),
            record,
            state: watch::Sender::new(state),
            is_starting: watch::Sender::new(false),
            samples: Samples::default(),
            updated: Mutex::new(None),
        }
    }

    /// Its name in its pod, for users.
    pub(crate) fn name(&self) -> String {
        self.record.config.metadata.as_ref().map(|metadata| metadata.name.clone()).unwrap_or_default()
    }

    /// Returns once no StartContainer waits for its program.
    pub(crate) async fn start_is_over(&self) {
        let mut is_starting = self.is_starting.subscribe();
        let _sender_is_here = is_starting.wait_for(|is_starting| !is_starting).await;
    }

    /// The limits that it has now.
    pub(crate) fn resources(&self) -> Option<LinuxContainerResources> {
        let updated = locked(&self.updated).as_ref().map(|updated| updated.resources.clone());
        updated.or_else(|| self.record.config.linux.as_ref()?.resources.clone())
    }

    pub(crate) fn set_resources(&self, updated: UpdatedResources) {
        *locked(&self.updated) = Some(updated);
    }

    pub(crate) fn state(&self) -> RunState {
        self.state.borrow().clone()
    }
}

/// Where earlier versions mounted a sandbox's /dev/shm.
pub(crate) fn former_shm(sandbox_dir: &Path) -> PathBuf {
    sandbox_dir.join("shm")
}

pub(crate) fn save_container(dir: &Path, record: &ContainerRecord) -> Result<()> {
    record::save(&dir.join("container.json"), record)
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CRI messages inside records: protobuf in base64, so that fields unknown to this version are
/// kept.
mod message {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use prost::Message;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<M: Message, S: Serializer>(
        message: &M,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(message.encode_to_vec()))
    }

    pub(super) fn deserialize<'de, M: Message + Default, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<M, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(text).map_err(D::Error::custom)?;
        M::decode(&*bytes).map_err(D::Error::custom)
    }
}

/// Whether `labels` has all of `selector`.
pub(crate) fn selected(labels: &HashMap<String, String>, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}
