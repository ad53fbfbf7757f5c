//! The streaming server: Exec, Attach and PortForward answer with a URL, and the client's connection to it carries
//! the streams.
//!
//! A URL works once, within a minute. The server listens on a port of the loopback interface, which all
//! users of the node reach: a URL has 128 random bits, and nothing else is served.

mod idle;
mod port_forward;
mod probe;
mod remote_command;
mod spdy;
pub mod spdy_client;
mod websocket;

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    CONNECTION, HeaderMap, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_PROTOCOL, UPGRADE,
};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use proto::cri::{AttachRequest, ExecRequest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::runtime::state::Sandbox;
use port_forward::Target;
use remote_command::Command;

/// containerd's and CRI-O's.
const VALID_FOR: Duration = Duration::from_secs(60);
/// URLs that no client has used yet.
const MOST_PENDING: usize = 1024;
/// Clients with streams, if there are as many descriptors (16 for each).
const MOST_SESSIONS: u64 = 1024;
const DESCRIPTORS_OF_A_SESSION: u64 = 16;
/// Connections to pods' ports, of all clients, if there are four times as many descriptors.
const MOST_CONNECTIONS: u64 = 4096;
/// Clients that have not named a URL yet: any user of the node. The oldest one gives way.
const MOST_UNKNOWN: usize = 128;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
const MOST_HEADER_BYTES: usize = 64 << 10;

const SPDY: &str = "SPDY/3.1";
const WEBSOCKET: &str = "websocket";
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");

/// Why a connection ended, for the log.
type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// What carries the streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    Spdy,
    WebSocket,
}

impl Carrier {
    fn name(self) -> &'static str {
        match self {
            Self::Spdy => SPDY,
            Self::WebSocket => WEBSOCKET,
        }
    }

    /// Of the protocol of the streams.
    fn header(self) -> HeaderName {
        match self {
            Self::Spdy => STREAM_PROTOCOL,
            Self::WebSocket => SEC_WEBSOCKET_PROTOCOL,
        }
    }
}

/// What a URL is for.
#[derive(Debug)]
enum Purpose {
    Command(Command),
    PortForward(Target),
}

impl Purpose {
    /// The first part of the URL's path.
    fn kind(&self) -> &'static str {
        match self {
            Self::Command(command) => command.kind(),
            Self::PortForward(_) => "portforward",
        }
    }

    /// What its streams may speak, the best one first.
    fn protocols(&self, carrier: Carrier) -> &'static [&'static str] {
        match (self, carrier) {
            (Self::Command(_), Carrier::Spdy) => &[remote_command::by_spdy::PROTOCOL],
            (Self::Command(_), Carrier::WebSocket) => remote_command::by_websocket::PROTOCOLS,
            (Self::PortForward(_), Carrier::Spdy) => &[port_forward::by_spdy::PROTOCOL],
            (Self::PortForward(_), Carrier::WebSocket) => {
                &[port_forward::by_tunnel::PROTOCOL, port_forward::by_websocket::PROTOCOL]
            }
        }
    }
}

#[derive(Debug)]
struct Pending {
    until: Instant,
    purpose: Purpose,
}

#[derive(Debug)]
pub(crate) struct Streaming {
    address: SocketAddr,
    connections: Arc<Semaphore>,
    pending: Mutex<HashMap<String, Pending>>,
}

