//! HTTP GET of probes and hooks (kubelet, pkg/probe/http). The server is hostile: its head and body are
//! bounded, and the caller bounds the time.

use std::fmt;
use std::future::{pending, poll_fn};
use std::pin::Pin;

use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::answer::{Answer, MOST_OUTPUT_BYTES, kept};
use super::dial::dial;
use super::tls;
use crate::objects::{HttpGetAction, Scheme};

/// As in Go's HTTP client.
const MOST_REDIRECTS: usize = 10;
/// Of a response: all headers together.
const MOST_HEAD_BYTES: usize = 64 << 10;

/// A request of a probe or hook.
#[derive(Debug, Clone)]
pub(crate) struct Get {
    url: Url,
    headers: Vec<(String, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Url {
    scheme: Scheme,
    /// Without the brackets of an IPv6 address.
    host: String,
    port: u16,
    /// With the query; begins with a slash.
    path: String,
}

/// The last response and the first part of its body.
#[derive(Debug)]
struct Last {
    status: u16,
    body: String,
}

impl fmt::Display for Get {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

impl Get {
    pub(crate) fn new(action: &HttpGetAction, port: u16, pod_ip: &str, user_agent: &str) -> Self {
        let host = if action.host.is_empty() { pod_ip } else { action.host.trim_matches(['[', ']']) };
        let path =
            if action.path.starts_with('/') { action.path.clone() } else { format!("/{}", action.path) };
        let url = Url { scheme: action.scheme, host: host.to_owned(), port, path };
        let mut headers: Vec<(String, String)> =
            action.http_headers.iter().map(|header| (header.name.clone(), header.value.clone())).collect();
        let lacks =
            |name: &str| !action.http_headers.iter().any(|header| header.name.eq_ignore_ascii_case(name));
        if lacks("user-agent") {
            headers.push(("User-Agent".to_owned(), user_agent.to_owned()));
        }
        if lacks("accept") {
            headers.push(("Accept".to_owned(), "*/*".to_owned()));
        }
        // An empty value of this header removes it.
        headers.retain(|(name, value)| !(name.eq_ignore_ascii_case("accept") && value.is_empty()));
        Self { url, headers }
    }

    /// For a probe: 200 to 399 is success.
    pub(super) async fn ask(&self) -> Answer {
        match self.follow().await {
            Ok(Last { status: 200..=299, .. }) => Answer::Success,
            Ok(Last { status: 300..=399, body }) => {
                Answer::Warning(format!("Probe terminated redirects, Response body: {body}"))
            }
            Ok(Last { status, .. }) => {
                Answer::Failure(format!("HTTP probe failed with statuscode: {status}"))
            }
            Err(error) => Answer::Failure(error),
        }
    }

    /// For a hook: any response is success.
    pub(crate) async fn run(&self) -> Result<(), String> {
        self.follow().await.map(drop)
    }

    /// Follows redirects within the host, as kubelet does; one that leads elsewhere is the last response.
    async fn follow(&self) -> Result<Last, String> {
        let mut url = self.url.clone();
        for _ in 0..MOST_REDIRECTS {
            match self.exchange(&url).await.map_err(|error| format!("Get \"{url}\": {error}"))? {
                Reply::Last(last) => return Ok(last),
                Reply::Redirect(next) => url = next,
            }
        }
        Err(format!("Get \"{url}\": stopped after {MOST_REDIRECTS} redirects"))
    }

    async fn exchange(&self, url: &Url) -> Result<Reply, String> {
        let stream = dial(&url.host, url.port).await.map_err(|e| e.to_string())?;
        match url.scheme {
            Scheme::Http => self.exchange_over(stream, url).await,
            Scheme::Https => {
                let stream = tls::connect(&url.host, stream).await;
                self.exchange_over(stream.map_err(|e| format!("tls: {e}"))?, url).await
            }
        }
    }

    async fn exchange_over<S>(&self, stream: S, url: &Url) -> Result<Reply, String>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let io = TokioIo::new(stream);
        let client = http1::Builder::new().max_buf_size(MOST_HEAD_BYTES).handshake(io).await;
        let (mut sender, connection) = client.map_err(|error| linux::chain(&error))?;
        let request = self.request(url)?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|error| linux::chain(&error))?;
            match redirect(url, &response) {
                Some(next) if next.host.eq_ignore_ascii_case(&self.url.host) => Ok(Reply::Redirect(next)),
                _ => Ok(Reply::Last(read(response).await?)),
            }
        };
        // The connection does the reading and writing; its end may come before the last of the body is taken.
        let connection = async {
            let _its_error_is_the_exchanges = connection.await;
            pending::<Result<Reply, String>>().await
        };
        tokio::select! {
            reply = exchange => reply,
            never = connection => never,
        }
    }

