//! Pulls from registries that answer as they should: Debian's docker-registry, mirrors, token services.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine;
use proto::cri::{AuthConfig, ImageStatusRequest, PullImageRequest};
use serde_json::{Value, json};
use tests::cri::{Cri, Host, IMAGE, container, demo_layer, digest_of, image_spec, layer};
use tests::docker_registry::{ADDRESS, Access, DockerRegistry, PASSWORD, USER};
use tokio::sync::Notify;

use crate::registry_server::{
    Certificate, DOCKER_LIST, DOCKER_MANIFEST, Image, Layer, Reply, Request, Server, architecture,
};

/// A host with a loopback interface of its own.
pub(crate) fn host() -> Host {
    let host = Host::new();
    let status = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(status.success());
    host
}

/// Starts the runtime with the settings below `certs.d`.
pub(crate) async fn start(host: &mut Host) -> Cri {
    let dir = host.path("certs.d").display().to_string();
    host.start_with(&["--registry-config", &dir, "--image-pull-idle-seconds", "2"]).await
}

/// Writes the settings of the registry `domain`.
pub(crate) fn configure(host: &Host, domain: &str, text: &str) {
    let dir = host.path("certs.d").join(domain);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("hosts.toml"), text).unwrap();
}

/// Lets the runtime speak to `server` without TLS.
pub(crate) fn configure_plain(host: &Host, server: &Server) {
    configure(host, &server.address.to_string(), &format!("server = \"http://{}\"", server.address));
}

pub(crate) async fn pull_with(
    cri: &Cri,
    image: &str,
    auth: Option<AuthConfig>,
) -> Result<String, tonic::Status> {
    let request = PullImageRequest { image: Some(image_spec(image)), auth, sandbox_config: None };
    cri.images.clone().pull_image(request).await.map(|answer| answer.into_inner().image_ref)
}

pub(crate) fn password(user: &str, password: &str) -> Option<AuthConfig> {
    Some(AuthConfig { username: user.to_owned(), password: password.to_owned(), ..Default::default() })
}

/// No download is left.
pub(crate) fn assert_no_downloads(host: &Host) {
    assert_eq!(downloads(host), Vec::<std::path::PathBuf>::new());
}

