//! Devices of the host, out of a pod that may make device nodes (CAP_MKNOD is one of
//! the default capabilities): by the v1 controller, and by the BPF program of cgroup
//! v2, which a node uses as soon as it sees no v1 controller for devices.

use linux::mount::UnmountMode;
use linux::process::BpfInstruction;
use tests::attacker::Attack;
use tests::node::{TIMEOUT, text};
use tests::{NodeOptions, Sandbox, eventually};

use crate::{node, node_with, run};

/// Makes a node for /dev/fuse, for memory, for the kernel's log and for every disk of
/// the host, and tries to open each; then does the same with null, which it may.
const ATTACK: &str = "
try() {
    mknod /tmp/$1 $2 $3 $4 || return
    echo made $1
    (: < /tmp/$1) 2>/dev/null && echo READ $1
    (: >> /tmp/$1) 2>/dev/null && echo WROTE $1
    (: <> /tmp/$1) 2>/dev/null && echo BOTH $1
    rm -f /tmp/$1
}
try fuse c 10 229
try mem c 1 1
try kmsg c 1 11
while read major minor blocks name; do
    case $major in [0-9]*) try $name b $major $minor ;; esac
done < /proc/partitions
try loop0 b 7 0
try harmless c 1 3
";

/// What a container reads as stdin is a device, and root owns it.
#[test]
fn stdin_is_no_device_of_the_host() {
    use std::os::unix::fs::MetadataExt;
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let host = std::fs::metadata("/dev/null").expect("/dev/null");
    // Changes nothing if it is the host's.
    let script = format!(
        "found=$(stat -L -c %d:%i /dev/stdin)
[ \"$found\" != {}:{} ] || {{ echo the device of the host; exit 1; }}
test -c /dev/stdin && cat && echo null
chmod 0 /dev/stdin 2>&1; chown 1:1 /proc/self/fd/0 2>&1
stat -L -c '%a %u' /dev/stdin
exit 0",
        host.dev(),
        host.ino()
    );
    let log = run(&node, &Attack::new("stdin", &script)).expect("the pod ends");
    assert!(log.starts_with("null\n") && log.ends_with("666 0\n"), "{log}");
    assert_eq!(log.matches("Read-only file system").count(), 2, "{log}");
    node.finish(&idle).expect("nothing is left");
}

fn assert_repelled(log: &str) {
    let opened: Vec<&str> = log.lines().filter(|line| !line.starts_with("made ")).collect();
    assert_eq!(opened, ["READ harmless", "WROTE harmless", "BOTH harmless"], "{log}");
    assert!(log.contains("made fuse"), "the attack did not get as far as to make a node: {log}");
}

/// As on a machine with cgroup v2 alone: this thread, and what it starts, sees no v1 controller for devices.
fn hide_v1_devices() {
    let is_devices = |options: &str| options.split(',').any(|option| option == "devices");
    for mount in tests::mounts().expect("the mount table") {
        if mount.fs_type == "cgroup" && is_devices(&mount.super_options) {
            linux::mount::unmount(&mount.mount_point, UnmountMode::Detach).expect("unmount");
        }
    }
}

/// As on a kernel without bpf(2), for this thread and what it starts.
fn forbid_bpf() {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0000;
    let number = u32::try_from(nix::libc::SYS_bpf).expect("a system call's number is small");
    let step = |code, jt, jf, k| BpfInstruction { code, jt, jf, k };
    linux::process::install_seccomp(&[
        step(LOAD, 0, 0, 0),
        step(JUMP_IF_EQUAL, 0, 1, number),
        step(RETURN, 0, 0, ERRNO | nix::libc::ENOSYS.cast_unsigned()),
        step(RETURN, 0, 0, ALLOW),
    ])
    .expect("root may install a filter");
}

fn without_control_allowed() -> NodeOptions {
    NodeOptions { kubelet_flags: vec!["--allow-without-device-control".to_owned()], ..NodeOptions::default() }
}

#[test]
fn a_default_pod_opens_no_device_of_the_host() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    assert_repelled(&run(&node, &Attack::new("attacker", ATTACK)).unwrap());
    node.finish(&idle).unwrap();
}

