//! The daemon's side of the hand-over: Hello, Assignment with descriptors, Answer; in between Prepared
//! and Proceed, if an earlier daemon still serves (proto/proto/hawser/handover/v1/handover.proto).

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::chain;
use linux::fd_passing::PacketSocket;
use linux::process::SignalWait;
use nix::sys::signal::Signal;
use prost::Message;
use proto::handover::{
    Answer, Assignment as Wire, Capacity, DataPath, Failed, Hello, HelloReply, Prepared, Proceed, Ready,
    Role, UnknownVersion, VERSIONS, answer, assignment, hello_reply,
};
use proto::versions::Versions;
use rustix::net::SocketType;

use crate::config::{self, Start};
use crate::control::Listeners;
use crate::descriptors::{self, Descriptors, Wrong, check_fuse_device, check_listener, check_packet_socket};
use crate::error::{Error, Result};
use crate::figures::Limits;
use crate::service::{Service, VolumeTerms};

/// The driver waits for us, so it is slow only if the whole node is.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Used if the driver gives no limit: twice as many inodes take about 200 MiB.
const KNOWN_INODE_LIMIT: usize = 500_000;

type Checked<T> = std::result::Result<T, Wrong>;

/// Connected; nothing is sent yet.
#[derive(Debug)]
pub(crate) struct DriverConnection {
    socket: PacketSocket,
    path: PathBuf,
}

/// Hello is sent, and the Assignment received; the Answer is pending.
#[derive(Debug)]
pub(crate) struct PendingAnswer {
    socket: PacketSocket,
}

/// The driver's assignment, checked; `T` is the part for the backend.
#[derive(Debug)]
pub(crate) struct Assignment<T> {
    pub(crate) volume_name: String,
    /// `None`: the default of this program.
    pub(crate) threads: Option<usize>,
    pub(crate) fuse_device: OwnedFd,
    pub(crate) terms: VolumeTerms,
    pub(crate) listeners: Listeners,
    pub(crate) storage: T,
    pub(crate) succession: Option<Succession>,
}

/// What the driver gives a daemon so that it can leave its connection to another one.
#[derive(Debug)]
pub(crate) struct Succession {
    pub(crate) state_table: OwnedFd,
    /// `None`: the earlier daemon still serves, and the socket comes with Proceed.
    pub(crate) keeper: Option<OwnedFd>,
    /// An earlier daemon had the connection.
    pub(crate) continues: bool,
    /// What a successor of this daemon needs in turn.
    pub(crate) left: Vec<(Role, OwnedFd)>,
}

