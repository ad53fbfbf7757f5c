//! Many pods with claims, while the kubelet, the driver, its keeper, daemons of volumes and shims are killed
//! at random, as the pods start, run, and are deleted: every pod ends as its YAML asks, its data are there,
//! and nothing is left.
//!
//! `HAWSER_TEST_LONG=1` (`cargo xtask test --long`): 100 pods and 125 kills. `HAWSER_CHAOS_SEED=<number>`
//! repeats the choices of an earlier run.

#![expect(clippy::print_stderr, reason = "the kills are the report")]

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::attacker::{self, Attack};
use tests::manifests;
use tests::node::text;
use tests::random::Random;
use tests::{Keeper, Launcher, Node, NodeOptions, Sandbox, eventually};

const SEED: &str = "HAWSER_CHAOS_SEED";
/// For all pods to be where they should be, on a machine that other tests share: back-offs of containers
/// that were killed twice or three times are 10 s and 20 s.
const SETTLED: Duration = Duration::from_secs(240);
/// Descriptors that differ from one moment to the next: connections of clients, and of kubelet and driver.
const FEW: usize = 8;
const MOUNT: &str = "volumeMounts: [{name: data, mountPath: /data}]";

/// It counts for some seconds, behind what an earlier instance counted, and is done once. It prints what it
/// has written.
const JOB: &str = "i=0
while [ $i -lt 30 ]; do echo $i >> /data/log || exit 1; echo $i; i=$((i+1)); sleep 0.1; done
echo done > /data/done && sync
";
/// It counts for ever, and is ready while its volume answers.
const SERVICE: &str = "i=0
while echo $i >> /data/log; do echo $i; echo beat > /data/beat || exit 1; i=$((i+1)); sleep 0.2; done
exit 1
";
const READY: &str =
    "readinessProbe: {exec: {command: [/busybox, cat, /data/beat]}, periodSeconds: 1, timeoutSeconds: 5}";

/// What a pod's YAML asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// restartPolicy OnFailure: it succeeds in the end.
    Job,
    /// restartPolicy Always: it is ready in the end.
    Service,
    /// restartPolicy Never: it ends, and nothing in it runs twice. Its restart count may be 1: like kubelet,
    /// ours also counts a container that was created and never started.
    Once,
}

const KINDS: [Kind; 3] = [Kind::Job, Kind::Service, Kind::Once];

