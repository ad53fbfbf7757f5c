//! Requests over one host's connections, without credentials, and the words of its errors.

use std::sync::Arc;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{HOST, USER_AGENT};
use hyper::{Method, Request};
use serde::Deserialize;
use tokio::sync::OnceCell;

use super::RegistryConfig;
use super::connection::{Answer, Connections};
use super::error::{Problem, Result};
use super::hosts::TlsFiles;
use super::proxy::Proxies;
use super::tls;
use super::url::Url;

/// Limit of the body of an error.
const MAX_ERROR_BYTES: u64 = 16 << 10;
/// Of a registry's message, which is quoted.
const MAX_MESSAGE: usize = 200;
const AGENT: &str = concat!("hawser/", env!("CARGO_PKG_VERSION"));

/// The connections of one pull, with the TLS settings of one host.
#[derive(Debug)]
pub(super) struct Transport {
    tls: TlsFiles,
    config: RegistryConfig,
    proxies: Proxies,
    connections: OnceCell<Connections>,
}

impl Transport {
    pub(super) fn new(tls: TlsFiles, config: RegistryConfig, proxies: Proxies) -> Self {
        Self { tls, config, proxies, connections: OnceCell::new() }
    }

    /// Reads the files of TLS before the first request.
    pub(super) async fn send(&self, url: &Url, request: Request<Full<Bytes>>) -> Result<Answer<'_>> {
        let connections = self.connections.get_or_try_init(|| async {
            let files = self.tls.clone();
            let config = tokio::task::spawn_blocking(move || tls::config(&files)).await;
            let config: Arc<_> =
                config.map_err(|e| Problem::Store { source: std::io::Error::other(e) })??;
            Ok::<_, Problem>(Connections::new(config, self.config.idle(), self.proxies.clone()))
        });
        connections.await?.send(url, request).await
    }
}

pub(super) fn request(method: Method, url: &Url, body: Bytes) -> Result<Request<Full<Bytes>>> {
    let invalid = |_| Problem::Redirect { url: trace::shortened(url.path.clone(), MAX_MESSAGE) };
    Request::builder()
        .method(method)
        .uri(&url.path)
        .header(HOST, url.origin.to_string())
        .header(USER_AGENT, AGENT)
        .body(Full::new(body))
        .map_err(invalid)
}

/// The registry's own words. A body of another form is not quoted: after a redirect it may come from a
/// service that the pod's owner must not read.
pub(super) async fn message(answer: Answer<'_>) -> String {
    #[derive(Deserialize)]
    struct Body {
        errors: Vec<Entry>,
    }
    #[derive(Deserialize)]
    struct Entry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let Ok(bytes) = answer.whole(MAX_ERROR_BYTES, "").await else { return String::new() };
    let Ok(body) = serde_json::from_slice::<Body>(&bytes) else { return String::new() };
    let Some(Entry { code, message }) = body.errors.into_iter().next() else { return String::new() };
    let text = if message.is_empty() { code } else { message };
    trace::shortened(trace::escaped(&text).to_string(), MAX_MESSAGE)
}
