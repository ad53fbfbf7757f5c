//! SPDY/3.1 frames, as Kubernetes' clients use them: streams of the client, without flow control and
//! priorities. The server's side, and as much of the client's as [`super::spdy_client`] needs.
//!
//! Source: "SPDY Protocol - Draft 3.1". Flow control is left out: kubectl, kubelet and critest neither
//! limit what they send by it nor announce windows.
//!
//! Invariant: nothing is allocated because a frame says how long it is.

mod headers;

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::probe::Probe;

pub(super) use self::headers::Headers;
use self::headers::{Deflate, Inflate};

/// Above what any header block of a client has.
const MOST_CONTROL_BYTES: usize = 64 << 10;
const HEADER_BYTES: usize = 8;
const VERSION: u16 = 3;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;

const FIN: u8 = 1;

/// Why a stream cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reset {
    ProtocolError = 1,
    RefusedStream = 3,
    Cancel = 5,
    FlowControlError = 7,
}

/// A frame that the client has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// A new stream.
    Stream {
        id: u32,
        headers: Headers,
        is_last: bool,
    },
    /// Some of a stream's data. `is_last`: no more follows.
    Data {
        id: u32,
        bytes: Vec<u8>,
        is_last: bool,
    },
    Reset {
        id: u32,
    },
    Ping {
        id: u32,
    },
    GoAway,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error("read a frame")]
    Read {
        #[source]
        source: io::Error,
    },
    #[error("write a frame")]
    Write {
        #[source]
        source: io::Error,
    },
    #[error("the client speaks version {version} of SPDY, not 3")]
    Version { version: u16 },
    #[error("a control frame of type {kind} has {length} bytes")]
    Length { kind: u16, length: usize },
    #[error("a header block: {reason}")]
    Headers { reason: &'static str },
    #[error("{most} frames came before all streams were opened")]
    TooEarly { most: usize },
    #[error("the client opens stream {id} after stream {last}: numbers are odd and grow")]
    StreamNumber { id: u32, last: u32 },
}

/// Reads the client's frames.
#[derive(Debug)]
pub(super) struct Reader<R> {
    from: R,
    inflate: Inflate,
    /// The stream that was opened last.
    last: u32,
    /// Of the data frame that is being read.
    rest: Option<Rest>,
}

#[derive(Debug)]
struct Rest {
    id: u32,
    bytes: usize,
    is_last: bool,
}

/// Of a data frame, at a time.
const PIECE_BYTES: usize = 32 << 10;

impl<R: AsyncRead + Unpin> Reader<R> {
    pub(super) fn new(from: R) -> Self {
        Self { from, inflate: Inflate::new(), last: 0, rest: None }
    }

    /// `None` at the end of the connection. Frames that do not matter are left out.
    pub(super) async fn next(&mut self) -> Result<Option<Received>, Problem> {
        loop {
            if let Some(rest) = self.rest.take() {
                return self.piece(rest).await.map(Some);
            }
            let Some(header) = self.header().await? else { return Ok(None) };
            let [a, b, c, d, flags, length @ ..] = header;
            let length = usize::from(length[0]) << 16 | usize::from(length[1]) << 8 | usize::from(length[2]);
            if a & 0x80 == 0 {
                let id = u32::from_be_bytes([a, b, c, d]);
                self.rest = Some(Rest { id, bytes: length, is_last: flags & FIN != 0 });
                continue;
            }
            let (version, kind) = (u16::from_be_bytes([a & 0x7f, b]), u16::from_be_bytes([c, d]));
            if version != VERSION {
                return Err(Problem::Version { version });
            }
            if length > MOST_CONTROL_BYTES {
                return Err(Problem::Length { kind, length });
            }
            let mut body = vec![0; length];
            self.from.read_exact(&mut body).await.map_err(|source| Problem::Read { source })?;
            if let Some(received) = self.control(kind, flags, &body)? {
                return Ok(Some(received));
            }
        }
    }

    async fn header(&mut self) -> Result<Option<[u8; HEADER_BYTES]>, Problem> {
        let mut header = [0; HEADER_BYTES];
        let failed = |source| Problem::Read { source };
        if self.from.read(&mut header[..1]).await.map_err(failed)? == 0 {
            return Ok(None);
        }
        self.from.read_exact(&mut header[1..]).await.map_err(failed)?;
        Ok(Some(header))
    }

