//! kill -9, of anything, at any moment: what runs goes on, what was begun is
//! completed by a retry, and a deletion leaves nothing.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use linux::process;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::attacker::{self, Attack};
use tests::manifests::{self, Pod};
use tests::node::{TIMEOUT, text};
use tests::{Daemon, Launcher, LeakCheck, Node, NodeOptions, Sandbox, as_soon_as, binaries, eventually};

const USER: Pod<'_> = Pod {
    name: "user",
    args: &["sleep", "forever"],
    claim: Some("c"),
    image: tests::examples::DEMO_IMAGE,
    command: "/demo-app",
    restart_policy: "Always",
};

fn node(sandbox: &Sandbox, options: NodeOptions) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, options).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    (node, idle)
}

fn put_user_and_claim(node: &Node<'_>) {
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).expect("put");
    node.put_manifest("user.yaml", &USER.yaml()).expect("put");
}

// The kubelet.

#[test]
fn pods_run_on_without_the_kubelet_and_their_log_has_no_gap() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).unwrap();
    let counter = Pod { args: &["count"], ..USER };
    node.put_manifest("user.yaml", &counter.yaml()).unwrap();
    node.wait_for_log("user", &["\n10\n"]).unwrap();
    let before = node.get("pod", "user").unwrap()["status"]["containerStatuses"][0].clone();
    let programs = node.processes("demo-app").unwrap();

    node.kubelet().unwrap().kill().unwrap();
    let log = log_file(&node);
    let length = fs::metadata(&log).unwrap().len();
    eventually("the log grows without a kubelet", TIMEOUT, || {
        ensure!(fs::metadata(&log)?.len() > length + 1000, "{length} bytes");
        Ok(())
    })
    .unwrap();
    assert_eq!(node.processes("demo-app").unwrap(), programs, "the program ran on");

    node.start_kubelet().unwrap();
    let after = node.wait_for_phase("user", "Running").unwrap()["status"]["containerStatuses"][0].clone();
    assert_eq!(
        (&after["containerID"], &after["restartCount"]),
        (&before["containerID"], &before["restartCount"])
    );
    assert_eq!(node.processes("demo-app").unwrap(), programs, "adopted, not restarted");
    let seen = node.logs("user").unwrap().lines().count();
    node.wait_for_log("user", &[&format!("\n{}\n", seen + 10)]).unwrap();
    for (number, line) in (1..).zip(node.logs("user").unwrap().lines()) {
        assert_eq!(line, number.to_string(), "a gap in the log");
    }
    node.finish(&idle).unwrap();
}

#[test]
fn a_kubelet_started_right_after_a_kill_waits_for_its_root_directory() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    node.kubelet().unwrap().kill().unwrap();
    // As a killed kubelet does, until the kernel has taken its process apart.
    let lock = node.root_dir().join("hawser/lock");
    let held = linux::lock::FileLock::exclusive(&lock, 0o600).unwrap();
    let output = sandbox.path("kubelet.out");
    let holder = std::thread::spawn(move || {
        let waits = eventually("the next kubelet waits", TIMEOUT, || {
            let said = fs::read_to_string(&output)?;
            let words = "holds the root directory and does not answer: waiting up to 10 s";
            ensure!(said.contains(words), "{said}");
            Ok(())
        });
        drop(held);
        waits
    });
    node.start_kubelet().unwrap();
    holder.join().unwrap().unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_kubelet_starts_beside_the_sockets_of_a_killed_one_that_does_not_end() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    node.kubelet().unwrap().kill().unwrap();
    // As those of a process of which a thread waits in the kernel: they take connections for ever.
    let runtime = node.root_dir().join("hawser/runtime.sock");
    fs::remove_file(&runtime).unwrap();
    let listener = UnixListener::bind(&runtime).unwrap();
    node.start_kubelet().unwrap();
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).unwrap();
    node.put_manifest("user.yaml", &USER.yaml()).unwrap();
    node.wait_for_phase("user", "Running").unwrap();
    drop(listener);
    node.finish(&idle).unwrap();
}

