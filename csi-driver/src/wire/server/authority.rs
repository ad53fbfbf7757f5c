//! Makes every client's requests acceptable to h2: rewrites the bytes from client to server on one
//! connection, and replaces every `:authority` by [`AUTHORITY`].
//!
//! A client that dials a unix socket by its path may send `:authority: %2Fvar%2Flib%2F...sock`:
//! kubelet does at the registration socket, gRPC's C core and Java always. h2 answers that with a
//! stream error (docs/decisions/0001-registration-listener.md). Frames without a header block pass
//! unchanged. Header blocks are decoded and written as plain literals, so the receiver's dynamic
//! table stays empty.

use super::hpack::{self, Decoder, HpackError};

/// The authority of every request: a unix socket has only one host.
const AUTHORITY: &[u8] = b"localhost";

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER_BYTES: usize = 9;
/// SETTINGS_MAX_FRAME_SIZE's initial value; h2 announces no other.
const MAX_PAYLOAD_BYTES: usize = 16 * 1024;
/// Largest header block, before decoding. What a gRPC client sends is below 1 KiB.
const MAX_BLOCK_BYTES: usize = 64 * 1024;
/// An endless row of empty CONTINUATION frames is a known attack.
const MAX_CONTINUATIONS: u32 = 16;

const TYPE_HEADERS: u8 = 0x1;
const TYPE_CONTINUATION: u8 = 0x9;
const FLAG_END_STREAM: u8 = 0x1;
const FLAG_END_HEADERS: u8 = 0x4;
const FLAG_PADDED: u8 = 0x8;
const FLAG_PRIORITY: u8 = 0x20;

/// The connection is broken: the following bytes cannot be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("no HTTP/2 connection preface")]
    Preface,
    #[error("frame of {length} bytes, above {MAX_PAYLOAD_BYTES}")]
    FrameTooLarge { length: usize },
    #[error("HEADERS frame shorter than its padding and priority")]
    Padding,
    #[error("frame of type {frame_type:#x} within a header block")]
    Interrupted { frame_type: u8 },
    #[error("header block above {MAX_BLOCK_BYTES} bytes or {MAX_CONTINUATIONS} continuations")]
    BlockTooLarge,
    #[error("header block")]
    Hpack(#[source] HpackError),
}

/// The state of one connection. The limits above bound its memory.
#[derive(Debug)]
pub(super) struct AuthorityRewriter {
    /// Received, but not a whole frame yet.
    pending: Vec<u8>,
    preface_seen: bool,
    open_block: Option<OpenBlock>,
    decoder: Decoder,
}

/// A header block without its END_HEADERS so far.
#[derive(Debug)]
struct OpenBlock {
    stream: [u8; 4],
    end_stream: u8,
    block: Vec<u8>,
    continuations: u32,
}

impl AuthorityRewriter {
    pub(super) fn new() -> Self {
        Self { pending: Vec::new(), preface_seen: false, open_block: None, decoder: Decoder::default() }
    }

