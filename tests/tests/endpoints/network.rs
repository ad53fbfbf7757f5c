//! The endpoints on an address: TLS and a token, or nothing.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tests::{Node, NodeOptions, Sandbox, binaries};

use crate::client::{self, Answer, Place};

const ADDRESS: &str = "127.0.0.1:10250";
const TOKEN: &str = "8d1f0c6be2a94d7ba1f5e0c39d7a6b42";

/// Certificate, key and token in files; the flags that name them.
struct Files {
    dir: tempfile::TempDir,
    certificate: CertificateDer<'static>,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
        fs::write(dir.path().join("cert.pem"), made.cert.pem()).expect("written");
        fs::write(dir.path().join("key.pem"), made.signing_key.serialize_pem()).expect("written");
        let files = Self { dir, certificate: made.cert.der().clone() };
        fs::write(files.path("token"), format!("{TOKEN}\n")).expect("written");
        files.set_mode("token", 0o600);
        files.set_mode("key.pem", 0o600);
        files
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn set_mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.path(name), Permissions::from_mode(mode)).expect("set");
    }

    fn flags(&self) -> Vec<String> {
        let named = [
            ("--tls-cert-file", "cert.pem"),
            ("--tls-private-key-file", "key.pem"),
            ("--token-file", "token"),
        ];
        let named = named.into_iter().flat_map(|(flag, file)| [flag.to_owned(), self.path(file)]);
        ["--listen".to_owned(), ADDRESS.to_owned()].into_iter().chain(named).collect()
    }

    /// A GET over TLS, whose server must show the certificate.
    fn get(&self, path: &str, authorization: Option<&str>) -> Answer {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("versions").with_root_certificates(roots).with_no_client_auth();
        let name = "127.0.0.1".try_into().expect("a name");
        let connection = ClientConnection::new(Arc::new(config), name).expect("a client");
        let address: SocketAddr = ADDRESS.parse().expect("an address");
        let stream = StreamOwned::new(connection, client::tcp(address));
        let headers: Vec<(&str, &str)> =
            authorization.iter().map(|value| ("Authorization", *value)).collect();
        client::send(stream, "GET", path, &headers).read()
    }
}

#[test]
fn only_a_client_with_the_token_is_answered_and_others_are_counted() {
    let (sandbox, files) = (Sandbox::new(), Files::new());
    let options = NodeOptions { kubelet_flags: files.flags(), ..NodeOptions::default() };
    let node = Node::start(&sandbox, options).expect("the node starts");
    let right = format!("Bearer {TOKEN}");
    let healthy = files.get("/healthz", Some(&right));
    assert_eq!((healthy.status, healthy.text().as_str()), (200, "ok"));
    assert_eq!(files.get("/pods", Some(&right)).status, 200);

    let none = files.get("/pods", None);
    assert_eq!((none.status, none.text().as_str()), (401, "Unauthorized\n"));
    let without_date = |mut answer: Answer| {
        answer.headers.retain(|(name, _)| name != "date");
        answer
    };
    let none = without_date(none);
    let nearly = format!("Bearer {}0", &TOKEN[..TOKEN.len() - 1]);
    let wrong = ["Bearer wrong", nearly.as_str(), "Basic YW5uYTpVKlU=", TOKEN, "Bearer "];
    for authorization in wrong {
        assert_eq!(without_date(files.get("/pods", Some(authorization))), none, "{authorization}");
    }
    // Neither may a client without the token learn which paths there are.
    assert_eq!(without_date(files.get("/absent", None)), none);
    let metrics = Place::unix(&node).get("/metrics").text();
    assert!(metrics.contains("\nhawser_kubelet_unauthorized_requests_total 7\n"), "{metrics}");
    assert!(!metrics.contains(TOKEN));
    assert!(!node.outputs().contains(TOKEN));

    // Without TLS there is no answer of HTTP.
    let mut plain = client::send(client::tcp(ADDRESS.parse().expect("an address")), "GET", "/healthz", &[]);
    let mut bytes = Vec::new();
    let _reset = plain.0.read_to_end(&mut bytes);
    assert!(!bytes.starts_with(b"HTTP"), "{:?}", String::from_utf8_lossy(&bytes));
    // A thousand clients without a token keep none with it out.
    client::allow_many_connections();
    let strangers: Vec<_> = (0..1000).map(|_| client::tcp(ADDRESS.parse().expect("an address"))).collect();
    assert_eq!(files.get("/healthz", Some(&right)).status, 200);
    drop(strangers);
    node.stop().expect("it stops");
}

/// What a kubelet with these flags prints before it ends.
fn refusal(sandbox: &Sandbox, flags: &[String]) -> String {
    let mut command: Command = sandbox.command(&binaries::find("hawser-kubelet").expect("it is built"));
    command.arg("run").arg("--root-dir").arg(sandbox.path("k")).arg("--manifests").arg(sandbox.path("m"));
    command.arg("--images").arg(sandbox.path("i")).arg("--log-dir").arg(sandbox.path("log"));
    command.arg("--cgroup-root").arg(sandbox.cgroup_root());
    let output = command.args(flags).output().expect("it runs");
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(!output.status.success(), "{printed}");
    printed
}

#[test]
fn the_kubelet_does_not_start_with_an_address_that_is_not_protected() {
    let (sandbox, files) = (Sandbox::new(), Files::new());
    for dir in ["m", "i"] {
        sandbox.make_dir(dir).expect("made");
    }
    for flag in ["--tls-cert-file", "--tls-private-key-file", "--token-file"] {
        let mut flags = files.flags();
        let at = flags.iter().position(|word| word == flag).expect("a flag");
        flags.drain(at..at + 2);
        let printed = refusal(&sandbox, &flags);
        assert!(printed.contains("were not provided") && printed.contains(flag), "{printed}");
    }
    files.set_mode("token", 0o640);
    let printed = refusal(&sandbox, &files.flags());
    assert!(printed.contains("has mode 0640") && printed.contains("chmod 0600"), "{printed}");
    files.set_mode("token", 0o600);
    files.set_mode("key.pem", 0o604);
    let printed = refusal(&sandbox, &files.flags());
    assert!(printed.contains("--tls-private-key-file") && printed.contains("has mode 0604"), "{printed}");
    files.set_mode("key.pem", 0o600);
    fs::write(files.path("token"), "short").expect("written");
    let printed = refusal(&sandbox, &files.flags());
    assert!(printed.contains("fewer than 16 characters") && !printed.contains("short\n"), "{printed}");
    fs::write(files.path("token"), TOKEN).expect("written");
    fs::write(files.path("cert.pem"), "no certificate").expect("written");
    let printed = refusal(&sandbox, &files.flags());
    assert!(printed.contains("--tls-cert-file") && printed.contains("no certificate in PEM"), "{printed}");
}
