//! Pods whose images come from a registry, as a user's own YAML names them.

use std::process::Command;

use serde_json::json;
use sha2::{Digest, Sha256};
use tests::docker_registry::{ADDRESS, Access, DockerRegistry, PASSWORD, USER};
use tests::image::{Program, layer_of};
use tests::manifests::Pod;
use tests::{LeakCheck, Node, NodeOptions, Sandbox, binaries};

/// A node that is configured for a registry without TLS, as it is without the registry. Its files, in
/// `dir`, are not part of the sandbox.
fn node_and_registry<'a>(
    sandbox: &'a Sandbox,
    dir: &tempfile::TempDir,
    access: Access<'_>,
) -> (Node<'a>, LeakCheck, DockerRegistry) {
    let settings = dir.path().join("certs.d");
    std::fs::create_dir_all(settings.join(ADDRESS)).expect("a directory");
    let text = format!("server = \"http://{ADDRESS}\"");
    std::fs::write(settings.join(ADDRESS).join("hosts.toml"), text).expect("written");
    let flags = vec!["--registry-config".to_owned(), settings.display().to_string()];
    let options = NodeOptions { kubelet_flags: flags, ..NodeOptions::default() };
    let node = Node::start(sandbox, options).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    let command = Command::new(DockerRegistry::program());
    let registry = DockerRegistry::start(command, &dir.path().join("registry"), access);
    (node, idle, registry)
}

/// Stores an image of demo-app.
fn put_demo_app(registry: &DockerRegistry, repository: &str, tag: &str) {
    let digest = |bytes: &[u8]| format!("sha256:{}", base16ct::lower::encode_string(&Sha256::digest(bytes)));
    let binary = binaries::find("demo-app").expect("it is built");
    let program = Program { image: repository, binary: &binary, path: "demo-app", directories: &["tmp"] };
    let layer = layer_of(&program, &[]).expect("a layer");
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/demo-app"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
    });
    let config = config.to_string().into_bytes();
    let descriptor = |kind: &str, bytes: &[u8]| {
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": digest(bytes), "size": bytes.len(),
        })
    };
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("config.v1+json", &config), "layers": [descriptor("layer.v1.tar", &layer)],
    });
    let manifest = manifest.to_string().into_bytes();
    registry.put(repository, &[&config, &layer], &[&manifest], tag);
}

#[test]
fn a_pod_runs_an_image_of_a_registry_and_its_events_say_where_it_stands() {
    let (sandbox, dir) = (Sandbox::new(), tempfile::tempdir().expect("a directory"));
    let (node, idle, registry) = node_and_registry(&sandbox, &dir, Access::default());
    put_demo_app(&registry, "team/app", "1");

    let image = format!("{ADDRESS}/team/app:1");
    let pod = Pod { image: &image, ..Pod::new("pulled", &["print", "from a registry"]) };
    node.put_manifest("pulled.yaml", &pod.yaml()).expect("put");
    node.wait_for_log("pulled", &["from a registry"]).expect("it runs");
    node.wait_for_event("Pulling", &[&format!("Pulling image \"{image}\"")]).expect("an event");
    let words =
        [format!("Successfully pulled image \"{image}\" in "), " including waiting). Image size: ".into()];
    node.wait_for_event("Pulled", &words.each_ref().map(String::as_str)).expect("an event");

    let missing = format!("{ADDRESS}/team/app:2");
    let pod = Pod { image: &missing, ..Pod::new("missing", &["print", "x"]) };
    node.put_manifest("missing.yaml", &pod.yaml()).expect("put");
    let words = [
        format!("Failed to pull image \"{missing}\": "),
        format!("{ADDRESS}: manifest of tag 2: 404: manifest unknown"),
    ];
    node.wait_for_event("Failed", &words.each_ref().map(String::as_str)).expect("an event");
    // Its back-off ends sooner or later: then the image is there.
    put_demo_app(&registry, "team/app", "2");
    node.wait_for_log("missing", &["x"]).expect("it runs");
    drop(registry);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_pulls_with_the_login_of_its_secret() {
    let (sandbox, dir) = (Sandbox::new(), tempfile::tempdir().expect("a directory"));
    let access = Access { password: true, ..Access::default() };
    let (node, idle, registry) = node_and_registry(&sandbox, &dir, access);
    put_demo_app(&registry, "team/app", "1");

    let image = format!("{ADDRESS}/team/app:1");
    let pod = Pod { image: &image, ..Pod::new("private", &["print", "with a login"]) };
    let yaml = pod.yaml().replace("spec:\n", "spec:\n  imagePullSecrets: [{name: login}]\n");
    node.put_manifest("private.yaml", &yaml).expect("put");
    let words = ["Unable to retrieve some image pull secrets (login); attempting to pull"];
    node.wait_for_event("FailedToRetrieveImagePullSecret", &words).expect("an event");
    node.wait_for_event(
        "Failed",
        &[&format!("Failed to pull image \"{image}\": "), "credentials are needed"],
    )
    .expect("an event");

    let config = json!({"auths": {ADDRESS: {"username": USER, "password": PASSWORD}}}).to_string();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config},
    });
    node.put_manifest("login.json", &secret.to_string()).expect("put");
    node.wait_for_log("private", &["with a login"]).expect("it runs");
    drop(registry);
    node.finish(&idle).expect("nothing is left");
}
