//! The daemon's side of the hand-over: Hello, Assignment with five descriptors,
//! Answer (proto/proto/hawser/handover/v1/handover.proto).

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::fd_passing::PacketSocket;
use prost::Message;
use proto::handover::{Answer, Assignment as Wire, Failed, Hello, Ready, answer};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::control::Listeners;
use crate::quota::Limits;
use crate::volume::Source;
use crate::{Error, Result, config};

pub const PROTOCOL_VERSION: u32 = 2;

/// The driver waits for us, so it is slow only when the whole node is.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the driver names no limit: twice as many take about 200 MiB.
const KNOWN_INODE_LIMIT: usize = 500_000;

/// Major and minor number of /dev/fuse (Documentation/admin-guide/devices.txt).
const FUSE_DEVICE: (u32, u32) = (10, 229);

/// Connected, nothing said.
#[derive(Debug)]
pub struct Dialled {
    socket: PacketSocket,
    path: PathBuf,
}

/// Said Hello, owes an Answer.
#[derive(Debug)]
pub struct Assigned {
    socket: PacketSocket,
}

/// What the driver wants served, checked.
#[derive(Debug)]
pub struct Assignment {
    pub volume_name: String,
    /// `None`: our default.
    pub threads: Option<usize>,
    pub fuse_device: OwnedFd,
    pub volume: Source,
    pub(crate) limits: Limits,
    /// Inodes, beyond which the kernel is asked to forget.
    pub(crate) known_inode_limit: usize,
    pub listeners: Listeners,
    /// Where the use is kept from one daemon to the next.
    pub usage_file: OwnedFd,
}

impl Dialled {
    pub fn dial(path: &Path) -> Result<Self> {
        let socket = PacketSocket::connect(path).map_err(dial_error)?;
        socket.set_timeout(PATIENCE).map_err(dial_error)?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Says Hello and waits for the Assignment. One that cannot be served is
    /// answered with Failed.
    pub fn receive_assignment(self, nonce: String) -> Result<(Assignment, Assigned)> {
        let hello = Hello { version: PROTOCOL_VERSION, nonce };
        self.socket.send(&hello.encode_to_vec(), &[]).map_err(|e| self.refused_or(e))?;
        let checked = match self.socket.receive_with_fds() {
            Ok(Some((packet, descriptors))) => Assignment::check(&packet, descriptors, &self.path),
            Ok(None) => return Err(self.refused()),
            Err(wrong) if wrong.errno() == nix::errno::Errno::EBADMSG => {
                let (socket, reason) = (self.path.clone(), wrong.object);
                Err(Error::Assignment { socket, field: "descriptors", reason })
            }
            Err(e) => return Err(self.refused_or(e)),
        };
        let assigned = Assigned { socket: self.socket };
        match checked {
            Ok(assignment) => Ok((assignment, assigned)),
            Err(error) => {
                assigned.failed(&error);
                Err(error)
            }
        }
    }

    fn refused(&self) -> Error {
        Error::Refused { socket: self.path.clone(), version: PROTOCOL_VERSION }
    }

    /// A driver that closes without reading resets the connection.
    fn refused_or(&self, error: linux::Error) -> Error {
        use nix::errno::Errno::{ECONNRESET, EPIPE};
        if matches!(error.errno(), ECONNRESET | EPIPE) { self.refused() } else { dial_error(error) }
    }
}

impl Assigned {
    /// The volume is served from now on. Closes the connection.
    pub fn ready(self, max_write_bytes: u32) -> Result<()> {
        self.answer(answer::Result::Ready(Ready { max_write_bytes }))
            .map_err(|source| Error::Kernel { step: "hand-over answer", source })
    }

    /// Closes the connection.
    pub fn failed(self, error: &Error) {
        let failed = answer::Result::Failed(Failed { reason: error.chain() });
        if let Err(unsent) = self.answer(failed) {
            // The driver sees the connection close instead, and we exit non-zero.
            tracing::debug!(error = %unsent, "could not tell the driver");
        }
    }

