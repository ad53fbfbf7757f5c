//! What users and machines get wrong: the pod waits or fails with kubelet's own
//! words, an event says what to do, nothing leaks, and correcting the file (or
//! the machine) heals it without a restart.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::Value;
use tests::manifests::{self, Pod};
use tests::node::{TIMEOUT, text};
use tests::{Launcher, LeakCheck, Node, NodeOptions, Sandbox, binaries, eventually};

/// A node with class `hawser`, and what it looked like before.
fn node(sandbox: &Sandbox, options: NodeOptions) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, options).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    (node, idle)
}

/// Waits for the pod's container to wait with one of `reasons`.
fn wait_for_reason(node: &Node<'_>, pod: &str, reasons: &[&str]) -> Result<Value> {
    eventually(&format!("container of {pod} waits: {reasons:?}"), TIMEOUT, || {
        let status = node.get("pod", pod)?["status"].clone();
        let state = &status["containerStatuses"][0]["state"];
        let reason = [&state["waiting"]["reason"], &state["terminated"]["reason"]].map(text);
        ensure!(reasons.iter().any(|wanted| reason.iter().any(|reason| reason == wanted)), "{status}");
        Ok(status)
    })
}

/// The pod may be read from its file just now.
fn assert_pending(node: &Node<'_>, pod: &str) {
    node.wait_for_phase(pod, "Pending").expect("the pod waits");
}

const GOOD: Pod<'_> = Pod {
    name: "p",
    args: &["print", "well"],
    claim: None,
    image: tests::examples::DEMO_IMAGE,
    command: "/demo-app",
    restart_policy: "Never",
};

#[test]
fn malformed_yaml_is_named_by_file_and_line_and_its_correction_runs() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    node.put_manifest("p.yaml", &GOOD.yaml().replace("restartPolicy: Never", "restartPolicy: [Never"))
        .unwrap();
    node.wait_for_event("InvalidManifest", &["p.yaml:"]).unwrap();
    node.put_manifest("p.yaml", &GOOD.yaml().replace("image:", "imgae:")).unwrap();
    node.wait_for_event("InvalidManifest", &["p.yaml:", "spec.containers[0].imgae", "misspelt"]).unwrap();
    assert!(node.list("pods").unwrap().is_empty());
    node.put_manifest("p.yaml", &GOOD.yaml()).unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn an_unknown_kind_or_api_version_is_named_and_does_not_hide_its_neighbours() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let unknown_kind = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n";
    let unknown_version = "apiVersion: v2\nkind: Pod\nmetadata: {name: d}\n";
    node.put_manifest("p.yaml", &format!("{unknown_kind}---\n{unknown_version}---\n{}", GOOD.yaml()))
        .unwrap();
    node.wait_for_event("InvalidManifest", &["p.yaml:", "Deployment"]).unwrap();
    node.wait_for_event("InvalidManifest", &["p.yaml:", "v2"]).unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_field_that_is_not_supported_is_named_in_a_warning() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let rules = "      restartPolicyRules: [{action: Restart}]\n";
    let yaml = GOOD.yaml().replace("      command:", &format!("{rules}      command:"));
    node.put_manifest("p.yaml", &yaml).unwrap();
    let event = eventually("the field is named", TIMEOUT, || {
        let events = node.list("events")?;
        let warning = events
            .iter()
            .find(|e| e["type"] == "Warning" && text(&e["message"]).contains("restartPolicyRules"));
        warning.cloned().ok_or_else(|| anyhow::anyhow!("{events:?}"))
    })
    .unwrap();
    assert!(text(&event["message"]).contains("spec.containers[0]"), "{event}");
    node.finish(&idle).unwrap();
}

