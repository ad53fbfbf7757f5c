//! Files that the kubelet makes for a container and the container writes: it can keep every other
//! call on such a file waiting, so the kubelet makes none while a container has it.

use tests::attacker::IMAGE;
use tests::node::TIMEOUT;
use tests::{Sandbox, eventually, node::text};

use crate::node;

/// Has /etc/hosts for ever.
const WRITER: &str = "stat -c %i /etc/hosts > /seen/writer
while :; do echo 6.6.6.6 evil >> /etc/hosts; usleep 100; done";
/// Tells what others wrote to its own and which inode it is, changes it and ends.
const RESTARTED: &str = "grep evil /etc/hosts >> /seen/evil
stat -c %i /etc/hosts >> /seen/inodes
echo 6.6.6.6 evil >> /etc/hosts";

fn pod() -> String {
    let container = |(name, script): (&str, &str)| {
        format!(
            "    - name: {name}
      image: {IMAGE}
      imagePullPolicy: IfNotPresent
      command: [/busybox, sh, -c, {script:?}]
      volumeMounts: [{{name: seen, mountPath: /seen}}]
"
        )
    };
    let containers: String = [("writer", WRITER), ("restarted", RESTARTED)].map(container).concat();
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: hosts, namespace: default}}
spec:
  restartPolicy: Always
  terminationGracePeriodSeconds: 1
  volumes: [{{name: seen, emptyDir: {{}}}}]
  containers:
{containers}"
    )
}

#[test]
fn each_start_of_a_container_has_an_etc_hosts_of_its_own() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_manifest("hosts.yaml", &pod()).unwrap();
    node.wait_for_phase("hosts", "Running").unwrap();
    let uid = text(&node.get("pod", "hosts").unwrap()["metadata"]["uid"]);
    let seen = node.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/seen");
    let lines = |name: &str| -> anyhow::Result<Vec<String>> {
        Ok(std::fs::read_to_string(seen.join(name))?.lines().map(str::to_owned).collect())
    };
    let inodes = eventually("the container starts a third time", TIMEOUT, || {
        let inodes = lines("inodes")?;
        anyhow::ensure!(inodes.len() >= 3, "{inodes:?}");
        Ok(inodes)
    });
    let writer = &lines("writer").unwrap()[0];
    assert!(!inodes.unwrap().contains(writer), "two containers have one file");
    assert_eq!(std::fs::read_to_string(seen.join("evil")).unwrap(), "", "what another one wrote");
    node.finish(&idle).unwrap();
}
