//! ValidateVolumeCapabilities: what it confirms, and what it does not.

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, VolumeCapability};
use tests::csi::scene::{Flags, Scene, capability, create_request};
use tests::csi::snapshots::with;
use tonic::{Code, Status};

use crate::assert_refused;

type Change<'a> = &'a dyn Fn(&mut ValidateVolumeCapabilitiesRequest);

fn validate(
    scene: &Scene,
    volume_id: &str,
    change: Change<'_>,
) -> Result<ValidateVolumeCapabilitiesResponse, Status> {
    let mut request = ValidateVolumeCapabilitiesRequest {
        volume_id: volume_id.into(),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    change(&mut request);
    let validated = scene.caller().controller(async |mut c| c.validate_volume_capabilities(request).await);
    validated.map(tonic::Response::into_inner)
}

#[test]
fn only_what_is_true_of_the_volume_is_confirmed() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create(with(create_request("pvc-1"), &[("threads", "2")])).unwrap().volume_id;
    let map = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
    let confirmed = |change: Change<'_>| {
        let response = validate(&scene, &id, change).unwrap();
        assert_eq!(response.message, "");
        response.confirmed.unwrap()
    };
    assert!(confirmed(&|_| {}).parameters.is_empty());
    assert_eq!(confirmed(&|r| r.parameters = map("threads", "2")).parameters, map("threads", "2"));
    let cases: [(Change<'_>, &str); 5] = [
        (&|r| r.volume_context = map("share", "a"), "volume_context: unknown key \"share\""),
        (&|r| r.mutable_parameters = map("iops", "9"), "mutable_parameters: unknown parameter \"iops\""),
        (
            &|r| r.parameters = map("threads", "3"),
            "parameters: the volume was created with threads=2, not with threads=3",
        ),
        (&|r| r.parameters = map("thread", "2"), "unknown parameter \"thread\""),
        (&|r| r.volume_capabilities.push(capability(Mode::Unknown)), "unknown access mode"),
    ];
    for (change, words) in cases {
        let response = validate(&scene, &id, change).unwrap();
        assert_eq!(response.confirmed, None);
        assert!(response.message.contains(words), "{words:?} in {:?}", response.message);
    }
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn an_incomplete_capability_is_an_invalid_argument() {
    let scene = Scene::start(Flags::process());
    // Before the volume is looked for.
    let id = "vol-00000000000000000000000000000000";
    let whole = capability(Mode::SingleNodeWriter);
    for (incomplete, words) in [
        (VolumeCapability { access_type: None, ..whole.clone() }, "access_type is required"),
        (VolumeCapability { access_mode: None, ..whole.clone() }, "access_mode is required"),
    ] {
        let push = |r: &mut ValidateVolumeCapabilitiesRequest| r.volume_capabilities.push(incomplete.clone());
        assert_refused(validate(&scene, id, &push), Code::InvalidArgument, words);
    }
    assert_refused(validate(&scene, id, &|_| {}), Code::NotFound, id);
}
