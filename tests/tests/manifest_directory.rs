//! Manifests describe, they do not own data: whatever happens to the directory,
//! with the kubelet running or stopped, no claim and no byte is deleted.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use linux::mount::{MountFlags, UnmountMode};
use tests::manifests::{self, Pod};
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox};

const RUNNING: Pod<'_> = Pod {
    name: "user",
    args: &["sleep", "forever"],
    claim: Some("c"),
    image: tests::examples::DEMO_IMAGE,
    command: "/demo-app",
    restart_policy: "Always",
};

/// What the manifest directory stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Directory {
    Plain,
    /// A file system of its own, so that it can be unmounted.
    MountPoint,
}

impl Directory {
    fn mount(self, node: &Node<'_>) {
        if self == Self::MountPoint {
            linux::mount::mount_fs("tmpfs", "manifests", &node.manifests(), MountFlags::default(), "")
                .expect("mount");
        }
    }
}

/// A node whose claim `c` holds the file `note`, and a pod that uses it.
fn node_with_data(sandbox: &Sandbox, directory: Directory) -> (Node<'_>, LeakCheck) {
    let mut node = Node::prepare(sandbox, NodeOptions::default()).expect("directories");
    directory.mount(&node);
    node.start_driver().expect("the driver starts");
    node.start_kubelet().expect("the kubelet starts");
    node.wait_until_registered().expect("the driver registers");
    let idle = node.leak_check().expect("the kernel answers");
    put_everything(&node).expect("put");
    let writer = Pod::new("writer", &["write", "/data/note", "kept"]).with_claim("c");
    node.put_manifest("writer.yaml", &writer.yaml()).expect("put");
    node.wait_for_phase("writer", "Succeeded").expect("the note is written");
    node.remove_manifest("writer.yaml").expect("remove");
    node.wait_for_no_pod("writer").expect("the writer goes");
    node.wait_for_phase("user", "Running").expect("the user runs");
    (node, idle)
}

fn put_everything(node: &Node<'_>) -> Result<()> {
    node.put_class()?;
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi"))?;
    node.put_manifest("user.yaml", &RUNNING.yaml())
}

/// The claim is bound to the volume it was bound to, and the data are there.
fn assert_kept(node: &Node<'_>) {
    let claim = node.get("pvc", "c").expect("the claim is kept");
    assert_eq!(text(&claim["status"]["phase"]), "Bound", "{claim}");
    assert_eq!(node.list("pv").expect("volumes").len(), 1);
    assert!(holds_note(&node.pool()).expect("the pool"), "the data are in the pool");
}

fn holds_note(dir: &Path) -> Result<bool> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry.context("an entry")?.path();
        let found = if path.is_dir() {
            holds_note(&path)?
        } else {
            path.ends_with("note") && fs::read_to_string(&path)?.trim_end() == "kept"
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A new pod reads the note.
fn assert_readable(node: &Node<'_>) {
    let reader = Pod::new("reader", &["cat", "/data/note"]).with_claim("c");
    node.put_manifest("reader.yaml", &reader.yaml()).expect("put");
    node.wait_for_phase("reader", "Succeeded").expect("the reader runs");
    assert_eq!(node.logs("reader").expect("its log"), "kept\n");
}

#[test]
fn emptying_the_directory_stops_pods_and_deletes_no_data() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with_data(&sandbox, Directory::Plain);
    for entry in fs::read_dir(node.manifests()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    node.wait_for_no_pods().unwrap();
    node.wait_for_event("ManifestMissing", &["c"]).unwrap();
    assert_kept(&node);
    put_everything(&node).unwrap();
    assert_readable(&node);
    node.finish(&idle).unwrap();
}

#[test]
fn renaming_the_directory_stops_no_pod_and_deletes_no_data() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with_data(&sandbox, Directory::Plain);
    let aside = sandbox.path("m.aside");
    fs::rename(node.manifests(), &aside).unwrap();
    node.wait_for_event("ManifestDirectoryMissing", &[&node.manifests().display().to_string()]).unwrap();
    assert_kept(&node);
    assert_runs_on(&node);
    fs::rename(&aside, node.manifests()).unwrap();
    node.wait_for_event("ManifestDirectoryFound", &[]).unwrap();
    assert_runs_on(&node);
    assert_readable(&node);
    node.finish(&idle).unwrap();
}

