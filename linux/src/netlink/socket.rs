//! One blocking routing socket: a request, then its answers in order.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_core::{
    DecodeError, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkDeserializable,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::messages::mask_texts;

/// The kernel fills at most 32 KiB per datagram of a dump (`netlink_dump`).
const DATAGRAM_MAX: usize = 64 * 1024;
/// Smaller message types are netlink's own (`NLMSG_MIN_TYPE`): `NLMSG_DONE`, `NLMSG_ERROR`.
const FIRST_CONTENT_TYPE: u16 = 0x10;
const RTM_NEWLINK: u16 = 16;

/// What becomes of an answer that cannot be decoded. The kernel accepts any bytes in a link's name and
/// alias; the decoder accepts only UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undecodable {
    /// The request fails with `InvalidData`.
    Refused,
    LeftOut,
    /// [`mask_texts`], and [`Self::Refused`] if that is not enough.
    Masked,
}

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

    /// Returns the answers, with masked texts; `InvalidData` if one of them cannot be decoded.
    pub(super) fn request<M>(&self, message: M, flags: u16) -> io::Result<Vec<M>>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
        NetlinkMessage<M>: From<M>,
    {
        let sequence = self.send(message, flags)?;
        let (answers, _) = self.answers(sequence, flags, Undecodable::Masked)?;
        Ok(answers)
    }

    /// Returns the answers, and whether they are one consistent state.
    pub(super) fn dump<M>(&self, message: M, undecodable: Undecodable) -> io::Result<(Vec<M>, bool)>
    where
        M: NetlinkSerializable + NetlinkDeserializable,
        NetlinkMessage<M>: From<M>,
    {
        let flags = NLM_F_REQUEST | NLM_F_DUMP;
        let sequence = self.send(message, flags)?;
        self.answers(sequence, flags, undecodable)
    }

    /// Returns the request's number.
    fn send<M>(&self, message: M, flags: u16) -> io::Result<u32>
    where
        M: NetlinkSerializable,
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
        Ok(sequence)
    }

    fn answers<M: NetlinkDeserializable>(
        &self,
        sequence: u32,
        flags: u16,
        undecodable: Undecodable,
    ) -> io::Result<(Vec<M>, bool)> {
        let is_dump = flags & NLM_F_DUMP == NLM_F_DUMP;
        let (mut answers, mut consistent, mut refused) = (Vec::new(), true, None);
        loop {
            let datagram = self.receive()?;
            let mut rest = datagram.as_slice();
            while !rest.is_empty() {
                let bytes = rest;
                let header = NetlinkBuffer::new_checked(bytes).map_err(invalid)?;
                let length = usize::try_from(header.length()).unwrap_or(usize::MAX);
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                if header.sequence_number() != sequence {
                    continue;
                }
                consistent &= !is_dump || header.flags() & NLM_F_DUMP_INTR == 0;
                let mut ended = !is_dump && flags & NLM_F_ACK == 0;
                match decode::<M>(bytes, header.message_type(), undecodable).map(|answer| answer.payload) {
                    Ok(NetlinkPayload::InnerMessage(inner)) => answers.push(inner),
                    Ok(NetlinkPayload::Error(error)) if error.code.is_some() => return Err(error.to_io()),
                    Ok(NetlinkPayload::Error(_) | NetlinkPayload::Done(_)) => ended = true,
                    Ok(_) => ended = false,
                    Err(e) if header.message_type() < FIRST_CONTENT_TYPE => return Err(invalid(e)),
                    // The other answers are read all the same: the kernel refuses a dump during another.
                    Err(e) if undecodable != Undecodable::LeftOut => refused = Some(invalid(e)),
                    Err(_) => {}
                }
                if ended {
                    return refused.map_or(Ok((answers, consistent)), Err);
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

/// `bytes` begin with the message.
fn decode<M: NetlinkDeserializable>(
    bytes: &[u8],
    kind: u16,
    undecodable: Undecodable,
) -> Result<NetlinkMessage<M>, DecodeError> {
    let decoded = NetlinkMessage::<M>::deserialize(bytes);
    if decoded.is_ok() || undecodable != Undecodable::Masked || kind != RTM_NEWLINK {
        return decoded;
    }
    let mut masked = bytes.to_vec();
    mask_texts(&mut masked);
    NetlinkMessage::<M>::deserialize(&masked)
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
