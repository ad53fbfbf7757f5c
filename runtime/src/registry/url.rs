//! URLs, as far as a pull needs them.

use std::fmt;

use hyper::Uri;

/// Whom a connection leads to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    pub(super) is_https: bool,
    /// A name, or an address: IPv6 without its brackets.
    pub(super) host: String,
    pub(super) port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) origin: Origin,
    /// Path and query.
    pub(super) path: String,
}

impl Origin {
    /// Of `registry.example:5000`.
    pub(super) fn of(is_https: bool, authority: &str) -> Option<Self> {
        let authority: hyper::http::uri::Authority = authority.parse().ok()?;
        let default = if is_https { 443 } else { 80 };
        let port = match authority.as_str().strip_prefix(authority.host())? {
            "" => default,
            port => port.strip_prefix(':')?.parse().ok()?,
        };
        let host = authority.host();
        let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return None;
        }
        Some(Self { is_https, host: host.to_ascii_lowercase(), port })
    }
}

/// As in the header `Host`: without a default port.
impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?;
        } else {
            f.write_str(&self.host)?;
        }
        if self.port == if self.is_https { 443 } else { 80 } { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

impl Url {
    /// `None` if it is not an http or https URL.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let uri: Uri = text.split('#').next()?.parse().ok()?;
        let is_https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let origin = Origin::of(is_https, uri.authority()?.as_str())?;
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Some(Self { origin, path })
    }

    /// The URL of a header `Location` of this URL's answer: absolute, or a path of the same host.
    pub(super) fn redirected(&self, location: &str) -> Option<Self> {
        if location.starts_with('/') && !location.starts_with("//") {
            let uri: Uri = location.split('#').next()?.parse().ok()?;
            let path = uri.path_and_query()?.as_str().to_owned();
            return Some(Self { origin: self.origin.clone(), path });
        }
        Self::parse(location)
    }

    /// With one more parameter of the query.
    pub(super) fn with(mut self, name: &str, value: &str) -> Self {
        self.path.push(if self.path.contains('?') { '&' } else { '?' });
        self.path.push_str(name);
        self.path.push('=');
        self.path.push_str(&escaped(value));
        self
    }
}

/// As the value of a query or of a form.
pub(super) fn escaped(text: &str) -> String {
    use fmt::Write;
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(byte.into());
        } else {
            write!(escaped, "%{byte:02X}").expect("a String takes all text");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_an_origin_with_its_port() {
        let url = Url::parse("https://R.example/v2/?a=b#c").unwrap();
        assert_eq!((url.origin.to_string().as_str(), url.origin.port), ("r.example", 443));
        assert_eq!(url.path, "/v2/?a=b");
        let url = Url::parse("http://[::1]:5000").unwrap();
        assert_eq!((url.origin.host.as_str(), url.origin.to_string().as_str()), ("::1", "[::1]:5000"));
        for wrong in ["ftp://x/", "x", "https://", "http://x:99999/", "https://x:port/"] {
            assert_eq!(Url::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_redirect_is_absolute_or_of_the_same_host() {
        let url = Url::parse("https://r.example/v2/").unwrap();
        assert_eq!(url.redirected("/blob?x=1").unwrap().path, "/blob?x=1");
        assert_eq!(url.redirected("https://cdn.example:8443/b").unwrap().origin.port, 8443);
        assert_eq!(url.redirected("//cdn.example/b"), None);
        assert_eq!(url.redirected("blob"), None);
    }

    #[test]
    fn a_query_is_escaped() {
        let url = Url::parse("https://a.example/token").unwrap();
        let url = url.with("service", "r e").with("scope", "repository:a/b:pull");
        assert_eq!(url.path, "/token?service=r%20e&scope=repository%3Aa%2Fb%3Apull");
    }
}
