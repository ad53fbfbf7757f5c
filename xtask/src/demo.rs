//! `demo`: from YAML to two pods that share a volume and talk over the bridge,
//! and back to a clean machine. Every step is verified; the timeline at the end
//! is what the processes themselves recorded.

mod chaos;

use std::fs;
use std::path::Path;
use std::time::Duration;

use ::tests::binaries::{self, target_dir};
use ::tests::examples::{self, BRIDGE};
use ::tests::node::{TIMEOUT, text};
use ::tests::{
    Allowed, Keeper, Launcher, LeakCheck, Network, Node, NodeOptions, Sandbox, eventually, netlink,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use trace::monotonic_ns;
use xtask::build::{products, require_root};
use xtask::progress::{part, say, step};
use xtask::timeline::{self, Phase};

use crate::{DemoArguments, LauncherName};

/// Where the two pods serve their volume.
const PORT: u16 = 8080;
/// host-local's and the kernel's last breath after a pod.
const SETTLING: Duration = Duration::from_secs(10);

pub(crate) fn run(arguments: &DemoArguments) -> Result<()> {
    require_root("demo")?;
    part("build the static binaries", products)?;
    let network = if arguments.host_network { Network::Callers } else { Network::Own };
    if network == Network::Callers {
        let taken = netlink::links()?.iter().any(|link| link.name == BRIDGE);
        ensure!(
            !taken,
            "--host-network: this machine has a link {BRIDGE} already, which the demo would delete"
        );
    }
    let forwarding = Forwarding::read();
    let mut sandbox = Sandbox::enter(network)?;
    if arguments.keep {
        sandbox.keep_directory();
    }
    say(&format!("==> demo in {}", sandbox.dir().display()));
    let shown = show(&sandbox, arguments);
    if arguments.keep {
        say(&format!("logs and traces: {}", sandbox.dir().display()));
    }
    if network == Network::Callers {
        if shown.is_err() {
            // There is a bridge only if the demo got that far.
            let _not_made_yet = netlink::delete_link(BRIDGE);
        }
        forwarding.write_back()?;
    }
    shown?;
    let left = if arguments.keep { "nothing is left but that directory" } else { "nothing is left" };
    say(&format!("\nevery step was verified, and {left}"));
    Ok(())
}

fn show(sandbox: &Sandbox, arguments: &DemoArguments) -> Result<()> {
    let everything = LeakCheck::start(sandbox, allowed_outside_the_node(sandbox))?;
    let options = NodeOptions {
        launcher: match arguments.launcher {
            LauncherName::Manifest => Launcher::Manifest,
            LauncherName::Process => Launcher::Process,
        },
        cni_bin_dir: arguments
            .cni_bin_dir
            .as_deref()
            .map(fs::canonicalize)
            .transpose()
            .context("--cni-bin-dir")?,
        oci_runtime: arguments.oci_runtime.clone(),
        keeper: Keeper::Process,
        ..NodeOptions::default()
    };
    let mut phases = Phases::default();
    let mut node = phases.run("start kubelet and driver", || {
        step("make the images from static programs; start hawser-csi and hawser-kubelet", || {
            let mut node = Node::prepare(sandbox, options)?;
            if arguments.chaos {
                chaos::write_image(sandbox)?;
            }
            node.start_all()?;
            Ok(node)
        })
    })?;
    let pods = bring_up(&node, &mut phases)?;
    verify(&node, &pods)?;
    if arguments.chaos {
        phases.run("kills", || chaos::kill_again_and_again(&mut node))?;
    }
    take_down(&node, &mut phases)?;
    step("the node is as it was before the first object, files and leases included", || {
        pods.idle.verify(sandbox, SETTLING).with_context(|| node.outputs())
    })?;
    let trace = node.trace_file();
    phases.run("stop the node", || {
        step("stop: the kubelet with its pods, the driver", || node.stop())?;
        step(&format!("delete the bridge {BRIDGE}, which CNI leaves by contract"), || {
            netlink::delete_link(BRIDGE)
        })
    })?;
    step("nothing is left: links, routes, nft tables, mounts, cgroups, processes, sockets", || {
        everything.verify(sandbox, SETTLING)
    })?;
    draw_timeline(&phases.0, &trace)
}

/// The demo's own: its directory, and the control group by which it knows its
/// processes; both go with the sandbox.
fn allowed_outside_the_node(sandbox: &Sandbox) -> Allowed {
    let cgroup = sandbox.cgroup_root().parent().map(Path::to_path_buf);
    let volumes = sandbox.volumes_cgroup_root();
    Allowed {
        changing: vec![sandbox.dir().to_path_buf()],
        cgroups: cgroup.into_iter().chain([volumes.join("keeper"), volumes]).collect(),
        ..Allowed::default()
    }
}

/// What the checks need of the two pods.
struct Pods {
    addresses_of_one: Vec<String>,
    addresses_of_two: Vec<String>,
    /// Taken on the idle node, before the first object.
    idle: LeakCheck,
}

fn bring_up(node: &Node<'_>, phases: &mut Phases) -> Result<Pods> {
    let idle = node.leak_check()?;
    phases.run("StorageClass and claim", || {
        step("storageclass.yaml and claim.yaml: the claim is bound to a volume of 1Gi", || {
            node.put_class()?;
            node.put_manifest("claim.yaml", &examples::read("claim.yaml")?)?;
            eventually("the claim is Bound", TIMEOUT, || {
                let claim = node.get("pvc", "shared")?;
                ensure!(claim["status"]["phase"] == "Bound", "{}", claim["status"]);
                ensure!(claim["status"]["capacity"]["storage"] == "1Gi", "{}", claim["status"]);
                Ok(())
            })
            .with_context(|| node.outputs())
        })
    })?;
    let (one, two) = phases.run("two pods", || {
        step("pod-one.yaml and pod-two.yaml: both run", || {
            node.put_manifest("pod-one.yaml", &examples::read("pod-one.yaml")?)?;
            node.put_manifest("pod-two.yaml", &examples::read("pod-two.yaml")?)?;
            let pods = (node.wait_for_phase("one", "Running")?, node.wait_for_phase("two", "Running")?);
            // Inside the phase, so that the timeline ends where the pods' work does.
            node.wait_for_log("two", &["fetched over v4", "fetched over v6"])?;
            Ok(pods)
        })
    })?;
    Ok(Pods { addresses_of_one: pod_ips(&one)?, addresses_of_two: pod_ips(&two)?, idle })
}

fn pod_ips(pod: &Value) -> Result<Vec<String>> {
    let ips = pod["status"]["podIPs"].as_array().cloned().unwrap_or_default();
    ensure!(ips.len() == 2, "one v4 and one v6 address were wanted: {}", pod["status"]);
    Ok(ips.iter().map(|ip| text(&ip["ip"])).collect())
}

fn verify(node: &Node<'_>, pods: &Pods) -> Result<()> {
    let greeting = step("pod one wrote a file into the volume", || {
        let log = node.wait_for_log("one", &["wrote greetings from"])?;
        let line = log.lines().find_map(|line| line.strip_prefix("wrote "));
        line.map(str::to_owned).context("no such line")
    })?;
    let log = node.logs("two")?;
    for (what, line) in [
        ("pod two read the file", format!("read {greeting}")),
        ("pod two fetched it from pod one over the bridge by v4", format!("fetched over v4 {greeting}")),
        ("pod two fetched it from pod one over the bridge by v6", format!("fetched over v6 {greeting}")),
    ] {
        step(what, || {
            ensure!(log.lines().any(|logged| logged == line), "the log of two has no {line:?}: {log:?}");
            Ok(())
        })?;
    }
    for (pod, addresses) in [("one", &pods.addresses_of_one), ("two", &pods.addresses_of_two)] {
        for address in addresses {
            step(&format!("the host fetches it from pod {pod} at {address}"), || {
                let body = fetch(node, address)?;
                ensure!(body.trim_end() == greeting, "got {body:?}, want {greeting:?}");
                Ok(())
            })?;
        }
    }
    step("the file is in the pool, where the volume's data lie", || {
        ensure!(
            holds_file_with(&node.pool(), &greeting)?,
            "no file below {} holds it",
            node.pool().display()
        );
        Ok(())
    })?;
    step("exactly one hawser-volume serves both pods", || {
        let processes = node.sandbox().tag().processes()?;
        let daemons: Vec<_> = processes.iter().filter(|process| process.name == "hawser-volume").collect();
        ensure!(daemons.len() == 1, "{daemons:?}");
        Ok(())
    })
}

/// From the demo's own network namespace, which is the pods' host.
fn fetch(node: &Node<'_>, address: &str) -> Result<String> {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    let mut command = node.sandbox().command(&binaries::find("demo-app")?);
    let output =
        command.args(["fetch", &format!("http://{host}:{PORT}/greeting")]).output().context("demo-app")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).context("the greeting")
}

