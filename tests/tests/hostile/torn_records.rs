//! Records that a power cut or a bad disk tore: empty, cut short, or garbage.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use tests::attacker::{self, Attack};
use tests::cgroups::Tag;
use tests::manifests::{self, Pod};
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually};

const USER: Pod<'_> = Pod { restart_policy: "Always", ..TEMPLATE };
const TEMPLATE: Pod<'_> = Pod {
    name: "user",
    args: &["sleep", "forever"],
    claim: Some("c"),
    image: tests::examples::DEMO_IMAGE,
    command: "/demo-app",
    restart_policy: "Never",
};

/// Where records are kept that were set aside, below the root directory.
const PLACES: [&str; 2] = ["hawser/unreadable", "hawser/runtime/unreadable"];

#[derive(Debug, Clone, Copy)]
enum Damage {
    Empty,
    CutShort,
    Garbage,
}

const ALL: [Damage; 3] = [Damage::Empty, Damage::CutShort, Damage::Garbage];

impl Damage {
    /// What the record holds afterwards.
    fn inflict(self, path: &Path) -> Vec<u8> {
        let content = fs::read(path).unwrap();
        let torn = match self {
            Self::Empty => Vec::new(),
            Self::CutShort => content[..content.len() / 2].to_vec(),
            Self::Garbage => vec![0xa5; content.len()],
        };
        fs::write(path, &torn).unwrap();
        torn
    }
}

/// The one file below `dir` that has this name, and `part` in its path.
fn find(dir: &Path, part: &str, name: &str) -> PathBuf {
    let mut pending = vec![dir.to_owned()];
    let mut found = Vec::new();
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && !path.ends_with("mount") {
                pending.push(path);
            } else if path.ends_with(name) && path.to_string_lossy().contains(part) {
                found.push(path);
            }
        }
    }
    assert_eq!(found.len(), 1, "{name} below {}: {found:?}", dir.display());
    found.remove(0)
}

/// A pod, and what its one process has in its command line and no other process has.
#[derive(Debug, Clone, Copy)]
struct Watched {
    pod: &'static str,
    mark: &'static str,
}

const WATCHED_USER: Watched = Watched { pod: "user", mark: "/demo-app sleep forever" };

impl Watched {
    /// How many of it run on the node; other tests have such pods too.
    fn copies(self, node: &Tag) -> usize {
        let processes = node.processes().unwrap();
        processes.iter().filter(|process| process.command_line.contains(self.mark)).count()
    }
}

/// Tears records while no kubelet runs, and starts one: the pod runs again, and never
/// twice. What the records held then.
fn tear_and_start(
    node: &mut Node<'_>,
    watched: Watched,
    damage: Damage,
    records: &[PathBuf],
) -> Result<Vec<Vec<u8>>> {
    node.kubelet()?.kill()?;
    let torn = records.iter().map(|record| damage.inflict(record)).collect();
    start_and_watch(node, watched).with_context(|| format!("{damage:?} {records:?}"))?;
    Ok(torn)
}

/// Starts a kubelet; fails when there is ever more than one copy of the pod.
fn start_and_watch(node: &mut Node<'_>, watched: Watched) -> Result<()> {
    let (done, most) = (AtomicBool::new(false), AtomicUsize::new(0));
    let tag = node.sandbox().tag();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                most.fetch_max(watched.copies(tag), Ordering::Relaxed);
            }
        });
        let restarted = node.start_kubelet().and_then(|()| {
            eventually("the pod runs", TIMEOUT, || {
                let pod = node.get("pod", watched.pod)?;
                let status = &pod["status"];
                ensure!(text(&status["phase"]) == "Running", "{status}");
                ensure!(status["containerStatuses"][0]["ready"] == true, "{status}");
                let copies = watched.copies(tag);
                ensure!(copies == 1, "{copies} copies");
                Ok(())
            })
            .with_context(|| node.outputs())
        });
        done.store(true, Ordering::Relaxed);
        restarted
    })?;
    ensure!(most.load(Ordering::Relaxed) == 1, "the pod ran twice");
    Ok(())
}

/// The same of one record that has to be set aside: an event names it, and its content
/// is kept.
fn tear_one(node: &mut Node<'_>, damage: Damage, find: impl Fn(&Path) -> PathBuf) {
    let root = node.root_dir();
    let record = find(&root);
    let torn = tear_and_start(node, WATCHED_USER, damage, std::slice::from_ref(&record)).unwrap();
    let name = record.file_name().unwrap().to_str().unwrap();
    node.wait_for_event("UnreadableRecord", &[name]).unwrap();
    let kept = PLACES.iter().flat_map(|place| fs::read_dir(root.join(place)).into_iter().flatten().flatten());
    let kept: Vec<_> = kept.map(|entry| fs::read(entry.path()).unwrap()).collect();
    assert!(kept.contains(&torn[0]), "{damage:?} {}: {} kept", record.display(), kept.len());
}

/// All else must go.
fn node_that_keeps_torn_records(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).unwrap();
    let mut allowed = node.allowed();
    allowed.changing.extend(PLACES.map(|place| node.root_dir().join(place)));
    let idle = LeakCheck::start(sandbox, allowed).unwrap();
    node.put_class().unwrap();
    (node, idle)
}

