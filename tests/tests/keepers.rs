//! Volumes whose daemon, keeper and driver are killed while a pod reads and writes: it sees pauses and
//! no error.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::attacker::{self, Attack};
use tests::csi::data_path;
use tests::manifests;
use tests::node::{KEEPER_MANIFEST, KEEPER_POD, TIMEOUT, text};
use tests::random::Random;
use tests::{Keeper, Launcher, LeakCheck, Node, NodeOptions, Sandbox, eventually};

/// Writes a number, reads it back and renames the file, again and again.
const STREAM: &str = r#"
n=0
while :; do
    n=$((n + 1))
    echo $n > /data/f || exit 1
    [ "$(/busybox cat /data/f)" = $n ] || exit 2
    /busybox mv /data/f /data/g || exit 3
    /busybox mv /data/g /data/f || exit 4
    [ $((n % 20)) = 0 ] && echo at $n
done
"#;

#[test]
fn a_killed_mount_pod_is_a_pause_for_a_pod_whose_volume_has_a_keeper() {
    daemon_killed_with_keeper(Launcher::Manifest, 0);
}

#[test]
fn a_killed_child_daemon_is_a_pause_for_a_pod_whose_volume_has_a_keeper() {
    daemon_killed_with_keeper(Launcher::Process, 0);
}

#[test]
fn a_mount_pod_that_waits_follows_a_killed_one() {
    daemon_killed_with_keeper(Launcher::Manifest, 1);
}

/// The keeper that gave the volume to that mount pod knows of it, and no other process does.
#[test]
fn a_mount_pod_that_followed_while_no_driver_ran_is_adopted_though_that_keeper_has_ended() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = start_with_waiting_daemon(&sandbox);
    wait_until_held(&node);
    // The one that waited serves now: another one has to wait.
    eventually("another daemon waits", TIMEOUT, || {
        let log = node.outputs();
        ensure!(log.matches("a daemon waits for the next volume").count() >= 2, "{log}");
        Ok(())
    })
    .expect("another one");
    let [daemon] = node.serving_daemons().expect("processes")[..] else { panic!("one daemon") };
    node.driver().expect("started").kill().expect("kill -9");
    kill_9(daemon);
    wait_for_successor(&node, daemon);
    progress(&node);
    let successor = node.serving_daemons().expect("processes");
    node.kill(node.wait_for_keeper().expect("a keeper")).expect("kill -9");
    node.start_driver().expect("it starts again");
    wait_until_held(&node);
    assert_eq!(node.serving_daemons().expect("processes"), successor, "{}", node.outputs());
    progress(&node);
    kill_daemon(&node);
    progress(&node);
    node.set_warm_daemons(0).expect("no daemon waits");
    node.finish(&idle).expect("nothing is left");
}

const KILLS: usize = 12;

fn start(sandbox: &Sandbox, options: NodeOptions) -> (Node<'_>, LeakCheck) {
    // Requests wait here while no daemon serves.
    sandbox.switch_fuse_guard_off();
    let node = Node::start(sandbox, options).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    (node, idle)
}

/// With a keeper, a daemon that waits, and a pod that uses a volume all the time.
fn start_with_waiting_daemon(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let options = NodeOptions { keeper: Keeper::Process, ..NodeOptions::default() };
    let (mut node, idle) = start(sandbox, options);
    node.set_warm_daemons(1).expect("a daemon waits");
    put_stream(&node);
    (node, idle)
}

/// A pod that uses a volume all the time.
fn put_stream(node: &Node<'_>) {
    put_stream_of_class(node, "hawser");
}

fn put_stream_of_class(node: &Node<'_>, class: &str) {
    attacker::install(node).expect("busybox");
    node.put_manifest("claim.yaml", &manifests::claim_of_class("c", "4Mi", class)).expect("put");
    let stream = Attack::new("stream", STREAM)
        .with_pod_fields("volumes: [{name: data, persistentVolumeClaim: {claimName: c}}]")
        .with_container_fields("volumeMounts: [{name: data, mountPath: /data}]");
    node.put_manifest("stream.yaml", &stream.yaml()).expect("put");
    node.wait_for_phase("stream", "Running").expect("the pod runs");
}

/// The pod has had no error, and goes on.
#[track_caller]
fn progress(node: &Node<'_>) {
    let lines = || node.logs("stream").map(|log| log.lines().count());
    let before = lines().expect("its log");
    eventually("the pod makes progress", TIMEOUT, || {
        let said = || {
            format!(
                "{}\n{}\n{}",
                node.logs("stream").unwrap_or_default(),
                node.describe_all(),
                node.outputs()
            )
        };
        ensure!(text(&node.get("pod", "stream")?["status"]["phase"]) == "Running", "{}", said());
        ensure!(lines()? > before + 2, "{}", said());
        Ok(())
    })
    .expect("progress");
}

fn kill_9(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill -9");
}

#[track_caller]
fn kill_daemon(node: &Node<'_>) {
    let [daemon] = node.serving_daemons().expect("processes")[..] else { panic!("one daemon") };
    kill_9(daemon);
    wait_for_successor(node, daemon);
}

