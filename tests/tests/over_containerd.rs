//! The part of `cargo xtask test --runtime containerd` that every `cargo test` has: whole suites, whose nodes use
//! containerd because this test has this name ([`tests::NodeRuntime`]).

#[path = "claims.rs"]
mod claims;
#[path = "pod_changes.rs"]
mod pod_changes;
#[path = "pod_volumes.rs"]
mod pod_volumes;

use anyhow::{Result, ensure};
use tests::manifests::Pod;
use tests::node::TIMEOUT;
use tests::{Node, Sandbox, eventually};

fn is_node(node: &Node<'_>, status: &str) -> Result<()> {
    let row = node.client(&["get", "nodes", "--no-headers"])?;
    ensure!(row.split_whitespace().nth(1) == Some(status), "{row}");
    Ok(())
}

#[test]
fn pods_go_on_while_containerd_is_killed_and_started_again() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = Node::start_with_web(&sandbox).expect("it serves");
    let before = node.get("pod", "web").expect("it runs");
    node.kill_containerd().expect("killed");
    let late = Pod::new("late", &["sleep", "forever"]);
    node.put_manifest("late.yaml", &late.yaml()).expect("put");
    eventually("the kubelet reports that its runtime does not answer", TIMEOUT, || {
        ensure!(node.kubelet()?.output().contains("cannot observe the pod"), "not yet");
        Ok(())
    })
    .expect("reported");
    // The kubelet waits 30 s for its runtime. Only controllers of a cluster would change the pod's condition.
    eventually("the node is not ready", 2 * TIMEOUT, || is_node(&node, "NotReady")).expect("it is not");
    let row = node.client(&["get", "pod", "web", "--no-headers"]).expect("the kubelet answers");
    assert!(row.contains("1/1"), "{row}");
    node.start_containerd_again().expect("it starts");
    node.wait_for_phase("late", "Running").expect("it runs");
    eventually("the node is ready again", TIMEOUT, || is_node(&node, "Ready")).expect("it is");
    let after = node.wait_for_phase("web", "Running").expect("it runs on");
    for field in ["containerID", "restartCount"] {
        let of = |pod: &serde_json::Value| pod["status"]["containerStatuses"][0][field].clone();
        assert_eq!(of(&before), of(&after), "{field}");
    }
    assert_eq!(node.client(&["exec", "web", "--", "/demo-app", "print", "x"]).expect("exec"), "x\n");
    node.finish(&idle).expect("nothing is left");
}
