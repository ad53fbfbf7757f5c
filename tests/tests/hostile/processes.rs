//! What a pod sees of other processes.

use tests::Sandbox;
use tests::attacker::Attack;

use crate::{node, run};

#[test]
fn a_default_pod_sees_no_process_but_its_own() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let log = run(&node, &Attack::new("looker", "for p in /proc/[0-9]*; do cat $p/comm; done")).unwrap();
    // The shell is process 1; `cat` is busybox itself, started once for each process.
    let strangers: Vec<&str> = log.lines().filter(|name| !["busybox", "sh", "cat"].contains(name)).collect();
    assert_eq!(strangers, Vec::<&str>::new(), "{log}");
    assert!(!log.is_empty());
    node.finish(&idle).unwrap();
}
