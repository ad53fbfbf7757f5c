//! `v5.channel.k8s.io` and `v4.channel.k8s.io` over WebSocket: the first byte of each message names its stream.
//!
//! kubelet passes v4 on to the runtime as it comes from clients. v5 reaches the runtime only from clients of CRI:
//! kubelet and the API server translate it to SPDY.

use std::io;
use std::sync::Arc;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;

use super::{Client, Command, Event, Incoming, Outgoing};
use crate::calls::exec::Taken;
use crate::runtime::Runtime;
use crate::server::streaming::BoxedError;
use crate::server::streaming::probe::Probe;
use crate::server::streaming::websocket::{Message, WebSocketStream, channel, close, message, ping};

/// The first one that a client offers is used.
pub(in crate::server::streaming) const PROTOCOLS: &[&str] = &["v5.channel.k8s.io", V4];
/// It has no end of stdin.
const V4: &str = "v4.channel.k8s.io";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The next byte names the stream whose end it is.
const CLOSE: u8 = 255;

/// Connects the command with the client's streams.
pub(in crate::server::streaming) async fn serve<IO>(
    runtime: &Arc<Runtime>,
    command: Command,
    protocol: &str,
    socket: WebSocketStream<IO>,
) where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let is_v4 = protocol == V4;
    let (to, from) = socket.split();
    let [has_stdin, stdout, stderr] = command.streams();
    let mut outgoing = Messages { to, stdout, stderr };
    // Some clients of v4 wait for it.
    if is_v4 && outgoing.begin().await.is_err() {
        return;
    }
    let outgoing = Arc::new(Mutex::new(outgoing));
    let incoming = Received { from, is_v4 };
    let client = Client { incoming, outgoing, has_stdin, has_sizes: command.tty() };
    client.run(runtime, command).await;
}

struct Received<IO> {
    from: SplitStream<WebSocketStream<IO>>,
    is_v4: bool,
}

struct Messages<IO> {
    to: SplitSink<WebSocketStream<IO>, Message>,
    stdout: bool,
    stderr: bool,
}

impl<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static> Incoming for Received<IO> {
    async fn next(&mut self) -> Result<Option<Event>, BoxedError> {
        loop {
            let Some(mut message) = self.from.next().await.transpose()? else { return Ok(None) };
            // Clients of v4 send text too, such as the one for Python.
            if self.is_v4
                && let Message::Text(text) = message
            {
                message = Message::Binary(text.into());
            }
            match channel(&message)? {
                Some((STDIN, bytes)) => return Ok(Some(Event::Stdin(bytes.to_vec()))),
                Some((RESIZE, bytes)) => return Ok(Some(Event::Sizes(bytes.to_vec()))),
                Some((CLOSE, [STDIN])) if !self.is_v4 => return Ok(Some(Event::StdinEnd)),
                // Streams that a client has no reason to send on.
                Some(_) | None => {}
            }
        }
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static> Messages<IO> {
    /// An empty message on the first stream that the client reads, as kubelet's own server sends it.
    async fn begin(&mut self) -> io::Result<()> {
        let first = match (self.stdout, self.stderr) {
            (true, _) => STDOUT,
            (false, true) => STDERR,
            (false, false) => ERROR,
        };
        self.to.send(message(first, &[])).await.map_err(io::Error::other)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static> Outgoing for Messages<IO> {
    async fn output(&mut self, from: Taken, bytes: Vec<u8>) -> io::Result<()> {
        let (name, is_wanted) = match from {
            Taken::Stdout => (STDOUT, self.stdout),
            Taken::Stderr => (STDERR, self.stderr),
        };
        if !is_wanted {
            return Ok(());
        }
        self.to.send(message(name, &bytes)).await.map_err(io::Error::other)
    }

    async fn end(&mut self, status: String) -> io::Result<()> {
        self.to.send(message(ERROR, status.as_bytes())).await.map_err(io::Error::other)?;
        self.to.send(close()).await.map_err(io::Error::other)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin + Send> Probe for Messages<IO> {
    async fn probe(&mut self) -> io::Result<()> {
        self.to.send(ping()).await.map_err(io::Error::other)
    }
}