#[test]
fn a_default_pod_opens_no_device_of_the_host_where_only_cgroup_v2_can_refuse_it() {
    let sandbox = Sandbox::new();
    hide_v1_devices();
    let (node, idle) = node(&sandbox);
    assert_repelled(&run(&node, &Attack::new("attacker", ATTACK)).unwrap());
    node.finish(&idle).unwrap();
}

#[test]
fn a_container_whose_devices_cannot_be_restricted_does_not_start_and_says_why() {
    let sandbox = Sandbox::new();
    hide_v1_devices();
    forbid_bpf();
    let (node, idle) = node(&sandbox);
    node.put_manifest("attacker.yaml", &Attack::new("attacker", "echo runs").yaml()).unwrap();
    let words = ["device control: load BPF device program", "Function not implemented", "CONFIG_CGROUP_BPF"];
    node.wait_for_event("Failed", &words).unwrap();
    node.wait_for_event("Failed", &["--allow-without-device-control"]).unwrap();
    // What must run as root of the host needs no rules: there is nothing to restrict.
    let privileged =
        Attack::new("privileged", "echo runs").with_container_fields("securityContext: {privileged: true}");
    assert_eq!(run(&node, &privileged).unwrap(), "runs\n");
    node.finish(&idle).unwrap();
}

#[test]
fn without_device_control_a_pod_cannot_make_nodes_and_its_status_says_so() {
    let sandbox = Sandbox::new();
    hide_v1_devices();
    forbid_bpf();
    let (node, idle) = node_with(&sandbox, without_control_allowed());
    // Nodes that an image or a volume brings do not work either.
    let nodev = "for at in / /data; do awk -v at=$at '$2 == at && $4 !~ /nodev/ { print \"devices in\", at }' /proc/mounts; done";
    // The pod waits for a file, so that its status can be read while it runs.
    let script = format!("{ATTACK}\n{nodev}\necho waiting\nuntil [ -e /data/go ]; do usleep 20000; done");
    let volume = "volumes: [{name: data, emptyDir: {}}]";
    let mount = "volumeMounts: [{name: data, mountPath: /data}]";
    // Nor does a program that is started beside the first one have the capability.
    let beside = serde_json::json!([
        "/busybox",
        "sh",
        "-c",
        format!("({ATTACK}\n) > /data/new 2>&1\nmv /data/new /data/beside")
    ]);
    let fields = format!("{mount}\nlifecycle: {{postStart: {{exec: {{command: {beside}}}}}}}");
    let attack = Attack::new("attacker", &script).with_pod_fields(volume).with_container_fields(&fields);
    node.put_manifest("attacker.yaml", &attack.yaml()).unwrap();
    let log = node.wait_for_log("attacker", &["waiting"]).unwrap();
    assert!(log.lines().all(|line| line == "waiting" || line.contains("Operation not permitted")), "{log}");

    node.wait_for_event("DeviceControlMissing", &["without device control and without CAP_MKNOD"]).unwrap();
    let pod = node.get("pod", "attacker").unwrap();
    let conditions = pod["status"]["conditions"].as_array().unwrap();
    let found = conditions.iter().find(|c| c["type"] == "hawser.dev/DeviceControl").expect("the condition");
    assert_eq!((&found["status"], &found["reason"]), (&"False".into(), &"DeviceControlMissing".into()));
    assert!(text(&found["message"]).contains("load BPF device program"), "{found}");

    let uid = text(&pod["metadata"]["uid"]);
    let data = node.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/data");
    let read = || Ok(std::fs::read_to_string(data.join("beside"))?);
    let beside = eventually("the hook has ended", TIMEOUT, read).unwrap();
    assert!(beside.lines().all(|line| line.contains("Operation not permitted")), "{beside}");
    assert!(beside.lines().count() > 3, "{beside}");
    std::fs::write(data.join("go"), "").unwrap();
    node.wait_for_phase("attacker", "Succeeded").unwrap();
    node.finish(&idle).unwrap();
}
