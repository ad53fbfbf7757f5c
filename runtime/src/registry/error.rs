//! Why an image was not pulled from a registry.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::chain;

use crate::images::error::{ImageError, InvalidJson};

pub(super) type Result<T> = std::result::Result<T, Problem>;

/// Of a whole pull.
#[derive(Debug, thiserror::Error)]
pub enum PullProblem {
    #[error(transparent)]
    Hosts(#[from] HostsProblem),
    #[error("{}", .failures.iter().map(|failure| chain(failure)).collect::<Vec<_>>().join("; "))]
    NoHost { failures: Vec<AtHost> },
    #[error("{}: no host may be asked for a tag: one needs the capability \"resolve\"", .dir.display())]
    NothingResolves { dir: PathBuf },
    #[error("{}: no host may be asked for blobs: one needs the capability \"pull\"", .dir.display())]
    NothingPulls { dir: PathBuf },
}

impl PullProblem {
    /// Whether every host that was asked answered that it has no such image.
    pub(crate) fn is_missing(&self) -> bool {
        let Self::NoHost { failures } = self else { return false };
        failures.iter().all(|failure| matches!(failure.source, Problem::Status { status: 404, .. }))
    }

    /// Whether a host wants other credentials.
    pub(crate) fn is_refused(&self) -> bool {
        let Self::NoHost { failures } = self else { return false };
        let refused = |problem: &Problem| match problem {
            Problem::Unauthorized { .. } | Problem::NoCredentials | Problem::TokenRefused { .. } => true,
            Problem::Status { status, .. } => matches!(status, 401 | 403),
            _ => false,
        };
        failures.iter().any(|failure| refused(&failure.source))
    }
}

/// An error with the host that was asked, and for what.
#[derive(Debug, thiserror::Error)]
#[error("{host}: {what}")]
pub struct AtHost {
    pub(super) host: String,
    pub(super) what: String,
    #[source]
    pub(super) source: Problem,
}

#[derive(Debug, thiserror::Error)]
#[error("{}", .file.display())]
pub struct HostsProblem {
    file: PathBuf,
    #[source]
    reason: HostsReason,
}

impl HostsProblem {
    pub(super) fn of(file: &Path, reason: HostsReason) -> Self {
        Self { file: file.to_owned(), reason }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum HostsReason {
    #[error("read")]
    Read {
        #[source]
        source: io::Error,
    },
    #[error("more than {most} bytes")]
    TooLarge { most: u64 },
    #[error("not TOML: {message}")]
    Toml { message: String },
    #[error("{field} {problem}")]
    Field { field: String, problem: String },
    #[error("no certificate in it")]
    NoCertificate,
    #[error("no private key in it")]
    NoKey,
    #[error("not usable for TLS")]
    Tls {
        #[source]
        source: rustls::Error,
    },
}

/// Of one host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    // The connection.
    #[error("find the address of {host}: {problem}")]
    Resolve { host: String, problem: String },
    #[error("{variable}: {problem}")]
    Proxy { variable: &'static str, problem: &'static str },
    #[error("proxy {proxy}")]
    Through {
        proxy: String,
        #[source]
        source: Box<Problem>,
    },
    #[error("credentials are not sent through proxy {proxy} without TLS: add the host to NO_PROXY")]
    PlainThroughProxy { proxy: String },
    #[error("connect")]
    Connect {
        #[source]
        source: io::Error,
    },
    #[error("TLS")]
    Tls {
        #[source]
        source: io::Error,
    },
    #[error(
        "it answers without TLS. To allow that, write server = \"http://{address}\" into {address}/hosts.toml below \
         /etc/hawser/certs.d (--registry-config)"
    )]
    NoTls { address: String },
    #[error(transparent)]
    TlsFiles(#[from] HostsProblem),
    #[error("no byte for {} s (--image-pull-idle-seconds)", .idle.as_secs())]
    Idle { idle: Duration },
    #[error("fewer than {least} bytes in {} s", .within.as_secs())]
    Drips { least: u64, within: Duration },
    #[error("not complete within {} s", .most.as_secs())]
    Slow { most: Duration },
    #[error("HTTP")]
    Http {
        #[source]
        source: hyper::Error,
    },

    // Answers.
    #[error("{status}{}", shown(.message))]
    Status { status: u16, message: String },
    #[error("redirected more than {most} times")]
    TooManyRedirects { most: usize },
    #[error("redirected to {url:?}, which is not an https URL")]
    Redirect { url: String },
    #[error("more than {most} bytes{}", shown(.flag))]
    TooLarge { most: u64, flag: &'static str },
    #[error("media type {media_type:?} is not that of an image or of an index of images")]
    MediaType { media_type: String },
    #[error("{found} bytes instead of {announced}")]
    Length { announced: u64, found: u64 },
    #[error("digest is {found} instead of {wanted}")]
    OtherDigest { wanted: String, found: String },
    #[error("invalid")]
    Json {
        #[source]
        source: InvalidJson,
    },
    #[error(transparent)]
    Image(#[from] ImageError),

    // Credentials.
    #[error("credentials are needed (imagePullSecrets)")]
    NoCredentials,
    #[error("unauthorized, also with {with}{}", shown(.message))]
    Unauthorized { with: &'static str, message: String },
    #[error("the challenge {challenge:?} is not understood")]
    Challenge { challenge: String },
    #[error("token service {realm:?}: {problem}")]
    Realm { realm: String, problem: &'static str },
    #[error("token service {realm:?}: {status}{}", shown(.message))]
    TokenRefused { realm: String, status: u16, message: String },
    #[error("token service {realm:?}")]
    Token {
        realm: String,
        #[source]
        source: Box<Problem>,
    },

    // This node.
    #[error("store the blob")]
    Store {
        #[source]
        source: io::Error,
    },
}

impl Problem {
    pub(super) fn at(self, host: &str, what: impl Into<String>) -> AtHost {
        AtHost { host: host.to_owned(), what: what.into(), source: self }
    }
}

fn shown(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}
