//! A daemon that goes on while another directory comes to its volume's place in the
//! pool: a pool that was restored or moved under it.

use std::fs;
use std::path::PathBuf;

use proto::csi::{ControllerGetVolumeRequest, VolumeCondition};
use tests::csi::scene::{Caller, Flags, Scene};
use tonic::Code;

const WORDS: &str = "serves another directory";

/// The volume's directory is set aside, and a restored one is in its place. The old one.
fn restored(scene: &Scene, id: &str) -> PathBuf {
    let data = scene.sandbox.path("pool/volumes").join(id).join("data");
    let aside = data.with_file_name("aside");
    fs::rename(&data, &aside).unwrap();
    fs::create_dir(&data).unwrap();
    fs::write(data.join("file"), "restored").unwrap();
    aside
}

pub(crate) fn condition(caller: &Caller, id: &str) -> VolumeCondition {
    let request = ControllerGetVolumeRequest { volume_id: id.into() };
    let reply = caller.controller(async |mut c| c.controller_get_volume(request).await).unwrap();
    reply.into_inner().status.unwrap().volume_condition.unwrap()
}

/// It goes on for the pods that have it, gets no more of them, and everybody is told.
fn assert_told(caller: &Caller, id: &str) {
    let refused = caller.publish(id, "two").unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains(WORDS) && refused.message().contains("pods down"), "{refused:?}");
    for refused in [caller.publish(id, "one").unwrap_err(), caller.stage(id).unwrap_err()] {
        assert_eq!(refused.code(), Code::Aborted, "what is there is there still: {refused:?}");
        assert!(refused.message().contains(WORDS), "{refused:?}");
    }
    let stats = caller.stats(id, &caller.target_path("one")).unwrap();
    assert_eq!(stats.usage.len(), 2);
    for told in [stats.volume_condition.unwrap(), condition(caller, id)] {
        assert!(told.abnormal && told.message.contains(WORDS), "{told:?}");
    }
}

fn assert_serves_the_restored_once_it_was_down(scene: &Scene, caller: &Caller, id: &str, aside: PathBuf) {
    fs::write(caller.target_path("one").join("file"), "written by the pod").unwrap();
    assert_eq!(fs::read(aside.join("file")).unwrap(), b"written by the pod");
    caller.unpublish(id, "one").unwrap();
    caller.unstage(id).unwrap();
    caller.stage(id).unwrap();
    caller.publish(id, "two").unwrap();
    assert_eq!(fs::read(caller.target_path("two").join("file")).unwrap(), b"restored");
    assert!(!condition(caller, id).abnormal);
    fs::remove_dir_all(&aside).unwrap();
    caller.take_down(id, &["two"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_daemon_of_another_directory_gets_no_more_pods_and_says_so() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    assert!(!condition(&caller, &id).abnormal);
    let aside = restored(&scene, &id);
    assert_told(&caller, &id);
    assert_serves_the_restored_once_it_was_down(&scene, &caller, &id, aside);
}

#[test]
fn a_restart_does_not_take_a_daemon_of_another_directory_for_well() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let daemons = scene.daemons();
    scene.kill_driver();
    let aside = restored(&scene, &id);
    scene.start_driver();
    assert_eq!(scene.daemons(), daemons, "its pods go on");
    assert!(scene.log().contains("adopted for its pods alone"), "{}", scene.log());
    assert_told(&caller, &id);
    assert_serves_the_restored_once_it_was_down(&scene, &caller, &id, aside);
}

/// Nobody knows what it would have: what is served needs no path of the pool's.
#[test]
fn what_is_served_is_published_while_its_pool_is_away() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let pool = scene.sandbox.path("pool");
    let aside = pool.with_file_name("unmounted");
    fs::rename(&pool, &aside).unwrap();
    fs::create_dir(&pool).unwrap();
    caller.publish(&id, "one").unwrap();
    assert!(!condition(&caller, &id).abnormal);
    fs::remove_dir(&pool).unwrap();
    fs::rename(&aside, &pool).unwrap();
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}
