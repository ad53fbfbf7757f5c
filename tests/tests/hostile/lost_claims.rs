//! Claims whose records are lost, or whose end a full disk does not take: no later claim gets
//! the volume of an earlier one, and none is left over.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::ensure;
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually, manifests};

const KEPT: &str = "
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: kept}
provisioner: csi.hawser.dev
reclaimPolicy: Retain
";

fn node_with_classes(sandbox: &Sandbox, options: NodeOptions) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, options).unwrap();
    let mut allowed = node.allowed();
    // What is kept stays in the pool; records that were torn are set aside.
    allowed.changing.extend([node.pool(), sandbox.path("state"), sandbox.path("disk")]);
    allowed.changing.push(node.root_dir().join("hawser/unreadable"));
    let idle = LeakCheck::start(sandbox, allowed).unwrap();
    node.put_class().unwrap();
    apply(&node, "kept", KEPT);
    (node, idle)
}

fn apply(node: &Node<'_>, name: &str, yaml: &str) {
    let file = node.sandbox().path(&format!("{name}.yaml"));
    fs::write(&file, yaml).unwrap();
    node.client(&["apply", "-f", file.to_str().unwrap()]).unwrap();
    fs::remove_file(file).unwrap();
}

/// The volume of claim `c`, which is bound to it.
fn bound(node: &Node<'_>) -> String {
    eventually("the claim is bound", TIMEOUT, || {
        let claim = node.get("pvc", "c")?;
        ensure!(text(&claim["status"]["phase"]) == "Bound", "{claim}");
        Ok(text(&claim["spec"]["volumeName"]))
    })
    .unwrap()
}

fn wait_for_phase(node: &Node<'_>, volume: &str, phase: &str) {
    eventually("the volume has its phase", TIMEOUT, || {
        let found = text(&node.get("pv", volume)?["status"]["phase"]);
        ensure!(found == phase, "{volume} is {found}, not {phase}");
        Ok(())
    })
    .unwrap();
}

fn claim(class: &str) -> String {
    manifests::claim_of_class("c", "1Mi", class)
}

fn lose_the_claim(node: &mut Node<'_>) {
    node.kubelet().unwrap().kill().unwrap();
    let objects = node.root_dir().join("hawser/objects/PersistentVolumeClaim");
    fs::write(objects.join("default_c.json"), "").unwrap();
}

#[test]
fn a_claim_after_one_whose_record_was_lost_gets_that_ones_volume_and_no_earlier_one() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_with_classes(&sandbox, NodeOptions::default());
    let mut volumes = Vec::new();
    for _ in 0..3 {
        apply(&node, "c", &claim("kept"));
        let volume = bound(&node);
        assert!(!volumes.contains(&volume), "{volume} in {volumes:?}");
        volumes.push(volume);
        if volumes.len() < 3 {
            node.client(&["delete", "pvc", "c"]).unwrap();
        }
    }
    lose_the_claim(&mut node);
    node.start_kubelet().unwrap();
    apply(&node, "c", &claim("kept"));
    assert_eq!(bound(&node), volumes[2]);
    for earlier in &volumes[..2] {
        wait_for_phase(&node, earlier, "Released");
    }
    node.finish(&idle).unwrap();
}

#[test]
fn the_deletion_of_a_volume_goes_on_when_the_record_of_its_claim_is_lost() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_with_classes(&sandbox, NodeOptions::default());
    apply(&node, "c", &claim("hawser"));
    let volume = bound(&node);
    node.take_driver().unwrap().kill().unwrap();
    node.client(&["delete", "pvc", "c", "--wait=false"]).unwrap();
    wait_for_phase(&node, &volume, "Released");
    lose_the_claim(&mut node);
    node.start_kubelet().unwrap();
    // A claim of that name meanwhile waits for a volume of its own.
    apply(&node, "c", &claim("hawser"));
    node.start_driver().unwrap();
    eventually("the volume is deleted", TIMEOUT, || {
        ensure!(node.get("pv", &volume).is_err(), "{volume} is there");
        Ok(())
    })
    .unwrap();
    assert_ne!(bound(&node), volume);
    assert_eq!(fs::read_dir(node.pool().join("volumes")).unwrap().count(), 1);
    node.finish(&idle).unwrap();
}

/// Takes every byte of the disk until it is removed.
fn fill(disk: &Path) -> std::path::PathBuf {
    let path = disk.join("filler");
    let mut file = File::create(&path).unwrap();
    for size in [1 << 20, 1 << 12, 1] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
    path
}

#[test]
fn a_kept_volume_whose_claim_was_deleted_on_a_full_disk_is_released_and_can_be_deleted() {
    let sandbox = Sandbox::new();
    let disk = sandbox.make_dir("disk").unwrap();
    let flags = linux::mount::MountFlags::default();
    linux::mount::mount_fs("tmpfs", "disk", &disk, flags, "size=64m").unwrap();
    let options = NodeOptions { disk: Some(disk.clone()), ..NodeOptions::default() };
    let (mut node, idle) = node_with_classes(&sandbox, options);
    let deleted_on_a_full_disk = || {
        apply(&node, "c", &claim("kept"));
        let volume = bound(&node);
        let filler = fill(&disk);
        node.client(&["delete", "pvc", "c"]).unwrap();
        (volume, filler)
    };
    let (first, filler) = deleted_on_a_full_disk();
    fs::remove_file(filler).unwrap();
    wait_for_phase(&node, &first, "Released");
    let (second, filler) = deleted_on_a_full_disk();
    node.client(&["delete", "pv", &second]).unwrap();
    fs::remove_file(filler).unwrap();

    let (third, filler) = deleted_on_a_full_disk();
    node.kubelet().unwrap().kill().unwrap();
    fs::remove_file(filler).unwrap();
    node.start_kubelet().unwrap();
    wait_for_phase(&node, &third, "Released");
    for volume in [first, third] {
        node.client(&["delete", "pv", &volume]).unwrap();
    }
    node.finish(&idle).unwrap();
}

#[test]
fn a_claim_whose_volumes_record_was_lost_says_so_until_the_volume_is_applied_again() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_with_classes(&sandbox, NodeOptions::default());
    apply(&node, "c", &claim("hawser"));
    let volume = bound(&node);
    let described = node.client(&["get", "pv", &volume, "-o", "yaml"]).unwrap();
    node.kubelet().unwrap().kill().unwrap();
    let objects = node.root_dir().join("hawser/objects/PersistentVolume");
    fs::write(objects.join(format!("_{volume}.json")), "").unwrap();
    node.start_kubelet().unwrap();
    eventually("the claim is lost", TIMEOUT, || {
        let claim = node.get("pvc", "c")?;
        ensure!(text(&claim["status"]["phase"]) == "Lost", "{claim}");
        Ok(())
    })
    .unwrap();
    let shown = node.client(&["describe", "pvc", "c"]).unwrap();
    assert!(
        shown.contains("Bound claim has lost its PersistentVolume. Data on the volume is lost!"),
        "{shown}"
    );
    apply(&node, "v", &described);
    assert_eq!(bound(&node), volume);
    node.client(&["delete", "pvc", "c"]).unwrap();
    assert!(node.get("pv", &volume).is_err(), "the volume goes with its claim");
    assert_eq!(fs::read_dir(node.pool().join("volumes")).unwrap().count(), 0);
    node.finish(&idle).unwrap();
}