impl DriverConnection {
    pub(crate) fn dial(path: &Path) -> Result<Self> {
        let socket = PacketSocket::connect(path).map_err(dial_error)?;
        socket.set_timeout(TIMEOUT).map_err(dial_error)?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Sends Hello and waits for the Assignment, with no limit if the driver started this daemon
    /// ahead. Answers Failed to one that cannot be served. `None`: a daemon that was started ahead ends without a
    /// volume, because the driver has ended or because of SIGTERM. In a pod the daemon is the first process of its
    /// pid namespace, which gets only the signals that it waits for: without this, the pod would take its whole
    /// grace period to end.
    pub(crate) fn receive_assignment<S: Service>(
        self,
        nonce: String,
        start: Start,
        service: &S,
    ) -> Result<Option<(Assignment<S::Storage>, PendingAnswer)>> {
        let Versions { oldest: oldest_version, newest: newest_version } = VERSIONS;
        let hello = Hello { newest_version, nonce, oldest_version, release: config::RELEASE.to_owned() };
        let ahead = start == Start::Ahead;
        let ending = ahead.then(|| SignalWait::block(Signal::SIGTERM)).transpose().map_err(dial_error)?;
        self.socket.send(&hello.encode_to_vec(), &[]).map_err(|e| self.refused_or(e))?;
        if ahead {
            // Zero: no limit (socket(7), SO_RCVTIMEO).
            self.socket.set_timeout(Duration::ZERO).map_err(dial_error)?;
        }
        if let Some(ending) = ending
            && ending.precedes(&self.socket).map_err(dial_error)?
        {
            tracing::info!("SIGTERM ends this daemon, which had no volume");
            return Ok(None);
        }
        let (packet, descriptors) = match self.socket.receive_with_fds(descriptors::MOST) {
            Ok(Some(received)) => received,
            Ok(None) if ahead => {
                tracing::info!("the driver ended without a volume for this daemon");
                return Ok(None);
            }
            Ok(None) => return Err(self.refused()),
            Err(e) => return Err(self.refused_or(e)),
        };
        let checked = self.check(&packet, descriptors, |backend, rest| service.check(backend, rest));
        let pending = PendingAnswer { socket: self.socket };
        match checked {
            Ok(assignment) => Ok(Some((assignment, pending))),
            Err(error) => {
                pending.failed(&error);
                Err(error)
            }
        }
    }

    fn check<T>(
        &self,
        packet: &[u8],
        descriptors: Vec<OwnedFd>,
        check_backend: impl FnOnce(Option<assignment::Backend>, &mut Descriptors) -> Checked<T>,
    ) -> Result<Assignment<T>> {
        let wrong = |(field, reason)| Error::Assignment { socket: self.path.clone(), field, reason };
        let reply = HelloReply::decode(packet).map_err(|e| wrong(("packet", e.to_string())))?;
        match reply.kind {
            Some(hello_reply::Kind::Assignment(wire)) => {
                Assignment::check(wire, descriptors, check_backend).map_err(wrong)
            }
            Some(hello_reply::Kind::UnknownVersion(UnknownVersion { oldest_version, newest_version })) => {
                let (socket, driver) = (self.path.clone(), Versions::said(oldest_version, newest_version));
                Err(Error::Version { socket, own: VERSIONS, driver })
            }
            None => Err(wrong(("packet", "no HelloReply of this version".to_owned()))),
        }
    }

    fn refused(&self) -> Error {
        Error::Refused { socket: self.path.clone(), versions: VERSIONS }
    }

    /// A driver that closes the socket without reading resets the connection.
    fn refused_or(&self, error: linux::Error) -> Error {
        use nix::errno::Errno::{ECONNRESET, EPIPE};
        if matches!(error.errno(), ECONNRESET | EPIPE) { self.refused() } else { dial_error(error) }
    }
}

impl PendingAnswer {
    /// Reports that this daemon can follow the one that still serves, and waits until that one has
    /// ended. Returns the socket to the keeper. `None`: the driver does not want this daemon.
    pub(crate) fn wait_for_proceed(&self) -> Result<Option<OwnedFd>> {
        const STEP: &str = "wait for the earlier daemon's end";
        let kernel = |source| Error::Kernel { step: STEP, source };
        let wrong = |reason: String| Error::Proceed { reason };
        self.answer(answer::Result::Prepared(Prepared {})).map_err(kernel)?;
        let received = match self.socket.receive_with_fds(descriptors::MOST) {
            // A driver that ends without reading resets the connection.
            Err(e) if e.errno() == nix::errno::Errno::ECONNRESET => None,
            received => received.map_err(kernel)?,
        };
        let Some((packet, mut descriptors)) = received else { return Ok(None) };
        let Proceed {} = Proceed::decode(&*packet).map_err(|e| wrong(e.to_string()))?;
        let found = descriptors.len();
        let (Some(keeper), true) = (descriptors.pop(), found == 1) else {
            return Err(wrong(format!("{found} descriptors, not one")));
        };
        check_packet_socket(&keeper).map_err(|reason| wrong(format!("ROLE_KEEPER: {reason}")))?;
        Ok(Some(keeper))
    }

    /// Reports that the volume is served. Closes the connection.
    pub(crate) fn ready(self, ready: Ready) -> Result<()> {
        self.answer(answer::Result::Ready(ready))
            .map_err(|source| Error::Kernel { step: "hand-over answer", source })
    }