#[track_caller]
fn wait_for_successor(node: &Node<'_>, before: i32) {
    eventually("another daemon serves", TIMEOUT, || {
        let now = node.serving_daemons()?;
        ensure!(now.len() == 1 && now[0] != before, "{now:?}: {}", node.outputs());
        Ok(())
    })
    .expect("a takeover");
}

fn daemon_killed_with_keeper(launcher: Launcher, warm: u8) {
    let sandbox = Sandbox::new();
    let options = NodeOptions { launcher, keeper: Keeper::Process, ..NodeOptions::default() };
    let (mut node, idle) = start(&sandbox, options);
    node.set_warm_daemons(warm).expect("daemons wait");
    put_stream(&node);
    for _ in 0..5 {
        progress(&node);
        kill_daemon(&node);
    }
    progress(&node);
    node.set_warm_daemons(0).expect("no daemon waits");
    node.finish(&idle).expect("nothing is left");
}

// The keeper in a pod.

/// The node is idle before it gets a keeper, and after the keeper's end.
fn with_keeper_pod(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let (mut node, idle) = start(sandbox, NodeOptions::default());
    node.set_keeper(Keeper::Pod).expect("the keeper's pod runs");
    put_stream(&node);
    wait_until_held(&node);
    (node, idle)
}

fn finish(mut node: Node<'_>, idle: &LeakCheck) {
    node.remove_all_manifests().expect("remove");
    node.wait_for_no_pod("stream").expect("the pod ends");
    node.set_keeper(Keeper::None).expect("the keeper's pod ends");
    assert!(!node.manifests().join(KEEPER_MANIFEST).exists());
    node.finish(idle).expect("nothing is left");
}

/// Driver and keeper both hold the volume's connection.
#[track_caller]
fn wait_until_held(node: &Node<'_>) {
    eventually("all hold the connection", TIMEOUT, || {
        ensure!(is_held_by_all(node), "{:?}: {}", node.driver_view("mounts")?, node.outputs());
        Ok(())
    })
    .expect("held");
}

fn is_held_by_all(node: &Node<'_>) -> bool {
    let mounts = node.driver_view("mounts").expect("the driver's command");
    let is_held =
        |mount: &serde_json::Value| mount["holders"] == serde_json::json!(["daemon", "driver", "keeper"]);
    mounts.as_array().is_some_and(|mounts| !mounts.is_empty() && mounts.iter().all(is_held))
}

/// The number of the file and the time of its last change.
fn written(manifest: &Path) -> (u64, i64, i64) {
    let found = fs::metadata(manifest).expect("the keeper's manifest");
    (found.ino(), found.mtime(), found.mtime_nsec())
}

fn kill_driver_and_daemon(node: &mut Node<'_>) {
    let [daemon] = node.serving_daemons().expect("processes")[..] else { panic!("one daemon") };
    node.driver().expect("started").kill().expect("kill -9");
    kill_9(daemon);
    node.start_driver().expect("it starts again");
    wait_for_successor(node, daemon);
}

#[test]
fn a_keeper_in_a_pod_its_daemon_and_its_driver_may_be_killed_under_load() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = with_keeper_pod(&sandbox);
    let manifest = node.manifests().join(KEEPER_MANIFEST);
    let first = written(&manifest);
    for _ in 0..2 {
        let keeper = node.wait_for_keeper().expect("a keeper");
        kill_9(keeper);
        // While no keeper runs, the driver alone holds the connection.
        kill_daemon(&node);
        progress(&node);
        wait_for_another_keeper(&node, keeper).expect("the kubelet starts the container again");
        wait_until_held(&node);
        kill_daemon(&node);
        progress(&node);
        kill_driver_and_daemon(&mut node);
        progress(&node);
        wait_until_held(&node);
    }
    assert_eq!(written(&manifest), first, "written once");
    finish(node, &idle);
}

/// The keeper in its pod registers files too, also in a volume whose root only its owner may enter.
#[test]
fn data_passes_the_daemon_by_with_the_keeper_in_its_pod() {
    const CLASS: &str = "passing";
    const OWNER: u32 = 999;
    let sandbox = Sandbox::new();
    let (mut node, idle) = start(&sandbox, NodeOptions::default());
    node.set_keeper(Keeper::Pod).expect("the keeper's pod runs");
    let class = manifests::class(CLASS, "csi.hawser.dev");
    let class = format!("{class}parameters: {{dataPath: passthrough, capacity: none}}\n");
    node.put_manifest("passing.yaml", &class).expect("put");
    put_stream_of_class(&node, CLASS);
    wait_until_held(&node);
    let mounts = node.driver_view("mounts").expect("the driver's command");
    let volume = text(&mounts[0]["volume"]);
    let metrics = sandbox.path("run").join(volume.trim_start_matches("vol-")).join("prom.sock");
    let path = node.volume_path("stream").expect("its volume");
    data_path::ensure_it_passes(&metrics, &path).expect("the kernel reads and writes");
    chown(&path, Some(OWNER), Some(OWNER)).expect("chown");
    fs::set_permissions(&path, Permissions::from_mode(0o700)).expect("chmod");
    let keeper = node.wait_for_keeper().expect("a keeper");
    kill_9(keeper);
    wait_for_another_keeper(&node, keeper).expect("the kubelet starts the container again");
    wait_until_held(&node);
    data_path::ensure_it_passes(&metrics, &path).expect("by the next keeper too");
    progress(&node);
    finish(node, &idle);
}

