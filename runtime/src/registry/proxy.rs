//! Proxies between the node and registries, as Go's net/http reads them from the environment
//! (golang.org/x/net/http/httpproxy), which containerd uses: HTTPS_PROXY, HTTP_PROXY, NO_PROXY, and the same
//! in lower case.
//!
//! Invariant: a proxy never learns credentials of a registry. With TLS it only passes bytes on (CONNECT, RFC
//! 9110 section 9.3.6); without TLS, a request that may have some is not sent through it.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Request;
use hyper::body::Body;
use hyper::header::{ACCEPT, HOST, HeaderName, HeaderValue, USER_AGENT};

use super::error::{Problem, Result};
use super::url::Origin;

/// What the environment says.
#[derive(Debug, Clone, Default)]
pub(super) struct Proxies {
    https: Option<Setting>,
    http: Option<Setting>,
    direct: Direct,
}

/// A value, and the name of its variable.
#[derive(Debug, Clone)]
struct Setting {
    variable: &'static str,
    proxy: std::result::Result<Arc<Proxy>, &'static str>,
}

/// A proxy that speaks plain HTTP.
#[derive(PartialEq, Eq)]
pub(super) struct Proxy {
    pub(super) origin: Origin,
    /// The value of `Proxy-Authorization`.
    pub(super) authorization: Option<HeaderValue>,
}

/// Without its credentials.
impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({})", self.origin)
    }
}

impl Proxies {
    /// `value_of` reads a variable.
    pub(super) fn read(value_of: impl Fn(&str) -> Option<String>) -> Self {
        let value = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| Some((name, value_of(name).filter(|text| !text.is_empty())?)))
        };
        let setting = |names| value(names).map(|(variable, text)| Setting { variable, proxy: proxy(&text) });
        Self {
            https: setting(["HTTPS_PROXY", "https_proxy"]),
            http: setting(["HTTP_PROXY", "http_proxy"]),
            direct: Direct::parse(&value(["NO_PROXY", "no_proxy"]).unwrap_or_default().1),
        }
    }

    /// The proxy on the way to `origin`.
    pub(super) fn of(&self, origin: &Origin) -> Result<Option<Arc<Proxy>>> {
        let setting = if origin.is_https { &self.https } else { &self.http };
        let Some(Setting { variable, proxy }) = setting else { return Ok(None) };
        if self.direct.covers(origin) {
            return Ok(None);
        }
        proxy.clone().map(Some).map_err(|problem| Problem::Proxy { variable, problem })
    }
}

/// The value may have a password: errors do not quote it.
fn proxy(text: &str) -> std::result::Result<Arc<Proxy>, &'static str> {
    let rest = match text.split_once("://") {
        None => text,
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
        Some(_) => return Err("only proxies with http:// are supported"),
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let (user, place) = match authority.rsplit_once('@') {
        Some((user, place)) => (Some(user), place),
        None => (None, authority),
    };
    let origin =
        Origin::of(false, place).ok_or("not the URL of a proxy, such as http://proxy.example:3128")?;
    let authorization = user.map(|user| {
        let (name, password) = user.split_once(':').unwrap_or((user, ""));
        let plain = [unescaped(name), b":".to_vec(), unescaped(password)].concat();
        let value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(plain)));
        let mut value = value.map_err(|_| "its user and password do not fit into a header")?;
        value.set_sensitive(true);
        Ok::<_, &'static str>(value)
    });
    Ok(Arc::new(Proxy { origin, authorization: authorization.transpose()? }))
}

/// `%40` is `@`.
fn unescaped(text: &str) -> Vec<u8> {
    let (bytes, mut plain) = (text.as_bytes(), Vec::new());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.filter(|_| *byte == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(escaped) => {
                plain.push(escaped);
                at += 3;
            }
            None => {
                plain.push(*byte);
                at += 1;
            }
        }
    }
    plain
}

/// Whether a request without TLS has nothing that a proxy must not see. Any header but these may be a
/// credential, such as one of hosts.toml, and so may a body.
pub(super) fn is_harmless<B: Body>(request: &Request<B>) -> bool {
    const HARMLESS: [HeaderName; 3] = [HOST, USER_AGENT, ACCEPT];
    request.body().is_end_stream() && request.headers().keys().all(|name| HARMLESS.contains(name))
}

/// Hosts that no proxy is used for.
#[derive(Debug, Clone, Default)]
struct Direct {
    is_all: bool,
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    hosts: Hosts,
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    /// With the number of leading bits that count.
    Network(IpAddr, u32),
    /// `.example.com`: what ends with it; and `example.com` itself?
    Domain { suffix: String, itself: bool },
}

impl Direct {
    fn parse(text: &str) -> Self {
        let entries = || text.split(',').map(|entry| entry.trim().to_ascii_lowercase());
        Self {
            is_all: entries().any(|entry| entry == "*"),
            rules: entries().filter_map(|e| rule(&e)).collect(),
        }
    }

    fn covers(&self, origin: &Origin) -> bool {
        let address = origin.host.parse::<IpAddr>().ok();
        if self.is_all || origin.host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
            return true;
        }
        self.rules.iter().filter(|rule| rule.port.is_none_or(|port| port == origin.port)).any(|rule| {
            match &rule.hosts {
                Hosts::Network(network, bits) => {
                    address.is_some_and(|address| is_in(address, *network, *bits))
                }
                Hosts::Domain { suffix, itself } => {
                    origin.host.ends_with(suffix) || (*itself && origin.host == suffix[1..])
                }
            }
        })
    }
}

