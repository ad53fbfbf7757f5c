//! The manifest launcher. In the kubelet's place a thread runs what the manifest says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::JoinHandle;

use serde_json::{Value, json};
use tests::csi::scene::{Caller, Flags, GI, Scene, TIMEOUT, create_request, mounted, retried, volume_binary};
use tests::{as_soon_as, eventually};
use tonic::{Code, Status};

use crate::silent::{SIGSTOP, signal_daemons};

fn flags(start_timeout: &str) -> Flags {
    // Relative to the sandbox, which is the driver's working directory.
    Flags(
        [
            "--launcher",
            "manifest",
            "--manifests",
            "m",
            "--mount-image",
            "hawser/volume:test",
            "--start-timeout",
            start_timeout,
            "--keeper-binary",
            "none",
            "--warm-daemons",
            "0",
        ]
        .map(str::to_owned)
        .to_vec(),
    )
}

/// A Stage that goes on while the test looks.
fn stage_beside(caller: &Caller, volume_id: &str) -> JoinHandle<Result<(), Status>> {
    let (caller, id) = (caller.clone(), volume_id.to_owned());
    std::thread::spawn(move || caller.stage(&id))
}

fn manifest(scene: &Scene, volume_id: &str) -> PathBuf {
    let key = volume_id.trim_start_matches("vol-");
    scene.sandbox.path("m").join(format!("hawser-volume-{key}.yaml"))
}

/// The pod that a manifest describes.
fn pod(manifest: &Path) -> Value {
    serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap()
}

