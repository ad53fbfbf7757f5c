//! Snapshots, restores and clones, from manifests to the files in pods.

use anyhow::{Context, ensure};
use serde_json::Value;
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually, manifests};

const CLASSES: &str = "apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: growing}
provisioner: csi.hawser.dev
parameters: {snapshotMode: blocking-copy}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: quick}
driver: csi.hawser.dev
deletionPolicy: Delete
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: kept}
driver: csi.hawser.dev
deletionPolicy: Retain
";

fn snapshot(name: &str, class: &str, claim: &str) -> String {
    format!(
        "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {{name: {name}}}\n\
         spec: {{volumeSnapshotClassName: {class}, source: {{persistentVolumeClaimName: {claim}}}}}\n"
    )
}

fn claim(name: &str, size: &str, source: &str) -> String {
    format!("{}  {source}\n", manifests::claim_of_class(name, size, "growing"))
}

fn from_snapshot(name: &str) -> String {
    format!("dataSource: {{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: {name}}}")
}

fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    node.put_manifest("classes.yaml", CLASSES).expect("put");
    (node, idle)
}

/// Runs a pod that ends by itself, with the claim at /data; its log.
fn run(node: &Node<'_>, name: &str, claim: &str, words: &[&str]) -> String {
    let pod = manifests::Pod::new(name, words).with_claim(claim);
    let file = format!("{name}.yaml");
    node.put_manifest(&file, &pod.yaml()).expect("put");
    node.wait_for_phase(name, "Succeeded").expect("it ends");
    let log = node.logs(name).expect("its log");
    node.remove_manifest(&file).expect("removed");
    node.wait_for_no_pod(name).expect("it is gone");
    log
}

fn is_ready(snapshot: &Value) -> bool {
    snapshot["status"]["readyToUse"] == true
}

#[test]
fn a_snapshot_is_restored_into_a_new_claim_and_a_claim_is_cloned() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_manifest("data.yaml", &claim("data", "64Mi", "")).expect("put");
    // The restored claim comes first: it waits for its snapshot.
    node.put_manifest("restored.yaml", &claim("restored", "96Mi", &from_snapshot("snap"))).expect("put");
    node.wait_for_event("WaitForDataSource", &["snapshot snap not found"]).expect("waits");
    run(&node, "writer", "data", &["write", "/data/greeting", "first"]);
    node.put_manifest("snap.yaml", &snapshot("snap", "quick", "data")).expect("put");
    let snap = node.wait_for("volumesnapshot", "snap", "ready", is_ready).expect("ready");
    assert_eq!(snap["status"]["restoreSize"], "64Mi");
    run(&node, "changer", "data", &["write", "/data/greeting", "second"]);

    node.put_manifest("small.yaml", &claim("small", "32Mi", &from_snapshot("snap"))).expect("put");
    node.wait_for_event("ProvisioningFailed", &["is less than the size", "source snapshot snap"])
        .expect("refused");
    node.put_manifest(
        "cloned.yaml",
        &claim("cloned", "64Mi", "dataSourceRef: {kind: PersistentVolumeClaim, name: data}"),
    )
    .expect("put");
    assert_eq!(run(&node, "reader", "restored", &["cat", "/data/greeting"]), "first\n");
    assert_eq!(run(&node, "other", "cloned", &["cat", "/data/greeting"]), "second\n");
    assert_eq!(node.get("pvc", "restored").expect("it exists")["status"]["capacity"]["storage"], "96Mi");

    let table = node.client(&["get", "volumesnapshot"]).expect("a table");
    let head = "NAME READYTOUSE SOURCEPVC SOURCESNAPSHOTCONTENT RESTORESIZE SNAPSHOTCLASS SNAPSHOTCONTENT CREATIONTIME AGE";
    let found: Vec<&str> = table.lines().next().unwrap_or_default().split_whitespace().collect();
    assert_eq!(found.join(" "), head);
    assert!(table.contains("snap   true         data"), "{table}");
    let content = text(&snap["status"]["boundVolumeSnapshotContentName"]);
    let handle = text(&node.get("vsc", &content).expect("it is there")["status"]["snapshotHandle"]);
    assert!(!handle.is_empty());

    // The class says Delete: the driver's snapshot goes too, but not what was made from it.
    // A claim that waits for it keeps it, as in Kubernetes.
    for file in ["snap.yaml", "small.yaml"] {
        node.remove_manifest(file).expect("removed");
    }
    node.client(&["delete", "vs", "snap", "--wait=false"]).expect("marked");
    node.wait_for_event("SnapshotDeletePending", &["data source of pending claim small"]).expect("waits");
    node.delete("pvc", "small").expect("deleted");
    let gone = eventually("the snapshot is gone", TIMEOUT, || {
        ensure!(node.get("volumesnapshot", "snap").is_err(), "it is still there");
        Ok(())
    });
    gone.with_context(|| node.outputs()).expect("deleted");
    node.get("vsc", &content).expect_err("it goes with its snapshot");
    assert_eq!(run(&node, "again", "restored", &["cat", "/data/greeting"]), "first\n");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_retained_snapshot_comes_back_by_its_handle() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_manifest("data.yaml", &claim("data", "64Mi", "")).expect("put");
    run(&node, "writer", "data", &["write", "/data/greeting", "kept"]);
    node.put_manifest("snap.yaml", &snapshot("snap", "kept", "data")).expect("put");
    let snap = node.wait_for("vs", "snap", "ready", is_ready).expect("ready");
    let content = text(&snap["status"]["boundVolumeSnapshotContentName"]);
    let handle = text(&node.get("vsc", &content).expect("it is there")["status"]["snapshotHandle"]);
    node.remove_manifest("snap.yaml").expect("removed");
    node.delete("vs", "snap").expect("deleted");
    node.delete("vsc", &content).expect("deleted");

    // Another kubelet, or a later day: an administrator knows the handle.
    let back = format!(
        "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotContent\nmetadata: {{name: back}}\nspec:\n  \
         driver: csi.hawser.dev\n  deletionPolicy: Delete\n  source: {{snapshotHandle: {handle}}}\n  \
         volumeSnapshotRef: {{name: back, namespace: default}}\n---\n\
         apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {{name: back}}\n\
         spec: {{source: {{volumeSnapshotContentName: back}}}}\n"
    );
    node.put_manifest("back.yaml", &back).expect("put");
    node.wait_for("vs", "back", "ready", is_ready).expect("ready");
    node.put_manifest("restored.yaml", &claim("restored", "64Mi", &from_snapshot("back"))).expect("put");
    assert_eq!(run(&node, "reader", "restored", &["cat", "/data/greeting"]), "kept\n");
    node.finish(&idle).expect("nothing is left");
}
