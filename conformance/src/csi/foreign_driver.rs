//! A driver that is not ours under our kubelet: the mock driver of csi-test, from
//! Kubernetes' repository, on one socket for registration and CSI (so that the
//! endpoint it registers is empty). A volume of it is a directory at the target.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use ::tests::binaries::{target_dir, workspace_root};
use ::tests::manifests::{self, Pod};
use ::tests::node::TIMEOUT;
use ::tests::{Daemon, LeakCheck, Network, Node, NodeOptions, Sandbox, eventually};
use anyhow::{Context, Result, anyhow, ensure};
use xtask::build;
use xtask::foreign::go;
use xtask::progress::step;

use super::report::Counts;

const DRIVER: &str = "mock.csi.k8s.io";
const CLASS: &str = "mock";
const CLAIM: &str = "data";
/// What `demo-app demo one` writes into the volume.
const GREETING: &str = "greeting";
/// Of the driver, in the sandbox.
const OUTPUT: &str = "mock.out";

/// `tests/conformance/mockdriver`; go says what is up to date.
pub(super) fn build() -> Result<PathBuf> {
    let program = target_dir().join("conformance/mockdriver");
    let mut command = Command::new(go()?);
    command.args(["build", "-o"]).arg(&program).arg(".").env("CGO_ENABLED", "0");
    build::run(command.current_dir(workspace_root().join("tests/conformance/mockdriver")))?;
    Ok(program)
}

/// A thread of its own: entering a sandbox is for the thread's whole life.
pub(super) fn run(program: &Path) -> Result<Counts> {
    thread::scope(|scope| {
        let run = scope.spawn(|| on_a_node(program));
        run.join().map_err(|_| anyhow!("the thread of the node panicked"))?
    })?;
    Ok(Counts { passed: 1, ..Counts::default() })
}

fn on_a_node(program: &Path) -> Result<()> {
    let sandbox = Sandbox::enter(Network::Own)?;
    let mut node = Node::prepare(&sandbox, NodeOptions::default())?;
    step("start hawser-kubelet", || node.start_kubelet())?;
    let idle = idle(&node)?;
    let mut mock =
        step("the mock driver registers itself, with an empty endpoint", || Mock::start(&node, program))?;
    live(&mut node, &mock).with_context(|| format!("{}\n{}", mock.daemon.output(), node.outputs()))?;
    step("the driver ends", || mock.daemon.stop(TIMEOUT).map(drop))?;
    step("nothing is left", || node.finish(&idle))
}

/// What a claim, two pods and the end of a kubelet bring.
fn live(node: &mut Node<'_>, mock: &Mock) -> Result<()> {
    node.put_manifest("class.yaml", &manifests::class(CLASS, DRIVER))?;
    node.put_manifest("driver.yaml", &driver_object(true))?;
    node.put_manifest("claim.yaml", &manifests::claim_of_class(CLAIM, "1Gi", CLASS))?;
    step("a driver that waits for attachments is refused, and the event names it", || {
        put_pod(node, "one")?;
        node.wait_for_event("FailedMount", &[DRIVER, "attachRequired"])?;
        ensure!(mock.calls("NodeStageVolume").is_empty(), "it was called all the same");
        node.put_manifest("driver.yaml", &driver_object(false))
    })?;
    step("two pods run on a volume of it", || {
        put_pod(node, "two")?;
        for pod in ["one", "two"] {
            node.wait_for_log(pod, &["wrote greetings"])?;
            let written = node.volume_path(pod)?.join(GREETING);
            ensure!(written.is_file(), "pod {pod} wrote no {}", written.display());
        }
        mock.expect(&[("CreateVolume", 1), ("NodeStageVolume", 1), ("NodePublishVolume", 2)])
    })?;
    step("kubelet dies and comes back; the pods run on", || {
        node.kubelet()?.kill()?;
        node.start_kubelet()?;
        for pod in ["one", "two"] {
            let object = node.wait_for_phase(pod, "Running")?;
            let restarts = &object["status"]["containerStatuses"][0]["restartCount"];
            ensure!(restarts == 0, "pod {pod} was started again: {restarts}");
        }
        Ok(())
    })?;
    step("the pods go, and then the claim with its volume", || {
        let target = node.volume_path("one")?;
        for pod in ["one", "two"] {
            node.remove_manifest(&format!("{pod}.yaml"))?;
            node.wait_for_no_pod(pod)?;
        }
        ensure!(!target.exists(), "{} is still there", target.display());
        mock.expect(&[("NodeUnpublishVolume", 2), ("NodeUnstageVolume", 1)])?;
        node.remove_manifest("claim.yaml")?;
        node.delete("pvc", CLAIM)?;
        mock.expect(&[("DeleteVolume", 1)])
    })?;
    let refused = mock.refused();
    ensure!(refused.is_empty(), "the driver refused: {refused:?}");
    Ok(())
}

fn put_pod(node: &Node<'_>, name: &str) -> Result<()> {
    let pod = Pod::new(name, &["demo", "one", "/data", "8080"]).with_claim(CLAIM);
    node.put_manifest(&format!("{name}.yaml"), &pod.yaml())
}

fn driver_object(attach_required: bool) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {{name: {DRIVER}}}
spec: {{attachRequired: {attach_required}, podInfoOnMount: false}}
"
    )
}

/// The driver's process; its output has a line for each call: method, volume, gRPC code.
struct Mock {
    daemon: Daemon,
}

impl Mock {
    fn start(node: &Node<'_>, program: &Path) -> Result<Self> {
        let socket = node.root_dir().join("plugins_registry").join(format!("{DRIVER}-reg.sock"));
        let mut command = node.sandbox().command(program);
        command.arg(&socket);
        let mut daemon = Daemon::start("mockdriver", command, &node.sandbox().path(OUTPUT))?;
        eventually("it is registered", TIMEOUT, || {
            ensure!(daemon.ended()?.is_none(), "it ended: {}", daemon.output());
            ensure!(daemon.output().contains("registered true \"\""), "{}", daemon.output());
            Ok(())
        })
        .with_context(|| node.outputs())?;
        Ok(Self { daemon })
    }

    /// The codes that calls of `method` were answered with.
    fn calls(&self, method: &str) -> Vec<String> {
        let output = self.daemon.output();
        let calls = output.lines().filter_map(|line| {
            let mut words = line.strip_prefix("/csi.v1.")?.split(' ');
            let (called, code) = (words.next()?, words.nth(1)?);
            called.ends_with(&format!("/{method}")).then(|| code.to_owned())
        });
        calls.collect()
    }

    /// Each of these calls was made so often, or will be soon.
    fn expect(&self, wanted: &[(&str, usize)]) -> Result<()> {
        eventually("the driver is called", TIMEOUT, || {
            for (method, times) in wanted {
                let calls = self.calls(method);
                ensure!(calls.len() == *times, "{method}: {calls:?} instead of {times}");
            }
            Ok(())
        })
    }

    /// Calls that did not end with OK.
    fn refused(&self) -> Vec<String> {
        let output = self.daemon.output();
        let calls = output.lines().filter(|line| line.starts_with('/') && !line.ends_with(" OK"));
        calls.map(str::to_owned).collect()
    }
}

/// As it is before a driver, with the directories that a kubelet leaves for each.
fn idle(node: &Node<'_>) -> Result<LeakCheck> {
    let mut allowed = node.allowed();
    allowed.standing.push(node.root_dir().join("plugins/kubernetes.io/csi").join(DRIVER));
    allowed.changing.push(node.sandbox().path(OUTPUT));
    LeakCheck::start(node.sandbox(), allowed)
}
