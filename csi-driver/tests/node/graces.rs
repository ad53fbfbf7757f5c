//! Daemons that do not end by themselves, each with a grace period of a minute, at a driver's
//! end and at its start: the driver waits for none of them before it serves other volumes.

use linux::mount::UnmountMode;
use nix::sys::signal::Signal;
use proto::csi::CreateVolumeRequest;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, create_request, retried};
use tonic::Code;

/// Twice [`TIMEOUT`], within which a driver has to end, or to serve.
const GRACE: &str = "60";
const NO_DELAY: &str = "0";
const LONG_DELAY: &str = "3600";
const NAMES: [&str; 3] = ["a", "b", "c"];

fn stage_new(caller: &Caller, name: &str, delay: &str) -> String {
    let parameters = [("mountPodGracePeriodSeconds", GRACE), ("mountPodDeleteDelaySeconds", delay)];
    let parameters = parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let volume = caller.create(CreateVolumeRequest { parameters, ..create_request(name) }).unwrap();
    caller.stage(&volume.volume_id).unwrap();
    volume.volume_id
}

/// Parks these volumes and stops all daemons, which it returns. The kernel continues the stopped
/// children of a driver that ends, so they become those of an earlier one first.
fn park_and_stop(scene: &mut Scene, parked: &[String]) -> Vec<i32> {
    scene.restart_driver();
    parked.iter().for_each(|id| scene.caller().unstage(id).unwrap());
    scene.sandbox.switch_fuse_guard_off();
    scene.signal_daemons(Signal::SIGSTOP);
    scene.daemons()
}

/// The new driver serves another volume before the first of the `stopped` daemons has ended.
/// Their own volumes are staged only after that.
fn assert_serves_and_ends(scene: &Scene, volume_ids: &[String], stopped: &[i32]) {
    let caller = scene.caller();
    let other = caller.bring_up("other", &["one"]).unwrap();
    for id in volume_ids {
        let refused = caller.stage(id).unwrap_err();
        assert_eq!(refused.code(), Code::Aborted, "{refused:?}");
    }
    caller.take_down(&other, &["one"]).unwrap();
    assert_eq!(scene.daemons(), stopped, "one has ended:\n{}", scene.log());

    scene.signal_daemons(Signal::SIGKILL);
    for id in volume_ids {
        retried(scene, "stage", || caller.stage(id));
        caller.take_down(id, &[]).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn a_killed_drivers_successor_serves_while_daemons_do_not_end() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let mut volume_ids = NAMES.map(|name| stage_new(&caller, name, LONG_DELAY)).to_vec();
    let half_unstaged = stage_new(&caller, "half", NO_DELAY);
    let stopped = park_and_stop(&mut scene, &volume_ids);
    scene.kill_driver();
    // As a driver leaves it that is killed in NodeUnstageVolume.
    linux::mount::unmount(&caller.staging_path(&half_unstaged), UnmountMode::Plain).unwrap();
    volume_ids.push(half_unstaged);
    scene.start_driver();
    assert_serves_and_ends(&scene, &volume_ids, &stopped);
}

#[test]
fn a_driver_ends_while_parked_daemons_do_not_and_its_successor_serves() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume_ids = NAMES.map(|name| stage_new(&caller, name, LONG_DELAY));
    let stopped = park_and_stop(&mut scene, &volume_ids);
    assert!(scene.driver.take().unwrap().stop(TIMEOUT).unwrap().success());
    scene.start_driver();
    assert_serves_and_ends(&scene, &volume_ids, &stopped);
}
