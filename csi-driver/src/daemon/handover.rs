//! The driver's side of the hand-over: checks the daemon that dials in, and passes it its volume
//! (proto/proto/hawser/handover/v1/handover.proto).

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use keeper::wire::standby::{self, Beside};
use linux::fd_passing::{PacketSocket, PeerCredentials};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use prost::Message;
use proto::handover::{
    Answer, Assignment, Capacity, DataPath, FIRST_WITH_POLICIES, FIRST_WITH_PROCEED, FIRST_WITH_STATE, Hello,
    HelloReply, Prepared as PreparedAnswer, Proceed, Ready, Role, UnknownVersion, VERSIONS, answer,
    hello_reply,
};
use proto::versions::Versions;

use crate::daemon::dial::DialListener;
use crate::daemon::process;
use crate::daemon::untrusted_text::abridged;
use crate::error::{Error, Result, Step, chain};
use crate::model::ids::VolumeId;
use crate::model::launch::ProcessId;
use crate::model::limits;

/// A timeout of zero would mean none (socket(7), SO_RCVTIMEO).
const SHORTEST: Duration = Duration::from_millis(1);
/// Flags of FUSE_INIT: there are 64 bits.
const MOST_FLAGS: usize = 64;

/// How the driver recognizes a daemon that it has started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected<'a> {
    pub(crate) nonce: &'a str,
    /// If the launcher knows the process, no other may take the hand-over.
    pub(crate) process: Option<ProcessId>,
    /// Limit from the launch until it dials in.
    pub(crate) time_limit: Duration,
}

/// A daemon that has dialled in, and has no volume yet.
#[derive(Debug)]
pub(crate) struct Dialled {
    socket: PacketSocket,
    /// The newest version that it and the driver speak.
    version: u32,
    /// Of the daemon's program; empty before version 5.
    pub(crate) release: String,
    pub(crate) daemon: ProcessId,
    /// Becomes readable when the daemon ends.
    pub(crate) pidfd: OwnedFd,
}

/// A daemon that can follow the one that serves, and waits for that one's end.
#[derive(Debug)]
pub(crate) struct Prepared {
    conversation: Conversation,
    pub(crate) daemon: ProcessId,
    pub(crate) pidfd: OwnedFd,
}

/// The connection to a daemon that was offered a volume.
#[derive(Debug)]
struct Conversation {
    socket: PacketSocket,
    volume_id: VolumeId,
    /// The launch, as the launcher describes it in messages.
    launch: String,
}

/// Why no daemon has dialled in.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoDaemon {
    #[error("no daemon dialled within {} s", limit.as_secs())]
    TimedOut { limit: Duration },
    #[error("it ended before it dialled")]
    Ended,
    #[error("the wait was abandoned")]
    Abandoned,
    #[error("it speaks version {daemon} of the hand-over protocol, this driver version {VERSIONS}")]
    OtherVersion { daemon: Versions },
    #[error(transparent)]
    Kernel(#[from] linux::Error),
}

/// What a daemon gets.
#[derive(Debug)]
pub(crate) struct Offer<'a> {
    pub volume_id: &'a VolumeId,
    /// The launch, as the launcher describes it in messages.
    pub launch: &'a str,
    /// `roles` is empty: it is filled from `descriptors`.
    pub assignment: Assignment,
    /// At most one of each role.
    pub descriptors: Vec<(Role, BorrowedFd<'a>)>,
}

/// The daemon that serves the volume from now on.
#[derive(Debug)]
pub(crate) struct Served {
    pub daemon: ProcessId,
    /// Becomes readable when the daemon ends.
    pub pidfd: OwnedFd,
    pub max_write_bytes: u32,
    /// Another daemon can continue its connection.
    pub can_be_continued: bool,
    /// What the daemon would ask the kernel for, and the continued connection lacks.
    pub needs_new_stage: Vec<String>,
}

/// What the daemon reports of itself.
struct Greeting {
    versions: Versions,
    release: String,
}

