//! Two pods share a volume and talk over the bridge; one confined daemon serves
//! both, and nothing is left of any of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::node::{TIMEOUT, text};
use tests::{Launcher, Node, NodeOptions, Sandbox, eventually, examples, manifests};

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID (linux/capability.h: 0, 1, 3, 4, 6, 7).
const SIX_CAPABILITIES: &str = "00000000000000db";

#[test]
fn two_pods_share_a_volume_served_by_one_confined_mount_pod() {
    two_pods_share_a_volume(Launcher::Manifest);
}

#[test]
fn two_pods_share_a_volume_served_by_one_confined_child_process() {
    two_pods_share_a_volume(Launcher::Process);
}

fn two_pods_share_a_volume(launcher: Launcher) {
    let sandbox = Sandbox::new();
    let node =
        Node::start(&sandbox, NodeOptions { launcher, ..NodeOptions::default() }).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    for file in ["claim.yaml", "pod-one.yaml", "pod-two.yaml"] {
        node.put_manifest(file, &examples::read(file).expect("an example")).expect("put");
    }
    let one = node.wait_for_log("one", &["wrote greetings"]).expect("pod one writes");
    let two = node.wait_for_log("two", &["fetched over v6"]).expect("pod two reads and fetches");
    let greeting = one.lines().find_map(|line| line.strip_prefix("wrote ")).expect("just awaited").to_owned();
    for line in ["read", "fetched over v4", "fetched over v6"] {
        assert!(two.contains(&format!("{line} {greeting}")), "{line} {greeting} is not in {two}");
    }

    let daemons = node.processes("hawser-volume").expect("the kernel answers");
    assert_eq!(daemons.len(), 1, "one daemon a volume");
    Confinement::of(daemons[0]).assert_least_privilege(&node, launcher);

    node.finish(&idle).expect("nothing is left");
}

/// What the kernel says a process may do and touch.
struct Confinement {
    pid: i32,
    status: String,
}

impl Confinement {
    fn of(pid: i32) -> Self {
        Self { pid, status: fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs") }
    }

    fn field(&self, name: &str) -> &str {
        let line = self.status.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap_or_else(|| panic!("no {name} in {}", self.status)).trim()
    }

    fn assert_least_privilege(&self, node: &Node<'_>, launcher: Launcher) {
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            assert_eq!(self.field(set), SIX_CAPABILITIES, "{set}");
        }
        for set in ["CapInh", "CapAmb"] {
            let value = self.field(set);
            assert!(["0000000000000000", SIX_CAPABILITIES].contains(&value), "{set} {value}");
        }
        assert_eq!((self.field("NoNewPrivs"), self.field("Seccomp")), ("1", "2"));
        for namespace in ["mnt", "net"] {
            let of = |task: &str| fs::read_link(format!("/proc/{task}/ns/{namespace}")).expect("a namespace");
            let (daemon, host) = (of(&self.pid.to_string()), of("thread-self"));
            assert_ne!(daemon, host, "{namespace} namespace");
        }
        self.assert_empty_network();
        self.assert_descriptors();
        self.assert_mounts(node, launcher);
    }

    /// lo at most, and it is down: no address, no route.
    fn assert_empty_network(&self) {
        let dev = fs::read_to_string(format!("/proc/{}/net/dev", self.pid)).expect("it runs");
        let links: Vec<&str> =
            dev.lines().skip(2).filter_map(|line| line.split(':').next()).map(str::trim).collect();
        assert!(links.iter().all(|link| *link == "lo"), "{links:?}");
        let routes = fs::read_to_string(format!("/proc/{}/net/fib_trie", self.pid)).expect("it runs");
        assert_eq!(routes.trim(), "", "addresses or routes");
    }

