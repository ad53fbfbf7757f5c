//! `get`: objects as JSON, status included.

use std::any::Any;
use std::sync::Arc;

use proto::kubelet::{GetRequest, GetResponse};
use serde_json::{Value, json};

use super::Error;
use crate::engine::Handle;
use crate::objects::{Kind, Object};
use crate::standalone::store::Store;

/// An object as JSON.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// Empty if the caller has it: [`Seen`].
    pub(super) json: Vec<u8>,
    /// `None` if a change may leave it the same.
    pub(super) version: Option<Version>,
}

impl Listed {
    pub(super) fn is(&self, version: &Version) -> bool {
        self.version.as_ref().is_some_and(|own| std::ptr::addr_eq(Arc::as_ptr(own), Arc::as_ptr(version)))
    }
}

/// An object as the store has it. A changed one is another allocation, as long as this is held.
pub(super) type Version = Arc<dyn Any + Send + Sync>;

/// Whether the caller has the JSON of this version of a namespace's object.
pub(super) type Seen<'a> = &'a dyn Fn(&str, &str, &Version) -> bool;

pub(super) fn get(store: &Store, engine: &Handle, request: &GetRequest) -> Result<GetResponse, Error> {
    let objects = listed(store, engine, request, &|_, _, _| false)?;
    if objects.is_empty() && !request.name.is_empty() {
        return Err(Error::NotFound { plural: plural(request.kind.parse()?), name: request.name.clone() });
    }
    Ok(GetResponse { objects: objects.into_iter().map(|object| object.json).collect() })
}

/// By namespace and name.
pub(super) fn listed(
    store: &Store,
    engine: &Handle,
    request: &GetRequest,
    seen: Seen<'_>,
) -> Result<Vec<Listed>, Error> {
    let kind: Kind = request.kind.parse()?;
    Ok(match kind {
        Kind::Pod => select(store, store.pods(), request, seen),
        Kind::PersistentVolumeClaim => select(store, store.claims(), request, seen),
        Kind::PersistentVolume => select(store, store.volumes(), request, seen),
        Kind::StorageClass => select(store, store.classes(), request, seen),
        Kind::CsiDriver => select(store, store.csi_drivers(), request, seen),
        Kind::VolumeSnapshot => select(store, store.snapshots(), request, seen),
        Kind::VolumeSnapshotClass => select(store, store.snapshot_classes(), request, seen),
        Kind::VolumeSnapshotContent => select(store, store.snapshot_contents(), request, seen),
        Kind::ConfigMap => select(store, store.config_maps(), request, seen),
        Kind::Secret => select(store, store.secrets(), request, seen),
        Kind::Event => select(store, store.events(), request, seen),
        Kind::Node => node(store.node_name(), engine, request),
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

fn select<T: Object>(
    store: &Store,
    objects: Vec<Arc<T>>,
    request: &GetRequest,
    seen: Seen<'_>,
) -> Vec<Listed> {
    let wanted = objects.into_iter().filter(|object| {
        let meta = object.metadata();
        let in_namespace =
            !T::KIND.is_namespaced() || request.namespace.is_empty() || request.namespace == meta.namespace;
        in_namespace && (request.name.is_empty() || request.name == meta.name)
    });
    let json = |object: &T| if request.whole { to_json(&whole(store, object)) } else { to_json(object) };
    let listed = wanted.map(|object| {
        let meta = object.metadata();
        let (namespace, name, uid) = (meta.namespace.clone(), meta.name.clone(), meta.uid.clone());
        // The fields on which the kubelet does not act are kept elsewhere.
        let version: Option<Version> = (!request.whole).then(|| Arc::clone(&object) as Version);
        let is_seen = version.as_ref().is_some_and(|version| seen(&namespace, &name, version));
        let json = if is_seen { Vec::new() } else { json(&object) };
        Listed { namespace, name, uid, json, version }
    });
    listed.collect()
}

/// The object with the fields on which the kubelet does not act.
fn whole<T: Object>(store: &Store, object: &T) -> Value {
    let mut value = serde_json::to_value(object).expect("objects have string keys only");
    let meta = object.metadata();
    if let Some(document) = store.document(T::KIND, &meta.namespace, &meta.name) {
        document.complete(&mut value, T::KIND);
    }
    value
}

/// There is one node. All of it is for pods.
fn node(name: &str, engine: &Handle, request: &GetRequest) -> Vec<Listed> {
    if !request.name.is_empty() && request.name != name {
        return Vec::new();
    }
    let capacity = engine.capacity();
    let mut conditions = vec![engine.runtime_health().condition()];
    conditions.extend(engine.pressure().conditions());
    let resources = json!({
        "cpu": (capacity.cpu_millis / 1000).to_string(),
        "memory": format!("{}Ki", capacity.memory_bytes / 1024),
        "ephemeral-storage": format!("{}Ki", capacity.storage_bytes / 1024),
        "pods": capacity.pods.to_string(),
    });
    let node = json!({
        "apiVersion": Kind::Node.api_version(),
        "kind": Kind::Node.as_str(),
        "metadata": {"name": name},
        "status": {
            "capacity": resources.clone(),
            "allocatable": resources,
            "conditions": conditions,
            "nodeInfo": {"kubeletVersion": concat!("hawser-", env!("CARGO_PKG_VERSION"))},
        },
    });
    let name = name.to_owned();
    vec![Listed { namespace: String::new(), uid: name.clone(), name, json: to_json(&node), version: None }]
}

fn to_json(object: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(object).expect("objects have string keys only")
}
