//! Registration of files that the kernel reads and writes: what is registered, and what a daemon that an
//! attacker controls can try.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use keeper::daemon::Removed;
use keeper::wire::daemon::{DaemonPacket, DaemonRequest, Kind};
use keeper::wire::{Refusal, Role, VolumeKey};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::net::RecvFlags;
use tests::eventually;

use crate::fixture::{Keeper, LIMIT, assert_refused, key, send_with};
use crate::fuse;

/// `MOST_BACKINGS` of the keeper.
const MOST_BACKINGS: u64 = 16_384;

/// A volume with its connection and its directory, which has the regular file `f`.
struct Served {
    keeper: Keeper,
    device: File,
    tree: OwnedFd,
    _mount: OwnedFd,
}

impl Served {
    fn start(passes: bool) -> Self {
        let keeper = Keeper::start();
        let dir = keeper.sandbox.make_dir("data").unwrap();
        std::fs::write(dir.join("f"), "content").unwrap();
        let tree = linux::mount::open_tree_clone(&dir).unwrap();
        let (device, mount) = connection(passes);
        let served = Self { keeper, device, tree, _mount: mount };
        served.put(key(1), &served.device);
        served
    }

    /// Lets the keeper hold this connection, and the directory.
    fn put(&self, volume: VolumeKey, device: &File) {
        let mut client = self.keeper.client();
        client.put(volume, Role::Connection, device.as_fd()).unwrap();
        client.put(volume, Role::Directory, self.tree.as_fd()).unwrap();
    }

