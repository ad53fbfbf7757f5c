//! ControllerPublishVolume and ControllerUnpublishVolume, and the fence that they are.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use proto::csi::{
    ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, ListVolumesRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability,
};
use tests::csi::scene::{Caller, Flags, NODE, Scene, capability, text};
use tonic::{Code, Status};

use crate::assert_refused;

type Context = HashMap<String, String>;
const PEER: &str = "node-2";

fn attaching(more: &[&str]) -> Flags {
    let mut flags = Flags::process();
    flags.0.extend(["--attach", "--peer-node", PEER].iter().chain(more).map(|flag| (*flag).to_owned()));
    flags
}

fn attach(caller: &Caller, volume_id: &str, node_id: &str, mode: Mode) -> Result<Context, Status> {
    attach_with(caller, volume_id, node_id, mode, false)
}

fn attach_with(
    caller: &Caller,
    volume_id: &str,
    node_id: &str,
    mode: Mode,
    readonly: bool,
) -> Result<Context, Status> {
    let request = ControllerPublishVolumeRequest {
        volume_id: volume_id.into(),
        node_id: node_id.into(),
        volume_capability: Some(capability(mode)),
        readonly,
        ..Default::default()
    };
    let reply = caller.controller(async |mut c| c.controller_publish_volume(request).await)?;
    Ok(reply.into_inner().publish_context)
}

fn detach(caller: &Caller, volume_id: &str, node_id: &str) -> Result<(), Status> {
    let request = ControllerUnpublishVolumeRequest {
        volume_id: volume_id.into(),
        node_id: node_id.into(),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_unpublish_volume(request).await).map(drop)
}

fn stage(caller: &Caller, volume_id: &str, context: &Context) -> Result<(), Status> {
    stage_with(caller, volume_id, capability(Mode::SingleNodeWriter), context)
}

fn stage_with(
    caller: &Caller,
    volume_id: &str,
    how: VolumeCapability,
    context: &Context,
) -> Result<(), Status> {
    let path = caller.staging_path(volume_id);
    fs::create_dir_all(&path).unwrap();
    let request = NodeStageVolumeRequest {
        volume_id: volume_id.into(),
        staging_target_path: text(&path),
        volume_capability: Some(how),
        publish_context: context.clone(),
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(request).await).map(drop)
}

/// Makes it a request for a writable mount, with an attachment.
fn writable(request: &mut NodePublishVolumeRequest, mode: Mode, context: &Context) {
    request.volume_capability = Some(capability(mode));
    request.readonly = false;
    request.publish_context = context.clone();
}

fn attached_to(caller: &Caller) -> Vec<Vec<String>> {
    let listed = caller.controller(async |mut c| c.list_volumes(ListVolumesRequest::default()).await);
    let entries = listed.unwrap().into_inner().entries;
    entries.into_iter().map(|entry| entry.status.unwrap().published_node_ids).collect()
}

