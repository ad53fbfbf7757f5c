//! Packets with file descriptors between processes: SOCK_SEQPACKET unix
//! sockets (unix(7)), one message a packet, SCM_RIGHTS beside it.
//!
//! Invariant: an untrusted sender cannot leave a descriptor open here. A caller that expects none
//! receives without a control buffer; a caller that expects some gives the maximum.

#![expect(unsafe_code, reason = "raw descriptors from the kernel become owned ones")]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use crate::{Error, Result};

/// Largest packet that can be received.
const MAX_PACKET_BYTES: usize = 64 * 1024;

/// The peer's credentials at the time of its connect(2) or listen(2) (SO_PEERCRED). `pid` is in the
/// reader's pid namespace, 0 if it has none there.
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

/// One side of a connection.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketListener {
    /// Binds `path`, which must be free and have at most 107 bytes. The socket is close-on-exec;
    /// the caller must remove its file.
    pub fn bind(path: &Path) -> Result<Self> {
        let fd = new_socket(path)?;
        let address = UnixAddr::new(path).map_err(|e| Error::at("bind", path, e))?;
        socket::bind(fd.as_raw_fd(), &address).map_err(|e| Error::at("bind", path, e))?;
        socket::listen(&fd, Backlog::new(8).expect("8 is a valid backlog"))
            .map_err(|e| Error::at("listen on", path, e))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Blocks until a process connects.
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

/// The descriptor alone, so that another process can accept on it.
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

    /// [`Self::connect`] that fails with `EAGAIN` if the listener's queue stays full for `limit`.
    /// Afterwards the socket has that timeout, as after [`Self::set_timeout`].
    pub fn connect_within(path: &Path, limit: std::time::Duration) -> Result<Self> {
        let socket = Self { fd: new_socket(path)? };
        let address = UnixAddr::new(path).map_err(|e| Error::at("connect", path, e))?;
        let deadline = std::time::Instant::now() + limit;
        let mut left = limit;
        loop {
            socket.set_timeout(left)?;
            match socket::connect(socket.fd.as_raw_fd(), &address) {
                Ok(()) => break,
                // After a signal it waits for the rest of the time. (A limit of zero would mean
                // none.)
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

    /// Both sockets of a private connection.
    pub fn pair() -> Result<(Self, Self)> {
        socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map(|(a, b)| (Self { fd: a }, Self { fd: b }))
            .map_err(|e| Error::new("socketpair", "seqpacket", e))
    }

    /// Sends one packet with these descriptors, whole or not at all. Blocks while the peer's queue is
    /// full. `EPIPE`, without a signal, if the peer has closed the connection.
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
                // A packet is sent completely or not at all.
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(Error::new("send packet", format!("{} bytes", packet.len()), e)),
            }
        }
    }

    /// Receives one packet, or `None` at the end of the connection. The kernel gets no control
    /// buffer, so it never installs a descriptor here: a packet with descriptors is an error
    /// (EBADMSG), and the kernel closes them.
    pub fn receive(&self) -> Result<Option<Vec<u8>>> {
        let mut none = RecvAncillaryBuffer::new(&mut []);
        let (packet, flags) = self.receive_message(&mut none)?;
        if flags.contains(ReturnFlags::CTRUNC) {
            return Err(refused("descriptors in a packet that may carry none"));
        }
        Ok((!packet.is_empty()).then_some(packet))
    }

    /// Receives one packet with at most `most` descriptors (close-on-exec), or `None` at the end of
    /// the connection. More are an error (EBADMSG), and all are closed.
    pub fn receive_with_fds(&self, most: usize) -> Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(most))];
        // Its drop closes the remaining descriptors, on every return path.
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (packet, flags) = self.receive_message(&mut control)?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        // The kernel rounds the buffer's size up.
        if flags.contains(ReturnFlags::CTRUNC) || fds.len() > most {
            return Err(refused(format!("more than {most} descriptors in a packet")));
        }
        Ok((!packet.is_empty() || !fds.is_empty()).then_some((packet, fds)))
    }

    fn receive_message(&self, control: &mut RecvAncillaryBuffer<'_>) -> Result<(Vec<u8>, ReturnFlags)> {
        let mut packet = vec![0; MAX_PACKET_BYTES];
        let received = rustix::io::retry_on_intr(|| {
            let mut buffers = [IoSliceMut::new(&mut packet)];
            rustix::net::recvmsg(&self.fd, &mut buffers, control, RecvFlags::CMSG_CLOEXEC)
        });
        let received = received.map_err(|e| Error::new("receive packet", "", e))?;
        if received.flags.contains(ReturnFlags::TRUNC) {
            let longer = format!("of more than {MAX_PACKET_BYTES} bytes");
            return Err(Error::new("receive packet", longer, Errno::EMSGSIZE));
        }
        packet.truncate(received.bytes);
        Ok((packet, received.flags))
    }

    /// The process that connected, or that listened, and not necessarily the one that holds the other
    /// side now.
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

