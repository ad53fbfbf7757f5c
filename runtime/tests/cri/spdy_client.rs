//! A client of the streaming server: the HTTP upgrade by hand, then frames of SPDY/3.1.
//!
//! Its header blocks are zlib streams without the dictionary, which a server must read too.

use std::time::Duration;

use flate2::{Compress, Compression, FlushCompress};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Accepted { id: u32 },
    Reset { id: u32 },
    Ping { id: u32 },
    GoAway,
    Data { id: u32, bytes: Vec<u8>, is_last: bool },
}

pub(crate) struct Client {
    from: OwnedReadHalf,
    to: Option<Sender>,
}

pub(crate) struct Sender {
    to: OwnedWriteHalf,
    deflate: Compress,
    next: u32,
}

/// Sends a request. `head`: the method, a space, and further header lines. The connection after the
/// answer's head, and the answer's status code.
pub(crate) async fn connect(url: &str, head: &str) -> (TcpStream, u16) {
    let (stream, status) = ask(url, head).await;
    (stream, status.unwrap())
}

/// The status code; `None`, if the server ends the connection without an answer.
pub(crate) async fn answer(url: &str, head: &str) -> Option<u16> {
    ask(url, head).await.1.ok()
}

async fn ask(url: &str, head: &str) -> (TcpStream, std::io::Result<u16>) {
    let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let (method, headers) = head.split_once(' ').unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method} /{path} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
    let status = tokio::time::timeout(DEADLINE, async {
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(stream.read_u8().await?);
        }
        let answer = String::from_utf8(answer).unwrap().to_lowercase();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        // Clients of Kubernetes look for it.
        assert!(status != 101 || answer.contains("\r\nconnection: upgrade\r\n"), "{answer}");
        Ok(status)
    });
    let status = status.await.expect("an answer comes");
    (stream, status)
}

/// Whether the server ends the connection.
pub(crate) async fn ends_within(client: &mut Client) -> bool {
    let mut rest = Vec::new();
    tokio::time::timeout(DEADLINE, client.from.read_to_end(&mut rest)).await.is_ok()
}

impl Client {
    pub(crate) async fn of(url: &str, protocol: &str) -> Self {
        let head = format!(
            "POST Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: {protocol}\r\n"
        );
        let (stream, status) = connect(url, &head).await;
        assert_eq!(status, 101);
        Self::over(stream)
    }

    /// After the upgrade.
    pub(crate) fn over(stream: TcpStream) -> Self {
        let (from, to) = stream.into_split();
        let deflate = Compress::new(Compression::fast(), true);
        Self { from, to: Some(Sender { to, deflate, next: 1 }) }
    }

    /// One that only reads, and what it sent with.
    pub(crate) fn split(mut self) -> (Self, Sender) {
        let to = self.to.take().unwrap();
        (self, to)
    }

    fn to(&mut self) -> &mut Sender {
        self.to.as_mut().expect("it was not split")
    }

    /// Opens a stream; its number.
    pub(crate) async fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        self.to().open(headers).await
    }

    pub(crate) async fn data(&mut self, id: u32, bytes: &[u8], is_last: bool) {
        self.to().data(id, bytes, is_last).await;
    }

    pub(crate) async fn ping(&mut self, id: u32) {
        self.to().control(6, &id.to_be_bytes()).await;
    }

    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        self.to().to.write_all(bytes).await.unwrap();
    }

    /// Nothing more is sent.
    pub(crate) async fn end(&mut self) {
        let _the_server_was_faster = self.to().to.shutdown().await;
    }

    /// `None` at the end of the connection.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        tokio::time::timeout(DEADLINE, self.read()).await.expect("a frame comes")
    }

    async fn read(&mut self) -> Option<Frame> {
        let mut header = [0; 8];
        self.from.read_exact(&mut header).await.ok()?;
        let [a, b, c, d, flags, length @ ..] = header;
        let length = u32::from_be_bytes([0, length[0], length[1], length[2]]);
        let mut bytes = vec![0; length.try_into().unwrap()];
        self.from.read_exact(&mut bytes).await.ok()?;
        let id = || u32::from_be_bytes(bytes[..4].try_into().unwrap());
        if a & 0x80 == 0 {
            return Some(Frame::Data {
                id: u32::from_be_bytes([a, b, c, d]),
                bytes,
                is_last: flags & 1 != 0,
            });
        }
        assert_eq!([a, b], [0x80, 3], "the version");
        Some(match u16::from_be_bytes([c, d]) {
            2 => Frame::Accepted { id: id() },
            3 => Frame::Reset { id: id() },
            6 => Frame::Ping { id: id() },
            7 => Frame::GoAway,
            other => panic!("a frame of type {other}"),
        })
    }
}

impl Sender {
    pub(crate) async fn open(&mut self, headers: &[(&str, &str)]) -> u32 {
        let number = |length: usize| u32::try_from(length).unwrap().to_be_bytes();
        let mut plain = number(headers.len()).to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend([&number(text.len())[..], text.as_bytes()].concat());
        }
        let mut block = Vec::with_capacity(64 << 10);
        self.deflate.compress_vec(&plain, &mut block, FlushCompress::Sync).unwrap();
        let id = self.next;
        self.next += 2;
        self.control(1, &[&id.to_be_bytes()[..], &[0; 6], &block].concat()).await;
        id
    }

    pub(crate) async fn data(&mut self, id: u32, bytes: &[u8], is_last: bool) {
        let [_, high, middle, low] = u32::try_from(bytes.len()).unwrap().to_be_bytes();
        let head = [&id.to_be_bytes()[..], &[u8::from(is_last), high, middle, low]].concat();
        self.to.write_all(&[&head, bytes].concat()).await.unwrap();
    }

    async fn control(&mut self, kind: u16, body: &[u8]) {
        let [_, high, middle, low] = u32::try_from(body.len()).unwrap().to_be_bytes();
        let head = [&[0x80, 3][..], &kind.to_be_bytes(), &[0, high, middle, low]].concat();
        self.to.write_all(&[&head, body].concat()).await.unwrap();
    }
}
