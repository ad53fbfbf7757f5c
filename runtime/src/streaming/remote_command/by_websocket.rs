//! `v5.channel.k8s.io` over WebSocket: the first byte of each binary message names its stream.

use std::io;
use std::sync::Arc;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;

use super::{Client, Command, Event, Incoming, Outgoing};
use crate::exec::Taken;
use crate::runtime::Runtime;
use crate::streaming::BoxedError;
use crate::streaming::probe::Probe;
use crate::streaming::websocket::{Message, WebSocketStream, channel, close, message, ping};

pub(in crate::streaming) const PROTOCOL: &str = "v5.channel.k8s.io";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The next byte names the stream whose end it is.
const CLOSE: u8 = 255;

/// Connects the command with the client's streams.
pub(in crate::streaming) async fn serve<IO>(
    runtime: &Arc<Runtime>,
    command: Command,
    socket: WebSocketStream<IO>,
) where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (to, from) = socket.split();
    let [has_stdin, stdout, stderr] = command.streams();
    let outgoing = Arc::new(Mutex::new(Messages { to, stdout, stderr }));
    let client = Client { incoming: Received(from), outgoing, has_stdin, has_sizes: command.tty() };
    client.run(runtime, command).await;
}

struct Received<IO>(SplitStream<WebSocketStream<IO>>);

struct Messages<IO> {
    to: SplitSink<WebSocketStream<IO>, Message>,
    stdout: bool,
    stderr: bool,
}

impl<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static> Incoming for Received<IO> {
    async fn next(&mut self) -> Result<Option<Event>, BoxedError> {
        loop {
            let Some(message) = self.0.next().await.transpose()? else { return Ok(None) };
            match channel(&message)? {
                Some((STDIN, bytes)) => return Ok(Some(Event::Stdin(bytes.to_vec()))),
                Some((RESIZE, bytes)) => return Ok(Some(Event::Sizes(bytes.to_vec()))),
                Some((CLOSE, [STDIN])) => return Ok(Some(Event::StdinEnd)),
                // Streams that a client has no reason to send on.
                Some(_) | None => {}
            }
        }
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
