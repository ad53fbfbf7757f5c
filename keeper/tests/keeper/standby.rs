//! A volume whose daemon ends goes to a spare daemon, only while no driver attends.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Child;

use keeper::Error;
use keeper::client::Client;
use keeper::wire::standby::{LaunchKey, Takeover};
use keeper::wire::{Refusal, Role, VolumeKey};
use linux::fd_passing::{PacketListener, PacketSocket};
use tests::eventually;

use crate::fixture::{Keeper, LIMIT, SEALS, assert_refused, assignment, good, key};
use crate::fuse::detached;

/// A volume that is mounted, its daemon, and the client of the driver that has put all of it.
struct Armed {
    keeper: Keeper,
    client: Option<Client>,
    daemon: Child,
    connection: OwnedFd,
    mount: Option<OwnedFd>,
}

impl Armed {
    fn new() -> Self {
        let keeper = Keeper::start();
        let connection = linux::mount::open_fuse_device().unwrap();
        let mount = detached(&connection);
        let daemon = keeper.sandbox.command(Path::new("/bin/sleep")).arg("1000").spawn().unwrap();
        let client = keeper.client();
        let mut armed = Self { keeper, client: Some(client), daemon, connection, mount: Some(mount) };
        armed.arm();
        armed
    }

    fn client(&mut self) -> &mut Client {
        self.client.as_mut().unwrap()
    }

    fn arm(&mut self) {
        let daemon = linux::process::open_pidfd(self.daemon.id().cast_signed()).unwrap().unwrap();
        let listener = good(Role::ControlListener, &self.keeper.sandbox);
        let client = self.client.as_mut().unwrap();
        client.put(key(1), Role::Connection, self.connection.as_fd()).unwrap();
        client.put(key(1), Role::ControlListener, listener.as_fd()).unwrap();
        client.put(key(1), Role::Assignment, assignment(b"an assignment", SEALS).as_fd()).unwrap();
        client.put(key(1), Role::Daemon, daemon.as_fd()).unwrap();
    }

    /// Waits for a volume; the daemon's end of its socket.
    fn spare(&mut self, number: u32) -> PacketSocket {
        let (theirs, socket) = spare_socket(&self.keeper, number);
        self.client().put_spare(launch(number), socket.as_fd()).unwrap();
        theirs
    }

    fn end_daemon(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }

    fn end_driver(&mut self) {
        self.client = None;
    }

    /// What the spare daemon gets now, if the keeper has sent it anything by the time that it answers
    /// two pings: each comes after a turn of its loop.
    fn sent(&self, spare: &PacketSocket) -> bool {
        let mut bystander = self.keeper.bystander();
        bystander.ping().unwrap();
        bystander.ping().unwrap();
        is_readable(spare)
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        let _ended = self.daemon.kill();
        let _reaped = self.daemon.wait();
    }
}

fn launch(number: u32) -> LaunchKey {
    LaunchKey::parse(&key(number).to_string()).unwrap()
}

/// A process's end and the driver's.
fn spare_socket(keeper: &Keeper, number: u32) -> (PacketSocket, PacketSocket) {
    let path = keeper.sandbox.path(&format!("spare-{number}"));
    let listener = PacketListener::bind(&path).unwrap();
    let theirs = PacketSocket::connect(&path).unwrap();
    theirs.set_timeout(LIMIT).unwrap();
    (theirs, listener.accept().unwrap())
}

fn is_readable(socket: &PacketSocket) -> bool {
    let mut polled = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&now)).unwrap() > 0
}

fn takeovers(keeper: &Keeper) -> Vec<(VolumeKey, LaunchKey, u32)> {
    let found = keeper.bystander().takeovers().unwrap();
    found.into_iter().map(|Takeover { volume, launch, count, .. }| (volume, launch, count)).collect()
}