/// The descriptor alone, so that another program can use the connection.
impl From<PacketSocket> for OwnedFd {
    fn from(socket: PacketSocket) -> Self {
        socket.fd
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn refused(what: impl std::fmt::Display) -> Error {
    Error::new("receive packet", what, Errno::EBADMSG)
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
        let (packet, mut fds) = b.receive_with_fds(2).unwrap().unwrap();
        let fd = fds.pop().unwrap();
        assert!(fds.is_empty());
        assert_eq!(packet, b"here");
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
        assert!(b.receive_with_fds(1).unwrap().is_none());
    }

    /// Sends `count` copies of a pipe's writing end, whose other copies are closed, beside
    /// `packet`; then `receive` is to leave none open, which the reading end shows.
    #[track_caller]
    fn assert_all_closed(
        packet: &[u8],
        count: usize,
        receive: impl FnOnce(&PacketSocket) -> Error,
    ) -> String {
        let (a, b) = PacketSocket::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        a.send(packet, &vec![writer.as_fd(); count]).unwrap();
        drop(writer);
        let error = receive(&b);
        let mut wait = [nix::poll::PollFd::new(reader.as_fd(), nix::poll::PollFlags::empty())];
        assert_eq!(nix::poll::poll(&mut wait, nix::poll::PollTimeout::ZERO).unwrap(), 1, "one is still open");
        assert_eq!(wait[0].revents(), Some(nix::poll::PollFlags::POLLHUP));
        a.send(b"next", &[]).unwrap();
        assert_eq!(b.receive().unwrap().unwrap(), b"next", "the connection goes on");
        error.to_string()
    }

    #[test]
    fn descriptors_are_closed_where_none_are_expected() {
        for (packet, count) in [(&b"reply"[..], 1), (b"reply", 250), (b"", 1)] {
            let error = assert_all_closed(packet, count, |socket| socket.receive().unwrap_err());
            assert_eq!(error, "receive packet descriptors in a packet that may carry none");
        }
    }

    #[test]
    fn descriptors_are_closed_where_fewer_are_expected() {
        // The rounded buffer holds more than one, so only the count detects the excess.
        for count in [2, 250] {
            let error = assert_all_closed(b"x", count, |s| s.receive_with_fds(1).unwrap_err());
            assert_eq!(error, "receive packet more than 1 descriptors in a packet");
        }
    }

    #[test]
    fn a_packet_that_is_too_long_is_refused_and_its_descriptors_are_closed() {
        let long = vec![0; MAX_PACKET_BYTES + 1];
        for receive in [
            |s: &PacketSocket| s.receive().unwrap_err(),
            |s: &PacketSocket| s.receive_with_fds(1).unwrap_err(),
        ] {
            let error = assert_all_closed(&long, 1, receive);
            assert_eq!(error, "receive packet of more than 65536 bytes");
        }
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
