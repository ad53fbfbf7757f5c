//! Requests to one host of a registry (OCI Distribution Specification 1.1, "Pull").

use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, HeaderValue, LOCATION, USER_AGENT,
    WWW_AUTHENTICATE,
};
use hyper::{Method, Request, StatusCode};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::OnceCell;

use super::challenge::Challenge;
use super::connection::{Answer, Connections};
use super::credentials::Credentials;
use super::error::{Problem, Result};
use super::hosts::Host;
use super::url::{Origin, Url};
use super::{RegistryConfig, tls, token};
use crate::images::documents::MANIFEST_TYPES;

const MAX_REDIRECTS: usize = 5;
/// Limit of the body of an error.
const MAX_ERROR_BYTES: u64 = 16 << 10;
/// Of a registry's message, which is quoted.
const MAX_MESSAGE: usize = 200;
const AGENT: &str = concat!("hawser/", env!("CARGO_PKG_VERSION"));

/// One host, for one pull of one repository.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) host: Host,
    origin: Origin,
    /// Without the domain: `library/demo`.
    repository: String,
    /// The registry's name, which a mirror gets as `ns`.
    domain: String,
    credentials: Option<Credentials>,
    config: RegistryConfig,
    connections: OnceCell<Connections>,
    /// The value of `Authorization` that the host has accepted.
    authorization: Mutex<Option<Authorization>>,
}

#[derive(Debug, Clone)]
pub(super) struct Authorization {
    pub(super) value: HeaderValue,
    /// For errors.
    pub(super) with: &'static str,
}

/// A manifest or an index, whose digest was checked.
#[derive(Debug, Clone)]
pub(super) struct Document {
    pub(super) digest: String,
    pub(super) media_type: Option<String>,
    pub(super) bytes: Vec<u8>,
}

/// Whom a request goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recipient {
    /// This host: with its headers and credentials.
    Own,
    Other,
}

impl Client {
    pub(super) fn new(
        host: Host,
        (domain, repository): (&str, &str),
        credentials: Option<&Credentials>,
        config: &RegistryConfig,
    ) -> Result<Self> {
        let invalid = || Problem::Redirect { url: host.authority.clone() };
        let origin = Origin::of(host.is_https, &host.authority).ok_or_else(invalid)?;
        // A mirror is another party: its administrator gives it credentials by `header`.
        let credentials = credentials.filter(|_| host.is_registry).cloned();
        Ok(Self {
            origin,
            repository: repository.to_owned(),
            domain: domain.to_owned(),
            credentials,
            config: config.clone(),
            connections: OnceCell::new(),
            authorization: Mutex::default(),
            host,
        })
    }

    /// The manifest or index of a tag or a digest, at most `most` bytes.
    pub(super) async fn manifest(&self, reference: &str, most: u64) -> Result<Document> {
        let mut answer = self.get(&format!("manifests/{reference}"), MANIFEST_TYPES).await?;
        let media_type =
            answer.header(CONTENT_TYPE).map(|text| text.split(';').next().unwrap_or(text).trim().to_owned());
        let announced = answer.header(HeaderName::from_static("docker-content-digest")).map(str::to_owned);
        if length(&answer).is_some_and(|length| length > most) {
            return Err(Problem::TooLarge { most, flag: "--image-max-manifest-bytes" });
        }
        answer.headers.clear();
        let bytes = answer.whole(most, "--image-max-manifest-bytes").await?;
        let digest = format!("sha256:{}", base16ct::lower::encode_string(&Sha256::digest(&bytes)));
        let wanted = if reference.starts_with("sha256:") { Some(reference.to_owned()) } else { announced };
        match wanted {
            Some(wanted) if wanted.starts_with("sha256:") && wanted != digest => {
                Err(Problem::OtherDigest { wanted, found: digest })
            }
            _ => Ok(Document { digest, media_type, bytes }),
        }
    }

