//! Subvolumes of Btrfs, which a pod may make in its own directory without any
//! privilege, and which it may make read-only.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use tests::attacker::Attack;
use tests::loop_device::{FileSystem, LoopMount};
use tests::node::{TIMEOUT, text};
use tests::{Node, NodeOptions, Sandbox, eventually, subvolume};

use crate::node_with;

const MOUNT: &str = "volumeMounts: [{name: scratch, mountPath: /scratch}]";

fn node_on_btrfs(sandbox: &Sandbox) -> Node<'_> {
    let disk = LoopMount::new(sandbox, "disk", FileSystem::Btrfs, 1 << 30).expect("a file system");
    let options = NodeOptions { disk: Some(disk.dir().to_owned()), ..NodeOptions::default() };
    node_with(sandbox, options).0
}

fn empty_dir(node: &Node<'_>, pod: &str) -> Result<PathBuf> {
    let pod = node.get("pod", pod)?;
    let uid = text(&pod["metadata"]["uid"]);
    Ok(node.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/scratch"))
}

/// One subvolume in another, both with a file of `bytes`, and both read-only.
fn fill(directory: &Path, bytes: usize) -> Result<()> {
    let outer = directory.join("outer");
    let inner = outer.join("d/inner");
    subvolume::create(&outer)?;
    std::fs::create_dir(outer.join("d"))?;
    subvolume::create(&inner)?;
    for root in [&inner, &outer] {
        std::fs::write(root.join("data"), vec![b'x'; bytes])?;
        subvolume::make_read_only(root)?;
    }
    ensure!(std::fs::remove_file(inner.join("data")).is_err(), "they are read-only");
    Ok(())
}

#[test]
fn a_pod_with_read_only_subvolumes_is_deleted_and_the_node_stops() {
    let sandbox = Sandbox::new();
    let node = node_on_btrfs(&sandbox);
    let scratch = "volumes: [{name: scratch, emptyDir: {}}]";
    let mut directories = Vec::new();
    for name in ["deleted", "stopped"] {
        let pod = Attack::new(name, "sleep 1000").with_pod_fields(scratch).with_container_fields(MOUNT);
        node.put_manifest(&format!("{name}.yaml"), &pod.yaml()).unwrap();
        node.wait_for_phase(name, "Running").unwrap();
        let directory = empty_dir(&node, name).unwrap();
        fill(&directory, 1 << 20).unwrap();
        directories.push(directory);
    }
    node.remove_manifest("deleted.yaml").unwrap();
    node.wait_for_no_pod("deleted").unwrap();
    node.stop().unwrap();
    for directory in directories {
        assert!(!directory.exists(), "{}", directory.display());
    }
}

/// A pod whose emptyDir may have 4 MiB is evicted for what `fill` puts there.
fn assert_evicted_for(fill: impl Fn(&Path)) {
    let sandbox = Sandbox::new();
    let node = node_on_btrfs(&sandbox);
    let scratch = "volumes: [{name: scratch, emptyDir: {sizeLimit: 4Mi}}]";
    let pod = Attack::new("greedy", "sleep 1000").with_pod_fields(scratch).with_container_fields(MOUNT);
    node.put_manifest("greedy.yaml", &pod.yaml()).expect("the kernel and the node answer");
    node.wait_for_phase("greedy", "Running").expect("the kernel and the node answer");
    fill(&empty_dir(&node, "greedy").expect("the kernel and the node answer"));
    eventually("the pod is evicted", TIMEOUT, || {
        let pod = node.get("pod", "greedy")?;
        ensure!(pod["status"]["reason"] == "Evicted", "{}", pod["status"]);
        Ok(())
    })
    .expect("the kernel and the node answer");
    node.stop().expect("the kernel and the node answer");
}

#[test]
fn what_a_pod_keeps_in_subvolumes_counts_towards_its_limits() {
    assert_evicted_for(|directory| fill(directory, 8 << 20).unwrap());
}

/// No block of a file tells of them, and each takes a kilobyte or more.
#[test]
fn names_and_subvolumes_without_content_count_towards_the_limits_of_a_pod() {
    assert_evicted_for(|directory| {
        std::fs::write(directory.join("file"), "").unwrap();
        for n in 0..5000 {
            std::fs::hard_link(directory.join("file"), directory.join(format!("{n:0>200}"))).unwrap();
        }
    });
    assert_evicted_for(|directory| {
        for n in 0..200 {
            subvolume::create(&directory.join(n.to_string())).unwrap();
        }
    });
}
