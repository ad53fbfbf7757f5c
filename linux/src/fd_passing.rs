//! Packets with file descriptors between processes: SOCK_SEQPACKET unix
//! sockets (unix(7)), one message a packet, SCM_RIGHTS beside it.

#![expect(unsafe_code, reason = "raw descriptors from the kernel become owned ones")]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
};

use crate::{Error, Result};

/// Largest packet and most descriptors of one [`PacketSocket::receive`].
const MAX_PACKET_BYTES: usize = 64 * 1024;
const MAX_FDS: usize = 8;

/// Who is at the other end, as of its connect(2) or listen(2) (SO_PEERCRED).
/// `pid` is in the reader's pid namespace, 0 when it has none there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug)]
pub struct PacketListener {
    fd: OwnedFd,
    path: PathBuf,
}

#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketListener {
    /// Binds `path`, which must be free and at most 107 bytes long. The socket
    /// is close-on-exec; its file is left to the caller to remove.
    pub fn bind(path: &Path) -> Result<Self> {
        let fd = new_socket(path)?;
        let address = UnixAddr::new(path).map_err(|e| Error::at("bind", path, e))?;
        socket::bind(fd.as_raw_fd(), &address).map_err(|e| Error::at("bind", path, e))?;
        socket::listen(&fd, Backlog::new(8).expect("8 is a valid backlog"))
            .map_err(|e| Error::at("listen on", path, e))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Blocks until somebody dials.
    pub fn accept(&self) -> Result<PacketSocket> {
        loop {
            match socket::accept4(self.fd.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
                // SAFETY: accept4(2) just returned it and nothing else knows it.
                Ok(raw) => return Ok(PacketSocket { fd: unsafe { OwnedFd::from_raw_fd(raw) } }),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(Error::at("accept on", &self.path, e)),
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The descriptor alone, for another process to accept on.
impl From<PacketListener> for OwnedFd {
    fn from(listener: PacketListener) -> Self {
        listener.fd
    }
}

impl AsFd for PacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl PacketSocket {
    pub fn connect(path: &Path) -> Result<Self> {
        let fd = new_socket(path)?;
        let address = UnixAddr::new(path).map_err(|e| Error::at("connect", path, e))?;
        socket::connect(fd.as_raw_fd(), &address).map_err(|e| Error::at("connect", path, e))?;
        Ok(Self { fd })
    }

    /// [`Self::connect`] that gives up with `EAGAIN` when the listener's queue stays
    /// full for `limit`; afterwards as after [`Self::set_timeout`].
    pub fn connect_within(path: &Path, limit: std::time::Duration) -> Result<Self> {
        let socket = Self { fd: new_socket(path)? };
        let address = UnixAddr::new(path).map_err(|e| Error::at("connect", path, e))?;
        let deadline = std::time::Instant::now() + limit;
        let mut left = limit;
        loop {
            socket.set_timeout(left)?;
            match socket::connect(socket.fd.as_raw_fd(), &address) {
                Ok(()) => break,
                // A signal, while it waited: it waits for the rest. (No time at all would be no limit.)
                Err(Errno::EINTR) => {
                    left = deadline.saturating_duration_since(std::time::Instant::now());
                    left = left.max(std::time::Duration::from_millis(1));
                }
                Err(e) => return Err(Error::at("connect", path, e)),
            }
        }
        socket.set_timeout(limit)?;
        Ok(socket)
    }

    /// Both ends of a private connection.
    pub fn pair() -> Result<(Self, Self)> {
        socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map(|(a, b)| (Self { fd: a }, Self { fd: b }))
            .map_err(|e| Error::new("socketpair", "seqpacket", e))
    }

    pub fn send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        loop {
            let sent = socket::sendmsg::<UnixAddr>(
                self.fd.as_raw_fd(),
                &[IoSlice::new(packet)],
                control,
                MsgFlags::MSG_NOSIGNAL,
                None,
            );
            match sent {
                // A packet goes whole or not at all.
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(Error::new("send packet", format!("{} bytes", packet.len()), e)),
            }
        }
    }

    /// One packet and its descriptors (close-on-exec), or `None` at the end.
    pub fn receive(&self) -> Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let mut packet = vec![0; MAX_PACKET_BYTES];
        let mut control = nix::cmsg_space!([RawFd; MAX_FDS]);
        let (length, fds) = loop {
            let mut buffers = [IoSliceMut::new(&mut packet)];
            let received = socket::recvmsg::<UnixAddr>(
                self.fd.as_raw_fd(),
                &mut buffers,
                Some(&mut control),
                MsgFlags::MSG_CMSG_CLOEXEC,
            );
            match received {
                Ok(message) => {
                    let mut fds = Vec::new();
                    for item in
                        message.cmsgs().map_err(|e| Error::new("receive packet", "control data", e))?
                    {
                        if let ControlMessageOwned::ScmRights(raw) = item {
                            // SAFETY: the kernel installed these descriptors for this
                            // recvmsg(2) alone; each is converted exactly once.
                            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                        }
                    }
                    if message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
                        return Err(Error::new("receive packet", "truncated", Errno::EMSGSIZE));
                    }
                    break (message.bytes, fds);
                }
                Err(Errno::EINTR) => {}
                Err(e) => return Err(Error::new("receive packet", "", e)),
            }
        };
        if length == 0 && fds.is_empty() {
            return Ok(None);
        }
        packet.truncate(length);
        Ok(Some((packet, fds)))
    }

    pub fn peer(&self) -> Result<PeerCredentials> {
        let cred = socket::getsockopt(&self.fd, socket::sockopt::PeerCredentials)
            .map_err(|e| Error::new("getsockopt", "SO_PEERCRED", e))?;
        Ok(PeerCredentials { pid: cred.pid(), uid: cred.uid(), gid: cred.gid() })
    }

    /// Makes [`Self::receive`] and [`Self::send`] fail with `EAGAIN` after `timeout` without progress.
    pub fn set_timeout(&self, timeout: std::time::Duration) -> Result<()> {
        let value = nix::sys::time::TimeVal::new(
            timeout.as_secs().try_into().unwrap_or(i64::MAX),
            timeout.subsec_micros().into(),
        );
        socket::setsockopt(&self.fd, socket::sockopt::ReceiveTimeout, &value)
            .and_then(|()| socket::setsockopt(&self.fd, socket::sockopt::SendTimeout, &value))
            .map_err(|e| Error::new("setsockopt", "SO_RCVTIMEO", e))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn new_socket(path: &Path) -> Result<OwnedFd> {
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
        .map_err(|e| Error::at("socket for", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_descriptor_arrives_as_the_same_open_file() {
        let (a, b) = PacketSocket::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        a.send(b"here", &[file.as_fd()]).unwrap();
        let (packet, fds) = b.receive().unwrap().unwrap();
        assert_eq!(packet, b"here");
        let [fd] = <[OwnedFd; 1]>::try_from(fds).unwrap();
        std::fs::File::from(fd).write_all(b"shared offset").unwrap();
        file.rewind().unwrap();
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, "shared offset");
    }

    #[test]
    fn the_other_ends_close_is_the_end() {
        let (a, b) = PacketSocket::pair().unwrap();
        drop(a);
        assert!(b.receive().unwrap().is_none());
    }

    #[test]
    fn a_full_queue_of_a_listener_that_never_accepts_is_waited_for_until_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let listener = PacketListener::bind(&dir.path().join("s")).unwrap();
        let limit = std::time::Duration::from_millis(50);
        let queued: Vec<_> =
            (0..64).map_while(|_| PacketSocket::connect_within(listener.path(), limit).ok()).collect();
        assert!(!queued.is_empty() && queued.len() < 64, "{}", queued.len());
        let refused = PacketSocket::connect_within(listener.path(), limit).unwrap_err();
        assert_eq!(refused.errno(), Errno::EAGAIN);
        drop(listener);
        let refused = PacketSocket::connect_within(&dir.path().join("s"), limit).unwrap_err();
        assert_eq!(refused.errno(), Errno::ECONNREFUSED);
    }

    #[test]
    fn the_dialler_is_known_by_its_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let listener = PacketListener::bind(&dir.path().join("s")).unwrap();
        let _dialler = PacketSocket::connect(listener.path()).unwrap();
        let peer = listener.accept().unwrap().peer().unwrap();
        assert_eq!(peer.pid, std::process::id().cast_signed());
    }
}