/// Waits for the daemon to dial in, until `abandoned` is readable. Another process that dials is
/// rejected; the wait continues.
pub(crate) fn wait_for_daemon(
    listener: &DialListener,
    expected: Expected<'_>,
    abandoned: BorrowedFd<'_>,
) -> std::result::Result<Dialled, NoDaemon> {
    let began = Instant::now();
    let left = || expected.time_limit.saturating_sub(began.elapsed());
    let started = expected.process.map(ProcessId::open).transpose()?;
    let mut turned_away: u64 = 0;
    loop {
        wait_for_dial(listener, expected, started.as_ref(), left(), abandoned)?;
        let socket = listener.accept()?;
        let peer = socket.peer()?;
        match greet(&socket, peer, expected, limits::HELLO.min(left().max(SHORTEST))) {
            Ok(greeting) => return dialled(socket, peer, greeting),
            Err(reason) => {
                turned_away += 1;
                // Not every rejection: a process may dial in a loop.
                if turned_away.is_power_of_two() {
                    let socket = listener.path().display();
                    tracing::warn!(%socket, pid = peer.pid, uid = peer.uid, reason, turned_away, "rejected a process that dialled");
                }
            }
        }
    }
}

/// `started`: the process, if it is known. Its inner value is the pidfd, `None` if it has ended.
fn wait_for_dial(
    listener: &DialListener,
    expected: Expected<'_>,
    started: Option<&Option<OwnedFd>>,
    left: Duration,
    abandoned: BorrowedFd<'_>,
) -> std::result::Result<(), NoDaemon> {
    let mut fds =
        vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(abandoned, PollFlags::POLLIN)];
    match started {
        Some(None) => return Err(NoDaemon::Ended),
        Some(Some(pidfd)) => fds.push(PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)),
        None => {}
    }
    if process::poll(&mut fds, left)? == 0 {
        return Err(NoDaemon::TimedOut { limit: expected.time_limit });
    }
    match (fds[0].any(), fds[1].any()) {
        (_, Some(true)) => Err(NoDaemon::Abandoned),
        (Some(true), _) => Ok(()),
        (Some(false) | None, _) => Err(NoDaemon::Ended),
    }
}

/// Checks that the peer is the daemon: it is root, is the started process, and has the nonce.
fn greet(
    socket: &PacketSocket,
    peer: PeerCredentials,
    expected: Expected<'_>,
    limit: Duration,
) -> std::result::Result<Greeting, String> {
    if peer.uid != 0 {
        return Err(format!("uid {}, not 0", peer.uid));
    }
    if let Some(process) = expected.process.filter(|process| process.pid != peer.pid) {
        return Err(format!("pid {}, not {}", peer.pid, process.pid));
    }
    let packet = socket.set_timeout(limit).and_then(|()| socket.receive());
    let packet = packet.map_err(|e| chain(&e))?;
    let packet = packet.ok_or("closed without a Hello")?;
    let hello = Hello::decode(&*packet).map_err(|e| format!("no Hello: {e}"))?;
    if hello.nonce != expected.nonce {
        return Err("another launch's nonce".to_owned());
    }
    let versions = Versions::said(hello.oldest_version, hello.newest_version);
    Ok(Greeting { versions, release: abridged(&hello.release) })
}

fn dialled(
    socket: PacketSocket,
    peer: PeerCredentials,
    Greeting { versions, release }: Greeting,
) -> std::result::Result<Dialled, NoDaemon> {
    let Some(version) = VERSIONS.common(versions) else {
        refuse_version(&socket, peer);
        return Err(NoDaemon::OtherVersion { daemon: versions });
    };
    // The socket's peer is the process that dialled, even if another process has its pid now.
    let pidfd = linux::peer_process::peer_pidfd(&socket)?.ok_or(NoDaemon::Ended)?;
    let daemon = ProcessId::of(peer.pid)?.ok_or(NoDaemon::Ended)?;
    Ok(Dialled { socket, version, release, daemon, pidfd })
}

/// Sends the daemon the versions that the driver speaks.
fn refuse_version(socket: &PacketSocket, peer: PeerCredentials) {
    let Versions { oldest: oldest_version, newest: newest_version } = VERSIONS;
    let unknown = hello_reply::Kind::UnknownVersion(UnknownVersion { oldest_version, newest_version });
    if let Err(unsent) = socket.send(&HelloReply { kind: Some(unknown) }.encode_to_vec(), &[]) {
        tracing::debug!(
            pid = peer.pid,
            error = chain(&unsent),
            "could not send the driver's versions to the daemon"
        );
    }
}

