//! One blocking netfilter socket: a request with its answers, or a batch that the kernel applies as
//! a whole.
//!
//! Closing such a socket waits until nf_tables has freed everything deleted in the namespace, by
//! any program, which takes one or two RCU grace periods (`nft_rcv_nl_event`, `synchronize_rcu`).
//! Measured on Linux 6.18 with two CPUs: 5 to 16 ms after a deletion, 7 to 11 ms after adding an
//! existing chain (the kernel frees its record of the change in the same way), 9 µs otherwise.
//! Waiting 5 ms before the close left 7 to 11 ms. No flag avoids it.
//!
//! So the last reference is left to the kernel: the socket is put into a queue that only refers to
//! itself, and the kernel's garbage collector for sockets (`net/unix/garbage.c`, a worker since
//! 6.8) closes it. That takes 15 to 50 µs. Before 6.8, the closing process runs the collector and
//! waits as before. The rules are out of the packets' path when the commit returns.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, setsockopt, socketpair, sockopt,
};

use crate::attributes::{find_text, put_u32};

/// The kernel fills at most 32 KiB of each datagram of a dump (`netlink_dump`), and no more than a
/// reader has offered before.
const DATAGRAM_MAX: usize = 64 * 1024;
/// Batch size that needs no larger send buffer (`wmem_default` is 208 KiB, which includes the
/// kernel's overhead).
const BATCH_UNASKED: usize = 100 * 1024;

const NLMSG_HEADER: usize = 16;
const NFGENMSG: usize = 4;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLM_F_DUMP: u16 = 0x300;
const NLMSGERR_ATTR_MSG: u16 = 1;

const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `NFNL_BATCH_GENID`.
const BATCH_GENERATION: u16 = 1;

/// A request with one answer.
pub(crate) const ONE: u16 = 0;
/// A request for all objects.
pub(crate) const DUMP: u16 = NLM_F_DUMP;

/// An error from the kernel.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// For a batch, the index of its failed message; `None` for the batch as a whole (another
    /// generation, no memory).
    pub(crate) message: Option<usize>,
    pub(crate) error: io::Error,
    /// The kernel's error text (extended ack), if any.
    pub(crate) words: Option<String>,
}

impl Refusal {
    pub(crate) fn errno(&self) -> Option<Errno> {
        self.error.raw_os_error().map(Errno::from_raw)
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self { message: None, error, words: None }
    }
}

/// Consecutive messages with their headers, in the kernel's format. Sequence numbers are set when
/// they are sent.
#[derive(Debug, Default, Clone)]
pub(crate) struct Messages {
    bytes: Vec<u8>,
    /// The offset of each message.
    starts: Vec<usize>,
}

/// One message of [`Messages`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) family: u8,
    pub(crate) attributes: &'a [u8],
}

impl Messages {
    pub(crate) fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Appends a message; `attributes` writes its content.
    pub(crate) fn push(&mut self, kind: u16, flags: u16, family: u8, attributes: impl FnOnce(&mut Vec<u8>)) {
        self.push_for(kind, flags, family, 0, attributes);
    }