#[test]
fn a_claim_of_an_unknown_class_waits_for_the_class() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    node.put_manifest("claim.yaml", &manifests::claim_of_class("c", "1Mi", "swift")).unwrap();
    node.put_manifest("p.yaml", &GOOD.with_claim("c").yaml()).unwrap();
    node.wait_for_event("ProvisioningFailed", &["swift", "not found"]).unwrap();
    assert_pending(&node, "p");
    node.put_manifest("class.yaml", &manifests::class("swift", "csi.hawser.dev")).unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_driver_that_waits_for_attachments_is_not_called_until_its_object_says_otherwise() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let object = |attach: &str| {
        let kind = "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: csi.hawser.dev}\n";
        format!("{kind}spec: {{{attach}}}\n")
    };
    // Not written, it is required.
    node.put_manifest(
        "storageclass.yaml",
        &format!("{}---\n{}", manifests::class("hawser", "csi.hawser.dev"), object("podInfoOnMount: false")),
    )
    .unwrap();
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).unwrap();
    node.put_manifest("p.yaml", &GOOD.with_claim("c").yaml()).unwrap();
    node.wait_for_event("FailedMount", &["csi.hawser.dev", "attachRequired"]).unwrap();
    assert_pending(&node, "p");
    node.put_class().unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_claim_larger_than_the_pool_says_so_until_it_asks_for_less() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Ti")).unwrap();
    node.put_manifest("p.yaml", &GOOD.with_claim("c").yaml()).unwrap();
    node.wait_for_event("ProvisioningFailed", &["1099511627776", "larger than the pool"]).unwrap();
    assert_pending(&node, "p");
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_missing_image_is_named_and_another_heals() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    node.put_manifest("p.yaml", &Pod { image: "hawser.dev/absent:1", ..GOOD }.yaml()).unwrap();
    wait_for_reason(&node, "p", &["ErrImagePull", "ImagePullBackOff"]).unwrap();
    assert_pending(&node, "p");
    node.wait_for_event("Failed", &["hawser.dev/absent:1"]).unwrap();
    node.put_manifest("p.yaml", &GOOD.yaml()).unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_missing_command_is_named_and_another_heals() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let wrong = Pod { command: "/absent", restart_policy: "Always", ..GOOD };
    node.put_manifest("p.yaml", &wrong.yaml()).unwrap();
    wait_for_reason(
        &node,
        "p",
        &["RunContainerError", "CreateContainerError", "CrashLoopBackOff", "StartError"],
    )
    .unwrap();
    node.wait_for_event("Failed", &["/absent"]).unwrap();
    node.put_manifest("p.yaml", &GOOD.yaml()).unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_driver_that_is_not_registered_is_named_and_waited_for() {
    let sandbox = Sandbox::new();
    let mut node = Node::prepare(&sandbox, NodeOptions::default()).unwrap();
    node.start_kubelet().unwrap();
    node.put_class().unwrap();
    node.put_manifest(
        "p.yaml",
        &format!("{}---\n{}", manifests::claim("c", "1Mi"), GOOD.with_claim("c").yaml()),
    )
    .unwrap();
    eventually("an event names the driver", TIMEOUT, || {
        let events = node.list("events")?;
        let named =
            events.iter().any(|e| e["type"] == "Warning" && text(&e["message"]).contains("csi.hawser.dev"));
        ensure!(named, "{}", node.describe_all());
        Ok(())
    })
    .unwrap();
    assert_pending(&node, "p");
    node.start_driver().unwrap();
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.remove_manifest("p.yaml").unwrap();
    node.wait_for_no_pods().unwrap();
    node.delete("pvc", "c").unwrap();
    let volumes =
        fs::read_dir(node.pool()).unwrap().flatten().flat_map(|dir| fs::read_dir(dir.path())).flatten();
    assert_eq!(volumes.flatten().map(|entry| entry.path()).collect::<Vec<_>>(), Vec::<PathBuf>::new());
    node.stop().unwrap();
}

#[test]
fn a_driver_that_nobody_has_is_named_when_a_volume_asks_for_it() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let volume = "apiVersion: v1
kind: PersistentVolume
metadata: {name: v}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: manual
  csi: {driver: other.example.com, volumeHandle: h}
