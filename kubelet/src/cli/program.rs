//! The streams of a program in a container: over WebSocket (`v5.channel.k8s.io`), or over SPDY where the runtime's
//! streaming server is older than that protocol, such as containerd's before 2.0. kubectl does the same.

use std::io;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use hyper::header::{CONNECTION, HOST, HeaderValue, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use runtime::spdy_client::{self, Output, StreamsRequest};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite;

use super::streams::{self, Message, Socket, channel, message};
use super::{Error, StreamProblem};

const PROTOCOL: &str = "v5.channel.k8s.io";
const PROTOCOL_HEADER: &str = "x-stream-protocol-version";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;

/// What a program is sent.
#[derive(Debug)]
pub(super) enum Input {
    Stdin(Vec<u8>),
    StdinEnd,
    /// JSON.
    Size(String),
}

#[derive(Debug)]
pub(super) enum Sender {
    WebSocket(SplitSink<Socket, Message>),
    Spdy(spdy_client::Sender<TokioIo<Upgraded>>),
}

#[derive(Debug)]
pub(super) enum Receiver {
    WebSocket(SplitStream<Socket>),
    Spdy(spdy_client::Receiver<TokioIo<Upgraded>>),
}

/// Connects to a program at `url`. A URL is good for one attempt: `again` asks the kubelet for another one.
pub(super) async fn connect(
    url: String,
    again: impl AsyncFnOnce() -> Result<String, Error>,
    request: StreamsRequest,
) -> Result<(Sender, Receiver), Error> {
    match streams::connect(&url, PROTOCOL).await {
        Ok(socket) => {
            let (to, from) = socket.split();
            Ok((Sender::WebSocket(to), Receiver::WebSocket(from)))
        }
        Err(Error::Streams { source, .. }) if is_refusal(&source) => {
            let url = again().await?;
            let connected = by_spdy(&url, request).await;
            let (to, from) = connected.map_err(|source| Error::Streams { url, source })?;
            Ok((Sender::Spdy(to), Receiver::Spdy(from)))
        }
        Err(error) => Err(error),
    }
}

/// Whether the server has answered that it does not speak the protocol.
fn is_refusal(error: &io::Error) -> bool {
    let problem = error.get_ref().and_then(|source| source.downcast_ref::<tungstenite::Error>());
    matches!(
        problem,
        Some(
            tungstenite::Error::Http(_)
                | tungstenite::Error::Protocol(
                    tungstenite::error::ProtocolError::SecWebSocketSubProtocolError(_)
                )
        )
    )
}

type BySpdy = (spdy_client::Sender<TokioIo<Upgraded>>, spdy_client::Receiver<TokioIo<Upgraded>>);

async fn by_spdy(url: &str, streams: StreamsRequest) -> io::Result<BySpdy> {
    let uri: Uri = url.parse().map_err(io::Error::other)?;
    let (authority, path) = (uri.authority(), uri.path_and_query());
    let (authority, path) = authority.zip(path).ok_or(io::ErrorKind::InvalidInput)?;
    let stream = TcpStream::connect(authority.as_str()).await?;
    let _nodelay_is_only_faster = stream.set_nodelay(true);
    let client = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = client.map_err(io::Error::other)?;
    tokio::spawn(connection.with_upgrades());
    let request = Request::post(path.as_str())
        .header(HOST, authority.as_str())
        .header(CONNECTION, HeaderValue::from_static("Upgrade"))
        .header(UPGRADE, HeaderValue::from_static(spdy_client::UPGRADE))
        .header(PROTOCOL_HEADER, HeaderValue::from_static(spdy_client::PROTOCOL))
        .body(String::new())
        .map_err(io::Error::other)?;
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(io::Error::other(format!("the runtime answers {}", response.status())));
    }
    let upgraded = hyper::upgrade::on(response).await.map_err(io::Error::other)?;
    spdy_client::open(TokioIo::new(upgraded), streams).await
}

impl Sender {
    pub(super) async fn send(&mut self, input: Input) -> Result<(), StreamProblem> {
        match self {
            Self::WebSocket(to) => {
                let sending = match input {
                    Input::Stdin(bytes) => message(STDIN, &bytes),
                    Input::StdinEnd => message(CLOSE, &[STDIN]),
                    Input::Size(json) => message(RESIZE, json.as_bytes()),
                };
                to.send(sending).await.map_err(Into::into)
            }
            Self::Spdy(to) => {
                let sent = match input {
                    Input::Stdin(bytes) => to.stdin(&bytes).await,
                    Input::StdinEnd => to.end_stdin().await,
                    Input::Size(json) => to.size(json.as_bytes()).await,
                };
                sent.map_err(Into::into)
            }
        }
    }
}

impl Receiver {
    /// `None` at the program's end.
    pub(super) async fn next(&mut self) -> Result<Option<Output>, Error> {
        match self {
            Self::WebSocket(from) => loop {
                let Some(received) = from.next().await else { return Ok(None) };
                let received = received.map_err(|source| Error::Stream(source.into()))?;
                if matches!(received, Message::Close(_)) {
                    // Reading further would first send what could not be sent.
                    return Ok(None);
                }
                match channel(&received) {
                    Some((STDOUT, bytes)) => return Ok(Some(Output::Stdout(bytes.to_vec()))),
                    Some((STDERR, bytes)) => return Ok(Some(Output::Stderr(bytes.to_vec()))),
                    Some((STATUS, bytes)) => return Ok(Some(Output::Status(bytes.to_vec()))),
                    Some(_) | None => {}
                }
            },
            Self::Spdy(from) => from.next().await.map_err(|source| Error::Stream(source.into())),
        }
    }
}