    /// Takes received bytes, and appends whole rewritten frames to `out`, for h2.
    pub(super) fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        self.pending.extend_from_slice(input);
        let pending = std::mem::take(&mut self.pending);
        let mut rest = &pending[..];
        if !self.preface_seen {
            let known = rest.len().min(PREFACE.len());
            if rest[..known] != PREFACE[..known] {
                return Err(Malformed::Preface);
            }
            if known == PREFACE.len() {
                self.preface_seen = true;
                out.extend_from_slice(PREFACE);
                rest = &rest[known..];
            }
        }
        while self.preface_seen
            && let Some((header, tail)) = rest.split_first_chunk::<FRAME_HEADER_BYTES>()
        {
            let length = usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
            if length > MAX_PAYLOAD_BYTES {
                return Err(Malformed::FrameTooLarge { length });
            }
            let Some((payload, tail)) = tail.split_at_checked(length) else { break };
            self.frame(header, payload, out)?;
            rest = tail;
        }
        self.pending = rest.to_vec();
        Ok(())
    }

    fn frame(
        &mut self,
        header: &[u8; FRAME_HEADER_BYTES],
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Malformed> {
        let [_, _, _, frame_type, flags, stream @ ..] = *header;
        let open = match (self.open_block.take(), frame_type) {
            (None, TYPE_HEADERS) => OpenBlock {
                stream,
                end_stream: flags & FLAG_END_STREAM,
                block: header_fragment(flags, payload)?.to_vec(),
                continuations: 0,
            },
            // A stray CONTINUATION passes too: h2 rejects it.
            (None, _) => {
                out.extend_from_slice(header);
                out.extend_from_slice(payload);
                return Ok(());
            }
            (Some(mut open), TYPE_CONTINUATION) if open.stream == stream => {
                open.block.extend_from_slice(payload);
                open.continuations += 1;
                if open.block.len() > MAX_BLOCK_BYTES || open.continuations > MAX_CONTINUATIONS {
                    return Err(Malformed::BlockTooLarge);
                }
                open
            }
            (Some(_), _) => return Err(Malformed::Interrupted { frame_type }),
        };
        if flags & FLAG_END_HEADERS == 0 {
            self.open_block = Some(open);
            return Ok(());
        }
        self.whole_block(&open, out)
    }

    fn whole_block(&mut self, open: &OpenBlock, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let mut fields = self.decoder.decode(&open.block).map_err(Malformed::Hpack)?;
        for field in fields.iter_mut().filter(|f| f.name == b":authority") {
            field.value = AUTHORITY.to_vec();
        }
        let block = hpack::encode_literals(&fields);
        let mut fragments = block.chunks(MAX_PAYLOAD_BYTES).peekable();
        let first = fragments.next().unwrap_or_default();
        let end_if_last = |last: bool| if last { FLAG_END_HEADERS } else { 0 };
        let flags = open.end_stream | end_if_last(fragments.peek().is_none());
        put_frame(out, TYPE_HEADERS, flags, open.stream, first);
        while let Some(fragment) = fragments.next() {
            put_frame(out, TYPE_CONTINUATION, end_if_last(fragments.peek().is_none()), open.stream, fragment);
        }
        Ok(())
    }
}

/// The block fragment of a HEADERS payload, without padding and priority (RFC 9113, 6.2).
fn header_fragment(flags: u8, payload: &[u8]) -> Result<&[u8], Malformed> {
    let mut rest = payload;
    let mut padding = 0;
    if flags & FLAG_PADDED != 0 {
        let (length, tail) = rest.split_first().ok_or(Malformed::Padding)?;
        (padding, rest) = (usize::from(*length), tail);
    }
    if flags & FLAG_PRIORITY != 0 {
        rest = rest.get(5..).ok_or(Malformed::Padding)?;
    }
    rest.len().checked_sub(padding).map(|end| &rest[..end]).ok_or(Malformed::Padding)
}