impl Streaming {
    /// Listens, and serves until the runtime ends.
    pub(crate) async fn start(runtime: Arc<Runtime>) -> std::io::Result<Arc<Self>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let descriptors = linux::process::descriptor_limit();
        let places = |most: u64| Arc::new(Semaphore::new(usize::try_from(most.max(1)).unwrap_or(1)));
        let connections = places(MOST_CONNECTIONS.min(descriptors / 4));
        let sessions = places(MOST_SESSIONS.min(descriptors / DESCRIPTORS_OF_A_SESSION));
        let address = listener.local_addr()?;
        let streaming = Arc::new(Self { address, connections, pending: Mutex::default() });
        tokio::spawn(accept(listener, Arc::clone(&streaming), runtime, sessions));
        Ok(streaming)
    }

    pub(crate) fn exec(&self, request: ExecRequest) -> Result<String> {
        self.url(Purpose::Command(Command::Exec(request)))
    }

    pub(crate) fn attach(&self, request: AttachRequest) -> Result<String> {
        self.url(Purpose::Command(Command::Attach(request)))
    }

    /// `ports`: which; none: all.
    pub(crate) fn port_forward(&self, sandbox: Arc<Sandbox>, ports: Vec<u16>) -> Result<String> {
        self.url(Purpose::PortForward(Target { sandbox, ports, places: Arc::clone(&self.connections) }))
    }

    fn url(&self, purpose: Purpose) -> Result<String> {
        let kind = purpose.kind();
        let token = linux::random::hexadecimal()?;
        let (now, mut pending) = (Instant::now(), self.locked());
        pending.retain(|_, pending| pending.until > now);
        if pending.len() >= MOST_PENDING {
            return Err(Error::Busy { what: "the streaming server: too many URLs that were not used yet" });
        }
        pending.insert(token.clone(), Pending { until: now + VALID_FOR, purpose });
        Ok(format!("http://{}/{kind}/{token}", self.address))
    }

    /// Once for each URL: what it is for, and what its streams speak, if the client offers it.
    fn take(
        &self,
        path: &str,
        carrier: Carrier,
        offers: impl Fn(&str) -> bool,
    ) -> std::result::Result<(Purpose, &'static str), Refusal> {
        let (kind, token) =
            path.strip_prefix('/').and_then(|path| path.split_once('/')).ok_or(Refusal::NoSuchUrl)?;
        let mut pending = self.locked();
        let found = pending.get(token).filter(|found| found.until > Instant::now());
        let found = found.filter(|found| found.purpose.kind() == kind).ok_or(Refusal::NoSuchUrl)?;
        let known = found.purpose.protocols(carrier);
        let protocol = known.iter().copied().find(|protocol| offers(protocol));
        let protocol = protocol.ok_or(Refusal::NoProtocol(known))?;
        pending.remove(token).map(|pending| (pending.purpose, protocol)).ok_or(Refusal::NoSuchUrl)
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<String, Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn accept(
    listener: TcpListener,
    streaming: Arc<Streaming>,
    runtime: Arc<Runtime>,
    sessions: Arc<Semaphore>,
) {
    let mut unknown: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "accept a streaming connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        unknown.retain(|client| !client.is_finished());
        if unknown.len() >= MOST_UNKNOWN
            && let Some(oldest) = unknown.pop_front()
        {
            oldest.abort();
        }
        let (streaming, runtime, sessions) =
            (Arc::clone(&streaming), Arc::clone(&runtime), Arc::clone(&sessions));
        let client = tokio::spawn(async move {
            let known = tokio::time::timeout(REQUEST_TIMEOUT * 2, request(stream, streaming, sessions)).await;
            if let Ok(Some(known)) = known {
                // A task of its own, which does not give way.
                tokio::spawn(async move { serve(known, &runtime).await });
            }
        });
        unknown.push_back(client.abort_handle());
    }
}

async fn serve(known: Known, runtime: &Arc<Runtime>) {
    let Known { accepted: Accepted { purpose, carrier, protocol, place: _place }, io } = known;
    match (purpose, carrier) {
        (Purpose::Command(command), Carrier::Spdy) => {
            remote_command::by_spdy::serve(runtime, command, io).await;
        }
        (Purpose::Command(command), Carrier::WebSocket) => {
            let socket = websocket::server(io).await;
            remote_command::by_websocket::serve(runtime, command, protocol, socket).await;
        }
        (Purpose::PortForward(target), Carrier::Spdy) => port_forward::by_spdy::serve(target, io).await,
        (Purpose::PortForward(target), Carrier::WebSocket)
            if protocol == port_forward::by_tunnel::PROTOCOL =>
        {
            port_forward::by_tunnel::serve(target, websocket::server(io).await).await;
        }
        (Purpose::PortForward(target), Carrier::WebSocket) => {
            port_forward::by_websocket::serve(target, websocket::server(io).await).await;
        }
    }
}

/// A client that has named a URL.
struct Known {
    accepted: Accepted,
    io: TokioIo<Upgraded>,
}

struct Accepted {
    purpose: Purpose,
    carrier: Carrier,
    /// Of its streams.
    protocol: &'static str,
    /// Among the clients with streams.
    place: OwnedSemaphorePermit,
}

