//! The client's side of `v4.channel.k8s.io` over SPDY/3.1, which every runtime's streaming server speaks. A kubelet
//! uses it for runtimes whose server has no `v5.channel.k8s.io` over WebSocket.
//!
//! The client opens the streams that it wants, and names each in the header `streamtype`. It reads until the server
//! says that it goes away.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};

use super::remote_command::by_spdy::{ERROR, RESIZE, STDERR, STDIN, STDOUT};
use super::spdy::{Reader, Received, Writer};

/// The names in the request for the upgrade of the connection.
pub const UPGRADE: &str = "SPDY/3.1";
pub use super::remote_command::by_spdy::PROTOCOL;

/// In the order in which they are opened; their numbers are odd.
const IDS: [(&str, u32); 5] = [(ERROR, 1), (STDIN, 3), (STDOUT, 5), (STDERR, 7), (RESIZE, 9)];

/// What the runtime was asked for: it waits for exactly these streams.
#[derive(Debug, Clone, Copy)]
pub struct StreamsRequest {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    /// The program has a terminal, whose size a stream changes. A terminal has no stderr.
    pub tty: bool,
}

/// What the server sends.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// A part of the `Status`, as JSON.
    Status(Vec<u8>),
}

/// Writes to the server.
#[derive(Debug)]
pub struct Sender<IO>(Writer<WriteHalf<IO>>);

/// Reads from the server.
#[derive(Debug)]
pub struct Receiver<IO>(Reader<ReadHalf<IO>>);

/// Opens the streams on a connection that was upgraded.
pub async fn open<IO>(io: IO, request: StreamsRequest) -> io::Result<(Sender<IO>, Receiver<IO>)>
where
    IO: AsyncRead + AsyncWrite,
{
    let (from, to) = tokio::io::split(io);
    let mut writer = Writer::new(to);
    for (name, id) in IDS {
        let is_wanted = match name {
            STDIN => request.stdin,
            STDOUT => request.stdout,
            STDERR => request.stderr && !request.tty,
            RESIZE => request.tty,
            _ => true,
        };
        if is_wanted {
            writer.open(id, &[("streamtype", name)]).await?;
        }
    }
    Ok((Sender(writer), Receiver(Reader::new(from))))
}

fn id(wanted: &str) -> u32 {
    IDS.iter().find(|(name, _)| *name == wanted).map_or(0, |(_, id)| *id)
}

impl<IO: AsyncRead + AsyncWrite> Sender<IO> {
    /// `bytes`: fewer than 16 MiB.
    pub async fn stdin(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.data(id(STDIN), bytes, false).await
    }

    /// Nothing more comes.
    pub async fn end_stdin(&mut self) -> io::Result<()> {
        self.0.data(id(STDIN), &[], true).await
    }

    /// The size of the terminal, as JSON.
    pub async fn size(&mut self, json: &[u8]) -> io::Result<()> {
        self.0.data(id(RESIZE), json, false).await
    }
}

impl<IO: AsyncRead + AsyncWrite> Receiver<IO> {
    /// `None` at the end of the connection.
    pub async fn next(&mut self) -> io::Result<Option<Output>> {
        loop {
            let Some(received) = self.0.next().await.map_err(io::Error::other)? else { return Ok(None) };
            let (from, bytes) = match received {
                Received::GoAway => return Ok(None),
                Received::Data { id, bytes, .. } => (id, bytes),
                // The server pings with even numbers, which the reader leaves out, and opens no streams.
                Received::Stream { .. } | Received::Reset { .. } | Received::Ping { .. } => continue,
            };
            match IDS.iter().find(|(_, id)| *id == from).map(|(name, _)| *name) {
                Some(STDOUT) => return Ok(Some(Output::Stdout(bytes))),
                Some(STDERR) => return Ok(Some(Output::Stderr(bytes))),
                Some(ERROR) => return Ok(Some(Output::Status(bytes))),
                Some(_) | None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_streams_of_both_sides_are_those_of_the_request() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let request = StreamsRequest { stdin: true, stdout: true, stderr: true, tty: false };
        let (mut sender, mut receiver) = open(near, request).await.unwrap();
        sender.stdin(b"in").await.unwrap();
        sender.end_stdin().await.unwrap();

        let (from, to) = tokio::io::split(far);
        let (mut reader, mut writer) = (Reader::new(from), Writer::new(to));
        let mut names = Vec::new();
        for _ in 0..4 {
            let Some(Received::Stream { id, headers, is_last: false }) = reader.next().await.unwrap() else {
                panic!("{names:?}")
            };
            writer.accept(id).await.unwrap();
            names.push((id, headers[0].1.clone()));
        }
        let names: Vec<_> = names.iter().map(|(id, name)| (*id, name.as_str())).collect();
        assert_eq!(names, [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr")]);
        let data = |bytes: &[u8], is_last| Some(Received::Data { id: 3, bytes: bytes.to_vec(), is_last });
        assert_eq!(reader.next().await.unwrap(), data(b"in", false));
        assert_eq!(reader.next().await.unwrap(), data(b"", true));

        for (id, text) in [(5, "out"), (7, "err"), (1, "{}")] {
            writer.data(id, text.as_bytes(), true).await.unwrap();
        }
        writer.go_away(7).await.unwrap();
        let mut received = Vec::new();
        while let Some(output) = receiver.next().await.unwrap() {
            received.push(output);
        }
        let [out, err, status] = ["out", "err", "{}"].map(|text| text.as_bytes().to_vec());
        assert_eq!(received, [Output::Stdout(out), Output::Stderr(err), Output::Status(status)]);
    }
}
