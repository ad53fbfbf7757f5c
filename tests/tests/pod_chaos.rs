//! Many pods with claims, while the kubelet, the driver, daemons of volumes and shims are killed at random:
//! every pod ends as its YAML asks, and nothing is left.
//!
//! `HAWSER_TEST_LONG=1` (`cargo xtask test --long`): 100 pods and 100 kills. `HAWSER_CHAOS_SEED=<number>`
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
const MOUNT: &str = "volumeMounts: [{name: data, mountPath: /data}]";

/// It writes for some seconds, after what an earlier instance wrote, and is done once.
const JOB: &str = "i=0
while [ $i -lt 30 ]; do echo $i >> /data/log || exit 1; i=$((i+1)); sleep 0.1; done
echo done > /data/done && sync
";
/// It runs for ever and is ready while its volume answers.
const SERVICE: &str = "while echo beat > /data/beat; do sleep 0.2; done
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
    /// restartPolicy Never: it ends. Its restart count may be 1: like kubelet, ours also counts a container
    /// that was created and never started.
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
    Daemon,
    Shim,
}

const VICTIMS: [Victim; 6] =
    [Victim::Kubelet, Victim::Driver, Victim::Daemon, Victim::Daemon, Victim::Shim, Victim::Shim];

/// A process that ended by itself meanwhile is none to kill.
fn kill(node: &mut Node<'_>, random: &mut Random) -> Result<()> {
    let victim = *random.pick(&VICTIMS);
    let pids = match victim {
        Victim::Kubelet => {
            node.kubelet()?.kill()?;
            node.start_kubelet()?;
            Vec::new()
        }
        Victim::Driver => {
            node.driver()?.kill()?;
            node.start_driver()?;
            Vec::new()
        }
        Victim::Daemon => node.serving_daemons()?,
        Victim::Shim => {
            let is_shim = |line: &str| line.starts_with("hawser-shim ") || line.contains("/containerd-shim-");
            let processes = node.sandbox().tag().processes()?;
            let shims = processes.into_iter().filter(|process| is_shim(&process.command_line));
            shims.map(|shim| shim.pid).collect()
        }
    };
    if !pids.is_empty() {
        let pid = *random.pick(&pids);
        if let Err(error) = node.kill(pid) {
            ensure!(error.to_string().contains("is gone"), "{error:#}");
        }
    }
    eprintln!("killed: {victim:?}");
    Ok(())
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
    let wanted: Vec<(String, Kind)> =
        (0..pods).map(|number| (format!("pod-{number}"), KINDS[number % KINDS.len()])).collect();
    for (name, kind) in &wanted {
        node.put_manifest(&format!("claim-{name}.yaml"), &manifests::claim(name, "16Mi")).expect("put");
        node.put_manifest(&format!("{name}.yaml"), &kind.yaml(name)).expect("put");
    }
    let begun = Instant::now();
    for _ in 0..kills {
        // While pods start, run and end.
        std::thread::park_timeout(Duration::from_millis(random.below(600)));
        kill(&mut node, &mut random).with_context(|| node.outputs()).expect("a kill and a start");
    }
    eprintln!("{kills} kills in {:?}", begun.elapsed());
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
    }
    node.remove_all_manifests().expect("removed");
    let gone = eventually("no pod is left", SETTLED, || {
        let pods = node.list("pods")?;
        ensure!(pods.is_empty(), "{} pods", pods.len());
        Ok(())
    });
    gone.with_context(|| node.outputs()).expect("they go");
    node.finish(&idle).expect("nothing is left");
}