/// The one request of a connection, and the connection after its answer.
async fn request(stream: TcpStream, streaming: Arc<Streaming>, sessions: Arc<Semaphore>) -> Option<Known> {
    let (upgraded, mut next) = tokio::sync::mpsc::channel(1);
    let service = hyper::service::service_fn(|mut request: Request<Incoming>| {
        let answer = match negotiate(&streaming, &sessions, &request) {
            Ok((accepted, answer)) => {
                let _one_request_per_connection =
                    upgraded.try_send((accepted, hyper::upgrade::on(&mut request)));
                answer
            }
            Err(refusal) => refusal.answer(),
        };
        async move { Ok::<_, Infallible>(answer) }
    });
    let _nodelay_is_only_faster = stream.set_nodelay(true);
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .max_buf_size(MOST_HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    let ended = async {
        served?;
        let Ok((accepted, upgrade)) = next.try_recv() else { return Ok(None) };
        Ok::<_, hyper::Error>(Some(Known { accepted, io: TokioIo::new(upgrade.await?) }))
    };
    ended.await.inspect_err(|error| tracing::debug!(%error, "a streaming connection")).ok().flatten()
}

/// Why a request gets no streams.
#[derive(Debug)]
enum Refusal {
    Method,
    NoSuchUrl,
    NoUpgrade,
    NoKey,
    /// With those that are known.
    NoProtocol(&'static [&'static str]),
    Busy,
}

impl Refusal {
    fn answer(&self) -> Response<Full<Bytes>> {
        let (status, text) = match self {
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, "GET or POST is needed\n".to_owned()),
            Self::NoSuchUrl => {
                (StatusCode::NOT_FOUND, "the URL is unknown, was used, or is too old\n".to_owned())
            }
            Self::NoUpgrade => {
                (StatusCode::BAD_REQUEST, format!("an upgrade to {SPDY} or {WEBSOCKET} is needed\n"))
            }
            Self::NoKey => {
                (StatusCode::BAD_REQUEST, "Sec-WebSocket-Key and version 13 are needed\n".to_owned())
            }
            Self::NoProtocol(known) => {
                (StatusCode::FORBIDDEN, format!("the stream protocols are {}\n", known.join(", ")))
            }
            Self::Busy => {
                let text = "too many clients have streams: no more are served until some end\n";
                (StatusCode::SERVICE_UNAVAILABLE, text.to_owned())
            }
        };
        let mut answer = Response::new(Full::from(text));
        *answer.status_mut() = status;
        // Not for the answer to an upgrade: it would lose its own value of this header.
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        answer
    }
}

fn negotiate(
    streaming: &Streaming,
    sessions: &Arc<Semaphore>,
    request: &Request<Incoming>,
) -> std::result::Result<(Accepted, Response<Full<Bytes>>), Refusal> {
    if !matches!(*request.method(), Method::GET | Method::POST) {
        return Err(Refusal::Method);
    }
    let headers = request.headers();
    let is_wanted = |carrier: &Carrier| has_word(headers, &UPGRADE, carrier.name());
    let carrier = [Carrier::Spdy, Carrier::WebSocket].into_iter().find(is_wanted);
    let carrier = carrier.filter(|_| has_word(headers, &CONNECTION, "upgrade")).ok_or(Refusal::NoUpgrade)?;
    let key = match carrier {
        Carrier::Spdy => None,
        Carrier::WebSocket => Some(websocket::accept_key(headers).ok_or(Refusal::NoKey)?),
    };
    let place = Arc::clone(sessions).try_acquire_owned().map_err(|_| Refusal::Busy)?;
    // Last, since the URL works once.
    let offers = |known: &str| has_word(headers, &carrier.header(), known);
    let (purpose, protocol) = streaming.take(request.uri().path(), carrier, offers)?;
    let mut answer = Response::new(Full::default());
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = answer.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(carrier.name()));
    headers.insert(carrier.header(), HeaderValue::from_static(protocol));
    if let Some(key) = key {
        headers.insert(SEC_WEBSOCKET_ACCEPT, key);
    }
    Ok((Accepted { purpose, carrier, protocol, place }, answer))
}

/// Whether one of the header's values has the word, in any case, in its list.
fn has_word(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|found| found.trim().eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streaming() -> Streaming {
        let (address, connections) =
            (SocketAddr::from((Ipv4Addr::LOCALHOST, 80)), Arc::new(Semaphore::new(1)));
        Streaming { address, connections, pending: Mutex::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_url_works_once_and_expires_after_a_minute() {
        let streaming = streaming();
        let taken = |url: &str| {
            let path = url.strip_prefix("http://127.0.0.1:80").unwrap();
            streaming.take(path, Carrier::Spdy, |_| true).is_ok()
        };
        let url = || streaming.exec(ExecRequest::default()).unwrap();
        let (used, late) = (url(), url());
        tokio::time::advance(VALID_FOR - Duration::from_secs(1)).await;
        assert!(taken(&used) && !taken(&used));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!taken(&late));
        // The next request forgets it.
        let next = url();
        assert_eq!(streaming.locked().len(), 1);
        assert!(taken(&next));
    }
}
