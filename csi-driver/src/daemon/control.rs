//! The driver's requests to a daemon that serves: one connection to the control socket in the
//! volume's dial directory, one packet for each request and each reply
//! (proto/proto/hawser/control/v1/control.proto).
//!
//! Every wait is limited: a stopped daemon is [`Error::Silent`] after [`limits::CONTROL`]. A daemon
//! is not trusted: the driver reads one packet of limited size for each request, accepts descriptors
//! only from [`Control::descriptors`], and shortens the daemon's text.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use linux::fd_passing::PacketSocket;
use nix::errno::Errno;
use prost::Message;
use proto::control::{
    GetDescriptors, GetUsage, GetWritten, Ping, Pong, Quiesce, Refused, ReplaceKeeper, Reply, Request,
    Resume, SetCapacity, Usage, VERSION, Written, reply, request, written,
};
use proto::handover::Role;

use crate::daemon::dial::DialDir;
use crate::daemon::notes::Noted;
use crate::daemon::untrusted_text::abridged;
use crate::error::{Error, Result};
use crate::model::capacity::VolumeLimits;
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::Timestamp;

/// Each takes a thread.
const MOST_ASKED_AT_ONCE: usize = 256;

/// Of one daemon, with room for roles of later versions.
const MOST_DESCRIPTORS: usize = 16;

/// The newest version of a daemon that is in the log, so that each is there once.
static NEWEST_LOGGED: AtomicU32 = AtomicU32::new(VERSION);

/// What happens to writes that the kernel passes to backing files, while a volume is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassingWrites {
    /// The pause is refused while a file is open for them.
    Refused,
    GoOn,
}

/// A connection to one volume's daemon.
#[derive(Debug)]
pub(crate) struct Control {
    socket: PacketSocket,
    volume_id: VolumeId,
    limit: Duration,
}

impl Control {
    /// `limit` applies to the connect and to each request.
    pub(crate) fn connect(dial: &DialDir, volume_id: &VolumeId, limit: Duration) -> Result<Self> {
        let socket = PacketSocket::connect_within(&dial.control_socket(), limit)
            .map_err(|e| unreachable(volume_id, "the dial", limit, e))?;
        Ok(Self { socket, volume_id: volume_id.clone(), limit })
    }

    /// Checks that it answers. A daemon of any version stays supervised: it knows the requests of
    /// older versions, and refuses those that it does not know.
    pub(crate) fn ping(&self) -> Result<()> {
        self.version().map(drop)
    }

    /// The version of this protocol that the daemon speaks.
    pub(crate) fn version(&self) -> Result<u32> {
        // Daemons before the field existed send 0.
        self.pong().map(|pong| pong.version.max(1))
    }

    /// The release of the daemon's program; empty if it does not report it.
    pub(crate) fn release(&self) -> Result<String> {
        self.pong().map(|pong| abridged(&pong.release))
    }

    fn pong(&self) -> Result<Pong> {
        match self.ask("Ping", request::Kind::Ping(Ping {}))? {
            reply::Kind::Pong(pong) => {
                if let Some(version) = newer_version(&pong)
                    && NEWEST_LOGGED.fetch_max(version, Ordering::Relaxed) < version
                {
                    let (volume_id, driver) = (&self.volume_id, VERSION);
                    tracing::debug!(%volume_id, version, driver, "a daemon speaks a newer version of the control protocol");
                }
                Ok(pong)
            }
            other => Err(self.unexpected("Ping", &other)),
        }
    }

    pub(crate) fn usage(&self) -> Result<Usage> {
        match self.ask("GetUsage", request::Kind::GetUsage(GetUsage {}))? {
            reply::Kind::Usage(usage) => Ok(usage),
            other => Err(self.unexpected("GetUsage", &other)),
        }
    }

    /// Grows the volume. The size that it has already is a success.
    pub(crate) fn set_capacity(&self, limits: VolumeLimits) -> Result<()> {
        let wanted = SetCapacity { capacity_bytes: limits.bytes, inode_limit: limits.inodes };
        match self.ask("SetCapacity", request::Kind::SetCapacity(wanted))? {
            reply::Kind::Done(_) => Ok(()),
            other => Err(self.unexpected("SetCapacity", &other)),
        }
    }