    /// stdio, /dev/fuse, the list of its own descriptors, and files of one mount that is in no mount table: the volume's detached tree.
    fn assert_descriptors(&self) {
        let own_mounts: BTreeSet<u64> = linux::mountinfo::read_of(self.pid)
            .expect("it runs")
            .iter()
            .map(|mount| mount.mount_id)
            .collect();
        let (mut fuse, mut own_descriptors, mut usage_files, mut events) = (0, 0, 0, 0);
        let mut sockets = Vec::new();
        let mut volume_mounts = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("it runs").flatten() {
            let number: u32 = entry.file_name().to_string_lossy().parse().expect("a number");
            let Ok(link) = fs::read_link(entry.path()) else { continue };
            let link = link.display().to_string();
            match number {
                0..=2 => assert!(!link.starts_with("socket:"), "stdio {number} is {link}"),
                _ if link == "/dev/fuse" || link == "/fuse" => fuse += 1,
                // Its own /proc/self/fd, through which it opens what it holds by O_PATH.
                _ if is_procfs(&entry.path()) => own_descriptors += 1,
                _ if link.starts_with("socket:") => sockets.push(link),
                // Its threads wake each other by it.
                _ if link == "anon_inode:[eventfd]" => events += 1,
                // Nothing can be opened from a regular file.
                _ if link.ends_with("/usage") && is_regular(&entry.path()) => usage_files += 1,
                _ => {
                    assert!(link.starts_with('/'), "descriptor {number} is {link}");
                    volume_mounts.insert(mount_id(self.pid, number), format!("{number} -> {link}"));
                }
            }
        }
        // One that is served, and its duplicate, by which the kernel is asked to forget inodes.
        assert_eq!(fuse, 2, "descriptors of /dev/fuse");
        assert!(own_descriptors <= 1, "{own_descriptors} descriptors of procfs");
        assert_eq!((usage_files, events), (1, 1), "usage files, eventfds");
        assert_eq!(listeners(&sockets), ["ctl.sock", "prom.sock"], "sockets: {sockets:?}");
        assert_eq!(volume_mounts.len(), 1, "mounts behind its other descriptors: {volume_mounts:?}");
        assert!(
            volume_mounts.keys().all(|id| !own_mounts.contains(id)),
            "the volume's tree is detached, in no mount table"
        );
    }

    /// Its root, the kernel's file systems of a container, and the directory of its own dial socket.
    fn assert_mounts(&self, node: &Node<'_>, launcher: Launcher) {
        let mounts = linux::mountinfo::read_of(self.pid).expect("it runs");
        let run_dir = node.sandbox().path("run");
        for mount in &mounts {
            let kernel =
                ["proc", "sysfs", "devpts", "mqueue", "tmpfs", "overlay", "cgroup", "cgroup2", "devtmpfs"];
            let kernel = kernel.contains(&mount.fs_type.as_str());
            let dial = mount.mount_point == Path::new("/run/hawser") && mount.root.starts_with(&run_dir);
            let kubelet_file =
                ["/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/dev/termination-log", "/dev/shm"]
                    .iter()
                    .any(|path| mount.mount_point == Path::new(path));
            assert!(kernel || dial || kubelet_file, "{mount:?}");
        }
        if launcher == Launcher::Process {
            assert_eq!(mounts.len(), 1, "an empty root and nothing else: {mounts:?}");
        }
        let root = mounts.iter().find(|mount| mount.mount_point == Path::new("/")).expect("a root");
        assert!(root.is_read_only(), "{root:?}");
    }
}

fn is_regular(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file())
}

/// The names that the sockets, given as `socket:[INODE]`, listen by in this
/// network namespace, the driver's: proc_net_unix(5), flag `__SO_ACCEPTCON`. One
/// that does not listen there is `?`.
fn listeners(sockets: &[String]) -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/net/unix").expect("procfs");
    let name_of = |socket: &String| {
        let inode = socket.trim_start_matches("socket:[").trim_end_matches(']');
        let row = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let listening = row.filter(|row| row.get(3) == Some(&"00010000"));
        let path = listening.filter(|row| row.get(6) == Some(&inode)).find_map(|row| row.get(7).copied());
        path.and_then(|path| path.rsplit('/').next()).unwrap_or("?").to_owned()
    };
    let mut names: Vec<String> = sockets.iter().map(name_of).collect();
    names.sort();
    names
}

fn is_procfs(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::PROC_SUPER_MAGIC)
}

fn mount_id(pid: i32, descriptor: u32) -> u64 {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).expect("it is open");
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).expect("mnt_id");
    id.trim().parse().expect("a number")
}

