//! A volume's daemon that answers the driver, and does not answer the volume's pod.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use linux::fd_passing::PacketSocket;
use nix::sys::signal::Signal;
use prost::Message;
use proto::control::{Quiesce, Reply, Request, reply, request};
use tests::attacker::Attack;
use tests::{Node, Sandbox, eventually, manifests, node::text, wait_for_a_change};

use crate::node;

const LEASE_MS: u32 = 60_000;
const IDLE: &str = "sleep 1000";
/// The runtime waits half a minute for what it has killed.
const TIME_LIMIT: Duration = Duration::from_secs(150);

/// Has the daemon hold back all that changes its volume, until the drop or its own end.
struct Held {
    end: Option<Sender<()>>,
    renewing: Option<JoinHandle<()>>,
}

impl Held {
    fn of(node: &Node<'_>, claim: &str) -> Result<Self> {
        let volume = node.get("pvc", claim)?["spec"]["volumeName"].clone();
        let handle = node.get("pv", &text(&volume))?["spec"]["csi"]["volumeHandle"].clone();
        let dial = node.sandbox().path("run").join(text(&handle).trim_start_matches("vol-"));
        let socket = PacketSocket::connect(&dial.join("ctl.sock"))?;
        quiesce(&socket)?;
        let (end, ended) = channel();
        let renewing = std::thread::spawn(move || {
            while ended.recv_timeout(Duration::from_secs(10)) == Err(RecvTimeoutError::Timeout)
                && quiesce(&socket).is_ok()
            {}
        });
        Ok(Self { end: Some(end), renewing: Some(renewing) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.end.take());
        drop(self.renewing.take().map(JoinHandle::join));
    }
}

fn quiesce(socket: &PacketSocket) -> Result<()> {
    let kind = Some(request::Kind::Quiesce(Quiesce { lease_ms: LEASE_MS, passing_may_write: false }));
    socket.send(&Request { kind }.encode_to_vec(), &[])?;
    let reply = Reply::decode(&*socket.receive()?.context("the daemon has ended")?)?;
    ensure!(matches!(reply.kind, Some(reply::Kind::Quiesced(_))), "{reply:?}");
    Ok(())
}

/// A pod that has the claim's volume at /data.
fn put_user(node: &Node<'_>, name: &str, claim: &str, (script, pod_fields): (&str, &str)) -> Result<()> {
    let volumes =
        format!("volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]\n{pod_fields}");
    let mounts = "volumeMounts: [{name: data, mountPath: /data}]";
    let pod = Attack::new(name, script).with_pod_fields(&volumes).with_container_fields(mounts);
    node.put_manifest(&format!("{name}.yaml"), &pod.yaml())
}

/// Its process makes changes all the time, and so waits for a daemon that holds them
/// back: SIGKILL does not end it.
fn put_pod_that_waits(node: &Node<'_>) -> Result<Held> {
    let script = "echo begun; while :; do echo x > /data/new; done";
    node.put_manifest("claim.yaml", &manifests::claim("c", "64Mi"))?;
    put_user(node, "victim", "c", (script, ""))?;
    node.wait_for_log("victim", &["begun"])?;
    Held::of(node, "c")
}

#[test]
fn a_pod_whose_process_the_daemon_never_answers_is_deleted() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    sandbox.switch_fuse_guard_off();
    let held = put_pod_that_waits(&node).unwrap();
    node.remove_manifest("victim.yaml").unwrap();
    eventually("the pod is gone", TIME_LIMIT, || {
        let pods = node.list("pods")?;
        ensure!(pods.iter().all(|pod| pod["metadata"]["name"] != "victim"), "{}", node.outputs());
        Ok(())
    })
    .unwrap();
    assert!(
        node.outputs().contains("running despite SIGKILL"),
        "it waited for the daemon\n{}",
        node.outputs()
    );
    drop(held);
    node.finish(&idle).unwrap();
}

#[test]
fn a_node_stops_while_a_daemon_does_not_answer_its_pod() {
    let sandbox = Sandbox::new();
    let (node, _idle) = node(&sandbox);
    sandbox.switch_fuse_guard_off();
    let held = put_pod_that_waits(&node).unwrap();
    node.client(&["stop", "--pods"]).unwrap();
    assert!(node.outputs().contains("running despite SIGKILL"), "{}", node.outputs());
    drop(held);
}

#[test]
fn a_killed_driver_that_waits_for_a_daemon_delays_no_call_for_other_volumes() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    sandbox.switch_fuse_guard_off();
    node.put_manifest("c.yaml", &manifests::claim("c", "64Mi")).unwrap();
    put_user(&node, "first", "c", (IDLE, "")).unwrap();
    node.wait_for_phase("first", "Running").unwrap();
    let held = Held::of(&node, "c").unwrap();
    // The driver gives the files to the group, and waits for the daemon.
    put_user(&node, "second", "c", (IDLE, "securityContext: {fsGroup: 2000}")).unwrap();
    let target = node.volume_path("first").unwrap();
    let mounts = linux::mountinfo::read().unwrap();
    let mounted = mounts.iter().rfind(|mount| mount.mount_point == target).expect("it is mounted");
    wait_for_a_change(mounted.minor, TIME_LIMIT).unwrap();
    let mut killed = node.take_driver().unwrap();
    killed.signal(Signal::SIGKILL).unwrap();
    node.put_manifest("d.yaml", &manifests::claim("d", "64Mi")).unwrap();
    put_user(&node, "other", "d", (IDLE, "")).unwrap();
    // The killed process takes the connection and never answers the call.
    node.wait_for_event("ProvisioningFailed", &["CreateVolume"]).unwrap();
    assert!(linux::process::is_killed(killed.pid().as_raw()), "it is still there");
    node.start_driver().unwrap();
    node.wait_for_phase("other", "Running").unwrap();
    drop(held);
    killed.wait(TIME_LIMIT).unwrap();
    node.finish(&idle).unwrap();
}