#[test]
fn several_pods_are_deleted_in_the_time_of_one() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    attacker::install(&node).unwrap();
    let names = ["one", "two", "three"];
    for name in names {
        // Process 1 has no handler for SIGTERM, so it gets its whole grace.
        let file = sandbox.path(&format!("{name}.yaml"));
        fs::write(&file, Attack::new(name, "sleep 1000").yaml()).unwrap();
        node.client(&["apply", "-f", &file.display().to_string()]).unwrap();
    }
    for name in names {
        node.wait_for_phase(name, "Running").unwrap();
    }
    let began = Instant::now();
    let words = ["delete", "pod", "one", "two", "three", "-n", "default", "--grace-period=15"];
    node.client(&words).unwrap();
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    assert_eq!(node.list("pods").unwrap().len(), 0);
    for name in names {
        fs::remove_file(sandbox.path(&format!("{name}.yaml"))).unwrap();
    }
    node.finish(&idle).unwrap();
}

#[test]
fn with_requires_republish_a_pod_recovers_from_the_end_of_its_daemon() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions::default());
    attacker::install(&node).unwrap();
    let driver = "apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: csi.hawser.dev}
spec: {attachRequired: false, fsGroupPolicy: File, requiresRepublish: true}
";
    node.put_manifest(
        "storageclass.yaml",
        &without_driver(&tests::examples::read("storageclass.yaml").unwrap()),
    )
    .unwrap();
    node.put_manifest("csidriver.yaml", driver).unwrap();
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).unwrap();
    let script = "echo kept >> /data/x; while cat /data/x; do sleep 0.2; done; exit 1";
    let reader = Pod {
        name: "reader",
        args: &["sh", "-c", script],
        claim: Some("c"),
        image: attacker::IMAGE,
        command: "/busybox",
        restart_policy: "Always",
    };
    node.put_manifest("reader.yaml", &reader.yaml()).unwrap();
    node.wait_for_log("reader", &["kept"]).unwrap();
    let before = node.get("pod", "reader").unwrap();

    let daemons = node.processes("hawser-volume").unwrap();
    assert_eq!(daemons.len(), 1);
    kill(Pid::from_raw(daemons[0]), Signal::SIGKILL).unwrap();
    node.wait_for_event("VolumeRepublished", &["is published again"]).unwrap();
    eventually("the container runs again on its volume", TIMEOUT, || {
        let pod = node.get("pod", "reader")?;
        let status = &pod["status"]["containerStatuses"][0];
        ensure!(status["restartCount"] != 0 && !status["state"]["running"].is_null(), "{status}");
        let log = node.logs("reader")?;
        ensure!(log.matches("kept").count() > 1, "{log}");
        Ok(pod)
    })
    .map(|after| assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]))
    .unwrap();
    node.finish(&idle).unwrap();
}

/// The documents of the example but for the CSIDriver object.
fn without_driver(text: &str) -> String {
    let documents = text.split("\n---\n").filter(|document| !document.contains("kind: CSIDriver"));
    documents.collect::<Vec<_>>().join("\n---\n")
}

#[test]
fn a_kubelet_that_is_started_as_soon_as_stop_answers_has_its_root_directory() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    node.put_manifest("user.yaml", &Pod { claim: None, ..USER }.yaml()).unwrap();
    node.wait_for_phase("user", "Running").unwrap();
    let programs = node.processes("demo-app").unwrap();
    for _ in 0..3 {
        node.client(&["stop"]).unwrap();
        node.start_kubelet().unwrap();
    }
    node.wait_for_phase("user", "Running").unwrap();
    assert_eq!(node.processes("demo-app").unwrap(), programs, "adopted, not restarted");
    node.finish(&idle).unwrap();
}

/// `<namespace>_<name>_<uid>/<container>/0.log`, where the kubelet puts it.
fn log_file(node: &Node<'_>) -> std::path::PathBuf {
    let pods = fs::read_dir(node.log_dir()).expect("the log directory").flatten();
    let dir = pods.map(|entry| entry.path()).find(|dir| dir.display().to_string().contains("/default_user_"));
    dir.expect("the pod's log directory").join("business/0.log")
}

#[test]
fn a_kubelet_killed_while_it_mounts_completes_the_pod_when_it_is_back() {
    kubelet_killed_when(has_fuse_mount);
}

#[test]
fn a_kubelet_killed_while_the_claim_is_provisioned_makes_no_second_volume() {
    kubelet_killed_when(|node| fs::read_dir(node.pool()).is_ok_and(|mut entries| entries.next().is_some()));
}

