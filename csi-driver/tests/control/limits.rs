//! What names and ids may be.

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{ControllerGetVolumeRequest, CreateVolumeRequest, ValidateVolumeCapabilitiesRequest};
use tests::csi::scene::{Flags, Scene, capability, create_request};
use tonic::Code;

use crate::assert_refused;

#[test]
fn ids_with_dots_never_leave_the_pool() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let victim = scene.sandbox.path("victim");
    std::fs::create_dir_all(victim.join("data")).unwrap();
    let long = "v".repeat(4096);
    for id in ["../victim", "vol-../../../victim", "..", "/", "vol-%2e%2e", "snap-../../victim"] {
        caller.delete(id).unwrap();
        let request = ControllerGetVolumeRequest { volume_id: id.into() };
        let got = caller.controller(async |mut c| c.controller_get_volume(request).await);
        assert_refused(got, Code::NotFound, id);
    }
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: long.clone(),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    let validated = caller.controller(async |mut c| c.validate_volume_capabilities(validate).await);
    assert_refused(validated, Code::InvalidArgument, "volume_id: \"4096 bytes\"");
    assert_refused(caller.delete(&long), Code::InvalidArgument, "volume_id: \"4096 bytes\"");
    assert!(victim.join("data").is_dir());
    scene
        .caller()
        .create(create_request("../../victim"))
        .map(|v| caller.delete(&v.volume_id).unwrap())
        .unwrap();
    assert!(victim.join("data").is_dir());
}

#[test]
fn names_of_128_bytes_live_a_whole_life() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let name = "ä".repeat(64);
    let id = caller.create_named(&name).unwrap();
    assert_eq!(caller.create_named(&name).unwrap(), id);
    caller.stage(&id).unwrap();
    caller.publish(&id, "pod").unwrap();
    caller.unpublish(&id, "pod").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn maps_beyond_4_kib_are_refused_without_a_word_of_what_is_in_them() {
    let scene = Scene::start(Flags::process());
    let with = |change: &dyn Fn(&mut CreateVolumeRequest)| {
        let mut request = create_request("pvc-1");
        change(&mut request);
        scene.caller().create(request)
    };
    let large = || [("key".to_owned(), "hidden".repeat(700))].into();
    for (field, result) in [
        ("parameters", with(&|request| request.parameters = large())),
        ("secrets", with(&|request| request.secrets = large())),
    ] {
        let status = result.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(
            status.message(),
            format!("{field}: \"4203 bytes\": at most 4096 bytes of keys and values are allowed")
        );
    }
    assert!(!scene.log().contains("hidden"));
}