    /// Reports the error. Closes the connection.
    pub(crate) fn failed(self, error: &Error) {
        let failed = answer::Result::Failed(Failed { reason: chain(error) });
        if let Err(unsent) = self.answer(failed) {
            // The driver notices the closed connection instead, and we exit with an error.
            tracing::debug!(error = chain(&unsent), "could not report the failure to the driver");
        }
    }

    fn answer(&self, result: answer::Result) -> linux::Result<()> {
        self.socket.send(&Answer { result: Some(result) }.encode_to_vec(), &[])
    }
}

impl<T> Assignment<T> {
    fn check(
        wire: Wire,
        descriptors: Vec<OwnedFd>,
        check_backend: impl FnOnce(Option<assignment::Backend>, &mut Descriptors) -> Checked<T>,
    ) -> Checked<Self> {
        let mut descriptors = Descriptors::new(&wire.descriptors, descriptors)?;
        let left = if descriptors.has(Role::StateTable) { descriptors.for_successor()? } else { Vec::new() };
        let storage = check_backend(wire.backend, &mut descriptors)?;
        let threads = match usize::try_from(wire.threads) {
            Ok(0) => None,
            Ok(threads) if threads <= config::MAX_THREADS => Some(threads),
            _ => {
                let limit = config::MAX_THREADS;
                return Err(("threads", format!("{} is more than {limit}", wire.threads)));
            }
        };
        let data_path = known(wire.data_path).map_err(|reason| ("data_path", reason))?;
        let capacity = known(wire.capacity).map_err(|reason| ("capacity", reason))?;
        if (data_path, capacity) == (DataPath::Passthrough, Capacity::Daemon) {
            return Err(("capacity", "of the daemon, which sees no write that passes through".to_owned()));
        }
        let writeback_cache = wire.writeback_cache;
        if writeback_cache && (data_path == DataPath::Passthrough || wire.changed_from_outside) {
            let reason = match data_path {
                DataPath::Passthrough => "with a data path that passes the kernel's pages by",
                DataPath::Daemon => "for a directory that other programs change",
            };
            return Err(("writeback_cache", reason.to_owned()));
        }
        if wire.waits_for_proceed && !wire.continues {
            return Err(("waits_for_proceed", "without continues".to_owned()));
        }
        let succession = match descriptors.has(Role::StateTable) {
            true => Some(Succession {
                state_table: descriptors.take(Role::StateTable, |_| Ok(()))?,
                keeper: match wire.waits_for_proceed {
                    true => None,
                    false => Some(descriptors.take(Role::Keeper, check_packet_socket)?),
                },
                continues: wire.continues,
                left,
            }),
            false if wire.continues => {
                return Err(("continues", "no descriptor has ROLE_STATE_TABLE".to_owned()));
            }
            false => None,
        };
        let mut listener = |role, kind| descriptors.take(role, |fd| check_listener(fd, kind));
        let listeners = Listeners {
            control: listener(Role::ControlListener, SocketType::SEQPACKET)?,
            metrics: listener(Role::MetricsListener, SocketType::STREAM)?,
        };
        Ok(Self {
            volume_name: wire.volume_name,
            threads,
            fuse_device: descriptors.take(Role::FuseDevice, check_fuse_device)?,
            terms: VolumeTerms {
                read_only: wire.read_only,
                limits: Limits { bytes: wire.capacity_bytes, inodes: wire.inode_limit },
                known_inode_limit: match wire.known_inode_limit {
                    0 => KNOWN_INODE_LIMIT,
                    limit => usize::try_from(limit).unwrap_or(usize::MAX),
                },
                data_path,
                capacity,
                changed_from_outside: wire.changed_from_outside,
                writeback_cache,
            },
            listeners,
            storage,
            succession,
        })
    }
}

/// The value of an enumeration; a later version may have more.
fn known<T: TryFrom<i32>>(value: i32) -> std::result::Result<T, String> {
    T::try_from(value).map_err(|_| format!("{value}, which this daemon does not know"))
}

fn dial_error(source: linux::Error) -> Error {
    Error::Kernel { step: "hand-over", source }
}
