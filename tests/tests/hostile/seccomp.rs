//! System calls that a default pod has no use for.

use tests::attacker::Attack;
use tests::manifests::claim;
use tests::{NodeOptions, Sandbox};

use crate::{node_with, run};

#[test]
fn with_seccomp_default_a_default_pod_makes_no_namespace_and_its_volume_works() {
    let sandbox = Sandbox::new();
    let options =
        NodeOptions { kubelet_flags: vec!["--seccomp-default".to_owned()], ..NodeOptions::default() };
    let (node, idle) = node_with(&sandbox, options);
    node.put_manifest("claim.yaml", &claim("data", "64Mi")).unwrap();
    let script = "grep '^Seccomp:' /proc/self/status
unshare -U true 2>/dev/null && echo 'made a user namespace'
unshare -n true 2>/dev/null && echo 'made a network namespace'
dmesg >/dev/null 2>&1 && echo 'read the log of the kernel'
mount -t tmpfs none /tmp 2>/dev/null && echo mounted
echo kept >/data/file && sync && cat /data/file
ls / | wc -l >/data/count && echo works";
    let attack = Attack::new("filtered", script)
        .with_pod_fields("volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]")
        .with_container_fields("volumeMounts: [{name: data, mountPath: /data}]");
    assert_eq!(run(&node, &attack).unwrap(), "Seccomp:\t2\nkept\nworks\n");
    // A pod that asks for Unconfined gets it.
    let unconfined = Attack::new("unconfined", "grep '^Seccomp:' /proc/self/status")
        .with_pod_fields("securityContext: {seccompProfile: {type: Unconfined}}");
    assert_eq!(run(&node, &unconfined).unwrap(), "Seccomp:\t0\n");
    node.finish(&idle).unwrap();
}