    fn request(&self, url: &Url) -> Result<Request<String>, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let name = HeaderName::try_from(name).map_err(|error| format!("header {name:?}: {error}"))?;
            let value = HeaderValue::try_from(value).map_err(|error| format!("header {name}: {error}"))?;
            headers.append(name, value);
        }
        if !headers.contains_key("host") {
            let host = HeaderValue::try_from(url.authority()).map_err(|error| format!("host: {error}"))?;
            headers.insert("host", host);
        }
        headers.insert("connection", HeaderValue::from_static("close"));
        let path: Uri = url.path.parse().map_err(|error| format!("path {:?}: {error}", url.path))?;
        let mut request = Request::new(String::new());
        *request.uri_mut() = path;
        *request.headers_mut() = headers;
        Ok(request)
    }
}

#[derive(Debug)]
enum Reply {
    Last(Last),
    Redirect(Url),
}

/// Where a response leads; `None` if it is no redirect, or names no place of HTTP.
fn redirect(from: &Url, response: &Response<Incoming>) -> Option<Url> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    from.join(response.headers().get("location")?.to_str().ok()?)
}

/// Reads until there is enough, and drops the rest with the connection.
async fn read(response: Response<Incoming>) -> Result<Last, String> {
    let status = response.status().as_u16();
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while bytes.len() < MOST_OUTPUT_BYTES {
        let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await else { break };
        let frame = frame.map_err(|error| linux::chain(&error))?;
        bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
    }
    Ok(Last { status, body: kept(&bytes) })
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        write!(f, "{scheme}://{}{}", self.authority(), self.path)
    }
}

impl Url {
    fn authority(&self) -> String {
        let port = self.port;
        if self.host.contains(':') {
            format!("[{}]:{port}", self.host)
        } else {
            format!("{}:{port}", self.host)
        }
    }

    /// The place that `location` names, as seen from here.
    fn join(&self, location: &str) -> Option<Self> {
        // A fragment is not sent.
        let location = location.split('#').next().unwrap_or_default();
        let scheme = match self.scheme {
            Scheme::Http => "http:",
            Scheme::Https => "https:",
        };
        if let Some(absolute) = location.strip_prefix("//") {
            return Self::parse(&format!("{scheme}//{absolute}"));
        }
        if location.split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme)) {
            return Self::parse(location);
        }
        let path = self.path.split('?').next().unwrap_or_default();
        let path = if location.starts_with('/') {
            location.to_owned()
        } else if location.starts_with('?') {
            format!("{path}{location}")
        } else {
            let directory = path.rfind('/').map_or("/", |slash| &path[..=slash]);
            format!("{directory}{location}")
        };
        Some(Self { path, ..self.clone() })
    }

    fn parse(text: &str) -> Option<Self> {
        let uri: Uri = text.parse().ok()?;
        let (scheme, default_port) = match uri.scheme_str()? {
            "http" => (Scheme::Http, 80),
            "https" => (Scheme::Https, 443),
            _ => return None,
        };
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Some(Self {
            scheme,
            host: uri.host()?.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(default_port),
            path: if path.starts_with('/') { path.to_owned() } else { format!("/{path}") },
        })
    }
}