#[test]
fn files_belong_to_whoever_creates_them_and_both_pods_see_every_change() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).unwrap();
    let idle = node.leak_check().unwrap();
    node.put_class().unwrap();
    node.put_manifest("claim.yaml", &manifests::claim("shared", "64Mi")).unwrap();
    let writer = manifests::Pod::new("writer", &["write", "/data/note", "kept"]).with_claim("shared");
    node.put_manifest("writer.yaml", &writer.yaml()).unwrap();
    node.wait_for_phase("writer", "Succeeded").unwrap();
    let reader = manifests::Pod::new("reader", &["cat", "/data/note"]).with_claim("shared");
    node.put_manifest("reader.yaml", &reader.yaml()).unwrap();
    node.wait_for_phase("reader", "Succeeded").unwrap();
    assert_eq!(node.logs("reader").unwrap(), "kept\n");
    node.finish(&idle).unwrap();
}

#[test]
fn the_daemon_goes_with_the_last_pod_and_not_before() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).unwrap();
    let idle = node.leak_check().unwrap();
    node.put_class().unwrap();
    node.put_manifest("claim.yaml", &manifests::claim("shared", "64Mi")).unwrap();
    for name in ["first", "second"] {
        let pod = manifests::Pod::new(name, &["sleep", "forever"]).with_claim("shared");
        node.put_manifest(&format!("{name}.yaml"), &pod.yaml()).unwrap();
    }
    for name in ["first", "second"] {
        node.wait_for_phase(name, "Running").unwrap();
    }
    node.remove_manifest("first.yaml").unwrap();
    node.wait_for_no_pod("first").unwrap();
    assert_eq!(node.processes("hawser-volume").unwrap().len(), 1);
    fs::read_dir(node.volume_path("second").unwrap()).expect("the volume serves on");
    node.remove_manifest("second.yaml").unwrap();
    node.wait_for_no_pod("second").unwrap();
    eventually("the daemon is gone", TIMEOUT, || {
        let left = node.processes("hawser-volume")?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
    .unwrap();
    let claim = node.get("pvc", "shared").unwrap();
    assert_eq!(text(&claim["status"]["phase"]), "Bound", "the claim stays");
    node.finish(&idle).unwrap();
}

#[test]
fn of_pods_that_wait_for_a_volume_of_read_write_once_pod_one_has_it_and_then_another() {
    let names: Vec<String> = (0..8).map(|n| format!("pod-{n}")).collect();
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).unwrap();
    let idle = node.leak_check().unwrap();
    node.put_class().unwrap();
    // All wait for the claim: they want the volume at the same moment.
    for name in &names {
        let pod = manifests::Pod::new(name, &["sleep", "forever"]).with_claim("single");
        node.put_manifest(&format!("{name}.yaml"), &pod.yaml()).unwrap();
        wait_for_event_of(&node, name, "\"single\" not found").unwrap();
    }
    let claim = manifests::claim("single", "64Mi").replace("ReadWriteMany", "ReadWriteOncePod");
    node.put_manifest("claim.yaml", &claim).unwrap();

    let running = || {
        let runs =
            |name: &&String| node.get("pod", name).is_ok_and(|pod| pod["status"]["phase"] == "Running");
        names.iter().filter(runs).collect::<Vec<_>>()
    };
    let one_runs = || {
        let found = running();
        ensure!(found.len() == 1, "{found:?} run\n{}", node.describe_all());
        Ok(found[0])
    };
    let first = eventually("one of the pods runs", TIMEOUT, one_runs).unwrap();
    for other in names.iter().filter(|name| *name != first) {
        wait_for_event_of(&node, other, "ReadWriteOncePod access mode and is already in use").unwrap();
    }
    assert_eq!(running(), [first], "{}", node.describe_all());
    node.remove_manifest(&format!("{first}.yaml")).unwrap();
    node.wait_for_no_pod(first).unwrap();
    eventually("another of the pods runs", TIMEOUT, one_runs).unwrap();

    node.finish(&idle).unwrap();
}

fn wait_for_event_of(node: &Node<'_>, pod: &str, words: &str) -> Result<()> {
    eventually(&format!("an event of pod {pod} with {words:?}"), TIMEOUT, || {
        let events = node.list("events")?;
        let is_it =
            |event: &Value| event["involvedObject"]["name"] == pod && text(&event["message"]).contains(words);
        ensure!(events.iter().any(is_it), "{events:#?}");
        Ok(())
    })
}