fn put_frame(out: &mut Vec<u8>, frame_type: u8, flags: u8, stream: [u8; 4], payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a fragment is at most MAX_PAYLOAD_BYTES").to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[frame_type, flags]);
    out.extend_from_slice(&stream);
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::super::hpack::Field;
    use super::*;

    const STREAM: [u8; 4] = [0, 0, 0, 1];

    fn frame(frame_type: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        put_frame(&mut out, frame_type, flags, STREAM, payload);
        out
    }

    fn request() -> Vec<Field> {
        [(":method", "POST"), (":authority", "%2Fvar%2Flib%2Fx-reg.sock"), ("te", "trailers")]
            .map(|(n, v)| Field { name: n.into(), value: v.into() })
            .to_vec()
    }

    /// What h2 gets for `input`, fed in pieces of `piece` bytes.
    fn rewritten(input: &[u8], piece: usize) -> Result<Vec<u8>, Malformed> {
        let mut rewriter = AuthorityRewriter::new();
        let mut out = Vec::new();
        for part in [PREFACE, input].concat().chunks(piece) {
            rewriter.feed(part, &mut out)?;
        }
        Ok(out[PREFACE.len()..].to_vec())
    }

    fn headers_of(out: &[u8]) -> Vec<Field> {
        Decoder::default().decode(&out[FRAME_HEADER_BYTES..]).unwrap()
    }

    #[test]
    fn the_authority_is_replaced_and_the_rest_kept_however_the_bytes_arrive() {
        let input =
            frame(TYPE_HEADERS, FLAG_END_HEADERS | FLAG_END_STREAM, &hpack::encode_literals(&request()));
        for piece in [1, 7, 4096] {
            let out = rewritten(&input, piece).unwrap();
            assert_eq!(out[3..9], [TYPE_HEADERS, FLAG_END_HEADERS | FLAG_END_STREAM, 0, 0, 0, 1]);
            let fields = headers_of(&out);
            assert_eq!(fields[1].value, AUTHORITY);
            assert_eq!((&fields[0], &fields[2]), (&request()[0], &request()[2]));
        }
    }

    #[test]
    fn padding_priority_and_continuations_are_understood() {
        let block = hpack::encode_literals(&request());
        let (head, tail) = block.split_at(5);
        let mut padded = vec![3, 0, 0, 0, 0, 200];
        padded.extend_from_slice(head);
        padded.extend_from_slice(&[0; 3]);
        let input = [
            frame(TYPE_HEADERS, FLAG_PADDED | FLAG_PRIORITY, &padded),
            frame(TYPE_CONTINUATION, 0, b""),
            frame(TYPE_CONTINUATION, FLAG_END_HEADERS, tail),
        ]
        .concat();
        let out = rewritten(&input, 4096).unwrap();
        assert_eq!(out[4], FLAG_END_HEADERS);
        assert_eq!(headers_of(&out)[1].value, AUTHORITY);
    }

    /// What grpc-go does from its second request on: the authority is a table entry.
    #[test]
    fn an_authority_from_the_dynamic_table_is_replaced_too() {
        let mut first = vec![0x41, 0x04];
        first.extend_from_slice(b"%2Fx");
        let input =
            [frame(TYPE_HEADERS, FLAG_END_HEADERS, &first), frame(TYPE_HEADERS, FLAG_END_HEADERS, &[0xbe])]
                .concat();
        let out = rewritten(&input, 4096).unwrap();
        let (one, two) = out.split_at(out.len() / 2);
        assert_eq!(one, two);
        assert_eq!(headers_of(two), [Field { name: b":authority".to_vec(), value: AUTHORITY.to_vec() }]);
    }

    #[test]
    fn a_block_larger_than_a_frame_leaves_in_several() {
        let mut fields = request();
        fields.push(Field { name: b"x-long".to_vec(), value: vec![b'v'; 20_000] });
        let block = hpack::encode_literals(&fields);
        let input = [
            frame(TYPE_HEADERS, 0, &block[..MAX_PAYLOAD_BYTES]),
            frame(TYPE_CONTINUATION, FLAG_END_HEADERS, &block[MAX_PAYLOAD_BYTES..]),
        ]
        .concat();
        let out = rewritten(&input, 4096).unwrap();
        let second = FRAME_HEADER_BYTES + MAX_PAYLOAD_BYTES;
        assert_eq!(out[3..5], [TYPE_HEADERS, 0]);
        assert_eq!(out[second + 3..second + 5], [TYPE_CONTINUATION, FLAG_END_HEADERS]);
    }

    #[test]
    fn frames_without_headers_pass_untouched() {
        let data = frame(0, 1, b"\0\0\0\0\0");
        let settings = frame(4, 0, &[]);
        let input = [settings, data].concat();
        assert_eq!(rewritten(&input, 3).unwrap(), input);
    }

    #[test]
    fn malformed_connections_are_refused_each_with_its_reason() {
        let endless: Vec<u8> = std::iter::once(frame(TYPE_HEADERS, 0, b""))
            .chain(std::iter::repeat_n(frame(TYPE_CONTINUATION, 0, b""), 100))
            .flatten()
            .collect();
        let large: Vec<u8> = std::iter::once(frame(TYPE_HEADERS, 0, b""))
            .chain(std::iter::repeat_n(frame(TYPE_CONTINUATION, 0, &[0; MAX_PAYLOAD_BYTES]), 5))
            .flatten()
            .collect();
        for (input, reason) in [
            (vec![0x00, 0x40, 0x01, 0, 0, 0, 0, 0, 1], Malformed::FrameTooLarge { length: 16385 }),
            (frame(TYPE_HEADERS, FLAG_END_HEADERS | FLAG_PADDED, &[9, 0]), Malformed::Padding),
            (frame(TYPE_HEADERS, FLAG_END_HEADERS | FLAG_PADDED, &[]), Malformed::Padding),
            (frame(TYPE_HEADERS, FLAG_END_HEADERS | FLAG_PRIORITY, &[0; 4]), Malformed::Padding),
            (frame(TYPE_HEADERS, FLAG_END_HEADERS, &[0x80]), Malformed::Hpack(HpackError::Index)),
            (
                [frame(TYPE_HEADERS, 0, b""), frame(0, 0, b"")].concat(),
                Malformed::Interrupted { frame_type: 0 },
            ),
            (endless, Malformed::BlockTooLarge),
            (large, Malformed::BlockTooLarge),
        ] {
            assert_eq!(rewritten(&input, 4096), Err(reason));
        }
        let mut rewriter = AuthorityRewriter::new();
        assert_eq!(rewriter.feed(b"GET / HTTP/1.1\r\n", &mut Vec::new()), Err(Malformed::Preface));
    }
}
