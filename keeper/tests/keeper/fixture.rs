//! A keeper in a sandbox, and descriptors for it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use keeper::Error;
use keeper::client::Client;
use keeper::daemon::Removed;
use keeper::wire::standby::{Assignment, Beside};
use keeper::wire::{Refusal, Role, VolumeKey};
use linux::fd_passing::{PacketListener, PacketSocket};
use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use tests::{Daemon, Network, Sandbox, binaries, eventually};

/// The time limit of a step that must happen at once. No test needs a tenth of it.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Keeper {
    pub(crate) process: Daemon,
    pub(crate) socket: PathBuf,
    /// Last: what is in it ends first.
    pub(crate) sandbox: Sandbox,
}

impl Keeper {
    pub(crate) fn start() -> Self {
        Self::start_in(Sandbox::enter(Network::Callers).unwrap(), "")
    }

    /// With a limit of open files.
    pub(crate) fn with_open_files(most: u32) -> Self {
        Self::start_in(Sandbox::enter(Network::Callers).unwrap(), &format!("ulimit -n {most};"))
    }

    fn start_in(sandbox: Sandbox, before: &str) -> Self {
        let socket = sandbox.path("k.sock");
        let process = start(&sandbox, &socket, before);
        let keeper = Self { process, socket, sandbox };
        keeper.wait_until_it_answers();
        keeper
    }

    /// A new process at the same socket.
    pub(crate) fn start_again(&mut self) {
        self.process = start(&self.sandbox, &self.socket, "");
        self.wait_until_it_answers();
    }

    fn wait_until_it_answers(&self) {
        eventually("the keeper answers", LIMIT, || {
            Client::connect(&self.socket, LIMIT)?.ping()?;
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e:#}: {}", self.process.output()));
    }

    /// A driver's.
    pub(crate) fn client(&self) -> Client {
        let mut client = self.bystander();
        client.attend().unwrap();
        client
    }

    /// That of a program which is not the driver, or of a driver of an earlier version.
    pub(crate) fn bystander(&self) -> Client {
        Client::connect(&self.socket, LIMIT).unwrap()
    }

    /// A connection for packets as they are.
    pub(crate) fn raw(&self) -> PacketSocket {
        PacketSocket::connect_within(&self.socket, LIMIT).unwrap()
    }

    /// A new daemon's side.
    pub(crate) fn removed(&self, volume: VolumeKey) -> Removed {
        Removed::new(self.client().daemon_socket(volume).unwrap(), LIMIT).unwrap()
    }

    /// How many descriptors the process has open.
    pub(crate) fn open_files(&self) -> usize {
        let mut seen = usize::MAX;
        eventually("the same open files twice", LIMIT, || {
            let (now, before) = (self.count_open_files()?, seen);
            seen = now;
            anyhow::ensure!(before == now, "{before}, then {now}");
            Ok(now)
        })
        .unwrap()
    }

    /// Files are closed on a thread of their own.
    #[track_caller]
    pub(crate) fn wait_for_open_files(&self, count: usize) {
        eventually("files are closed", LIMIT, || {
            let now = self.count_open_files()?;
            anyhow::ensure!(now == count, "{now} are open, not {count}");
            Ok(())
        })
        .unwrap();
    }

    fn count_open_files(&self) -> anyhow::Result<usize> {
        // The keeper has seen the ends of connections that came before when it answers this one.
        Client::connect(&self.socket, LIMIT)?.ping()?;
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.process.pid()))?.count())
    }

    /// A field of /proc/PID/status, in kB.
    pub(crate) fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim_matches([':', ' ', '\t']).trim_end_matches(" kB").parse().unwrap()
    }
}

fn start(sandbox: &Sandbox, socket: &Path, before: &str) -> Daemon {
    let script = format!("{before} exec \"$0\" --log-level debug --socket \"$1\"");
    let mut shell = sandbox.command(Path::new("/bin/sh"));
    shell.args(["-c", &script]).arg(binary()).arg(socket);
    Daemon::start("hawser-keeper", shell, &sandbox.path("keeper.log")).unwrap()
}