    async fn piece(&mut self, rest: Rest) -> Result<Received, Problem> {
        let mut bytes = vec![0; rest.bytes.min(PIECE_BYTES)];
        self.from.read_exact(&mut bytes).await.map_err(|source| Problem::Read { source })?;
        let left = rest.bytes - bytes.len();
        if left > 0 {
            self.rest = Some(Rest { bytes: left, ..rest });
        }
        Ok(Received::Data { id: rest.id, bytes, is_last: rest.is_last && left == 0 })
    }

    fn control(&mut self, kind: u16, flags: u8, body: &[u8]) -> Result<Option<Received>, Problem> {
        let number = |at: usize| {
            let bytes = body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u32::from_be_bytes).ok_or(Problem::Length { kind, length: body.len() })
        };
        Ok(match kind {
            SYN_STREAM => {
                let id = number(0)? & 0x7fff_ffff;
                // Then the associated stream, the priority and the slot.
                let block = body.get(10..).ok_or(Problem::Length { kind, length: body.len() })?;
                let headers = self.inflate.headers(block)?;
                if id % 2 == 0 || id <= self.last {
                    return Err(Problem::StreamNumber { id, last: self.last });
                }
                self.last = id;
                Some(Received::Stream { id, headers, is_last: flags & FIN != 0 })
            }
            RST_STREAM => Some(Received::Reset { id: number(0)? & 0x7fff_ffff }),
            // An even one is the echo of this side's.
            PING => Some(number(0)?).filter(|id| id % 2 == 1).map(|id| Received::Ping { id }),
            GOAWAY => Some(Received::GoAway),
            // Of streams that this side never opens; settings and windows, without a meaning here. Their
            // header blocks change the state of the decompression all the same.
            SYN_REPLY | 8 => {
                self.inflate.headers(body.get(4..).unwrap_or_default())?;
                None
            }
            _ => None,
        })
    }
}

/// Writes frames to the client.
#[derive(Debug)]
pub(super) struct Writer<W> {
    to: W,
    deflate: Deflate,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    pub(super) fn new(to: W) -> Self {
        Self { to, deflate: Deflate::new() }
    }

    /// Opens a stream, as a client does. `id`: odd, and larger than that of the stream before.
    pub(super) async fn open(&mut self, id: u32, headers: &[(&str, &str)]) -> io::Result<()> {
        let block = self.deflate.block(headers)?;
        // No associated stream, the highest priority, no slot.
        self.control(SYN_STREAM, &[&id.to_be_bytes()[..], &[0; 6], &block].concat()).await
    }

    /// Accepts a stream of the client.
    pub(super) async fn accept(&mut self, id: u32) -> io::Result<()> {
        let block = self.deflate.empty_block()?;
        self.control(SYN_REPLY, &[&id.to_be_bytes()[..], &block].concat()).await
    }

    pub(super) async fn reset(&mut self, id: u32, reason: Reset) -> io::Result<()> {
        self.control(RST_STREAM, &[id.to_be_bytes(), (reason as u32).to_be_bytes()].concat()).await
    }

    pub(super) async fn pong(&mut self, id: u32) -> io::Result<()> {
        self.control(PING, &id.to_be_bytes()).await
    }

    /// `last_accepted`: the largest number of a stream that was accepted.
    pub(super) async fn go_away(&mut self, last_accepted: u32) -> io::Result<()> {
        self.control(GOAWAY, &[last_accepted.to_be_bytes(), [0; 4]].concat()).await
    }

    /// `bytes`: fewer than 16 MiB.
    pub(super) async fn data(&mut self, id: u32, bytes: &[u8], is_last: bool) -> io::Result<()> {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&id.to_be_bytes());
        header[4..].copy_from_slice(&flags_and_length(if is_last { FIN } else { 0 }, bytes.len())?);
        self.to.write_all(&header).await?;
        self.to.write_all(bytes).await?;
        self.to.flush().await
    }

    async fn control(&mut self, kind: u16, body: &[u8]) -> io::Result<()> {
        let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
        frame.extend((VERSION | 0x8000).to_be_bytes());
        frame.extend(kind.to_be_bytes());
        frame.extend(flags_and_length(0, body.len())?);
        frame.extend(body);
        self.to.write_all(&frame).await?;
        self.to.flush().await
    }
}

fn flags_and_length(flags: u8, length: usize) -> io::Result<[u8; 4]> {
    let length = u32::try_from(length).ok().filter(|length| *length < 1 << 24);
    let [_, high, middle, low] = length.ok_or(io::ErrorKind::InvalidInput)?.to_be_bytes();
    Ok([flags, high, middle, low])
}

