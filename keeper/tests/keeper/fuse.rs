//! Real FUSE connections, which end with their last holder.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::JoinHandle;
use std::time::Duration;

use keeper::daemon::Removed;
use keeper::wire::Role;
use linux::mount::{FuseConnections, FuseMountOptions, FuseName, MountFlags};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use tests::eventually;

use crate::fixture::{Keeper, LIMIT, key, send_with, usage_file};

const NAME: FuseName<'_> = FuseName { source: "hawser-test", subtype: "hawser" };
const OPTIONS: FuseMountOptions = FuseMountOptions {
    flags: MountFlags {
        read_only: false,
        nosuid: true,
        nodev: true,
        noexec: false,
        access_times: linux::mount::AccessTimes::Kernels,
        nodiratime: false,
        sync: false,
    },
    allow_other: true,
    default_permissions: false,
};

/// A mount that is attached nowhere, and whose daemon has not even answered INIT.
pub(crate) fn detached(device: &OwnedFd) -> OwnedFd {
    let options = FuseMountOptions { default_permissions: true, ..OPTIONS };
    linux::mount::new_fuse(device, NAME, options).unwrap()
}

// include/uapi/linux/fuse.h
const LOOKUP: u32 = 1;
const OPEN: u32 = 14;
const FLUSH: u32 = 25;
const INIT: u32 = 26;

struct Request {
    opcode: u32,
    unique: [u8; 8],
}

fn read_request(device: &mut File) -> Request {
    let mut request = vec![0; 256 * 1024];
    let len = device.read(&mut request).unwrap();
    assert!(len >= 40, "{len}");
    Request {
        opcode: u32::from_le_bytes(request[4..8].try_into().unwrap()),
        unique: request[8..16].try_into().unwrap(),
    }
}

fn answer(device: &mut File, request: &Request, errno: i32, body: &[u8]) {
    let len = u32::try_from(16 + body.len()).unwrap();
    let answer = [&len.to_le_bytes()[..], &(-errno).to_le_bytes(), &request.unique, body].concat();
    device.write_all(&answer).unwrap();
}

