//! Images in memory, and a small HTTP server that serves them as a test asks, also wrongly.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use serde_json::json;
use tests::cri::{digest_of, gzip};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// A manifest with its blobs.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    pub(crate) manifest: Vec<u8>,
    pub(crate) media_type: &'static str,
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
    /// Digests, lowest first.
    pub(crate) layers: Vec<String>,
}

/// A layer as it is sent, and its tar.
pub(crate) struct Layer {
    pub(crate) media_type: &'static str,
    pub(crate) sent: Vec<u8>,
    pub(crate) tar: Vec<u8>,
}

impl Layer {
    pub(crate) fn gzip(tar: &[u8]) -> Self {
        let media_type = "application/vnd.oci.image.layer.v1.tar+gzip";
        Self { media_type, sent: gzip(tar), tar: tar.to_owned() }
    }
}

impl Image {
    pub(crate) fn new(layers: &[Layer], label: &str) -> Self {
        Self::of_type(OCI_MANIFEST, layers, label)
    }

    /// `label` makes configurations differ.
    pub(crate) fn of_type(media_type: &'static str, layers: &[Layer], label: &str) -> Self {
        let mut blobs = BTreeMap::new();
        let mut put = |bytes: Vec<u8>| {
            let (digest, size) = (digest_of(&bytes), bytes.len());
            blobs.insert(digest.clone(), bytes);
            (digest, size)
        };
        let config = json!({
            "architecture": architecture(), "os": "linux",
            "config": {"Entrypoint": ["/demo-app"], "Cmd": ["print", label], "Labels": {"label": label}},
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|l| digest_of(&l.tar)).collect::<Vec<_>>()},
        });
        let config = put(config.to_string().into_bytes());
        let config = json!({
            "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config.0, "size": config.1,
        });
        let mut digests = Vec::new();
        let mut descriptors = Vec::new();
        for layer in layers {
            let (digest, size) = put(layer.sent.clone());
            descriptors.push(json!({"mediaType": layer.media_type, "digest": digest, "size": size}));
            digests.push(digest);
        }
        let manifest =
            json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": descriptors});
        Self { manifest: manifest.to_string().into_bytes(), media_type, blobs, layers: digests }
    }

    pub(crate) fn digest(&self) -> String {
        digest_of(&self.manifest)
    }

    /// An honest registry's reply, for each repository and tag.
    pub(crate) fn reply(&self, path: &str) -> Reply {
        let path = path.split('?').next().unwrap();
        if path.contains("/manifests/") {
            return Reply::ok(self.manifest.clone()).with("content-type", self.media_type);
        }
        match path.rsplit_once("/blobs/").and_then(|(_, digest)| self.blobs.get(digest)) {
            Some(blob) => Reply::ok(blob.clone()),
            None => Reply::status(404),
        }
    }
}

pub(crate) fn architecture() -> String {
    oci_spec::image::Arch::default().to_string()
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// With the query.
    pub(crate) path: String,
    /// Names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Debug, Clone)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Of the announced body, the bytes that are sent.
    sent: Option<usize>,
    then: Then,
    after: Option<Arc<Notify>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Continue,
    Close,
    /// Sends no more, and does not close.
    Stall,
}