";
    node.put_manifest("v.yaml", &format!("{volume}---\n{}", manifests::claim_of_class("c", "1Mi", "manual")))
        .unwrap();
    node.put_manifest("p.yaml", &GOOD.with_claim("c").yaml()).unwrap();
    node.wait_for_event("FailedMount", &["other.example.com"]).unwrap();
    assert_pending(&node, "p");
    node.finish(&idle).unwrap();
}

#[test]
fn a_plugin_that_fails_is_quoted_and_its_recovery_heals() {
    let sandbox = Sandbox::new();
    let script = tempfile::NamedTempFile::new().unwrap();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let plugin = node.cni_bin_dir().join("bridge");
    let failing = "echo '{\"cniVersion\": \"1.0.0\", \"code\": 100, \"msg\": \"no luck today\"}'\nexit 1\n";
    replace_by_script(&plugin, script.path(), failing);
    node.put_manifest("p.yaml", &GOOD.yaml()).unwrap();
    node.wait_for_event("FailedCreatePodSandBox", &["no luck today"]).unwrap();
    assert_pending(&node, "p");
    replace_program(&plugin, &fs::read(binaries::find("bridge").unwrap()).unwrap());
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_plugin_that_is_missing_is_named_and_its_arrival_heals() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    let plugin = node.cni_bin_dir().join("bridge");
    fs::remove_file(&plugin).unwrap();
    node.put_manifest("p.yaml", &GOOD.yaml()).unwrap();
    node.wait_for_event("FailedCreatePodSandBox", &["bridge"]).unwrap();
    assert_pending(&node, "p");
    replace_program(&plugin, &fs::read(binaries::find("bridge").unwrap()).unwrap());
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_volume_program_that_cannot_start_keeps_the_pod_pending_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    // It says its usage and exits 2, whatever it is asked.
    let wrong = binaries::find("demo-app").unwrap();
    let (node, idle) = node(
        &sandbox,
        NodeOptions { volume_binary: Some(wrong), start_timeout: Some(2), ..NodeOptions::default() },
    );
    node.put_manifest(
        "p.yaml",
        &format!("{}---\n{}", manifests::claim("c", "1Mi"), GOOD.with_claim("c").yaml()),
    )
    .unwrap();
    node.wait_for_event("FailedMount", &[]).unwrap();
    assert_pending(&node, "p");
    node.finish(&idle).unwrap();
}

#[test]
fn a_volume_program_that_could_not_start_is_tried_again_once_it_can() {
    let sandbox = Sandbox::new();
    let (program, script) = (sandbox.path("hawser-volume"), sandbox.path("ends.sh"));
    replace_by_script(&program, &script, "exit 3\n");
    let options = NodeOptions {
        launcher: Launcher::Process,
        volume_binary: Some(program.clone()),
        start_timeout: Some(2),
        ..NodeOptions::default()
    };
    let (node, idle) = node(&sandbox, options);
    node.put_manifest(
        "p.yaml",
        &format!("{}---\n{}", manifests::claim("c", "1Mi"), GOOD.with_claim("c").yaml()),
    )
    .unwrap();
    node.wait_for_event("FailedMount", &[]).unwrap();
    assert_pending(&node, "p");
    replace_program(&program, &fs::read(binaries::find("hawser-volume").unwrap()).unwrap());
    node.wait_for_phase("p", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}

/// `script` stays where it is: a shell that opens its script after `program` was replaced again
/// would run what is there by then.
fn replace_by_script(program: &std::path::Path, script: &std::path::Path, text: &str) {
    fs::write(script, text).expect("write");
    replace_program(program, format!("#!/bin/sh {}\n", script.display()).as_bytes());
}

/// By rename: a program that runs cannot be written (ETXTBSY).
fn replace_program(path: &std::path::Path, content: &[u8]) {
    let unfinished = path.with_extension("new");
    fs::write(&unfinished, content).expect("write");
    fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o755)).expect("chmod");
    fs::rename(&unfinished, path).expect("rename");
}