impl<W: AsyncWrite + Unpin + Send> Probe for Writer<W> {
    async fn probe(&mut self) -> io::Result<()> {
        // An even number: a server's.
        self.control(PING, &2_u32.to_be_bytes()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u16, flags: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        let head = [[0x80, 3], kind.to_be_bytes(), [flags, length[1]], [length[2], length[3]]].concat();
        [&head[..], body].concat()
    }

    async fn all(bytes: &[u8]) -> Result<Vec<Received>, Problem> {
        let (mut reader, mut received) = (Reader::new(bytes), Vec::new());
        while let Some(next) = reader.next().await? {
            received.push(next);
        }
        Ok(received)
    }

    #[tokio::test]
    async fn data_is_read_in_pieces_for_every_length_of_a_frame() {
        let mut bytes = vec![0, 0, 0, 5, FIN, 0, 0x90, 0];
        bytes.extend(vec![b'x'; 0x9000]);
        let received = all(&bytes).await.unwrap();
        let [
            Received::Data { id: 5, bytes: first, is_last: false },
            Received::Data { bytes: second, is_last: true, .. },
        ] = &received[..]
        else {
            panic!("{received:?}")
        };
        assert_eq!((first.len(), second.len()), (PIECE_BYTES, 0x9000 - PIECE_BYTES));
        // An empty frame ends a stream.
        let ended = all(&[0, 0, 0, 7, FIN, 0, 0, 0]).await.unwrap();
        assert_eq!(ended, [Received::Data { id: 7, bytes: Vec::new(), is_last: true }]);
    }

    #[tokio::test]
    async fn what_is_no_frame_of_the_version_is_an_error() {
        assert!(matches!(all(&[0x80, 2, 0, 1, 0, 0, 0, 0]).await, Err(Problem::Version { version: 2 })));
        assert!(matches!(all(&[0x80, 3, 0, 1, 0, 0xff, 0, 0]).await, Err(Problem::Length { kind: 1, .. })));
        assert!(matches!(all(&frame(RST_STREAM, 0, &[1, 2])).await, Err(Problem::Length { kind: 3, .. })));
        assert!(matches!(all(&frame(SYN_STREAM, 0, &[0; 9])).await, Err(Problem::Length { kind: 1, .. })));
        assert!(matches!(all(&[0, 0, 0, 1, 0, 0, 0, 9, b'x']).await, Err(Problem::Read { .. })));
        let mut deflate = Deflate::new();
        let mut stream = |id: u8| {
            let block = deflate.empty_block().unwrap();
            frame(SYN_STREAM, 0, &[&[0, 0, 0, id, 0, 0, 0, 0, 0, 0], &block[..]].concat())
        };
        let twice = [stream(1), stream(3), stream(3)].concat();
        assert!(matches!(all(&twice).await, Err(Problem::StreamNumber { id: 3, last: 3 })));
        let even = frame(
            SYN_STREAM,
            0,
            &[&[0, 0, 0, 2, 0, 0, 0, 0, 0, 0], &Deflate::new().empty_block().unwrap()[..]].concat(),
        );
        assert!(matches!(all(&even).await, Err(Problem::StreamNumber { id: 2, last: 0 })));
    }

    #[tokio::test]
    async fn what_is_written_is_read_again() {
        let mut written = Vec::new();
        let mut writer = Writer::new(&mut written);
        writer.pong(9).await.unwrap();
        writer.reset(3, Reset::Cancel).await.unwrap();
        writer.data(3, b"text", true).await.unwrap();
        writer.accept(3).await.unwrap();
        writer.accept(5).await.unwrap();
        for (id, kind) in [(7, "error"), (9, "stdin")] {
            writer.open(id, &[("streamtype", kind)]).await.unwrap();
        }
        writer.go_away(5).await.unwrap();
        let data = Received::Data { id: 3, bytes: b"text".to_vec(), is_last: true };
        let stream = |id, kind: &str| {
            let headers = vec![("streamtype".to_owned(), kind.to_owned())];
            Received::Stream { id, headers, is_last: false }
        };
        let wanted = [
            Received::Ping { id: 9 },
            Received::Reset { id: 3 },
            data,
            stream(7, "error"),
            stream(9, "stdin"),
            Received::GoAway,
        ];
        assert_eq!(all(&written).await.unwrap(), wanted);
    }
}
