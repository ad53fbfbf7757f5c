//! A node on a disk whose power is cut at any moment. Each boot first proves
//! that what the boots before acknowledged is there, then makes changes and
//! acknowledges each on the console, until the power goes.
//!
//! Invariant: a word is printed only after the call that it reports has
//! returned; the laboratory keeps the words, since the disk is not trusted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use ::tests::node::text;
use ::tests::{Network, Node, NodeOptions, Sandbox, binaries, eventually, examples};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// The disk that the power is taken from.
const DISK: &str = "/data";
const DEADLINE: Duration = Duration::from_secs(30);
/// Pods of the examples, which share a volume.
const PODS: [&str; 2] = ["one", "two"];
/// More than a boot can make before the power goes.
const CHANGES: usize = 1000;

/// What the boots before have acknowledged.
#[derive(Debug, Default)]
struct Acknowledged {
    boots: usize,
    /// Claim: its volume.
    claims: BTreeMap<String, String>,
    /// Claims whose deletion was begun: there or not.
    deleting: BTreeSet<String>,
    deleted: BTreeSet<String>,
    /// Files of the pods' volume, with their content.
    files: BTreeMap<String, String>,
    /// Container: its address.
    leases: BTreeMap<String, String>,
    pods: bool,
}

impl Acknowledged {
    fn read(words: &str) -> Self {
        let mut known = Self::default();
        for line in words.lines() {
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["boot"] => known.boots += 1,
                ["pods"] => known.pods = true,
                ["claim", name, volume] => drop(known.claims.insert(name.to_owned(), volume.to_owned())),
                ["deleting", name] => {
                    known.claims.remove(name);
                    known.deleting.insert(name.to_owned());
                }
                ["deleted", name] => drop(known.deleted.insert(name.to_owned())),
                ["file", name, content] => drop(known.files.insert(name.to_owned(), content.to_owned())),
                ["lease", container, address] => {
                    drop(known.leases.insert(container.to_owned(), address.to_owned()));
                }
                _ => {}
            }
        }
        known
    }
}

fn say(words: &str) {
    println!("lab: ack {words}");
}

