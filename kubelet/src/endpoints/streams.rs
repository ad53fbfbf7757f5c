//! `/exec`, `/attach` and `/portForward`: the kubelet asks the runtime for a URL, repeats the client's
//! request there, and passes the upgraded connection on byte by byte, as kubelet does. The
//! runtime decides which protocols there are: SPDY/3.1 and WebSocket.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderValue, TRANSFER_ENCODING,
    UPGRADE,
};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use proto::cri;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::body::{Answer, answer};
use super::query::{Malformed, Query};
use super::relay::relay;
use super::route::{Container, Pod};
use crate::engine::{Handle, LogPathError, StreamError, Streams};

/// kubelet's streamingConnectionIdleTimeout.
const IDLE: Duration = Duration::from_secs(4 * 3600);
/// The runtime answers a request for a URL, and on it, at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const MOST_HEAD_BYTES: usize = 64 << 10;
/// Of an answer that is no upgrade.
const MOST_REFUSAL_BYTES: usize = 64 << 10;

/// Why a client gets no streams.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("Upgrade request required")]
    NoUpgrade,
    #[error("you must specify at least 1 of stdin, stdout, stderr")]
    NoStream,
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("port {port:?}: a number from 1 to 65535 is needed")]
    Port { port: String },
    #[error(transparent)]
    Streams(#[from] StreamError),
    #[error("streaming server of the runtime at {url}")]
    Runtime {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Refusal {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::NoUpgrade | Self::NoStream | Self::Malformed(_) | Self::Port { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::Streams(StreamError::Container(error)) => status_of(error),
            Self::Streams(
                StreamError::NotRunning { .. }
                | StreamError::PodNotRunning { .. }
                | StreamError::NoSandbox { .. },
            ) => StatusCode::BAD_REQUEST,
            Self::Streams(StreamError::Runtime(_) | StreamError::Ending) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Runtime { .. } => StatusCode::BAD_GATEWAY,
        }
    }
}

/// The status of a request for a container that is not there.
pub(super) fn status_of(error: &LogPathError) -> StatusCode {
    match error {
        LogPathError::NoPod { .. } | LogPathError::NoContainer { .. } => StatusCode::NOT_FOUND,
        LogPathError::Ambiguous { .. }
        | LogPathError::NotStarted { .. }
        | LogPathError::NoPrevious { .. } => StatusCode::BAD_REQUEST,
    }
}

/// What the runtime is asked for, before the container's id is known.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    tty: bool,
}

impl Wanted {
    /// kubelet's names, and those of the API server.
    fn of(query: &Query) -> Result<Self, Refusal> {
        let either = |a, b| Ok::<_, Malformed>(query.flag(a)? || query.flag(b)?);
        let tty = query.flag("tty")?;
        let (stdin, stdout) = (either("input", "stdin")?, either("output", "stdout")?);
        // A terminal has one output.
        let stderr = either("error", "stderr")? && !tty;
        if !(stdin || stdout || stderr) {
            return Err(Refusal::NoStream);
        }
        Ok(Self { stdin, stdout, stderr, tty })
    }
}

pub(super) async fn exec(engine: &Handle, of: &Container, query: &Query) -> Result<String, Refusal> {
    let (Wanted { stdin, stdout, stderr, tty }, cmd) = (Wanted::of(query)?, query.all("command"));
    let request =
        |container_id| Streams::Exec(cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr });
    Ok(engine.streams_of_container(&of.pod.namespace, &of.pod.name, &of.name, request).await?)
}

pub(super) async fn attach(engine: &Handle, of: &Container, query: &Query) -> Result<String, Refusal> {
    let Wanted { stdin, stdout, stderr, tty } = Wanted::of(query)?;
    let request =
        |container_id| Streams::Attach(cri::AttachRequest { container_id, stdin, tty, stdout, stderr });
    Ok(engine.streams_of_container(&of.pod.namespace, &of.pod.name, &of.name, request).await?)
}

/// WebSocket clients name their ports in the query; SPDY clients name them later, in each stream.
pub(super) async fn port_forward(engine: &Handle, of: &Pod, query: &Query) -> Result<String, Refusal> {
    let values = [query.all("ports"), query.all("port")].concat();
    let ports = values.iter().flat_map(|value| value.split(','));
    let ports = ports.map(|port| match port.parse::<u16>() {
        Ok(number) if number > 0 => Ok(i32::from(number)),
        _ => Err(Refusal::Port { port: port.to_owned() }),
    });
    let ports = ports.collect::<Result<Vec<_>, _>>()?;
    Ok(engine.ports_of_pod(&of.namespace, &of.name, ports).await?)
}

/// Whether the client asks for an upgrade.
pub(super) fn is_upgrade(headers: &HeaderMap) -> bool {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let asks =
        values.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    asks && headers.contains_key(UPGRADE)
}

