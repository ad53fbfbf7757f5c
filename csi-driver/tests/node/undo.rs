//! Unpublish and Unstage of what is not there.

use std::fs;
use std::path::Path;

use proto::csi::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest};
use tests::csi::scene::{Caller, Flags, Scene, mounted, text};

fn unpublish_at(caller: &Caller, volume_id: &str, path: &Path) {
    let request = NodeUnpublishVolumeRequest { volume_id: volume_id.into(), target_path: text(path) };
    caller.node(async |mut n| n.node_unpublish_volume(request).await).unwrap();
}

fn unstage_at(caller: &Caller, volume_id: &str, path: &Path) {
    let request = NodeUnstageVolumeRequest { volume_id: volume_id.into(), staging_target_path: text(path) };
    caller.node(async |mut n| n.node_unstage_volume(request).await).unwrap();
}

/// A caller that cleans up by trying every volume at one path, as csi-sanity does.
#[test]
fn to_undo_a_volume_where_another_is_mounted_succeeds_and_touches_nothing() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let there = caller.bring_up("there", &["one"]).unwrap();
    let (target, staging) = (caller.target_path("one"), caller.staging_path(&there));
    fs::write(target.join("file"), "x").unwrap();

    let elsewhere = caller.bring_up("elsewhere", &["two"]).unwrap();
    let never_created = format!("vol-{}", "0".repeat(32));
    for other in [elsewhere.as_str(), &never_created, "fake-vol-id"] {
        unpublish_at(&caller, other, &target);
        unstage_at(&caller, other, &staging);
        assert!(mounted(&staging).is_some(), "{other}");
        assert_eq!(fs::read(target.join("file")).unwrap(), b"x", "{other}");
    }
    assert!(mounted(&caller.target_path("two")).is_some(), "its own target is another path");

    for (id, pod) in [(&there, "one"), (&elsewhere, "two")] {
        caller.unpublish(id, pod).unwrap();
        caller.unstage(id).unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}

/// The directory that a link leads to may change between Publish and Unpublish.
#[test]
fn unpublish_finds_what_was_published_through_a_link_that_leads_elsewhere_by_now() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let pods = caller.target_path("x").ancestors().nth(5).unwrap().to_owned();
    let [first, second, link] = ["first", "second", "link"].map(|name| pods.join(name));
    for dir in [&first, &second] {
        fs::create_dir_all(dir).unwrap();
    }
    let lead_to = |dir: &Path| {
        let _none_yet = fs::remove_file(&link);
        std::os::unix::fs::symlink(dir, &link).unwrap();
    };
    let publish = |path: &Path| {
        caller.publish_with(&id, "x", |request| request.target_path = text(path)).unwrap();
    };
    lead_to(&first);
    publish(&link.join("mount"));
    assert!(mounted(&first.join("mount")).is_some());
    lead_to(&second);
    // By a path without links, and so another's.
    publish(&second.join("mount"));
    let stats = caller.stats(&id, &link.join("mount")).unwrap();
    assert!(!stats.volume_condition.unwrap().abnormal);
    unpublish_at(&caller, &id, &link.join("mount"));
    assert!(mounted(&first.join("mount")).is_none() && !first.join("mount").exists());
    assert!(mounted(&second.join("mount")).is_some(), "nobody asked for that");
    // By the path that it was resolved to.
    lead_to(&first);
    publish(&link.join("mount"));
    unpublish_at(&caller, &id, &first.join("mount"));
    assert!(mounted(&first.join("mount")).is_none());
    // As an earlier version journaled it, by the path that links lead to.
    lead_to(&second);
    unpublish_at(&caller, &id, &link.join("mount"));
    assert!(mounted(&second.join("mount")).is_none());
    fs::remove_file(&link).unwrap();
    for dir in [first, second, caller.target_path("x").parent().unwrap().to_owned()] {
        fs::remove_dir(dir).unwrap();
    }
    caller.take_down(&id, &[]).unwrap();
    fs::remove_dir_all(pods.join("x")).unwrap();
    scene.assert_nothing_left();
}

/// Where the volume is published, something else on top is an operator's to take away.
#[test]
fn a_foreign_mount_upon_a_published_target_is_named_and_kept() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    linux::mount::mount_fs("tmpfs", "stranger", &target, linux::mount::MountFlags::default(), "").unwrap();
    let refused = caller.unpublish(&id, "one").unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("tmpfs from stranger"), "{refused:?}");
    assert_eq!(mounted(&target).unwrap().source, "stranger");
    linux::mount::unmount(&target, linux::mount::UnmountMode::Plain).unwrap();
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// kubelet is to come again: the journal still says what is not there any more.
#[test]
fn an_undo_that_cannot_be_journaled_is_aborted_and_succeeds_later() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let boots = scene.sandbox.path("state/boots");
    let aside = scene.sandbox.path("state/aside");
    fs::rename(&boots, &aside).unwrap();
    let refused = caller.unpublish(&id, "one").unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Aborted, "{refused:?}");
    fs::rename(&aside, &boots).unwrap();
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}
