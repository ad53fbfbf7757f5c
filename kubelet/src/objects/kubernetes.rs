//! Tests: a client of Kubernetes reads every field that the kubelet writes. `k8s-openapi` has
//! the types that such a client reads.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

/// Fails for a field that `T` lacks, for one that `T` requires, and for a value of another type.
#[track_caller]
pub(crate) fn assert_reads_as<T: Serialize + DeserializeOwned>(written: &impl Serialize) {
    let written = serde_json::to_value(written).unwrap();
    let read = read_as::<T>(&written).unwrap_or_else(|error| panic!("{error}: {written:#}"));
    assert_eq!(read, written);
}

/// What is left of `written` after `T` read it.
fn read_as<T: Serialize + DeserializeOwned>(written: &Value) -> serde_json::Result<Value> {
    serde_json::to_value(T::deserialize(written)?)
}

fn metadata(name: &str) -> ObjectMeta {
    let some = || BTreeMap::from([("app".to_owned(), "web".to_owned())]);
    ObjectMeta {
        name: name.to_owned(),
        namespace: DEFAULT_NAMESPACE.to_owned(),
        uid: "4f7a".to_owned(),
        generation: 3,
        labels: some(),
        annotations: some(),
        creation_timestamp: Some(now()),
        deletion_timestamp: Some(now()),
        deletion_grace_period_seconds: Some(30),
        owner_references: vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: "web".to_owned(),
            uid: "4f7b".to_owned(),
            controller: true,
            block_owner_deletion: true,
        }],
    }
}

fn storage() -> Resources {
    Resources::from([("storage".to_owned(), Quantity::from_bytes(1 << 30))])
}

const ACCESS_MODES: [AccessMode; 4] = [
    AccessMode::ReadWriteOnce,
    AccessMode::ReadOnlyMany,
    AccessMode::ReadWriteMany,
    AccessMode::ReadWriteOncePod,
];

fn data_source() -> DataSource {
    DataSource {
        api_group: SNAPSHOT_GROUP.to_owned(),
        kind: "VolumeSnapshot".to_owned(),
        name: "snap".to_owned(),
    }
}

fn secret_reference() -> Option<SecretReference> {
    Some(SecretReference { name: "key".to_owned(), namespace: "vault".to_owned() })
}

fn claim() -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        api_version: "v1".to_owned(),
        kind: "PersistentVolumeClaim".to_owned(),
        metadata: metadata("data"),
        spec: PersistentVolumeClaimSpec {
            access_modes: ACCESS_MODES.to_vec(),
            resources: ClaimResources { requests: storage(), limits: storage() },
            storage_class_name: Some("hawser".to_owned()),
            volume_name: "pvc-1".to_owned(),
            volume_mode: VolumeMode::Filesystem,
            selector: Some(LabelSelector {
                match_labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]),
                match_expressions: vec![LabelRequirement {
                    key: "tier".to_owned(),
                    operator: LabelOperator::NotIn,
                    values: vec!["iron".to_owned()],
                }],
            }),
            data_source: Some(data_source()),
            data_source_ref: Some(data_source()),
        },
        status: PersistentVolumeClaimStatus::default(),
    }
}

#[test]
fn kubernetes_reads_a_claim_and_its_status() {
    for phase in [ClaimPhase::Pending, ClaimPhase::Bound, ClaimPhase::Lost] {
        let condition = ClaimCondition {
            condition_type: "Resizing".to_owned(),
            status: ConditionStatus::True,
            last_transition_time: Some(now()),
            message: "the driver grows it".to_owned(),
        };
        let status = PersistentVolumeClaimStatus {
            phase,
            access_modes: ACCESS_MODES.to_vec(),
            capacity: storage(),
            conditions: vec![condition],
        };
        assert_reads_as::<core::PersistentVolumeClaimStatus>(&status);
        assert_reads_as::<core::PersistentVolumeClaim>(&PersistentVolumeClaim { status, ..claim() });
    }
    assert_reads_as::<core::PersistentVolumeClaim>(&claim());
}

#[test]
fn kubernetes_reads_a_volume_and_its_status() {
    let spec = PersistentVolumeSpec {
        capacity: storage(),
        access_modes: ACCESS_MODES.to_vec(),
        persistent_volume_reclaim_policy: ReclaimPolicy::Delete,
        storage_class_name: "hawser".to_owned(),
        mount_options: vec!["noatime".to_owned()],
        volume_mode: VolumeMode::Filesystem,
        claim_ref: Some(claim().reference()),
        csi: Some(CsiVolumeSource {
            driver: "csi.hawser.dev".to_owned(),
            volume_handle: "v1".to_owned(),
            read_only: true,
            fs_type: "fuse".to_owned(),
            volume_attributes: BTreeMap::from([("key".to_owned(), "value".to_owned())]),
            controller_publish_secret_ref: secret_reference(),
            node_stage_secret_ref: secret_reference(),
            node_publish_secret_ref: secret_reference(),
            controller_expand_secret_ref: secret_reference(),
            node_expand_secret_ref: secret_reference(),
        }),
    };
    let status = PersistentVolumeStatus {
        phase: VolumePhase::Failed,
        reason: "VolumeFailedDelete".to_owned(),
        message: "the driver does not answer".to_owned(),
    };
    assert_reads_as::<core::PersistentVolumeStatus>(&status);
    assert_reads_as::<core::PersistentVolumeStatus>(&PersistentVolumeStatus::default());
    let volume = PersistentVolume::new(metadata("pvc-1"), spec);
    assert_reads_as::<core::PersistentVolume>(&PersistentVolume { status, ..volume });
}