    /// Stops all changes of the volume until [`Quiesced::resume`], until the returned value is
    /// dropped, or until `lease` ends (resolution: 1 ms). `passing`: writes that pass the daemon by.
    pub(crate) fn quiesce(self, lease: Duration, passing: PassingWrites, noted: Noted) -> Result<Quiesced> {
        let sent = Instant::now();
        let quiesced = self.hold(lease, passing)?;
        let (used_bytes, used_inodes) = (quiesced.used_bytes, quiesced.used_inodes);
        let (at, since) = (Timestamp::now(), Instant::now());
        let granted = Granted { sent, lease };
        Ok(Quiesced { at, since, used_bytes, used_inodes, control: self, passing, granted, _noted: noted })
    }

    /// The files of nodes above `after` that are open for writing, by ascending node; none after the last.
    /// Node and generation are what the daemon says.
    pub(crate) fn written(&self, after: u64) -> Result<Vec<written::File>> {
        match self.ask("GetWritten", request::Kind::GetWritten(GetWritten { after }))? {
            reply::Kind::Written(Written { files }) if files.is_sorted_by(|a, b| a.node < b.node) => {
                Ok(files.into_iter().filter(|file| file.node > after).collect())
            }
            other => Err(self.unexpected("GetWritten", &other)),
        }
    }

    /// Gives the daemon the socket to a keeper that takes the place of its own. On success, the keeper
    /// has all that the earlier one held of the daemon.
    pub(crate) fn replace_keeper(&self, socket: BorrowedFd<'_>) -> Result<()> {
        let asked = request::Kind::ReplaceKeeper(ReplaceKeeper {});
        match self.ask_with("ReplaceKeeper", asked, &[socket])? {
            reply::Kind::Done(_) => Ok(()),
            other => Err(self.unexpected("ReplaceKeeper", &other)),
        }
    }

    /// What the daemon calls the descriptors that a successor needs. Nothing about them is checked,
    /// except that each role is known and there at most once.
    pub(crate) fn descriptors(&self) -> Result<Vec<(Role, OwnedFd)>> {
        const WHAT: &str = "GetDescriptors";
        self.send(WHAT, request::Kind::GetDescriptors(GetDescriptors {}), &[])?;
        let received = self.socket.receive_with_fds(MOST_DESCRIPTORS).map_err(|e| self.failed(WHAT, e))?;
        let (packet, descriptors) = received.ok_or_else(|| self.lost(WHAT))?;
        let roles = match self.reply(WHAT, &packet)? {
            reply::Kind::Descriptors(found) => found.roles,
            other => return Err(self.unexpected(WHAT, &other)),
        };
        if roles.len() != descriptors.len() {
            let reason = format!("{} roles for {} descriptors", roles.len(), descriptors.len());
            return Err(self.refused(WHAT, reason));
        }
        let mut found: Vec<(Role, OwnedFd)> = Vec::new();
        for (number, descriptor) in roles.into_iter().zip(descriptors) {
            match Role::try_from(number) {
                Ok(role) if found.iter().all(|(other, _)| *other != role) => found.push((role, descriptor)),
                Ok(role) => return Err(self.refused(WHAT, format!("two have {}", role.as_str_name()))),
                Err(_) => return Err(self.refused(WHAT, format!("{number} is not a known role"))),
            }
        }
        Ok(found)
    }

    fn hold(&self, lease: Duration, passing: PassingWrites) -> Result<proto::control::Quiesced> {
        let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let passing_may_write = passing == PassingWrites::GoOn;
        match self.ask("Quiesce", request::Kind::Quiesce(Quiesce { lease_ms, passing_may_write }))? {
            reply::Kind::Quiesced(quiesced) => Ok(quiesced),
            other => Err(self.unexpected("Quiesce", &other)),
        }
    }

    /// `what` is the request's name, for errors.
    pub(crate) fn ask(&self, what: &'static str, kind: request::Kind) -> Result<reply::Kind> {
        self.ask_with(what, kind, &[])
    }