#[test]
fn a_parked_mount_pod_serves_the_next_pod() {
    a_parked_daemon_serves_the_next_pod(Launcher::Manifest);
}

#[test]
fn a_parked_child_process_serves_the_next_pod() {
    a_parked_daemon_serves_the_next_pod(Launcher::Process);
}

fn a_parked_daemon_serves_the_next_pod(launcher: Launcher) {
    let sandbox = Sandbox::new();
    let node =
        Node::start(&sandbox, NodeOptions { launcher, ..NodeOptions::default() }).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    let patient = manifests::class("patient", "csi.hawser.dev");
    let patient = format!("{patient}parameters: {{mountPodDeleteDelaySeconds: \"3600\"}}\n");
    node.put_manifest("patient.yaml", &patient).expect("put");
    node.put_manifest("claim.yaml", &manifests::claim_of_class("shared", "64Mi", "patient")).expect("put");
    let mut daemons = Vec::new();
    for (name, args) in
        [("writer", ["write", "/data/note", "kept"].as_slice()), ("reader", &["cat", "/data/note"])]
    {
        let pod = manifests::Pod::new(name, args).with_claim("shared");
        let file = format!("{name}.yaml");
        node.put_manifest(&file, &pod.yaml()).expect("put");
        node.wait_for_phase(name, "Succeeded").expect("it succeeds");
        if name == "reader" {
            assert_eq!(node.logs(name).expect("its log"), "kept\n");
        }
        node.remove_manifest(&file).expect("removed");
        node.wait_for_no_pod(name).expect("it goes");
        eventually("the volume is mounted nowhere", TIMEOUT, || {
            let seen = linux::mountinfo::read()?;
            ensure!(seen.iter().all(|mount| mount.fs_type != "fuse.hawser"), "{seen:?}");
            Ok(())
        })
        .expect("it was unstaged");
        daemons.extend(node.processes("hawser-volume").expect("the kernel answers"));
    }
    let is_one = daemons.len() == 2 && daemons[0] == daemons[1];
    assert!(is_one, "one and the same: {daemons:?}\n{}", node.outputs());
    // Its claim's deletion deletes the volume, and with it the daemon.
    node.remove_manifest("claim.yaml").expect("removed");
    node.delete("pvc", "shared").expect("deleted");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn the_long_lived_processes_hold_no_more_descriptors_after_many_pods() {
    let sandbox = Sandbox::new();
    let mut node = Node::start(&sandbox, NodeOptions::default()).unwrap();
    let idle = node.leak_check().unwrap();
    node.put_class().unwrap();
    run_pod_with_claim(&node, 0).unwrap();
    let before = open_descriptors(&mut node);
    for round in 1..4 {
        run_pod_with_claim(&node, round).unwrap();
    }
    eventually("descriptors are as many as after the first pod", TIMEOUT, || {
        let after = open_descriptors(&mut node);
        ensure!(
            after.0 <= before.0 && after.1 <= before.1,
            "kubelet, driver: {before:?} before, {after:?} after"
        );
        Ok(())
    })
    .unwrap();
    node.finish(&idle).unwrap();
}

fn run_pod_with_claim(node: &Node<'_>, round: usize) -> Result<()> {
    let name = format!("round-{round}");
    let pod = manifests::Pod::new(&name, &["write", "/data/x", "y"]).with_claim(&name);
    node.put_manifest(
        &format!("{name}.yaml"),
        &format!("{}---\n{}", manifests::claim(&name, "1Mi"), pod.yaml()),
    )?;
    node.wait_for_phase(&name, "Succeeded")?;
    node.remove_manifest(&format!("{name}.yaml"))?;
    node.wait_for_no_pod(&name)?;
    node.delete("pvc", &name)
}

/// Of the kubelet and of the driver.
fn open_descriptors(node: &mut Node<'_>) -> (usize, usize) {
    let count = |pid: i32| -> usize {
        let dir = PathBuf::from(format!("/proc/{pid}/fd"));
        fs::read_dir(&dir).with_context(|| dir.display().to_string()).expect("it runs").count()
    };
    let (kubelet, driver) = (node.kubelet().expect("started").pid(), node.driver().expect("started").pid());
    (count(kubelet.as_raw()), count(driver.as_raw()))
}