/// What the pod's container would be, without a container around it but for the
/// processes that it sees: its own.
fn run_pod(scene: &Scene, manifest: &Path) -> Child {
    let pod = pod(manifest);
    let nonce = &pod["spec"]["containers"][0]["env"][0];
    assert_eq!(nonce["name"], "HAWSER_NONCE");
    let dial_dir = pod["spec"]["volumes"][0]["hostPath"]["path"].as_str().unwrap();
    scene
        .sandbox
        .command(Path::new("unshare"))
        .args(["--pid", "--fork", "--kill-child"])
        .arg(volume_binary())
        .args(["serve", "--confine", "--socket"])
        .arg(Path::new(dial_dir).join("dial.sock"))
        .env("HAWSER_NONCE", nonce["value"].as_str().unwrap())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Stages while a pod is run from the manifest as soon as it appears.
fn stage_with_pod(scene: &Scene, volume_id: &str) -> Child {
    let caller = scene.caller();
    let path = manifest(scene, volume_id);
    std::thread::scope(|scope| {
        let staging = scope.spawn(|| caller.stage(volume_id));
        as_soon_as("the manifest appears", TIMEOUT, || path.exists()).unwrap();
        let pod = run_pod(scene, &path);
        staging.join().unwrap().unwrap();
        pod
    })
}

#[test]
fn a_volume_is_served_by_the_pod_of_its_manifest() {
    let scene = Scene::start(flags("30"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let mut pod = stage_with_pod(&scene, &id);
    caller.publish(&id, "one").unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    assert!(!manifest(&scene, &id).exists());
    pod.wait().unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_pod_that_never_comes_leaves_nothing() {
    let scene = Scene::start(flags("1"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let refused = caller.stage(&id).unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded);
    let name = manifest(&scene, &id).file_stem().unwrap().to_owned();
    let awaited = format!("waited for pod hawser-system/{}-", name.display());
    assert!(refused.message().contains(&awaited), "{}", refused.message());
    assert!(refused.message().ends_with(" with image hawser/volume:test"), "{}", refused.message());
    assert!(!manifest(&scene, &id).exists() && mounted(&caller.staging_path(&id)).is_none());
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn an_unstage_ends_the_wait_for_a_pod_that_never_comes() {
    let scene = Scene::start(flags("80"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let path = manifest(&scene, &id);
    std::thread::scope(|scope| {
        let staging = scope.spawn(|| caller.stage(&id));
        as_soon_as("the manifest appears", TIMEOUT, || path.exists()).unwrap();
        retried(&scene, "unstage", || caller.unstage(&id));
        assert_eq!(staging.join().unwrap().unwrap_err().code(), Code::Aborted);
    });
    assert!(!path.exists() && mounted(&caller.staging_path(&id)).is_none());
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// What waits for a pod is taken back; the driver's end does not wait with it.
#[test]
fn sigterm_ends_the_wait_for_a_pod_that_never_comes() {
    let mut scene = Scene::start(flags("80"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let path = manifest(&scene, &id);
    let staging = stage_beside(&caller, &id);
    as_soon_as("the manifest appears", TIMEOUT, || path.exists()).unwrap();
    assert!(scene.driver.take().unwrap().stop(TIMEOUT).unwrap().success());
    assert_eq!(staging.join().unwrap().unwrap_err().code(), Code::Aborted, "and not broken off");
    assert!(!path.exists() && mounted(&caller.staging_path(&id)).is_none() && !scene.dial_dir(&id).exists());
    scene.start_driver();
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_driver_killed_with_a_manifest_written_takes_it_away_at_its_next_start() {
    let mut scene = Scene::start(flags("30"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let path = manifest(&scene, &id);
    let staging = stage_beside(&caller, &id);
    as_soon_as("the manifest appears", TIMEOUT, || path.exists()).unwrap();
    scene.kill_driver();
    drop(staging.join().unwrap());
    let stray = scene.sandbox.path("m").join(format!("hawser-volume-{}.yaml", "0".repeat(32)));
    let dial_dir = scene.sandbox.path("run").join("0".repeat(32));
    fs::write(&stray, format!("kind: Pod\n      path: \"{}\"\n", dial_dir.display())).unwrap();
    let users = scene.sandbox.path("m/users-pod.yaml");
    fs::write(&users, "kind: Pod\n").unwrap();
    scene.start_driver();
    assert!(!path.exists() && !stray.exists());
    fs::remove_file(users).unwrap();

    let mut pod = stage_with_pod(&scene, &id);
    // A pod with a nonce of another launch gets nothing; the right one is served on.
    scene.restart_driver();
    assert!(path.exists(), "the manifest of a volume that is served stays");
    eventually("still served", TIMEOUT, || Ok(fs::metadata(caller.staging_path(&id)).map(drop)?)).unwrap();
    retried(&scene, "unstage", || caller.unstage(&id));
    pod.wait().unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn the_manifest_asks_for_six_capabilities_and_nothing_else() {
    let mut scene = Scene::start(flags("30"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let path = manifest(&scene, &id);
    let staging = stage_beside(&caller, &id);
    as_soon_as("the manifest appears", TIMEOUT, || path.exists()).unwrap();
    let pod = pod(&path);
    scene.kill_driver();
    drop(staging.join().unwrap());
    let name = pod["metadata"]["name"].as_str().unwrap();
    let key = id.trim_start_matches("vol-");
    assert!(name.starts_with(&format!("hawser-volume-{key}-")), "{name}");
    let container = &pod["spec"]["containers"][0];
    let wanted = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "hawser-system",
            "labels": {
                "app.kubernetes.io/managed-by": "hawser-csi",
                "hawser.dev/role": "mount-pod",
                "hawser.dev/volume": key
            },
            "annotations": {
                "hawser.dev/network": "none",
                "hawser.dev/run-dir": scene.sandbox.path("run"),
                "hawser.dev/volume-id": id
            }
        },
        "spec": {
            "restartPolicy": "Never",
            "priorityClassName": "system-node-critical",
            "priority": 2_000_001_000,
            "terminationGracePeriodSeconds": 5,
            "enableServiceLinks": false,
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "volume",
                "image": "hawser/volume:test",
                "imagePullPolicy": "Never",
                "command": ["/hawser-volume"],
                "args": ["serve", "--socket", "/run/hawser/dial.sock", "--log-level", "info"],
                "env": [{"name": "HAWSER_NONCE", "value": container["env"][0]["value"]}],
                "resources": container["resources"],
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {
                        "drop": ["ALL"],
                        "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID"]
                    },
                    "seccompProfile": {"type": "RuntimeDefault"}
                },
                "volumeMounts": [{"name": "dial", "mountPath": "/run/hawser", "readOnly": true}]
            }],
            "volumes": [{"name": "dial", "hostPath": {"path": scene.dial_dir(&id), "type": "Directory"}}]
        }
    });
    assert_eq!(pod, wanted);
}

#[test]
fn a_parked_pod_keeps_its_manifest_and_one_that_was_taken_back_is_not_taken() {
    let scene = Scene::start(flags("30"));
    let caller = scene.caller();
    let mut request = create_request("pvc-1");
    request.parameters = [("mountPodDeleteDelaySeconds".to_owned(), "3600".to_owned())].into();
    let id = caller.create(request).unwrap().volume_id;
    let path = manifest(&scene, &id);
    let mut first = stage_with_pod(&scene, &id);
    let (text, daemons) = (fs::read_to_string(&path).unwrap(), scene.daemons());
    caller.unstage(&id).unwrap();
    caller.stage(&id).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), text, "the same pod");
    assert_eq!(scene.daemons(), daemons);
    caller.unstage(&id).unwrap();

    // Somebody ends the pod: its kubelet has until the grace is over to kill it.
    fs::remove_file(&path).unwrap();
    let mut second = stage_with_pod(&scene, &id);
    first.wait().unwrap();
    assert!(scene.daemons().len() == 1 && scene.daemons() != daemons, "{:?}", scene.daemons());
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    assert!(!path.exists());
    second.wait().unwrap();
    scene.assert_nothing_left();
}

/// Their grace periods run side by side then, and the driver does not wait for them.
#[test]
fn a_start_takes_all_manifests_of_parked_pods_away_before_the_first_has_ended() {
    let mut scene = Scene::start(flags("30"));
    let caller = scene.caller();
    let parameters = [("mountPodDeleteDelaySeconds", "3600"), ("mountPodGracePeriodSeconds", "60")];
    let mut parked = ["a", "b"].map(|name| {
        let mut request = create_request(name);
        request.parameters = parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let id = caller.create(request).unwrap().volume_id;
        let pod = stage_with_pod(&scene, &id);
        caller.unstage(&id).unwrap();
        (id, pod)
    });
    scene.sandbox.switch_fuse_guard_off();
    signal_daemons(&scene, SIGSTOP);
    let stopped = scene.daemons();
    scene.restart_driver();
    for (id, _) in &parked {
        let path = manifest(&scene, id);
        assert!(!path.exists(), "{}", path.display());
    }
    assert_eq!(scene.daemons(), stopped);

    for (id, pod) in &mut parked {
        pod.kill().unwrap();
        pod.wait().unwrap();
        retried(&scene, "delete", || caller.delete(id));
    }
    scene.assert_nothing_left();
}

/// In a pod the daemon sees no process but its own: who asks it is nobody that it knows.
#[test]
fn a_daemon_in_a_pod_hears_the_driver() {
    let scene = Scene::start(flags("30"));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let mut pod = stage_with_pod(&scene, &id);
    caller.publish(&id, "one").unwrap();
    let wanted = 2 * GI;
    let request = proto::csi::ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(proto::csi::CapacityRange { required_bytes: wanted, limit_bytes: 0 }),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_expand_volume(request).await).unwrap();
    let size = nix::sys::statvfs::statvfs(&caller.target_path("one")).unwrap();
    assert_eq!(i64::try_from(size.blocks() * size.fragment_size()).unwrap(), wanted);
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    pod.wait().unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}