    fn ask_with(
        &self,
        what: &'static str,
        kind: request::Kind,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<reply::Kind> {
        self.send(what, kind, descriptors)?;
        let packet =
            self.socket.receive().map_err(|e| self.failed(what, e))?.ok_or_else(|| self.lost(what))?;
        self.reply(what, &packet)
    }

    fn send(&self, what: &'static str, kind: request::Kind, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let request = Request { kind: Some(kind) };
        self.socket.send(&request.encode_to_vec(), descriptors).map_err(|e| self.failed(what, e))
    }

    fn reply(&self, what: &'static str, packet: &[u8]) -> Result<reply::Kind> {
        let reply = Reply::decode(packet).map_err(|e| self.refused(what, format!("no Reply: {e}")))?;
        match reply.kind {
            Some(reply::Kind::Refused(Refused { reason, is_precondition: true })) => {
                Err(Error::DaemonCannot {
                    volume_id: self.volume_id.clone(),
                    what,
                    reason: abridged(&reason),
                })
            }
            Some(reply::Kind::Refused(refused)) => Err(self.refused(what, abridged(&refused.reason))),
            Some(kind) => Ok(kind),
            None => Err(self.refused(what, "a Reply of no kind".to_owned())),
        }
    }

    fn failed(&self, what: &'static str, error: linux::Error) -> Error {
        unreachable(&self.volume_id, what, self.limit, error)
    }

    fn lost(&self, what: &'static str) -> Error {
        Error::ControlLost { volume_id: self.volume_id.clone(), what }
    }

    pub(crate) fn unexpected(&self, what: &'static str, reply: &reply::Kind) -> Error {
        self.refused(what, abridged(&format!("answered by {reply:?}")))
    }

    fn refused(&self, what: &'static str, reason: String) -> Error {
        Error::ControlRefused { volume_id: self.volume_id.clone(), what, reason }
    }
}

/// The volumes whose daemons run and do not answer a Ping: stopped or stuck. All are asked at the
/// same time.
pub(crate) fn silent<'a>(
    run_dir: &Path,
    volumes: impl IntoIterator<Item = &'a VolumeId>,
) -> BTreeSet<VolumeId> {
    pinged(run_dir, volumes, |answer| matches!(answer, Err(Error::Silent { .. })))
}

/// The volumes for which a daemon answers a Ping. All are asked at the same time.
pub(crate) fn answering<'a>(
    run_dir: &Path,
    volumes: impl IntoIterator<Item = &'a VolumeId>,
) -> BTreeSet<VolumeId> {
    pinged(run_dir, volumes, |answer| answer.is_ok())
}

/// The volumes whose daemons count what they hold, and the files found so far. All are asked at the same
/// time.
pub(crate) fn counting<'a>(
    run_dir: &Path,
    volumes: impl IntoIterator<Item = &'a VolumeId>,
) -> BTreeMap<VolumeId, u64> {
    asked(run_dir, volumes, |control| {
        let usage = control.and_then(|control| control.usage()).ok()?;
        usage.counting.then_some(usage.used_inodes)
    })
}

fn pinged<'a>(
    run_dir: &Path,
    volumes: impl IntoIterator<Item = &'a VolumeId>,
    is_it: impl Fn(Result<()>) -> bool + Sync,
) -> BTreeSet<VolumeId> {
    let ping = |control: Result<Control>| is_it(control.and_then(|control| control.ping())).then_some(());
    asked(run_dir, volumes, ping).into_keys().collect()
}

/// What `ask` finds of each volume's daemon, if it finds anything.
fn asked<'a, T: Send>(
    run_dir: &Path,
    volumes: impl IntoIterator<Item = &'a VolumeId>,
    ask: impl Fn(Result<Control>) -> Option<T> + Sync,
) -> BTreeMap<VolumeId, T> {
    let ask = |id: &VolumeId| ask(Control::connect(&DialDir::of(run_dir, id), id, limits::STATISTICS));
    let volumes: Vec<&VolumeId> = volumes.into_iter().collect();
    let mut all = BTreeMap::new();
    for some in volumes.chunks(MOST_ASKED_AT_ONCE) {
        std::thread::scope(|scope| {
            let asked: Vec<_> = some.iter().map(|id| (id, scope.spawn(|| ask(id)))).collect();
            // A panic is in the log already.
            let found = asked.into_iter().filter_map(|(&id, asked)| Some((id.clone(), asked.join().ok()??)));
            all.extend(found);
        });
    }
    all
}

/// The daemon's version if it is newer than the driver's, as after a downgrade of the driver.
fn newer_version(pong: &Pong) -> Option<u32> {
    // Daemons before the field existed send 0.
    let version = pong.version.max(1);
    (version > VERSION).then_some(version)
}

