//! Pods that take more of the disk than they may: through emptyDirs, through the
//! writable layer, and through their logs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use linux::mount::{self, FuseConnections, MountFlags, UnmountMode, mount_fs};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tests::attacker::{self, Attack};
use tests::manifests;
use tests::node::{TIMEOUT, text};
use tests::{Node, NodeOptions, Sandbox, eventually};

use crate::{node, node_with};

const MOUNT: &str = "volumeMounts: [{name: scratch, mountPath: /scratch}]";

fn wait_for_eviction(node: &Node<'_>, pod: &str) -> Value {
    let evicted = node.wait_for_phase(pod, "Failed").expect("the pod fails");
    assert_eq!(evicted["status"]["reason"], "Evicted", "{}", evicted["status"]);
    evicted
}

#[test]
fn a_pod_over_the_limit_of_its_emptydir_is_evicted_and_its_space_is_freed() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let scratch = "volumes: [{name: scratch, emptyDir: {sizeLimit: 1Mi}}]";
    let greedy = "dd if=/dev/zero of=/scratch/f bs=1M count=8; sleep 1000";
    let greedy = Attack::new("greedy", greedy).with_pod_fields(scratch).with_container_fields(MOUNT);
    let modest = Attack::new("modest", "echo x > /scratch/f; sleep 1000");
    let modest = modest.with_pod_fields(scratch).with_container_fields(MOUNT);
    node.put_manifest("modest.yaml", &modest.yaml()).unwrap();
    node.put_manifest("greedy.yaml", &greedy.yaml()).unwrap();

    let evicted = wait_for_eviction(&node, "greedy");
    assert_eq!(
        evicted["status"]["message"],
        "Usage of EmptyDir volume \"scratch\" exceeds the limit \"1Mi\". "
    );
    let pod_dir = node.root_dir().join("pods").join(text(&evicted["metadata"]["uid"]));
    eventually("the emptyDir is gone", TIMEOUT, || {
        let dir = pod_dir.join("volumes/kubernetes.io~empty-dir");
        ensure!(!dir.exists(), "{}", dir.display());
        Ok(())
    })
    .unwrap();

    node.kubelet().unwrap().kill().unwrap();
    node.start_kubelet().unwrap();
    node.wait_for_phase("modest", "Running").unwrap();
    wait_for_eviction(&node, "greedy");
    assert_eq!(node.get("pod", "greedy").unwrap()["metadata"]["uid"], evicted["metadata"]["uid"]);
    node.finish(&idle).unwrap();
}

#[test]
fn a_container_over_its_ephemeral_storage_limit_is_evicted() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let limit = "resources: {limits: {ephemeral-storage: 1Mi}}";
    let layer = Attack::new("layer", "dd if=/dev/zero of=/tmp/f bs=1M count=8; sleep 1000");
    let log = Attack::new("log", "yes x | head -c 1000000; sleep 1000");
    for attack in [layer, log] {
        let attack = attack.with_container_fields(limit);
        node.put_manifest(&format!("{}.yaml", attack.name), &attack.yaml()).unwrap();
    }
    for pod in ["layer", "log"] {
        let evicted = wait_for_eviction(&node, pod);
        let message = "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. ";
        assert_eq!(evicted["status"]["message"], message, "{pod}");
    }
    node.finish(&idle).unwrap();
}

/// As many pods are measured at a time.
const TURNS: usize = 4;
/// A measurement keeps its turn for 35 s.
const TURNS_PASS: Duration = Duration::from_secs(100);