/// RFC 3986, 3.1. Other text before `://` is part of a relative reference.
fn is_scheme(text: &str) -> bool {
    let is_inner = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
    text.starts_with(|first: char| first.is_ascii_alphabetic()) && text.chars().all(is_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream as Connection};
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A server on a thread of its own, which gives `answer` the head of each request.
    fn server(answer: impl Fn(&str, &mut Connection) + Send + 'static) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for mut connection in listener.incoming().flatten() {
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") && connection.read(&mut byte).is_ok_and(|n| n == 1) {
                    head.push(byte[0]);
                }
                answer(&String::from_utf8(head).unwrap(), &mut connection);
            }
        });
        port
    }

    fn get(port: u16, more: serde_json::Value) -> Get {
        let mut action = serde_json::json!({"port": port});
        action.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Get::new(&serde_json::from_value(action).unwrap(), port, "127.0.0.1", "kube-probe/1.36")
    }

    async fn ask(port: u16) -> Answer {
        get(port, serde_json::json!({})).ask().await
    }

    #[tokio::test]
    async fn a_request_has_kubelets_headers_and_those_of_the_probe() {
        let seen = Arc::new(Mutex::new(String::new()));
        let to = Arc::clone(&seen);
        let port = server(move |head, connection| {
            head.clone_into(&mut to.lock().unwrap());
            connection.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
        });
        let headers =
            serde_json::json!([{"name": "Host", "value": "example.com"}, {"name": "X-Probe", "value": "1"}]);
        let wanted = get(port, serde_json::json!({"path": "health?deep=1", "httpHeaders": headers}));
        assert_eq!(wanted.ask().await, Answer::Success);
        let head = seen.lock().unwrap().to_lowercase();
        assert!(head.starts_with("get /health?deep=1 http/1.1\r\n"), "{head}");
        for line in ["host: example.com", "x-probe: 1", "user-agent: kube-probe/1.36", "accept: */*"] {
            assert!(head.contains(&format!("{line}\r\n")), "{line}: {head}");
        }
    }

    #[tokio::test]
    async fn statuses_are_judged_as_kubelet_does() {
        for (status, expected) in [
            ("200 OK", Answer::Success),
            ("302 Found", Answer::Warning("Probe terminated redirects, Response body: no".to_owned())),
            ("404 Not Found", Answer::Failure("HTTP probe failed with statuscode: 404".to_owned())),
            ("500 Oops", Answer::Failure("HTTP probe failed with statuscode: 500".to_owned())),
        ] {
            let port = server(move |_, connection| {
                write!(connection, "HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nno").unwrap();
            });
            assert_eq!(ask(port).await, expected, "{status}");
        }
    }

    #[tokio::test]
    async fn redirects_stay_within_the_host_and_end() {
        let port = server(|head, connection| {
            let location = match head.split(' ').nth(1) {
                Some("/") => "/next",
                Some("/next") => "last",
                Some("/away") => "http://192.0.2.1/",
                Some("/last") => return connection.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap(),
                _ => "/loop",
            };
            write!(connection, "HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n")
                .unwrap();
        });
        assert_eq!(ask(port).await, Answer::Success);
        let away = get(port, serde_json::json!({"path": "/away"})).ask().await;
        assert_eq!(away, Answer::Warning("Probe terminated redirects, Response body: ".to_owned()));
        let endless = get(port, serde_json::json!({"path": "/loop"})).ask().await;
        let message = format!("Get \"http://127.0.0.1:{port}/loop\": stopped after 10 redirects");
        assert_eq!(endless, Answer::Failure(message));
    }

    #[tokio::test]
    async fn an_endless_body_is_read_as_far_as_it_counts() {
        let port = server(|_, connection| {
            connection.write_all(b"HTTP/1.1 303 See Other\r\n\r\n").unwrap();
            while connection.write_all(&[b'x'; 4096]).is_ok() {}
        });
        let Answer::Warning(output) = ask(port).await else { panic!("a redirect without a place") };
        assert!(output.len() < MOST_OUTPUT_BYTES + 100, "{}", output.len());
    }

    #[tokio::test]
    async fn an_endless_head_is_refused() {
        let port = server(|_, connection| {
            connection.write_all(b"HTTP/1.1 200 OK\r\nX: ").unwrap();
            while connection.write_all(&[b'x'; 4096]).is_ok() {}
        });
        let answer = ask(port).await;
        assert!(matches!(&answer, Answer::Failure(why) if why.contains("too large")), "{answer:?}");
    }

    #[tokio::test]
    async fn https_takes_any_certificate() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        // Of another name, signed by itself, and expired.
        let certificate = include_bytes!("testdata/certificate.der").to_vec().into();
        let key = include_bytes!("testdata/key.der").to_vec();
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key).into();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let mut stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
            let _request = stream.read(&mut [0; 4096]).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
            stream.shutdown().await.unwrap();
            let mut plain = listener.accept().await.unwrap().0;
            plain.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        });
        assert_eq!(get(port, serde_json::json!({"scheme": "HTTPS"})).ask().await, Answer::Success);
        // A server without TLS.
        let answer = get(port, serde_json::json!({"scheme": "HTTPS"})).ask().await;
        assert!(matches!(&answer, Answer::Failure(why) if why.contains("tls: ")), "{answer:?}");
    }

    #[test]
    fn a_location_is_seen_from_its_page() {
        let page = Url::parse("http://[fd00::2]:8080/a/b?c").unwrap();
        let join = |location| page.join(location).map(|url| url.to_string());
        assert_eq!(join("/x").unwrap(), "http://[fd00::2]:8080/x");
        assert_eq!(join("x?y#z").unwrap(), "http://[fd00::2]:8080/a/x?y");
        assert_eq!(join("//h/x").unwrap(), "http://h:80/x");
        assert_eq!(join("https://h").unwrap(), "https://h:443/");
        assert_eq!(join("ftp://h/"), None);
        assert_eq!(join("/x?to=http://h/").unwrap(), "http://[fd00::2]:8080/x?to=http://h/");
        assert_eq!(join("x?to=http://h/").unwrap(), "http://[fd00::2]:8080/a/x?to=http://h/");
        assert_eq!(join("?to=http://h/").unwrap(), "http://[fd00::2]:8080/a/b?to=http://h/");
    }
}