fn unreachable(volume_id: &VolumeId, what: &'static str, limit: Duration, error: linux::Error) -> Error {
    let volume_id = volume_id.clone();
    match error.errno() {
        Errno::ENOENT => Error::NoControl { volume_id, what: "that" },
        // ECONNREFUSED: no process holds the listener any more.
        Errno::ECONNREFUSED | Errno::EPIPE | Errno::ECONNRESET => Error::ControlLost { volume_id, what },
        Errno::EAGAIN => Error::Silent { volume_id, what, limit },
        _ => Error::Kernel { step: "speak with daemon", source: error },
    }
}

/// A paused volume: it does not change while this value lives and its lease lasts.
#[derive(Debug)]
pub(crate) struct Quiesced {
    control: Control,
    passing: PassingWrites,
    /// What the volume holds during the pause.
    pub(crate) used_bytes: u64,
    pub(crate) used_inodes: u64,
    /// The time of the last change.
    pub(crate) at: Timestamp,
    since: Instant,
    granted: Granted,
    /// While it is paused, the daemon may answer no FUSE request.
    _noted: Noted,
}

/// The last request that the daemon has answered with a pause.
#[derive(Debug, Clone, Copy)]
struct Granted {
    /// Just before it was sent: the lease began no earlier.
    sent: Instant,
    lease: Duration,
}

impl Granted {
    fn has_ended(self) -> bool {
        self.sent.elapsed() > self.lease
    }
}

/// The result of a pause that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paused {
    /// False: the lease ended first, and the volume may have changed since.
    pub(crate) held: bool,
    pub(crate) paused: Duration,
}

impl Quiesced {
    /// Starts the lease anew, unless it has ended. Daemons of earlier releases answer a renewal that comes too
    /// late with another pause: so the driver measures the lease too.
    pub(crate) fn renew(&mut self, lease: Duration) -> Result<()> {
        let sent = Instant::now();
        match self.control.hold(lease, self.passing) {
            Err(Error::ControlRefused { volume_id, .. }) => Err(Error::LeaseLost { volume_id }),
            Ok(_) if self.granted.has_ended() => {
                Err(Error::LeaseLost { volume_id: self.control.volume_id.clone() })
            }
            renewed => renewed.map(|_| self.granted = Granted { sent, lease }),
        }
    }

    /// How long the lease lasts already, at most.
    pub(crate) fn lease_age(&self) -> Duration {
        self.granted.sent.elapsed()
    }

