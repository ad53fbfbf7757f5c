//! Drivers that were killed while threads of theirs wait for a daemon that answers nothing:
//! such a process stays, with its descriptors, and must not keep the next driver out.

use std::thread;

use linux::process::{is_killed, open_pidfd, signal_pidfd};
use nix::sys::signal::Signal;
use proto::csi::volume_capability::MountVolume;
use tests::csi::scene::{Flags, Scene, TIMEOUT, mounted};
use tests::wait_for_a_change;

use crate::access::{capability_of, publish};
use crate::killed::hold_changes_back;

#[test]
fn a_killed_driver_that_waits_for_a_daemon_keeps_no_successor_from_serving() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let _held = hold_changes_back(&scene, &id);
    let [daemon] = scene.daemons()[..] else { panic!("{:?}", scene.daemons()) };
    let group = MountVolume { volume_mount_group: "2000".to_owned(), ..Default::default() };
    let published = thread::spawn({
        let (caller, id) = (scene.caller(), id.clone());
        move || publish(&caller, &id, "two", capability_of(group))
    });
    wait_for_a_change(mounted(&caller.target_path("one")).unwrap().minor, TIMEOUT).unwrap();
    let mut killed = scene.driver.take().unwrap();
    killed.signal(Signal::SIGKILL).unwrap();
    scene.start_driver();
    assert!(is_killed(killed.pid().as_raw()), "it is still there");
    let other = caller.bring_up("pvc-2", &["three"]).unwrap();
    // One that lives keeps others out, as ever.
    let mut second = scene.spawn_driver();
    assert!(!second.wait(TIMEOUT).unwrap().success(), "{}", second.output());
    let daemon = open_pidfd(daemon).unwrap().unwrap();
    assert!(signal_pidfd(&daemon, Signal::SIGKILL as i32).unwrap());
    killed.wait(TIMEOUT).unwrap();
    published.join().unwrap().unwrap_err();
    caller.take_down(&other, &["three"]).unwrap();
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}
