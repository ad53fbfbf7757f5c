//! What a daemon that was taken over claims about its volume.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use linux::fd_passing::{PacketListener, PacketSocket};
use prost::Message;
use proto::control::{Done, Pong, Quiesced, Reply, Request, Resumed, Usage, reply, request};
use tests::csi::scene::{GI, Scene, create_request, retried};
use tests::csi::snapshots::{
    BLOCKING_COPY, REFLINKING, data, delete_snapshot, from_snapshot, of_size, scene_on, snapshot,
    snapshot_with, wait_until_ready,
};
use tests::loop_device::FileSystem;

/// In the place of a control socket; reports the largest numbers until it is dropped.
struct Boasting {
    listener: Arc<PacketListener>,
    thread: Option<JoinHandle<()>>,
}

impl Boasting {
    fn at(socket: &Path) -> Self {
        fs::remove_file(socket).unwrap();
        let listener = Arc::new(PacketListener::bind(socket).unwrap());
        let accepting = Arc::clone(&listener);
        let thread = thread::spawn(move || {
            let mut connections = Vec::new();
            while let Ok(connection) = accepting.accept() {
                connections.push(thread::spawn(move || while boast(&connection).is_some() {}));
            }
            connections.into_iter().for_each(|connection| connection.join().unwrap());
        });
        Self { listener, thread: Some(thread) }
    }
}

impl Drop for Boasting {
    fn drop(&mut self) {
        rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).unwrap();
        self.thread.take().map_or(Ok(()), JoinHandle::join).unwrap();
    }
}

fn boast(connection: &PacketSocket) -> Option<()> {
    const MOST: u64 = u64::MAX;
    let packet = connection.receive().ok()??;
    let usage = Usage { used_bytes: MOST, used_inodes: MOST, ..Usage::default() };
    let kind = match Request::decode(&*packet).ok()?.kind? {
        request::Kind::Ping(_) => reply::Kind::Pong(Pong::default()),
        request::Kind::GetUsage(_) => reply::Kind::Usage(usage),
        request::Kind::Quiesce(_) => {
            reply::Kind::Quiesced(Quiesced { waited_us: MOST, used_bytes: MOST, used_inodes: MOST })
        }
        request::Kind::Resume(_) => reply::Kind::Resumed(Resumed { held: true, paused_us: MOST }),
        _ => reply::Kind::Done(Done {}),
    };
    connection.send(&Reply { kind: Some(kind) }.encode_to_vec(), &[]).ok()
}

#[test]
fn a_daemon_that_reports_a_huge_use_takes_nothing_from_other_claims() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let id = caller.bring_up("pvc-1", &["one"]).unwrap();
        let boasting = Boasting::at(&scene.dial_dir(&id).join("ctl.sock"));
        let made = snapshot_with(&caller, "snap-1", &id, &[BLOCKING_COPY]).unwrap();
        caller.create(create_request("pvc-2")).unwrap();
        wait_until_ready(&caller, &made.snapshot_id);
        caller.create(create_request("pvc-3")).unwrap();
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        caller.take_down(&id, &["one"]).unwrap();
        drop(boasting);
    }
}

const MI: i64 = 1 << 20;
/// Of the pool of [`tests::csi::scene::Flags::process`], beside the volume under test.
const REST: i64 = 10 * GI - 64 * MI;

/// Makes a tree that counts 20 times what it takes of the disk: files that share their blocks.
fn share_blocks(dir: &Path) {
    let first = fs::File::create(dir.join("first")).unwrap();
    first.write_all_at(&vec![1; 16 << 20], 0).unwrap();
    first.sync_all().unwrap();
    for n in 0..20 {
        let copy = fs::File::create(dir.join(format!("copy-{n}"))).unwrap();
        rustix::fs::ioctl_ficlone(&copy, fs::File::open(dir.join("first")).unwrap()).unwrap();
    }
}

/// All that is left is given to another claim.
fn assert_takes_no_more_than_its_volume(scene: &Scene, snapshots: i64) {
    let caller = scene.caller();
    let claim = of_size(create_request("rest"), REST - snapshots * 64 * MI, 0);
    let rest = caller.create(claim).unwrap();
    caller.delete(&rest.volume_id).unwrap();
}

#[test]
fn a_snapshot_is_charged_with_no_more_than_its_volumes_capacity() {
    for kind in REFLINKING {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let made = caller.create(of_size(create_request("pvc-1"), 64 * MI, 0)).unwrap();
        let id = made.volume_id;
        for served in [true, false] {
            if served {
                caller.stage(&id).unwrap();
                caller.publish(&id, "one").unwrap();
                // As the daemon itself can, which has this directory.
                share_blocks(&data(&scene, &id));
            }
            // The daemon may still count what the volume holds.
            let name = format!("snap-{served}");
            let snapshot = retried(&scene, "snapshot", || snapshot(&caller, &name, &id));
            assert!(snapshot.ready_to_use);
            assert_takes_no_more_than_its_volume(&scene, 1);
            let restored = of_size(from_snapshot("pvc-2", &snapshot.snapshot_id), 64 * MI, 0);
            let restored = caller.create(restored).unwrap().volume_id;
            assert!(data(&scene, &restored).join("copy-19").is_file());
            caller.delete(&restored).unwrap();
            delete_snapshot(&caller, &snapshot.snapshot_id).unwrap();
            if served {
                caller.unpublish(&id, "one").unwrap();
                caller.unstage(&id).unwrap();
            }
        }
        caller.delete(&id).unwrap();
        scene.assert_nothing_left();
    }
}

/// A volume's daemon has the usage file, and leaves it as it likes.
#[test]
fn a_forged_usage_file_takes_nothing_from_other_claims() {
    let scene = scene_on(FileSystem::Xfs);
    let caller = scene.caller();
    let made = caller.create(of_size(create_request("pvc-1"), 64 * MI, 0)).unwrap();
    let id = made.volume_id;
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    // Waits until the daemon has counted the volume: otherwise it leaves an empty file.
    fs::create_dir(caller.target_path("one").join("dir")).unwrap();
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    let usage = data(&scene, &id).with_file_name("usage");
    for forged in [9_u64 << 30, 1 << 63, u64::MAX] {
        let mut content = fs::read(&usage).unwrap();
        content[16..24].copy_from_slice(&forged.to_le_bytes());
        let sum = content[..56].iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        content[56..].copy_from_slice(&sum.to_le_bytes());
        fs::write(&usage, content).unwrap();
        let snapshot = snapshot(&caller, "snap-1", &id).unwrap();
        assert_takes_no_more_than_its_volume(&scene, 1);
        delete_snapshot(&caller, &snapshot.snapshot_id).unwrap();
    }
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}
