//! sendmsg(2) and recvmsg(2) of one packet, with descriptors, that never wait.
//!
//! Invariant: descriptors that arrive are owned from the first moment, so none stays open without an
//! owner.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{MsgFlags, MultiHeaders, sendmmsg};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::wire::Refusal;
use crate::wire::daemon::MOST_NODES;

/// Descriptors beside one packet (SCM_MAX_FD in include/net/scm.h). With less space, the kernel closes
/// what is too much, and may wait for a file system meanwhile.
const MOST_DESCRIPTORS: usize = 253;

/// One packet.
#[derive(Debug)]
pub(crate) struct Received {
    /// In the caller's buffer.
    pub(crate) bytes: usize,
    /// The packet was longer than the buffer.
    pub(crate) is_longer: bool,
    pub(crate) fds: Vec<OwnedFd>,
    /// More descriptors were sent than arrived: this process may not open more.
    pub(crate) lost_fds: bool,
}

/// Sends all or nothing.
pub(crate) fn send(socket: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_NODES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let parts = [IoSlice::new(packet)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(&socket, &parts, &mut control, flags))?;
    Ok(())
}

/// Sends packets without descriptors in their order, by one system call, so that their reader is woken once. Returns
/// how many were sent.
///
/// # Errors
///
/// None was sent.
pub(crate) fn send_many<const BYTES: usize>(
    socket: impl AsFd,
    packets: &[[u8; BYTES]],
) -> Result<usize, Errno> {
    let parts: Vec<[IoSlice<'_>; 1]> = packets.iter().map(|packet| [IoSlice::new(packet)]).collect();
    // The socket is connected.
    let addresses: Vec<Option<()>> = vec![None; parts.len()];
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    loop {
        let mut headers = MultiHeaders::preallocate(parts.len(), None);
        let socket = socket.as_fd().as_raw_fd();
        match sendmmsg(socket, &mut headers, &parts, &addresses, [], flags) {
            Ok(sent) => return Ok(sent.count()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(Errno::from_raw_os_error(e as i32)),
        }
    }
}

pub(crate) fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        rustix::net::recvmsg(&socket, &mut parts, &mut control, flags)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(Received {
        bytes: received.bytes,
        is_longer: received.flags.contains(ReturnFlags::TRUNC),
        fds,
        lost_fds: received.flags.contains(ReturnFlags::CTRUNC),
    })
}

impl Received {
    /// Neither bytes nor descriptors: the end of a connection, or an empty packet.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0 && self.fds.is_empty() && !self.lost_fds
    }

    /// The descriptor of a packet that needs one. Those of a wrong packet stay.
    pub(crate) fn take_descriptor(&mut self, is_needed: bool) -> Result<Option<OwnedFd>, Refusal> {
        match (is_needed, self.fds.len()) {
            (true, _) if self.lost_fds => Err(Refusal::Full),
            (true, 0) => Err(Refusal::NoDescriptor),
            (true, 1) => Ok(self.fds.pop()),
            (false, 0) if !self.lost_fds => Ok(None),
            _ => Err(Refusal::Descriptors),
        }
    }
}

/// Whether the other end was closed. Without it, the end of a connection cannot be told from an
/// empty packet.
pub(crate) fn has_hung_up(socket: impl AsFd) -> bool {
    state(socket, PollFlags::RDHUP).intersects(PollFlags::RDHUP | PollFlags::HUP)
}

/// Whether packets can be sent: at least three quarters of the buffer are free (net/unix/af_unix.c,
/// `unix_writable`).
pub(crate) fn is_writable(socket: impl AsFd) -> bool {
    state(socket, PollFlags::OUT).contains(PollFlags::OUT)
}

/// Whether a packet waits, or the other end was closed.
pub(crate) fn is_readable(socket: impl AsFd) -> bool {
    !state(socket, PollFlags::IN | PollFlags::RDHUP).is_empty()
}

/// Whether the process behind a pidfd has ended.
pub(crate) fn has_ended(pidfd: impl AsFd) -> bool {
    state(pidfd, PollFlags::IN).contains(PollFlags::IN)
}

/// Whether a FUSE connection was aborted or unmounted (fs/fuse/dev.c, `fuse_dev_poll`).
pub(crate) fn is_aborted(connection: impl AsFd) -> bool {
    state(connection, PollFlags::empty()).contains(PollFlags::ERR)
}

fn state(socket: impl AsFd, of: PollFlags) -> PollFlags {
    let mut polled = [PollFd::new(&socket, of)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Refused only for want of memory: then the next event asks again.
    match rustix::io::retry_on_intr(|| poll(&mut polled, Some(&now))) {
        Ok(_) => polled[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}
