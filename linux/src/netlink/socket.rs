//! One blocking routing socket: a request, then its answers in order.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NetlinkDeserializable, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_sys::protocols::NETLINK_ROUTE;

/// The kernel fills at most 32 KiB per datagram of a dump (`netlink_dump`).
const DATAGRAM_MAX: usize = 64 * 1024;

/// Invariant: between requests nothing is left unread, except messages of a multicast group.
#[derive(Debug)]
pub(super) struct Socket {
    inner: netlink_sys::Socket,
    /// The last request's number; other answers are ignored.
    sequence: Cell<u32>,
    /// The buffer for one datagram.
    buffer: RefCell<Vec<u8>>,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        // Bound by the first message to the kernel (`netlink_autobind`).
        let inner = netlink_sys::Socket::new(NETLINK_ROUTE)?;
        // Dumps are then filtered by the request's header. Kernels before 4.20 lack the option and
        // send everything.
        let _unknown_option = inner.set_netlink_get_strict_chk(true);
        Ok(Self { inner, sequence: Cell::new(0), buffer: RefCell::new(Vec::with_capacity(DATAGRAM_MAX)) })
    }

    pub(super) fn join(&mut self, group: u32) -> io::Result<()> {
        self.inner.bind_auto()?;
        self.inner.add_membership(group)
    }

    /// Returns the answers, and whether they are one consistent state.
    pub(super) fn request<M>(&self, message: M, flags: u16) -> io::Result<(Vec<M>, bool)>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
        NetlinkMessage<M>: From<M>,
    {
        let mut request = NetlinkMessage::from(message);
        let sequence = self.sequence.get().wrapping_add(1);
        self.sequence.set(sequence);
        request.header.flags = flags;
        request.header.sequence_number = sequence;
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        retry(|| self.inner.send(&bytes, 0))?;

        let is_dump = flags & NLM_F_DUMP == NLM_F_DUMP;
        let (mut answers, mut consistent) = (Vec::new(), true);
        loop {
            let datagram = self.receive()?;
            let mut rest = datagram.as_slice();
            while !rest.is_empty() {
                let answer = NetlinkMessage::<M>::deserialize(rest)
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
                let advance = usize::try_from(answer.header.length).unwrap_or(usize::MAX).next_multiple_of(4);
                rest = rest.get(advance..).unwrap_or_default();
                if answer.header.sequence_number != sequence {
                    continue;
                }
                consistent &= !is_dump || answer.header.flags & NLM_F_DUMP_INTR == 0;
                match answer.payload {
                    NetlinkPayload::InnerMessage(inner) => {
                        answers.push(inner);
                        if !is_dump && flags & NLM_F_ACK == 0 {
                            return Ok((answers, true));
                        }
                    }
                    NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                    NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok((answers, consistent)),
                    _ => {}
                }
            }
        }
    }

    /// Reads and drops one datagram; for sockets in a multicast group.
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