fn kubelet_killed_when(is_so: impl Fn(&Node<'_>) -> bool) {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    put_user_and_claim(&node);
    as_soon_as("the moment to kill the kubelet", TIMEOUT, || is_so(&node)).expect("the moment comes");
    node.kubelet().expect("started").kill().expect("kill");
    node.start_kubelet().expect("it starts again");
    node.wait_for_phase("user", "Running").expect("the pod is completed");
    assert_eq!(node.list("pv").expect("volumes").len(), 1);
    assert_eq!(node.processes("hawser-volume").expect("processes").len(), 1);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_kubelet_killed_while_it_deletes_completes_the_deletion() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    put_user_and_claim(&node);
    node.wait_for_phase("user", "Running").unwrap();
    node.remove_manifest("user.yaml").unwrap();
    as_soon_as("the pod's program ends", TIMEOUT, || {
        node.processes("demo-app").is_ok_and(|programs| programs.is_empty())
    })
    .unwrap();
    node.kubelet().unwrap().kill().unwrap();
    node.start_kubelet().unwrap();
    node.wait_for_no_pods().unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_kubelet_killed_between_unpublish_and_unstage_unstages_when_it_is_back() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    // On a busy machine the unmount may come before the kill.
    let was_in_time = (0..ROUNDS).any(|_| is_killed_before_unstage(&mut node).unwrap());
    assert!(was_in_time, "unmounted before the kill, {ROUNDS} times");
    node.finish(&idle).unwrap();
}

const ROUNDS: usize = 5;

/// Whether the volume was still mounted when the kubelet was killed. In the end it is not.
fn is_killed_before_unstage(node: &mut Node<'_>) -> Result<bool> {
    put_user_and_claim(node);
    node.wait_for_phase("user", "Running")?;
    // A daemon that does not answer delays Unstage, not Unpublish.
    let daemon = Pid::from_raw(node.processes("hawser-volume")?[0]);
    kill(daemon, Signal::SIGSTOP)?;
    node.remove_manifest("user.yaml")?;
    as_soon_as("the volume is unpublished", TIMEOUT, || !has_publish_record(node))?;
    node.kubelet()?.kill()?;
    let was_staged = has_fuse_mount(node);
    node.start_kubelet()?;
    // It has ended if the volume was unmounted.
    let continued = kill(daemon, Signal::SIGCONT);
    ensure!(continued.is_ok() || !was_staged, "{continued:?}");
    eventually("the volume is unstaged", TIMEOUT, || {
        ensure!(!has_fuse_mount(node), "{}", node.describe_all());
        Ok(())
    })?;
    node.wait_for_no_pods()?;
    Ok(was_staged)
}

/// Pod `user` has its volume staged and cannot publish it: a file is in the place of the
/// volume's directory. Then the driver is killed.
fn stage_without_publish(node: &mut Node<'_>) -> Result<()> {
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi"))?;
    let volume = eventually("the claim is bound", TIMEOUT, || {
        let claim = node.get("pvc", "c")?;
        ensure!(claim["status"]["phase"] == "Bound", "{claim}");
        Ok(text(&claim["spec"]["volumeName"]))
    })?;
    node.driver()?.kill()?;
    node.put_manifest("user.yaml", &USER.yaml())?;
    let user = eventually("the pod waits for its volume", TIMEOUT, || node.get("pod", "user"))?;
    let volumes = node.root_dir().join("pods").join(text(&user["metadata"]["uid"]));
    let volumes = volumes.join("volumes/kubernetes.io~csi");
    fs::create_dir_all(&volumes)?;
    fs::write(volumes.join(&volume), "")?;
    node.start_driver()?;
    node.wait_for_event("FailedMount", &["create directory", &volume])?;
    ensure!(has_fuse_mount(node) && !has_publish_record(node), "staged, not published");
    node.driver()?.kill()?;
    Ok(())
}

/// Removes the manifest of pod `user`, and waits until the kubelet has seen it.
fn begin_deletion(node: &Node<'_>) -> Result<()> {
    node.remove_manifest("user.yaml")?;
    eventually("the kubelet takes the pod down", TIMEOUT, || {
        let pods = node.list("pods")?;
        let user = pods.iter().find(|pod| pod["metadata"]["name"] == "user");
        ensure!(user.is_none_or(|user| user["metadata"]["deletionTimestamp"].is_string()), "{user:?}");
        Ok(())
    })
}

#[test]
fn a_volume_that_was_never_published_is_unstaged_when_its_pod_is_deleted_before_the_driver_is_back() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    stage_without_publish(&mut node).unwrap();
    node.kubelet().unwrap().kill().unwrap();
    node.start_kubelet().unwrap();
    begin_deletion(&node).unwrap();
    node.start_driver().unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_stop_with_pods_unstages_a_volume_that_a_killed_kubelet_left_staged_without_a_pod() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    stage_without_publish(&mut node).unwrap();
    begin_deletion(&node).unwrap();
    node.kubelet().unwrap().kill().unwrap();
    node.start_kubelet().unwrap();
    node.wait_for_no_pod("user").unwrap();

    let mut stop = sandbox.command(&binaries::find("hawser-kubelet").unwrap());
    stop.args(["stop", "--pods", "--root-dir"]).arg(node.root_dir());
    let mut stop = Daemon::start("stop --pods", stop, &sandbox.path("kubelet.out")).unwrap();
    eventually("stop --pods waits for the driver", TIMEOUT, || {
        ensure!(stop.output().contains("unstaging volume "), "{}", stop.output());
        Ok(())
    })
    .unwrap();
    node.start_driver().unwrap();
    assert!(stop.wait(TIMEOUT).unwrap().success(), "{}", node.outputs());
    assert!(!has_fuse_mount(&node), "{}", node.outputs());

    node.start_kubelet().unwrap();
    node.finish(&idle).unwrap();
}

