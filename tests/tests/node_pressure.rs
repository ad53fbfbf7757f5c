//! Pods within their limits go when the node itself runs out: of memory, of disk space, or of room for a
//! critical pod.

use std::fs;

use anyhow::{Context, Result, ensure};
use linux::cgroup::Hierarchies;
use serde_json::Value;
use tests::attacker::{self, Attack};
use tests::loop_device::{FileSystem, LoopMount};
use tests::node::{TIMEOUT, text};
use tests::node_runtime::NodeRuntime;
use tests::{Node, NodeOptions, Sandbox, eventually};

/// Of all pods together, 384 MiB. With the threshold of 134 MiB, only this limit decides on a machine that has
/// 1 GiB free.
const MEMORY_LIMIT: &str = "402653184";
const MOUNT: &str = "volumeMounts: [{name: scratch, mountPath: /scratch}]";
const MIB: u64 = 1 << 20;

fn options(flags: &[&str]) -> NodeOptions {
    NodeOptions {
        kubelet_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        ..NodeOptions::default()
    }
}

fn condition(node: &Node<'_>, name: &str) -> Result<Value> {
    let nodes = node.list("nodes")?;
    let conditions = nodes.first().context("a node")?["status"]["conditions"].clone();
    let found = conditions.as_array().and_then(|all| all.iter().find(|one| one["type"] == name).cloned());
    found.with_context(|| format!("{conditions}"))
}

fn put(node: &Node<'_>, attack: &Attack<'_>) {
    node.put_manifest(&format!("{}.yaml", attack.name), &attack.yaml()).expect("put");
}

/// Starts a pod that takes so much memory, and waits until it has it.
fn eat(node: &Node<'_>, name: &str, mebibytes: u64, more: &str, resources: &str) {
    start_eating(node, name, mebibytes, more, resources);
    node.wait_for_log(name, &["filled"]).expect("it has its memory");
}

fn start_eating(node: &Node<'_>, name: &str, mebibytes: u64, more: &str, resources: &str) {
    let script = format!("dd if=/dev/zero of=/scratch/f bs=1M count={mebibytes}\necho filled\nsleep 1000");
    let fields = format!("volumes: [{{name: scratch, emptyDir: {{medium: Memory}}}}]\n{more}");
    let container = format!("{MOUNT}\n{resources}");
    put(node, &Attack::new(name, &script).with_pod_fields(&fields).with_container_fields(&container));
}

fn limit_all_pods(sandbox: &Sandbox) {
    let group = sandbox.cgroup_root().join("kubepods");
    let hierarchies = Hierarchies::detect().expect("control groups");
    let dir = hierarchies.dir("memory", &group).expect("the controller");
    let files = ["memory.limit_in_bytes", "memory.max"].map(|file| dir.join(file));
    let file = files.iter().find(|file| file.exists()).expect("the group has a limit");
    fs::write(file, MEMORY_LIMIT).expect("limited");
}

fn refused(node: &Node<'_>, name: &str, message: &str) {
    put(node, &Attack::new(name, "sleep 1000"));
    let late = node.wait_for_phase(name, "Failed").expect("refused");
    assert_eq!(late["status"]["reason"], "Evicted", "{}", late["status"]);
    assert_eq!(late["status"]["message"], format!("Pod was rejected: {message}"));
}