fn inode(fd: impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

#[test]
fn a_spare_daemon_gets_the_volume_once_both_the_daemon_and_the_driver_have_ended() {
    let mut armed = Armed::new();
    let spare = armed.spare(7);
    armed.end_daemon();
    assert!(!armed.sent(&spare), "a driver attends");
    armed.end_driver();
    let (packet, fds) = spare.receive_with_fds(8).unwrap().unwrap();
    assert_eq!(packet, b"an assignment");
    let [connection, listener, keeper] = &fds[..] else { panic!("{fds:?}") };
    keeper::descriptors::check(Role::Connection, connection.as_fd()).unwrap();
    keeper::descriptors::check(Role::ControlListener, listener.as_fd()).unwrap();
    let removed = keeper::daemon::Removed::new(keeper.try_clone().unwrap(), LIMIT).unwrap();
    assert!(removed.list_removed().unwrap().is_empty(), "it leads to the keeper");

    // The next driver finds it, until it puts a pidfd itself.
    assert_eq!(takeovers(&armed.keeper), [(key(1), launch(7), 1)]);
    let mut client = armed.keeper.client();
    let daemon = client.get(key(1), Role::Daemon).unwrap().unwrap();
    let own = good(Role::Daemon, &armed.keeper.sandbox);
    assert_eq!(inode(&daemon), inode(&own), "the process that connected the socket");
    // Its answer ends the keeper's interest in the socket.
    spare.send(b"answer", &[]).unwrap();
    let closed = spare.receive();
    assert!(matches!(&closed, Err(e) if e.errno() == nix::errno::Errno::ECONNRESET), "{closed:?}");
    client.put(key(1), Role::Daemon, own.as_fd()).unwrap();
    assert!(takeovers(&armed.keeper).is_empty());
}

#[test]
fn a_daemon_that_ends_after_its_driver_is_followed_too() {
    let mut armed = Armed::new();
    let spare = armed.spare(7);
    armed.end_driver();
    assert!(!armed.sent(&spare), "its daemon lives");
    armed.end_daemon();
    assert_eq!(spare.receive_with_fds(8).unwrap().unwrap().0, b"an assignment");
}

/// Each of these means that another daemon may have the connection, or none may.
#[test]
fn a_volume_that_the_driver_has_started_to_change_goes_to_nobody() {
    type Change = fn(&mut Armed);
    let changes: [(&str, Change); 7] = [
        ("a socket for a new daemon", |armed| {
            armed.client().daemon_socket(key(1)).unwrap();
        }),
        ("its pidfd is forgotten", |armed| {
            assert!(armed.client().forget(key(1), Role::Daemon).unwrap());
        }),
        ("the volume is forgotten", |armed| {
            armed.client().forget_volume(key(1)).unwrap();
        }),
        ("it is not mounted", |armed| armed.mount = None),
        ("a descriptor is not held", |armed| {
            armed.client().forget(key(1), Role::ControlListener).unwrap();
        }),
        ("the spare daemon is forgotten", |armed| {
            assert!(armed.client().forget_spare(launch(7)).unwrap());
        }),
        ("a driver of an earlier version uses it", |armed| {
            armed.keeper.bystander().get(key(1), Role::Connection).unwrap();
        }),
    ];
    for (what, change) in changes {
        let mut armed = Armed::new();
        let spare = armed.spare(7);
        change(&mut armed);
        armed.end_daemon();
        armed.end_driver();
        // Either it waits on, or the keeper has closed its socket, since no volume could need it.
        armed.sent(&spare);
        if is_readable(&spare) {
            assert!(spare.receive().unwrap().is_none(), "{what}");
        }
        assert!(takeovers(&armed.keeper).is_empty(), "{what}");
    }
}

/// The keeper does not overtake what the driver has sent before its end.
#[test]
fn a_request_that_was_sent_before_the_end_of_the_driver_counts() {
    let mut armed = Armed::new();
    let spare = armed.spare(7);
    armed.keeper.process.signal(nix::sys::signal::Signal::SIGSTOP).unwrap();
    tests::wait_until_stopped(armed.keeper.process.pid().as_raw(), LIMIT).unwrap();
    armed.end_daemon();
    // Its reply never comes.
    let client = armed.client.take().unwrap();
    let call = keeper::wire::Call::DaemonSocket { volume: key(1) };
    let request = keeper::wire::Request { number: 99, call }.encode();
    rustix::net::send(&client, &request, rustix::net::SendFlags::empty()).unwrap();
    drop(client);
    armed.keeper.process.signal(nix::sys::signal::Signal::SIGCONT).unwrap();
    eventually("the keeper has read it", LIMIT, || {
        anyhow::ensure!(armed.keeper.process.output().contains("a socket for a new daemon"));
        Ok(())
    })
    .unwrap();
    armed.sent(&spare);
    assert!(!is_readable(&spare) || spare.receive().unwrap().is_none());
    assert!(takeovers(&armed.keeper).is_empty());
}

#[test]
fn spare_daemons_end_without_a_driver_and_a_volume() {
    let keeper = Keeper::start();
    let before = keeper.open_files();
    let mut client = keeper.client();
    let (theirs, socket) = spare_socket(&keeper, 7);
    client.put_spare(launch(7), socket.as_fd()).unwrap();
    drop(socket);
    client.ping().unwrap();
    assert!(!is_readable(&theirs));
    drop(client);
    assert!(theirs.receive().unwrap().is_none());
    keeper.wait_for_open_files(before);
}

#[test]
fn only_a_waiting_process_of_root_is_a_spare_daemon_and_only_so_many() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let before = keeper.open_files();
    let (_stream, wrong) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_refused(client.put_spare(launch(1), wrong.as_fd()), Refusal::NotSpare);
    for role in [Role::ControlListener, Role::MetricsListener, Role::StateTable] {
        assert_refused(client.put_spare(launch(1), good(role, &keeper.sandbox).as_fd()), Refusal::NotSpare);
    }
    keeper.wait_for_open_files(before);
    let (_theirs, socket) = spare_socket(&keeper, 7);
    for number in 0..64 {
        client.put_spare(launch(number), socket.as_fd()).unwrap();
    }
    client.put_spare(launch(63), socket.as_fd()).unwrap();
    assert_refused(client.put_spare(launch(64), socket.as_fd()), Refusal::Full);
    assert!(client.forget_spare(launch(3)).unwrap());
    assert!(!client.forget_spare(launch(3)).unwrap());
    assert_eq!(client.forget_spares().unwrap(), 63);
    keeper.wait_for_open_files(before);
}

/// Otherwise a few other programs could make the keeper take a driver for dead.
#[test]
fn a_driver_that_attends_keeps_its_connection() {
    let keeper = Keeper::start();
    let mut drivers: Vec<Client> = (0..8).map(|_| keeper.client()).collect();
    assert_refused(keeper.bystander().attend(), Refusal::Full);
    let mut others: Vec<Client> = (0..40).map(|_| keeper.bystander()).collect();
    others.last_mut().unwrap().ping().unwrap();
    assert!(matches!(others[0].ping(), Err(Error::Closed { .. })));
    for driver in &mut drivers {
        driver.ping().unwrap();
    }
}
