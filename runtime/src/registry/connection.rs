//! HTTP/1.1 connections to registries: opened, used again within one pull, and limited.
//!
//! Invariant: each step that waits for the other side ends when nothing comes for the idle limit.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{HOST, HeaderMap, PROXY_AUTHORIZATION};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, InvalidMessage};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use super::error::{Problem, Result};
use super::proxy::{self, Proxies, Proxy};
use super::resolve;
use super::url::{Origin, Url};

/// Of one address of a host; the next one is tried then.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Of a manifest or a token, which has few bytes. A blob may take longer.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(300);
/// Limit of an answer's head.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 100;

/// The connections of one pull to one host, and to those that it redirects to.
#[derive(Debug)]
pub(super) struct Connections {
    tls: Arc<ClientConfig>,
    idle: Duration,
    proxies: Proxies,
    free: Mutex<HashMap<Origin, Vec<Connection>>>,
}

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    _driver: Driver,
}

/// The task that moves the bytes of a connection.
#[derive(Debug)]
struct Driver(AbortHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer whose body is still to come.
#[derive(Debug)]
pub(super) struct Answer<'a> {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    body: Incoming,
    connection: Option<Connection>,
    pub(super) origin: Origin,
    connections: &'a Connections,
}

impl Connections {
    pub(super) fn new(tls: Arc<ClientConfig>, idle: Duration, proxies: Proxies) -> Self {
        Self { tls, idle, proxies, free: Mutex::default() }
    }

    /// Sends a request with the path and the host of `url`.
    pub(super) async fn send(&self, url: &Url, mut request: Request<Full<Bytes>>) -> Result<Answer<'_>> {
        let proxy = self.proxies.of(&url.origin)?;
        if let Some(proxy) = proxy.as_deref().filter(|_| !url.origin.is_https) {
            make_plain(proxy, url, &mut request)?;
        }
        // One that was used before may have been closed meanwhile; a GET can be sent again.
        while let Some(mut free) = self.take(&url.origin) {
            if free.sender.ready().await.is_err() {
                continue;
            }
            match self.within_limit(free.sender.send_request(request.clone())).await? {
                Ok(response) => return Ok(self.answer(response, free, url)),
                Err(error) if error.is_canceled() || error.is_incomplete_message() || error.is_closed() => {}
                Err(source) => return Err(Problem::Http { source }),
            }
        }
        let mut opened = match &proxy {
            None => self.open(&url.origin).await?,
            Some(proxy) => {
                let through = |source| {
                    let proxy = proxy.origin.to_string();
                    Problem::Through { proxy, source: Box::new(source) }
                };
                let stream = self.stream(&proxy.origin).await.map_err(through)?;
                if url.origin.is_https {
                    let tunnel = self.tunnel(stream, proxy, &url.origin).await.map_err(through)?;
                    self.secured(tunnel, &url.origin).await?
                } else {
                    self.handshake(stream).await?
                }
            }
        };
        let response = self.within_limit(opened.sender.send_request(request)).await?;
        Ok(self.answer(response.map_err(|source| Problem::Http { source })?, opened, url))
    }

    fn answer(&self, response: hyper::Response<Incoming>, connection: Connection, url: &Url) -> Answer<'_> {
        let (head, body) = response.into_parts();
        Answer {
            status: head.status,
            headers: head.headers,
            body,
            connection: Some(connection),
            origin: url.origin.clone(),
            connections: self,
        }
    }

    async fn open(&self, origin: &Origin) -> Result<Connection> {
        let stream = self.stream(origin).await?;
        if origin.is_https { self.secured(stream, origin).await } else { self.handshake(stream).await }
    }

    async fn stream(&self, origin: &Origin) -> Result<TcpStream> {
        let stream = self.connect(origin).await?;
        // Small requests are not held back for more.
        stream.set_nodelay(true).map_err(|source| Problem::Connect { source })?;
        Ok(stream)
    }

    /// Asks the proxy for a connection to `origin`.
    async fn tunnel(
        &self,
        stream: TcpStream,
        proxy: &Proxy,
        origin: &Origin,
    ) -> Result<TokioIo<hyper::upgrade::Upgraded>> {
        let http = |source| Problem::Http { source };
        let (mut sender, connection) = self.http1().handshake(TokioIo::new(stream)).await.map_err(http)?;
        let driver = tokio::spawn(async move {
            // The request reports the error.
            let _reported = connection.with_upgrades().await;
        });
        let _driver = Driver(driver.abort_handle());
        let response = self.within_limit(sender.send_request(connect_to(origin, proxy)?)).await?;
        let response = response.map_err(http)?;
        if response.status() != StatusCode::OK {
            return Err(Problem::Status { status: response.status().as_u16(), message: String::new() });
        }
        let upgraded = self.within_limit(hyper::upgrade::on(response)).await?.map_err(http)?;
        Ok(TokioIo::new(upgraded))
    }

    async fn secured<S>(&self, stream: S, origin: &Origin) -> Result<Connection>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let tls = |source: std::io::Error| {
            let cause = source.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
            // The first byte is none of a TLS record, as in an HTTP answer.
            if matches!(cause, Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType))) {
                let plain = Origin { is_https: false, ..origin.clone() };
                return Problem::NoTls { address: plain.to_string() };
            }
            Problem::Tls { source }
        };
        let name = ServerName::try_from(origin.host.clone()).map_err(std::io::Error::other).map_err(tls)?;
        let connector = TlsConnector::from(Arc::clone(&self.tls));
        let stream = self.within_limit(connector.connect(name, stream)).await?.map_err(tls)?;
        self.handshake(stream).await
    }

    async fn handshake<S>(&self, stream: S) -> Result<Connection>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let handshake = self.http1().handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(|source| Problem::Http { source })?;
        let driver = tokio::spawn(async move {
            // The request that waits for an answer reports the error.
            let _reported = connection.await;
        });
        Ok(Connection { sender, _driver: Driver(driver.abort_handle()) })
    }

    fn http1(&self) -> http1::Builder {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD_BYTES).max_headers(MAX_HEADERS);
        builder
    }

    async fn connect(&self, origin: &Origin) -> Result<TcpStream> {
        let addresses: Vec<IpAddr> = match origin.host.parse() {
            Ok(address) => vec![address],
            Err(_) => resolve::addresses(&origin.host, self.idle).await?,
        };
        let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
        for address in addresses {
            let connecting = TcpStream::connect(SocketAddr::new(address, origin.port));
            match tokio::time::timeout(CONNECT_TIMEOUT.min(self.idle), connecting).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(source)) => last = source,
                Err(_) => last = std::io::ErrorKind::TimedOut.into(),
            }
        }
        Err(Problem::Connect { source: last })
    }

    async fn within_limit<T>(&self, step: impl Future<Output = T>) -> Result<T> {
        tokio::time::timeout(self.idle, step).await.map_err(|_| Problem::Idle { idle: self.idle })
    }

    fn take(&self, origin: &Origin) -> Option<Connection> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).get_mut(origin)?.pop()
    }

    fn give_back(&self, origin: Origin, connection: Connection) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).entry(origin).or_default().push(connection);
    }
}