// The driver.

fn has_fuse_mount(node: &Node<'_>) -> bool {
    let mounts = tests::mounts().unwrap_or_default();
    mounts.iter().any(|m| m.fs_type.starts_with("fuse.") && m.mount_point.starts_with(node.root_dir()))
}

fn has_published_mount(node: &Node<'_>) -> bool {
    let mounts = tests::mounts().unwrap_or_default();
    mounts
        .iter()
        .any(|m| m.fs_type.starts_with("fuse.") && m.mount_point.starts_with(node.root_dir().join("pods")))
}

/// The kubelet's own record of what it has published, which goes after the mount.
fn has_publish_record(node: &Node<'_>) -> bool {
    let pods = fs::read_dir(node.root_dir().join("pods")).into_iter().flatten().flatten();
    let volumes = pods.map(|pod| pod.path().join("volumes/kubernetes.io~csi"));
    volumes
        .flat_map(fs::read_dir)
        .flatten()
        .flatten()
        .any(|volume| volume.path().join("vol_data.json").exists())
}

fn has_entries(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

fn has_mount_pod_manifest(node: &Node<'_>) -> bool {
    let entries = fs::read_dir(node.manifests()).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with("hawser-volume-"))
}

/// Kills the driver at the moment, starts it again at once, and wants the pod.
fn driver_killed_on_the_way_up(launcher: Launcher, is_so: impl Fn(&Node<'_>) -> bool) {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions { launcher, ..NodeOptions::default() });
    put_user_and_claim(&node);
    as_soon_as("the moment to kill the driver", TIMEOUT, || is_so(&node)).expect("the moment comes");
    node.driver().expect("started").kill().expect("kill");
    node.start_driver().expect("it starts again");
    node.wait_for_phase("user", "Running").expect("a retry completes");
    let volume = node.volume_path("user").expect("the volume's path");
    fs::write(volume.join("note"), "kept").expect("the volume works");
    assert_eq!(node.processes("hawser-volume").expect("processes").len(), 1);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_driver_killed_once_the_volume_is_made_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Manifest, |node| has_entries(&node.pool()));
}

#[test]
fn a_driver_killed_once_its_journal_is_written_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Manifest, |node| has_entries(&node.sandbox().path("run")));
}

#[test]
fn a_driver_killed_once_the_file_system_is_mounted_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Manifest, has_fuse_mount);
}

#[test]
fn a_driver_killed_once_the_mount_pod_is_asked_for_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Manifest, has_mount_pod_manifest);
}

#[test]
fn a_driver_killed_once_the_daemon_runs_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Manifest, |node| {
        node.processes("hawser-volume").is_ok_and(|daemons| !daemons.is_empty())
    });
}

#[test]
fn a_driver_killed_once_the_volume_is_published_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Manifest, has_published_mount);
}

#[test]
fn a_driver_killed_with_its_child_daemon_running_completes_on_retry() {
    driver_killed_on_the_way_up(Launcher::Process, |node| {
        node.processes("hawser-volume").is_ok_and(|daemons| !daemons.is_empty())
    });
}