#[test]
fn kubernetes_reads_a_config_map_and_a_secret() {
    let text = || BTreeMap::from([("key".to_owned(), "value".to_owned())]);
    let bytes = || BTreeMap::from([("bytes".to_owned(), Bytes(vec![0, 0xff]))]);
    assert_reads_as::<core::ConfigMap>(&ConfigMap {
        api_version: "v1".to_owned(),
        kind: "ConfigMap".to_owned(),
        metadata: metadata("config"),
        data: text(),
        binary_data: bytes(),
        immutable: true,
    });
    assert_reads_as::<core::Secret>(&Secret {
        api_version: "v1".to_owned(),
        kind: "Secret".to_owned(),
        metadata: metadata("secret"),
        secret_type: "Opaque".to_owned(),
        data: bytes(),
        string_data: text(),
        immutable: true,
    });
}

#[test]
fn kubernetes_reads_what_a_pod_asks_for() {
    let keys = json!({"name": "o", "items": [{"key": "k", "path": "p", "mode": 0o400}], "optional": true});
    let field = json!({"path": "f", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}});
    let resource = json!({"containerName": "c", "resource": "limits.cpu", "divisor": "1m"});
    let file = json!({"path": "r", "mode": 0o444, "resourceFieldRef": resource});
    let secret = json!({"secretName": "o", "items": [{"key": "k", "path": "p"}], "defaultMode": 0o600, "optional": true});
    let template = json!({
        "metadata": {"labels": {"a": "b"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    let spec: PodSpec = serde_json::from_value(json!({
        "hostPID": true, "hostIPC": true, "shareProcessNamespace": true, "hostNetwork": true,
        "hostname": "h", "subdomain": "s", "setHostnameAsFQDN": true, "serviceAccountName": "a",
        "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["n"]}],
        "securityContext": {"sysctls": [{"name": "n", "value": "v"}]},
        "containers": [{
            "name": "c",
            "ports": [{"containerPort": 80, "hostPort": 8080, "hostIP": "192.0.2.1"}],
            "envFrom": [
                {"prefix": "P", "configMapRef": {"name": "o", "optional": true}}, {"secretRef": {"name": "o"}},
            ],
            "env": [
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "o", "key": "k", "optional": true}}},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "o", "key": "k"}}},
                {"name": "C", "valueFrom": {"resourceFieldRef": resource}},
            ],
            "volumeMounts": [
                {"name": "v", "mountPath": "/a", "subPath": "s"}, {"name": "v", "mountPath": "/b", "subPathExpr": "s"},
            ],
        }],
        "volumes": [
            {"name": "a", "configMap": keys},
            {"name": "b", "secret": secret},
            {"name": "c", "downwardAPI": {"items": [field, file], "defaultMode": 0o444}},
            {"name": "d", "projected": {"defaultMode": 0o444, "sources": [
                {"configMap": keys}, {"secret": keys}, {"downwardAPI": {"items": [field]}},
            ]}},
            {"name": "e", "ephemeral": {"volumeClaimTemplate": template}},
        ],
    }))
    .unwrap();
    assert_eq!(spec.volumes.iter().filter_map(Volume::source).count(), 5);
    assert_reads_as::<core::PodSpec>(&spec);
}

#[test]
fn kubernetes_reads_an_event() {
    for event_type in [EventType::Normal, EventType::Warning] {
        assert_reads_as::<core::Event>(&Event {
            api_version: "v1".to_owned(),
            kind: "Event".to_owned(),
            metadata: metadata("data.1"),
            involved_object: claim().reference(),
            reason: "FailedMount".to_owned(),
            message: "the driver does not answer".to_owned(),
            source: EventSource { component: "kubelet".to_owned(), host: "node".to_owned() },
            event_type,
            count: 3,
            first_timestamp: now(),
            last_timestamp: now(),
        });
    }
}

#[test]
fn a_field_that_kubernetes_lacks_makes_a_difference() {
    let misspelt = json!({"phase": "Running", "podIps": [{"ip": "192.0.2.1"}]});
    assert_eq!(read_as::<core::PodStatus>(&misspelt).unwrap(), json!({"phase": "Running"}));
    assert!(
        read_as::<core::PodStatus>(&json!({"phase": 7})).unwrap_err().to_string().contains("invalid type")
    );
}
