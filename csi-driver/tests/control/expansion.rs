//! ControllerExpandVolume.

use proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, VolumeCapability,
};
use tests::csi::scene::{Caller, Flags, GI, Scene, create_request};
use tonic::{Code, Status};

use crate::assert_refused;

fn expand(caller: &Caller, volume_id: &str, range: Option<(i64, i64)>) -> Result<i64, Status> {
    expand_with(caller, volume_id, range, None).map(|reply| {
        assert!(!reply.node_expansion_required);
        reply.capacity_bytes
    })
}

fn expand_with(
    caller: &Caller,
    volume_id: &str,
    range: Option<(i64, i64)>,
    volume_capability: Option<VolumeCapability>,
) -> Result<ControllerExpandVolumeResponse, Status> {
    let request = ControllerExpandVolumeRequest {
        volume_id: volume_id.into(),
        capacity_range: range
            .map(|(required_bytes, limit_bytes)| CapacityRange { required_bytes, limit_bytes }),
        volume_capability,
        ..Default::default()
    };
    caller
        .controller(async |mut c| c.controller_expand_volume(request).await)
        .map(tonic::Response::into_inner)
}

fn size_of(path: &std::path::Path) -> u64 {
    let fs = nix::sys::statvfs::statvfs(path).unwrap();
    fs.blocks() * fs.fragment_size()
}

#[test]
fn an_expansion_is_exact_and_repeats() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let odd = GI + 12_345_678;
    assert_eq!(expand(&caller, &id, Some((odd, 0))).unwrap(), odd);
    assert_eq!(expand(&caller, &id, Some((odd, odd))).unwrap(), odd, "again");
    assert_eq!(expand(&caller, &id, Some((GI, 0))).unwrap(), odd, "never smaller");
    assert_eq!(expand(&caller, &id, Some((0, 3 * GI))).unwrap(), odd, "the limit alone is met already");
    scene.restart_driver();
    let caller = scene.caller();
    assert_eq!(expand(&caller, &id, Some((1, 0))).unwrap(), odd, "the journal has it");
    // CreateVolume of the first size is what it was: the name is taken by a larger one.
    let mut request = create_request("pvc-1");
    request.capacity_range = Some(CapacityRange { required_bytes: GI, limit_bytes: GI });
    assert_refused(caller.create(request), Code::AlreadyExists, "1086087502 bytes");
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn an_expansion_beyond_the_pool_names_both_sizes() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let (a, b) = (caller.create_named("a").unwrap(), caller.create_named("b").unwrap());
    assert_refused(
        expand(&caller, &a, Some((11 * GI, 0))),
        Code::OutOfRange,
        "claim of 11811160064 bytes is larger than the pool of 10737418240 bytes",
    );
    assert_refused(
        expand(&caller, &a, Some((10 * GI, 0))),
        Code::ResourceExhausted,
        "claim of 10737418240 bytes exceeds what is left of the pool: 1073741824 of 10737418240",
    );
    assert_eq!(expand(&caller, &a, Some((9 * GI, 0))).unwrap(), 9 * GI);
    assert_refused(
        expand(&caller, &a, Some((GI, 2 * GI))),
        Code::OutOfRange,
        "has 9663676416 bytes, wanted at least 1073741824 bytes and at most 2147483648",
    );
    for id in [a, b] {
        caller.delete(&id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn what_an_expansion_needs_is_named_before_the_volume_is_looked_for() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let unknown = "vol-00000000000000000000000000000000";
    assert_refused(expand(&caller, "", Some((1, 0))), Code::InvalidArgument, "volume_id is required");
    assert_refused(expand(&caller, unknown, None), Code::InvalidArgument, "capacity_range is required");
    assert_refused(
        expand(&caller, unknown, Some((0, 0))),
        Code::InvalidArgument,
        "required_bytes is required",
    );
    assert_refused(expand(&caller, unknown, Some((2, 1))), Code::InvalidArgument, "limit_bytes: \"1\"");
    let nothing = Some(VolumeCapability::default());
    assert_refused(
        expand_with(&caller, unknown, Some((1, 0)), nothing),
        Code::InvalidArgument,
        "access_type",
    );
    assert_refused(expand(&caller, unknown, Some((1, 0))), Code::NotFound, unknown);
}

#[test]
fn a_served_volume_is_larger_at_once_and_a_dead_daemons_one_when_it_is_staged() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let path = caller.staging_path(&id);
    assert_eq!(size_of(&path), 1 << 30);
    expand(&caller, &id, Some((2 * GI, 0))).unwrap();
    assert_eq!(size_of(&path), 2 << 30);
    scene.kill_daemon();
    assert_eq!(expand(&caller, &id, Some((3 * GI, 0))).unwrap(), 3 * GI);
    caller.stage(&id).unwrap();
    assert_eq!(size_of(&path), 3 << 30);
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}
