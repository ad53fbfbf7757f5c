//! A pod that takes every byte of the disk that holds the kubelet's root
//! directory, the logs and the leases, and each byte again that becomes free.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use linux::mount::{MountFlags, mount_fs};
use tests::attacker::{self, Attack};
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use tests::node::TIMEOUT;
use tests::{Node, NodeOptions, Sandbox, eventually};

const SCRATCH_VOLUME: &str = "volumes: [{name: scratch, emptyDir: {}}]";
const SCRATCH_MOUNT: &str = "volumeMounts: [{name: scratch, mountPath: /scratch}]";
/// Through its emptyDir and through its log.
const FILL: &str = "
cat /dev/zero > /scratch/rest
n=0
while :; do n=$((n+1)); echo 'the disk is full' ; echo x >> /scratch/$n; done";
const SLEEP: &str = "sleep 1000";

/// tmpfs counts every page: nothing is set aside for anybody.
fn small_disk(sandbox: &Sandbox) -> PathBuf {
    let disk = sandbox.make_dir("disk").expect("a directory");
    mount_fs("tmpfs", "disk", &disk, MountFlags::default(), "size=256m").expect("a small tmpfs");
    disk
}

/// A node whose disk has `filler` on it, and not one free byte.
fn full_node<'a>(sandbox: &'a Sandbox, disk: &Path, before: &[(&str, &str)]) -> Node<'a> {
    let options = NodeOptions { disk: Some(disk.to_owned()), ..NodeOptions::default() };
    let node = Node::start(sandbox, options).expect("the node starts");
    attacker::install(&node).expect("the attacker's image");
    for (file, yaml) in before {
        node.put_manifest(file, yaml).expect("put");
    }
    for (file, _) in before {
        node.wait_for_phase(file.trim_end_matches(".yaml"), "Running").expect("runs");
    }
    apply(&node, &Attack::new("applied", SLEEP)).expect("apply");
    apply(&node, &Attack::new("stubborn", SLEEP)).expect("apply");
    for pod in ["applied", "stubborn"] {
        node.wait_for_phase(pod, "Running").expect("runs");
    }
    let filler = Attack::new("filler", FILL);
    let filler = filler.with_pod_fields(SCRATCH_VOLUME).with_container_fields(SCRATCH_MOUNT);
    node.put_manifest("filler.yaml", &filler.yaml()).expect("put");
    wait_until_full(disk);
    node
}

/// For some time without a break.
fn wait_until_full(disk: &Path) {
    let mut since = None;
    eventually("the disk stays full", TIMEOUT, || {
        ensure_full(disk).inspect_err(|_| since = None)?;
        let full_for = since.get_or_insert_with(Instant::now).elapsed();
        ensure!(full_for > Duration::from_secs(2), "full for {full_for:?}");
        Ok(())
    })
    .expect("full");
}

fn ensure_full(disk: &Path) -> Result<()> {
    let probe = disk.join("probe");
    let written = std::fs::write(&probe, "x");
    match std::fs::remove_file(&probe) {
        // Not even room for its name.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        removed => removed.context("remove the probe")?,
    }
    ensure!(written.is_err(), "there is room for a byte");
    Ok(())
}

fn apply(node: &Node<'_>, pod: &Attack<'_>) -> Result<PathBuf> {
    let file = node.sandbox().path(&format!("{}.yaml", pod.name));
    std::fs::write(&file, pod.yaml()).context("write the manifest")?;
    node.client(&["apply", "-f", &file.display().to_string()])?;
    Ok(file)
}

fn ensure_gone(node: &Node<'_>, pod: &str) {
    node.wait_for_no_pod(pod).expect("the pod goes");
}

#[test]
fn pods_are_deleted_and_manifests_removed_with_not_one_byte_free() {
    let sandbox = Sandbox::new();
    let disk = small_disk(&sandbox);
    let mut node = full_node(&sandbox, &disk, &[("described.yaml", &Attack::new("described", SLEEP).yaml())]);

    node.client(&["delete", "pod", "applied", "-n", "default"]).unwrap();
    ensure_gone(&node, "applied");
    node.remove_manifest("described.yaml").unwrap();
    ensure_gone(&node, "described");

    // What was asked for before a kill is remembered by the next kubelet. The grace period too, if there was room
    // for it; otherwise it is the pod's own.
    let words = ["delete", "pod", "stubborn", "-n", "default", "--grace-period=10", "--wait=false"];
    node.client(&words).unwrap();
    node.kubelet().unwrap().kill().unwrap();
    wait_until_full(&disk);
    node.start_kubelet().unwrap();
    ensure_gone(&node, "stubborn");
    wait_until_full(&disk);

    node.remove_manifest("filler.yaml").unwrap();
    ensure_gone(&node, "filler");
    node.stop().unwrap();
}

#[test]
fn stop_pods_ends_everything_with_not_one_byte_free() {
    let sandbox = Sandbox::new();
    let disk = small_disk(&sandbox);
    let node = full_node(&sandbox, &disk, &[]);
    node.stop().unwrap();
    let programs = sandbox.tag().processes().unwrap();
    assert!(programs.is_empty(), "{programs:?}");
}

/// XFS makes no new file then, and so no socket.
#[test]
fn a_kubelet_starts_and_ends_pods_on_a_full_xfs() {
    let sandbox = Sandbox::new();
    let disk = LoopMount::new(&sandbox, "disk", FileSystem::Xfs, IMAGE_BYTES).unwrap();
    let mut node = full_node(&sandbox, disk.dir(), &[]);
    node.kubelet().unwrap().kill().unwrap();
    wait_until_full(disk.dir());
    node.start_kubelet().unwrap();
    node.client(&["delete", "pod", "applied", "-n", "default"]).unwrap();
    ensure_gone(&node, "applied");
    assert!(node.outputs().contains("serving clients on a socket in memory"), "{}", node.outputs());
    node.remove_manifest("filler.yaml").unwrap();
    ensure_gone(&node, "filler");
    node.stop().unwrap();
}
