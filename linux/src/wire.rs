//! Netlink messages, as every family has them (`include/uapi/linux/netlink.h`):
//! a header, the family's own header, attributes. No I/O.

pub(crate) mod attributes;

/// Bytes of a message's header: length, type, flags, sequence number, port.
pub(crate) const HEADER: usize = 16;

/// `NLMSG_*`.
pub(crate) const ERROR: u16 = 2;
pub(crate) const DONE: u16 = 3;

/// `NLM_F_*`.
pub(crate) const REQUEST: u16 = 0x1;
pub(crate) const ACK: u16 = 0x4;
#[cfg(feature = "netlink")]
pub(crate) const ECHO: u16 = 0x8;
pub(crate) const DUMP_INTR: u16 = 0x10;
#[cfg(feature = "netlink")]
pub(crate) const EXCL: u16 = 0x200;
#[cfg(feature = "netlink")]
pub(crate) const CREATE: u16 = 0x400;
pub(crate) const DUMP: u16 = 0x300;

/// A message as it was received.
pub(crate) struct Answer<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    /// Behind the header.
    pub(crate) body: &'a [u8],
}

impl Answer<'_> {
    /// Of an error message or the end of a dump: what it refuses with, as
    /// errno(3) numbers it; `None` for a success.
    pub(crate) fn refused_with(&self) -> Option<i32> {
        let code = self.body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
        (code < 0).then(|| code.saturating_neg())
    }
}

/// The messages of one datagram; what is torn is the end.
pub(crate) struct Answers<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = Answer<'a>;

    fn next(&mut self) -> Option<Answer<'a>> {
        let (header, _) = self.0.split_at_checked(HEADER)?;
        let length = usize::try_from(u32::from_ne_bytes(header.get(..4)?.try_into().ok()?)).ok()?;
        let body = self.0.get(HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Answer {
            kind: u16::from_ne_bytes(header.get(4..6)?.try_into().ok()?),
            flags: u16::from_ne_bytes(header.get(6..8)?.try_into().ok()?),
            sequence: u32::from_ne_bytes(header.get(8..12)?.try_into().ok()?),
            body,
        })
    }
}
