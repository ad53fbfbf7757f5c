//! Every object of the kubelet, in memory and under `<root>/hawser/objects`.
//!
//! - Removing a manifest file does not remove its claim, volume, class or driver; only an explicit
//!   deletion does.
//! - A pod whose description was removed or changed stays, marked deleted, until the engine has
//!   torn it down and calls [`Store::forget_pod`]. Only then does its successor, if any, replace
//!   it.
//!
//! Lock order: `writing` (held during disk I/O), then `state` (never held during disk I/O, so that
//! readers do not wait for the disk).

mod configuration;
mod desired;
mod disk;
mod entries;
mod events;
mod full_disk;
mod in_place;
mod made_volumes;
mod outcome;
mod pods;
mod resize;
mod snapshots;
mod update;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, watch};

use crate::capacity::admission::Capacity;
use crate::objects::{
    ConfigMap, CsiDriver, Document, Event, EventType, Kind, Object, ObjectRef, PersistentVolume,
    PersistentVolumeClaim, Secret, StorageClass, Time, VolumePhase, VolumeSnapshot, VolumeSnapshotClass,
    VolumeSnapshotContent, now,
};
use disk::{Disk, Durability};
use entries::{Entries, Entry, Key, PodEntries, PodEntry};
use events::EventLog;

pub use desired::{AnyObject, Declaration, Declared, Described, Outcome};
pub(crate) use outcome::{DEADLINE_EXCEEDED, EVICTED};
pub(crate) use snapshots::CLASS_PARAMETERS;
pub(crate) use update::{BindError, name_of_new_volume};

/// How many changes may wait for a slow reader. A slower reader gets `RecvError::Lagged` and must
/// check everything again.
const CHANGES_KEPT: usize = 1024;
/// The maximum length of an event's message (kubernetes, apis/events: `NoteLengthLimit`).
const MAX_EVENT_BYTES: usize = 1024;

/// The event for a record that was set aside.
pub(crate) const UNREADABLE_RECORD: &str = "UnreadableRecord";

/// Marks objects whose file was removed.
pub const SOURCE_ANNOTATION: &str = "hawser.dev/source";
pub const SOURCE_MISSING: &str = "missing";
/// In a claim's annotations: CreateVolume was called, and the driver may have made a volume whose id is
/// not known.
pub(crate) const VOLUME_BEING_CREATED: &str = "hawser.dev/volume-being-created";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("write {kind} {name}")]
    Keep {
        kind: Kind,
        name: String,
        #[source]
        source: linux::Error,
    },
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not an object of this kubelet", path.display())]
    Corrupt {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("generate a uid")]
    Uid(#[source] io::Error),
    #[error("{kind} {name:?} is already described by {holder}")]
    OtherSource { kind: Kind, name: String, holder: Source },
    #[error("{kind} {name:?} is invalid: {field}: Forbidden: {rule}")]
    Immutable { kind: Kind, name: String, field: &'static str, rule: &'static str },
    #[error(
        "pod {name:?} is invalid: {field}: Forbidden: a running pod keeps it ({before}; wanted: {after}): \
         only images, cpu and memory, labels, annotations and an earlier activeDeadlineSeconds change in place; \
         for other changes delete the pod first"
    )]
    RunningPod { name: String, field: String, before: String, after: String },
    #[error("pod {name:?} cannot be resized: {why}")]
    NoRoom { name: String, why: String },
    #[error("{kind} {name:?} is being deleted; it can be created again once that is done")]
    Terminating { kind: Kind, name: String },
}

impl Error {
    /// Whether the error is a full disk.
    pub(crate) fn is_full_disk(&self) -> bool {
        matches!(self, Self::Keep { source, .. } if full_disk::is_cause(source))
    }
}

/// The origin of an object's description.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// A file of the manifest directory.
    File(PathBuf),
    /// `hawser-kubelet apply`.
    Api,
    /// The kubelet itself: provisioned volumes.
    Kubelet,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Api => f.write_str("hawser-kubelet apply"),
            Self::Kubelet => f.write_str("the kubelet"),
        }
    }
}

/// An object was added, changed or removed; look it up to see which. A new pod status is not a
/// change: only the pod's engine writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub kind: Kind,
    /// Empty for kinds without a namespace.
    pub namespace: String,
    pub name: String,
}

