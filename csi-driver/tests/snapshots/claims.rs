//! What a daemon that was taken over claims about its volume.

use std::fs;
use std::path::Path;
use std::thread;

use linux::fd_passing::{PacketListener, PacketSocket};
use prost::Message;
use proto::control::{Done, Pong, Quiesced, Reply, Request, Resumed, Usage, reply, request};
use tests::loop_device::FileSystem;

use crate::kit::{BLOCKING_COPY, delete_snapshot, scene_on, snapshot_with, wait_until_ready};
use crate::scene::create_request;

/// Takes the place of a control socket, and reports the largest numbers.
fn boast_at(socket: &Path) {
    fs::remove_file(socket).unwrap();
    let listener = PacketListener::bind(socket).unwrap();
    thread::spawn(move || {
        while let Ok(connection) = listener.accept() {
            thread::spawn(move || while boast(&connection).is_some() {});
        }
    });
}

fn boast(connection: &PacketSocket) -> Option<()> {
    const MOST: u64 = u64::MAX;
    let packet = connection.receive().ok()??;
    let usage = Usage { used_bytes: MOST, used_inodes: MOST, ..Usage::default() };
    let kind = match Request::decode(&*packet).ok()?.kind? {
        request::Kind::Ping(_) => reply::Kind::Pong(Pong {}),
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
        boast_at(&scene.dial_dir(&id).join("ctl.sock"));
        let made = snapshot_with(&caller, "snap-1", &id, &[BLOCKING_COPY]).unwrap();
        caller.create(create_request("pvc-2")).unwrap();
        wait_until_ready(&caller, &made.snapshot_id);
        caller.create(create_request("pvc-3")).unwrap();
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        caller.take_down(&id, &["one"]).unwrap();
    }
}