/// Of a pod, on the host.
fn scratch_dir(node: &Node<'_>, pod: &str) -> Result<PathBuf> {
    let uid = text(&node.get("pod", pod)?["metadata"]["uid"]);
    Ok(node.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/scratch"))
}

#[test]
fn pods_whose_files_cannot_be_counted_keep_no_other_from_eviction() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let volume = "volumes: [{name: data, persistentVolumeClaim: {claimName: c}}]";
    let user = Attack::new("user", "sleep 1000").with_pod_fields(volume);
    let user = user.with_container_fields("volumeMounts: [{name: data, mountPath: /data}]");
    node.put_manifest("claim.yaml", &manifests::claim("c", "64Mi")).unwrap();
    node.put_manifest("user.yaml", &user.yaml()).unwrap();
    let scratch = "volumes: [{name: scratch, emptyDir: {sizeLimit: 1Mi}}]";
    let slow: Vec<String> = (0..TURNS).map(|n| format!("slow-{n}")).collect();
    for name in &slow {
        let pod = Attack::new(name, "sleep 1000").with_pod_fields(scratch).with_container_fields(MOUNT);
        node.put_manifest(&format!("{name}.yaml"), &pod.yaml()).unwrap();
    }
    for name in slow.iter().map(String::as_str).chain(["user"]) {
        node.wait_for_phase(name, "Running").unwrap();
    }
    // Without a driver, which would end it after a minute, the daemon answers nothing.
    sandbox.switch_fuse_guard_off();
    let daemon = Pid::from_raw(node.processes("hawser-volume").unwrap()[0]);
    let data = node.volume_path("user").unwrap();
    let minor = mount::minor_of(fs::File::open(&data).unwrap()).unwrap();
    let dirs: Vec<PathBuf> = slow.iter().map(|name| scratch_dir(&node, name).unwrap()).collect();
    node.take_driver().unwrap().kill().unwrap();
    dirs.iter().for_each(|dir| mount::bind(&data, dir).unwrap());
    kill(daemon, Signal::SIGSTOP).unwrap();
    eventually("all turns are taken", TIMEOUT, || {
        let waiting = FuseConnections::open()?.waiting(minor)?;
        ensure!(waiting >= Some(TURNS as u64), "{waiting:?}");
        Ok(())
    })
    .unwrap();

    let greedy = Attack::new("greedy", "dd if=/dev/zero of=/scratch/f bs=1M count=8; sleep 1000");
    let greedy = greedy.with_pod_fields(scratch).with_container_fields(MOUNT);
    node.put_manifest("greedy.yaml", &greedy.yaml()).unwrap();
    eventually("another pod is evicted", TURNS_PASS, || {
        let reason = node.get("pod", "greedy")?["status"]["reason"].clone();
        ensure!(reason == "Evicted", "{reason}");
        Ok(())
    })
    .unwrap();
    dirs.iter().for_each(|dir| mount::unmount(dir, UnmountMode::Detach).unwrap());
    kill(daemon, Signal::SIGCONT).unwrap();
    node.start_driver().unwrap();
    node.finish(&idle).unwrap();
}

fn log_options(max_files: u32) -> NodeOptions {
    let kubelet_flags =
        vec!["--container-log-max-size=1Mi".to_owned(), format!("--container-log-max-files={max_files}")];
    NodeOptions { kubelet_flags, ..NodeOptions::default() }
}

/// Names and sizes of a pod's logs.
fn logs(node: &Node<'_>, pod: &str) -> Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for dir in fs::read_dir(node.log_dir()).context("the logs' directory")? {
        let dir = dir?.path();
        if !dir.file_name().unwrap_or_default().to_string_lossy().starts_with(&format!("default_{pod}_")) {
            continue;
        }
        for log in fs::read_dir(dir.join("attack"))? {
            let log = log?;
            // It may be rotated away just now.
            if let Ok(metadata) = log.metadata() {
                found.push((log.path(), metadata.len()));
            }
        }
    }
    Ok(found)
}

