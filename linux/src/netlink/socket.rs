//! One blocking routing socket: a request, its answers, in order.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::protocols::NETLINK_ROUTE;

use super::messages::Request;
use crate::wire::{self, Answers};

/// The kernel fills at most 32 KiB per datagram of a dump (`netlink_dump`).
const DATAGRAM_MAX: usize = 64 * 1024;

/// Invariant: between requests nothing is left unread, but for what a
/// multicast group sends.
#[derive(Debug)]
pub(super) struct Socket {
    inner: netlink_sys::Socket,
    /// Of the last request; answers with another one are not ours.
    sequence: Cell<u32>,
    /// Where datagrams are received, one at a time.
    buffer: RefCell<Vec<u8>>,
}

impl Socket {
    /// In the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        // Bound by the first message to the kernel (`netlink_autobind`).
        let inner = netlink_sys::Socket::new(NETLINK_ROUTE)?;
        // Dumps then filter by what the request's header names; kernels before
        // 4.20 do not know the option and send all.
        drop(inner.set_netlink_get_strict_chk(true));
        Ok(Self { inner, sequence: Cell::new(0), buffer: RefCell::new(Vec::with_capacity(DATAGRAM_MAX)) })
    }

    pub(super) fn join(&mut self, group: u32) -> io::Result<()> {
        self.inner.bind_auto()?;
        self.inner.add_membership(group)
    }

    /// Sends `request`, gives type and body (behind the netlink header) of every
    /// answer to `each`, and says whether the answers are one consistent state.
    pub(super) fn request(
        &self,
        request: &Request,
        flags: u16,
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<bool> {
        let sequence = self.sequence.get().wrapping_add(1);
        self.sequence.set(sequence);
        let bytes = request.to_bytes(flags | wire::REQUEST, sequence);
        retry(|| self.inner.send(&bytes, 0))?;

        let is_dump = flags & wire::DUMP == wire::DUMP;
        let mut consistent = true;
        loop {
            let datagram = self.receive()?;
            let mut answers = Answers(&datagram);
            for answer in answers.by_ref() {
                if answer.sequence != sequence {
                    continue;
                }
                consistent &= !is_dump || answer.flags & wire::DUMP_INTR == 0;
                match answer.kind {
                    wire::ERROR | wire::DONE => {
                        let refused = answer.refused_with().map(io::Error::from_raw_os_error);
                        return refused.map_or(Ok(consistent), Err);
                    }
                    kind => {
                        each(kind, answer.body);
                        if !is_dump && flags & wire::ACK == 0 {
                            return Ok(true);
                        }
                    }
                }
            }
            if !answers.0.is_empty() {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }

    /// Reads one datagram and forgets it; for sockets of a multicast group.
    pub(super) fn discard(&self) -> io::Result<()> {
        self.receive().map(drop)
    }

    fn receive(&self) -> io::Result<RefMut<'_, Vec<u8>>> {
        let mut datagram = self.buffer.borrow_mut();
        retry(|| {
            datagram.clear();
            self.inner.recv(&mut *datagram, 0)
        })?;
        Ok(datagram)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
