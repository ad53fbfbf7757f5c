//! Connections: accepted, bounded in number and time, authorised, and given to the server.
//!
//! A connection that has not sent an authorised request yet is unknown. There are few places for those,
//! and the oldest one gives way to a new one. So clients without a token that wait do not keep others out.
//! Those that connect so fast that [`MOST_UNKNOWN`] of them come during the handshake of another client end
//! that client's connection: against them only the network helps.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use super::Server;
use super::body::{Answer, text};
use super::credentials::Token;
use super::stalled::Stalling;

/// Of each listener.
const MOST_UNKNOWN: usize = 128;
/// Of each listener, answers and streams, if there are as many descriptors (8 for each).
const MOST_KNOWN: u64 = 512;
const DESCRIPTORS_OF_A_CLIENT: u64 = 8;
/// For the head of a request, and for TLS before it.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const MOST_HEAD_BYTES: usize = 32 << 10;
const MOST_HEADERS: usize = 64;
/// A client that takes nothing for so long is dropped.
const STALL_TIMEOUT: Duration = Duration::from_secs(600);
/// A client on the network that is silent for so long is asked whether it is still there,
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
/// again at this interval,
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// and dropped when it has not answered so often. Without that, one that vanished holds a place for ever.
const KEEPALIVE_PROBES: u32 = 9;
/// After a failed accept: usually there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A place among the known connections.
pub(super) type Place = Arc<OwnedSemaphorePermit>;

/// What the connections of a listener share.
struct Clients {
    server: Arc<Server>,
    /// `None`: the socket's permissions have authorised the client.
    token: Option<Token>,
    places: Arc<Semaphore>,
}

pub(super) async fn serve_unix(listener: UnixListener, server: Arc<Server>) {
    let (clients, listener) = (Clients::new(server, None), &listener);
    let next = move || async move { Ok(listener.accept().await?.0) };
    accept(next, clients, |stream| std::future::ready(Ok(stream))).await;
}

pub(super) async fn serve_network(
    listener: TcpListener,
    tls: TlsAcceptor,
    token: Token,
    server: Arc<Server>,
) {
    let (clients, listener) = (Clients::new(server, Some(token)), &listener);
    let next = move || async move {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        Ok(stream)
    };
    let secure = move |stream: TcpStream| {
        let accepting = tls.accept(stream);
        async move { tokio::time::timeout(HEAD_TIMEOUT, accepting).await? }
    };
    accept(next, clients, secure).await;
}

/// Has the kernel find out that a client has vanished.
fn keep_alive(stream: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_keepidle(&stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_PROBES)?;
    Ok(sockopt::set_socket_keepalive(&stream, true)?)
}

impl Clients {
    fn new(server: Arc<Server>, token: Option<Token>) -> Arc<Self> {
        let places = MOST_KNOWN.min(linux::process::descriptor_limit() / DESCRIPTORS_OF_A_CLIENT);
        let places = Arc::new(Semaphore::new(usize::try_from(places.max(1)).unwrap_or(1)));
        Arc::new(Self { server, token, places })
    }

    /// The answer to a request, and the client's place while it is being written.
    async fn answer(&self, request: Request<Incoming>, client: &Client) -> Response<Answer> {
        let counters = &self.server.counters;
        if self.token.as_ref().is_some_and(|token| !token.is_in(request.headers())) {
            counters.count_unauthorized();
            return text(StatusCode::UNAUTHORIZED, "Unauthorized\n");
        }
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            counters.count_refused_connection();
            return text(StatusCode::SERVICE_UNAVAILABLE, "too many clients: try again later\n");
        };
        let place = Arc::new(place);
        client.become_known(&place);
        self.server.answer(request, place).await
    }
}

/// A connection.
#[derive(Debug, Default)]
struct Client {
    is_known: AtomicBool,
    place: Mutex<Option<Place>>,
}

impl Client {
    fn become_known(&self, place: &Place) {
        self.is_known.store(true, Ordering::Relaxed);
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(place));
    }
}

/// Never returns. When it is dropped, all connections but those with streams end.
async fn accept<S, Next, T, Secure>(
    next: impl Fn() -> Next + Send,
    clients: Arc<Clients>,
    secure: impl Fn(S) -> Secure + Send,
) where
    S: Send + 'static,
    Next: Future<Output = io::Result<S>> + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    Secure: Future<Output = io::Result<T>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut unknown: VecDeque<(AbortHandle, Arc<Client>)> = VecDeque::new();
    loop {
        let stream = tokio::select! {
            stream = next() => stream,
            Some(_ended) = connections.join_next() => continue,
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "accept a connection to the endpoints");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        unknown.retain(|(task, client)| !task.is_finished() && !client.is_known.load(Ordering::Relaxed));
        if unknown.len() >= MOST_UNKNOWN
            && let Some((oldest, _)) = unknown.pop_front()
        {
            clients.server.counters.count_refused_connection();
            oldest.abort();
        }
        let client = Arc::new(Client::default());
        let (of_task, clients, secured) = (Arc::clone(&client), Arc::clone(&clients), secure(stream));
        let task = connections.spawn(async move {
            match secured.await {
                Ok(stream) => serve(stream, of_task, clients).await,
                Err(error) => tracing::debug!(%error, "a connection to the endpoints"),
            }
        });
        unknown.push_back((task, client));
    }
}

/// The one request of a connection.
async fn serve<S>(stream: S, client: Arc<Client>, clients: Arc<Clients>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let (clients, client) = (&clients, &client);
        async move {
            let mut answer = clients.answer(request, client).await;
            // Not for an upgrade: it has its own value of this header.
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MOST_HEAD_BYTES)
        .max_headers(MOST_HEADERS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(Stalling::new(stream, STALL_TIMEOUT)), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!(error = linux::chain(&error), "a connection to the endpoints");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_vanishes_is_found_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        keep_alive(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), KEEPALIVE_INTERVAL);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), KEEPALIVE_PROBES);
    }
}