#[test]
fn unmounting_the_directory_stops_no_pod_and_deletes_no_data() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with_data(&sandbox, Directory::MountPoint);
    linux::mount::unmount(&node.manifests(), UnmountMode::Detach).unwrap();
    node.wait_for_event("ManifestDirectoryMissing", &[&node.manifests().display().to_string()]).unwrap();
    assert_kept(&node);
    assert_runs_on(&node);
    Directory::MountPoint.mount(&node);
    put_everything(&node).unwrap();
    node.wait_for_event("ManifestDirectoryFound", &[]).unwrap();
    assert_runs_on(&node);
    assert_readable(&node);
    node.finish(&idle).unwrap();
}

#[test]
fn a_file_saved_by_rename_is_a_change_and_not_a_deletion() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with_data(&sandbox, Directory::Plain);
    let started = text(&node.get("pod", "user").unwrap()["metadata"]["uid"]);
    // As editors do: the old file goes aside, the new one comes under its name.
    for file in ["claim.yaml", "user.yaml"] {
        let content = fs::read_to_string(node.manifests().join(file)).unwrap();
        fs::rename(node.manifests().join(file), sandbox.path("backup")).unwrap();
        node.put_manifest(file, &content).unwrap();
    }
    node.wait_for_phase("user", "Running").unwrap();
    assert_kept(&node);
    assert_readable(&node);
    assert_eq!(
        text(&node.get("pod", "user").unwrap()["metadata"]["uid"]),
        started,
        "the pod was not replaced"
    );
    fs::remove_file(sandbox.path("backup")).unwrap();
    node.finish(&idle).unwrap();
}

/// What the kubelet does with a pod whose file is not there when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The directory is there and the file is not: somebody removed it.
    Stopped,
    /// The directory itself is gone: nobody said anything about the pod.
    RunsOn,
}

#[test]
fn a_directory_emptied_while_the_kubelet_was_stopped_deletes_no_data() {
    changed_while_stopped(Directory::Plain, Fate::Stopped, |node| {
        node.remove_all_manifests().expect("remove");
    });
}

#[test]
fn a_directory_renamed_while_the_kubelet_was_stopped_deletes_no_data() {
    changed_while_stopped(Directory::Plain, Fate::RunsOn, |node| {
        let aside = node.sandbox().path("m.aside");
        fs::rename(node.manifests(), &aside).expect("rename");
        fs::remove_dir_all(aside).expect("remove");
    });
}

#[test]
fn a_directory_unmounted_while_the_kubelet_was_stopped_deletes_no_data() {
    changed_while_stopped(Directory::MountPoint, Fate::RunsOn, |node| {
        linux::mount::unmount(&node.manifests(), UnmountMode::Detach).expect("unmount");
    });
}

fn changed_while_stopped(directory: Directory, fate: Fate, change: impl FnOnce(&Node<'_>)) {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_with_data(&sandbox, directory);
    let status = node.kubelet().expect("started").stop(TIMEOUT).expect("it ends on SIGTERM");
    assert!(status.success(), "{status}");
    change(&node);
    node.start_kubelet().expect("it starts again");
    match fate {
        Fate::Stopped => node.wait_for_no_pod("user").expect("the pod's file is gone"),
        Fate::RunsOn => {
            node.wait_for_event("ManifestDirectoryMissing", &[]).expect("an event");
            assert_runs_on(&node);
        }
    }
    assert_kept(&node);
    fs::create_dir_all(node.manifests()).expect("mkdir");
    directory.mount(&node);
    put_everything(&node).expect("put");
    node.wait_for_phase("user", "Running").expect("healed");
    assert_readable(&node);
    node.finish(&idle).expect("nothing is left");
}

fn assert_runs_on(node: &Node<'_>) {
    // A kubelet that has just started has to look first.
    node.wait_for_phase("user", "Running").expect("it runs on");
    assert_eq!(node.processes("demo-app").expect("processes").len(), 1);
}