    /// A blob's bytes, which are still to be checked. It must have `size` bytes if its answer says
    /// how many.
    pub(super) async fn blob(&self, digest: &str, size: u64) -> Result<Answer<'_>> {
        let answer = self.get(&format!("blobs/{digest}"), "*/*").await?;
        match length(&answer) {
            Some(found) if found != size => Err(Problem::Length { announced: size, found }),
            _ => Ok(answer),
        }
    }

    async fn get(&self, object: &str, accept: &str) -> Result<Answer<'_>> {
        let mut url = Url {
            origin: self.origin.clone(),
            path: format!("{}/{}/{object}", self.host.prefix, self.repository),
        };
        if !self.host.is_registry {
            url = url.with("ns", &self.domain);
        }
        let used = self.authorization();
        let answer = self.follow(url.clone(), accept, used.as_ref()).await?;
        if answer.status != StatusCode::UNAUTHORIZED {
            return successful(answer).await;
        }
        // Once: a host that refuses what its token service has just given would go on for ever.
        let challenges = answer.headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|v| v.to_str().ok());
        let challenges: Vec<String> = challenges.map(str::to_owned).collect();
        let new = token::authorize(self, self.credentials.as_ref(), &challenges).await?;
        let answer = self.follow(url, accept, Some(&new)).await?;
        if answer.status == StatusCode::UNAUTHORIZED {
            return Err(Problem::Unauthorized { with: new.with, message: message(answer).await });
        }
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(new);
        successful(answer).await
    }

    fn authorization(&self) -> Option<Authorization> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What a token is for, if the challenge does not say it.
    pub(super) fn scope(&self) -> String {
        format!("repository:{}:pull", self.repository)
    }

    pub(super) fn is_https(&self) -> bool {
        self.origin.is_https
    }

    /// Follows redirects. Only this host gets headers and authorization.
    async fn follow(
        &self,
        mut url: Url,
        accept: &str,
        authorization: Option<&Authorization>,
    ) -> Result<Answer<'_>> {
        for _ in 0..=MAX_REDIRECTS {
            let recipient = if url.origin == self.origin { Recipient::Own } else { Recipient::Other };
            let mut request = self.request(Method::GET, &url, recipient, Bytes::new())?;
            request.headers_mut().insert(ACCEPT, HeaderValue::from_str(accept).expect("constants"));
            if let (Recipient::Own, Some(authorization)) = (recipient, authorization) {
                request.headers_mut().insert(AUTHORIZATION, authorization.value.clone());
            }
            let answer = self.send(&url, request).await?;
            if !matches!(answer.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            let location = answer.header(LOCATION).unwrap_or_default();
            let next = url.redirected(location).filter(|next| next.origin.is_https || !url.origin.is_https);
            url =
                next.ok_or_else(|| Problem::Redirect { url: trace::shortened(location.to_owned(), 200) })?;
        }
        Err(Problem::TooManyRedirects { most: MAX_REDIRECTS })
    }

    pub(super) fn request(
        &self,
        method: Method,
        url: &Url,
        recipient: Recipient,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>> {
        let invalid = |_| Problem::Redirect { url: trace::shortened(url.path.clone(), 200) };
        let mut request = Request::builder()
            .method(method)
            .uri(&url.path)
            .header(HOST, url.origin.to_string())
            .header(USER_AGENT, AGENT)
            .body(Full::new(body))
            .map_err(invalid)?;
        if recipient == Recipient::Own {
            for (name, value) in &self.host.headers {
                request.headers_mut().append(name, value.clone());
            }
        }
        Ok(request)
    }

    pub(super) async fn send(&self, url: &Url, request: Request<Full<Bytes>>) -> Result<Answer<'_>> {
        let connections = self.connections.get_or_try_init(|| async {
            let files = self.host.tls.clone();
            let config = tokio::task::spawn_blocking(move || tls::config(&files)).await;
            let config: Arc<_> =
                config.map_err(|e| Problem::Store { source: std::io::Error::other(e) })??;
            Ok::<_, Problem>(Connections::new(config, self.config.idle()))
        });
        connections.await?.send(url, request).await
    }
}

fn length(answer: &Answer<'_>) -> Option<u64> {
    answer.header(CONTENT_LENGTH)?.parse().ok()
}

async fn successful(answer: Answer<'_>) -> Result<Answer<'_>> {
    if answer.status == StatusCode::OK {
        return Ok(answer);
    }
    Err(Problem::Status { status: answer.status.as_u16(), message: message(answer).await })
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

pub(super) fn chosen(challenges: &[String]) -> Result<Challenge> {
    Challenge::choose(challenges.iter().map(String::as_str))
        .ok_or_else(|| Problem::Challenge { challenge: trace::shortened(challenges.join(", "), MAX_MESSAGE) })
}
