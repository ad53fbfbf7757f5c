//! What a class and a claim's mount options say of the volume's daemon.

use std::collections::HashMap;
use std::fs;

use anyhow::Context;
use proto::csi::volume_capability::AccessType;
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{NodeStageVolumeRequest, VolumeCapability};
use tests::csi::data_path;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, capability, create_request, retried, text};
use tests::csi::snapshots::{data, with};
use tests::eventually;
use tonic::{Code, Status};

use crate::assert_refused;

fn with_flags(flags: &[&str]) -> VolumeCapability {
    let mut wanted = capability(Mode::MultiNodeMultiWriter);
    if let Some(AccessType::Mount(mount)) = &mut wanted.access_type {
        mount.mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }
    wanted
}

fn stage(caller: &Caller, volume_id: &str, flags: &[&str]) -> Result<(), Status> {
    let path = caller.staging_path(volume_id);
    fs::create_dir_all(&path).unwrap();
    let request = NodeStageVolumeRequest {
        volume_id: volume_id.into(),
        staging_target_path: text(&path),
        volume_capability: Some(with_flags(flags)),
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(request).await).map(drop)
}

/// The one daemon's command line, and how many event loops it says it has.
fn daemon(scene: &Scene, volume_id: &str) -> (String, usize) {
    let [pid] = scene.daemons()[..] else { panic!("one daemon: {:?}", scene.daemons()) };
    let command_line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap().replace('\0', " ");
    // It answers the kernel before it has said so.
    let threads = eventually("the daemon says its threads", TIMEOUT, || {
        let log = fs::read_to_string(scene.dial_dir(volume_id).join("daemon.log"))?;
        let threads = log.split("threads=").nth(1).with_context(|| log.clone())?;
        let digits: String = threads.chars().take_while(char::is_ascii_digit).collect();
        Ok(digits.parse()?)
    });
    (command_line, threads.unwrap())
}

/// What the daemon shows in its metrics.
fn known_inode_limit(scene: &Scene, volume_id: &str) -> String {
    let page = data_path::metrics(&scene.daemon_metrics(volume_id)).unwrap();
    let shown = page.lines().find_map(|line| line.strip_prefix("hawser_volume_known_node_limit "));
    shown.expect("the limit is shown").to_owned()
}

#[test]
fn settings_reach_the_process_and_mount_options_win() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let mut request = create_request("pvc-1");
    request.parameters = [("threads", "2"), ("mountPodLogLevel", "debug"), ("mountPodNamePrefix", "fast")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
    let id = caller.create(request.clone()).unwrap().volume_id;
    stage(&caller, &id, &[]).unwrap();
    let (command_line, threads) = daemon(&scene, &id);
    assert!(command_line.contains("--log-level debug"), "{command_line}");
    assert_eq!(threads, 2);
    caller.unstage(&id).unwrap();

    stage(&caller, &id, &["hawser.known-inode-limit=4321"]).unwrap();
    assert_eq!(known_inode_limit(&scene, &id), "4321");
    caller.unstage(&id).unwrap();

    stage(&caller, &id, &["hawser.threads=3", "hawser.log-level=trace", "noexec"]).unwrap();
    let (command_line, threads) = daemon(&scene, &id);
    assert!(command_line.contains("--log-level trace"), "{command_line}");
    assert_eq!(threads, 3);
    assert_eq!(known_inode_limit(&scene, &id), "500000");
    assert_refused(stage(&caller, &id, &["suid"]), Code::InvalidArgument, "mount_flags: \"suid\"");
    caller.unstage(&id).unwrap();

    request.parameters.insert("mountPodLogLevel".to_owned(), "warn".to_owned());
    assert_refused(
        caller.create(request),
        Code::AlreadyExists,
        "threads=2 mountPodNamePrefix=fast mountPodLogLevel=debug, wanted threads=2",
    );
    let mut limits = create_request("pvc-2");
    limits.parameters = HashMap::from([("mountPodMemoryLimit".to_owned(), "16Mi".to_owned())]);
    assert_refused(caller.create(limits), Code::InvalidArgument, "mountPodMemoryLimit: \"16Mi\": below 32Mi");
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// Without the parameter, the kernel keeps what it knows of both names.
#[test]
fn changes_in_the_pool_are_seen_in_a_volume_whose_class_announces_them() {
    let scene = Scene::start(Flags::process_with_keeper());
    let caller = scene.caller();
    let request = with(create_request("pvc-1"), &[("changedFromOutside", "true")]);
    let id = caller.create(request).unwrap().volume_id;
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let (pod, pool) = (caller.target_path("one"), data(&scene, &id));
    for daemon in ["first", "next"] {
        if daemon == "next" {
            // The files' user waits for the next one.
            scene.sandbox.switch_fuse_guard_off();
            scene.kill_daemon();
        }
        let [missing, file] = ["missing", "file"].map(|name| format!("{name}-{daemon}"));
        fs::write(pod.join(&file), "old").unwrap();
        assert_eq!(fs::read_to_string(pod.join(&file)).unwrap(), "old");
        assert!(!pod.join(&missing).try_exists().unwrap());
        fs::write(pool.join(&missing), "made").unwrap();
        fs::write(pool.join(&file), "longer").unwrap();
        eventually("the files are as in the pool", TIMEOUT, || {
            let found = [&missing, &file].map(|name| fs::read_to_string(pod.join(name)).ok());
            anyhow::ensure!(found == [Some("made".to_owned()), Some("longer".to_owned())], "{found:?}");
            Ok(())
        })
        .unwrap();
        fs::remove_file(pool.join(&file)).unwrap();
        eventually("the removed file is gone", TIMEOUT, || {
            anyhow::ensure!(!pod.join(&file).try_exists()?, "{daemon} daemon");
            Ok(())
        })
        .unwrap();
    }
    // The driver may be about to journal a takeover.
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}