#[test]
fn a_single_nodes_volume_is_fenced_from_the_second_node() {
    let scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let context = attach(&caller, &id, NODE, Mode::SingleNodeWriter).unwrap();
    assert_eq!(attach(&caller, &id, NODE, Mode::SingleNodeWriter).unwrap(), context, "again");
    assert_eq!(attached_to(&caller), [[NODE]]);
    assert_refused(
        attach(&caller, &id, NODE, Mode::MultiNodeMultiWriter),
        Code::AlreadyExists,
        "with SINGLE_NODE_WRITER read-write, wanted MULTI_NODE_MULTI_WRITER read-write",
    );
    assert_refused(
        attach_with(&caller, &id, NODE, Mode::SingleNodeWriter, true),
        Code::AlreadyExists,
        "wanted SINGLE_NODE_WRITER read-only",
    );
    assert_refused(
        attach(&caller, &id, PEER, Mode::SingleNodeWriter),
        Code::FailedPrecondition,
        "attached to node node-1, and SINGLE_NODE_WRITER allows no second node",
    );
    assert_refused(caller.delete(&id), Code::FailedPrecondition, "still attached to node node-1");
    detach(&caller, &id, NODE).unwrap();
    attach(&caller, &id, PEER, Mode::SingleNodeWriter).unwrap();
    detach(&caller, &id, "").unwrap();
    assert_eq!(attached_to(&caller), [[""; 0]]);

    for node in [NODE, PEER] {
        attach(&caller, &id, node, Mode::MultiNodeMultiWriter).unwrap();
    }
    assert_eq!(attached_to(&caller), [[NODE, PEER]]);
    detach(&caller, &id, "").unwrap();
    detach(&caller, &id, "").unwrap();
    caller.delete(&id).unwrap();
    detach(&caller, &id, NODE).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn what_an_attachment_needs_is_named_in_order() {
    let scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let unknown = "vol-00000000000000000000000000000000";
    let mode = Mode::SingleNodeWriter;
    assert_refused(attach(&caller, "", "", Mode::Unknown), Code::InvalidArgument, "volume_id is required");
    assert_refused(attach(&caller, unknown, "", Mode::Unknown), Code::InvalidArgument, "node_id is required");
    assert_refused(attach(&caller, unknown, "x", Mode::Unknown), Code::InvalidArgument, "access_mode");
    let long = "n".repeat(256);
    let longer = attach(&caller, unknown, &format!("{long}n"), mode);
    assert_refused(longer, Code::InvalidArgument, "at most 256 bytes are allowed");
    assert_refused(attach(&caller, unknown, &long, mode), Code::NotFound, unknown);
    let id = caller.create_named("pvc-1").unwrap();
    assert_refused(
        attach(&caller, &id, "x", mode),
        Code::NotFound,
        "node \"x\" is not known: known are node-1, node-2",
    );
    assert_refused(detach(&caller, "", NODE), Code::InvalidArgument, "volume_id is required");
    detach(&caller, unknown, "x").unwrap();
    detach(&caller, "not-ours", "").unwrap();
    caller.delete(&id).unwrap();
}

#[test]
fn stage_without_the_attachment_is_refused() {
    let mut scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let words = "publish_context \"hawser.dev/attachment\" is not that of an attachment to node node-1";
    assert_refused(stage(&caller, &id, &Context::new()), Code::FailedPrecondition, words);
    let first = attach(&caller, &id, NODE, Mode::SingleNodeWriter).unwrap();
    assert_refused(stage(&caller, &id, &Context::new()), Code::FailedPrecondition, words);
    stage(&caller, &id, &first).unwrap();
    assert_refused(detach(&caller, &id, NODE), Code::FailedPrecondition, "still staged at");
    let publish = |context: &Context| {
        caller.publish_with(&id, "pod", |request| {
            request.volume_capability = Some(capability(Mode::SingleNodeWriter));
            request.publish_context = context.clone();
        })
    };
    assert_refused(publish(&Context::new()), Code::FailedPrecondition, words);
    publish(&first).unwrap();
    caller.unpublish(&id, "pod").unwrap();
    caller.unstage(&id).unwrap();
    detach(&caller, &id, NODE).unwrap();

    // Attached anew, the former number is of the past, and so it stays after a restart.
    let second = attach(&caller, &id, NODE, Mode::SingleNodeWriter).unwrap();
    scene.restart_driver();
    let caller = scene.caller();
    assert_refused(stage(&caller, &id, &first), Code::FailedPrecondition, words);
    stage(&caller, &id, &second).unwrap();
    caller.unstage(&id).unwrap();
    detach(&caller, &id, "").unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// Unmounted where it is staged by somebody else, it is written to all the same.
#[test]
fn a_volume_that_a_pod_writes_to_is_not_detached() {
    let scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let context = attach(&caller, &id, NODE, Mode::SingleNodeWriter).unwrap();
    stage(&caller, &id, &context).unwrap();
    let publish = |request: &mut NodePublishVolumeRequest| {
        request.volume_capability = Some(capability(Mode::SingleNodeWriter));
        request.publish_context = context.clone();
    };
    caller.publish_with(&id, "pod", publish).unwrap();
    linux::mount::unmount(&caller.staging_path(&id), linux::mount::UnmountMode::Detach).unwrap();
    assert_refused(detach(&caller, &id, NODE), Code::FailedPrecondition, "still published at");
    caller.unpublish(&id, "pod").unwrap();
    end(&scene, &caller, &id);
}

/// Of a volume that is staged and attached to [`NODE`].
fn end(scene: &Scene, caller: &Caller, id: &str) {
    caller.unstage(id).unwrap();
    detach(caller, id, NODE).unwrap();
    caller.delete(id).unwrap();
    scene.assert_nothing_left();
}

/// PUBLISH_READONLY: neither NodeStageVolume nor NodePublishVolume asks for a read-only volume here.
#[test]
fn a_volume_that_is_attached_read_only_is_published_read_only() {
    let scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let mode = Mode::SingleNodeWriter;
    let context = attach_with(&caller, &id, NODE, mode, true).unwrap();
    stage(&caller, &id, &context).unwrap();
    let publish = || caller.publish_with(&id, "pod", |request| writable(request, mode, &context));
    for _call in ["first", "repeated"] {
        publish().unwrap();
        let refused = fs::write(caller.target_path("pod").join("file"), "x").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem, "{refused}");
    }
    caller.unpublish(&id, "pod").unwrap();
    end(&scene, &caller, &id);
}

/// A node that only reads does not change the files' group.
#[test]
fn a_volume_that_is_attached_read_only_keeps_its_group() {
    let scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let mode = Mode::SingleNodeWriter;
    let of_group = || {
        let mount = MountVolume { volume_mount_group: "4242".to_owned(), ..Default::default() };
        VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(mode) }
    };
    let context = attach_with(&caller, &id, NODE, mode, true).unwrap();
    stage_with(&caller, &id, of_group(), &context).unwrap();
    let publish = |request: &mut NodePublishVolumeRequest| {
        writable(request, mode, &context);
        request.volume_capability = Some(of_group());
    };
    caller.publish_with(&id, "pod", publish).unwrap();
    assert_ne!(fs::metadata(caller.target_path("pod")).unwrap().gid(), 4242);
    caller.unpublish(&id, "pod").unwrap();
    end(&scene, &caller, &id);
}