fn put_user_and_claim(node: &Node<'_>) {
    node.put_manifest("claim.yaml", &manifests::claim("c", "1Mi")).unwrap();
    node.put_manifest("user.yaml", &USER.yaml()).unwrap();
    node.wait_for_phase("user", "Running").unwrap();
}

#[test]
fn a_pod_whose_record_is_torn_never_runs_twice() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    put_user_and_claim(&node);
    for damage in ALL {
        tear_one(&mut node, damage, |root| find(root, "/Pod/", "default_user.json"));
    }
    node.finish(&idle).unwrap();
}

/// An edited manifest is another pod, by its uid, and the one before takes no notice of
/// SIGTERM: it is init of its namespace.
#[test]
fn a_pod_that_is_slow_to_end_and_whose_record_is_torn_ends_before_its_successor_starts() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    attacker::install(&node).unwrap();
    let pod = Attack::new("slow", "exec sleep 86399");
    node.put_manifest("slow.yaml", &pod.yaml()).unwrap();
    node.wait_for_phase("slow", "Running").unwrap();
    let record = find(&node.root_dir(), "/Pod/", "default_slow.json");
    node.kubelet().unwrap().kill().unwrap();
    Damage::CutShort.inflict(&record);
    node.put_manifest("slow.yaml", &pod.with_pod_fields("hostname: another\n").yaml()).unwrap();
    start_and_watch(&mut node, Watched { pod: "slow", mark: "86399" }).unwrap();
    node.finish(&idle).unwrap();
}

#[test]
fn a_sandbox_whose_record_is_torn_ends_before_the_pod_runs_again() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    put_user_and_claim(&node);
    for damage in ALL {
        tear_one(&mut node, damage, |root| of_the_user(root, "sandbox.json"));
    }
    node.finish(&idle).unwrap();
}

#[test]
fn a_container_whose_record_is_torn_ends_before_it_is_started_again() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    put_user_and_claim(&node);
    for damage in ALL {
        tear_one(&mut node, damage, |root| of_the_user(root, "container.json"));
    }
    node.finish(&idle).unwrap();
}

#[test]
fn a_volume_whose_records_are_torn_is_found_again_with_its_data() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    put_user_and_claim(&node);
    fs::write(node.volume_path("user").unwrap().join("kept"), "data").unwrap();
    for damage in ALL {
        tear_one(&mut node, damage, |root| find(root, "kubernetes.io~csi", "vol_data.json"));
        tear_one(&mut node, damage, |root| find(root, "kubernetes.io/csi", "vol_data.json"));
        tear_one(&mut node, damage, |root| find(root, "/PersistentVolumeClaim/", "default_c.json"));
        eventually("the claim has its volume again", TIMEOUT, || {
            let claim = node.get("pvc", "c")?;
            ensure!(text(&claim["status"]["phase"]) == "Bound", "{claim}");
            Ok(())
        })
        .unwrap();
        let kept = node.volume_path("user").unwrap().join("kept");
        assert_eq!(fs::read_to_string(kept).unwrap(), "data");
    }
    node.finish(&idle).unwrap();
}

#[test]
fn torn_records_of_classes_and_of_the_manifest_directory_do_not_stop_the_node() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    put_user_and_claim(&node);
    for damage in ALL {
        tear_one(&mut node, damage, |root| find(root, "/StorageClass/", "_hawser.json"));
        let record = find(&node.root_dir(), "/hawser/", "manifests.json");
        tear_and_start(&mut node, WATCHED_USER, damage, &[record]).unwrap();
    }
    node.finish(&idle).unwrap();
}

/// What a bad disk does to a node whose pods still run.
#[test]
fn all_records_of_a_pod_torn_at_once_leave_one_pod_and_nothing_else() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node_that_keeps_torn_records(&sandbox);
    put_user_and_claim(&node);
    for damage in ALL {
        let root = node.root_dir();
        let records = [
            find(&root, "/Pod/", "default_user.json"),
            find(&root, "kubernetes.io~csi", "vol_data.json"),
            find(&root, "kubernetes.io/csi", "vol_data.json"),
            of_the_user(&root, "sandbox.json"),
            of_the_user(&root, "container.json"),
        ];
        tear_and_start(&mut node, WATCHED_USER, damage, &records).unwrap();
    }
    node.finish(&idle).unwrap();
}

/// A record of the user's sandbox, not of the mount pod's: the one that names its image or pod.
fn of_the_user(root: &Path, name: &str) -> PathBuf {
    let sandboxes = root.join("hawser/runtime/sandboxes");
    let all = fs::read_dir(&sandboxes).unwrap().map(|entry| entry.unwrap().path());
    let is_users = |dir: &PathBuf| {
        let containers = fs::read_dir(dir.join("containers")).into_iter().flatten().flatten();
        containers.into_iter().any(|entry| {
            let spec = fs::read_to_string(entry.path().join("config.json")).unwrap_or_default();
            spec.contains("/demo-app")
        })
    };
    let users: Vec<PathBuf> = all.filter(is_users).collect();
    assert_eq!(users.len(), 1, "{users:?}");
    find(&users[0], "", name)
}
