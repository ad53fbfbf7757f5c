//! Expansion of claims, late binding and the secrets of CSI calls, from manifests to pods.

use tests::node::text;
use tests::{LeakCheck, Node, NodeOptions, Sandbox, manifests};

const CLASSES: &str = "apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: growing}
provisioner: csi.hawser.dev
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: late}
provisioner: csi.hawser.dev
volumeBindingMode: WaitForFirstConsumer
parameters:
  csi.storage.k8s.io/secret-name: key-of-${pvc.name}
  csi.storage.k8s.io/secret-namespace: ${pvc.namespace}
";

fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    node.put_manifest("classes.yaml", CLASSES).expect("put");
    (node, idle)
}

#[test]
fn a_claim_grows_while_its_pod_runs() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_manifest("data.yaml", &manifests::claim_of_class("data", "64Mi", "growing")).expect("put");
    let pod = manifests::Pod::new("web", &["sleep", "forever"]).with_claim("data");
    node.put_manifest("web.yaml", &pod.yaml()).expect("put");
    node.wait_for_phase("web", "Running").expect("it runs");
    let uid = text(&node.get("pod", "web").expect("it runs")["metadata"]["uid"]);
    let mounted = node.volume_path("web").expect("it is mounted");
    let size = || visible_size(&mounted);
    assert_eq!(size(), 64 << 20);

    node.put_manifest("data.yaml", &manifests::claim_of_class("data", "128Mi", "growing")).expect("put");
    node.wait_for("pvc", "data", "it grows", |claim| claim["status"]["capacity"]["storage"] == "128Mi")
        .expect("it grows");
    node.wait_for_event("VolumeResizeSuccessful", &[]).expect("an event");
    assert_eq!(size(), 128 << 20);
    assert_eq!(text(&node.get("pod", "web").expect("it runs")["metadata"]["uid"]), uid);
    node.put_manifest("data.yaml", &manifests::claim_of_class("data", "32Mi", "growing")).expect("put");
    node.wait_for_event("ManifestRefused", &["less than status.capacity"]).expect("refused");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_late_claim_waits_for_a_pod_and_then_for_the_secret_of_its_class() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_manifest("data.yaml", &manifests::claim_of_class("data", "64Mi", "late")).expect("put");
    node.wait_for_event("WaitForFirstConsumer", &[]).expect("waits");
    let pod = manifests::Pod::new("web", &["write", "/data/x", "y"]).with_claim("data");
    node.put_manifest("web.yaml", &pod.yaml()).expect("put");
    node.wait_for_event("ProvisioningFailed", &["secret \"default/key-of-data\" of the CSI call not found"])
        .expect("waits");
    let secret =
        "apiVersion: v1\nkind: Secret\nmetadata: {name: key-of-data}\nstringData: {key: hush-hush}\n";
    node.put_manifest("secret.yaml", secret).expect("put");
    node.wait_for_phase("web", "Succeeded").expect("it ends");

    let volumes = node.client(&["get", "pv", "-o", "yaml"]).expect("the volume");
    assert!(volumes.contains("nodeStageSecretRef") && volumes.contains("key-of-data"), "{volumes}");
    let trace = std::fs::read_to_string(node.trace_file()).unwrap_or_default();
    let events = node.client(&["get", "events", "-A", "-o", "yaml"]).expect("events");
    for shown in [&volumes, &trace, &events, &node.outputs()] {
        assert!(!shown.contains("hush-hush"), "a secret's value is shown");
    }
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn apply_changes_the_reclaim_policy_of_a_claims_volume_and_no_other_field() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_manifest("data.yaml", &manifests::claim_of_class("data", "64Mi", "growing")).expect("put");
    let bound = node.wait_for("pvc", "data", "bound", |claim| claim["status"]["phase"] == "Bound");
    let name = text(&bound.expect("it is bound")["spec"]["volumeName"]);
    let edit = |from: &str, to: &str| {
        let file = sandbox.path("edited.yaml");
        let shown = node.client(&["get", "pv", &name, "-o", "yaml"]).expect("the volume");
        assert!(shown.contains(from), "{shown}");
        std::fs::write(&file, shown.replace(from, to)).expect("written");
        let applied = node.client(&["apply", "-f", &file.display().to_string()]);
        std::fs::remove_file(&file).expect("removed");
        applied
    };
    let refused = edit("storage: \"64Mi\"", "storage: \"1Mi\"").expect_err("refused");
    assert!(format!("{refused:#}").contains("only persistentVolumeReclaimPolicy can change"), "{refused:#}");
    edit("persistentVolumeReclaimPolicy: Delete", "persistentVolumeReclaimPolicy: Retain").expect("applied");
    node.remove_manifest("data.yaml").expect("removed");
    node.delete("pvc", "data").expect("deleted");
    let released = node.wait_for("pv", &name, "kept", |volume| volume["status"]["phase"] == "Released");
    assert_eq!(released.expect("it is kept")["spec"]["persistentVolumeReclaimPolicy"], "Retain");
    edit("persistentVolumeReclaimPolicy: Retain", "persistentVolumeReclaimPolicy: Delete").expect("applied");
    node.client(&["wait", "--for=delete", "pv", &name, "--timeout=20s"]).expect("its driver deletes it");
    node.finish(&idle).expect("nothing is left");
}

/// The size that an application sees.
fn visible_size(path: &std::path::Path) -> u64 {
    let found = nix::sys::statvfs::statvfs(path).expect("it is mounted");
    found.blocks() * found.fragment_size()
}