/// Clones refer to the same store.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    node_name: String,
    node_created: Option<Time>,
    disk: Disk,
    writing: Mutex<()>,
    state: Mutex<State>,
    changes: broadcast::Sender<Change>,
    /// Notified of each new status of a pod.
    statuses: watch::Sender<()>,
    /// The node is stopping with its pods.
    refuses_pods: AtomicBool,
    /// What running pods can grow to; without it, anything.
    capacity: OnceLock<Capacity>,
}

#[derive(Debug, Default)]
struct State {
    pods: PodEntries,
    claims: Entries<PersistentVolumeClaim>,
    volumes: Entries<PersistentVolume>,
    classes: Entries<StorageClass>,
    csi_drivers: Entries<CsiDriver>,
    snapshots: Entries<VolumeSnapshot>,
    snapshot_classes: Entries<VolumeSnapshotClass>,
    snapshot_contents: Entries<VolumeSnapshotContent>,
    config_maps: Entries<ConfigMap>,
    secrets: Entries<Secret>,
    events: EventLog,
}

impl Store {
    /// Loads the records of an earlier run from `<root_dir>/hawser/objects`; creates the directory.
    pub fn open(root_dir: &Path, node_name: &str) -> Result<Self, Error> {
        let directory = root_dir.join("hawser").join("objects");
        let disk = Disk::open(&directory)?;
        let mut set_aside = Vec::new();
        let state = State {
            pods: disk.load_pods(&mut set_aside)?,
            claims: disk.load(&mut set_aside)?,
            volumes: disk.load(&mut set_aside)?,
            classes: disk.load(&mut set_aside)?,
            csi_drivers: disk.load(&mut set_aside)?,
            snapshots: disk.load(&mut set_aside)?,
            snapshot_classes: disk.load(&mut set_aside)?,
            snapshot_contents: disk.load(&mut set_aside)?,
            config_maps: disk.load(&mut set_aside)?,
            secrets: disk.load(&mut set_aside)?,
            events: EventLog::new(node_name),
        };
        let inner = Inner {
            node_name: node_name.to_owned(),
            node_created: born(&directory),
            disk,
            writing: Mutex::new(()),
            state: Mutex::new(state),
            changes: broadcast::Sender::new(CHANGES_KEPT),
            statuses: watch::Sender::new(()),
            refuses_pods: AtomicBool::new(false),
            capacity: OnceLock::new(),
        };
        let store = Self { inner: Arc::new(inner) };
        for lost in set_aside {
            store.record(&ObjectRef::node(node_name), EventType::Warning, UNREADABLE_RECORD, &lost.message);
            if lost.kind == Kind::PersistentVolumeClaim
                && let Err(error) = store.reserve_volume(&lost.key)
            {
                let error = linux::chain(&error);
                tracing::error!(
                    claim = lost.key.name,
                    error,
                    "cannot reserve the volume of a claim whose record was lost"
                );
            }
        }
        Ok(store)
    }

    /// Reserves the volume of a claim whose record was lost for the next claim of that name. That
    /// claim has another uid, and must get the data instead of an empty volume.
    ///
    /// A released volume belonged to an earlier claim of that name; no later one may see its data.
    fn reserve_volume(&self, claim: &Key) -> Result<(), Error> {
        // The name of a lost record is that of its file.
        let stem = disk::stem(claim);
        let is_of_claim = |holder: &ObjectRef| disk::stem(&Key::new(&holder.namespace, &holder.name)) == stem;
        let is_in_use = |volume: &PersistentVolume| {
            !matches!(volume.status.phase, VolumePhase::Released | VolumePhase::Failed)
                && !volume.metadata.is_deleted()
        };
        let mut volumes = self.volumes();
        volumes.retain(|volume| volume.spec.claim_ref.as_ref().is_some_and(is_of_claim) && is_in_use(volume));
        match &volumes[..] {
            [] => Ok(()),
            [volume] => {
                let mut reserved = (**volume).clone();
                if let Some(holder) = &mut reserved.spec.claim_ref {
                    holder.uid.clear();
                }
                reserved.status.phase = VolumePhase::Available;
                self.put_volume(reserved)
            }
            several => {
                let names: Vec<&str> = several.iter().map(|volume| volume.metadata.name.as_str()).collect();
                let message = format!(
                    "the record of claim {}/{} was lost, and any of these volumes may be the claim's: {}; \
                     none is reserved for the next claim of that name",
                    claim.namespace,
                    claim.name,
                    names.join(", ")
                );
                let node = ObjectRef::node(&self.inner.node_name);
                self.record(&node, EventType::Warning, UNREADABLE_RECORD, &message);
                Ok(())
            }
        }
    }