/// Kills the driver at the moment of a deletion, starts it again, and wants nothing left.
fn driver_killed_on_the_way_down(is_so: impl Fn(&Node<'_>) -> bool) {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    put_user_and_claim(&node);
    node.wait_for_phase("user", "Running").expect("the pod runs");
    node.remove_manifest("user.yaml").expect("remove");
    as_soon_as("the moment to kill the driver", TIMEOUT, || is_so(&node)).expect("the moment comes");
    node.driver().expect("started").kill().expect("kill");
    node.start_driver().expect("it starts again");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_driver_killed_while_the_pod_ends_leaves_nothing() {
    driver_killed_on_the_way_down(|node| {
        node.processes("demo-app").is_ok_and(|programs| programs.is_empty())
    });
}

#[test]
fn a_driver_killed_once_the_volume_is_unpublished_leaves_nothing() {
    driver_killed_on_the_way_down(|node| !has_published_mount(node));
}

#[test]
fn a_driver_killed_once_the_volume_is_unmounted_leaves_nothing() {
    driver_killed_on_the_way_down(|node| !has_fuse_mount(node));
}

#[test]
fn a_driver_killed_once_the_mount_pod_is_dismissed_leaves_nothing() {
    driver_killed_on_the_way_down(|node| !has_mount_pod_manifest(node));
}

#[test]
fn a_driver_killed_while_nothing_happens_disturbs_nobody() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    put_user_and_claim(&node);
    node.wait_for_phase("user", "Running").unwrap();
    let volume = node.volume_path("user").unwrap();
    node.driver().unwrap().kill().unwrap();
    fs::write(volume.join("note"), "kept").expect("the daemon serves on without the driver");
    node.start_driver().unwrap();
    assert_eq!(fs::read_to_string(volume.join("note")).unwrap(), "kept");
    node.finish(&idle).unwrap();
}

// The daemon.

#[test]
fn a_killed_mount_pod_means_enotconn_at_once_an_event_and_a_fresh_mount_for_a_new_pod() {
    daemon_killed(Launcher::Manifest);
}

#[test]
fn a_killed_child_daemon_means_enotconn_at_once_an_event_and_a_fresh_mount_for_a_new_pod() {
    daemon_killed(Launcher::Process);
}

fn daemon_killed(launcher: Launcher) {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, NodeOptions { launcher, ..NodeOptions::default() });
    put_user_and_claim(&node);
    node.wait_for_phase("user", "Running").expect("the pod runs");
    let volume = node.volume_path("user").expect("the volume's path");
    fs::write(volume.join("note"), "kept\n").expect("the volume works");

    let daemons = node.processes("hawser-volume").expect("processes");
    assert_eq!(daemons.len(), 1);
    let daemon = process::open_pidfd(daemons[0]).expect("a pidfd").expect("it runs");
    kill(Pid::from_raw(daemons[0]), Signal::SIGKILL).expect("kill -9");
    assert!(process::wait_for_end(&daemon, TIMEOUT).expect("poll"), "kill -9 ends it");
    // At once: the first request after its death.
    let refused = fs::metadata(volume.join("absent")).expect_err("nobody answers");
    assert_eq!(refused.raw_os_error(), Some(Errno::ENOTCONN as i32), "{refused}");
    eventually("an event tells of it", TIMEOUT, || {
        let events = node.list("events")?;
        let told = events
            .iter()
            .any(|event| event["type"] == "Warning" && text(&event["reason"]) == "VolumeConditionAbnormal");
        ensure!(told, "{}", node.describe_all());
        Ok(())
    })
    .expect("an event");

    node.put_manifest(
        "reader.yaml",
        &Pod { name: "reader", args: &["cat", "/data/note"], restart_policy: "Never", ..USER }.yaml(),
    )
    .expect("put");
    node.wait_for_phase("reader", "Succeeded").expect("a new pod gets a fresh mount");
    assert_eq!(node.logs("reader").expect("its log"), "kept\n");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_gets_its_volume_from_a_mount_pod_that_waited() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, NodeOptions::default());
    node.set_warm_daemons(1).unwrap();
    let waiting = node.waiting_daemons().unwrap();
    put_user_and_claim(&node);
    node.wait_for_phase("user", "Running").unwrap();
    assert_eq!(node.serving_daemons().unwrap(), waiting);
    node.set_warm_daemons(0).unwrap();
    assert_eq!(node.serving_daemons().unwrap(), waiting, "adopted");
    node.finish(&idle).unwrap();
}
