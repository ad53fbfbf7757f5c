//! Killed processes that wait for a daemon which answers the driver and not them: they are
//! freed when the last pod of the volume is taken down.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use linux::fd_passing::PacketSocket;
use prost::Message;
use proto::control::{Quiesce, Reply, Request, reply, request};
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, mounted};
use tests::{eventually, wait_for_a_change};
use tonic::Code;

use crate::metrics::metrics;

const LONGEST_LEASE_MS: u32 = 60_000;

fn scene() -> Scene {
    let Flags(mut flags) = Flags::process();
    flags.extend(["--daemon-deadline", "1"].map(str::to_owned));
    Scene::start(Flags(flags))
}

/// Makes the volume's daemon answer all requests but those that change the volume, as one
/// that was taken over may: a pause that the driver knows nothing of, until the drop.
pub(crate) fn hold_changes_back(scene: &Scene, id: &str) -> PacketSocket {
    let socket = PacketSocket::connect(&scene.dial_dir(id).join("ctl.sock")).unwrap();
    let kind = Some(request::Kind::Quiesce(Quiesce { lease_ms: LONGEST_LEASE_MS, passing_may_write: false }));
    socket.send(&Request { kind }.encode_to_vec(), &[]).unwrap();
    let reply = Reply::decode(&*socket.receive().unwrap().unwrap()).unwrap();
    assert!(matches!(reply.kind, Some(reply::Kind::Quiesced(_))), "{reply:?}");
    socket
}

/// A process that makes a file there, once it waits for the daemon.
fn user(scene: &Scene, target: &Path) -> Child {
    let minor = mounted(target).unwrap().minor;
    let mut command = scene.sandbox.command(Path::new("sh"));
    command.args(["-c", "exec >\"$0\""]).arg(target.join("file")).stdin(Stdio::null());
    let child = command.spawn().unwrap();
    wait_for_a_change(minor, TIMEOUT).unwrap();
    child
}

fn target(caller: &Caller) -> PathBuf {
    caller.target_path("one")
}

/// Longer than the three deadlines of a hung daemon: each call waits a second for the user.
#[track_caller]
fn assert_stays_busy(scene: &Scene, id: &str) {
    let daemons = scene.daemons();
    for _ in 0..6 {
        let busy = scene.caller().unpublish(id, "one").unwrap_err();
        assert_eq!(busy.code(), Code::Aborted, "{busy:?}");
    }
    assert_eq!(scene.daemons(), daemons);
}

#[track_caller]
fn assert_freed(scene: &Scene, mut user: Child, id: &str) {
    eventually("the daemon is given up", TIMEOUT, || {
        let page = metrics(scene);
        let log = scene.log();
        anyhow::ensure!(page.contains("\nhawser_csi_hung_daemons_total 1\n"), "{log}");
        anyhow::ensure!(log.contains("killed processes of the volume's pods waited"), "{log}");
        Ok(())
    })
    .unwrap();
    assert!(!user.wait().unwrap().success());
    let caller = scene.caller();
    eventually("it is taken down", TIMEOUT, || Ok(caller.take_down(id, &["one"])?)).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_killed_process_that_the_daemon_never_answers_is_freed_when_its_pod_is_taken_down() {
    let scene = scene();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let _held = hold_changes_back(&scene, &id);
    let mut user = user(&scene, &target(&caller));
    assert_stays_busy(&scene, &id);
    assert_eq!(user.try_wait().unwrap(), None, "it was not killed");
    user.kill().unwrap();
    assert_eq!(caller.unpublish(&id, "one").unwrap_err().code(), Code::Aborted);
    assert_freed(&scene, user, &id);
}

/// The other pod may be served well.
#[test]
fn a_pod_that_stays_keeps_the_daemon_that_holds_back_another_pods_process() {
    let scene = scene();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();
    fs::write(caller.target_path("two").join("kept"), "x").unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let _held = hold_changes_back(&scene, &id);
    let mut user = user(&scene, &target(&caller));
    user.kill().unwrap();
    assert_stays_busy(&scene, &id);
    assert_eq!(fs::read(caller.target_path("two").join("kept")).unwrap(), b"x");
    caller.unpublish(&id, "two").unwrap();
    assert_freed(&scene, user, &id);
}

/// Also where no pod has gone yet, since each has such a process.
#[test]
fn pods_that_are_taken_down_together_do_not_wait_for_each_other() {
    let scene = scene();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let _held = hold_changes_back(&scene, &id);
    let mut first = user(&scene, &target(&caller));
    // Its working directory keeps the other target busy.
    let mut command = scene.sandbox.command(Path::new("sleep"));
    let mut second = command.arg("1000").current_dir(caller.target_path("two")).spawn().unwrap();
    first.kill().unwrap();
    for pod in ["one", "two"] {
        assert_eq!(caller.unpublish(&id, pod).unwrap_err().code(), Code::Aborted);
    }
    eventually("the daemon is given up", Duration::from_secs(20), || {
        anyhow::ensure!(scene.daemons().is_empty(), "{:?}", scene.daemons());
        Ok(())
    })
    .unwrap();
    second.kill().unwrap();
    second.wait().unwrap();
    // The driver may still be giving the daemon up; the call is then refused with ABORTED.
    eventually("the other pod is unpublished", TIMEOUT, || Ok(caller.unpublish(&id, "two")?)).unwrap();
    assert_freed(&scene, first, &id);
}