    pub(crate) fn get(&self, index: usize) -> Option<Message<'_>> {
        let start = *self.starts.get(index)?;
        let end = self.starts.get(index + 1).copied().unwrap_or(self.bytes.len());
        let message = self.bytes.get(start..end)?;
        let kind = u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?);
        let (header, attributes) = message.split_at_checked(NLMSG_HEADER + NFGENMSG)?;
        Some(Message { kind, family: *header.get(NLMSG_HEADER)?, attributes })
    }

    fn push_for(
        &mut self,
        kind: u16,
        flags: u16,
        family: u8,
        resource: u16,
        attributes: impl FnOnce(&mut Vec<u8>),
    ) {
        let start = self.bytes.len();
        self.starts.push(start);
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        self.bytes.extend([0; 8]);
        self.bytes.extend([family, 0]);
        self.bytes.extend(resource.to_be_bytes());
        attributes(&mut self.bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    fn number_from(&mut self, first: u32) {
        let mut sequence = first;
        for start in &self.starts {
            self.bytes[start + 8..start + 12].copy_from_slice(&sequence.to_ne_bytes());
            sequence = sequence.wrapping_add(1);
        }
    }

    fn ask_for_answer(&mut self, index: usize) {
        if let Some(start) = self.starts.get(index) {
            // NLM_F_ACK is in the low byte of the flags.
            let at = start + if cfg!(target_endian = "little") { 6 } else { 7 };
            self.bytes[at] |= NLM_F_ACK.to_le_bytes()[0];
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    /// All messages except `left_out`.
    pub(crate) fn without(&self, left_out: &[usize]) -> Self {
        let mut kept = Self::default();
        for (index, start) in self.starts.iter().enumerate() {
            if !left_out.contains(&index) {
                let end = self.starts.get(index + 1).copied().unwrap_or(self.bytes.len());
                kept.starts.push(kept.bytes.len());
                kept.bytes.extend_from_slice(&self.bytes[*start..end]);
            }
        }
        kept
    }

    fn append(&mut self, other: &Self) {
        let offset = self.bytes.len();
        self.bytes.extend_from_slice(&other.bytes);
        self.starts.extend(other.starts.iter().map(|start| offset + start));
    }
}

/// Invariant: between calls no answer is left unread.
#[derive(Debug)]
pub(crate) struct Socket {
    inner: netlink_sys::Socket,
    /// The last message's number; answers to earlier ones are ignored.
    sequence: Cell<u32>,
    /// Closed after `inner`: then only the kernel holds `inner`'s socket.
    collector: Option<OwnedFd>,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let mut inner = netlink_sys::Socket::new(NETLINK_NETFILTER)?;
        inner.bind_auto()?;
        // Optional: without it, errors have no text, and are longer.
        let _without_text = inner.set_ext_ack(true);
        let _longer = inner.set_cap_ack(true);
        Ok(Self { inner, sequence: Cell::new(0), collector: None })
    }

    /// Sends one request, passes the attributes and family of every answer to `each`, and returns
    /// whether the answers are one state.
    pub(crate) fn request(
        &self,
        kind: u16,
        flags: u16,
        family: u8,
        attributes: impl FnOnce(&mut Vec<u8>),
        mut each: impl FnMut(u8, &[u8]) -> io::Result<()>,
    ) -> Result<bool, Refusal> {
        let mut request = Messages::default();
        request.push(kind, flags | NLM_F_ACK, family, attributes);
        let sequence = self.take_numbers(1);
        request.number_from(sequence);
        self.send(&request.bytes)?;

        let (mut consistent, mut datagram) = (true, Vec::new());
        // After an answer that cannot be parsed, the others must still be read.
        let mut misread = None;
        loop {
            self.receive(&mut datagram, 0)?;
            for answer in Answers(&datagram) {
                if answer.sequence != sequence {
                    continue;
                }
                consistent &= answer.flags & NLM_F_DUMP_INTR == 0;
                match answer.kind {
                    NLMSG_ERROR => {
                        refusal(&answer, None).map_or(Ok(()), Err)?;
                        return misread.map_or(Ok(consistent), |e: io::Error| Err(e.into()));
                    }
                    NLMSG_DONE => {
                        // An interrupted dump reports that here (netlink_dump_done).
                        if let Some(refused) = refusal(&answer, None) {
                            return Err(refused);
                        }
                        return misread.map_or(Ok(consistent), |e| Err(e.into()));
                    }
                    _ if misread.is_some() => {}
                    _ => match answer.body.split_at_checked(NFGENMSG) {
                        Some((header, attributes)) => misread = each(header[0], attributes).err(),
                        None => misread = Some(io::ErrorKind::InvalidData.into()),
                    },
                }
            }
        }
    }

    /// Sends all of `messages` to `subsystem` in one call. The kernel applies all or nothing;
    /// nothing if the rule set has changed since `generation` (`ERESTART`).
    ///
    /// A batch is processed before the sending call returns, so all answers can be read without
    /// waiting. Only the last message requests one (errors are always sent), since thousands of
    /// answers would not fit.
    pub(crate) fn transact(
        &self,
        subsystem: u16,
        generation: u32,
        messages: &Messages,
    ) -> Result<(), Refusal> {
        let mut batch = Messages::default();
        batch.push_for(BATCH_BEGIN, 0, 0, subsystem, |bytes| {
            put_u32(bytes, BATCH_GENERATION, generation);
        });
        batch.append(messages);
        batch.push_for(BATCH_END, 0, 0, subsystem, |_| {});
        let count = u32::try_from(batch.starts.len()).unwrap_or(u32::MAX);
        let last = count.saturating_sub(2);
        batch.ask_for_answer(last as usize);
        let first = self.take_numbers(count);
        batch.number_from(first);
        self.make_room_for(batch.bytes.len())?;
        self.send(&batch.bytes)?;

        let (mut done, mut refused, mut datagram) = (false, None::<Refusal>, Vec::new());
        loop {
            match self.receive(&mut datagram, libc::MSG_DONTWAIT) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // There were more errors than fit; the first ones are available.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => continue,
                Err(e) => return Err(e.into()),
            }
            for answer in Answers(&datagram) {
                let index = answer.sequence.wrapping_sub(first);
                if index >= count || answer.kind != NLMSG_ERROR {
                    continue;
                }
                // Begin and end messages stand for the batch as a whole.
                let message = (1..=last).contains(&index).then(|| index as usize - 1);
                match refusal(&answer, message) {
                    Some(error) => refused = refused.or(Some(error)),
                    None => done |= index == last,
                }
            }
        }
        match refused {
            Some(refused) => Err(refused),
            None if done => Ok(()),
            None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the batch was not answered").into()),
        }
    }

    fn take_numbers(&self, count: u32) -> u32 {
        let first = self.sequence.get().wrapping_add(1);
        self.sequence.set(first.wrapping_add(count).wrapping_sub(1));
        first
    }

    /// A send reports sizes that are refused (`EMSGSIZE`).
    fn make_room_for(&self, length: usize) -> io::Result<()> {
        if length <= BATCH_UNASKED {
            return Ok(());
        }
        // The kernel doubles the value; the limit applies to each message.
        if setsockopt(&self.inner, sockopt::SndBufForce, &length).is_err() {
            setsockopt(&self.inner, sockopt::SndBuf, &length)?;
        }
        Ok(())
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.inner.send(bytes, 0) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent.map(drop),
            }
        }
    }

    fn receive(&self, datagram: &mut Vec<u8>, flags: i32) -> io::Result<()> {
        loop {
            datagram.clear();
            datagram.reserve(DATAGRAM_MAX);
            match self.inner.recv(datagram, flags) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                received => return received.map(drop),
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // If the collector cannot be used, the socket is closed as any other.
        self.collector = leave_to_collector(self.inner.as_fd()).ok();
    }
}

