//! Pulls through a proxy that the environment names.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use base64::Engine;
use proto::cri::AuthConfig;
use tests::cri::{Cri, Host, layer};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

use crate::registries::{assert_no_downloads, configure, host, password, pull_with};
use crate::registry_server::{Certificate, Image, Layer, Reply, Server};

/// A name that only the proxy can find.
const NAME: &str = "registry.test";

/// A proxy whose every connection leads to one server. It keeps the heads of requests, and what
/// passes through its tunnels.
struct Proxy {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Proxy {
    async fn start(target: SocketAddr, answer: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&heads);
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(pass(client, target, answer, Arc::clone(&seen)));
            }
        });
        Self { address, heads, accepting }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn pass(
    mut client: TcpStream,
    target: SocketAddr,
    answer: &'static str,
    heads: Arc<Mutex<Vec<String>>>,
) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = client.read_u8().await else { return };
        head.push(byte);
    }
    let text = String::from_utf8(head.clone()).unwrap();
    heads.lock().unwrap().push(text.clone());
    let mut server = TcpStream::connect(target).await.unwrap();
    if text.starts_with("CONNECT ") {
        client.write_all(answer.as_bytes()).await.unwrap();
        if !answer.contains(" 200 ") {
            return;
        }
    } else {
        server.write_all(&head).await.unwrap();
    }
    // Either side may hang up.
    let _end = copy_bidirectional(&mut client, &mut server).await;
}

const CONNECTED: &str = "HTTP/1.1 200 Connected\r\n\r\n";

fn image() -> Image {
    Image::new(&[Layer::gzip(&layer(&[("file", 0o644, b"content")]))], "through a proxy")
}

async fn start(host: &mut Host, variables: &[(&str, &str)]) -> Cri {
    let dir = host.path("certs.d").display().to_string();
    let flags = ["--registry-config", dir.as_str(), "--image-pull-idle-seconds", "2"];
    host.start_in(variables, &flags).await
}

async fn pull(cri: &Cri, auth: Option<AuthConfig>) -> Result<String, String> {
    let name = format!("{NAME}/demo:1");
    pull_with(cri, &name, auth).await.map_err(|status| {
        status
            .message()
            .split_once(&format!("was not pulled: {NAME}: "))
            .expect("the host is named")
            .1
            .to_owned()
    })
}

#[tokio::test]
async fn a_registry_with_tls_is_reached_through_a_tunnel_and_the_proxy_learns_no_credentials() {
    let mut host = host();
    let certificate = Certificate::valid();
    let image = image();
    let basic = base64::engine::general_purpose::STANDARD.encode("anna:geheim");
    let expected = format!("Basic {basic}");
    let registry =
        Server::start_with(Some(&certificate), move |request| match request.headers.get("authorization") {
            Some(value) if *value == expected => image.reply(&request.path),
            _ => Reply::challenge("Basic realm=\"r\""),
        })
        .await;
    let proxy = Proxy::start(registry.address, CONNECTED).await;
    std::fs::write(host.path("ca.pem"), &certificate.certificate).unwrap();
    configure(&host, NAME, &format!("ca = \"{}\"", host.path("ca.pem").display()));
    let url = format!("http://proxy-user:proxy-word@{}", proxy.address);
    let cri = start(&mut host, &[("HTTPS_PROXY", &url), ("HTTP_PROXY", "http://127.0.0.1:1")]).await;
    pull(&cri, password("anna", "geheim")).await.unwrap();
    let heads = proxy.heads();
    let own = base64::engine::general_purpose::STANDARD.encode("proxy-user:proxy-word");
    assert!(!heads.is_empty());
    for head in heads {
        assert!(head.starts_with(&format!("CONNECT {NAME}:443 HTTP/1.1\r\n")), "{head}");
        assert!(head.contains(&format!("proxy-authorization: Basic {own}\r\n")), "{head}");
        assert!(!head.contains(&basic), "{head}");
    }
    assert!(!registry.requests().iter().any(|request| request.headers.contains_key("proxy-authorization")));
    assert!(!host.log().contains("proxy-word"));
}