impl Kind {
    fn policy(self) -> &'static str {
        match self {
            Self::Job => "OnFailure",
            Self::Service => "Always",
            Self::Once => "Never",
        }
    }

    fn yaml(self, name: &str) -> String {
        let fields = format!("volumes: [{{name: data, persistentVolumeClaim: {{claimName: {name}}}}}]");
        let (script, container) = match self {
            Self::Job | Self::Once => (JOB, MOUNT.to_owned()),
            Self::Service => (SERVICE, format!("{MOUNT}\n{READY}")),
        };
        let attack = Attack::new(name, script).with_pod_fields(&fields).with_container_fields(&container);
        attack.yaml().replace("restartPolicy: Never", &format!("restartPolicy: {}", self.policy()))
    }

    /// Whether the pod is where its YAML wants it.
    fn check(self, pod: &Value) -> Result<()> {
        let status = &pod["status"];
        let phase = text(&status["phase"]);
        let container = &status["containerStatuses"][0];
        match self {
            Self::Job => ensure!(phase == "Succeeded", "{status}"),
            Self::Service => ensure!(phase == "Running" && container["ready"] == true, "{status}"),
            Self::Once => {
                ensure!(["Succeeded", "Failed"].contains(&phase.as_str()), "{status}");
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
enum Victim {
    Kubelet,
    Driver,
    Keeper,
    /// One that serves a volume, or waits for one.
    Daemon,
    Shim,
}

const VICTIMS: [Victim; 8] = [
    Victim::Kubelet,
    Victim::Kubelet,
    Victim::Driver,
    Victim::Keeper,
    Victim::Daemon,
    Victim::Daemon,
    Victim::Shim,
    Victim::Shim,
];

impl Victim {
    fn processes(self, node: &Node<'_>) -> Result<Vec<i32>> {
        match self {
            Self::Kubelet | Self::Driver => Ok(Vec::new()),
            Self::Keeper => node.processes("hawser-keeper"),
            Self::Daemon => node.processes("hawser-volume"),
            Self::Shim => {
                let is_shim =
                    |line: &str| line.starts_with("hawser-shim ") || line.contains("/containerd-shim-");
                let processes = node.sandbox().tag().processes()?;
                let shims = processes.into_iter().filter(|process| is_shim(&process.command_line));
                Ok(shims.map(|shim| shim.pid).collect())
            }
        }
    }
}

/// Kills one, if there is one: a process that ended by itself meanwhile is none to kill.
fn kill(node: &mut Node<'_>, random: &mut Random) -> Result<()> {
    let victim = *random.pick(&VICTIMS);
    // Of a connection's three holders, one is left at any time.
    if matches!(victim, Victim::Driver | Victim::Keeper) {
        wait_until_held(node)?;
    }
    let pids = victim.processes(node)?;
    match victim {
        Victim::Kubelet => {
            node.kubelet()?.kill()?;
            node.start_kubelet()?;
        }
        Victim::Driver => {
            node.driver()?.kill()?;
            node.start_driver()?;
        }
        _ if pids.is_empty() => {}
        _ => {
            if let Err(error) = node.kill(*random.pick(&pids)) {
                ensure!(error.to_string().contains("is gone"), "{error:#}");
            }
        }
    }
    eprintln!("killed: {victim:?}, of {}", pids.len().max(1));
    Ok(())
}

/// Until driver and keeper both hold each connection that is served.
fn wait_until_held(node: &Node<'_>) -> Result<()> {
    eventually("driver and keeper hold all connections", SETTLED, || {
        let mounts = node.driver_view("mounts")?;
        for mount in mounts.as_array().into_iter().flatten() {
            let holds = |who| mount["holders"].as_array().is_some_and(|all| all.contains(&Value::from(who)));
            ensure!(mount["daemon_pid"].is_null() || (holds("driver") && holds("keeper")), "{mount}");
        }
        Ok(())
    })
}

fn kill_many(node: &mut Node<'_>, random: &mut Random, kills: usize) {
    let begun = Instant::now();
    for _ in 0..kills {
        std::thread::park_timeout(Duration::from_millis(random.below(600)));
        let done = kill(node, random);
        done.with_context(|| format!("{}\n{}", node.describe_all(), node.outputs()))
            .expect("a kill and a start");
    }
    eprintln!("{kills} kills in {:?}", begun.elapsed());
}

/// What a pod counted is there, although processes were killed meanwhile: each instance from zero without a gap, and
/// the last one up to what it printed.
fn check_data(node: &Node<'_>, name: &str, kind: Kind) -> Result<()> {
    let data = match kind {
        Kind::Service => node.volume_path(name)?,
        // Its volume is not mounted any more.
        Kind::Job | Kind::Once => {
            let claim = node.get("pvc", name)?;
            let volume = node.get("pv", &text(&claim["spec"]["volumeName"]))?;
            let handle = text(&volume["spec"]["csi"]["volumeHandle"]);
            node.pool().join("volumes").join(handle).join("data")
        }
    };
    let printed = node.logs(name)?;
    let log = fs::read_to_string(data.join("log")).unwrap_or_default();
    let mut last: Option<u64> = None;
    for line in log.lines() {
        let number: u64 = line.parse().with_context(|| format!("{name}: {line:?}"))?;
        ensure!(
            number == 0 || last.is_some_and(|last| last + 1 == number),
            "{name}: {number} after {last:?}"
        );
        last = Some(number);
    }
    let runs = log.lines().filter(|line| *line == "0").count();
    ensure!(kind != Kind::Once || runs <= 1, "{name}: it has run {runs} times");
    let acknowledged = printed.lines().last().map(str::parse::<u64>).transpose()?;
    ensure!(acknowledged <= last, "{name}: it printed {acknowledged:?}, its volume has {last:?}");
    let pod = node.get("pod", name)?;
    if kind != Kind::Service && pod["status"]["phase"] == "Succeeded" {
        ensure!(last == Some(29) && data.join("done").exists(), "{name}: {last:?}");
    }
    Ok(())
}

/// How many descriptors kubelet, driver and keeper have open, while no volume is there.
fn open_descriptors(node: &mut Node<'_>) -> Result<[usize; 3]> {
    let keeper = node.wait_for_keeper()?;
    let [kubelet, driver] = [node.kubelet()?.pid().as_raw(), node.driver()?.pid().as_raw()];
    let count = |pid: i32| -> Result<usize> { Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count()) };
    Ok([count(kubelet)?, count(driver)?, count(keeper)?])
}

#[test]
fn every_pod_ends_as_its_yaml_asks_although_anything_is_killed() {
    let is_long = std::env::var_os("HAWSER_TEST_LONG").is_some_and(|value| !value.is_empty());
    let (pods, kills) = if is_long { (100, 100) } else { (9, 12) };
    let seed = Random::seed(SEED);
    eprintln!("{SEED}={seed}");
    let mut random = Random::new(seed);
    let sandbox = Sandbox::new();
    // A volume whose requests wait for the next daemon is the normal case here.
    sandbox.switch_fuse_guard_off();
    let options = NodeOptions {
        launcher: Launcher::Process,
        keeper: Keeper::Process,
        pool_capacity: "100Gi".to_owned(),
        ..NodeOptions::default()
    };
    let mut node = Node::start(&sandbox, options).expect("the node starts");
    attacker::install(&node).expect("the image");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put the class");
    node.set_warm_daemons(1).expect("a daemon waits");
    let before = open_descriptors(&mut node).expect("they run");
    let wanted: Vec<(String, Kind)> =
        (0..pods).map(|number| (format!("pod-{number}"), KINDS[number % KINDS.len()])).collect();
    for (name, kind) in &wanted {
        node.put_manifest(&format!("claim-{name}.yaml"), &manifests::claim(name, "16Mi")).expect("put");
        node.put_manifest(&format!("{name}.yaml"), &kind.yaml(name)).expect("put");
    }
    // While pods start, run and end.
    let begun = Instant::now();
    kill_many(&mut node, &mut random, kills);
    let settled = eventually("every pod is where its YAML wants it", SETTLED, || {
        let found = node.list("pods")?;
        for (name, kind) in &wanted {
            let pod = found.iter().find(|pod| pod["metadata"]["name"] == name.as_str());
            kind.check(pod.with_context(|| format!("{name} is not there"))?).with_context(|| name.clone())?;
        }
        Ok(())
    });
    settled
        .with_context(|| format!("{}\n{}", node.describe_all(), node.outputs()))
        .expect("all have settled");
    eprintln!("settled after {:?}", begun.elapsed());
    for (name, kind) in &wanted {
        if *kind == Kind::Service {
            let beat = node.volume_path(name).expect("its volume").join("beat");
            // The pod empties the file before it writes.
            let read = eventually("its volume answers", SETTLED, || {
                ensure!(fs::read_to_string(&beat)? == "beat\n", "it is empty");
                Ok(())
            });
            read.expect(name);
        }
        check_data(&node, name, *kind).expect("the data are there");
    }
    node.remove_all_manifests().expect("removed");
    // While pods end.
    kill_many(&mut node, &mut random, kills / 4);
    let gone = eventually("no pod is left", SETTLED, || {
        let pods = node.list("pods")?;
        ensure!(pods.is_empty(), "{} pods", pods.len());
        Ok(())
    });
    gone.with_context(|| format!("{}\n{}", node.describe_all(), node.outputs())).expect("they go");
    for claim in node.list("pvc").expect("claims") {
        node.delete("pvc", &text(&claim["metadata"]["name"])).expect("deleted");
    }
    let closed = eventually("descriptors are closed", SETTLED, || {
        let after = open_descriptors(&mut node)?;
        let is_few = before.iter().zip(after).all(|(before, after)| after <= before + FEW);
        ensure!(is_few, "kubelet, driver, keeper: {before:?} before, {after:?} after");
        Ok(())
    });
    closed.expect("no descriptor leaks");
    node.set_warm_daemons(0).expect("no daemon waits");
    node.finish(&idle).expect("nothing is left");
}
