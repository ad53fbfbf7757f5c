//! Requests to one host of a registry (OCI Distribution Specification 1.1, "Pull").

use std::sync::{Mutex, PoisonError};

use hyper::body::Bytes;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION, WWW_AUTHENTICATE,
};
use hyper::{Method, StatusCode};
use sha2::{Digest, Sha256};

use super::connection::Answer;
use super::credentials::Credentials;
use super::error::{Problem, Result};
use super::hosts::Host;
use super::token::{self, Authorization};
use super::transport::{Transport, message, request};
use super::url::{Origin, Url};
use crate::images::documents::MANIFEST_TYPES;

const MAX_REDIRECTS: usize = 5;

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
    transport: Transport,
    /// The value of `Authorization` that the host has accepted.
    authorization: Mutex<Option<Authorization>>,
}

/// A manifest or an index, whose digest was checked.
#[derive(Debug, Clone)]
pub(super) struct Document {
    pub(super) digest: String,
    pub(super) media_type: Option<String>,
    pub(super) bytes: Vec<u8>,
}

impl Client {
    pub(super) fn new(
        host: Host,
        (domain, repository): (&str, &str),
        credentials: Option<&Credentials>,
        transport: Transport,
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
            transport,
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
        // A host that this one redirects to must not learn the credentials through a challenge.
        if answer.status != StatusCode::UNAUTHORIZED || answer.origin != self.origin {
            return successful(answer).await;
        }
        // Once: a host that refuses what its token service has just given would go on for ever.
        let challenges = answer.headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|v| v.to_str().ok());
        let challenges: Vec<String> = challenges.map(str::to_owned).collect();
        let scope = format!("repository:{}:pull", self.repository);
        let asked = token::Asked { challenges, scope, is_https: self.origin.is_https };
        let new = token::authorize(&self.transport, self.credentials.as_ref(), asked).await?;
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

    /// Follows redirects. Only this host gets headers and authorization.
    async fn follow(
        &self,
        mut url: Url,
        accept: &str,
        authorization: Option<&Authorization>,
    ) -> Result<Answer<'_>> {
        for _ in 0..=MAX_REDIRECTS {
            let mut request = request(Method::GET, &url, Bytes::new())?;
            request.headers_mut().insert(ACCEPT, HeaderValue::from_str(accept).expect("constants"));
            if url.origin == self.origin {
                for (name, value) in &self.host.headers {
                    request.headers_mut().append(name, value.clone());
                }
                if let Some(authorization) = authorization {
                    request.headers_mut().insert(AUTHORIZATION, authorization.value.clone());
                }
            }
            let answer = self.transport.send(&url, request).await?;
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