pub(crate) fn downloads(host: &Host) -> Vec<std::path::PathBuf> {
    match std::fs::read_dir(host.path("root/images/downloads")) {
        Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
        // The first download makes it.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

/// A file of an unpacked layer.
fn unpacked(host: &Host, digest: &str, file: &str) -> Vec<u8> {
    let layer = host.path("root/images/layers").join(digest.replace(':', "-"));
    std::fs::read(layer.join(file)).unwrap()
}

fn small(content: &str) -> Layer {
    Layer::gzip(&layer(&[("file", 0o644, content.as_bytes())]))
}

/// With TLS and a password.
fn protected_registry(host: &Host, certificate: &Certificate) -> DockerRegistry {
    let tls = Some((certificate.certificate.as_str(), certificate.key.as_str()));
    let command = Command::new(DockerRegistry::program());
    DockerRegistry::start(command, &host.path("registry"), Access { tls, password: true })
}

/// With a gzip, a zstd and a plain layer, in Docker's types.
fn of_all_forms() -> Image {
    let zstd = layer(&[("zstd", 0o644, &b"zstd ".repeat(100_000))]);
    let plain = layer(&[("plain", 0o644, b"plain")]);
    let compressed =
        ruzstd::encoding::compress_to_vec(&zstd[..], ruzstd::encoding::CompressionLevel::Fastest);
    let mut demo = Layer::gzip(&demo_layer());
    demo.media_type = "application/vnd.docker.image.rootfs.diff.tar.gzip";
    let layers = [
        demo,
        Layer { media_type: "application/vnd.oci.image.layer.v1.tar+zstd", sent: compressed, tar: zstd },
        Layer { media_type: "application/vnd.oci.image.layer.v1.tar", sent: plain.clone(), tar: plain },
    ];
    Image::of_type(DOCKER_MANIFEST, &layers, "from a registry")
}

/// An index in which the image for this machine is the second.
fn index_of(foreign: &Image, own: &Image) -> Vec<u8> {
    let entry = |image: &Image, architecture: &str| -> Value {
        json!({
            "mediaType": image.media_type, "digest": image.digest(), "size": image.manifest.len(),
            "platform": {"os": "linux", "architecture": architecture},
        })
    };
    let manifests = [entry(foreign, "s390x"), entry(own, &architecture())];
    json!({"schemaVersion": 2, "mediaType": DOCKER_LIST, "manifests": manifests}).to_string().into_bytes()
}

#[tokio::test]
async fn an_image_comes_from_a_registry_with_tls_and_a_password_and_its_container_runs() {
    let mut host = host();
    let certificate = Certificate::valid();
    let registry = protected_registry(&host, &certificate);
    let (own, foreign) = (of_all_forms(), Image::new(&[small("foreign")], "foreign"));
    let index = index_of(&foreign, &own);
    let blobs: Vec<&[u8]> = own.blobs.values().chain(foreign.blobs.values()).map(Vec::as_slice).collect();
    registry.put("team/demo", &blobs, &[&own.manifest, &foreign.manifest, &index], "1");
    std::fs::write(host.path("ca.pem"), &certificate.certificate).unwrap();
    configure(&host, "127.0.0.1_5000_", &format!("ca = \"{}\"", host.path("ca.pem").display()));
    let mut cri = start(&mut host).await;

    let name = format!("{ADDRESS}/team/demo:1");
    let id = pull_with(&cri, &name, password(USER, PASSWORD)).await.unwrap();
    let request = ImageStatusRequest { image: Some(image_spec(&name)), verbose: false };
    let status = cri.images.image_status(request).await.unwrap().into_inner().image.unwrap();
    assert_eq!((status.id.as_str(), &status.repo_tags), (id.as_str(), &vec![name.clone()]));
    let by_digest = format!("{ADDRESS}/team/demo@{}", digest_of(&index));
    assert_eq!(status.repo_digests, std::slice::from_ref(&by_digest));
    assert_eq!(unpacked(&host, &own.layers[1], "zstd"), b"zstd ".repeat(100_000));
    assert_eq!(unpacked(&host, &own.layers[2], "plain"), b"plain");
    assert_no_downloads(&host);

    assert_eq!(pull_with(&cri, &by_digest, password(USER, PASSWORD)).await.unwrap(), id);
    let pod = host.pod("pulled");
    let sandbox = cri.run_pod(&pod).await.unwrap();
    let mut config = container("pulled", &[]);
    config.image = Some(image_spec(&id));
    assert_eq!(cri.run(&sandbox, config).await.exit_code, 0);
    assert_eq!(host.container_log("pulled"), ["stdout F from a registry"]);
    cri.remove_pod(&sandbox).await;
}

#[tokio::test]
async fn a_registry_that_wants_other_credentials_is_named_with_what_it_wants() {
    let mut host = host();
    let certificate = Certificate::valid();
    let registry = protected_registry(&host, &certificate);
    let image = Image::new(&[small("x")], "x");
    let blobs: Vec<&[u8]> = image.blobs.values().map(Vec::as_slice).collect();
    registry.put("demo", &blobs, &[&image.manifest], "1");
    std::fs::write(host.path("ca.pem"), &certificate.certificate).unwrap();
    configure(&host, ADDRESS, &format!("ca = \"{}\"", host.path("ca.pem").display()));
    let cri = start(&mut host).await;
    let name = format!("{ADDRESS}/demo:1");
    let without = format!("{ADDRESS}: manifest of tag 1: credentials are needed (imagePullSecrets)");
    let wrong = format!("{ADDRESS}: manifest of tag 1: unauthorized, also with user and password: ");
    for (auth, problem) in [(None, without), (password(USER, "geheim"), wrong)] {
        let error = pull_with(&cri, &name, auth).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::PermissionDenied);
        assert!(error.message().contains(&format!("image {name:?}")), "{error}");
        assert!(error.message().contains(&problem), "{error}");
    }
    let missing = pull_with(&cri, &format!("{ADDRESS}/demo:2"), password(USER, PASSWORD)).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::NotFound);
    assert!(missing.message().ends_with("manifest of tag 2: 404: manifest unknown"), "{missing}");
    assert!(!host.log().contains("geheim") && !host.log().contains(PASSWORD), "{}", host.log());
}