/// An entry of NO_PROXY, in lower case. One that is not understood matches nothing.
fn rule(entry: &str) -> Option<Rule> {
    if let Some((network, bits)) = entry.split_once('/') {
        let (network, bits) = (network.parse::<IpAddr>().ok()?, bits.parse().ok()?);
        return (bits <= width(network)).then_some(Rule { hosts: Hosts::Network(network, bits), port: None });
    }
    let (host, port) = match entry.parse::<IpAddr>() {
        // An IPv6 address is not a host with a port.
        Ok(_) => (entry, None),
        Err(_) => match entry.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (entry, None),
        },
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = host.parse::<IpAddr>() {
        return Some(Rule { hosts: Hosts::Network(address, width(address)), port });
    }
    let host = if host.starts_with("*.") { &host[1..] } else { host };
    let itself = !host.starts_with('.');
    let suffix = if itself { format!(".{host}") } else { host.to_owned() };
    (suffix.len() > 1).then_some(Rule { hosts: Hosts::Domain { suffix, itself }, port })
}

fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { u32::BITS } else { u128::BITS }
}

fn is_in(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= bits,
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= bits,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use hyper::body::Bytes;
    use hyper::header::AUTHORIZATION;

    use super::*;

    fn read(variables: &[(&str, &str)]) -> Proxies {
        Proxies::read(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn origin(url: &str) -> Origin {
        super::super::url::Url::parse(url).unwrap().origin
    }

    fn through(proxies: &Proxies, url: &str) -> Option<String> {
        proxies.of(&origin(url)).unwrap().map(|proxy| proxy.origin.to_string())
    }

    #[test]
    fn each_scheme_has_its_proxy_and_upper_case_wins() {
        let proxies =
            read(&[("HTTPS_PROXY", "http://secure.example:3128/"), ("https_proxy", "http://no.example")]);
        assert_eq!(through(&proxies, "https://r.example").as_deref(), Some("secure.example:3128"));
        assert_eq!(through(&proxies, "http://r.example"), None);
        let proxies =
            read(&[("HTTPS_PROXY", ""), ("https_proxy", "proxy.example"), ("HTTP_PROXY", "10.0.0.1:8080")]);
        assert_eq!(through(&proxies, "https://r.example").as_deref(), Some("proxy.example"));
        assert_eq!(through(&proxies, "http://r.example").as_deref(), Some("10.0.0.1:8080"));
        assert_eq!(through(&read(&[]), "https://r.example"), None);
    }

    #[test]
    fn no_proxy_is_read_as_go_reads_it() {
        let list = "example.com, .internal ,*.corp,10.1.0.0/16,192.168.0.7:5000,[fd00::1]:443,fd00::2,x.y:5000,,/,a/99";
        let proxies = read(&[("HTTPS_PROXY", "p:1"), ("NO_PROXY", list)]);
        for (host, is_direct) in [
            ("example.com", true),
            ("EXAMPLE.com", true),
            ("r.example.com:444", true),
            ("anexample.com", false),
            ("internal", false),
            ("r.internal", true),
            ("corp", false),
            ("r.corp", true),
            ("10.1.255.1", true),
            ("10.2.0.1", false),
            ("192.168.0.7:5000", true),
            ("192.168.0.7", false),
            ("[fd00::1]", true),
            ("[fd00::1]:5000", false),
            ("[fd00::2]:5000", true),
            ("x.y:5000", true),
            ("x.y", false),
            ("localhost:5000", true),
            ("127.9.9.9", true),
            ("[::1]", true),
            ("r.example.org", false),
        ] {
            let found = through(&proxies, &format!("https://{host}"));
            assert_eq!(found.is_none(), is_direct, "{host}");
        }
        let none = read(&[("HTTPS_PROXY", "p:1"), ("no_proxy", "a, *")]);
        assert_eq!(through(&none, "https://r.example"), None);
    }

    #[test]
    fn a_proxys_password_is_for_the_proxy_and_not_shown() {
        let proxies = read(&[("HTTPS_PROXY", "http://anna:ge%40heim@proxy.example:3128")]);
        let proxy = proxies.of(&origin("https://r.example")).unwrap().unwrap();
        let value = proxy.authorization.as_ref().unwrap();
        assert_eq!(value.to_str().unwrap(), format!("Basic {}", STANDARD.encode("anna:ge@heim")));
        assert_eq!(format!("{proxies:?} {proxy:?}").matches("heim").count(), 0);
        for (value, words) in [
            ("socks5://anna:geheim@p.example:1", "HTTPS_PROXY: only proxies with http:// are supported"),
            (
                "http://anna:geheim@:1",
                "HTTPS_PROXY: not the URL of a proxy, such as http://proxy.example:3128",
            ),
        ] {
            let proxies = read(&[("HTTPS_PROXY", value), ("NO_PROXY", "direct.example")]);
            assert_eq!(proxies.of(&origin("https://r.example")).unwrap_err().to_string(), words);
            assert_eq!(through(&proxies, "https://direct.example"), None, "other hosts are not affected");
        }
    }

    #[test]
    fn what_may_be_a_credential_is_not_harmless() {
        let request = |name: HeaderName, body: &'static str| {
            let request = Request::builder().header(HOST, "r").header(name, "x");
            request.body(Full::new(Bytes::from(body))).unwrap()
        };
        assert!(is_harmless(&request(ACCEPT, "")));
        assert!(!is_harmless(&request(AUTHORIZATION, "")));
        assert!(!is_harmless(&request(HeaderName::from_static("x-token"), "")));
        assert!(!is_harmless(&request(ACCEPT, "refresh_token=x")));
    }
}
