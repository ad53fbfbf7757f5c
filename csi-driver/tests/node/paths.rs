//! Where volumes are staged and published: below the kubelet's directory, outside the
//! driver's own directories, and through no FUSE mount.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{
    NodeGetVolumeStatsRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, capability, mounted, text};
use tests::{Daemon, eventually};
use tonic::{Code, Request, Status};

use crate::hung::within;

pub(crate) fn stage_at(caller: &Caller, id: &str, path: &Path) -> Result<(), Status> {
    let request = NodeStageVolumeRequest {
        volume_id: id.into(),
        staging_target_path: text(path),
        volume_capability: Some(capability(Mode::MultiNodeMultiWriter)),
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(request).await).map(drop)
}

pub(crate) fn publish_at(caller: &Caller, id: &str, path: &Path) -> Result<(), Status> {
    caller.publish_with(id, "refused", |request| request.target_path = text(path))
}

pub(crate) fn unpublish_at(caller: &Caller, id: &str, path: &Path) -> Result<(), Status> {
    let request = NodeUnpublishVolumeRequest { volume_id: id.into(), target_path: text(path) };
    caller.node(async |mut n| n.node_unpublish_volume(request).await).map(drop)
}

pub(crate) fn unstage_at(caller: &Caller, id: &str, path: &Path) -> Result<(), Status> {
    let request = NodeUnstageVolumeRequest { volume_id: id.into(), staging_target_path: text(path) };
    caller.node(async |mut n| n.node_unstage_volume(request).await).map(drop)
}

#[track_caller]
fn assert_refused(refused: Result<(), Status>, field: &str, path: &Path, reason: &str) {
    let status = refused.expect_err(&path.display().to_string());
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    for words in [field, path.to_str().unwrap(), reason] {
        assert!(status.message().contains(words), "{words:?} in {status:?}");
    }
}