/// In containerd's order, with its `ns`; a mirror never gets the pod's credentials.
#[tokio::test]
async fn mirrors_are_asked_before_the_registry_and_without_its_credentials() {
    let mut host = host();
    let image = Image::new(&[small("x")], "x");
    let broken = Server::start(|_| Reply::status(500)).await;
    let served = image.clone();
    let mirror = Server::start(move |request| match &request.path {
        path if path.contains("/manifests/") => served.reply(path),
        _ => Reply::status(404),
    })
    .await;
    let served = image.clone();
    let registry = Server::start(move |request| match request.headers.get("authorization") {
        Some(_) => served.reply(&request.path),
        None => Reply::challenge("Basic realm=\"r\""),
    })
    .await;
    let text = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\n[host.\"http://{}/cache\"]\nheader.x-mirror = \"m\"\n",
        registry.address, broken.address, mirror.address
    );
    configure(&host, "docker.io", &text);
    let cri = start(&mut host).await;
    pull_with(&cri, "demo:1", password("anna", "geheim")).await.unwrap();
    let paths = |server: &Server| server.requests().iter().map(|r| r.path.clone()).collect::<Vec<_>>();
    assert_eq!(paths(&broken), ["/v2/library/demo/manifests/1?ns=docker.io"]);
    assert_eq!(paths(&mirror)[0], "/cache/v2/library/demo/manifests/1?ns=docker.io");
    assert!(mirror.requests().iter().all(|request| request.headers["x-mirror"] == "m"));
    for request in broken.requests().iter().chain(&mirror.requests()) {
        assert!(!request.headers.contains_key("authorization"), "{request:?}");
    }
    let config = image.blobs.keys().find(|digest| !image.layers.contains(digest)).unwrap();
    assert!(paths(&registry).contains(&format!("/v2/library/demo/blobs/{config}")), "{:?}", paths(&registry));
    assert!(registry.requests().iter().all(|request| !request.headers.contains_key("x-mirror")));
}