impl Reply {
    pub(crate) fn ok(body: Vec<u8>) -> Self {
        Self { status: 200, headers: Vec::new(), body, sent: None, then: Then::Continue, after: None }
    }

    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::ok(Vec::new()) }
    }

    pub(crate) fn redirect(url: &str) -> Self {
        Self::status(307).with("location", url)
    }

    pub(crate) fn challenge(value: &str) -> Self {
        Self::status(401).with("www-authenticate", value)
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Announces the whole body, sends less and closes.
    pub(crate) fn cut(self, sent: usize) -> Self {
        Self { sent: Some(sent), then: Then::Close, ..self }
    }

    /// Announces the whole body, sends less and stays.
    pub(crate) fn stalled(self, sent: usize) -> Self {
        Self { sent: Some(sent), then: Then::Stall, ..self }
    }

    /// Announces no length: the body ends with the connection.
    pub(crate) fn unannounced(self) -> Self {
        Self { then: Then::Close, ..self }
    }

    /// Waits before anything is sent.
    pub(crate) fn after(self, event: &Arc<Notify>) -> Self {
        Self { after: Some(Arc::clone(event)), ..self }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} Reply\r\n", self.status);
        let is_announced = self.then != Then::Close || self.sent.is_some();
        if is_announced {
            head += &format!("content-length: {}\r\n", self.body.len());
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        let sent = self.sent.unwrap_or(self.body.len());
        [head.as_bytes(), b"\r\n", &self.body[..sent]].concat()
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

/// A server on a port of its own, in the network namespace of the test's thread.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_with(None, handler).await
    }

    pub(crate) async fn start_with(
        certificate: Option<&Certificate>,
        handler: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::start_as(certificate.map(|certificate| certificate.acceptor(None)), handler).await
    }

    /// For clients that have the certificate `client`.
    pub(crate) async fn start_for(
        client: &Certificate,
        certificate: &Certificate,
        handler: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::start_as(Some(certificate.acceptor(Some(client))), handler).await
    }

    async fn start_as(
        tls: Option<TlsAcceptor>,
        handler: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (handler, seen): (Arc<Handler>, _) = (Arc::new(handler), Arc::clone(&requests));
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (handler, seen, tls) = (Arc::clone(&handler), Arc::clone(&seen), tls.clone());
                tokio::spawn(async move {
                    let Some(tls) = tls else { return serve(stream, &*handler, &seen).await };
                    // A client that refuses the certificate hangs up.
                    if let Ok(stream) = tls.accept(stream).await {
                        serve(stream, &*handler, &seen).await;
                    }
                });
            }
        });
        Self { address, requests, accepting }
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// Requests whose path contains `part`.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.requests().iter().filter(|request| request.path.contains(part)).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    handler: &Handler,
    seen: &Mutex<Vec<Request>>,
) {
    while let Some(request) = read(&mut stream).await {
        seen.lock().unwrap().push(request.clone());
        let reply = handler(&request);
        if let Some(event) = &reply.after {
            event.notified().await;
        }
        // The client may hang up.
        if stream.write_all(&reply.bytes()).await.is_err() || stream.flush().await.is_err() {
            return;
        }
        match reply.then {
            Then::Continue => {}
            Then::Close => {
                let _gone = stream.shutdown().await;
                return;
            }
            Then::Stall => std::future::pending().await,
        }
    }
}

/// One request without a body; `None` at the end.
async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Option<Request> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
        // What begins like this is TLS: hang up, as servers do.
        if head[0] == 0x16 {
            return None;
        }
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let headers = lines.filter_map(|line| line.split_once(": "));
    Some(Request { path, headers: headers.map(|(n, v)| (n.to_lowercase(), v.to_owned())).collect() })
}

/// Of 127.0.0.1, localhost and registry.test, signed by itself.
pub(crate) struct Certificate {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Certificate {
    pub(crate) fn valid() -> Self {
        Self::until(4096)
    }

    pub(crate) fn expired() -> Self {
        Self::until(2020)
    }

    fn until(year: i32) -> Self {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned(), "registry.test".to_owned()];
        let mut parameters = CertificateParams::new(names).unwrap();
        parameters.not_before = rcgen::date_time_ymd(2019, 1, 1);
        parameters.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.self_signed(&key).unwrap();
        Self { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// `client`: the only certificate with which clients are served.
    fn acceptor(&self, client: Option<&Self>) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let parsed = |certificate: &Self| {
            CertificateDer::from_pem_slice(certificate.certificate.as_bytes()).unwrap().into_owned()
        };
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let config = match client {
            None => config.with_no_client_auth(),
            Some(client) => {
                let mut roots = rustls::RootCertStore::empty();
                roots.add(parsed(client)).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                config.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        Arc::new(config.with_single_cert(vec![parsed(self)], key).unwrap()).into()
    }
}