/// What a waiting daemon of this driver's version gets if the keeper is to give it the volume: the
/// packet of [`assign`], to continue the connection. `None` if it is too large for the keeper.
pub(crate) fn for_keeper(assignment: Assignment) -> Option<standby::Assignment> {
    use keeper::wire::Role as Held;
    let beside = [
        (Role::FuseDevice, Beside::Held(Held::Connection)),
        (Role::ControlListener, Beside::Held(Held::ControlListener)),
        (Role::MetricsListener, Beside::Held(Held::MetricsListener)),
        (Role::Directory, Beside::Held(Held::Directory)),
        (Role::UsageFile, Beside::Held(Held::UsageFile)),
        (Role::StateTable, Beside::Held(Held::StateTable)),
        (Role::Keeper, Beside::KeeperSocket),
    ];
    let (descriptors, beside): (Vec<i32>, Vec<_>) =
        beside.into_iter().map(|(role, beside)| (i32::from(role), beside)).unzip();
    let assignment = Assignment { descriptors, continues: true, ..assignment };
    let reply = HelloReply { kind: Some(hello_reply::Kind::Assignment(assignment)) };
    standby::Assignment::new(&beside, &reply.encode_to_vec())
}

impl Dialled {
    /// The driver's end of the connection, if a keeper may give the daemon a volume.
    pub(crate) fn for_keeper(&self) -> Option<BorrowedFd<'_>> {
        // The packet is of this version.
        (self.version == VERSIONS.newest).then(|| self.socket.as_fd())
    }
}

/// Gives the daemon its volume, and returns once it serves.
pub(crate) fn assign(dialled: Dialled, offer: &Offer<'_>) -> Result<Served> {
    let Dialled { socket, version, daemon, pidfd, .. } = dialled;
    let conversation = Conversation::of(socket, offer);
    if offer.assignment.continues && version < FIRST_WITH_STATE {
        return Err(conversation.refused("a daemon of an earlier version cannot continue a connection"));
    }
    conversation.check_policies(version, offer)?;
    conversation.offer(version, offer, limits::ANSWER)?;
    conversation.ready(limits::ANSWER).map(|ready| served(daemon, pidfd, ready))
}

/// Gives the daemon a volume that another one serves, and returns once it is ready to follow. Nothing
/// changes for the volume.
pub(crate) fn prepare(dialled: Dialled, offer: Offer<'_>) -> Result<Prepared> {
    let Dialled { socket, version, daemon, pidfd, .. } = dialled;
    if version < FIRST_WITH_PROCEED {
        let (volume_id, first) = (offer.volume_id.clone(), FIRST_WITH_PROCEED);
        return Err(Error::CannotPrepare { volume_id, version, first });
    }
    let conversation = Conversation::of(socket, &offer);
    conversation.check_policies(version, &offer)?;
    let assignment = Assignment { continues: true, waits_for_proceed: true, ..offer.assignment };
    conversation.offer(version, &Offer { assignment, ..offer }, limits::PREPARE)?;
    match conversation.answer(limits::PREPARE)? {
        answer::Result::Prepared(PreparedAnswer {}) => Ok(Prepared { conversation, daemon, pidfd }),
        other => Err(conversation.refused(&format!("{other:?} instead of Prepared"))),
    }
}

impl Prepared {
    /// The earlier daemon has ended: returns once this one serves.
    pub(crate) fn proceed(self, keeper_socket: BorrowedFd<'_>) -> Result<Served> {
        let Self { conversation, daemon, pidfd } = self;
        conversation.send(&Proceed {}.encode_to_vec(), &[keeper_socket])?;
        conversation.ready(limits::PROCEED).map(|ready| served(daemon, pidfd, ready))
    }
}

