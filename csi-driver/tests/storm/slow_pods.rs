//! Mount pods that are never run, as where the node has no room for them.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use proto::csi::{NodeGetInfoRequest, ProbeRequest};
use serde_json::Value;
use tests::as_soon_as;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, volume_binary};
use tonic::{Code, Status};

use crate::all;

const NEVER_RUN: usize = 20;
const RUN: usize = 5;
const AT_ONCE: usize = 20;
const START_TIMEOUT: Duration = Duration::from_secs(25);

fn manifest(scene: &Scene, volume_id: &str) -> PathBuf {
    scene.sandbox.path("m").join(format!("hawser-volume-{}.yaml", volume_id.trim_start_matches("vol-")))
}

/// What the pod's container would be, without a container around it.
fn run_pod(scene: &Scene, volume_id: &str) -> Child {
    let pod: Value = serde_json::from_slice(&fs::read(manifest(scene, volume_id)).unwrap()).unwrap();
    let nonce = pod["spec"]["containers"][0]["env"][0]["value"].as_str().unwrap();
    let mut command = scene.sandbox.command(&volume_binary());
    command.args(["serve", "--confine", "--socket"]).arg(scene.dial_dir(volume_id).join("dial.sock"));
    command.env("HAWSER_NONCE", nonce).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn timed_stage(caller: &Caller, volume_id: &str) -> (Result<(), Status>, Duration) {
    let begun = Instant::now();
    (caller.stage(volume_id), begun.elapsed())
}

#[test]
fn mount_pods_that_never_come_do_not_starve_the_others() {
    let timeout = START_TIMEOUT.as_secs().to_string();
    let flags = [
        ["--launcher", "manifest"],
        ["--manifests", "m"],
        ["--mount-image", "hawser/volume:test"],
        ["--start-timeout", &timeout],
        ["--pool-capacity", "100Gi"],
        ["--keeper-binary", "none"],
        ["--warm-daemons", "0"],
    ];
    let scene = Scene::start(Flags(flags.concat().into_iter().map(str::to_owned).collect()));
    let caller = scene.caller();
    let name = |kind: &str, number| caller.create_named(&format!("{kind}-{number}")).unwrap();
    let never: Vec<String> = (0..NEVER_RUN).map(|number| name("never", number)).collect();
    let run: Vec<String> = (0..RUN).map(|number| name("run", number)).collect();

    thread::scope(|scope| {
        let waiting = scope.spawn(|| all(NEVER_RUN, &never, |id| timed_stage(&caller, id)));
        as_soon_as("all wait for their pods", TIMEOUT, || {
            never.iter().all(|id| manifest(&scene, id).exists())
        })
        .unwrap();
        let begun = Instant::now();
        for id in &run {
            let staging = scope.spawn(|| caller.stage(id));
            as_soon_as("its manifest appears", TIMEOUT, || manifest(&scene, id).exists()).unwrap();
            let mut pod = run_pod(&scene, id);
            staging.join().unwrap().unwrap();
            caller.publish(id, id).unwrap();
            fs::write(caller.target_path(id).join("file"), "x").unwrap();
            caller.unpublish(id, id).unwrap();
            caller.unstage(id).unwrap();
            pod.wait().unwrap();
        }
        assert!(
            !waiting.is_finished(),
            "{RUN} lives took {:?}, longer than the others wait",
            begun.elapsed()
        );
        for (result, took) in waiting.join().unwrap() {
            assert_eq!(result.unwrap_err().code(), Code::DeadlineExceeded);
            assert!(took < START_TIMEOUT + Duration::from_secs(10), "{took:?}");
        }
    });
    // kubelet calls it after a failure that is not final.
    all(NEVER_RUN, &never, |id| caller.unstage(id).unwrap());
    all(AT_ONCE, &[never, run].concat(), |id| caller.delete(id).unwrap());
    scene.assert_nothing_left();
}

/// More than the driver has threads: stages wait for mount pods that never come, and no
/// other call notices.
#[test]
fn hundreds_of_waiting_stages_leave_room_for_all_other_calls() {
    const STAGES: usize = 560;
    /// Far less than the stages wait.
    const QUICK: Duration = Duration::from_secs(15);
    let flags = [
        ["--launcher", "manifest"],
        ["--manifests", "m"],
        ["--mount-image", "hawser/volume:test"],
        ["--start-timeout", "40"],
        ["--pool-capacity", "1000Gi"],
        ["--keeper-binary", "none"],
        ["--warm-daemons", "0"],
    ];
    let scene = Scene::start(Flags(flags.concat().into_iter().map(str::to_owned).collect()));
    let caller = scene.caller();
    let served = caller.create_named("served").unwrap();
    let mut pod = thread::scope(|scope| {
        let staging = scope.spawn(|| caller.stage(&served));
        as_soon_as("its manifest appears", TIMEOUT, || manifest(&scene, &served).exists()).unwrap();
        let pod = run_pod(&scene, &served);
        staging.join().unwrap().unwrap();
        pod
    });
    caller.publish(&served, "one").unwrap();
    let numbers: Vec<usize> = (0..STAGES).collect();
    let never = all(AT_ONCE, &numbers, |n| caller.create_named(&format!("never-{n}")).unwrap());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| all(STAGES, &never, |id| timed_stage(&caller, id)));
        as_soon_as("all turns are taken", TIMEOUT, || {
            never.iter().filter(|id| manifest(&scene, id).exists()).count() >= 384
        })
        .unwrap();
        let quick = |what: &str, call: &dyn Fn()| {
            let begun = Instant::now();
            call();
            assert!(begun.elapsed() < QUICK, "{what} took {:?}", begun.elapsed());
        };
        for _ in 0..3 {
            quick("NodeGetInfo", &|| {
                caller.node(async |mut n| n.node_get_info(NodeGetInfoRequest {}).await).map(drop).unwrap();
            });
            quick("Probe", &|| {
                caller.identity(async |mut i| i.probe(ProbeRequest {}).await).map(drop).unwrap();
            });
            quick("NodeGetVolumeStats", &|| {
                caller.stats(&served, &caller.target_path("one")).map(drop).unwrap();
            });
        }
        quick("NodeUnpublishVolume", &|| caller.unpublish(&served, "one").unwrap());
        quick("NodeUnstageVolume", &|| caller.unstage(&served).unwrap());
        pod.wait().unwrap();
        assert!(!waiting.is_finished());
        for (result, _) in waiting.join().unwrap() {
            let code = result.unwrap_err().code();
            assert!(matches!(code, Code::DeadlineExceeded | Code::Aborted), "{code:?}");
        }
    });
    all(AT_ONCE, &never, |id| caller.unstage(id).unwrap());
    all(AT_ONCE, &never, |id| caller.delete(id).unwrap());
    caller.delete(&served).unwrap();
    scene.assert_nothing_left();
}
