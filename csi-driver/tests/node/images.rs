//! A driver with a new image for its mount pods, which the node may lack.

use std::fs;

use serde_json::Value;
use tests::csi::scene::{Flags, Scene, TIMEOUT, retried, volume_binary};
use tests::eventually;

use crate::keepers::{keeper_binary, keepers, kill_daemon, published, start_service};
use crate::upgrade::{Pods, image, pods_in};

fn with_image(image: &str, keeper: &str) -> Flags {
    let launcher = ["--launcher", "manifest", "--manifests", "m", "--mount-image", image];
    let more = ["--warm-daemons", "0", "--keeper-binary", keeper];
    Flags(launcher.into_iter().chain(more).map(str::to_owned).collect())
}

/// No daemon of the image dials in, so the driver waits for none as long as by default.
fn with_missing_image(keeper: &str) -> Flags {
    with_image("i:missing", keeper).with(&["--start-timeout", "2"].map(str::to_owned))
}

/// As at an update of its flags.
fn restart(scene: &mut Scene, flags: Flags) {
    assert!(scene.driver.take().unwrap().stop(TIMEOUT).unwrap().success(), "{}", scene.log());
    scene.flags = flags;
    scene.start_driver();
}

/// Also for a driver that starts once the pod of the configured image has taken the other one's place.
#[test]
fn a_daemon_of_the_image_before_follows_where_the_configured_image_is_missing() {
    let keeper = keeper_binary().display().to_string();
    let mut scene = Scene::start(with_image("i:1", &keeper));
    // Users wait for the first start.
    scene.sandbox.switch_fuse_guard_off();
    let pods = Pods::start(&scene, &[("i:1", volume_binary())]);
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    restart(&mut scene, with_missing_image(&keeper));
    let serving = |scene: &Scene| -> Vec<String> {
        pods_in(&scene.sandbox.path("m")).iter().map(|pod| image(pod).to_owned()).collect()
    };
    for driver_is_killed in [false, true, false] {
        if driver_is_killed {
            scene.kill_daemon();
            eventually("the other image is tried", TIMEOUT, || {
                let tried = serving(&scene);
                anyhow::ensure!(tried == ["i:missing"], "{tried:?}\n{}", scene.log());
                Ok(())
            })
            .unwrap();
            scene.kill_driver();
            scene.start_driver();
        } else {
            kill_daemon(&scene);
        }
        assert_eq!(fs::read(&file).unwrap(), b"kept", "{}", scene.log());
        assert_eq!(serving(&scene), ["i:1"], "{}", scene.log());
    }
    let caller = scene.caller();
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    pods.end();
    // The ground is that of the first driver.
    restart(&mut scene, with_image("i:1", &keeper));
    scene.assert_nothing_left();
    scene.end_keeper();
}

fn keepers_image(scene: &Scene) -> String {
    let pods = pods_in(&scene.sandbox.path("m"));
    let is_keeper = |pod: &&Value| pod["metadata"]["name"].as_str().unwrap().ends_with("-keeper");
    image(pods.iter().find(is_keeper).unwrap()).to_owned()
}

/// A kubelet would end the keeper, which could not start again.
#[test]
fn the_keepers_pod_gets_no_image_that_no_daemon_has_started_with() {
    let mut scene = Scene::start(with_image("i:1", "pod"));
    // Users wait for the first start.
    scene.sandbox.switch_fuse_guard_off();
    let pods = Pods::start(&scene, &[("i:1", volume_binary()), ("i:2", volume_binary())]);
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let mut keeper = start_service(&scene);
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    let wait_until_held = |scene: &Scene| {
        eventually("all hold the connection", TIMEOUT, || {
            let holders = published(scene)["holders"].clone();
            anyhow::ensure!(holders == serde_json::json!(["daemon", "driver", "keeper"]), "{holders}");
            Ok(())
        })
        .unwrap();
    };
    wait_until_held(&scene);
    restart(&mut scene, with_missing_image("pod"));
    eventually("the driver has tried the image", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("the keeper's pod keeps its image"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    assert_eq!(keepers_image(&scene), "i:1");
    kill_daemon(&scene);
    assert_eq!(fs::read(&file).unwrap(), b"kept", "{}", scene.log());
    assert_eq!((keepers_image(&scene).as_str(), keepers(&scene).len()), ("i:1", 1));
    wait_until_held(&scene);
    restart(&mut scene, with_image("i:2", "pod"));
    eventually("the keeper's pod has the other image", TIMEOUT, || {
        anyhow::ensure!(keepers_image(&scene) == "i:2", "{}", scene.log());
        Ok(())
    })
    .unwrap();
    let caller = scene.caller();
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    keeper.kill().unwrap();
    pods.end();
}