#[test]
fn without_memory_the_pod_that_is_over_its_request_and_least_important_goes() {
    let sandbox = Sandbox::new();
    let node =
        Node::start(&sandbox, options(&["--eviction-hard=memory.available<134Mi"])).expect("it starts");
    attacker::install(&node).expect("the image");
    let idle = node.leak_check().expect("the kernel answers");
    let memory = "resources: {requests: {memory: 64Mi}}";
    eat(&node, "modest", 32, "", memory);
    limit_all_pods(&sandbox);
    eat(&node, "important", 90, "priority: 1000", "");
    eat(&node, "critical", 100, "priorityClassName: system-node-critical", "");
    assert_eq!(condition(&node, "MemoryPressure").expect("said")["status"], "False");
    // It may be evicted before it has all of it.
    start_eating(&node, "greedy", 60, "", "");
    let evicted = node.wait_for_phase("greedy", "Failed").expect("it is evicted");
    assert_eq!(evicted["status"]["reason"], "Evicted");
    let message = text(&evicted["status"]["message"]);
    assert!(
        message.starts_with("The node was low on resource: memory. Threshold quantity: 134Mi, available: ")
            && message.contains("Container attack was using ")
            && message.ends_with("request is 0, has larger consumption of memory. "),
        "{message}"
    );
    node.wait_for_event("EvictionThresholdMet", &["Attempting to reclaim memory"]).expect("said");
    node.wait_for_event("NodeHasInsufficientMemory", &["Node demo status is now"]).expect("said");
    let pressure = condition(&node, "MemoryPressure").expect("said");
    assert_eq!(
        (&pressure["status"], &pressure["reason"]),
        (&"True".into(), &"KubeletHasInsufficientMemory".into())
    );
    refused(&node, "late", "The node had condition: [MemoryPressure]. ");
    // A pod that says what it needs still starts.
    let welcome =
        Attack::new("welcome", "sleep 1000").with_container_fields("resources: {requests: {cpu: 1m}}");
    put(&node, &welcome);
    for name in ["welcome", "modest", "important", "critical"] {
        node.wait_for_phase(name, "Running").expect("it runs");
    }
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn without_disk_space_the_pod_that_uses_most_of_it_goes() {
    let sandbox = Sandbox::new();
    let disk = LoopMount::new(&sandbox, "disk", FileSystem::Ext4, 1 << 30).expect("a file system");
    let free = nix::sys::statvfs::statvfs(disk.dir()).expect("its size");
    let available = free.blocks_available() * free.fragment_size();
    let hard = format!("--eviction-hard=nodefs.available<{}", available - 300 * MIB);
    let options = NodeOptions { disk: Some(disk.dir().to_owned()), ..options(&[&hard]) };
    let mut node = Node::start(&sandbox, options).expect("it starts");
    attacker::install(&node).expect("the image");
    let small = "dd if=/dev/zero of=/tmp/f bs=1M count=5\nsleep 1000";
    put(&node, &Attack::new("small", small));
    node.wait_for_phase("small", "Running").expect("it runs");
    let large = "dd if=/dev/zero of=/tmp/f bs=1M count=320\nsleep 1000";
    put(&node, &Attack::new("large", large));
    let evicted = node.wait_for_phase("large", "Failed").expect("it is evicted");
    assert_eq!(evicted["status"]["reason"], "Evicted");
    let message = text(&evicted["status"]["message"]);
    assert!(
        message.starts_with("The node was low on resource: ephemeral-storage. Threshold quantity: ")
            && message.ends_with("request is 0, has larger consumption of ephemeral-storage. "),
        "{message}"
    );
    assert_eq!(condition(&node, "DiskPressure").expect("said")["reason"], "KubeletHasDiskPressure");
    refused(&node, "late", "The node had condition: [DiskPressure]. ");

    // Once its space is free, another kubelet finds no pressure.
    eventually("its space is free", TIMEOUT, || {
        let free = nix::sys::statvfs::statvfs(disk.dir())?;
        let now = free.blocks_available() * free.fragment_size();
        ensure!(now > available - 200 * MIB, "{now} bytes");
        Ok(())
    })
    .expect("freed");
    node.kubelet().expect("it runs").kill().expect("killed");
    node.start_kubelet().expect("it starts");
    put(&node, &Attack::new("later", "sleep 1000"));
    for name in ["later", "small"] {
        node.wait_for_phase(name, "Running").expect("it runs");
    }
    assert_eq!(node.get("pod", "large").expect("the pod")["status"]["reason"], "Evicted");
    assert_eq!(condition(&node, "DiskPressure").expect("said")["status"], "False");
    node.remove_all_manifests().expect("removed");
    node.wait_for_no_pods().expect("they go");
    node.stop().expect("it stops");
    disk.unmount().expect("nothing is open in it");
}

/// A pod whose container writes to its layer and to an emptyDir.
fn fill(node: &Node<'_>, name: &str, layer_mebibytes: u64, scratch_mebibytes: u64) {
    let write = |path: &str, mebibytes| format!("dd if=/dev/zero of={path}/f bs=1M count={mebibytes}");
    let script =
        [write("/tmp", layer_mebibytes), write("/scratch", scratch_mebibytes), "sleep 1000".to_owned()];
    let script = script.join("\n");
    let attack = Attack::new(name, &script).with_pod_fields("volumes: [{name: scratch, emptyDir: {}}]");
    put(node, &attack.with_container_fields(MOUNT));
}

#[test]
fn of_two_disks_the_full_one_decides_which_pod_goes() {
    let sandbox = Sandbox::new();
    let disk = LoopMount::new(&sandbox, "disk", FileSystem::Ext4, 1 << 30).expect("a file system");
    let images = LoopMount::new(&sandbox, "images", FileSystem::Ext4, 1 << 30).expect("another");
    let of_runtime = format!("disk/{}", NodeRuntime::default().dir());
    let of_runtime = sandbox.make_dir(&of_runtime).expect("made");
    linux::mount::bind(images.dir(), &of_runtime).expect("bound");
    let limit = |disk: &LoopMount, used: u64| {
        let free = nix::sys::statvfs::statvfs(disk.dir()).expect("its size");
        free.blocks_available() * free.fragment_size() - used * MIB
    };
    let hard = format!(
        "--eviction-hard=nodefs.available<{},imagefs.available<{}",
        limit(&disk, 300),
        limit(&images, 450)
    );
    let flags = options(&[&hard, "--eviction-pressure-transition-period=1s"]);
    let options = NodeOptions { disk: Some(disk.dir().to_owned()), ..flags };
    let node = Node::start(&sandbox, options).expect("it starts");
    attacker::install(&node).expect("the image");
    fill(&node, "layer", 400, 1);
    node.wait_for_phase("layer", "Running").expect("it runs");
    fill(&node, "scratch", 1, 310);
    let evicted = node.wait_for_phase("scratch", "Failed").expect("it is evicted");
    assert_eq!(evicted["status"]["reason"], "Evicted", "{}", evicted["status"]);
    node.wait_for_phase("layer", "Running").expect("it runs on");

    eventually("the pressure is over", TIMEOUT, || {
        let pressure = condition(&node, "DiskPressure")?;
        ensure!(pressure["status"] == "False", "{pressure}");
        Ok(())
    })
    .expect("no pressure");
    node.remove_manifest("layer.yaml").expect("removed");
    node.wait_for_no_pod("layer").expect("it goes");
    fill(&node, "scratch-2", 1, 290);
    node.wait_for_phase("scratch-2", "Running").expect("it runs");
    fill(&node, "smaller", 200, 1);
    fill(&node, "larger", 260, 1);
    let evicted = node.wait_for_phase("larger", "Failed").expect("it is evicted");
    assert_eq!(evicted["status"]["reason"], "Evicted", "{}", evicted["status"]);
    for name in ["scratch-2", "smaller"] {
        node.wait_for_phase(name, "Running").expect("it runs on");
    }
    node.remove_all_manifests().expect("removed");
    node.wait_for_no_pods().expect("they go");
    node.stop().expect("it stops");
    linux::mount::unmount(&of_runtime, linux::mount::UnmountMode::Plain).expect("unmounted");
    images.unmount().expect("nothing is open in it");
    disk.unmount().expect("nothing is open in it");
}

#[test]
fn a_critical_pod_takes_the_room_of_the_least_important_pod() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, options(&["--max-pods", "2"])).expect("it starts");
    attacker::install(&node).expect("the image");
    let idle = node.leak_check().expect("the kernel answers");
    let requests = "resources: {requests: {cpu: 1m}}";
    put(&node, &Attack::new("burstable", "sleep 1000").with_container_fields(requests));
    put(&node, &Attack::new("best-effort", "sleep 1000"));
    for name in ["burstable", "best-effort"] {
        node.wait_for_phase(name, "Running").expect("it runs");
    }
    let critical =
        Attack::new("critical", "sleep 1000").with_pod_fields("priorityClassName: system-node-critical");
    put(&node, &critical);
    node.wait_for_phase("critical", "Running").expect("it runs");
    let preempted = node.wait_for_phase("best-effort", "Failed").expect("it made room");
    assert_eq!(preempted["status"]["reason"], "Preempting");
    assert_eq!(preempted["status"]["message"], "Preempted in order to admit critical pod");
    node.wait_for_event("Preempting", &["Preempted in order to admit critical pod"]).expect("said");
    let other = node.wait_for_phase("burstable", "Running").expect("it runs on");
    assert_eq!(other["status"]["containerStatuses"][0]["restartCount"], 0);
    // No pod makes room for an ordinary one.
    put(&node, &Attack::new("late", "sleep 1000"));
    let late = node.wait_for_phase("late", "Failed").expect("rejected");
    assert_eq!(late["status"]["reason"], "OutOfpods");
    node.finish(&idle).expect("nothing is left");
}
