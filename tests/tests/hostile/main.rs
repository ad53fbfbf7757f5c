//! Attacks on a running node by what it runs and reads: pods, images, daemons,
//! manifests and full disks. Each test is named as the promise that its attack
//! tries to break; SECURITY.md lists the promises.

mod cgroups;
mod deep_trees;
mod devices;
mod disk_limits;
mod fs_group;
mod full_disk;
mod images;
mod lost_claims;
mod manifests;
mod mounts;
mod own_files;
mod processes;
mod programs;
mod seccomp;
mod silent_daemons;
mod subvolumes;
mod torn_records;
mod users;

use anyhow::Result;
use tests::attacker::{self, Attack};
use tests::{LeakCheck, Node, NodeOptions, Sandbox};

/// A node that has the attacker's image and class `hawser`, and what it looked like before any pod.
fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    node_with(sandbox, NodeOptions::default())
}

fn node_with(sandbox: &Sandbox, options: NodeOptions) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, options).expect("the node starts");
    attacker::install(&node).expect("the attacker's image");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put the class");
    (node, idle)
}

/// Runs `attack` until its pod has ended with code 0; its log.
fn run(node: &Node<'_>, attack: &Attack<'_>) -> Result<String> {
    node.put_manifest(&format!("{}.yaml", attack.name), &attack.yaml())?;
    node.wait_for_phase(attack.name, "Succeeded")?;
    node.logs(attack.name)
}
