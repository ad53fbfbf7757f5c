//! Drivers come and go; volumes that are in use do not notice.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use linux::fd_passing::PacketListener;
use tests::csi::scene::{Flags, Scene, TIMEOUT, volume_binary};

use crate::boot;

#[test]
fn a_restart_disturbs_nothing_and_adopts_everything() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
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
    tests::eventually("the death is logged", TIMEOUT, || {
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
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    assert!(scene.driver.take().unwrap().stop(TIMEOUT).unwrap().success());
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
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
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
    rebooted(|boot| fs::rename(boot, boot.with_file_name("0f0f0f0f-0000-4000-8000-000000000000")).unwrap());
}

/// The same, and of what the driver does not wait for nothing has reached the disk,
/// or half of it.
#[test]
fn after_a_power_cut_the_volume_is_unstaged_and_usable() {
    rebooted(|boot| fs::remove_dir_all(boot).unwrap());
    rebooted(|boot| {
        let file = fs::read_dir(boot).unwrap().next().unwrap().unwrap().path();
        fs::File::options().write(true).open(file).unwrap().set_len(20).unwrap();
        fs::rename(boot, boot.with_file_name("0f0f0f0f-0000-4000-8000-000000000000")).unwrap();
    });
}

/// Stages and publishes; then all ends that ends with the machine, and `cut` makes
/// of the journal's directory of this boot what the next boot finds.
fn rebooted(cut: impl Fn(&Path)) {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    scene.kill_driver();
    for path in [caller.target_path("one"), caller.target_path("two"), caller.staging_path(&id)] {
        // What was written may still be closing.
        tests::eventually("unmounted", TIMEOUT, || {
            Ok(linux::mount::unmount(&path, linux::mount::UnmountMode::Plain)?)
        })
        .unwrap();
    }
    tests::eventually("the daemon is gone", TIMEOUT, || {
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
    scene.kill_driver();
    let stray = scene.sandbox.path("run").join("f".repeat(32));
    fs::create_dir(&stray).unwrap();
    let halves = [scene.sandbox.path("state/volumes"), boot::dir(&scene)]
        .map(|dir| dir.join(format!(".{id}.json.1.tmp")));
    halves.iter().for_each(|half| fs::write(half, "half").unwrap());
    // A daemon that a killed Stage started, and that waits for its connection.
    let (waiting, listener) = lone_daemon(&scene, &"e".repeat(32), &volume_binary());
    scene.start_driver();
    assert!(!stray.exists() && !halves.iter().any(|half| half.exists()));
    assert_eq!(scene.daemons(), [] as [i32; 0]);
    assert!(!waiting.parent().unwrap().exists());
    drop(listener);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// A daemon's arguments, with nobody in the journal that they belong to; its socket,
/// on which nobody answers.
fn lone_daemon(scene: &Scene, key: &str, program: &Path) -> (PathBuf, PacketListener) {
    let dir = scene.sandbox.path("run").join(key);
    fs::create_dir_all(&dir).unwrap();
    let socket = dir.join("dial.sock");
    let listener = PacketListener::bind(&socket).unwrap();
    let mut command = scene.sandbox.command(program);
    command.args(["serve", "--confine", "--socket"]).arg(&socket).args(["--log-level", "info"]);
    command.env("HAWSER_NONCE", "none");
    drop(command.spawn().unwrap());
    (socket, listener)
}

/// The journal of this boot is lost, or a mistyped --state-dir is another one.
#[test]
fn a_volume_that_the_journal_does_not_know_goes_on_until_it_is_staged() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let mut open = fs::File::create_new(caller.target_path("one").join("file")).unwrap();
    scene.kill_driver();
    let daemons = scene.daemons();
    let entries = [scene.journal_path(&id), boot::journal_path(&scene, &id)];
    let kept = entries.each_ref().map(|entry| fs::read(entry).unwrap());
    for entries in [&entries[..], &entries[1..]] {
        entries.iter().for_each(|entry| fs::remove_file(entry).unwrap());
        scene.start_driver();
        assert_eq!(scene.daemons(), daemons);
        assert!(scene.dial_dir(&id).exists());
        assert!(scene.log().contains("the volume is served without a journal entry"));
        open.write_all(b"x").unwrap();
        scene.kill_driver();
        for (entry, text) in [scene.journal_path(&id), boot::journal_path(&scene, &id)].iter().zip(&kept) {
            fs::write(entry, text).unwrap();
        }
    }
    scene.start_driver();
    drop(open);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// What a process calls itself says nothing: this one is of somebody else's pod.
#[test]
fn a_stranger_with_a_daemons_arguments_is_not_killed() {
    let mut scene = Scene::start(Flags::process());
    scene.kill_driver();
    let socket = scene.sandbox.path("run").join("e".repeat(32)).join("dial.sock");
    let mut command = scene.sandbox.command(Path::new("bash"));
    // bash reads its script from the file that its arguments name first.
    let script = scene.sandbox.path("serve");
    fs::write(&script, "kill -STOP $$").unwrap();
    command.current_dir(script.parent().unwrap()).args(["serve", "--confine", "--socket"]).arg(&socket);
    let mut stranger = tests::Daemon::start("stranger", command, &scene.sandbox.path("driver.log")).unwrap();
    scene.start_driver();
    assert!(stranger.ended().unwrap().is_none(), "it was killed");
    stranger.kill().unwrap();
    fs::remove_file(script).unwrap();
    scene.assert_nothing_left();
}

/// A disk's fault is not the pods' fault: what serves goes on until the entry is mended.
#[test]
fn an_unreadable_journal_entry_does_not_cost_a_volume_its_daemon() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
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
    assert!(scene.driver.take().unwrap().stop(TIMEOUT).unwrap().success());
    assert!(!scene.csi_socket().exists() && !scene.registration_socket().exists());
    drop(client);
    scene.start_driver();
    scene.assert_nothing_left();
}