    /// Saves an unreadable file, which is about to be replaced, with the records set aside. Returns
    /// a description of the outcome.
    pub(crate) fn keep_unreadable(&self, file: &Path, name: &str) -> String {
        self.inner.disk.keep(name, |place| {
            match std::fs::remove_file(place) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            std::fs::hard_link(file, place)
        })
    }

    /// Sets, once, what the node offers to pods.
    pub(crate) fn set_capacity(&self, capacity: Capacity) {
        self.inner.capacity.get_or_init(|| capacity);
    }

    pub fn node_name(&self) -> &str {
        &self.inner.node_name
    }

    /// Since when there has been this store; `None` on a filesystem that does not record it.
    pub fn node_created(&self) -> Option<Time> {
        self.inner.node_created
    }

    /// Future changes.
    pub fn subscribe(&self) -> broadcast::Receiver<Change> {
        self.inner.changes.subscribe()
    }

    /// Future statuses of pods, which are no changes.
    pub fn subscribe_statuses(&self) -> watch::Receiver<()> {
        self.inner.statuses.subscribe()
    }

    pub fn claims(&self) -> Vec<Arc<PersistentVolumeClaim>> {
        self.state().claims.objects()
    }

    pub fn claim(&self, namespace: &str, name: &str) -> Option<Arc<PersistentVolumeClaim>> {
        self.state().claims.object(namespace, name)
    }

    pub fn volumes(&self) -> Vec<Arc<PersistentVolume>> {
        self.state().volumes.objects()
    }

