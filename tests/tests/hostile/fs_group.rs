//! A container that swaps directories for links while its volume is given to a group.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tests::attacker::Attack;
use tests::{Sandbox, manifests};

use crate::node;

/// Many, so that a walk is in the directory when it becomes a link.
const FILES: u32 = 1500;

/// The host's: root's, and nobody else's business.
fn victim(sandbox: &Sandbox) -> PathBuf {
    let dir = sandbox.make_dir("victim").unwrap();
    for number in 0..FILES {
        let file = dir.join(number.to_string());
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
    dir
}

/// Fills `/v/x` with names of the victim's files, then swaps it for a link to the victim, for ever.
fn swap_for(victim: &Path) -> String {
    format!(
        "umask 0
mkdir -p /v/x && cd /v
for i in $(seq 0 {last}); do : > x/$i; done
ln -s {victim} l
echo swapping
while :; do mv x a; mv l x; mv x l; mv a x; done
",
        last = FILES - 1,
        victim = victim.display()
    )
}

#[track_caller]
fn assert_untouched(victim: &Path) {
    let of = |path: &Path, mode| {
        let found = fs::symlink_metadata(path).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (0, 0, mode), "{}", path.display());
    };
    of(victim, 0o700);
    for number in 0..FILES {
        of(&victim.join(number.to_string()), 0o600);
    }
}

#[test]
fn the_hosts_files_keep_their_group_while_an_empty_dir_is_given_to_the_pods() {
    let sandbox = Sandbox::new();
    let victim = victim(&sandbox);
    let (mut node, idle) = node(&sandbox);
    let script = swap_for(&victim);
    let attack = Attack::new("swapper", &script)
        .with_pod_fields("securityContext: {fsGroup: 2000}\nvolumes: [{name: v, emptyDir: {}}]")
        .with_container_fields("volumeMounts: [{name: v, mountPath: /v}]");
    node.put_manifest("swapper.yaml", &attack.yaml()).unwrap();
    node.wait_for_log("swapper", &["swapping"]).unwrap();
    // Each start mounts the volumes of running pods again.
    for _ in 0..10 {
        node.kubelet().unwrap().kill().unwrap();
        node.start_kubelet().unwrap();
        node.wait_for_phase("swapper", "Running").unwrap();
    }
    assert_untouched(&victim);
    node.finish(&idle).unwrap();
    fs::remove_dir_all(&victim).unwrap();
}

#[test]
fn the_hosts_files_keep_their_group_while_pods_of_other_groups_start_on_a_shared_volume() {
    let sandbox = Sandbox::new();
    let victim = victim(&sandbox);
    let (node, idle) = node(&sandbox);
    node.put_manifest("claim.yaml", &manifests::claim("shared", "64Mi")).unwrap();
    let script = swap_for(&victim);
    let volumes = "volumes: [{name: v, persistentVolumeClaim: {claimName: shared}}]";
    let mounts = "volumeMounts: [{name: v, mountPath: /v}]";
    let fields = format!("securityContext: {{fsGroup: 2000}}\n{volumes}");
    let attack = Attack::new("swapper", &script).with_pod_fields(&fields).with_container_fields(mounts);
    node.put_manifest("swapper.yaml", &attack.yaml()).unwrap();
    node.wait_for_log("swapper", &["swapping"]).unwrap();
    for number in 0..8 {
        let (name, fields) =
            (format!("user-{number}"), format!("securityContext: {{fsGroup: {}}}\n{volumes}", 3000 + number));
        let user = Attack::new(&name, "ls -ldn /v").with_pod_fields(&fields).with_container_fields(mounts);
        let log = crate::run(&node, &user).unwrap();
        assert!(log.contains(&(3000 + number).to_string()), "the last pod wins: {log}");
    }
    assert_untouched(&victim);
    node.finish(&idle).unwrap();
    fs::remove_dir_all(&victim).unwrap();
}