fn served(daemon: ProcessId, pidfd: OwnedFd, ready: Ready) -> Served {
    let Ready { max_write_bytes, can_be_continued, needs_new_stage } = ready;
    let needs_new_stage = needs_new_stage.iter().take(MOST_FLAGS).map(|flag| abridged(flag)).collect();
    Served { daemon, pidfd, max_write_bytes, can_be_continued, needs_new_stage }
}

impl Conversation {
    fn of(socket: PacketSocket, offer: &Offer<'_>) -> Self {
        Self { socket, volume_id: offer.volume_id.clone(), launch: offer.launch.to_owned() }
    }

    /// A daemon of an earlier version would not see what its volume needs.
    fn check_policies(&self, version: u32, offer: &Offer<'_>) -> Result<()> {
        let Assignment { data_path, capacity, writeback_cache, .. } = offer.assignment;
        let are_default = data_path == i32::from(DataPath::Daemon)
            && capacity == i32::from(Capacity::Daemon)
            && !writeback_cache;
        let are_known = version >= FIRST_WITH_POLICIES || are_default;
        if are_known {
            return Ok(());
        }
        Err(self.refused("a daemon of an earlier version knows neither data paths nor capacity policies nor writeback caches"))
    }

    /// Sends the Assignment, with what a daemon of this version knows of.
    fn offer(&self, version: u32, offer: &Offer<'_>, limit: Duration) -> Result<()> {
        self.socket.set_timeout(limit).step("hand over")?;
        let is_known =
            |role: Role| version >= FIRST_WITH_STATE || !matches!(role, Role::StateTable | Role::Keeper);
        let known = offer.descriptors.iter().filter(|(role, _)| is_known(*role));
        let (roles, descriptors): (Vec<i32>, Vec<_>) =
            known.map(|(role, descriptor)| (i32::from(*role), *descriptor)).unzip();
        let assignment = Assignment { descriptors: roles, ..offer.assignment.clone() };
        let reply = HelloReply { kind: Some(hello_reply::Kind::Assignment(assignment)) };
        self.send(&reply.encode_to_vec(), &descriptors)
    }

    fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        match self.socket.send(packet, descriptors) {
            Err(e) if e.errno() == Errno::EPIPE => Err(self.ended()),
            sent => sent.step("hand over"),
        }
    }

    fn ready(&self, limit: Duration) -> Result<Ready> {
        match self.answer(limit)? {
            answer::Result::Ready(ready) => Ok(ready),
            other => Err(self.refused(&format!("{other:?} instead of Ready"))),
        }
    }

    /// An answer other than Failed.
    fn answer(&self, limit: Duration) -> Result<answer::Result> {
        self.socket.set_timeout(limit).step("hand over")?;
        let packet = match self.socket.receive() {
            Ok(Some(packet)) => packet,
            Ok(None) => return Err(self.ended()),
            Err(e) if e.errno() == Errno::ECONNRESET => return Err(self.ended()),
            Err(e) if e.errno() == Errno::EAGAIN => {
                let what = format!("the answer of the daemon of volume {}", self.volume_id);
                return Err(Error::Deadline { what, limit });
            }
            Err(e) => return Err(e).step("hand over"),
        };
        let answer = Answer::decode(&*packet).map_err(|e| self.refused(&format!("no Answer: {e}")))?;
        match answer.result {
            Some(answer::Result::Failed(failed)) => {
                let reason = abridged(&failed.reason);
                Err(Error::DaemonRefused { volume_id: self.volume_id.clone(), reason })
            }
            Some(result) => Ok(result),
            None => Err(self.refused("an Answer without a result")),
        }
    }

    fn refused(&self, reason: &str) -> Error {
        Error::HandOver { volume_id: self.volume_id.clone(), reason: abridged(reason) }
    }

    fn ended(&self) -> Error {
        let (volume_id, launch) = (self.volume_id.clone(), self.launch.clone());
        Error::DaemonEnded { volume_id, launch, log: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::dial::{DialDir, ServingSockets};
    use nix::sys::eventfd::EventFd;
    use std::thread;

    const TIMEOUT: Duration = Duration::from_secs(10);

    struct Scene {
        dir: tempfile::TempDir,
        volume_id: VolumeId,
        listener: DialListener,
        sockets: ServingSockets,
        file: std::fs::File,
        abandoned: EventFd,
    }

    impl Scene {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
            let dial = DialDir::of(dir.path(), &volume_id);
            let listener = dial.listen().unwrap();
            let (sockets, file) = (dial.serving_sockets().unwrap(), tempfile::tempfile().unwrap());
            Self { dir, volume_id, listener, sockets, file, abandoned: EventFd::new().unwrap() }
        }

        fn offer(&self) -> Offer<'_> {
            Offer {
                volume_id: &self.volume_id,
                launch: "pod ns/p with image i",
                assignment: Assignment { volume_name: "v".into(), ..Default::default() },
                descriptors: vec![
                    (Role::FuseDevice, self.file.as_fd()),
                    (Role::ControlListener, self.sockets.control.as_fd()),
                ],
            }
        }

        fn wait(
            &self,
            process: Option<ProcessId>,
            time_limit: Duration,
        ) -> std::result::Result<Dialled, NoDaemon> {
            let expected = Expected { nonce: "right", process, time_limit };
            wait_for_daemon(&self.listener, expected, self.abandoned.as_fd())
        }

        fn hand_over(&self) -> Result<Served> {
            assign(self.wait(None, TIMEOUT).unwrap(), &self.offer())
        }

        /// Dials as a daemon would, in a thread; its Answer if it gets an Assignment.
        fn dial(&self, nonce: &'static str, result: Option<answer::Result>) -> thread::JoinHandle<usize> {
            let socket = DialDir::of(self.dir.path(), &self.volume_id).socket();
            thread::spawn(move || {
                let socket = PacketSocket::connect(&socket).unwrap();
                let hello = hello(nonce, VERSIONS);
                if socket.send(&hello.encode_to_vec(), &[]).is_err() {
                    return 0;
                }
                let Ok(Some((packet, fds))) = socket.receive_with_fds(5) else { return 0 };
                let reply = HelloReply::decode(&*packet).unwrap().kind;
                let Some(hello_reply::Kind::Assignment(assignment)) = reply else { panic!("{reply:?}") };
                assert_eq!(assignment.volume_name, "v");
                let roles = [Role::FuseDevice, Role::ControlListener].map(i32::from);
                assert_eq!(assignment.descriptors, roles);
                socket.send(&Answer { result }.encode_to_vec(), &[]).unwrap();
                fds.len()
            })
        }
    }

    fn hello(nonce: &str, versions: Versions) -> Hello {
        let Versions { oldest: oldest_version, newest: newest_version } = versions;
        Hello { newest_version, nonce: nonce.to_owned(), oldest_version, ..Hello::default() }
    }

    fn ready() -> Option<answer::Result> {
        Some(answer::Result::Ready(Ready { max_write_bytes: 4096, ..Ready::default() }))
    }

    #[test]
    fn the_daemon_gets_each_descriptor_with_its_role_and_the_driver_its_process() {
        let scene = Scene::new();
        let daemon = scene.dial("right", ready());
        let served = scene.hand_over().unwrap();
        assert_eq!(served.daemon.pid, std::process::id().cast_signed());
        assert_eq!(served.max_write_bytes, 4096);
        assert_eq!(daemon.join().unwrap(), 2);
    }

    #[test]
    fn a_dialler_with_another_nonce_is_turned_away_and_the_right_one_served() {
        let scene = Scene::new();
        let wrong = scene.dial("wrong", ready());
        let waiting = thread::scope(|scope| {
            let driver = scope.spawn(|| scene.hand_over());
            assert_eq!(wrong.join().unwrap(), 0, "nothing is given to it");
            let right = scene.dial("right", ready());
            assert_eq!(right.join().unwrap(), 2);
            driver.join().unwrap()
        });
        assert_eq!(waiting.unwrap().max_write_bytes, 4096);
    }

    #[test]
    fn a_daemon_and_a_driver_without_a_common_version_tell_each_other_theirs() {
        let scene = Scene::new();
        let socket = DialDir::of(scene.dir.path(), &scene.volume_id).socket();
        let later = Versions { oldest: VERSIONS.newest + 1, newest: VERSIONS.newest + 2 };
        // Protocol 2 gave its one version in the first field.
        let earlier = Versions { oldest: 0, newest: 2 };
        for (versions, shown) in [(later, later.to_string()), (earlier, "2".to_owned())] {
            let daemon = thread::spawn({
                let socket = socket.clone();
                move || {
                    let socket = PacketSocket::connect(&socket).unwrap();
                    socket.send(&hello("right", versions).encode_to_vec(), &[]).unwrap();
                    HelloReply::decode(&*socket.receive().unwrap().unwrap()).unwrap().kind
                }
            });
            let error = scene.wait(None, TIMEOUT).unwrap_err().to_string();
            let words =
                format!("speaks version {shown} of the hand-over protocol, this driver version {VERSIONS}");
            assert!(error.contains(&words), "{error}");
            let reply = UnknownVersion { oldest_version: VERSIONS.oldest, newest_version: VERSIONS.newest };
            assert_eq!(daemon.join().unwrap(), Some(hello_reply::Kind::UnknownVersion(reply)));
        }
    }

    #[test]
    fn diallers_that_say_nothing_do_not_lengthen_the_wait() {
        let scene = Scene::new();
        let socket = DialDir::of(scene.dir.path(), &scene.volume_id).socket();
        let _silent: Vec<_> = (0..8).map(|_| PacketSocket::connect(&socket).unwrap()).collect();
        let begun = Instant::now();
        let err = scene.wait(None, Duration::from_millis(300)).unwrap_err();
        assert!(matches!(err, NoDaemon::TimedOut { .. }), "{err}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }

    #[test]
    fn descriptors_in_a_hello_or_an_answer_are_closed_and_refused() {
        let scene = Scene::new();
        let socket = DialDir::of(scene.dir.path(), &scene.volume_id).socket();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let hello = hello("right", VERSIONS).encode_to_vec();
        let answer = Answer { result: ready() }.encode_to_vec();
        let daemon = thread::spawn(move || {
            let turned_away = PacketSocket::connect(&socket).unwrap();
            turned_away.send(&hello, &[writer.as_fd()]).unwrap();
            let served = PacketSocket::connect(&socket).unwrap();
            served.send(&hello, &[]).unwrap();
            served.receive_with_fds(5).unwrap().unwrap();
            served.send(&answer, &[writer.as_fd()]).unwrap();
            (turned_away, served)
        });
        let err = scene.hand_over().unwrap_err();
        let text = crate::error::chain(&err);
        assert!(text.starts_with("hand over: receive packet descriptors in a packet"), "{text}");
        drop(daemon.join().unwrap());
        assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0, "no copy is open");
    }

    #[test]
    fn another_process_than_the_one_started_gets_nothing() {
        let scene = Scene::new();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = ProcessId::of(child.id().cast_signed()).unwrap().unwrap();
        let other = scene.dial("right", ready());
        let err = scene.wait(Some(process), Duration::from_millis(300)).unwrap_err();
        assert!(matches!(err, NoDaemon::TimedOut { .. }), "{err}");
        assert_eq!(other.join().unwrap(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_wait_that_is_abandoned_ends_at_once() {
        let scene = Scene::new();
        let err = thread::scope(|scope| {
            let driver = scope.spawn(|| scene.wait(None, TIMEOUT));
            scene.abandoned.write(1).unwrap();
            driver.join().unwrap().unwrap_err()
        });
        assert!(matches!(err, NoDaemon::Abandoned), "{err}");
    }

    #[test]
    fn a_daemon_that_ends_or_refuses_is_known_at_once() {
        let scene = Scene::new();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = ProcessId::of(child.id().cast_signed()).unwrap();
        let err = scene.wait(process, TIMEOUT).unwrap_err();
        assert!(matches!(err, NoDaemon::Ended), "{err}");
        child.wait().unwrap();

        let failed = answer::Result::Failed(proto::handover::Failed { reason: "no INIT".into() });
        let daemon = scene.dial("right", Some(failed));
        let err = scene.hand_over().unwrap_err();
        assert!(err.to_string().ends_with("refused to serve: no INIT"), "{err}");
        daemon.join().unwrap();
    }
}
