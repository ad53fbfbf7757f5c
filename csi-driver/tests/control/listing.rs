//! ListVolumes and ControllerGetVolume.

use std::collections::BTreeSet;
use std::fs;

use proto::csi::list_volumes_response::Entry;
use proto::csi::{
    CapacityRange, ControllerGetVolumeRequest, ControllerGetVolumeResponse, ListVolumesRequest,
    ListVolumesResponse, VolumeCondition,
};
use tests::csi::programs::install;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, create_request, retried, volume_binary};
use tests::{Sandbox, eventually};
use tonic::{Code, Status};

use crate::assert_refused;

const MI: i64 = 1 << 20;

fn list(caller: &Caller, max_entries: i32, starting_token: &str) -> Result<ListVolumesResponse, Status> {
    let request = ListVolumesRequest { max_entries, starting_token: starting_token.into() };
    caller.controller(async |mut c| c.list_volumes(request).await).map(tonic::Response::into_inner)
}

fn get(caller: &Caller, volume_id: &str) -> Result<ControllerGetVolumeResponse, Status> {
    let request = ControllerGetVolumeRequest { volume_id: volume_id.into() };
    caller.controller(async |mut c| c.controller_get_volume(request).await).map(tonic::Response::into_inner)
}

fn condition(caller: &Caller, volume_id: &str) -> VolumeCondition {
    get(caller, volume_id).unwrap().status.unwrap().volume_condition.unwrap()
}

fn id(entry: &Entry) -> String {
    entry.volume.as_ref().unwrap().volume_id.clone()
}

fn create_small(caller: &Caller, name: &str) -> String {
    let mut request = create_request(name);
    request.capacity_range = Some(CapacityRange { required_bytes: MI, limit_bytes: 0 });
    caller.create(request).unwrap().volume_id
}

#[test]
fn a_thousand_volumes_are_listed_in_pages_each_once_while_some_are_deleted() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let made: BTreeSet<String> = (0..1000).map(|n| create_small(&caller, &format!("pvc-{n}"))).collect();
    assert_eq!(made.len(), 1000);

    let mut listed = Vec::new();
    let mut token = String::new();
    loop {
        let page = list(&caller, 64, &token).unwrap();
        assert!(page.entries.len() <= 64);
        listed.extend(page.entries.iter().map(id));
        token = page.next_token;
        if token.is_empty() {
            break;
        }
        // The last of each page goes: the token that names it still leads on.
        caller.delete(listed.last().unwrap()).unwrap();
    }
    assert_eq!(listed.len(), 1000, "each once");
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), made);

    let rest = list(&caller, 0, "").unwrap();
    assert_eq!((rest.entries.len(), rest.next_token.as_str()), (1000 - 15, ""));
    for entry in &rest.entries {
        caller.delete(&id(entry)).unwrap();
    }
    assert_eq!(list(&caller, 0, "").unwrap().entries.len(), 0);
    scene.assert_nothing_left();
}

#[test]
fn a_token_nobody_gave_is_aborted_and_named() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    for token in ["invalid-token", "v1:", "v1:../../etc", "v2:vol-00000000000000000000000000000000"] {
        assert_refused(list(&caller, 0, token), Code::Aborted, &format!("starting_token: {token:?}"));
    }
    assert_refused(list(&caller, -1, ""), Code::InvalidArgument, "max_entries: \"-1\"");
}

#[test]
fn a_list_entry_says_what_create_said() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let made = caller.create(create_request("pvc-1")).unwrap();
    let listed = list(&caller, 0, "").unwrap();
    let [entry] = &listed.entries[..] else { panic!("one entry: {listed:?}") };
    assert_eq!(entry.volume.as_ref(), Some(&made));
    assert_eq!(get(&caller, &made.volume_id).unwrap().volume, Some(made.clone()));
    caller.delete(&made.volume_id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn an_unreadable_volume_is_listed_as_abnormal() {
    let mut scene = Scene::start(Flags::process());
    let id = scene.caller().create_named("pvc-1").unwrap();
    let whole = scene.journal(&id);
    fs::write(scene.journal_path(&id), &whole[..whole.len() / 2]).unwrap();
    scene.restart_driver();
    let listed = list(&scene.caller(), 0, "").unwrap();
    let entry = &listed.entries[0];
    assert_eq!(entry.volume.as_ref().unwrap().capacity_bytes, 0);
    let condition = entry.status.as_ref().unwrap().volume_condition.as_ref().unwrap();
    assert!(condition.abnormal && condition.message.contains(&id), "{condition:?}");
    assert_refused(get(&scene.caller(), &id), Code::Aborted, "journal");
}

#[test]
fn get_volume_tells_a_dead_daemon() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    assert_eq!(condition(&caller, &id), VolumeCondition { abnormal: false, message: "not staged".into() });
    caller.stage(&id).unwrap();
    assert_eq!(condition(&caller, &id), VolumeCondition { abnormal: false, message: "served".into() });
    scene.kill_daemon();
    let dead = condition(&caller, &id);
    assert!(dead.abnormal && dead.message.contains("daemon ended"), "{dead:?}");
    let listed = list(&caller, 0, "").unwrap().entries.remove(0).status.unwrap();
    assert_eq!(listed.volume_condition, Some(dead));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    assert_refused(get(&caller, &id), Code::NotFound, &id);
    assert_refused(get(&caller, ""), Code::InvalidArgument, "volume_id is required");
    scene.assert_nothing_left();
}

#[test]
fn a_volume_whose_users_wait_for_a_takeover_is_not_listed_as_abnormal() {
    let sandbox = Sandbox::new();
    let program = sandbox.path("hawser-volume");
    let original = fs::read(volume_binary()).unwrap();
    install(&program, &original);
    let own = ["--volume-binary".to_owned(), program.display().to_string()];
    let mut scene = Scene::start_in(sandbox, Flags::process_with_keeper().with(&own));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    // It never dials in.
    install(&program, b"#!/bin/sh\nexec sleep 1000\n");
    scene.kill_daemon();
    let waits = "the volume's daemon ended: reads and writes wait for another one";
    let condition_of = |abnormal| VolumeCondition { abnormal, message: waits.to_owned() };
    assert_eq!(condition(&caller, &id), condition_of(true), "{}", scene.log());
    let listed = list(&caller, 0, "").unwrap().entries.remove(0).status.unwrap();
    assert_eq!(listed.volume_condition, Some(condition_of(false)));
    scene.driver.take().unwrap().stop(TIMEOUT).unwrap();
    install(&program, &original);
    scene.start_driver();
    eventually("another daemon serves", TIMEOUT, || {
        let found = condition(&caller, &id);
        anyhow::ensure!(found.message == "served", "{found:?}");
        Ok(())
    })
    .unwrap();
    retried(&scene, "unstage", || caller.unstage(&id));
    caller.delete(&id).unwrap();
    scene.end_keeper();
}