fn wait_for_another_keeper(node: &Node<'_>, before: i32) -> Result<()> {
    eventually("another keeper runs", TIMEOUT, || {
        let now = node.wait_for_keeper()?;
        ensure!(now != before, "{}", node.describe_all());
        Ok(())
    })
}

/// What is killed, with nothing to follow for a while.
#[derive(Debug, Clone, Copy)]
enum Target {
    MountPod,
    WaitingMountPod,
    Keeper,
    Driver,
    DriverAndMountPod,
    KeeperAndMountPod,
}

impl Target {
    const ALL: [Self; 6] = [
        Self::MountPod,
        Self::WaitingMountPod,
        Self::Keeper,
        Self::Driver,
        Self::DriverAndMountPod,
        Self::KeeperAndMountPod,
    ];

    fn kill(self, node: &mut Node<'_>) {
        match self {
            Self::MountPod => kill_daemon(node),
            Self::WaitingMountPod => node.waiting_daemons().expect("processes").into_iter().for_each(kill_9),
            Self::Keeper => node.processes("hawser-keeper").expect("processes").into_iter().for_each(kill_9),
            Self::Driver => {
                node.driver().expect("started").kill().expect("kill -9");
                node.start_driver().expect("it starts again");
            }
            Self::DriverAndMountPod => kill_driver_and_daemon(node),
            Self::KeeperAndMountPod => {
                Self::Keeper.kill(node);
                Self::MountPod.kill(node);
            }
        }
    }
}

/// The kubelet makes the keeper's container wait ever longer: the driver holds the connection alone
/// meanwhile, and what is killed then must not be the driver.
#[test]
fn a_volume_survives_random_kills_of_its_mount_pod_the_keepers_pod_and_the_driver() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = with_keeper_pod(&sandbox);
    node.set_warm_daemons(1).expect("a daemon waits");
    let mut random = Random::new(Random::seed("HAWSER_CHAOS_SEED"));
    for _ in 0..KILLS {
        let has_keeper = is_held_by_all(&node);
        let target = if has_keeper { *random.pick(&Target::ALL) } else { Target::MountPod };
        eprintln!("{target:?}, a keeper holds: {has_keeper}");
        target.kill(&mut node);
        progress(&node);
    }
    node.set_warm_daemons(0).expect("no daemon waits");
    finish(node, &idle);
}

#[test]
fn users_of_a_volume_are_told_which_mount_pod_has_followed_one_that_names_no_volume() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = start_with_waiting_daemon(&sandbox);
    // Until the kubelet has asked for the volume's condition once, it knows no change.
    node.wait_for_traces("csi.NodeGetVolumeStats", 1).expect("a question");
    kill_daemon(&node);
    let message = node.wait_for_event(
        "VolumeConditionNormal",
        &["served by mount pod", "the previous daemon died or was upgraded"],
    );
    let message = message.expect("an event");
    let serving = message.split("hawser-system/").nth(1).and_then(|rest| rest.split("-*").next());
    let pods = node.list("pods").expect("pods");
    let names: Vec<String> = pods.iter().map(|pod| text(&pod["metadata"]["name"])).collect();
    let serving = serving.expect("the pod's name");
    assert!(names.iter().any(|name| name.starts_with(serving)), "{message}: {names:?}");
    let events = node.list("events").expect("events");
    let abnormal = events.iter().find(|event| event["reason"] == "VolumeConditionAbnormal");
    assert!(abnormal.is_none(), "another daemon has followed: {abnormal:?}");
    progress(&node);
    node.set_warm_daemons(0).expect("no daemon waits");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_driver_with_another_image_replaces_the_keeper_in_its_pod_under_load() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = with_keeper_pod(&sandbox);
    let manifest = node.manifests().join(KEEPER_MANIFEST);
    let (first, keeper) = (written(&manifest), node.wait_for_keeper().expect("a keeper"));
    let uid = |node: &Node<'_>| -> String {
        let pods = node.list("pods").expect("pods");
        let pod = pods.iter().find(|pod| pod["metadata"]["name"] == KEEPER_POD).expect("the keeper's pod");
        text(&pod["metadata"]["uid"])
    };
    let pod = uid(&node);
    node.set_volume_image("hawser.dev/hawser-volume:next").expect("another image");
    wait_for_another_keeper(&node, keeper).expect("the kubelet replaces the container");
    assert_ne!(written(&manifest), first);
    assert_eq!(uid(&node), pod);
    progress(&node);
    wait_until_held(&node);
    kill_daemon(&node);
    progress(&node);
    kill_driver_and_daemon(&mut node);
    progress(&node);
    node.set_volume_image(tests::examples::VOLUME_IMAGE).expect("the first image");
    finish(node, &idle);
}
