//! The schemas of the kinds of snapshots. They are custom resources (kubernetes-csi/external-snapshotter v8,
//! client/config/crd), which `k8s-openapi` does not have; so their fields are written here.

use k8s_openapi::api::core::v1::PersistentVolume;
use kubelet::objects::Kind;
use serde_json::{Value, json};

use crate::schema::Schema;

/// `properties` is about the fields beside `apiVersion`, `kind` and `metadata`.
fn of(properties: impl FnOnce(&Schema) -> Value) -> Schema {
    // It refers to the definitions of ObjectMeta and ObjectReference, which snapshots have too.
    let kubernetes = Schema::of::<PersistentVolume>();
    let own = properties(&kubernetes);
    let mut root = kubernetes.root().clone();
    let fields = root["properties"].as_object_mut().expect("the fields of a kind");
    fields.retain(|name, _| matches!(name.as_str(), "apiVersion" | "kind" | "metadata"));
    fields.extend(own.as_object().expect("fields").clone());
    Schema::new(root)
}

fn object(properties: Value) -> Value {
    json!({"type": "object", "properties": properties})
}

fn string() -> Value {
    json!({"type": "string"})
}

fn error() -> Value {
    object(json!({"message": string(), "time": {"type": "string", "format": "date-time"}}))
}

pub(crate) fn snapshot() -> Schema {
    of(|_| {
        let source =
            object(json!({"persistentVolumeClaimName": string(), "volumeSnapshotContentName": string()}));
        json!({
            "spec": object(json!({"source": source, "volumeSnapshotClassName": string()})),
            "status": object(json!({
                "boundVolumeSnapshotContentName": string(),
                "creationTime": {"type": "string", "format": "date-time"},
                "error": error(),
                "readyToUse": {"type": "boolean"},
                "restoreSize": string(),
                "volumeGroupSnapshotName": string(),
            })),
        })
    })
}

pub(crate) fn class() -> Schema {
    of(|_| {
        let parameters = json!({"type": "object", "additionalProperties": string()});
        json!({"driver": string(), "deletionPolicy": string(), "parameters": parameters})
    })
}

pub(crate) fn content() -> Schema {
    of(|kubernetes| {
        let spec = kubernetes.resolved(&kubernetes.root()["properties"]["spec"]);
        let reference = spec["properties"]["claimRef"].clone();
        json!({
            "spec": object(json!({
                "deletionPolicy": string(),
                "driver": string(),
                "source": object(json!({"snapshotHandle": string(), "volumeHandle": string()})),
                "sourceVolumeMode": string(),
                "volumeSnapshotClassName": string(),
                "volumeSnapshotRef": reference,
            })),
            "status": object(json!({
                "creationTime": {"type": "integer"},
                "error": error(),
                "readyToUse": {"type": "boolean"},
                "restoreSize": {"type": "integer"},
                "snapshotHandle": string(),
                "volumeGroupSnapshotHandle": string(),
            })),
        })
    })
}

/// The kubelet's own objects, with every field: one that is added there must be added here to compile.
fn whole() -> [(Kind, Value); 3] {
    use kubelet::objects::{
        ObjectMeta, ObjectRef, Quantity, ReclaimPolicy, SnapshotError, VolumeMode, VolumeSnapshot,
        VolumeSnapshotClass, VolumeSnapshotContent, VolumeSnapshotContentSource, VolumeSnapshotContentSpec,
        VolumeSnapshotContentStatus, VolumeSnapshotSource, VolumeSnapshotSpec, VolumeSnapshotStatus, now,
    };
    let text = || "x".to_owned();
    let error = || SnapshotError { time: Some(now()), message: text() };
    let (api_version, metadata) = (text, || ObjectMeta { name: text(), ..ObjectMeta::default() });
    let snapshot = VolumeSnapshot {
        api_version: api_version(),
        kind: text(),
        metadata: metadata(),
        spec: VolumeSnapshotSpec {
            source: VolumeSnapshotSource {
                persistent_volume_claim_name: text(),
                volume_snapshot_content_name: text(),
            },
            volume_snapshot_class_name: Some(text()),
        },
        status: VolumeSnapshotStatus {
            bound_volume_snapshot_content_name: text(),
            creation_time: Some(now()),
            ready_to_use: Some(true),
            restore_size: Some(Quantity::from_bytes(1)),
            error: Some(error()),
        },
    };
    let class = VolumeSnapshotClass {
        api_version: api_version(),
        kind: text(),
        metadata: metadata(),
        driver: text(),
        deletion_policy: ReclaimPolicy::Delete,
        parameters: [(text(), text())].into(),
    };
    let content = VolumeSnapshotContent {
        api_version: api_version(),
        kind: text(),
        metadata: metadata(),
        spec: VolumeSnapshotContentSpec {
            volume_snapshot_ref: ObjectRef {
                api_version: text(),
                kind: text(),
                namespace: text(),
                name: text(),
                uid: text(),
            },
            deletion_policy: ReclaimPolicy::Delete,
            driver: text(),
            volume_snapshot_class_name: Some(text()),
            source: VolumeSnapshotContentSource { volume_handle: text(), snapshot_handle: text() },
            source_volume_mode: Some(VolumeMode::Filesystem),
        },
        status: VolumeSnapshotContentStatus {
            snapshot_handle: text(),
            creation_time: Some(1),
            ready_to_use: Some(true),
            restore_size: Some(1),
            error: Some(error()),
        },
    };
    [
        (Kind::VolumeSnapshot, json!(snapshot)),
        (Kind::VolumeSnapshotClass, json!(class)),
        (Kind::VolumeSnapshotContent, json!(content)),
    ]
}

/// The fields of `value` that the schema does not have.
fn missing(schema: &Schema, at: &Value, value: &Value, path: &str) -> Vec<String> {
    let fields = schema.fields(at);
    let inside = value.as_object().into_iter().flatten();
    let of_field = |(name, value): (&String, &Value)| {
        let path = format!("{path}.{name}");
        match fields.iter().find(|(known, _)| known == name) {
            Some((_, below)) => missing(schema, below, value, &path),
            None => vec![path],
        }
    };
    if fields.is_empty() { Vec::new() } else { inside.flat_map(of_field).collect() }
}

#[test]
fn the_schemas_of_snapshots_have_every_field_of_the_kubelets_objects() {
    for ((kind, value), schema) in whole().into_iter().zip([snapshot(), class(), content()]) {
        assert_eq!(missing(&schema, schema.root(), &value, ""), [""; 0], "{kind}");
        let other = json!({"fancy": 2, "spec": {"fancy": 1}});
        let expected = if kind == Kind::VolumeSnapshotClass {
            vec![".fancy", ".spec"]
        } else {
            vec![".fancy", ".spec.fancy"]
        };
        assert_eq!(missing(&schema, schema.root(), &other, ""), expected, "{kind}");
    }
}