#[test]
fn a_log_never_takes_more_than_its_files() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with(&sandbox, log_options(3));
    node.put_manifest("flood.yaml", &Attack::new("flood", "yes flood").yaml()).unwrap();
    node.wait_for_phase("flood", "Running").unwrap();
    let until = Instant::now() + Duration::from_secs(13);
    eventually("the kubelet has looked at the logs more than once", TIMEOUT, || {
        let logs = logs(&node, "flood")?;
        let total: u64 = logs.iter().map(|(_, size)| size).sum();
        // 3 files of twice the size, and what is compressed just now.
        assert!(total <= 8 << 20, "{total} bytes: {logs:?}");
        ensure!(Instant::now() > until, "too early");
        ensure!(logs.len() >= 3, "{logs:?}");
        Ok(())
    })
    .unwrap();
    let shown = node.logs("flood").unwrap();
    assert!(shown.len() > 100_000 && shown.lines().all(|line| line == "flood"), "{}", shown.len());
    // All files of the log may be removed between a look at their names and their opening.
    eventually("the last lines", TIMEOUT, || {
        let shown = node.client(&["logs", "flood", "--tail=2"])?;
        ensure!(shown == "flood\nflood\n", "{shown:?}");
        Ok(())
    })
    .unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_container_that_ends_again_and_again_keeps_the_logs_of_its_last_instances() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let attack = Attack::new("again", "yes x | head -c 3000000; echo why > /dev/termination-log; exit 1");
    let yaml = attack.yaml().replace("restartPolicy: Never", "restartPolicy: Always");
    node.put_manifest("again.yaml", &yaml).unwrap();
    let instance = || -> Result<u64> {
        let pod = node.get("pod", "again")?;
        pod["status"]["containerStatuses"][0]["restartCount"].as_u64().context("it has no status yet")
    };
    eventually("its fourth start", 2 * TIMEOUT, || {
        let count = instance()?;
        ensure!(count >= 3, "{count} restarts");
        Ok(())
    })
    .unwrap();
    let mut numbers: Vec<u64> = Vec::new();
    for (path, _) in logs(&node, "again").unwrap() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        numbers.push(name.split('.').next().unwrap().parse().unwrap());
    }
    let oldest = numbers.iter().min().copied();
    assert!(oldest >= Some(2), "logs of instances {numbers:?}");
    let uid = text(&node.get("pod", "again").unwrap()["metadata"]["uid"]).to_owned();
    let own_files = node.root_dir().join("pods").join(uid).join("containers/attack");
    // Of two starts, each a termination log and an /etc/hosts.
    assert!(fs::read_dir(own_files).unwrap().count() <= 4);
    node.finish(&idle).unwrap();
}

fn is_compressed(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gz")
}

#[test]
fn a_log_is_rotated_by_size_compressed_and_read_as_one() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with(&sandbox, log_options(5));
    // 1.5 MiB at a time: too much for the kubelet, and not for the shim.
    let count = "i=0; n=0; while :; do n=$((n+30000)); while [ $i -lt $n ]; do i=$((i+1)); echo $i; done; sleep 11; done";
    node.put_manifest("writer.yaml", &Attack::new("writer", count).yaml()).unwrap();
    eventually("an older log is compressed", TIMEOUT * 2, || {
        let logs = logs(&node, "writer")?;
        ensure!(logs.iter().any(|(path, _)| is_compressed(path)), "{logs:?}");
        Ok(())
    })
    .unwrap();
    let log = node.logs("writer").unwrap();
    for (number, line) in (1..).zip(log.lines()) {
        assert_eq!(line, number.to_string(), "a gap");
    }
    assert!(log.lines().count() >= 40_000, "{}", log.lines().count());
    node.finish(&idle).unwrap();
}

#[test]
fn logs_are_read_over_their_rotations() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with(&sandbox, log_options(30));
    let count = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); echo $i; done";
    node.put_manifest("counter.yaml", &Attack::new("counter", count).yaml()).unwrap();
    eventually("the container has started", TIMEOUT, || node.logs("counter")).unwrap();
    let followed = node.client(&["logs", "-f", "counter", "-n", "default"]).unwrap();
    node.wait_for_phase("counter", "Succeeded").unwrap();
    let rotated = logs(&node, "counter").unwrap();
    assert!(rotated.len() > 2, "{rotated:?}");
    for (how, log) in [("logs -f", followed), ("logs", node.logs("counter").unwrap())] {
        for (number, line) in (1..).zip(log.lines()) {
            assert_eq!(line, number.to_string(), "{how}: a gap");
        }
        assert_eq!(log.lines().count(), 100_000, "{how}");
    }
    node.finish(&idle).unwrap();
}