/// A request without TLS names the whole URL to a proxy (RFC 9112 section 3.2.2).
fn make_plain(proxy: &Proxy, url: &Url, request: &mut Request<Full<Bytes>>) -> Result<()> {
    if !proxy::is_harmless(request) {
        return Err(Problem::PlainThroughProxy { proxy: proxy.origin.to_string() });
    }
    let whole = format!("http://{}{}", url.origin, url.path);
    let invalid = |_| Problem::Redirect { url: trace::shortened(whole.clone(), 200) };
    *request.uri_mut() = whole.parse().map_err(invalid)?;
    if let Some(authorization) = &proxy.authorization {
        request.headers_mut().insert(PROXY_AUTHORIZATION, authorization.clone());
    }
    Ok(())
}

fn connect_to(origin: &Origin, proxy: &Proxy) -> Result<Request<Full<Bytes>>> {
    let host = if origin.host.contains(':') { format!("[{}]", origin.host) } else { origin.host.clone() };
    let place = format!("{host}:{}", origin.port);
    let mut request = Request::connect(&place).header(HOST, &place);
    if let Some(authorization) = &proxy.authorization {
        request = request.header(PROXY_AUTHORIZATION, authorization);
    }
    request.body(Full::default()).map_err(|_| Problem::Redirect { url: place })
}

impl Answer<'_> {
    pub(super) fn header(&self, name: hyper::header::HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The next bytes of the body; `None` at its end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.connections.within_limit(self.body.frame()).await? {
                None => {
                    if let Some(connection) = self.connection.take() {
                        self.connections.give_back(self.origin.clone(), connection);
                    }
                    return Ok(None);
                }
                Some(frame) => {
                    let frame = frame.map_err(|source| Problem::Http { source })?;
                    // Trailers have no use here.
                    if let Ok(bytes) = frame.into_data() {
                        return Ok(Some(bytes));
                    }
                }
            }
        }
    }

    /// The whole body, if it has at most `most` bytes. `flag` names what changes the limit.
    pub(super) async fn whole(self, most: u64, flag: &'static str) -> Result<Vec<u8>> {
        let whole = tokio::time::timeout(DOCUMENT_TIMEOUT, self.collect(most, flag)).await;
        whole.map_err(|_| Problem::Slow { most: DOCUMENT_TIMEOUT })?
    }

    async fn collect(mut self, most: u64, flag: &'static str) -> Result<Vec<u8>> {
        let mut whole = Vec::new();
        while let Some(bytes) = self.next().await? {
            if (whole.len() + bytes.len()) as u64 > most {
                return Err(Problem::TooLarge { most, flag });
            }
            whole.extend_from_slice(&bytes);
        }
        Ok(whole)
    }
}