/// Only a wrong caller does this.
#[test]
fn what_is_staged_is_not_unpublished_and_what_is_published_is_not_unstaged() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let (staged, target) = (caller.staging_path(&id), caller.target_path("one"));
    unpublish_at(&caller, &id, &staged).unwrap();
    unstage_at(&caller, &id, &target).unwrap();
    assert!(mounted(&staged).is_some() && mounted(&target).is_some());
    fs::write(target.join("f"), "served").unwrap();
    assert_eq!(fs::read(staged.join("f")).unwrap(), b"served");
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn nothing_is_staged_or_published_outside_the_kubelets_directory() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let other = caller.bring_up("other", &["one"]).unwrap();
    let id = caller.create_named("pvc-1").unwrap();
    let staged = caller.create_named("pvc-2").unwrap();
    caller.stage(&staged).unwrap();
    let (k, sandbox) = (scene.kubelet_dir(), &scene.sandbox);
    let published = caller.target_path("one");
    fs::create_dir(published.join("dir")).unwrap();
    let outside = sandbox.make_dir("outside").unwrap();
    fs::create_dir(outside.join("closed")).unwrap();
    fs::set_permissions(outside.join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
    symlink(&outside, k.join("link")).unwrap();
    let data = sandbox.path("pool/volumes").join(&other).join("data");
    let below = "as --paths kubelet-dir wants it";
    for (path, reason) in [
        (outside.join("closed"), below),
        (outside.clone(), below),
        (k.join("link/closed"), below),
        (sandbox.path("state/x"), below),
        (sandbox.path("run/x"), below),
        (sandbox.path("pool/trash/x"), below),
        (sandbox.path("pool/incoming/x"), below),
        (data.join("dir"), below),
        (k.join("plugins/csi.hawser.dev/x"), "the driver's own directory"),
        (published.join("dir"), "a mount of fuse.hawser"),
        (published.join("no/such/dir"), "a mount of fuse.hawser"),
        (caller.staging_path(&other).join("dir"), "a mount of fuse.hawser"),
    ] {
        assert_refused(publish_at(&caller, &staged, &path), "target_path", &path, reason);
        assert_refused(stage_at(&caller, &id, &path), "staging_target_path", &path, reason);
        // There is nothing to undo, and what is there stays.
        unpublish_at(&caller, &staged, &path).unwrap();
        unstage_at(&caller, &id, &path).unwrap();
        let stats = caller.stats(&staged, &path).unwrap_err();
        assert_eq!(stats.code(), Code::NotFound, "{stats:?}");
    }
    assert_refused(stage_at(&caller, &id, &k), "staging_target_path", &k, below);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&outside.join("closed")), mode(&outside)), (0, 0o755));
    assert!(published.join("dir").is_dir() && mounted(&published.join("dir")).is_none());
    fs::remove_file(k.join("link")).unwrap();
    fs::remove_dir_all(&outside).unwrap();
    fs::remove_dir_all(k.join("pods/refused")).unwrap();
    caller.take_down(&staged, &[]).unwrap();
    caller.delete(&id).unwrap();
    caller.take_down(&other, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// A pod may have made the link, in a volume of its own.
#[test]
fn a_known_path_whose_parent_became_a_link_is_not_followed_out_of_the_kubelets_directory() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let [id, other] = ["pvc-1", "pvc-2"].map(|name| caller.create_named(name).unwrap());
    caller.stage(&id).unwrap();
    let dir = scene.kubelet_dir().join("pods/p/dir");
    let (stage, target) = (dir.join("stage"), dir.join("target"));
    fs::create_dir_all(&stage).unwrap();
    stage_at(&caller, &other, &stage).unwrap();
    publish_at(&caller, &id, &target).unwrap();
    let outside = scene.sandbox.make_dir("outside").unwrap();
    let aside = dir.with_file_name("aside");
    fs::rename(&dir, &aside).unwrap();
    symlink(&outside, &dir).unwrap();

    let wanted = "as --paths kubelet-dir wants it";
    // Not final: what the earlier calls made is still there.
    for (status, field) in [
        (publish_at(&caller, &id, &target).unwrap_err(), "target_path"),
        (stage_at(&caller, &other, &stage).unwrap_err(), "staging_target_path"),
    ] {
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
        assert!(status.message().contains(field) && status.message().contains(wanted), "{status:?}");
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    fs::remove_file(&dir).unwrap();
    fs::rename(&aside, &dir).unwrap();
    publish_at(&caller, &id, &target).unwrap();
    unpublish_at(&caller, &id, &target).unwrap();
    unstage_at(&caller, &other, &stage).unwrap();
    caller.delete(&other).unwrap();
    caller.take_down(&id, &[]).unwrap();
    for pod in ["pods/p", "pods/refused"] {
        fs::remove_dir_all(scene.kubelet_dir().join(pod)).unwrap();
    }
    fs::remove_dir(&outside).unwrap();
    scene.assert_nothing_left();
}

/// As after a change of the flag: what the journal names is used and taken down as before.
#[test]
fn a_volume_of_an_earlier_kubelet_directory_is_published_again_and_taken_down() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    fs::write(target.join("file"), "kept").unwrap();
    scene.kill_driver();

    // The new name is a link, as /var/lib/kubelet may be.
    let [real, link] = ["k3", "k2"].map(|name| scene.sandbox.path(name));
    fs::create_dir(&real).unwrap();
    symlink("k3", &link).unwrap();
    let first = scene.driver_command();
    let mut flags: Vec<_> = first.get_args().map(ToOwned::to_owned).collect();
    let at = flags.iter().position(|flag| flag == "--kubelet-dir").unwrap();
    flags[at + 1] = link.clone().into();
    let mut command = scene.sandbox.command(Path::new(first.get_program()));
    command.args(flags);
    let socket = link.join("plugins/csi.hawser.dev/csi.sock");
    let _driver = start(&scene, command, &socket);
    let caller = caller_at(&scene, socket);
    assert!(!caller.stats(&id, &target).unwrap().volume_condition.unwrap().abnormal);
    caller.publish(&id, "one").unwrap();
    assert_refused(
        caller.publish(&id, "two"),
        "target_path",
        &caller.target_path("two"),
        "as --paths kubelet-dir wants it",
    );
    for dir in [&link, &real] {
        let target = dir.join("pods/three/mount");
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        publish_at(&caller, &id, &target).unwrap();
        assert_eq!(fs::read(real.join("pods/three/mount/file")).unwrap(), b"kept");
        unpublish_at(&caller, &id, &target).unwrap();
    }
    // By a link too that leads to what the journal has.
    let old = scene.sandbox.path("old");
    symlink("k", &old).unwrap();
    let by_link = |path: &Path| old.join(path.strip_prefix(scene.kubelet_dir()).unwrap());
    unpublish_at(&caller, &id, &by_link(&target)).unwrap();
    unstage_at(&caller, &id, &by_link(&caller.staging_path(&id))).unwrap();
    caller.delete(&id).unwrap();
    assert!(mounted(&target).is_none() && mounted(&caller.staging_path(&id)).is_none());
    assert!(scene.daemons().is_empty());
}

