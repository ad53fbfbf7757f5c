//! Directories nested deeper than any stack, any table of descriptors and any path.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use linux::mount::{self, MountFlags};
use serde_json::json;
use tests::attacker::Attack;
use tests::manifests::Pod;
use tests::node::TIMEOUT;
use tests::{LeakCheck, Node, NodeOptions, Sandbox, attacker, eventually};

/// From the inside to the outside, so that no path is long: what there is moves into a
/// hundred new directories, three hundred times.
const DEEPEN: &str = "
p=$(printf 'd/%.0s' $(seq 100))
deepen() {
  cd $1 && mkdir deep
  for i in $(seq 300); do mkdir -p new/$p && mv deep new/$p && mv new deep || exit 1; done
}
deepen /scratch
deepen /data
echo deep
";

/// The node's directory is a tmpfs: what counts is the depth, not the disk's pace.
fn node_on_tmpfs(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let mut node = Node::prepare(sandbox, NodeOptions::default()).expect("the node's directories");
    mount::mount_fs("tmpfs", "k", &node.root_dir(), MountFlags::default(), "").expect("mount");
    node.start_driver().expect("the driver starts");
    node.start_kubelet().expect("the kubelet starts");
    node.wait_until_registered().expect("the driver is registered");
    attacker::install(&node).expect("the attacker's image");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put the class");
    (node, idle)
}

fn finish(mut node: Node<'_>, idle: &LeakCheck) {
    assert!(node.kubelet().unwrap().ended().unwrap().is_none(), "the kubelet lives");
    let root = node.root_dir();
    node.finish(idle).unwrap();
    assert!(linux::mountinfo::at(&root).unwrap().is_some(), "the user's own mount stays");
    mount::unmount(&root, mount::UnmountMode::Detach).unwrap();
}

#[test]
fn a_pod_that_nests_thirty_thousand_directories_is_removed_and_the_kubelet_lives() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_on_tmpfs(&sandbox);
    let attack = Attack::new("digger", DEEPEN)
        .with_pod_fields("volumes: [{name: scratch, emptyDir: {}}]")
        .with_container_fields("volumeMounts: [{name: scratch, mountPath: /scratch}]");
    node.put_manifest("digger.yaml", &attack.yaml()).unwrap();
    node.wait_for_phase("digger", "Succeeded").unwrap();
    assert!(node.logs("digger").unwrap().contains("deep"));
    // Killed in the middle of the removal, and started again on what is left.
    node.remove_manifest("digger.yaml").unwrap();
    node.kubelet().unwrap().kill().unwrap();
    node.start_kubelet().unwrap();
    node.wait_for_no_pod("digger").unwrap();
    eventually("the pod's directories are gone", TIMEOUT, || {
        ensure!(is_empty(&node.root_dir().join("pods"))?, "{}", node.outputs());
        Ok(())
    })
    .unwrap();
    finish(node, &idle);
}

#[test]
fn a_layer_of_deeply_nested_directories_is_taken_back_and_the_kubelet_lives() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_on_tmpfs(&sandbox);
    let archive = sandbox.path("i/deep.tar");
    write_deep_image(&archive).unwrap();
    let pod = Pod { image: "hawser.dev/deep:test", ..Pod::new("deep", &["x"]) };
    node.put_manifest("deep.yaml", &pod.yaml()).unwrap();
    node.wait_for_event("Failed", &["hawser.dev/deep:test"]).unwrap();
    eventually("nothing is left of the layer", TIMEOUT, || {
        let layers = find_layers(&node.root_dir())?;
        let half_made: Vec<_> = fs::read_dir(layers)?
            .map(|entry| Ok(entry?.file_name().display().to_string()))
            .filter(|name: &Result<String>| name.as_ref().is_ok_and(|name| name.starts_with('.')))
            .collect::<Result<_>>()?;
        ensure!(half_made.is_empty(), "{half_made:?}");
        Ok(())
    })
    .unwrap();
    fs::remove_file(&archive).unwrap();
    node.remove_manifest("deep.yaml").unwrap();
    node.wait_for_no_pod("deep").unwrap();
    finish(node, &idle);
}

fn is_empty(dir: &Path) -> Result<bool> {
    Ok(fs::read_dir(dir).with_context(|| dir.display().to_string())?.next().is_none())
}

fn find_layers(root: &Path) -> Result<std::path::PathBuf> {
    let places = ["hawser/runtime/images/layers", "hawser/images/layers"].map(|place| root.join(place));
    places.into_iter().find(|place| place.is_dir()).context("the runtime keeps its layers elsewhere")
}

/// An image whose one layer nests directories through a link, and whose configuration
/// names another layer: what was unpacked has to go again.
fn write_deep_image(archive: &Path) -> Result<()> {
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": { "Cmd": ["/x"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", "0".repeat(64))] },
    });
    tests::image::write_archive_of("hawser.dev/deep:test", &config, &deep_layer()?, archive)
}

fn deep_layer() -> Result<Vec<u8>> {
    let thousand = "d/".repeat(1000);
    let mut layer = tar::Builder::new(Vec::new());
    let mut from = String::new();
    for number in 0..2 {
        let path = format!("{from}{thousand}");
        layer.append_data(&mut header(tar::EntryType::Directory), &path, std::io::empty())?;
        let link = format!("l{number}");
        layer.append_link(&mut header(tar::EntryType::Symlink), &link, path.trim_end_matches('/'))?;
        from = format!("{link}/");
    }
    Ok(layer.into_inner()?)
}

fn header(kind: tar::EntryType) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(0);
    header.set_mode(0o755);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
