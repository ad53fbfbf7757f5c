//! Daemons that the driver starts itself: what holds them, and what they may write.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::ensure;
use linux::cgroup::Hierarchies;
use linux::fd_passing::PacketListener;
use nix::fcntl::OFlag;
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request, volume_binary};
use tests::eventually;

/// Two files of 1 MiB.
const MAX_LOG_BYTES: u64 = 2 << 20;

fn link(path: &str) -> PathBuf {
    fs::read_link(path).unwrap()
}

fn bring_up(scene: &Scene, parameters: &[(&str, &str)]) -> (String, i32) {
    let caller = scene.caller();
    let mut request = create_request("pvc-1");
    let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    request.parameters = parameters.collect();
    let id = caller.create(request).unwrap().volume_id;
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let [daemon] = scene.daemons()[..] else { panic!("one daemon: {:?}", scene.daemons()) };
    (id, daemon)
}

fn take_down(scene: &Scene, id: &str) {
    let caller = scene.caller();
    caller.take_down(id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// The group of the volume's daemon, below a hierarchy that has `controller`.
fn group(scene: &Scene, id: &str, controller: &str) -> PathBuf {
    let path = scene.sandbox.volumes_cgroup_root().join(id.trim_start_matches("vol-"));
    Hierarchies::detect().unwrap().dir(controller, &path).unwrap()
}

fn limit(group: &Path, names: [&str; 2]) -> String {
    let text = names.iter().find_map(|name| fs::read_to_string(group.join(name)).ok());
    text.expect("the file of v1 or of v2").trim().to_owned()
}

#[test]
fn a_daemon_sees_no_process_of_the_node_and_has_the_limits_of_its_class() {
    let scene = Scene::start(Flags::process());
    let (id, daemon) = bring_up(&scene, &[("mountPodMemoryLimit", "64Mi"), ("mountPodCpuLimit", "500m")]);
    let namespace = |pid: i32| link(&format!("/proc/{pid}/ns/pid"));
    assert_ne!(namespace(daemon), link("/proc/self/ns/pid"));
    let status = fs::read_to_string(format!("/proc/{daemon}/status")).unwrap();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    assert_eq!(pids.split_whitespace().next_back(), Some("1"), "the first process of its namespace");
    let memory = group(&scene, &id, "memory");
    assert_eq!(limit(&memory, ["memory.limit_in_bytes", "memory.max"]), (64 << 20).to_string());
    for controller in ["memory", "pids", "cpu"] {
        let group = group(&scene, &id, controller);
        let processes = fs::read_to_string(group.join("cgroup.procs")).unwrap();
        assert_eq!(processes.trim(), daemon.to_string(), "{controller}");
    }
    let cpu = limit(&group(&scene, &id, "cpu"), ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(cpu.starts_with("50000"), "{cpu}");
    take_down(&scene, &id);
}

#[test]
fn a_group_ends_with_a_daemon_that_was_killed() {
    let mut scene = Scene::start(Flags::process());
    let (id, _daemon) = bring_up(&scene, &[]);
    scene.kill_daemon();
    scene.restart_driver();
    take_down(&scene, &id);
}

/// A daemon that was taken over writes what it wants; the test writes where it does.
#[test]
fn a_daemons_log_is_bounded_and_goes_on_with_the_next_driver() {
    let mut scene = Scene::start(Flags::process());
    let (id, _daemon) = bring_up(&scene, &[]);
    let dir = scene.dial_dir(&id);
    let mut options = fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::custom_flags(options.write(true), OFlag::O_NOFOLLOW.bits());
    let mut daemons = options.open(dir.join("daemon.fifo")).unwrap();
    let line = [b'x'; 999];
    for _ in 0..10_000 {
        daemons.write_all(&line).unwrap();
        daemons.write_all(b"\n").unwrap();
    }
    let files = || fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    assert!(files().sum::<u64>() <= MAX_LOG_BYTES, "{:?}", files().collect::<Vec<_>>());
    scene.restart_driver();
    daemons.write_all(b"to the next driver\n").unwrap();
    eventually("the next driver writes the log", TIMEOUT, || {
        let log = fs::read(dir.join("daemon.log"))?;
        ensure!(log.ends_with(b"to the next driver\n"), "{} bytes", log.len());
        Ok(())
    })
    .unwrap();
    drop(daemons);
    take_down(&scene, &id);
}

#[test]
fn without_a_root_for_control_groups_daemons_stay_in_the_drivers() {
    let mut flags = Flags::process();
    flags.0.extend(["--cgroup-root", "none"].map(str::to_owned));
    let scene = Scene::start(flags);
    let (id, daemon) = bring_up(&scene, &[]);
    let groups = |pid: &str| fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert!(!groups(&daemon.to_string()).contains("/volumes"), "{}", groups(&daemon.to_string()));
    take_down(&scene, &id);
}

/// A daemon that was taken over may write over its own arguments; this one is started with them.
#[test]
fn a_daemon_that_names_another_volume_as_its_own_ends_alone() {
    let mut scene = Scene::start(Flags::process());
    let (id, daemon) = bring_up(&scene, &[]);
    let socket = scene.dial_dir(&id).join("dial.sock");
    // Never answers: the daemon that dials it waits.
    let listener = PacketListener::bind(&socket).unwrap();
    let mut forger = Command::new(volume_binary())
        .args(["serve", "--confine", "--socket"])
        .arg(&socket)
        .env("HAWSER_NONCE", "0123456789abcdef")
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let dialled = listener.accept().unwrap();
    scene.restart_driver();
    assert_eq!(forger.wait().unwrap().signal(), Some(9));
    assert_eq!(scene.daemons(), [daemon]);
    fs::write(scene.caller().target_path("one").join("file"), "content").unwrap();
    drop((listener, dialled));
    take_down(&scene, &id);
}
