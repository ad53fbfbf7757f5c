//! Pulls from registries that are broken or hostile. No download stays, and each error names the image,
//! the host and the cause.

use std::time::{Duration, Instant};

use tests::cri::{Cri, Host, eventually, layer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::registries::{
    assert_no_downloads, configure, configure_plain, downloads, host, password, pull_with, start,
};
use crate::registry_server::{Certificate, Image, Layer, Reply, Request, Server};

fn image() -> Image {
    Image::new(&[Layer::gzip(&layer(&[("file", 0o644, &random(100_000))]))], "x")
}

/// Bytes that do not get smaller by compression.
fn random(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// The error of a pull from `server`, with the layout that all have.
async fn refused(host: &Host, cri: &Cri, server: &Server) -> String {
    let name = format!("{}/demo:1", server.address);
    let error = pull_with(cri, &name, password("anna", "geheim")).await.unwrap_err();
    assert_no_downloads(host);
    let layers = std::fs::read_dir(host.path("root/images/layers")).unwrap().count();
    assert_eq!(layers, 0, "half a layer");
    let start = format!(
        "image {name:?} is in no OCI layout or archive under {}, and was not pulled: {}: ",
        host.path("images").display(),
        server.address
    );
    let message = error.message();
    assert!(!message.contains("geheim") && !host.log().contains("geheim"), "{message}");
    message.strip_prefix(&start).unwrap_or_else(|| panic!("{message} does not start with {start}")).to_owned()
}

/// A server that serves `image`, but replies to a blob that is a layer by `fault`.
async fn faulty(image: &Image, fault: impl Fn(Reply) -> Reply + Send + Sync + 'static) -> Server {
    let image = image.clone();
    Server::start(move |request| {
        let reply = image.reply(&request.path);
        if request.path.ends_with(&image.layers[0]) { fault(reply) } else { reply }
    })
    .await
}

/// A pull that waits for an hour in the middle of a layer.
async fn stalled_pull(host: &mut Host) -> (Server, tokio::task::JoinHandle<Result<String, tonic::Status>>) {
    let server = faulty(&image(), |reply| reply.stalled(50_000)).await;
    configure_plain(host, &server);
    let dir = host.path("certs.d").display().to_string();
    let cri = host.start_with(&["--registry-config", &dir, "--image-pull-idle-seconds", "3600"]).await;
    let name = format!("{}/demo:1", server.address);
    (server, tokio::spawn(async move { pull_with(&cri, &name, None).await }))
}

#[tokio::test]
async fn a_blob_that_is_not_what_the_manifest_announces_is_refused() {
    let mut host = host();
    let image = image();
    let digest = &image.layers[0];
    let size = image.blobs[digest].len();
    let mut other = image.blobs[digest].clone();
    other[50_000] ^= 1;
    let mut longer = image.blobs[digest].clone();
    longer.push(0);
    let (announced_longer, shorter) = (longer.clone(), image.blobs[digest][..size - 1].to_vec());
    let announced_shorter = shorter.clone();
    let servers = [
        (faulty(&image, move |_| Reply::ok(other.clone())).await, "digest is sha256:".to_owned()),
        (faulty(&image, |reply| reply.cut(50_000)).await, "HTTP: ".to_owned()),
        (
            faulty(&image, move |_| Reply::ok(shorter.clone()).unannounced()).await,
            format!("{} bytes instead of {size}", size - 1),
        ),
        (
            faulty(&image, move |_| Reply::ok(announced_shorter.clone())).await,
            format!("{} bytes instead of {size}", size - 1),
        ),
        (
            faulty(&image, move |_| Reply::ok(longer.clone()).unannounced()).await,
            format!("more than {size} bytes: as its manifest announces"),
        ),
        (
            faulty(&image, move |_| Reply::ok(announced_longer.clone())).await,
            format!("{} bytes instead of {size}", size + 1),
        ),
        (faulty(&image, |_| Reply::status(404)).await, "404".to_owned()),
    ];
    servers.iter().for_each(|(server, _)| configure_plain(&host, server));
    let cri = start(&mut host).await;
    for (server, problem) in &servers {
        let error = refused(&host, &cri, server).await;
        assert!(error.starts_with(&format!("layer {digest} of 1: {problem}")), "{error} is not {problem}");
    }
    // The next pull of the same content from a host that has it succeeds.
    let honest = faulty(&image, |reply| reply).await;
    configure_plain(&host, &honest);
    pull_with(&cri, &format!("{}/demo:1", honest.address), None).await.unwrap();
}

#[tokio::test]
async fn a_manifest_that_is_not_one_is_refused() {
    let mut host = host();
    let image = image();
    let big = || [b"{\"padding\": \"".as_slice(), &[b'x'; 4 << 20], b"\"}"].concat();
    let foreign = Image { media_type: "text/html", ..image.clone() };
    let missing = br#"{"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}"#;
    let climbing = String::from_utf8(image.manifest.clone()).unwrap().replace("sha256:", "../../");
    let servers: Vec<(Server, &str)> = vec![
        (
            Server::start(move |_| Reply::ok(big())).await,
            "more than 4194304 bytes: --image-max-manifest-bytes",
        ),
        (
            Server::start(move |_| Reply::ok(big()).unannounced()).await,
            "more than 4194304 bytes: --image-max-manifest-bytes",
        ),
        (
            Server::start(move |_| Reply::ok(b"{}".to_vec()).with("content-type", foreign.media_type)).await,
            "media type \"text/html\" is not that of an image or of an index of images",
        ),
        (
            Server::start(|_| Reply::ok(b"<html>".to_vec())).await,
            "invalid: expected value at line 1 column 1",
        ),
        (Server::start(|_| Reply::ok(missing.to_vec())).await, "has no manifest for linux/"),
        (
            Server::start(move |_| Reply::ok(climbing.clone().into_bytes())).await,
            "is not sha256:<64 hex digits>",
        ),
        (
            Server::start({
                let image = image.clone();
                move |request| image.reply(&request.path).with("docker-content-digest", "sha256:0")
            })
            .await,
            "instead of sha256:0",
        ),
    ];
    servers.iter().for_each(|(server, _)| configure_plain(&host, server));
    let cri = start(&mut host).await;
    for (server, problem) in &servers {
        let error = refused(&host, &cri, server).await;
        assert!(error.contains(problem), "{error} is not {problem}");
    }
}

/// 4 MiB is the limit of each document: a configuration is one, too.
#[tokio::test]
async fn what_a_manifest_announces_has_limits() {
    let mut host = host();
    let image = image();
    let manifest = String::from_utf8(image.manifest.clone()).unwrap();
    let config_size = image.blobs.iter().find(|(digest, _)| **digest != image.layers[0]).unwrap().1.len();
    let layer_size = image.blobs[&image.layers[0]].len();
    let sized = |from: usize, to: u64| {
        let manifest = manifest.replace(&format!("\"size\":{from}"), &format!("\"size\":{to}")).into_bytes();
        let image = Image { manifest, ..image.clone() };
        move |request: &Request| image.reply(&request.path)
    };
    let config = Server::start(sized(config_size, (4 << 20) + 1)).await;
    let layers = Server::start(sized(layer_size, u64::MAX)).await;
    configure_plain(&host, &config);
    configure_plain(&host, &layers);
    let cri = start(&mut host).await;
    let error = refused(&host, &cri, &config).await;
    assert!(error.ends_with("more than 4194304 bytes: --image-max-manifest-bytes"), "{error}");
    let error = refused(&host, &cri, &layers).await;
    assert!(
        error.ends_with("unpacks to more than 17179869184 bytes (--image-max-unpacked-bytes)"),
        "{error}"
    );
    assert_eq!((config.count("/blobs/"), layers.count(&image.layers[0])), (0, 0), "nothing was asked for");
}

#[tokio::test]
async fn a_registry_that_asks_for_token_after_token_is_given_up() {
    let mut host = host();
    let service = Server::start(|_| Reply::ok(br#"{"access_token": "refused"}"#.to_vec())).await;
    let realm = service.address;
    let registry =
        Server::start(move |_| Reply::challenge(&format!("Bearer realm=\"http://{realm}/token\""))).await;
    // Its token service asks for a token itself.
    let looped = Server::start(|request| {
        let host = &request.headers["host"];
        Reply::challenge(&format!("Bearer realm=\"http://{host}/token\""))
    })
    .await;
    let dead = Server::start(|_| Reply::challenge("Bearer realm=\"http://127.0.0.1:1/token\"")).await;
    let split = Server::start(|request| match request.path.starts_with("/v2/") {
        true => Reply::challenge(&format!("Bearer realm=\"http://{}/token\"", request.headers["host"])),
        false => Reply::ok(br#"{"token": "two\nlines"}"#.to_vec()),
    })
    .await;
    [&registry, &looped, &dead, &split].into_iter().for_each(|server| configure_plain(&host, server));
    let cri = start(&mut host).await;
    assert_eq!(
        refused(&host, &cri, &registry).await,
        "manifest of tag 1: unauthorized, also with a new token"
    );
    assert_eq!((service.requests().len(), registry.requests().len()), (1, 2));
    let error = refused(&host, &cri, &looped).await;
    assert_eq!(error, format!("manifest of tag 1: token service {:?}: 401", looped.address.to_string()));
    assert_eq!(looped.requests().len(), 2);
    let error = refused(&host, &cri, &dead).await;
    assert!(
        error.starts_with("manifest of tag 1: token service \"http://127.0.0.1:1/token\": connect: "),
        "{error}"
    );
    let error = refused(&host, &cri, &split).await;
    assert!(error.ends_with("its token is not the value of a header"), "{error}");
}

/// Otherwise it would learn the password by naming a token service of its own.
#[tokio::test]
async fn a_host_that_is_redirected_to_cannot_ask_for_credentials() {
    let mut host = host();
    let other = Server::start(|request| {
        Reply::challenge(&format!("Bearer realm=\"http://{}/token\"", request.headers["host"]))
    })
    .await;
    let target = other.address;
    let registry = Server::start(move |_| Reply::redirect(&format!("http://{target}/blob"))).await;
    configure_plain(&host, &registry);
    let cri = start(&mut host).await;
    assert_eq!(refused(&host, &cri, &registry).await, "manifest of tag 1: 401");
    let paths: Vec<_> = other.requests().iter().map(|request| request.path.clone()).collect();
    assert_eq!(paths, ["/blob"]);
    assert!(!other.requests()[0].headers.contains_key("authorization"));
}

#[tokio::test]
async fn redirects_have_an_end_and_never_leave_tls() {
    let mut host = host();
    let endless = Server::start(|request| Reply::redirect(&request.path)).await;
    let nowhere = Server::start(|_| Reply::redirect("file:///etc/shadow")).await;
    let certificate = Certificate::valid();
    let plain = Server::start(|_| Reply::ok(Vec::new())).await;
    let target = plain.address;
    let leaving =
        Server::start_with(Some(&certificate), move |request| match request.path.contains("/v2/a/") {
            true => Reply::redirect(&format!("http://{target}/")),
            false => Reply::challenge(&format!("Bearer realm=\"http://{target}/token\"")),
        })
        .await;
    configure_plain(&host, &endless);
    configure_plain(&host, &nowhere);
    std::fs::write(host.path("ca.pem"), &certificate.certificate).unwrap();
    let ca = format!("ca = \"{}\"", host.path("ca.pem").display());
    configure(&host, &leaving.address.to_string(), &ca);
    let cri = start(&mut host).await;
    assert_eq!(refused(&host, &cri, &endless).await, "manifest of tag 1: redirected more than 5 times");
    let error = refused(&host, &cri, &nowhere).await;
    assert!(
        error.starts_with("manifest of tag 1: redirected to \"file:///etc/shadow\", which is not"),
        "{error}"
    );
    let name = format!("{}/a:1", leaving.address);
    let error = pull_with(&cri, &name, password("anna", "geheim")).await.unwrap_err();
    let expected = format!("redirected to \"http://{target}/\", which is not an https URL");
    assert!(error.message().contains(&expected), "{error}");
    let error = refused(&host, &cri, &leaving).await;
    assert!(error.ends_with("credentials are not sent without TLS"), "{error}");
    assert_eq!(plain.requests().len(), 0);
}

#[tokio::test]
async fn certificates_are_verified_unless_the_configuration_says_otherwise() {
    let mut host = host();
    let image = image();
    let (valid, expired) = (Certificate::valid(), Certificate::expired());
    let serve = || {
        let image = image.clone();
        move |request: &Request| image.reply(&request.path)
    };
    let unknown = Server::start_with(Some(&valid), serve()).await;
    let old = Server::start_with(Some(&expired), serve()).await;
    std::fs::write(host.path("old.pem"), &expired.certificate).unwrap();
    configure(&host, &old.address.to_string(), &format!("ca = \"{}\"", host.path("old.pem").display()));
    let cri = start(&mut host).await;
    let error = refused(&host, &cri, &unknown).await;
    assert!(error.starts_with("manifest of tag 1: TLS: invalid peer certificate: "), "{error}");
    let error = refused(&host, &cri, &old).await;
    assert!(error.contains("certificate expired"), "{error}");
    assert_eq!(unknown.requests().len() + old.requests().len(), 0);
    // The settings are read for each pull.
    configure(&host, &old.address.to_string(), "skip_verify = true");
    pull_with(&cri, &format!("{}/demo:1", old.address), None).await.unwrap();
}

#[tokio::test]
async fn a_registry_without_tls_is_used_only_where_that_is_configured() {
    let mut host = host();
    let image = image();
    let server = Server::start(move |request| image.reply(&request.path)).await;
    let cri = start(&mut host).await;
    let error = refused(&host, &cri, &server).await;
    assert!(error.starts_with("manifest of tag 1: TLS: "), "{error}");
    configure_plain(&host, &server);
    pull_with(&cri, &format!("{}/demo:1", server.address), None).await.unwrap();
}

/// As Debian's docker-registry does, unlike [`Server`], which closes the connection.
#[tokio::test]
async fn a_registry_that_answers_without_tls_is_named_with_what_to_configure() {
    let mut host = host();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let mut hello = [0; 5];
            connection.read_exact(&mut hello).await.unwrap();
            connection.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").await.unwrap();
        }
    });
    let cri = start(&mut host).await;
    let error = pull_with(&cri, &format!("{address}/demo:1"), None).await.unwrap_err();
    let advice = format!(
        "write server = \"http://{address}\" into {address}/hosts.toml below /etc/hawser/certs.d (--registry-config)"
    );
    assert!(
        error.message().contains("it answers without TLS. ") && error.message().ends_with(&advice),
        "{error}"
    );
}

#[tokio::test]
async fn a_configuration_that_has_no_effect_fails_the_pull_and_names_itself() {
    let mut host = host();
    configure(&host, "docker.io", "[host.\"https://m.example\"]\ndial_timeout = \"1s\"");
    let cri = start(&mut host).await;
    let error = pull_with(&cri, "demo:2", None).await.unwrap_err();
    let file = host.path("certs.d/docker.io/hosts.toml");
    let problem = format!("{}: host.\"https://m.example\".dial_timeout is not supported", file.display());
    assert!(error.message().ends_with(&problem), "{error}");
}

#[tokio::test]
async fn a_registry_that_sends_nothing_for_the_idle_limit_is_given_up() {
    let mut host = host();
    let image = image();
    let silent = Server::start(|_| Reply::ok(b"{}".to_vec()).stalled(0)).await;
    let stalled = faulty(&image, |reply| reply.stalled(50_000)).await;
    // Not even a handshake: it reads what is no HTTP for it.
    let never = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = never.local_addr().unwrap();
    configure_plain(&host, &silent);
    configure_plain(&host, &stalled);
    let cri = start(&mut host).await;
    let begun = Instant::now();
    let limit = "no byte for 2 s (--image-pull-idle-seconds)";
    let of_silent = refused(&host, &cri, &silent).await;
    assert_eq!(of_silent, format!("manifest of tag 1: {limit}"));
    let of_stalled = refused(&host, &cri, &stalled).await;
    assert_eq!(of_stalled, format!("layer {} of 1: {limit}", image.layers[0]));
    let error = pull_with(&cri, &format!("{address}/demo:1"), None).await.unwrap_err();
    assert!(error.message().ends_with(limit), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn what_a_killed_runtime_has_half_fetched_is_removed_by_the_next() {
    let mut host = host();
    let (_server, pull) = stalled_pull(&mut host).await;
    eventually("half of the layer has come", || {
        let half = downloads(&host).iter().any(|path| path.metadata().is_ok_and(|file| file.len() >= 30_000));
        half.then_some(())
    })
    .await;
    host.kill();
    pull.await.unwrap().unwrap_err();
    assert_ne!(downloads(&host).len(), 0);
    let _cri = start(&mut host).await;
    assert_no_downloads(&host);
    let trash = host.path("root/trash");
    eventually("the trash is empty", || (std::fs::read_dir(&trash).unwrap().count() == 0).then_some(()))
        .await;
}

#[tokio::test]
async fn a_download_is_shown_in_the_log_and_ends_with_its_caller() {
    let mut host = host();
    let (server, pull) = stalled_pull(&mut host).await;
    eventually("the layer begins to come", || (downloads(&host).len() > 1).then_some(())).await;
    let address = server.address.to_string();
    eventually("the log shows how far it has come", || {
        let log = host.log();
        let shows =
            |line: &&str| line.contains("pulling") && line.contains(&address) && line.contains("bytes=");
        let line = log.lines().find(shows)?;
        assert!(line.contains("of="), "{line}");
        Some(())
    })
    .await;
    pull.abort();
    eventually("no download is left", || downloads(&host).is_empty().then_some(())).await;
}