#[tokio::test]
async fn a_registry_without_tls_gets_no_credentials_through_a_proxy() {
    let mut host = host();
    let image = image();
    let open = Server::start(move |request| {
        // A proxy gets the whole URL, and this one passes it on.
        image.reply(request.path.strip_prefix("http://registry.test").unwrap_or("/none"))
    })
    .await;
    let proxy = Proxy::start(open.address, CONNECTED).await;
    configure(&host, NAME, &format!("server = \"http://{NAME}\""));
    let url = format!("{}", proxy.address);
    let cri = start(&mut host, &[("http_proxy", &url)]).await;
    pull(&cri, password("anna", "geheim")).await.unwrap();
    assert!(proxy.heads().iter().all(|head| head.starts_with("GET http://registry.test/v2/demo/")));

    let closed = Server::start(|_| Reply::challenge("Basic realm=\"r\"")).await;
    let proxy = Proxy::start(closed.address, CONNECTED).await;
    host.kill();
    let url = format!("{}", proxy.address);
    let cri = start(&mut host, &[("HTTP_PROXY", &url)]).await;
    let name = format!("{NAME}/other:1");
    let refused = pull_with(&cri, &name, password("anna", "geheim")).await.unwrap_err();
    let words = format!("credentials are not sent through proxy {url} without TLS: add the host to NO_PROXY");
    assert!(refused.message().ends_with(&words), "{refused}");
    assert_eq!(closed.requests().len(), 1, "the one without credentials");
    // A header of the configuration may be one.
    configure(&host, NAME, &format!("server = \"http://{NAME}\"\nheader.x-token = \"hush\""));
    let refused = pull_with(&cri, &name, None).await.unwrap_err();
    assert!(refused.message().ends_with(&words), "{refused}");
    assert_eq!(closed.requests().len(), 1);
    assert_no_downloads(&host);
}

#[tokio::test]
async fn a_proxy_that_refuses_or_hangs_is_named_and_no_proxy_leads_past_it() {
    let mut host = host();
    let image = image();
    let registry = Server::start(|_| Reply::status(500)).await;
    let direct = Server::start(move |request| image.reply(&request.path)).await;
    let refusing = Proxy::start(registry.address, "HTTP/1.1 407 Denied\r\ncontent-length: 0\r\n\r\n").await;
    let place = direct.address.to_string();
    configure(&host, &place, &format!("server = \"http://{place}\""));
    let url = refusing.address.to_string();
    let variables = [("HTTPS_PROXY", url.as_str()), ("HTTP_PROXY", url.as_str())];
    let cri = start(&mut host, &variables).await;
    assert_eq!(pull(&cri, None).await.unwrap_err(), format!("manifest of tag 1: proxy {url}: 407"));
    // Addresses of this machine need none.
    pull_with(&cri, &format!("{place}/demo:1"), None).await.unwrap();
    assert_eq!(refusing.heads().len(), 1);

    host.kill();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = silent.local_addr().unwrap().to_string();
    let cri = start(&mut host, &[("HTTPS_PROXY", &url)]).await;
    let error = pull(&cri, None).await.unwrap_err();
    assert_eq!(error, format!("manifest of tag 1: proxy {url}: no byte for 2 s (--image-pull-idle-seconds)"));

    host.kill();
    let cri = start(&mut host, &[("HTTPS_PROXY", &url), ("NO_PROXY", ".test")]).await;
    let error = pull(&cri, None).await.unwrap_err();
    assert!(error.starts_with("manifest of tag 1: find the address of registry.test: "), "{error}");

    host.kill();
    let cri = start(&mut host, &[("HTTPS_PROXY", "socks5://anna:geheim@p.example:1")]).await;
    let error = pull(&cri, None).await.unwrap_err();
    assert_eq!(error, "manifest of tag 1: HTTPS_PROXY: only proxies with http:// are supported");
    assert_no_downloads(&host);
}