/// Repeats the request at `url`. If the runtime switches protocols, the connection is passed on until
/// it ends; `held` is what the client holds meanwhile.
pub(super) async fn proxy(
    mut request: Request<Incoming>,
    url: &str,
    held: impl Send + 'static,
) -> Result<Response<Answer>, Refusal> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| Refusal::Runtime {
        url: without_token(url),
        source,
    };
    let repeated = repeat(&request, url).map_err(failed)?;
    let answered = timeout(CONNECT_TIMEOUT, send(repeated)).await;
    let answered = answered.unwrap_or_else(|_| Err("it does not answer".into()));
    let mut response = answered.map_err(failed)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let status = response.status();
        let text = timeout(CONNECT_TIMEOUT, first_of(response.into_body())).await.unwrap_or_default();
        return Ok(answer(status, "text/plain; charset=utf-8", text));
    }
    let (server, client) = (hyper::upgrade::on(&mut response), hyper::upgrade::on(&mut request));
    tokio::spawn(async move {
        let _held = held;
        let ended = async {
            let (server, client) = tokio::try_join!(server, client).map_err(io::Error::other)?;
            relay(TokioIo::new(client), TokioIo::new(server), IDLE).await
        };
        if let Err(error) = ended.await {
            tracing::debug!(error = linux::chain(&error), "streams of a client");
        }
    });
    let mut answer = Response::new(Answer::Whole(None));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *answer.headers_mut() = response.headers().clone();
    Ok(answer)
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// A request for another server: of the client's it has the method and the headers.
fn repeat<B>(request: &Request<B>, url: &str) -> Result<(Request<String>, String), Failed> {
    let uri: Uri = url.parse()?;
    let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http"));
    let authority = authority.ok_or("its URL does not begin with http://")?.as_str().to_owned();
    let mut headers = request.headers().clone();
    // The kubelet's token is not the runtime's business.
    headers.remove(AUTHORIZATION);
    // What the client sends after its head is passed on as bytes of the streams, never as a body.
    for name in [CONTENT_LENGTH, TRANSFER_ENCODING, EXPECT] {
        headers.remove(name);
    }
    headers.insert(HOST, HeaderValue::from_str(&authority)?);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut repeated = Request::new(String::new());
    *repeated.method_mut() = request.method().clone();
    *repeated.uri_mut() = path.parse()?;
    *repeated.headers_mut() = headers;
    Ok((repeated, authority))
}

async fn send((request, authority): (Request<String>, String)) -> Result<Response<Incoming>, Failed> {
    let stream = TcpStream::connect(&authority).await?;
    let _nodelay_is_only_faster = stream.set_nodelay(true);
    let client = http1::Builder::new().max_buf_size(MOST_HEAD_BYTES).handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = client?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(error = linux::chain(&error), "connection to the streaming server");
        }
    });
    Ok(sender.send_request(request).await?)
}

async fn first_of(mut body: Incoming) -> Bytes {
    let mut bytes = Vec::new();
    while bytes.len() < MOST_REFUSAL_BYTES {
        let Some(Ok(frame)) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await else { break };
        bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
    }
    bytes.truncate(MOST_REFUSAL_BYTES);
    bytes.into()
}

/// For errors: who knows the whole URL has the streams.
fn without_token(url: &str) -> String {
    url.rsplit_once('/').map_or("", |(place, _token)| place).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(query: &str) -> Result<(bool, bool, bool, bool), String> {
        let query = Query::of(&format!("/exec?{query}").parse().unwrap()).unwrap();
        Wanted::of(&query).map(|w| (w.stdin, w.stdout, w.stderr, w.tty)).map_err(|error| error.to_string())
    }

    #[test]
    fn streams_are_named_as_kubelet_and_the_api_server_do() {
        assert_eq!(wanted("output=1&error=1"), Ok((false, true, true, false)));
        assert_eq!(wanted("stdin=true&stdout=true&stderr=true&tty=true"), Ok((true, true, false, true)));
        assert_eq!(wanted("tty=1"), Err("you must specify at least 1 of stdin, stdout, stderr".to_owned()));
        assert_eq!(wanted("output=x"), Err("output=x: true or false is needed".to_owned()));
    }

    #[test]
    fn an_error_does_not_show_the_token_of_a_url() {
        assert_eq!(without_token("http://127.0.0.1:7/exec/0123abcd"), "http://127.0.0.1:7/exec");
    }

    #[test]
    fn a_repeated_request_announces_no_body_and_shows_no_token() {
        let request = Request::post("/exec/default/web/business?command=sh");
        let request = request.header("authorization", "Bearer x").header("content-length", "5");
        let request = request.header("transfer-encoding", "chunked").header("expect", "100-continue");
        let request = request.header("connection", "Upgrade").header("upgrade", "SPDY/3.1");
        let (repeated, authority) = repeat(&request.body(()).unwrap(), "http://127.0.0.1:7/exec/01").unwrap();
        let mut names: Vec<_> = repeated.headers().keys().map(|name| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["connection", "host", "upgrade"]);
        assert_eq!((repeated.uri().path(), &authority[..]), ("/exec/01", "127.0.0.1:7"));
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        let headers = |pairs: &[(&'static str, &'static str)]| {
            let pairs = pairs.iter().map(|(name, value)| {
                (name.parse::<hyper::header::HeaderName>().unwrap(), HeaderValue::from_static(value))
            });
            is_upgrade(&pairs.collect())
        };
        assert!(headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "SPDY/3.1")]));
        assert!(!headers(&[("connection", "close"), ("upgrade", "SPDY/3.1")]));
        assert!(!headers(&[("connection", "Upgrade")]));
    }
}