/// A service beside the registry gives the token; the registry's storage gets neither.
#[tokio::test]
async fn a_token_is_fetched_where_the_registry_says_and_goes_to_no_other_host() {
    let mut host = host();
    let image = Image::new(&[small("x")], "x");
    let served = image.clone();
    let storage = Server::start(move |request| served.reply(&request.path)).await;
    let service = Server::start(|_| Reply::ok(br#"{"token": "t0ken", "expires_in": 60}"#.to_vec())).await;
    let (served, realm, elsewhere) = (image.clone(), service.address, storage.address);
    let registry = Server::start(move |request: &Request| {
        if request.headers.get("authorization").is_none_or(|value| value != "Bearer t0ken") {
            return Reply::challenge(&format!(
                "Bearer realm=\"http://{realm}/token\",service=\"the registry\""
            ));
        }
        match request.path.contains("/blobs/") {
            true => Reply::redirect(&format!("http://{elsewhere}{}", request.path)),
            false => served.reply(&request.path),
        }
    })
    .await;
    configure_plain(&host, &registry);
    let cri = start(&mut host).await;
    pull_with(&cri, &format!("{}/team/demo:1", registry.address), password("anna", "U*U")).await.unwrap();

    let asked = service.requests();
    let query = "/token?service=the%20registry&scope=repository%3Ateam%2Fdemo%3Apull";
    assert_eq!(asked.iter().map(|request| request.path.as_str()).collect::<Vec<_>>(), [query], "once");
    let basic = base64::engine::general_purpose::STANDARD.encode("anna:U*U");
    assert_eq!(asked[0].headers["authorization"], format!("Basic {basic}"));
    assert_eq!(storage.requests().len(), image.blobs.len());
    for request in storage.requests() {
        assert!(!request.headers.contains_key("authorization"), "{request:?}");
    }
}

#[tokio::test]
async fn a_layer_that_two_pulls_need_at_once_is_fetched_once() {
    let mut host = host();
    let shared = layer(&[("shared", 0o644, &[7; 100_000])]);
    let images = ["one", "two"].map(|label| Image::new(&[Layer::gzip(&shared)], label));
    let digest = images[0].layers[0].clone();
    let (both, wanted) = (images.clone(), digest.clone());
    // The layer comes once both manifests were asked for.
    let (manifests, both_asked) = (AtomicUsize::new(0), Arc::new(Notify::new()));
    let server = Server::start(move |request| {
        let reply = both[usize::from(request.path.contains("/two/"))].reply(&request.path);
        if request.path.contains("/manifests/") && manifests.fetch_add(1, Ordering::SeqCst) == 1 {
            both_asked.notify_one();
        }
        if request.path.contains(&wanted) { reply.after(&both_asked) } else { reply }
    })
    .await;
    configure_plain(&host, &server);
    let cri = start(&mut host).await;
    let address = server.address;
    let names = ["one", "two"].map(|name| format!("{address}/{name}:1"));
    let (one, two) = tokio::join!(pull_with(&cri, &names[0], None), pull_with(&cri, &names[1], None));
    assert_ne!(one.unwrap(), two.unwrap());
    assert_eq!(server.count(&digest), 1);
    assert_no_downloads(&host);
}

#[tokio::test]
async fn a_layer_is_fetched_again_only_for_another_registry() {
    let mut host = host();
    let shared = layer(&[("shared", 0o644, b"shared")]);
    let images = ["one", "two"].map(|label| Image::new(&[Layer::gzip(&shared)], label));
    let digest = images[0].layers[0].clone();
    let serve = |images: [Image; 2]| {
        move |request: &Request| images[usize::from(request.path.contains("/two/"))].reply(&request.path)
    };
    let first = Server::start(serve(images.clone())).await;
    let second = Server::start(serve(images)).await;
    configure_plain(&host, &first);
    configure_plain(&host, &second);
    let cri = start(&mut host).await;
    pull_with(&cri, &format!("{}/one:1", first.address), None).await.unwrap();
    pull_with(&cri, &format!("{}/two:1", first.address), None).await.unwrap();
    assert_eq!(first.count(&digest), 1);
    pull_with(&cri, &format!("{}/two:1", second.address), None).await.unwrap();
    assert_eq!(second.count(&digest), 1);
    // Again: only the manifest and the configuration.
    let before = first.requests().len();
    pull_with(&cri, &format!("{}/one:1", first.address), None).await.unwrap();
    assert_eq!((first.requests().len() - before, first.count(&digest)), (2, 1));
}

#[tokio::test]
async fn an_image_of_the_images_directory_is_not_asked_for() {
    let mut host = host();
    let registry = Server::start(|_| Reply::status(500)).await;
    configure(&host, "docker.io", &format!("server = \"http://{}\"", registry.address));
    let cri = start(&mut host).await;
    pull_with(&cri, IMAGE, None).await.unwrap();
    assert_eq!(registry.requests().len(), 0);
    let error = pull_with(&cri, "other:1", None).await.unwrap_err();
    assert_eq!(registry.requests().len(), 1);
    let expected = format!(
        "image \"docker.io/library/other:1\" is in no OCI layout or archive under {}, and was not pulled: {}: \
         manifest of tag 1: 500",
        host.path("images").display(),
        registry.address
    );
    assert_eq!(error.message(), expected);
}

/// A name is resolved by the C library, from the node's files.
#[tokio::test]
async fn a_host_is_found_by_name() {
    let mut host = host();
    let image = Image::new(&[small("x")], "x");
    let server = Server::start(move |request| image.reply(&request.path)).await;
    let port = server.address.port();
    configure(&host, &format!("localhost:{port}"), &format!("server = \"http://localhost:{port}\""));
    let cri = start(&mut host).await;
    pull_with(&cri, &format!("localhost:{port}/demo:1"), None).await.unwrap();
    let error = pull_with(&cri, "no-such-host.invalid/demo:1", None).await.unwrap_err();
    let expected = "no-such-host.invalid: manifest of tag 1: find the address of no-such-host.invalid: ";
    assert!(error.message().contains(expected), "{error}");
}

/// What a stopping runtime waits for: its calls, not a registry.
#[tokio::test]
async fn a_runtime_that_is_stopped_does_not_wait_for_a_pull() {
    let mut host = host();
    let asked = Arc::new(Notify::new());
    let notify = Arc::clone(&asked);
    let server = Server::start(move |_| {
        notify.notify_one();
        Reply::ok(b"{}".to_vec()).stalled(1)
    })
    .await;
    configure_plain(&host, &server);
    let dir = host.path("certs.d").display().to_string();
    let cri = host.start_with(&["--registry-config", &dir, "--image-pull-idle-seconds", "3600"]).await;
    let name = format!("{}/demo:1", server.address);
    let pull = tokio::spawn(async move { pull_with(&cri, &name, None).await });
    asked.notified().await;
    let mut runtime = host.runtime.take().unwrap();
    let pid = rustix::process::Pid::from_child(&runtime);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let error = pull.await.unwrap().unwrap_err();
    assert!(error.message().contains("the runtime is being stopped"), "{error}");
    let status = tokio::task::spawn_blocking(move || runtime.wait().unwrap()).await.unwrap();
    assert!(status.success(), "{status}");
    assert_no_downloads(&host);
}

/// Of five layers, the first two come only once the third was asked for.
#[tokio::test]
async fn layers_of_an_image_are_fetched_at_the_same_time() {
    let mut host = host();
    let image = Image::new(&["a", "b", "c", "d", "e"].map(small), "x");
    let (served, asked) = (image.clone(), AtomicUsize::new(0));
    let held = [Arc::new(Notify::new()), Arc::new(Notify::new())];
    let server = Server::start(move |request| {
        let reply = served.reply(&request.path);
        if !served.layers.iter().any(|digest| request.path.contains(digest)) {
            return reply;
        }
        match asked.fetch_add(1, Ordering::SeqCst) {
            place @ (0 | 1) => reply.after(&held[place]),
            2 => {
                held.iter().for_each(|layer| layer.notify_one());
                reply
            }
            _ => reply,
        }
    })
    .await;
    configure_plain(&host, &server);
    let cri = start(&mut host).await;
    pull_with(&cri, &format!("{}/demo:1", server.address), None).await.unwrap();
    for (digest, content) in image.layers.iter().zip(["a", "b", "c", "d", "e"]) {
        assert_eq!(server.count(digest), 1);
        assert_eq!(unpacked(&host, digest, "file"), content.as_bytes());
    }
}

#[tokio::test]
async fn a_registry_gets_the_certificate_that_its_settings_name() {
    let mut host = host();
    let image = Image::new(&[small("x")], "x");
    let (certificate, client) = (Certificate::valid(), Certificate::valid());
    let served = image.clone();
    let server = Server::start_for(&client, &certificate, move |request| served.reply(&request.path)).await;
    let file = |name: &str, text: &str| {
        std::fs::write(host.path(name), text).unwrap();
        host.path(name).display().to_string()
    };
    let ca = format!("ca = {:?}\n", file("ca.pem", &certificate.certificate));
    let own = [file("client.cert", &client.certificate), file("client.key", &client.key)];
    let domain = server.address.to_string();
    configure(&host, &domain, &ca);
    let cri = start(&mut host).await;
    let name = format!("{domain}/demo:1");
    pull_with(&cri, &name, None).await.unwrap_err();
    assert_eq!(server.requests().len(), 0);
    configure(&host, &domain, &format!("{ca}client = [{own:?}]\n"));
    pull_with(&cri, &name, None).await.unwrap();
}