/// Puts `fd` and one socket of a pair into that socket's queue. Once `fd` and the other socket,
/// which is returned, are closed, all of it is garbage for the kernel's collector.
fn leave_to_collector(fd: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    let (open, queued) = socketpair(AddressFamily::Unix, SockType::Datagram, None, SockFlag::SOCK_CLOEXEC)?;
    let fds = [fd.as_raw_fd(), queued.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(open.as_raw_fd(), &[IoSlice::new(&[0])], &rights, MsgFlags::MSG_DONTWAIT, None)?;
    Ok(open)
}

struct Answer<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages of one datagram; stops at a torn one.
struct Answers<'a>(&'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = Answer<'a>;

    fn next(&mut self) -> Option<Answer<'a>> {
        let (header, _) = self.0.split_at_checked(NLMSG_HEADER)?;
        let length = usize::try_from(u32::from_ne_bytes(header.get(..4)?.try_into().ok()?)).ok()?;
        let body = self.0.get(NLMSG_HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Answer {
            kind: u16::from_ne_bytes(header.get(4..6)?.try_into().ok()?),
            flags: u16::from_ne_bytes(header.get(6..8)?.try_into().ok()?),
            sequence: u32::from_ne_bytes(header.get(8..12)?.try_into().ok()?),
            body,
        })
    }
}

/// The error in an error message or at the end of a dump; `None` for code 0, a success.
fn refusal(answer: &Answer<'_>, message: Option<usize>) -> Option<Refusal> {
    let code = answer.body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
    if code >= 0 {
        return None;
    }
    Some(Refusal {
        message,
        error: io::Error::from_raw_os_error(code.saturating_neg()),
        words: words(answer),
    })
}

/// After the code comes the request (only its header, if capped), then the attributes.
fn words(answer: &Answer<'_>) -> Option<String> {
    if answer.flags & NLM_F_ACK_TLVS == 0 {
        return None;
    }
    let behind = if answer.kind == NLMSG_DONE {
        4
    } else if answer.flags & NLM_F_CAPPED != 0 {
        4 + NLMSG_HEADER
    } else {
        let length = u32::from_ne_bytes(answer.body.get(4..8)?.try_into().ok()?);
        4 + usize::try_from(length).ok()?.next_multiple_of(4)
    };
    find_text(answer.body.get(behind..)?, NLMSGERR_ATTR_MSG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_numbered_aligned_and_found_again() {
        let mut messages = Messages::default();
        messages.push(7, 0, 2, |bytes| bytes.extend(*b"abcde"));
        messages.push(9, 0, 10, |_| {});
        messages.number_from(u32::MAX);
        let first = messages.get(0).unwrap();
        assert_eq!((first.kind, first.family), (7, 2));
        assert_eq!(first.attributes, b"abcde\0\0\0");
        let last = Some(Message { kind: 9, family: 10, attributes: &[] });
        assert_eq!(messages.get(1), last);
        assert_eq!(messages.get(2), None);
        assert_eq!(messages.without(&[0]).get(0), last);
        assert_eq!(messages.without(&[1]).get(0), messages.get(0));
        let numbers: Vec<u32> = Answers(&messages.bytes).map(|m| m.sequence).collect();
        assert_eq!(numbers, [u32::MAX, 0]);
    }

    #[test]
    fn torn_datagrams_end_the_answers() {
        let mut messages = Messages::default();
        messages.push(7, 0, 2, |bytes| bytes.extend(*b"abcd"));
        for length in 0..messages.bytes.len() {
            assert_eq!(Answers(&messages.bytes[..length]).count(), 0, "{length} bytes");
        }
        assert_eq!(Answers(&[0; 64]).take(100).count(), 0, "a length of 0 is no message");
    }

    #[test]
    fn a_dropped_socket_is_closed_soon() {
        let socket = Socket::open().unwrap();
        let mut address = netlink_sys::SocketAddr::new(0, 0);
        socket.inner.get_address(&mut address).unwrap();
        let port = address.port_number().to_string();
        // Columns: kernel address, protocol, port.
        let is_open = || {
            let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
            sockets.lines().any(|line| {
                let mut columns = line.split_whitespace().skip(1);
                columns.next() == Some("12") && columns.next() == Some(&port)
            })
        };
        assert!(is_open());
        drop(socket);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while is_open() {
            assert!(std::time::Instant::now() < deadline, "port {port} is still open");
            std::thread::yield_now();
        }
    }
}