/// An earlier driver did not limit a publish by its attachment: kubelet repeats publishes of running
/// pods.
#[test]
fn a_repeated_publish_of_a_target_that_an_earlier_driver_made_writable_succeeds() {
    let mut scene = Scene::start(attaching(&[]));
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let mode = Mode::SingleNodeWriter;
    let context = attach(&caller, &id, NODE, mode).unwrap();
    stage(&caller, &id, &context).unwrap();
    let publish = |pod: &str| caller.publish_with(&id, pod, |request| writable(request, mode, &context));
    publish("pod").unwrap();
    scene.kill_driver();
    let entry = fs::read_to_string(scene.journal_path(&id)).unwrap();
    assert_eq!(entry.matches("\"read_only\": false").count(), 1, "{entry}");
    fs::write(scene.journal_path(&id), entry.replace("\"read_only\": false", "\"read_only\": true")).unwrap();
    scene.start_driver();
    publish("pod").unwrap();
    fs::write(caller.target_path("pod").join("file"), "x").unwrap();
    caller.unpublish(&id, "pod").unwrap();
    publish("next").unwrap();
    let refused = fs::write(caller.target_path("next").join("file"), "x").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem, "{refused}");
    caller.unpublish(&id, "next").unwrap();
    end(&scene, &caller, &id);
}

#[test]
fn the_attach_limit_counts_this_node_alone() {
    let scene = Scene::start(attaching(&["--max-volumes", "2"]));
    let caller = scene.caller();
    let ids: Vec<String> = ["a", "b", "c"].map(|name| caller.create_named(name).unwrap()).into();
    let mode = Mode::SingleNodeWriter;
    attach(&caller, &ids[0], NODE, mode).unwrap();
    attach(&caller, &ids[1], PEER, mode).unwrap();
    attach(&caller, &ids[2], NODE, mode).unwrap();
    detach(&caller, &ids[1], PEER).unwrap();
    assert_refused(
        attach(&caller, &ids[1], NODE, mode),
        Code::ResourceExhausted,
        "node node-1 has 2 volumes attached, as many as --max-volumes allows",
    );
    attach(&caller, &ids[0], NODE, mode).unwrap();
    detach(&caller, &ids[0], NODE).unwrap();
    attach(&caller, &ids[1], NODE, mode).unwrap();
    for id in &ids {
        detach(&caller, id, "").unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn without_the_flag_nothing_is_offered_and_nothing_asked_for() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    assert_refused(attach(&caller, &id, NODE, Mode::SingleNodeWriter), Code::Unimplemented, "--attach");
    assert_refused(detach(&caller, &id, NODE), Code::Unimplemented, "--attach");
    stage(&caller, &id, &Context::new()).unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
}