fn init_reply() -> Vec<u8> {
    let mut init = vec![0; 64];
    for (at, number) in [(0, 7_u32), (4, 31)] {
        init[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    // max_write
    init[20..24].copy_from_slice(&4096_u32.to_le_bytes());
    init
}

/// A detached mount whose daemon has answered INIT, and asked for FUSE_PASSTHROUGH if `passes`.
pub(crate) fn answered(device: &mut File, passes: bool) -> OwnedFd {
    let mount = linux::mount::new_fuse(&*device, NAME, OPTIONS).unwrap();
    let request = read_request(device);
    assert_eq!(request.opcode, INIT);
    let mut init = init_reply();
    if passes {
        // Minor version 40; FUSE_INIT_EXT, FUSE_PASSTHROUGH (bit 37) and max_stack_depth.
        for (at, number) in [(4, 40_u32), (12, 1 << 30), (32, 1 << 5), (36, 1)] {
            init[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
    }
    answer(device, &request, 0, &init);
    mount
}

/// Reads a request and answers it: INIT as a daemon does, all others with ENOENT. Returns its opcode.
fn answer_one(device: &mut File) -> u32 {
    let request = read_request(device);
    match request.opcode {
        INIT => answer(device, &request, 0, &init_reply()),
        _ => answer(device, &request, Errno::ENOENT as i32, &[]),
    }
    request.opcode
}

/// Answers requests until one is to flush a file, which it does not answer: every name is a regular
/// file, which can be opened.
fn serve_until_flush(device: &mut File) {
    loop {
        let request = read_request(device);
        match request.opcode {
            INIT => answer(device, &request, 0, &init_reply()),
            LOOKUP => {
                let mut entry = vec![0; 128];
                // Node 2, valid for an hour; ino, mode and nlink of its attributes.
                for (at, number) in [(0, 2_u64), (16, 3600), (24, 3600), (40, 2)] {
                    entry[at..at + 8].copy_from_slice(&number.to_le_bytes());
                }
                for (at, number) in [(100, 0o100_666_u32), (104, 1)] {
                    entry[at..at + 4].copy_from_slice(&number.to_le_bytes());
                }
                answer(device, &request, 0, &entry);
            }
            OPEN => answer(device, &request, 0, &[0; 16]),
            FLUSH => return,
            other => panic!("unexpected request {other}"),
        }
    }
}

fn minor(mount: &Path) -> u32 {
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    let entries = linux::mountinfo::read_of(tid).unwrap();
    entries.into_iter().find(|entry| entry.mount_point == mount).expect("it is mounted").minor
}

fn wait_for_request(minor: u32) {
    let connections = FuseConnections::open().unwrap();
    eventually("a request waits", LIMIT, || {
        let waiting = connections.waiting(minor)?;
        anyhow::ensure!(waiting == Some(1), "{waiting:?}");
        Ok(())
    })
    .unwrap();
}

fn look_up(mount: &Path) -> std::io::Error {
    std::fs::symlink_metadata(mount.join("name")).unwrap_err()
}

#[test]
fn a_connection_outlives_its_daemon_while_the_keeper_holds_it() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let mount = keeper.sandbox.make_dir("mount").unwrap();
    let device = linux::mount::open_fuse_device().unwrap();
    linux::mount::mount_fuse(&device, NAME, &mount, OPTIONS).unwrap();
    let minor = minor(&mount);
    let mut device = File::from(device);
    answer_one(&mut device);
    client.put(key(1), Role::Connection, device.as_fd()).unwrap();

    // A process that holds the connection, and is killed.
    let mut holder = {
        let mut command = keeper.sandbox.command(Path::new("/bin/sleep"));
        command.arg("1000").stdin(Stdio::from(device)).spawn().unwrap()
    };
    let waiting = {
        let mount = mount.clone();
        std::thread::spawn(move || look_up(&mount))
    };
    wait_for_request(minor);
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(!waiting.is_finished());
    wait_for_request(minor);

    // A successor answers the request that no daemon had read.
    let mut successor = File::from(client.get(key(1), Role::Connection).unwrap().unwrap());
    assert_eq!(answer_one(&mut successor), LOOKUP);
    assert_eq!(waiting.join().unwrap().kind(), ErrorKind::NotFound);
    drop(successor);

    client.forget_volume(key(1)).unwrap();
    // Processes that other tests' threads start have all descriptors until they run their program:
    // a lookup in that moment is aborted.
    eventually("the connection ends", LIMIT, || {
        let error = look_up(&mount);
        anyhow::ensure!(error.raw_os_error() == Some(Errno::ENOTCONN as i32), "{error}");
        Ok(())
    })
    .unwrap();
    linux::mount::unmount(&mount, linux::mount::UnmountMode::Detach).unwrap();
}

#[test]
fn the_last_close_of_a_parked_mount_ends_its_connection() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let mut device = File::from(linux::mount::open_fuse_device().unwrap());
    let mount = linux::mount::new_fuse(&device, NAME, OPTIONS).unwrap();
    answer_one(&mut device);
    client.put(key(1), Role::ParkedMount, mount.as_fd()).unwrap();
    drop(mount);
    let parked = client.get(key(1), Role::ParkedMount).unwrap().unwrap();
    let target = keeper.sandbox.make_dir("target").unwrap();
    linux::mount::move_mount(&parked, &target).unwrap();
    linux::mount::unmount(&target, linux::mount::UnmountMode::Detach).unwrap();
    drop(parked);
    let is_open = |device: &File| {
        let mut polled = [rustix::event::PollFd::new(device, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec::try_from(Duration::ZERO).unwrap();
        rustix::event::poll(&mut polled, Some(&now)).unwrap();
        !polled[0].revents().contains(rustix::event::PollFlags::ERR)
    };
    assert!(is_open(&device));
    assert!(client.forget(key(1), Role::ParkedMount).unwrap());
    // Not at once: see above.
    eventually("the connection ends", LIMIT, || {
        anyhow::ensure!(!is_open(&device), "it is open");
        Ok(())
    })
    .unwrap();
}

/// A file whose close waits until the connection ends.
struct SlowFile {
    file: File,
    mount: PathBuf,
    serving: JoinHandle<File>,
}

impl SlowFile {
    fn open(keeper: &Keeper) -> Self {
        let mount = keeper.sandbox.make_dir("mount").unwrap();
        let device = linux::mount::open_fuse_device().unwrap();
        linux::mount::mount_fuse(&device, NAME, &mount, OPTIONS).unwrap();
        let mut device = File::from(device);
        let serving = std::thread::spawn(move || {
            serve_until_flush(&mut device);
            device
        });
        let file = File::options().read(true).write(true).open(mount.join("file")).unwrap();
        Self { file, mount, serving }
    }

    /// The keeper has had it from this socket, and closes it.
    fn give(self, removed: &Removed) -> Closing {
        let Self { file, mount, serving } = self;
        removed.put_removed(1, file.as_fd()).unwrap();
        removed.drop_removed(1).unwrap();
        // Waits too: every close of it is flushed.
        let waiting = std::thread::spawn(move || drop(file));
        Closing { device: serving.join().unwrap(), mount, waiting }
    }
}

struct Closing {
    device: File,
    mount: PathBuf,
    waiting: JoinHandle<()>,
}

impl Closing {
    fn end(self) {
        drop(self.device);
        self.waiting.join().unwrap();
        linux::mount::unmount(&self.mount, linux::mount::UnmountMode::Detach).unwrap();
    }
}

/// A hostile daemon may have files whose last close takes long. The keeper's own calls do not wait.
#[test]
fn the_close_of_a_file_that_takes_long_stops_nobody() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let slow = SlowFile::open(&keeper);
    let removed = keeper.removed(key(1));
    let closing = slow.give(&removed);
    let other = usage_file(&keeper.sandbox);
    for node in (2..100).chain(2..100) {
        removed.put_removed(node, other.as_fd()).unwrap();
    }
    assert_eq!(removed.list_removed().unwrap().len(), 98);
    assert_eq!(client.ping().unwrap().removed, 98);
    client.forget_volume(key(1)).unwrap();
    let before = keeper.open_files();
    closing.end();
    eventually("all are closed", LIMIT, || {
        let now = keeper.open_files();
        anyhow::ensure!(now + 99 < before, "{before}, then {now}");
        Ok(())
    })
    .unwrap();
}

/// The same beside a packet without a byte, which looks like the end of the connection.
#[test]
fn the_close_of_a_file_beside_an_empty_packet_stops_nobody() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let SlowFile { file, mount, serving } = SlowFile::open(&keeper);
    let hostile = keeper.removed(key(1));
    let pidfd = linux::process::open_pidfd(keeper.process.pid().into()).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGSTOP as i32).unwrap();
    tests::wait_until_stopped(keeper.process.pid().into(), LIMIT).unwrap();
    send_with(&hostile, b"", &[file.as_fd()]).unwrap();
    drop(hostile);
    linux::process::signal_pidfd(&pidfd, Signal::SIGCONT as i32).unwrap();
    // The close in the keeper.
    let device = serving.join().unwrap();
    client.ping().unwrap();
    let waiting = std::thread::spawn(move || drop(file));
    Closing { device, mount, waiting }.end();
}

/// Nor does it run short of descriptors: what a daemon may have it close meanwhile is limited too.
#[test]
fn what_waits_for_a_slow_close_takes_no_descriptors_of_others() {
    let keeper = Keeper::with_open_files(2048);
    let mut client = keeper.client();
    let slow = SlowFile::open(&keeper);
    let hostile = keeper.removed(key(1));
    let closing = slow.give(&hostile);
    let room = client.ping().unwrap().room;
    let one = usage_file(&keeper.sandbox);
    let many = vec![one.as_fd(); 250];
    eventually("the keeper takes no more of them", LIMIT, || {
        let sent = (0..1000).all(|_| send_with(&hostile, b"wrong", &many).is_ok());
        anyhow::ensure!(!sent, "it takes more");
        Ok(())
    })
    .unwrap();
    let left = client.ping().unwrap().room;
    assert!(left >= room / 8, "of room for {room}, {left} is left");
    let innocent = keeper.removed(key(2));
    for node in 0..50 {
        innocent.put_removed(node, one.as_fd()).unwrap();
    }
    assert_eq!(innocent.list_removed().unwrap().len(), 50);
    for volume in 3..100 {
        client.put(key(volume), Role::UsageFile, one.as_fd()).unwrap();
    }
    // Its successor gets its socket all the same.
    let next = keeper.removed(key(1));
    next.put_removed(5, one.as_fd()).unwrap();
    closing.end();
    assert_eq!(next.list_removed().unwrap().len(), 1);
}

/// Each job of the closer has a descriptor, also one that ends registrations.
#[test]
fn what_ends_behind_a_slow_close_takes_no_descriptors_of_others() {
    let keeper = Keeper::with_open_files(1024);
    let mut client = keeper.client();
    let slow = SlowFile::open(&keeper);
    let hostile = keeper.removed(key(1));
    let device = linux::mount::open_fuse_device().unwrap();
    client.put(key(1), Role::Connection, device.as_fd()).unwrap();
    let closing = slow.give(&hostile);
    let room = client.ping().unwrap().room;
    eventually("the keeper reads no more of them", LIMIT, || {
        let limit = Duration::from_millis(300);
        let is_read = (0..200).all(|_| hostile.unregister_backings(&[1], limit).is_ok());
        anyhow::ensure!(!is_read, "it reads more");
        Ok(())
    })
    .unwrap();
    let left = client.ping().unwrap().room;
    assert!(left >= room / 8 && left < room, "of room for {room}, {left} is left");
    let innocent = keeper.removed(key(2));
    let one = usage_file(&keeper.sandbox);
    for node in 0..50 {
        innocent.put_removed(node, one.as_fd()).unwrap();
    }
    assert_eq!(innocent.list_removed().unwrap().len(), 50);
    closing.end();
    eventually("they are carried out", LIMIT, || {
        let now = client.ping().unwrap().room;
        anyhow::ensure!(now + 50 >= room - 50, "{room}, then {now}");
        Ok(())
    })
    .unwrap();
}
