//! A kernel that sends no request again (before Linux 6.9): only the daemon holds a connection, so
//! that users of a killed daemon get an error at once instead of waiting without an end.

use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use serde_json::Value;
use tests::examples;
use tests::node::{Keeper, TIMEOUT, text};
use tests::{Launcher, Network, Node, NodeOptions, Sandbox, eventually};

/// What a request may take that is answered at once.
const AT_ONCE: Duration = Duration::from_secs(10);

pub(super) fn killed_daemon_ends_io_and_the_next_pod_has_the_data() -> Result<()> {
    let sandbox = Sandbox::enter(Network::Own)?;
    let options = NodeOptions {
        launcher: Launcher::Process,
        keeper: Keeper::Process,
        warm_daemons: 1,
        ..NodeOptions::default()
    };
    let node = Node::start(&sandbox, options)?;
    node.put_class()?;
    node.put_manifest("claim.yaml", &examples::read("claim.yaml")?)?;
    start_pod(&node)?;
    let held = mount(&node)?;
    ensure!(held["holders"] == serde_json::json!(["daemon"]), "{held}");
    ensure!(text(&held["sole_holder_reason"]).contains("kernel before 6.9"), "{held}");
    let greeting = fs::read_to_string(node.volume_path("one")?.join("greeting")).context("the greeting")?;
    let [daemon] = node.serving_daemons()?[..] else { anyhow::bail!("not one daemon") };
    node.kill(daemon)?;
    let absent = node.volume_path("one")?.join("absent");
    eventually("a request fails with ENOTCONN", TIMEOUT, || {
        let errno = errno_of(absent.clone())?;
        ensure!(errno == Some(Errno::ENOTCONN as i32), "{errno:?}");
        Ok(())
    })?;
    node.remove_manifest("pod-one.yaml")?;
    node.wait_for_no_pods()?;
    node.put_manifest("reader.yaml", READER)?;
    let log = node.wait_for_log("reader", &["greetings from"])?;
    ensure!(log.contains(greeting.trim_end()), "{log:?} has no {greeting:?}");
    node.remove_all_manifests()?;
    node.stop()
}

/// A pod that reads what the pod before it wrote.
const READER: &str = "\
apiVersion: v1
kind: Pod
metadata: { name: reader, namespace: default }
spec:
  restartPolicy: Never
  containers:
    - name: reader
      image: hawser.dev/demo-app:demo
      imagePullPolicy: IfNotPresent
      command: [/demo-app]
      args: [cat, /data/greeting]
      volumeMounts: [{ name: data, mountPath: /data }]
  volumes: [{ name: data, persistentVolumeClaim: { claimName: shared } }]
";

fn start_pod(node: &Node<'_>) -> Result<()> {
    node.put_manifest("pod-one.yaml", &examples::read("pod-one.yaml")?)?;
    node.wait_for_phase("one", "Running")?;
    node.wait_for_log("one", &["wrote greetings from"]).map(drop)
}

/// The pod's mount, as `hawser-csi mounts` shows it.
fn mount(node: &Node<'_>) -> Result<Value> {
    let mounts = node.driver_view("mounts")?;
    let published = |mount: &&Value| mount["state"] == "published";
    mounts.as_array().into_iter().flatten().find(published).cloned().context("no published mount")
}

/// Of a stat; `None` if it succeeds.
fn errno_of(path: PathBuf) -> Result<Option<i32>> {
    let (sender, answer) = mpsc::channel();
    thread::spawn(move || {
        let _gave_up = sender.send(fs::metadata(path).err().and_then(|error| error.raw_os_error()));
    });
    answer.recv_timeout(AT_ONCE).context("a request of the dead daemon's volume waits")
}