    pub(crate) fn resume(self) -> Result<Paused> {
        match self.control.ask("Resume", request::Kind::Resume(Resume {}))? {
            reply::Kind::Resumed(resumed) => {
                // The daemon's figure is limited: its pause began before our clock, by no more than
                // one wait.
                let most = self.since.elapsed() + self.control.limit;
                let paused = Duration::from_micros(resumed.paused_us).min(most);
                Ok(Paused { held: resumed.held && !self.granted.has_ended(), paused })
            }
            other => Err(self.control.unexpected("Resume", &other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::fd_passing::PacketListener;
    use proto::control::{Done, Resumed};
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(1);

    struct Scene {
        dir: tempfile::TempDir,
        volume_id: VolumeId,
        listener: PacketListener,
    }

    impl Scene {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
            let dial = DialDir::of(dir.path(), &volume_id);
            std::fs::create_dir(dial.path()).unwrap();
            let listener = PacketListener::bind(&dial.control_socket()).unwrap();
            Self { dir, volume_id, listener }
        }

        fn connect(&self) -> Result<Control> {
            Control::connect(&DialDir::of(self.dir.path(), &self.volume_id), &self.volume_id, LIMIT)
        }

        /// One connection, each request answered by the next of `replies`, then closed;
        /// what was asked.
        fn answer(&self, replies: Vec<reply::Kind>) -> thread::JoinHandle<Vec<request::Kind>> {
            let socket = self.listener.accept().unwrap();
            thread::spawn(move || {
                let mut asked = Vec::new();
                for kind in replies {
                    let packet = socket.receive().unwrap().unwrap();
                    asked.push(Request::decode(&*packet).unwrap().kind.unwrap());
                    socket.send(&Reply { kind: Some(kind) }.encode_to_vec(), &[]).unwrap();
                }
                asked
            })
        }
    }

    /// Answers to Quiesce, its renewal and Resume.
    fn renewed_once() -> Vec<reply::Kind> {
        let quiesced = proto::control::Quiesced { waited_us: 1, used_bytes: 2, used_inodes: 3 };
        vec![
            reply::Kind::Quiesced(quiesced),
            reply::Kind::Quiesced(quiesced),
            reply::Kind::Resumed(Resumed { held: true, paused_us: 1500 }),
        ]
    }

    #[test]
    fn a_pause_is_renewed_and_its_length_reported() {
        let scene = Scene::new();
        let control = scene.connect().unwrap();
        let daemon = scene.answer(renewed_once());
        let noted =
            std::sync::Arc::new(crate::daemon::notes::Hangs::default()).holding_back(&scene.volume_id);
        let mut pause = control.quiesce(Duration::from_secs(30), PassingWrites::Refused, noted).unwrap();
        assert_eq!(pause.used_bytes, 2);
        pause.renew(Duration::from_secs(15)).unwrap();
        assert_eq!(pause.resume().unwrap(), Paused { held: true, paused: Duration::from_micros(1500) });
        let hold = |lease_ms| request::Kind::Quiesce(Quiesce { lease_ms, passing_may_write: false });
        let asked = daemon.join().unwrap();
        assert_eq!(asked, [hold(30_000), hold(15_000), request::Kind::Resume(Resume {})]);
    }

    /// As a daemon of an earlier release does: it answers that all is well.
    #[test]
    fn a_renewal_or_an_end_that_comes_after_the_lease_is_a_lost_lease() {
        let lease = Duration::from_secs(15);
        for is_late in [true, false] {
            let scene = Scene::new();
            let control = scene.connect().unwrap();
            let daemon = scene.answer(renewed_once());
            let noted =
                std::sync::Arc::new(crate::daemon::notes::Hangs::default()).holding_back(&scene.volume_id);
            let mut pause = control.quiesce(lease, PassingWrites::Refused, noted).unwrap();
            assert!(pause.lease_age() < lease);
            let ago = if is_late { lease } else { lease / 2 };
            pause.granted.sent = pause.granted.sent.checked_sub(ago).unwrap();
            assert!(pause.lease_age() >= ago);
            let renewed = pause.renew(lease);
            match &renewed {
                Err(Error::LeaseLost { volume_id }) => assert!(is_late && *volume_id == scene.volume_id),
                other => assert!(!is_late && other.is_ok(), "{other:?}"),
            }
            assert_eq!(pause.lease_age() < lease / 2, !is_late, "a renewal begins the lease anew");
            assert_eq!(pause.resume().unwrap().held, !is_late);
            daemon.join().unwrap();
        }
    }

    #[test]
    fn a_pause_was_no_longer_than_the_driver_waited() {
        let scene = Scene::new();
        let control = scene.connect().unwrap();
        let quiesced = proto::control::Quiesced { waited_us: 1, used_bytes: 2, used_inodes: 3 };
        let daemon = scene.answer(vec![
            reply::Kind::Quiesced(quiesced),
            reply::Kind::Resumed(Resumed { held: true, paused_us: u64::MAX }),
        ]);
        let noted =
            std::sync::Arc::new(crate::daemon::notes::Hangs::default()).holding_back(&scene.volume_id);
        let paused = control
            .quiesce(Duration::from_secs(30), PassingWrites::Refused, noted)
            .unwrap()
            .resume()
            .unwrap()
            .paused;
        assert!(paused < Duration::from_secs(10), "{paused:?}");
        daemon.join().unwrap();
    }

    /// A daemon that was taken over passes /dev/fuse along, to keep its mount alive when
    /// it is killed.
    #[test]
    fn descriptors_of_a_daemon_are_closed_and_its_reply_is_an_error() {
        let scene = Scene::new();
        let control = scene.connect().unwrap();
        let daemon = scene.listener.accept().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let pong =
            Reply { kind: Some(reply::Kind::Pong(Pong { version: 1, ..Pong::default() })) }.encode_to_vec();
        for _ in 0..100 {
            daemon.send(&pong, &[std::os::fd::AsFd::as_fd(&writer); 16]).unwrap();
            let err = control.ping().unwrap_err();
            let text = crate::error::chain(&err);
            assert!(text.contains("descriptors in a packet that may carry none"), "{text}");
        }
        drop(writer);
        // At once: no copy is open in this process, which is driver and daemon here.
        assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_daemon_that_never_stops_sending_costs_one_packet_a_request() {
        let scene = Scene::new();
        let control = scene.connect().unwrap();
        let daemon = scene.listener.accept().unwrap();
        daemon.set_timeout(LIMIT).unwrap();
        let flood = thread::spawn(move || {
            let mut sent = 0_u32;
            while daemon.send(&[0xff; 1000], &[]).is_ok() {
                sent += 1;
            }
            sent
        });
        for _ in 0..3 {
            let err = control.usage().unwrap_err();
            assert!(err.to_string().contains("refused GetUsage: no Reply"), "{err}");
        }
        // The rest waits in the socket, which is bounded, until the connection is closed.
        drop(control);
        assert!(flood.join().unwrap() < 10_000);
    }

    #[test]
    fn a_daemon_that_sends_a_byte_now_and_then_is_refused_or_silent() {
        let scene = Scene::new();
        let control = scene.connect().unwrap();
        let daemon = scene.listener.accept().unwrap();
        daemon.send(&[0x0a], &[]).unwrap();
        let err = control.ping().unwrap_err();
        assert!(matches!(err, Error::ControlRefused { what: "Ping", .. }), "{err}");
        let begun = std::time::Instant::now();
        let err = control.ping().unwrap_err();
        assert!(matches!(err, Error::Silent { .. }) && begun.elapsed() < 10 * LIMIT, "{err}");
        let refused = reply::Kind::Refused(Refused { reason: "x".repeat(60_000), is_precondition: false });
        daemon.send(&Reply { kind: Some(refused) }.encode_to_vec(), &[]).unwrap();
        assert!(control.ping().unwrap_err().to_string().len() < 1000);
        daemon.send(&[0; 100_000], &[]).unwrap();
        let err = control.ping().unwrap_err();
        assert!(crate::error::chain(&err).contains("of more than 65536 bytes"), "{err}");
    }

    #[test]
    fn a_daemon_of_an_older_or_newer_version_answers_a_ping() {
        let scene = Scene::new();
        let control = scene.connect().unwrap();
        let versions = [(0, None), (VERSION, None), (VERSION + 1, Some(VERSION + 1))];
        let pongs = versions.map(|(version, _)| reply::Kind::Pong(Pong { version, ..Pong::default() }));
        let daemon = scene.answer(pongs.into());
        for (version, newer) in versions {
            control.ping().unwrap();
            assert_eq!(newer_version(&Pong { version, ..Pong::default() }), newer, "version {version}");
        }
        daemon.join().unwrap();
    }

    #[test]
    fn each_fault_has_its_own_error() {
        let scene = Scene::new();
        let silent = scene.connect().unwrap();
        let err = silent.ping().unwrap_err();
        assert!(matches!(err, Error::Silent { what: "Ping", limit: LIMIT, .. }), "{err}");
        drop(scene.listener.accept().unwrap());
        let err = silent.usage().unwrap_err();
        assert!(matches!(err, Error::ControlLost { what: "GetUsage", .. }), "{err}");

        let control = scene.connect().unwrap();
        let refused =
            reply::Kind::Refused(Refused { reason: "cannot shrink".into(), is_precondition: false });
        let daemon = scene.answer(vec![
            refused,
            reply::Kind::Pong(Pong { version: 1, ..Pong::default() }),
            reply::Kind::Done(Done {}),
        ]);
        let err = control.set_capacity(VolumeLimits { bytes: 1, inodes: 1024 }).unwrap_err();
        assert!(err.to_string().ends_with("refused SetCapacity: cannot shrink"), "{err}");
        let err = control.set_capacity(VolumeLimits { bytes: 1, inodes: 1024 }).unwrap_err();
        assert!(matches!(err, Error::ControlRefused { .. }), "another kind of reply: {err}");
        control.set_capacity(VolumeLimits { bytes: 1, inodes: 1024 }).unwrap();
        daemon.join().unwrap();

        let Scene { dir, volume_id, listener } = scene;
        drop(listener);
        let dial = DialDir::of(dir.path(), &volume_id);
        // A child that another test has just forked holds a copy of the listener until it execs.
        let mut connects = std::iter::repeat_with(|| Control::connect(&dial, &volume_id, LIMIT)).take(10_000);
        let err = connects.find_map(Result::err).expect("the listener is closed");
        assert!(matches!(err, Error::ControlLost { .. }), "{err}");
        std::fs::remove_file(dial.control_socket()).unwrap();
        let err = Control::connect(&dial, &volume_id, LIMIT).unwrap_err();
        assert!(matches!(err, Error::NoControl { .. }), "{err}");
    }
}
