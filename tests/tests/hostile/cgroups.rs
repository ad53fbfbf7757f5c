//! What a pod sees of cgroups: its own limits, where programs look for them, and
//! nothing of another pod.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

use std::path::{Path, PathBuf};

use anyhow::bail;
use tests::attacker::Attack;
use tests::node::TIMEOUT;
use tests::{Node, Sandbox, eventually};

use crate::{node, run};

/// On cgroup v2 the first of each pair is there, on v1 the second.
const LOOK: &str = "
cd /sys/fs/cgroup
echo memory $(cat memory.max memory/memory.limit_in_bytes 2>/dev/null)
echo cpu $(cat cpu.max cpu/cpu.cfs_quota_us 2>/dev/null | cut -d' ' -f1)
echo pids $(cat pids.max pids/pids.max 2>/dev/null)
echo tcp $(cat memory/memory.kmem.tcp.limit_in_bytes 2>/dev/null)
echo processes $(cat cgroup.procs memory/cgroup.procs 2>/dev/null | sort -u | head -n1)
";

const LIMITS: &str = "resources: {limits: {memory: 64Mi, cpu: 500m}}";

#[test]
fn a_pod_reads_its_own_limits_below_sys_fs_cgroup() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let log = run(&node, &Attack::new("reader", LOOK).with_container_fields(LIMITS)).unwrap();
    // On cgroup v1 TCP's buffers count apart.
    let memory = linux::cgroup::Hierarchies::detect().unwrap().dir("memory", Path::new("/")).unwrap();
    let tcp = if memory.join("memory.kmem.tcp.limit_in_bytes").exists() { " 67108864" } else { "" };
    assert_eq!(log, format!("memory 67108864\ncpu 50000\npids max\ntcp{tcp}\nprocesses 1\n"));
    node.finish(&idle).unwrap();
}

#[test]
fn a_default_pod_changes_no_cgroup_and_sees_none_but_its_own() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    // Each try that works is an answer in the log.
    let script = "
for dir in /sys/fs/cgroup /sys/fs/cgroup/*; do
    mkdir $dir/mine 2>/dev/null && echo made $dir/mine
done
for file in $(find /sys/fs/cgroup -name memory.max -o -name memory.limit_in_bytes -o -name cgroup.procs -o -name pids.max); do
    (echo 0 > $file) 2>/dev/null && echo wrote $file
done
umount /sys/fs/cgroup 2>/dev/null && echo unmounted
mount -o remount,rw /sys/fs/cgroup 2>/dev/null && echo remounted
find /sys/fs/cgroup | grep -e pod -e hawser -e kube
grep -e pod -e hw- /proc/self/cgroup /proc/self/mountinfo | grep -e 'cgroup:' -e ' - cgroup'
grep -c ' - cgroup2* ' /proc/self/mountinfo
";
    let log = run(&node, &Attack::new("attacker", script)).unwrap();
    let count: u32 = log.trim().parse().unwrap_or_else(|_| panic!("something worked, or was seen: {log}"));
    assert!(count > 0, "no cgroup is mounted in the pod");
    node.finish(&idle).unwrap();
}

#[test]
fn a_privileged_pod_may_make_groups_and_leaves_none() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    // Its own group, in the host's tree: the path is that of the controller, or of v2.
    let script = "
dir=/sys/fs/cgroup
[ -e $dir/cgroup.procs ] || dir=$dir/pids
path=$(grep -e ':pids:' -e '^0::' /proc/self/cgroup | head -n1 | cut -d: -f3)
mkdir $dir$path/mine || exit 1
sleep 100 &
echo $! > $dir$path/mine/cgroup.procs && echo moved
";
    let attack =
        Attack::new("privileged", script).with_container_fields("securityContext: {privileged: true}");
    assert_eq!(run(&node, &attack).unwrap(), "moved\n");
    node.finish(&idle).unwrap();
}

/// The lines of /proc/PID/cgroup of a pod that sleeps, as the host sees them.
fn groups_of_sleeper(node: &Node<'_>) -> Vec<String> {
    let attack = Attack::new("sleeper", "exec sleep 1000");
    node.put_manifest("sleeper.yaml", &attack.yaml()).unwrap();
    node.wait_for_phase("sleeper", "Running").unwrap();
    // The pod is Running before its shell has become sleep(1).
    let pid = eventually("the pod's shell is sleep(1)", TIMEOUT, || {
        let found = node.processes("sleep")?;
        let [pid] = found[..] else { bail!("{found:?}") };
        Ok(pid)
    })
    .unwrap();
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    groups.lines().map(str::to_owned).collect()
}

/// Root in a user namespace may mount every hierarchy, from its process's group on: from the
/// host's root, where the container is in no group of its own.
#[test]
fn a_pod_has_a_group_of_its_own_in_every_hierarchy() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let groups = groups_of_sleeper(&node);
    let paths: Vec<&Path> =
        groups.iter().map(|line| Path::new(line.splitn(3, ':').nth(2).unwrap())).collect();
    let pods = sandbox.cgroup_root().join("kubepods");
    let limited = paths.iter().find(|path| path.starts_with(&pods)).unwrap();
    let node_group: PathBuf = pods.iter().take(2).collect();
    for path in &paths {
        assert!(path.starts_with(&node_group), "{path:?}: not below {node_group:?}");
        assert_eq!(path.file_name(), limited.file_name(), "{path:?}: not the container's own");
    }
    node.remove_manifest("sleeper.yaml").unwrap();
    node.finish(&idle).unwrap();
}

/// A process that cgroup v1's freezer has stopped takes no SIGKILL.
#[test]
fn a_pod_that_freezes_itself_is_stopped() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    for line in groups_of_sleeper(&node) {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let root = Path::new("/sys/fs/cgroup");
        let (file, frozen) = match controllers {
            "freezer" => (root.join("freezer").join(&path[1..]).join("freezer.state"), "FROZEN"),
            "" => (unified(root).join(&path[1..]).join("cgroup.freeze"), "1"),
            _ => continue,
        };
        std::fs::write(&file, frozen).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    node.remove_manifest("sleeper.yaml").unwrap();
    node.finish(&idle).unwrap();
}

/// Where cgroup v2 is mounted.
fn unified(root: &Path) -> PathBuf {
    if root.join("cgroup.procs").exists() { root.to_path_buf() } else { root.join("unified") }
}
