//! GetCapacity and over-commit.

use std::collections::HashMap;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{CapacityRange, GetCapacityRequest, GetCapacityResponse, Topology, Volume};
use tests::csi::scene::{Caller, Flags, GI, Scene, capability, create_request};
use tonic::{Code, Status};

use crate::assert_refused;

fn measure(caller: &Caller, change: impl FnOnce(&mut GetCapacityRequest)) -> GetCapacityResponse {
    let mut request = GetCapacityRequest {
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    change(&mut request);
    caller.controller(async |mut c| c.get_capacity(request).await).unwrap().into_inner()
}

fn create(caller: &Caller, name: &str, bytes: i64) -> Result<Volume, Status> {
    let mut request = create_request(name);
    request.capacity_range = Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 });
    caller.create(request)
}

#[test]
fn capacity_follows_over_commit() {
    let mut flags = Flags::process();
    flags.0.extend(["--overcommit", "1.5"].map(str::to_owned));
    let scene = Scene::start(flags);
    let caller = scene.caller();
    let empty = measure(&caller, |_| {});
    assert_eq!(empty.available_capacity, 15 * GI);
    assert_eq!(empty.maximum_volume_size, Some(10 * GI), "one claim still fits into the pool");
    assert_eq!(empty.minimum_volume_size, Some(1));

    let first = create(&caller, "first", 10 * GI).unwrap();
    let rest = measure(&caller, |_| {});
    assert_eq!((rest.available_capacity, rest.maximum_volume_size), (5 * GI, Some(5 * GI)));
    assert_refused(create(&caller, "second", 6 * GI), Code::ResourceExhausted, "10737418240 of 16106127360");
    assert_refused(create(&caller, "second", 11 * GI), Code::OutOfRange, "pool of 10737418240 bytes");
    let second = create(&caller, "second", 5 * GI).unwrap();
    assert_eq!(measure(&caller, |_| {}).available_capacity, 0);
    caller.delete(&first.volume_id).unwrap();
    caller.delete(&second.volume_id).unwrap();
    assert_eq!(measure(&caller, |_| {}), empty);
    scene.assert_nothing_left();
}

#[test]
fn there_is_no_capacity_for_what_could_not_be_created() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let elsewhere = Topology {
        segments: HashMap::from([("topology.csi.hawser.dev/node".to_owned(), "elsewhere".to_owned())]),
    };
    assert_eq!(measure(&caller, |r| r.accessible_topology = Some(elsewhere)).available_capacity, 0);
}

/// The scheduler takes 0 for a full pool, and the user never sees the parameter.
#[test]
fn a_wrong_parameter_is_named_by_create_volume_and_not_hidden_by_the_capacity() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let wrong = HashMap::from([("mountPodMemoryLimit".to_owned(), "much".to_owned())]);
    // The driver has no keeper, which another node may have.
    let lacking =
        [("dataPath", "passthrough"), ("capacity", "none")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    for parameters in [wrong.clone(), HashMap::from(lacking)] {
        assert_eq!(measure(&caller, |r| r.parameters = parameters), measure(&caller, |_| {}));
    }
    let mut request = create_request("pvc-1");
    request.parameters = wrong;
    assert_refused(caller.create(request.clone()), Code::InvalidArgument, "mountPodMemoryLimit");
    assert_refused(caller.create(request), Code::InvalidArgument, "\"much\"");
}