    pub fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.state().volumes.object("", name)
    }

    pub fn classes(&self) -> Vec<Arc<StorageClass>> {
        self.state().classes.objects()
    }

    pub fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
        self.state().classes.object("", name)
    }

    pub fn csi_drivers(&self) -> Vec<Arc<CsiDriver>> {
        self.state().csi_drivers.objects()
    }

    pub fn csi_driver(&self, name: &str) -> Option<Arc<CsiDriver>> {
        self.state().csi_drivers.object("", name)
    }

    /// The applied document of an object, if any.
    pub fn document(&self, kind: Kind, namespace: &str, name: &str) -> Option<Document> {
        let state = self.state();
        let key = Key::new(namespace, name);
        match kind {
            Kind::Pod => state.pods.get(&key)?.current.document.clone(),
            Kind::PersistentVolumeClaim => state.claims.get(&key)?.document.clone(),
            Kind::PersistentVolume => state.volumes.get(&key)?.document.clone(),
            Kind::StorageClass => state.classes.get(&key)?.document.clone(),
            Kind::CsiDriver => state.csi_drivers.get(&key)?.document.clone(),
            Kind::VolumeSnapshot => state.snapshots.get(&key)?.document.clone(),
            Kind::VolumeSnapshotClass => state.snapshot_classes.get(&key)?.document.clone(),
            Kind::VolumeSnapshotContent => state.snapshot_contents.get(&key)?.document.clone(),
            Kind::ConfigMap => state.config_maps.get(&key)?.document.clone(),
            Kind::Secret => state.secrets.get(&key)?.document.clone(),
            Kind::Event | Kind::Node => None,
        }
    }

    /// Writes a claim (new binding, status, deletion mark) to disk; may block for some
    /// milliseconds.
    pub fn put_claim(&self, claim: PersistentVolumeClaim) -> Result<(), Error> {
        self.put(claim)
    }

    /// Writes a bound claim. A power cut may restore the previous record: the volume names the
    /// claim already, so the next start binds it again.
    pub fn put_bound_claim(&self, claim: PersistentVolumeClaim) -> Result<(), Error> {
        self.put_as(claim, Durability::PowerLossOrBefore)
    }

    /// Writes a volume to disk; may block for some milliseconds.
    pub fn put_volume(&self, volume: PersistentVolume) -> Result<(), Error> {
        self.put(volume)
    }

    /// Removes a claim; succeeds if there is none.
    pub fn remove_claim(&self, namespace: &str, name: &str) -> Result<(), Error> {
        self.remove::<PersistentVolumeClaim>(namespace, name)
    }

    /// Removes a volume; succeeds if there is none.
    pub fn remove_volume(&self, name: &str) -> Result<(), Error> {
        self.remove::<PersistentVolume>("", name)
    }

    /// Removes a class; succeeds if there is none.
    pub fn remove_class(&self, name: &str) -> Result<(), Error> {
        self.remove::<StorageClass>("", name)
    }

    /// Removes a CSIDriver object; succeeds if there is none.
    pub fn remove_csi_driver(&self, name: &str) -> Result<(), Error> {
        self.remove::<CsiDriver>("", name)
    }

    /// Records an event of an object. A repeated reason and message raise the count of the first
    /// event.
    pub fn record(&self, object: &ObjectRef, event_type: EventType, reason: &str, message: &str) {
        let message = &trace::shortened(message.to_owned(), MAX_EVENT_BYTES);
        let event = self.state().events.record(object, event_type, reason, message, now());
        let key = Key::of(&*event);
        match event_type {
            EventType::Normal => tracing::info!(object = %events::subject(object), reason, message),
            EventType::Warning => tracing::warn!(object = %events::subject(object), reason, message),
        }
        self.announce(Kind::Event, &key);
    }

    /// The events of the last hour, oldest first.
    pub fn events(&self) -> Vec<Arc<Event>> {
        self.state().events.all(now())
    }

    fn put<T: Stored>(&self, object: T) -> Result<(), Error> {
        self.put_as(object, Durability::PowerLoss)
    }

    fn put_as<T: Stored>(&self, object: T, durability: Durability) -> Result<(), Error> {
        let _writing = self.writing();
        self.replace(object, durability)
    }

    /// The caller holds `writing`.
    fn replace<T: Stored>(&self, object: T, durability: Durability) -> Result<(), Error> {
        let key = Key::of(&object);
        let entry = match T::entries(&self.state()).get(&key) {
            Some(known) => Entry { object: Arc::new(object), ..known.clone() },
            None => Entry {
                object: Arc::new(object),
                source: Source::Kubelet,
                digest: String::new(),
                document: None,
            },
        };
        self.keep(key, entry, durability)
    }

    fn remove<T: Stored>(&self, namespace: &str, name: &str) -> Result<(), Error> {
        let _writing = self.writing();
        let key = Key::new(namespace, name);
        self.inner.disk.remove(T::KIND, &key)?;
        if T::entries_mut(&mut self.state()).remove(&key).is_some() {
            self.announce(T::KIND, &key);
        }
        Ok(())
    }

    /// Writes to disk first, then to memory: what a reader sees survives a restart. The caller
    /// holds `writing`.
    fn keep<T: Stored>(&self, key: Key, entry: Entry<T>, durability: Durability) -> Result<(), Error> {
        self.keep_unannounced(key.clone(), entry, durability)?;
        self.announce(T::KIND, &key);
        Ok(())
    }

    /// Like [`Store::keep`], but those who subscribed do not hear of it.
    fn keep_unannounced<T: Stored>(
        &self,
        key: Key,
        entry: Entry<T>,
        durability: Durability,
    ) -> Result<(), Error> {
        if entry.object.metadata().is_deleted() {
            self.inner.disk.write_deleted(T::KIND, &key, &entry, durability)?;
        } else {
            self.inner.disk.write(T::KIND, &key, &entry, durability)?;
        }
        T::entries_mut(&mut self.state()).insert(key, entry);
        Ok(())
    }

    fn announce(&self, kind: Kind, key: &Key) {
        let change = Change { kind, namespace: key.namespace.clone(), name: key.name.clone() };
        // An error means that there is no receiver.
        let _receiver_gone = self.inner.changes.send(change);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> MutexGuard<'_, ()> {
        // The holder may wait for the disk.
        runtime::while_others_go_on(|| self.inner.writing.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Kinds with one object per name and no successor.
trait Stored: Object {
    fn entries(state: &State) -> &Entries<Self>;
    fn entries_mut(state: &mut State) -> &mut Entries<Self>;
}

macro_rules! shelved {
    ($type:ty, $field:ident) => {
        impl Stored for $type {
            fn entries(state: &State) -> &Entries<Self> {
                &state.$field
            }

            fn entries_mut(state: &mut State) -> &mut Entries<Self> {
                &mut state.$field
            }
        }
    };
}
shelved!(PersistentVolumeClaim, claims);
shelved!(PersistentVolume, volumes);
shelved!(StorageClass, classes);
shelved!(CsiDriver, csi_drivers);
shelved!(VolumeSnapshot, snapshots);
shelved!(VolumeSnapshotClass, snapshot_classes);
shelved!(VolumeSnapshotContent, snapshot_contents);
shelved!(ConfigMap, config_maps);
shelved!(Secret, secrets);

/// When a file or directory was made, in whole seconds.
fn born(path: &Path) -> Option<Time> {
    let born = path.metadata().and_then(|metadata| metadata.created()).ok()?;
    let born = Time::try_from(born).ok()?;
    Time::from_second(born.as_second()).ok()
}
