//! `portforward.k8s.io` over SPDY/3.1 (k8s.io/apimachinery, portforward).
//!
//! The client opens two streams for each connection, `error` and `data`, and names in their headers the
//! port and the number that makes them a pair (`requestid`). The data stream then carries the connection
//! in both directions; `error` gets a text if there is none.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, WriteHalf};
use tokio::sync::{Mutex, Notify, mpsc};
use tokio::task::JoinSet;

use super::inlet::{Inlet, Outlet, PIECE_COST, Stalled, inlet};
use super::{Connected, READ_BYTES, Target, connect};
use crate::error::{Result, chain};
use crate::server::streaming::idle::IDLE_TIMEOUT;
use crate::server::streaming::spdy::{Headers, Problem, Reader, Received, Reset, Writer};

pub(in crate::server::streaming) const PROTOCOL: &str = "portforward.k8s.io";

/// kubelet's `streamCreationTimeout`, for the second stream of a pair.
const PAIR_TIMEOUT: Duration = Duration::from_secs(30);
/// Of one client, at the same time.
const MOST_CONNECTIONS: usize = 256;

type Out<IO> = Arc<Mutex<Writer<WriteHalf<IO>>>>;

/// The streams of one connection, as far as they are there.
#[derive(Debug)]
struct Pair {
    port: u16,
    error: Option<u32>,
    data: Option<u32>,
    since: Instant,
}

/// A connection, by its data stream.
#[derive(Debug)]
struct Connection {
    /// `None`: the client has sent all.
    input: Option<Inlet>,
    stop: Arc<Stop>,
}

/// Asks a connection to end.
#[derive(Debug, Default)]
struct Stop {
    asked: Notify,
    /// Set if the pod is the reason, not the client.
    is_stalled: OnceLock<()>,
}

/// Serves until the client goes, or the pod ends.
pub(in crate::server::streaming) async fn serve<IO>(target: Target, io: IO)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (from, to) = tokio::io::split(io);
    let mut session = Session {
        target: Arc::new(target),
        writer: Arc::new(Mutex::new(Writer::new(to))),
        pairs: HashMap::new(),
        connections: HashMap::new(),
        tasks: JoinSet::new(),
    };
    // A read that is given up would lose a part of a frame: so it has a task of its own.
    let (frames, received) = mpsc::channel(1);
    let mut reading = JoinSet::new();
    reading.spawn(read(Reader::new(from), frames));
    let sandbox = Arc::clone(&session.target.sandbox);
    tokio::select! {
        ended = session.run(received) => {
            if let Err(error) = ended {
                tracing::debug!(error = %chain(&error), "port-forward");
            }
        }
        () = sandbox.runs_no_more() => {}
    }
}

type Frame = std::result::Result<Option<Received>, Problem>;

async fn read<R: AsyncRead + Unpin>(mut reader: Reader<R>, frames: mpsc::Sender<Frame>) {
    loop {
        let frame = reader.next().await;
        let is_last = !matches!(frame, Ok(Some(_)));
        if frames.send(frame).await.is_err() || is_last {
            return;
        }
    }
}

struct Session<IO> {
    target: Arc<Target>,
    writer: Out<IO>,
    /// By request.
    pairs: HashMap<String, Pair>,
    connections: HashMap<u32, Connection>,
    /// Of the connections; each ends with its data stream's number.
    tasks: JoinSet<u32>,
}

