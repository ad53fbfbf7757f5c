//! Answers to a registry's challenge: Basic, or a token of its token service ("token authentication"
//! of the distribution project).

use hyper::Method;
use hyper::body::Bytes;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::Deserialize;

use super::challenge::Challenge;
use super::credentials::Credentials;
use super::error::{Problem, Result};
use super::transport::{self, Transport, message};
use super::url::{Url, escaped};

/// Limit of a token service's answer.
const MAX_ANSWER_BYTES: u64 = 64 << 10;
/// How this client names itself to a token service.
const CLIENT_ID: &str = "hawser";

#[derive(Deserialize)]
struct Answer {
    token: Option<String>,
    access_token: Option<String>,
}

/// The value of `Authorization`.
#[derive(Debug, Clone)]
pub(super) struct Authorization {
    pub(super) value: HeaderValue,
    /// For errors.
    pub(super) with: &'static str,
}

/// What a host asks for.
#[derive(Debug)]
pub(super) struct Asked {
    /// Values of `WWW-Authenticate`.
    pub(super) challenges: Vec<String>,
    /// What a token is for, if no challenge says it.
    pub(super) scope: String,
    /// Whether the host itself has TLS.
    pub(super) is_https: bool,
}

pub(super) async fn authorize(
    transport: &Transport,
    credentials: Option<&Credentials>,
    asked: Asked,
) -> Result<Authorization> {
    let challenge = Challenge::choose(asked.challenges.iter().map(String::as_str));
    let unknown = || trace::shortened(asked.challenges.join(", "), 200);
    match challenge.ok_or_else(|| Problem::Challenge { challenge: unknown() })? {
        Challenge::Basic => basic(credentials),
        Challenge::Bearer { realm, service, scope } => {
            if let Some(Credentials::RegistryToken(token)) = credentials {
                return bearer(token, "the registry token").ok_or(Problem::NoCredentials);
            }
            let shown = trace::shortened(realm.clone(), 200);
            let wrong = |problem| Problem::Realm { realm: shown.clone(), problem };
            let url = Url::parse(&realm).ok_or_else(|| wrong("not a URL"))?;
            if asked.is_https && !url.origin.is_https {
                return Err(wrong("credentials are not sent without TLS"));
            }
            let scope = scope.unwrap_or(asked.scope);
            let token = request(transport, credentials, url, service.as_deref(), &scope).await;
            let token = token.map_err(|problem| match problem {
                refused @ Problem::TokenRefused { .. } => refused,
                other => Problem::Token { realm: shown.clone(), source: Box::new(other) },
            })?;
            bearer(&token, "a new token").ok_or_else(|| wrong("its token is not the value of a header"))
        }
    }
}

fn basic(credentials: Option<&Credentials>) -> Result<Authorization> {
    match credentials {
        Some(Credentials::Password { user, password }) => {
            let value = HeaderValue::from_str(&Credentials::basic(user, password));
            let mut value = value.map_err(|_| Problem::NoCredentials)?;
            value.set_sensitive(true);
            Ok(Authorization { value, with: "user and password" })
        }
        Some(Credentials::RegistryToken(token)) => {
            bearer(token, "the registry token").ok_or(Problem::NoCredentials)
        }
        Some(Credentials::IdentityToken(_)) | None => Err(Problem::NoCredentials),
    }
}

fn bearer(token: &str, with: &'static str) -> Option<Authorization> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(Authorization { value, with })
}

async fn request(
    transport: &Transport,
    credentials: Option<&Credentials>,
    url: Url,
    service: Option<&str>,
    scope: &str,
) -> Result<String> {
    let realm = url.origin.to_string();
    let (url, method, body) = match credentials {
        Some(Credentials::IdentityToken(token)) => {
            let mut form = format!("grant_type=refresh_token&client_id={CLIENT_ID}");
            let fields = [("service", service), ("scope", Some(scope)), ("refresh_token", Some(token))];
            for (name, value) in fields {
                if let Some(value) = value {
                    form.push_str(&format!("&{name}={}", escaped(value)));
                }
            }
            (url, Method::POST, Bytes::from(form))
        }
        _ => {
            let url = match service {
                Some(service) => url.with("service", service),
                None => url,
            };
            (url.with("scope", scope), Method::GET, Bytes::new())
        }
    };
    let mut request = transport::request(method.clone(), &url, body)?;
    request.headers_mut().insert(ACCEPT, HeaderValue::from_static("application/json"));
    if method == Method::POST {
        let form = HeaderValue::from_static("application/x-www-form-urlencoded");
        request.headers_mut().insert(CONTENT_TYPE, form);
    }
    if let Some(Credentials::Password { .. }) = credentials {
        request.headers_mut().insert(AUTHORIZATION, basic(credentials)?.value);
    }
    // Redirects are not followed: the credentials are for this service.
    let answer = transport.send(&url, request).await?;
    if answer.status != hyper::StatusCode::OK {
        return Err(Problem::TokenRefused {
            realm,
            status: answer.status.as_u16(),
            message: message(answer).await,
        });
    }
    let bytes = answer.whole(MAX_ANSWER_BYTES, "").await?;
    // The parser's error would quote the answer, which may have the token in an unknown form.
    let unknown = |_| Problem::Realm { realm: realm.clone(), problem: "its answer is not understood" };
    let answer: Answer = serde_json::from_slice(&bytes).map_err(unknown)?;
    let token = answer.token.or(answer.access_token).filter(|token| !token.is_empty());
    token.ok_or(Problem::Realm { realm, problem: "its answer has no token" })
}
