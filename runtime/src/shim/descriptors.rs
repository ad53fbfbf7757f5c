//! File descriptors beside the bytes of a stream socket (SCM_RIGHTS, unix(7)).
//!
//! The kernel delivers them with the first byte that they were sent with, or before it. A recvmsg(2)
//! that has received some ends with the last byte that they were sent with, so the order of
//! descriptors is the order of bytes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Returns the number of sent bytes. The descriptors go with the first one.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(descriptors.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "the space is for as many");
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// What recvmsg(2) has received.
#[derive(Debug)]
pub(crate) struct Received {
    /// 0 at the end.
    pub(crate) bytes: usize,
    /// Descriptors were lost: this process has too many (EMFILE).
    pub(crate) is_cut: bool,
}

/// Appends descriptors (close-on-exec) that came with the bytes. More than `most` are an error (EBADMSG), and all
/// are closed.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    most: usize,
) -> rustix::io::Result<Received> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(most))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let mut buffers = [IoSliceMut::new(bytes)];
        rustix::net::recvmsg(&socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut found = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            found.extend(rights);
        }
    }
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    // The kernel rounds the buffer's size up.
    if found.len() > most || (is_cut && found.len() == most) {
        return Err(Errno::BADMSG);
    }
    descriptors.append(&mut found);
    Ok(Received { bytes: received.bytes, is_cut })
}