    fn answer(self, result: answer::Result) -> linux::Result<()> {
        self.socket.send(&Answer { result: Some(result) }.encode_to_vec(), &[])
    }
}

impl Assignment {
    fn check(packet: &[u8], descriptors: [OwnedFd; 5], socket: &Path) -> Result<Self> {
        let wrong = |field, reason: String| Error::Assignment { socket: socket.to_owned(), field, reason };
        let wire = Wire::decode(packet).map_err(|e| wrong("packet", e.to_string()))?;
        let [fuse_device, directory, control, metrics, usage_file] = descriptors;
        check_fuse_device(&fuse_device).map_err(|reason| wrong("first descriptor", reason))?;
        check_directory(&directory).map_err(|reason| wrong("second descriptor", reason))?;
        check_listener(&control, SocketType::SEQPACKET)
            .map_err(|reason| wrong("third descriptor", reason))?;
        check_listener(&metrics, SocketType::STREAM).map_err(|reason| wrong("fourth descriptor", reason))?;
        check_usage_file(&usage_file).map_err(|reason| wrong("fifth descriptor", reason))?;
        let threads = match usize::try_from(wire.threads) {
            Ok(0) => None,
            Ok(threads) if threads <= config::MAX_THREADS => Some(threads),
            _ => {
                let limit = config::MAX_THREADS;
                return Err(wrong("threads", format!("{} is more than {limit}", wire.threads)));
            }
        };
        Ok(Self {
            volume_name: wire.volume_name,
            threads,
            fuse_device,
            volume: Source { directory, read_only: wire.read_only },
            limits: Limits { bytes: wire.capacity_bytes, inodes: wire.inode_limit },
            known_inode_limit: match wire.known_inode_limit {
                0 => KNOWN_INODE_LIMIT,
                limit => usize::try_from(limit).unwrap_or(usize::MAX),
            },
            listeners: Listeners { control, metrics },
            usage_file,
        })
    }
}

fn check_fuse_device(fd: &OwnedFd) -> std::result::Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::CharacterDevice || device != FUSE_DEVICE {
        return Err(format!("not /dev/fuse but {kind:?}, device {}:{}", device.0, device.1));
    }
    Ok(())
}

/// Where `..` leads anywhere but back, the whole host would be in the volume.
fn check_directory(fd: &OwnedFd) -> std::result::Result<(), String> {
    let seen = |name: &str| {
        rustix::fs::statx(fd, name, AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
            .map_err(|e| e.to_string())
    };
    let (own, parent) = (seen("")?, seen("..")?);
    let identity = |s: &rustix::fs::Statx| (s.stx_dev_major, s.stx_dev_minor, s.stx_ino, s.stx_mnt_id);
    if identity(&own) != identity(&parent) {
        return Err("not the root of a detached mount: .. leads out of the volume".to_owned());
    }
    Ok(())
}

fn check_listener(fd: &OwnedFd, wanted: SocketType) -> std::result::Result<(), String> {
    let refused = |e: Errno| format!("not a socket: {e}");
    let (domain, kind) =
        (sockopt::socket_domain(fd).map_err(refused)?, sockopt::socket_type(fd).map_err(refused)?);
    if domain != AddressFamily::UNIX || kind != wanted {
        return Err(format!("not a unix socket of {wanted:?} but {domain:?}, {kind:?}"));
    }
    match sockopt::socket_acceptconn(fd) {
        Ok(true) => Ok(()),
        Ok(false) => Err("a socket that does not listen".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn check_usage_file(fd: &OwnedFd) -> std::result::Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| e.to_string())?;
    if kind != FileType::RegularFile || flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(format!("not a regular file open for reading and writing but {kind:?}, {flags:?}"));
    }
    Ok(())
}

fn dial_error(source: linux::Error) -> Error {
    Error::Kernel { step: "hand-over", source }
}