    fn open(&self, name: &str, flags: OFlags) -> OwnedFd {
        rustix::fs::openat(&self.tree, name, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    /// Whether the connection has a backing file with this number; if so, it has none afterwards.
    fn end(&self, number: u32) -> bool {
        linux::fuse_backing::unregister(&self.device, number).is_ok()
    }
}

/// /dev/fuse and its mount.
fn connection(passes: bool) -> (File, OwnedFd) {
    let mut device = File::from(linux::mount::open_fuse_device().unwrap());
    let mount = fuse::answered(&mut device, passes);
    (device, mount)
}

fn register(daemon: &Removed, number: u64, file: impl AsFd) -> Result<u32, keeper::Error> {
    daemon.register_backing(number, file.as_fd(), LIMIT)
}

#[test]
fn a_file_of_the_volume_is_registered_and_ended() {
    let served = Served::start(true);
    let before = served.keeper.open_files();
    let daemon = served.keeper.removed(key(1));
    let [one, other] =
        [1, 2].map(|number| register(&daemon, number, served.open("f", OFlags::RDWR)).unwrap());
    assert_ne!(one, other);
    daemon.unregister_backings(&[one], LIMIT).unwrap();
    // In the background.
    eventually("it is ended", LIMIT, || {
        anyhow::ensure!(linux::fuse_backing::unregister(&served.device, one).is_err(), "once more");
        Ok(())
    })
    .unwrap();
    assert!(served.end(other));
    drop(daemon);
    served.keeper.wait_for_open_files(before);
}

#[test]
fn files_that_are_not_the_volumes_own_are_refused_and_not_kept_open() {
    let served = Served::start(true);
    let keeper = &served.keeper;
    // Another volume, whose directory is on the same file system.
    let other = keeper.sandbox.make_dir("other").unwrap();
    std::fs::write(other.join("f"), "secret").unwrap();
    let others_tree = linux::mount::open_tree_clone(&other).unwrap();
    let open = |at: &Path| OwnedFd::from(File::options().read(true).write(true).open(at).unwrap());
    let beyond = open(&keeper.sandbox.path("data").join("f"));
    rustix::fs::mknodat(CWD, keeper.sandbox.path("data").join("fifo"), FileType::Fifo, Mode::RUSR, 0)
        .unwrap();
    let others = rustix::fs::openat(&others_tree, "f", OFlags::RDWR, Mode::empty()).unwrap();
    let daemon = keeper.removed(key(1));
    let before = keeper.open_files();
    for (file, refusal) in [
        (others, Refusal::OtherMount),
        (open(&other.join("f")), Refusal::OtherMount),
        // The volume's own file by another mount: that one may allow more.
        (beyond, Refusal::OtherMount),
        (served.open("f", OFlags::PATH), Refusal::PathOnly),
        (served.open("f", OFlags::RDONLY), Refusal::NotReadWrite),
        (served.open("f", OFlags::WRONLY), Refusal::NotReadWrite),
        (served.open(".", OFlags::RDONLY), Refusal::NotRegular),
        (served.open("fifo", OFlags::RDWR), Refusal::NotRegular),
        (open(Path::new("/dev/null")), Refusal::NotRegular),
        (linux::mount::open_fuse_device().unwrap(), Refusal::NotRegular),
        (served.device.try_clone().unwrap().into(), Refusal::NotRegular),
        (UnixStream::pair().unwrap().0.into(), Refusal::NotRegular),
        (open(Path::new("/proc/self/attr/current")), Refusal::OtherMount),
    ] {
        assert_refused(register(&daemon, 1, &file), refusal);
    }
    keeper.wait_for_open_files(before);
    // Numbers count from 1.
    assert_eq!(register(&daemon, 2, served.open("f", OFlags::RDWR)).unwrap(), 1);
}

#[test]
fn without_passthrough_connection_or_directory_nothing_is_registered() {
    let served = Served::start(false);
    let daemon = served.keeper.removed(key(1));
    assert_refused(register(&daemon, 1, served.open("f", OFlags::RDWR)), Refusal::NotPassthrough);
    let mut client = served.keeper.client();
    client.forget(key(1), Role::Directory).unwrap();
    assert_refused(register(&daemon, 2, served.open("f", OFlags::RDWR)), Refusal::NotHeld);
    let stranger = served.keeper.removed(key(2));
    assert_refused(register(&stranger, 1, served.open("f", OFlags::RDWR)), Refusal::NotHeld);
}

#[test]
fn a_volume_has_a_bounded_number_of_backing_files() {
    let served = Served::start(true);
    let daemon = served.keeper.removed(key(1));
    let file = served.open("f", OFlags::RDWR);
    let mut registered = Vec::new();
    for number in 0..MOST_BACKINGS {
        registered.push(register(&daemon, number, &file).unwrap());
    }
    assert_refused(register(&daemon, MOST_BACKINGS, &file), Refusal::Full);
    // Numbers that are not registered make no room, however often they are ended.
    let unknown = registered.iter().max().unwrap() + 1;
    assert_eq!(daemon.unregister_backings(&[unknown; 100], LIMIT).unwrap(), 100);
    assert_refused(register(&daemon, MOST_BACKINGS + 1, &file), Refusal::Full);
    // Another volume does not notice.
    let (other, _mount) = connection(true);
    served.put(key(2), &other);
    register(&served.keeper.removed(key(2)), 1, &file).unwrap();
    // A new daemon has no more room than the one before.
    let daemon = served.keeper.removed(key(1));
    assert_refused(register(&daemon, 1, &file), Refusal::Full);
    // More than the socket has room for.
    assert_eq!(daemon.unregister_backings(&registered, LIMIT).unwrap(), registered.len());
    let begun = Instant::now();
    for number in 2.. {
        match register(&daemon, number, &file) {
            Ok(_) => break,
            Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
        }
    }
}

#[test]
fn a_daemon_that_reads_no_answer_stops_only_itself() {
    let served = Served::start(true);
    let socket = served.keeper.client().daemon_socket(key(1)).unwrap();
    let file = served.open("f", OFlags::RDWR);
    let memory = served.keeper.memory("VmRSS");
    let mut sent = 0;
    let mut again = 0;
    // Until the keeper reads no more of it, for a while.
    while again < 200 {
        match send_with(&socket, &DaemonRequest::RegisterBacking { number: sent }.encode(), &[file.as_fd()]) {
            Ok(_) => (sent, again) = (sent + 1, 0),
            Err(_) => {
                again += 1;
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
    // Others are served as before, without work in the meantime.
    served.keeper.client().ping().unwrap();
    assert!(served.keeper.memory("VmRSS") < memory + 1024, "{} kB", served.keeper.memory("VmRSS"));
    // All that was accepted is answered, in order, once the daemon reads.
    for number in 0..sent {
        let packet = receive(&socket);
        let (header, body) = DaemonPacket::decode(&packet).unwrap();
        assert_eq!((header.kind, header.number, body.len()), (Kind::Registered, number, 1));
    }
    let last = DaemonRequest::RegisterBacking { number: sent }.encode();
    send_with(&socket, &last, &[file.as_fd()]).unwrap();
    let number = DaemonPacket::decode(&receive(&socket)).unwrap().1[0];
    assert!(served.end(u32::try_from(number).unwrap()));
}

/// The next packet of a socket that does not block.
fn receive(socket: &OwnedFd) -> Vec<u8> {
    let (begun, mut packet) = (Instant::now(), vec![0; DaemonPacket::MOST_BYTES]);
    loop {
        match rustix::net::recv(socket, &mut packet[..], RecvFlags::empty()) {
            Ok((length, _)) => {
                packet.truncate(length);
                return packet;
            }
            Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
        }
        std::thread::yield_now();
    }
}
