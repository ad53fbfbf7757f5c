//! `v4.channel.k8s.io` over SPDY/3.1: the client opens a SPDY stream for each of `error`, `stdin`, `stdout`,
//! `stderr` and `resize` that it wants, and names it in the header `streamtype`.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::sync::Mutex;

use super::{Client, Command, Event, Incoming, Outgoing, STREAMS_TIMEOUT};
use crate::calls::exec::Taken;
use crate::error::chain;
use crate::runtime::Runtime;
use crate::server::streaming::BoxedError;
use crate::server::streaming::probe::Probe;
use crate::server::streaming::spdy::{Headers, Problem, Reader, Received, Reset, Writer};

pub const PROTOCOL: &str = "v4.channel.k8s.io";

pub(in crate::server::streaming) const ERROR: &str = "error";
pub(in crate::server::streaming) const STDIN: &str = "stdin";
pub(in crate::server::streaming) const STDOUT: &str = "stdout";
pub(in crate::server::streaming) const STDERR: &str = "stderr";
pub(in crate::server::streaming) const RESIZE: &str = "resize";

/// Pieces of stdin and sizes that a client may send before it has opened all streams.
const MOST_EARLY: usize = 32;

/// The numbers of the client's streams.
type Ids = HashMap<&'static str, u32>;

struct Frames<R, W> {
    reader: Reader<R>,
    streams: Arc<Mutex<OpenStreams<W>>>,
    ids: Ids,
    /// What came before all streams were there, or with another frame.
    early: VecDeque<Event>,
}

struct OpenStreams<W> {
    writer: Writer<W>,
    ids: Ids,
}

/// Connects the command with the streams that the client opens.
pub(in crate::server::streaming) async fn serve<IO>(runtime: &Arc<Runtime>, command: Command, io: IO)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (container, kind) = (command.container_id().to_owned(), command.kind());
    match tokio::time::timeout(STREAMS_TIMEOUT, accept(&command, io)).await {
        Ok(Ok(Some(client))) => client.run(runtime, command).await,
        Ok(Ok(None)) => {}
        Ok(Err(error)) => {
            tracing::debug!(container, error = %chain(&error), "{kind}: the client's streams");
        }
        Err(_elapsed) => tracing::debug!(container, "{kind}: the client opened too few streams"),
    }
}

fn names(command: &Command) -> Vec<&'static str> {
    let ([stdin, stdout, stderr], tty) = (command.streams(), command.tty());
    let wanted = [(ERROR, true), (STDIN, stdin), (STDOUT, stdout), (STDERR, stderr && !tty), (RESIZE, tty)];
    wanted.into_iter().filter(|(_, is_wanted)| *is_wanted).map(|(name, _)| name).collect()
}

fn name_of(headers: &Headers) -> Option<&str> {
    headers.iter().find(|(name, _)| name == "streamtype").map(|(_, value)| value.as_str())
}

type SpdyClient<IO> = Client<Frames<ReadHalf<IO>, WriteHalf<IO>>, OpenStreams<WriteHalf<IO>>>;

/// Waits for all streams. `None`: the client has gone.
async fn accept<IO>(command: &Command, io: IO) -> Result<Option<SpdyClient<IO>>, Problem>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (from, to) = tokio::io::split(io);
    let (mut reader, mut writer) = (Reader::new(from), Writer::new(to));
    let wanted = names(command);
    let (mut ids, mut early) = (HashMap::new(), VecDeque::new());
    while ids.len() < wanted.len() {
        let failed = |source| Problem::Write { source };
        match reader.next().await? {
            Some(Received::Stream { id, headers, is_last }) => {
                let found = wanted.iter().find(|name| Some(**name) == name_of(&headers));
                match found.filter(|name| !ids.contains_key(**name)) {
                    Some(name) => {
                        ids.insert(*name, id);
                        if is_last && *name == STDIN {
                            early.push_back(Event::StdinEnd);
                        }
                        writer.accept(id).await.map_err(failed)?;
                    }
                    None => writer.reset(id, Reset::RefusedStream).await.map_err(failed)?,
                }
            }
            Some(Received::Ping { id }) => writer.pong(id).await.map_err(failed)?,
            Some(other @ (Received::Data { .. } | Received::Reset { .. })) => {
                if early.len() >= MOST_EARLY {
                    return Err(Problem::TooEarly { most: MOST_EARLY });
                }
                early.extend(events(&ids, other));
            }
            Some(Received::GoAway) | None => return Ok(None),
        }
    }
    let ([has_stdin, ..], has_sizes) = (command.streams(), command.tty());
    let outgoing = Arc::new(Mutex::new(OpenStreams { writer, ids: ids.clone() }));
    let incoming = Frames { reader, streams: Arc::clone(&outgoing), ids, early };
    Ok(Some(Client { incoming, outgoing, has_stdin, has_sizes }))
}

/// What a frame of a known stream means.
fn events(ids: &Ids, received: Received) -> Vec<Event> {
    let is = |name: &str, id: u32| ids.get(name) == Some(&id);
    match received {
        Received::Data { id, bytes, is_last } if is(STDIN, id) => {
            let end = is_last.then_some(Event::StdinEnd);
            [Event::Stdin(bytes)].into_iter().chain(end).collect()
        }
        Received::Data { id, bytes, .. } if is(RESIZE, id) => vec![Event::Sizes(bytes)],
        Received::Reset { id } if is(STDIN, id) => vec![Event::StdinEnd],
        _ => Vec::new(),
    }
}

impl<R, W> Incoming for Frames<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    async fn next(&mut self) -> Result<Option<Event>, BoxedError> {
        loop {
            if let Some(event) = self.early.pop_front() {
                return Ok(Some(event));
            }
            let Some(received) = self.reader.next().await? else { return Ok(None) };
            match received {
                Received::Ping { id } => self.streams.lock().await.writer.pong(id).await?,
                Received::Stream { id, .. } => {
                    self.streams.lock().await.writer.reset(id, Reset::RefusedStream).await?;
                }
                other => self.early.extend(events(&self.ids, other)),
            }
        }
    }
}

impl<W: AsyncWrite + Unpin + Send + 'static> Outgoing for OpenStreams<W> {
    async fn output(&mut self, from: Taken, bytes: Vec<u8>) -> io::Result<()> {
        let name = match from {
            Taken::Stdout => STDOUT,
            Taken::Stderr => STDERR,
        };
        match self.ids.get(name) {
            Some(id) => self.writer.data(*id, &bytes, false).await,
            None => Ok(()),
        }
    }

    async fn end(&mut self, status: String) -> io::Result<()> {
        for (name, id) in &self.ids {
            let bytes = if *name == ERROR { status.as_bytes() } else { b"" };
            self.writer.data(*id, bytes, true).await?;
        }
        self.writer.go_away(self.ids.values().copied().max().unwrap_or(0)).await
    }
}

impl<W: AsyncWrite + Unpin + Send> Probe for OpenStreams<W> {
    async fn probe(&mut self) -> io::Result<()> {
        self.writer.probe().await
    }
}