/// A caller that keeps the paths of the scene's kubelet.
fn caller_at(scene: &Scene, socket: PathBuf) -> Caller {
    let mut caller = scene.caller();
    caller.socket = socket;
    caller
}

/// A driver that ends with the test.
fn start(scene: &Scene, command: Command, socket: &Path) -> Daemon {
    let mut driver = Daemon::start("hawser-csi", command, &scene.sandbox.path("other.log")).unwrap();
    eventually("the driver listens", TIMEOUT, || {
        anyhow::ensure!(driver.ended()?.is_none(), "it ended:\n{}", driver.output());
        anyhow::ensure!(std::os::unix::net::UnixStream::connect(socket).is_ok(), "not yet");
        Ok(())
    })
    .unwrap();
    driver
}

/// A daemon that holds a LOOKUP back costs the driver no thread, and other volumes nothing.
#[test]
fn paths_that_lead_into_a_volume_whose_daemon_does_not_answer_are_refused_without_asking_it() {
    const CALLS: usize = 600;
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let silent = caller.bring_up("silent", &["silent"]).unwrap();
    scene.stop_daemon();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let inside = caller.target_path("silent");
    let calls = (0..CALLS).map(|n| (id.clone(), text(&inside.join(format!("a{n}/b")))));
    let codes = caller
        .node(async |n| {
            let mut under_way = tokio::task::JoinSet::new();
            for (volume_id, volume_path) in calls {
                let mut n = n.clone();
                under_way.spawn(async move {
                    let asked = NodeGetVolumeStatsRequest { volume_id, volume_path, ..Default::default() };
                    let mut request = Request::new(asked);
                    request.set_timeout(TIMEOUT);
                    n.node_get_volume_stats(request).await.map(drop).map_err(|status| status.code())
                });
            }
            Ok(under_way.join_all().await)
        })
        .unwrap();
    assert_eq!(codes, vec![Err(Code::NotFound); CALLS]);
    let waiting =
        linux::mount::FuseConnections::open().unwrap().waiting(mounted(&inside).unwrap().minor).unwrap();
    assert_eq!(waiting, Some(0), "the daemon was not asked");
    for path in [inside.join("x"), inside.join("x/y")] {
        let quick = Duration::from_secs(5);
        within(quick, || publish_at(&caller, &id, &path)).unwrap_err();
        within(quick, || unpublish_at(&caller, &id, &path)).unwrap();
        within(quick, || stage_at(&caller, &id, &path)).unwrap_err();
        within(quick, || unstage_at(&caller, &id, &path)).unwrap();
        within(quick, || caller.stats(&id, &caller.target_path("one"))).unwrap();
    }
    fs::remove_dir_all(scene.kubelet_dir().join("pods/refused")).unwrap();
    caller.take_down(&id, &["one"]).unwrap();
    caller.take_down(&silent, &["silent"]).unwrap();
    scene.assert_nothing_left();
}