impl<IO: AsyncRead + AsyncWrite + Unpin + Send + 'static> Session<IO> {
    async fn run(&mut self, mut frames: mpsc::Receiver<Frame>) -> std::result::Result<(), Problem> {
        let (mut last, mut ticks) = (Instant::now(), tokio::time::interval(PAIR_TIMEOUT));
        loop {
            tokio::select! {
                frame = frames.recv() => match frame {
                    Some(frame) => match frame? {
                        Some(received) => self.obey(received).await.map_err(|source| Problem::Write { source })?,
                        None => return Ok(()),
                    },
                    None => return Ok(()),
                },
                Some(ended) = self.tasks.join_next() => {
                    if let Ok(id) = ended {
                        self.connections.remove(&id);
                    }
                }
                _ = ticks.tick() => {
                    self.expire().await.map_err(|source| Problem::Write { source })?;
                    if self.tasks.is_empty() && last.elapsed() > IDLE_TIMEOUT {
                        return Ok(());
                    }
                    continue;
                }
            }
            last = Instant::now();
        }
    }

    async fn obey(&mut self, received: Received) -> std::io::Result<()> {
        match received {
            Received::Stream { id, headers, is_last: _ } => self.add(id, &headers).await,
            Received::Data { id, bytes, is_last } => {
                let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
                if let Some(input) = &connection.input
                    && !bytes.is_empty()
                    && input.give(bytes).await == Err(Stalled)
                {
                    connection.input = None;
                    let _once = connection.stop.is_stalled.set(());
                    connection.stop.asked.notify_one();
                }
                if is_last {
                    connection.input = None;
                }
                Ok(())
            }
            Received::Reset { id } => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.input = None;
                    connection.stop.asked.notify_one();
                }
                Ok(())
            }
            Received::Ping { id } => self.writer.lock().await.pong(id).await,
            Received::GoAway => Ok(()),
        }
    }

    async fn add(&mut self, id: u32, headers: &Headers) -> std::io::Result<()> {
        let of =
            |wanted: &str| headers.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
        let port = of("port").and_then(|port| port.parse::<u16>().ok()).filter(|port| *port > 0);
        let is_data = match of("streamtype") {
            Some("data") => Some(true),
            Some("error") => Some(false),
            _ => None,
        };
        // kubectl before 1.4 had one connection at a time.
        let request = of("requestid").unwrap_or_default().to_owned();
        let known = self.pairs.len() + self.tasks.len();
        let has_room = self.pairs.contains_key(&request) || known < MOST_CONNECTIONS;
        let (Some(port), Some(is_data), true) = (port, is_data, has_room) else {
            return self.writer.lock().await.reset(id, Reset::RefusedStream).await;
        };
        let new = || Pair { port, error: None, data: None, since: Instant::now() };
        let pair = self.pairs.entry(request.clone()).or_insert_with(new);
        let place = if is_data { &mut pair.data } else { &mut pair.error };
        if place.is_some() || pair.port != port {
            return self.writer.lock().await.reset(id, Reset::ProtocolError).await;
        }
        *place = Some(id);
        let whole = pair.error.zip(pair.data);
        self.writer.lock().await.accept(id).await?;
        if let Some((error, data)) = whole {
            self.pairs.remove(&request);
            let (input, pieces) = inlet();
            let stop = Arc::new(Stop::default());
            let connection = Connection { input: Some(input), stop: Arc::clone(&stop) };
            self.connections.insert(data, connection);
            let to = connect(Arc::clone(&self.target), port);
            let (writer, streams) = (Arc::clone(&self.writer), [error, data]);
            self.tasks.spawn(forward(to, port, streams, pieces, stop, writer));
        }
        Ok(())
    }

    /// Gives up streams whose other one did not come.
    async fn expire(&mut self) -> std::io::Result<()> {
        let late: Vec<Pair> = self
            .pairs
            .extract_if(|_, pair| pair.since.elapsed() > PAIR_TIMEOUT)
            .map(|(_, pair)| pair)
            .collect();
        for id in late.into_iter().flat_map(|pair| [pair.error, pair.data]).flatten() {
            self.writer.lock().await.reset(id, Reset::Cancel).await?;
        }
        Ok(())
    }
}

/// One connection; returns its data stream's number.
async fn forward<IO: AsyncRead + AsyncWrite + Unpin + Send>(
    to: impl Future<Output = Result<Connected>>,
    port: u16,
    [error, data]: [u32; 2],
    mut pieces: Outlet,
    stop: Arc<Stop>,
    writer: Out<IO>,
) -> u32 {
    let connected = tokio::select! {
        connected = to => connected.map_err(|error| chain(&error)),
        () = stop.asked.notified() => Err("the client gave it up".to_owned()),
    };
    let problem = match connected {
        Ok((stream, _place)) => {
            let (mut from_pod, mut to_pod) = stream.into_split();
            let sending = async {
                while let Some(piece) = pieces.next().await {
                    let mut rest = &piece[..];
                    while !rest.is_empty() {
                        let Ok(length @ 1..) = to_pod.write(rest).await else { return };
                        pieces.took(length);
                        rest = &rest[length..];
                    }
                    pieces.took(PIECE_COST);
                }
                let _connection_has_ended = to_pod.shutdown().await;
            };
            let receiving = async {
                let mut buffer = vec![0; READ_BYTES];
                loop {
                    // Not while a frame is written, which would be torn.
                    let read = tokio::select! {
                        read = from_pod.read(&mut buffer) => read,
                        () = stop.asked.notified() => return,
                    };
                    let Ok(length @ 1..) = read else { return };
                    if writer.lock().await.data(data, &buffer[..length], false).await.is_err() {
                        return;
                    }
                }
            };
            tokio::pin!(receiving);
            tokio::select! {
                () = &mut receiving => {}
                // The pod may answer after the client has said all.
                () = sending => {
                    // If the pod reads no more, what the client sends is dropped.
                    pieces.close();
                    receiving.await;
                }
            }
            String::new()
        }
        Err(problem) => format!("port {port} of the pod: {problem}"),
    };
    let mut writer = writer.lock().await;
    let (ended, problem) = match stop.is_stalled.get() {
        Some(()) => {
            let problem = format!("port {port} of the pod: {Stalled}");
            (writer.reset(data, Reset::FlowControlError).await, problem)
        }
        None => (writer.data(data, b"", true).await, problem),
    };
    if ended.is_ok() {
        let _the_client_has_gone = writer.data(error, problem.as_bytes(), true).await;
    }
    data
}