fn holds_file_with(dir: &Path, line: &str) -> Result<bool> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry.with_context(|| dir.display().to_string())?.path();
        let found = if path.is_dir() {
            holds_file_with(&path, line)?
        } else {
            fs::read_to_string(&path).is_ok_and(|text| text.trim_end() == line)
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

fn take_down(node: &Node<'_>, phases: &mut Phases) -> Result<()> {
    phases.run("delete", || {
        step("the pods' files are removed: the pods end, the volume is unmounted", || {
            for pod in ["one", "two"] {
                node.remove_manifest(&format!("pod-{pod}.yaml"))?;
            }
            node.wait_for_no_pods()
        })?;
        step("the claim is deleted: its volume and its data go", || {
            node.remove_manifest("claim.yaml")?;
            node.delete("pvc", "shared")?;
            eventually("no volume is left", TIMEOUT, || {
                ensure!(node.list("pv")?.is_empty(), "{}", node.client(&["get", "pv"])?);
                Ok(())
            })
        })?;
        step("the class and the driver object are deleted", || {
            node.remove_manifest("storageclass.yaml")?;
            node.delete("storageclass", "hawser")?;
            node.delete("csidriver", "csi.hawser.dev")
        })
    })
}

/// Intervals of the demo, for the timeline.
#[derive(Debug, Default)]
struct Phases(Vec<Phase>);

impl Phases {
    fn run<T>(&mut self, name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let start_ns = monotonic_ns();
        let done = run();
        self.0.push(Phase { name: name.to_owned(), start_ns, end_ns: monotonic_ns() });
        done
    }
}

fn draw_timeline(phases: &[Phase], trace: &Path) -> Result<()> {
    let spans = timeline::read(trace)?;
    ensure!(!spans.is_empty(), "{}: no process recorded a span", trace.display());
    say(&timeline::render(phases, &spans));
    let file = target_dir().join("demo-timeline.json");
    fs::write(&file, timeline::json(phases, &spans)?).with_context(|| file.display().to_string())?;
    say(&format!("timeline as JSON: {}", file.display()));
    Ok(())
}

/// The forwarding switches, which a gateway bridge turns on and which in the
/// machine's own namespace are not the demo's to keep.
struct Forwarding(Vec<(&'static str, Option<String>)>);

impl Forwarding {
    fn read() -> Self {
        let switches = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];
        Self(switches.map(|file| (file, fs::read_to_string(file).ok())).into())
    }

    fn write_back(&self) -> Result<()> {
        for (file, value) in &self.0 {
            if let Some(value) = value {
                fs::write(file, value).context(*file)?;
            }
        }
        Ok(())
    }
}