pub(super) fn run(acknowledged: &Path) -> ExitCode {
    let words = fs::read_to_string(acknowledged).unwrap_or_default();
    match boot(&Acknowledged::read(&words)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("lab: violated: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn boot(known: &Acknowledged) -> Result<()> {
    let boot = known.boots;
    let sandbox = Sandbox::enter_standing(&Path::new(DISK).join("node"), Network::Own)?;
    let leases = Leases::new(&sandbox)?;
    let mut node = if boot == 0 {
        let node = Node::prepare(&sandbox, NodeOptions::default())?;
        node.put_class()?;
        node.put_manifest("claim.yaml", &examples::read("claim.yaml")?)?;
        for pod in PODS {
            let file = format!("pod-{pod}.yaml");
            node.put_manifest(&file, &examples::read(&file)?)?;
        }
        // The administrator's files are on the disk before the first cut.
        nix::unistd::sync();
        node
    } else {
        Node::resume(&sandbox, NodeOptions::default())
    };
    say("boot");
    node.start_driver().context("the driver does not start")?;
    node.start_kubelet().context("the kubelet does not start")?;
    node.wait_until_registered()?;
    verify_objects(&node, known)?;
    leases.verify(boot, known)?;
    for pod in PODS {
        node.wait_for_phase(pod, "Running")?;
    }
    verify_one_copy_of_each_pod(&node)?;
    let volume = node.volume_path("one")?;
    for (name, content) in &known.files {
        let found = fs::read_to_string(volume.join(name)).with_context(|| format!("file {name}"))?;
        ensure!(found == *content, "file {name} has {found:?}, not {content:?}");
    }
    say("pods");
    println!("lab: verified {boot}");
    change(&node, &leases, &volume, boot)
}

fn verify_objects(node: &Node<'_>, known: &Acknowledged) -> Result<()> {
    let volumes = driver_volumes(node)?;
    for (name, volume) in &known.claims {
        let claim = node.get("pvc", name).with_context(|| format!("claim {name} is lost"))?;
        ensure!(text(&claim["spec"]["volumeName"]) == *volume, "claim {name}: {}", claim["spec"]);
        let volume = node.get("pv", volume).with_context(|| format!("the volume of claim {name} is lost"))?;
        let handle = text(&volume["spec"]["csi"]["volumeHandle"]);
        ensure!(
            volumes.contains(&handle),
            "claim {name}: the driver has no volume {handle}, but {volumes:?}"
        );
    }
    for name in &known.deleted {
        ensure!(node.get("pvc", name).is_err(), "claim {name} was deleted, and is there again");
    }
    Ok(())
}

/// The driver's own list.
fn driver_volumes(node: &Node<'_>) -> Result<Vec<String>> {
    let sandbox = node.sandbox();
    let mut command = sandbox.command(&binaries::find("hawser-csi")?);
    command.args(["volumes", "--output", "json", "--state-dir"]).arg(sandbox.path("state"));
    let output = command.arg("--run-dir").arg(sandbox.path("run")).output().context("hawser-csi volumes")?;
    ensure!(output.status.success(), "hawser-csi volumes: {}", String::from_utf8_lossy(&output.stderr));
    let listed: Value = serde_json::from_slice(&output.stdout).context("hawser-csi volumes")?;
    let listed = listed.as_array().or_else(|| listed["volumes"].as_array()).cloned().unwrap_or_default();
    Ok(listed.iter().map(|volume| text(&volume["id"])).collect())
}

/// A status that says `Running` may be that of before the cut: processes come later, and never twice.
fn verify_one_copy_of_each_pod(node: &Node<'_>) -> Result<()> {
    let running = eventually("each pod has its process", DEADLINE, || {
        let running = node.processes("demo-app")?;
        ensure!(running.len() >= PODS.len(), "{} processes of {} pods", running.len(), PODS.len());
        Ok(running)
    })?;
    ensure!(running.len() == PODS.len(), "{} processes of {} pods: {running:?}", running.len(), PODS.len());
    let pods = node.list("pods")?;
    for pod in PODS {
        let copies = pods.iter().filter(|found| found["metadata"]["name"] == pod).count();
        ensure!(copies == 1, "{copies} pods named {pod}");
    }
    Ok(())
}

/// Changes of all kinds in turn, until the power goes.
fn change(node: &Node<'_>, leases: &Leases, volume: &Path, boot: usize) -> Result<()> {
    for number in 0..CHANGES {
        let name = format!("b{boot}-{number}");
        let content = format!("{name}-{}", "x".repeat(number * 100));
        let mut file = File::create(volume.join(&name)).context("create a file in the volume")?;
        file.write_all(content.as_bytes()).and_then(|()| file.sync_all()).context("write and flush")?;
        File::open(volume)?.sync_all().context("flush the directory")?;
        say(&format!("file {name} {content}"));

        let address = leases.add(&name)?;
        say(&format!("lease {name} {address}"));

        let claim = examples::read("claim.yaml")?.replace("shared", &name).replace("1Gi", "1Mi");
        node.put_manifest(&format!("claim-{name}.yaml"), &claim)?;
        let volume = eventually("the claim is bound", DEADLINE, || {
            let claim = node.get("pvc", &name)?;
            ensure!(claim["status"]["phase"] == "Bound", "{}", claim["status"]);
            Ok(text(&claim["spec"]["volumeName"]))
        })?;
        say(&format!("claim {name} {volume}"));
        if number % 2 == 1 {
            say(&format!("deleting {name}"));
            node.remove_manifest(&format!("claim-{name}.yaml"))?;
            nix::unistd::sync();
            node.delete("pvc", &name)?;
            say(&format!("deleted {name}"));
        }
    }
    Ok(())
}

/// A network of host-local alone.
struct Leases {
    directory: PathBuf,
    config: String,
}

impl Leases {
    fn new(sandbox: &Sandbox) -> Result<Self> {
        let directory = sandbox.make_dir("leases")?;
        let config = json!({
            "cniVersion": "1.0.0",
            "name": "cut",
            "type": "bridge",
            "ipam": {"type": "host-local", "dataDir": directory, "ranges": [[{"subnet": "10.77.0.0/16"}]]},
        });
        Ok(Self { directory, config: config.to_string() })
    }

    fn call(&self, verb: &str, container: &str) -> Result<Value> {
        let mut command = std::process::Command::new(binaries::find("host-local")?);
        command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", container).env("CNI_IFNAME", "eth0");
        command.env("CNI_NETNS", "/proc/1/ns/net").env("CNI_PATH", binaries::dir());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("host-local")?;
        child.stdin.take().context("stdin")?.write_all(self.config.as_bytes())?;
        let output = child.wait_with_output().context("host-local")?;
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "host-local {verb} {container}: {answer}");
        Ok(serde_json::from_str(&answer).unwrap_or_default())
    }

    fn add(&self, container: &str) -> Result<String> {
        let result = self.call("ADD", container)?;
        let address = text(&result["ips"][0]["address"]);
        Ok(address.split('/').next().unwrap_or_default().to_owned())
    }

    /// Who holds which address, as the directory says.
    fn held(&self) -> Result<BTreeMap<String, String>> {
        let Ok(entries) = fs::read_dir(self.directory.join("cut")) else { return Ok(BTreeMap::new()) };
        let mut held = BTreeMap::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.parse::<IpAddr>().is_ok() {
                let holder = fs::read_to_string(entry.path()).with_context(|| name.clone())?;
                held.insert(name, holder.lines().next().unwrap_or_default().trim().to_owned());
            }
        }
        Ok(held)
    }

    /// After the cut, new containers get addresses that no other container holds,
    /// and the containers of the boots before, which are dead, can be removed.
    fn verify(&self, boot: usize, known: &Acknowledged) -> Result<()> {
        let held = self.held()?;
        for (address, holder) in &held {
            let other = known.leases.iter().find(|(container, its)| *its == address && *container != holder);
            // A lease that the cut tore has no holder; the container that had it is dead.
            if let Some((container, _)) = other.filter(|_| !holder.is_empty()) {
                // The same address, given again after its first holder was removed, is none's fault.
                ensure!(
                    !held.values().any(|found| found == container),
                    "{address}: {holder} and {container}"
                );
            }
        }
        let mut given = BTreeSet::new();
        for number in 0..3 {
            let container = format!("new{boot}-{number}");
            let address = self.add(&container).context("host-local does not start after the cut")?;
            let holder = held.get(&address).filter(|holder| !holder.is_empty());
            ensure!(holder.is_none(), "{address} was given again, while {holder:?} holds it");
            ensure!(given.insert(address.clone()), "{address} was given twice");
        }
        for container in known.leases.keys() {
            self.call("DEL", container)?;
        }
        for number in 0..3 {
            self.call("DEL", &format!("new{boot}-{number}"))?;
        }
        let left = self.held()?;
        let ours = left.values().filter(|holder| known.leases.contains_key(*holder)).count();
        ensure!(ours == 0, "DEL left leases: {left:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_whose_deletion_began_may_be_there_or_not() {
        let known = Acknowledged::read("boot\nclaim a pv-a\nclaim b pv-b\nboot\ndeleting a\ngarbage\n");
        assert_eq!(known.boots, 2);
        assert_eq!(known.claims.keys().collect::<Vec<_>>(), ["b"]);
        assert!(known.deleting.contains("a") && known.deleted.is_empty());
    }
}