#[test]
fn unused_images_and_dead_containers_make_room_on_a_full_disk() {
    let sandbox = Sandbox::new();
    let disk = sandbox.make_dir("disk").unwrap();
    mount_fs("tmpfs", "disk", &disk, MountFlags::default(), "size=400m").unwrap();
    let options = NodeOptions {
        disk: Some(disk.clone()),
        kubelet_flags: vec!["--minimum-image-ttl=0".to_owned()],
        ..NodeOptions::default()
    };
    let mut node = Node::start(&sandbox, options).unwrap();
    attacker::install(&node).unwrap();
    node.put_manifest("done.yaml", &Attack::new("done", "echo done").yaml()).unwrap();
    node.put_manifest("user.yaml", &Attack::new("user", "sleep 1000").yaml()).unwrap();
    let done = node.wait_for_phase("done", "Succeeded").unwrap();
    node.wait_for_phase("user", "Running").unwrap();
    let runtime = node.root_dir().join("hawser/runtime");
    let count = |dir: PathBuf| -> Result<usize> {
        Ok(fs::read_dir(&dir).with_context(|| dir.display().to_string())?.count())
    };
    eventually("three images are there", TIMEOUT, || {
        let images = count(runtime.join("images/records"))?;
        ensure!(images == 3, "{images}");
        Ok(())
    })
    .unwrap();

    let ballast = fs::File::create(disk.join("ballast")).unwrap();
    let free = nix::sys::statvfs::statvfs(&disk).unwrap();
    let bytes = free.blocks_available() * free.fragment_size() * 9 / 10;
    nix::fcntl::posix_fallocate(&ballast, 0, i64::try_from(bytes).unwrap()).unwrap();
    eventually("unused images and dead containers are gone", TIMEOUT, || {
        let images = count(runtime.join("images/records"))?;
        let mut containers = 0;
        for sandbox in fs::read_dir(runtime.join("sandboxes"))? {
            containers += count(sandbox?.path().join("containers"))?;
        }
        ensure!((images, containers) == (1, 1), "{images} images, {containers} containers");
        Ok(())
    })
    .with_context(|| node.outputs())
    .unwrap();

    // The end of the pod is remembered without its container; it is not run again.
    fs::remove_file(disk.join("ballast")).unwrap();
    node.kubelet().unwrap().kill().unwrap();
    node.start_kubelet().unwrap();
    node.wait_for_phase("user", "Running").unwrap();
    let again = node.wait_for_phase("done", "Succeeded").unwrap();
    assert_eq!(again["status"]["containerStatuses"], done["status"]["containerStatuses"]);
    // What was removed is there when it is wanted.
    let program = tests::manifests::Pod::new("program", &["print", "back"]);
    node.put_manifest("program.yaml", &program.yaml().replace("IfNotPresent", "Never")).unwrap();
    node.wait_for_phase("program", "Succeeded").unwrap();
    node.stop().unwrap();
}

#[test]
fn a_deleted_pods_emptydir_is_freed_while_no_driver_takes_its_volume_back() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let volumes = "volumes:
    - {name: scratch, emptyDir: {}}
    - {name: data, persistentVolumeClaim: {claimName: c}}
";
    let mounts = "volumeMounts: [{name: scratch, mountPath: /scratch}, {name: data, mountPath: /data}]";
    let pod = Attack::new("holder", "dd if=/dev/zero of=/scratch/f bs=1M count=8; sleep 1000");
    let pod = pod.with_pod_fields(volumes).with_container_fields(mounts);
    node.put_manifest("holder.yaml", &format!("{}---\n{}", manifests::claim("c", "64Mi"), pod.yaml()))
        .unwrap();
    node.wait_for_phase("holder", "Running").unwrap();
    let uid = text(&node.get("pod", "holder").unwrap()["metadata"]["uid"]).to_owned();
    let volumes = node.root_dir().join("pods").join(uid).join("volumes");

    node.driver().unwrap().kill().unwrap();
    node.remove_manifest("holder.yaml").unwrap();
    eventually("the emptyDir is gone", TIMEOUT, || {
        let dir = volumes.join("kubernetes.io~empty-dir");
        ensure!(!dir.exists(), "{}", dir.display());
        Ok(())
    })
    .unwrap();
    assert!(volumes.join("kubernetes.io~csi").exists(), "its volume cannot be gone without the driver");
    node.start_driver().unwrap();
    node.wait_for_no_pod("holder").unwrap();
    node.delete("pvc", "c").unwrap();
    node.finish(&idle).unwrap();
}
