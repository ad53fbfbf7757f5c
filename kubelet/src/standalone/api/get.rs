//! `get`: objects as JSON, status included.

use std::sync::Arc;

use proto::kubelet::{GetRequest, GetResponse};
use serde_json::{Value, json};

use super::Error;
use crate::engine::Handle;
use crate::objects::{Kind, Object, ObjectMeta, Quantity};
use crate::pod::huge_pages;
use crate::store::Store;
use crate::worker::host_ip;

/// An object as the store has it. A changed one is another allocation, as long as this is held.
pub(super) type Found = Arc<dyn Listable>;

/// An object of any kind.
pub(super) trait Listable: Send + Sync {
    fn metadata(&self) -> &ObjectMeta;
    fn to_json(&self) -> Vec<u8>;
    /// With the fields on which the kubelet does not act. The store keeps them elsewhere.
    fn to_whole_json(&self, _store: &Store) -> Vec<u8> {
        self.to_json()
    }
}

impl<T: Object> Listable for T {
    fn metadata(&self) -> &ObjectMeta {
        Object::metadata(self)
    }

    fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }

    fn to_whole_json(&self, store: &Store) -> Vec<u8> {
        let mut value = serde_json::to_value(self).expect("objects have string keys only");
        let meta = Object::metadata(self);
        if let Some(document) = store.document(T::KIND, &meta.namespace, &meta.name) {
            document.complete(&mut value, T::KIND);
        }
        to_json(&value)
    }
}

pub(super) fn get(store: &Store, engine: &Handle, request: &GetRequest) -> Result<GetResponse, Error> {
    let found = found(store, engine, request)?;
    if found.is_empty() && !request.name.is_empty() {
        return Err(Error::NotFound { plural: plural(request.kind.parse()?), name: request.name.clone() });
    }
    Ok(GetResponse { objects: found.iter().map(|object| json(&**object, store, request)).collect() })
}

pub(super) fn json(object: &dyn Listable, store: &Store, request: &GetRequest) -> Vec<u8> {
    if request.whole { object.to_whole_json(store) } else { object.to_json() }
}

/// By namespace and name; events by age.
pub(super) fn found(store: &Store, engine: &Handle, request: &GetRequest) -> Result<Vec<Found>, Error> {
    let kind: Kind = request.kind.parse()?;
    Ok(match kind {
        Kind::Pod => select(store.pods(), request),
        Kind::PersistentVolumeClaim => select(store.claims(), request),
        Kind::PersistentVolume => select(store.volumes(), request),
        Kind::StorageClass => select(store.classes(), request),
        Kind::CsiDriver => select(store.csi_drivers(), request),
        Kind::VolumeSnapshot => select(store.snapshots(), request),
        Kind::VolumeSnapshotClass => select(store.snapshot_classes(), request),
        Kind::VolumeSnapshotContent => select(store.snapshot_contents(), request),
        Kind::ConfigMap => select(store.config_maps(), request),
        Kind::Secret => select(store.secrets(), request),
        Kind::Event => select(store.events(), request),
        Kind::Node => node(store, engine, request),
    })
}

/// How kubectl calls a kind in messages: `persistentvolumeclaims`.
pub(super) fn plural(kind: Kind) -> String {
    let singular = kind.as_str().to_lowercase();
    match kind {
        Kind::StorageClass => format!("{singular}es.storage.k8s.io"),
        Kind::CsiDriver => format!("{singular}s.storage.k8s.io"),
        Kind::VolumeSnapshotClass => format!("{singular}es.snapshot.storage.k8s.io"),
        Kind::VolumeSnapshot | Kind::VolumeSnapshotContent => format!("{singular}s.snapshot.storage.k8s.io"),
        Kind::Pod
        | Kind::PersistentVolume
        | Kind::PersistentVolumeClaim
        | Kind::ConfigMap
        | Kind::Secret
        | Kind::Event
        | Kind::Node => format!("{singular}s"),
    }
}

fn select<T: Object>(objects: Vec<Arc<T>>, request: &GetRequest) -> Vec<Found> {
    let wanted = objects.into_iter().filter(|object| {
        let meta = Object::metadata(&**object);
        let in_namespace =
            !T::KIND.is_namespaced() || request.namespace.is_empty() || request.namespace == meta.namespace;
        in_namespace && (request.name.is_empty() || request.name == meta.name)
    });
    wanted.map(|object| object as Found).collect()
}

struct Node {
    metadata: ObjectMeta,
    value: Value,
}

impl Listable for Node {
    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn to_json(&self) -> Vec<u8> {
        to_json(&self.value)
    }
}

/// There is one node. All of it is for pods.
fn node(store: &Store, engine: &Handle, request: &GetRequest) -> Vec<Found> {
    let name = store.node_name();
    if !request.name.is_empty() && request.name != name {
        return Vec::new();
    }
    let capacity = engine.capacity();
    let mut conditions = vec![engine.runtime_health().condition()];
    conditions.extend(engine.pressure().conditions());
    let resources = |memory_bytes: i64| {
        let mut resources = json!({
            "cpu": (capacity.cpu_millis / 1000).to_string(),
            "memory": format!("{}Ki", memory_bytes / 1024),
            "ephemeral-storage": format!("{}Ki", capacity.storage_bytes / 1024),
            "pods": capacity.pods.to_string(),
        });
        for (page_size, bytes) in &capacity.huge_pages {
            resources[huge_pages::resource(*page_size)] = json!(Quantity::from_bytes(*bytes).to_string());
        }
        resources
    };
    let mut value = json!({
        "apiVersion": Kind::Node.api_version(),
        "kind": Kind::Node.as_str(),
        "metadata": {"name": name},
        "status": {
            "capacity": resources(capacity.memory_bytes),
            "allocatable": resources(capacity.allocatable_memory()),
            "conditions": conditions,
            "addresses": [
                {"type": "InternalIP", "address": host_ip()},
                {"type": "Hostname", "address": name},
            ],
            "nodeInfo": {
                "kubeletVersion": concat!("hawser-", env!("CARGO_PKG_VERSION")),
                "kernelVersion": kernel_version(),
            },
        },
    });
    if let Some(created) = store.node_created() {
        value["metadata"]["creationTimestamp"] = json!(created);
    }
    let metadata = ObjectMeta { name: name.to_owned(), uid: name.to_owned(), ..ObjectMeta::default() };
    vec![Arc::new(Node { metadata, value })]
}

/// As uname(2) reports it; empty without procfs.
fn kernel_version() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

fn to_json(object: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(object).expect("objects have string keys only")
}
