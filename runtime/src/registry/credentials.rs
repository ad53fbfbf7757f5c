//! Credentials of a pull, from CRI's AuthConfig.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use proto::cri::AuthConfig;

use crate::error::{Error, Result};

/// Limit of each text: it becomes part of a header.
const MAX_BYTES: usize = 64 << 10;

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Credentials {
    /// For Basic, and for a token service.
    Password { user: String, password: String },
    /// OAuth2's refresh token: a token service exchanges it.
    IdentityToken(String),
    /// Sent to the registry as it is.
    RegistryToken(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password { .. } => "Password(...)",
            Self::IdentityToken(_) => "IdentityToken(...)",
            Self::RegistryToken(_) => "RegistryToken(...)",
        })
    }
}

impl Credentials {
    /// `None` for a pull without credentials, or if they are of another server than `domain`.
    pub(crate) fn of(auth: AuthConfig, domain: &str) -> Result<Option<Self>> {
        let AuthConfig { username, password, auth, server_address, identity_token, registry_token } = auth;
        let texts = [&username, &password, &auth, &server_address, &identity_token, &registry_token];
        if texts.iter().any(|text| text.len() > MAX_BYTES) {
            return Err(Error::invalid("auth", format!("more than {MAX_BYTES} bytes")));
        }
        if !server_address.is_empty() && !is_server(&server_address, domain) {
            return Ok(None);
        }
        if !registry_token.is_empty() {
            return Ok(Some(Self::RegistryToken(registry_token)));
        }
        if !identity_token.is_empty() {
            return Ok(Some(Self::IdentityToken(identity_token)));
        }
        if !username.is_empty() {
            return Ok(Some(Self::Password { user: username, password }));
        }
        if auth.is_empty() {
            return Ok(None);
        }
        let wrong = || Error::invalid("auth.auth", "is not the Base64 form of USER:PASSWORD");
        let decoded = STANDARD.decode(auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let decoded = decoded.ok_or_else(wrong)?;
        let (user, password) = decoded.split_once(':').ok_or_else(wrong)?;
        Ok(Some(Self::Password {
            user: user.to_owned(),
            // Docker pads it in some files.
            password: password.trim_end_matches('\0').to_owned(),
        }))
    }

    /// The value of `Authorization` for Basic.
    pub(super) fn basic(user: &str, password: &str) -> String {
        format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
    }
}

/// `server` may be a URL, as Docker writes `https://index.docker.io/v1/`.
fn is_server(server: &str, domain: &str) -> bool {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or(rest);
    let canonical = |host: &str| match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        other => other.to_owned(),
    };
    canonical(host) == canonical(domain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(user: &str, password: &str) -> Credentials {
        Credentials::Password { user: user.to_owned(), password: password.to_owned() }
    }

    #[test]
    fn each_form_of_an_auth_config_is_understood() {
        let of = |auth: AuthConfig| Credentials::of(auth, "r.example").unwrap();
        assert_eq!(of(AuthConfig::default()), None);
        let named = AuthConfig { username: "a".into(), password: "b:c".into(), ..Default::default() };
        assert_eq!(of(named), Some(password("a", "b:c")));
        let packed = AuthConfig { auth: STANDARD.encode("a:b:c"), ..Default::default() };
        assert_eq!(of(packed), Some(password("a", "b:c")));
        let identity = AuthConfig { identity_token: "t".into(), ..Default::default() };
        assert_eq!(of(identity), Some(Credentials::IdentityToken("t".into())));
        let registry = AuthConfig { registry_token: "t".into(), ..Default::default() };
        assert_eq!(of(registry), Some(Credentials::RegistryToken("t".into())));
    }

    #[test]
    fn credentials_of_another_server_are_not_used() {
        let for_server = |server: &str, domain: &str| {
            let auth =
                AuthConfig { username: "a".into(), server_address: server.into(), ..Default::default() };
            Credentials::of(auth, domain).unwrap().is_some()
        };
        assert!(for_server("https://index.docker.io/v1/", "docker.io"));
        assert!(for_server("r.example:5000", "r.example:5000"));
        assert!(!for_server("r.example", "r.example:5000"));
        assert!(!for_server("https://r.example/v2/", "evil.example"));
    }

    #[test]
    fn what_is_no_base64_is_refused_and_not_shown() {
        let auth = AuthConfig { auth: "geheim!".into(), ..Default::default() };
        let error = Credentials::of(auth, "r.example").unwrap_err().to_string();
        assert_eq!(error, "auth.auth: is not the Base64 form of USER:PASSWORD");
        assert!(!format!("{:?}", password("geheim", "geheim")).contains("geheim"));
    }
}
