//! Drivers come and go; volumes that are in use do not notice.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::boot;
use crate::scene::{Flags, PATIENCE, Scene, mounted};

#[test]
fn a_restart_disturbs_nothing_and_adopts_everything() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let path = caller.target_path("one").join("file");
    let mut open = fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let journal = |scene: &Scene| scene.journal(&id) + &boot::journal(scene, &id);
    let (daemons, before) = (scene.daemons(), journal(&scene));

    scene.kill_driver();
    open.write_all(b"while the driver is dead").unwrap();
    scene.start_driver();
    assert_eq!(scene.daemons(), daemons);
    assert_eq!(journal(&scene), before);
    let mut content = String::new();
    fs::File::open(&path).unwrap().read_to_string(&mut content).unwrap();
    assert_eq!(content, "while the driver is dead");
    drop(open);

    // What was adopted is watched, repeated and taken down like one's own.
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    assert_eq!(scene.daemons(), daemons);
    scene.kill_daemon();
    tests::eventually("the death is logged", PATIENCE, || {
        anyhow::ensure!(scene.log().contains("the volume's daemon ended"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn sigterm_ends_the_driver_and_leaves_volumes_and_no_sockets() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    assert!(scene.driver.take().unwrap().stop(PATIENCE).unwrap().success());
    assert!(!scene.csi_socket().exists() && !scene.registration_socket().exists());
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    scene.start_driver();
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn driver_and_daemon_may_die_together() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    scene.kill_driver();
    scene.kill_daemon();
    scene.start_driver();
    caller.publish(&id, "two").unwrap();
    assert_eq!(fs::read(caller.target_path("two").join("file")).unwrap(), b"x");
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

/// All mounts and processes gone, the journal and kubelet's directories still there.
#[test]
fn after_a_reboot_the_volume_is_unstaged_and_usable() {
    rebooted(|boot| fs::rename(boot, boot.with_file_name("an-earlier-one")).unwrap());
}

/// The same, and of what the driver does not wait for nothing has reached the disk,
/// or half of it.
#[test]
fn after_a_power_cut_the_volume_is_unstaged_and_usable() {
    rebooted(|boot| fs::remove_dir_all(boot).unwrap());
    rebooted(|boot| {
        let file = fs::read_dir(boot).unwrap().next().unwrap().unwrap().path();
        fs::File::options().write(true).open(file).unwrap().set_len(20).unwrap();
        fs::rename(boot, boot.with_file_name("an-earlier-one")).unwrap();
    });
}

/// Stages and publishes; then all ends that ends with the machine, and `cut` makes
/// of the journal's directory of this boot what the next boot finds.
fn rebooted(cut: impl Fn(&Path)) {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    caller.publish(&id, "two").unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    scene.kill_driver();
    for path in [caller.target_path("one"), caller.target_path("two"), caller.staging_path(&id)] {
        // What was written may still be closing.
        tests::eventually("unmounted", PATIENCE, || {
            Ok(linux::mount::unmount(&path, linux::mount::UnmountMode::Plain)?)
        })
        .unwrap();
    }
    tests::eventually("the daemon is gone", PATIENCE, || {
        anyhow::ensure!(scene.daemons().is_empty(), "{:?}", scene.daemons());
        Ok(())
    })
    .unwrap();
    cut(&boot::dir(&scene));
    scene.start_driver();
    assert!(!scene.dial_dir(&id).exists());
    // Of a pod that did not come back.
    caller.unpublish(&id, "two").unwrap();
    assert!(!caller.target_path("two").exists());
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    assert_eq!(fs::read(caller.target_path("one").join("file")).unwrap(), b"x");
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn what_belongs_to_no_volume_is_removed_at_start() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    scene.kill_driver();
    // The journal forgets the stage: mount, daemon and dial directory are orphans.
    fs::remove_file(boot::journal_path(&scene, &id)).unwrap();
    let stray = scene.sandbox.path("run").join("f".repeat(32));
    fs::create_dir(&stray).unwrap();
    let halves = [scene.sandbox.path("state/volumes"), boot::dir(&scene)]
        .map(|dir| dir.join(format!(".{id}.json.1.tmp")));
    halves.iter().for_each(|half| fs::write(half, "half").unwrap());
    scene.start_driver();
    assert!(!halves.iter().any(|half| half.exists()));
    assert!(!stray.exists() && !scene.dial_dir(&id).exists());
    assert_eq!(scene.daemons(), [] as [i32; 0]);
    // The mount shows whose it is, and the next stage replaces it.
    assert!(mounted(&caller.staging_path(&id)).is_some());
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// A disk's fault is not the pods' fault: what serves goes on until the entry is mended.
#[test]
fn an_unreadable_journal_entry_does_not_cost_a_volume_its_daemon() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let daemons = scene.daemons();
    for torn in [scene.journal_path(&id), boot::journal_path(&scene, &id)] {
        let whole = fs::read(&torn).unwrap();
        scene.kill_driver();
        fs::write(&torn, "").unwrap();
        scene.start_driver();
        assert_eq!(scene.daemons(), daemons);
        fs::write(caller.target_path("one").join("file"), "x").unwrap();
        let refused = caller.unpublish(&id, "one").expect_err("nobody knows what to undo");
        assert!(refused.message().contains(torn.to_str().unwrap()), "{refused:?}");
        scene.kill_driver();
        fs::write(&torn, whole).unwrap();
        scene.start_driver();
    }
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_stale_socket_is_replaced() {
    let mut scene = Scene::start(Flags::process());
    scene.kill_driver();
    assert!(scene.csi_socket().exists() && scene.registration_socket().exists());
    scene.start_driver();
    scene.caller().create_named("pvc-1").unwrap();
}

#[test]
fn a_client_that_answers_nothing_does_not_hold_up_the_end() {
    let mut scene = Scene::start(Flags::process());
    let mut client = UnixStream::connect(scene.csi_socket()).unwrap();
    // HTTP/2's preface and an empty SETTINGS frame (RFC 9113, 3.4).
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00").unwrap();
    // Its SETTINGS: from here on the connection is one of the server's.
    client.read_exact(&mut [0; 9]).unwrap();
    assert!(scene.driver.take().unwrap().stop(PATIENCE).unwrap().success());
    assert!(!scene.csi_socket().exists() && !scene.registration_socket().exists());
    drop(client);
    scene.start_driver();
    scene.assert_nothing_left();
}