pub(crate) fn binary() -> PathBuf {
    binaries::under_test("hawser-keeper").unwrap()
}

pub(crate) fn command(sandbox: &Sandbox, socket: &Path) -> Command {
    let mut command = sandbox.command(&binary());
    command.arg("--socket").arg(socket);
    command
}

pub(crate) fn key(number: u32) -> VolumeKey {
    VolumeKey::parse(&format!("{number:032x}")).unwrap()
}

/// Sends a packet as it is.
pub(crate) fn send_with(
    socket: impl AsFd,
    packet: &[u8],
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[std::io::IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL)
}

/// Of a kind that is good for the role.
pub(crate) fn good(role: Role, sandbox: &Sandbox) -> OwnedFd {
    match role {
        Role::Connection => linux::mount::open_fuse_device().unwrap(),
        Role::Directory | Role::ParkedMount => linux::mount::open_tree_clone(sandbox.dir()).unwrap(),
        Role::StateTable => table().into(),
        Role::UsageFile => usage_file(sandbox).into(),
        Role::ControlListener => PacketListener::bind(&unused(sandbox, "control")).unwrap().into(),
        Role::MetricsListener => UnixListener::bind(unused(sandbox, "metrics")).unwrap().into(),
        Role::Assignment => assignment(b"packet", SEALS),
        Role::Daemon => linux::process::open_pidfd(std::process::id().cast_signed()).unwrap().unwrap(),
    }
}

/// A path in the sandbox that nothing has.
fn unused(sandbox: &Sandbox, name: &str) -> PathBuf {
    let random = linux::random::hexadecimal().unwrap();
    sandbox.path(&format!("{name}-{}", &random[..8]))
}

pub(crate) const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// With the connection, the control listener and the socket to the keeper beside the packet.
pub(crate) fn assignment(packet: &[u8], seals: SealFlags) -> OwnedFd {
    let beside = [Beside::Held(Role::Connection), Beside::Held(Role::ControlListener), Beside::KeeperSocket];
    sealed(&Assignment::new(&beside, packet).unwrap().encode(), seals)
}

pub(crate) fn sealed(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let memfd = memfd_create("assignment", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    let memfd = File::from(memfd);
    memfd.write_all_at(bytes, 0).unwrap();
    rustix::fs::fcntl_add_seals(&memfd, seals).unwrap();
    memfd.into()
}

pub(crate) fn table() -> File {
    let table = memfd_create("table", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    let table = File::from(table);
    table.set_len(4096).unwrap();
    rustix::fs::fcntl_add_seals(&table, SealFlags::SHRINK).unwrap();
    table
}

pub(crate) fn usage_file(sandbox: &Sandbox) -> File {
    let path = sandbox.path("usage");
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// A file on the mount of the volume's directory.
pub(crate) fn file_of(client: &mut Client, volume: VolumeKey) -> OwnedFd {
    let directory = client.get(volume, Role::Directory).unwrap().unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CREATE | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::openat(directory, "inside", flags, rustix::fs::Mode::RUSR).unwrap()
}

#[track_caller]
pub(crate) fn assert_refused<T: std::fmt::Debug>(result: Result<T, Error>, wanted: Refusal) {
    match result {
        Err(Error::Refused { refusal, .. }) if refusal == wanted => {}
        other => panic!("not refused as {wanted:?}: {other:?}"),
    }
}

/// Locks of flock(2) belong to an open file: the lock is held as long as any duplicate is open.
pub(crate) fn lock(file: impl AsFd) {
    rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
}

pub(crate) fn is_locked(other_open: impl AsFd) -> bool {
    let locked = rustix::fs::flock(other_open, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    locked == Err(rustix::io::Errno::WOULDBLOCK)
}

/// Locks it. The tests' other threads start processes, which have all descriptors until they run
/// their program.
#[track_caller]
pub(crate) fn wait_until_unlocked(other_open: impl AsFd) {
    eventually("the lock is released", LIMIT, || {
        anyhow::ensure!(!is_locked(&other_open), "it is locked");
        Ok(())
    })
    .unwrap();
}
