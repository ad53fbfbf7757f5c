//! Descriptors on a connection to the driver: the socket to another keeper, and what a successor of
//! this daemon needs.
//!
//! Invariant: a descriptor is received only with a packet that was seen to ask for it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::descriptors::MOST;

/// Takes the next packet, and the one descriptor beside it. All are closed if there are more.
pub(super) fn receive_one(socket: impl AsFd) -> Result<OwnedFd, String> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    // Its drop closes what is left in it.
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // The packet was read before; the rest of it is dropped.
    let mut first = [0];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut first)], &mut control, flags)
    });
    let received = received.map_err(|errno| format!("receive a descriptor: {errno}"))?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    // The kernel rounds the buffer's size up.
    match descriptors.pop() {
        Some(one) if descriptors.is_empty() && !received.flags.contains(ReturnFlags::CTRUNC) => Ok(one),
        Some(_) => Err("more than one descriptor beside the packet".to_owned()),
        None => Err("no descriptor beside the packet".to_owned()),
    }
}

/// Never waits.
pub(super) fn send(socket: impl AsFd, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags).map(drop)
}
