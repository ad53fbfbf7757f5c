//! Images: imported, refused, removed.

use std::path::Path;

use proto::cri::{ContainerConfig, ImageSpec, ImageStatusRequest, ListContainersRequest, RemoveImageRequest};
use serde_json::{Value, json};
use tests::cri::{
    Cri, Host, IMAGE, container, demo_program, digest_of, image_spec, layer, layer_with_links, write_layout,
    write_layout_with,
};
use tonic::Code;

use super::containers::{container_pid, with_context};

#[tokio::test]
async fn an_image_is_present_only_after_it_was_pulled_and_gone_after_it_was_removed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let status = |name: &str| ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    assert!(cri.images.image_status(status(IMAGE)).await.unwrap().into_inner().image.is_none());
    let id = cri.pull(IMAGE).await.unwrap();
    for name in [IMAGE, "docker.io/library/demo", &id] {
        let image = cri.images.image_status(status(name)).await.unwrap().into_inner().image.unwrap();
        assert_eq!(image.id, id);
        assert_eq!(image.repo_tags, ["docker.io/library/demo:latest"]);
        assert!(image.repo_digests[0].starts_with("docker.io/library/demo@sha256:"));
    }
    for _twice in 0..2 {
        cri.images.remove_image(RemoveImageRequest { image: Some(image_spec(IMAGE)) }).await.unwrap();
    }
    assert!(cri.images.image_status(status(IMAGE)).await.unwrap().into_inner().image.is_none());
    assert_eq!(std::fs::read_dir(host.path("root/images/layers")).unwrap().count(), 0, "layers");
}

#[tokio::test]
async fn the_first_digits_of_its_id_name_an_image() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let id = cri.pull(IMAGE).await.unwrap();
    let digits = &id["sha256:".len()..][..13];
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    for name in [digits, &digits[..4]] {
        assert_eq!(id_of(&mut cri, name).await, id, "{name}");
        let image = Some(image_spec(name));
        let config = ContainerConfig { image, ..container(name, &["/demo-app", "exit", "0"]) };
        let status = cri.run(&pod, config).await;
        assert_eq!((status.exit_code, status.image_id), (0, id.clone()));
    }
    cri.remove_pod(&pod).await;
    cri.images.remove_image(RemoveImageRequest { image: Some(image_spec(digits)) }).await.unwrap();
    assert_eq!(id_of(&mut cri, IMAGE).await, "");
    host.assert_clean();
}

#[tokio::test]
async fn the_volumes_of_an_image_are_directories_of_the_container_and_nowhere_else() {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let mut host = Host::new();
    let outside = host.path("outside");
    std::fs::DirBuilder::new().mode(0o700).create(&outside).unwrap();
    let files: &[(&str, u32, &[u8])] =
        &[("demo-app", 0o755, &demo_program()), ("kept/file", 0o644, b"of the image")];
    let layer = layer_with_links(files, &[("link", outside.to_str().unwrap()), ("above", "../../..")]);
    let paths = ["/data/./deep/", "/kept", "/link/inside", "/above/made", "relative", "/", "/run/./socket"];
    write_layout_with(&host.path("images/volumes"), "volumes:1", &layer, |mut config| {
        config["config"]["Volumes"] = paths.iter().map(|path| ((*path).to_owned(), json!({}))).collect();
        config.to_string()
    });
    let mut cri = host.start().await;
    cri.pull("volumes:1").await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let image = Some(image_spec("volumes:1"));
    std::fs::write(host.path("socket"), "a file in the volume's place").unwrap();
    let socket = proto::cri::Mount {
        container_path: "/run/socket".to_owned(),
        host_path: host.path("socket").display().to_string(),
        ..Default::default()
    };
    let command = container("c", &["/demo-app", "sleep", "forever"]);
    let config = ContainerConfig { image, mounts: vec![socket], ..command };
    let id = cri.create(&pod, with_context(config, |context| context.readonly_rootfs = true)).await.unwrap();
    cri.start(&id).await.unwrap();
    let root = format!("/proc/{}/root", container_pid(&host, &pod, &id).unwrap());
    let inside = outside.join("inside");
    for path in ["/data/deep", inside.to_str().unwrap(), "/made", "/relative"] {
        let found = std::fs::symlink_metadata(format!("{root}{path}")).unwrap();
        assert_eq!((found.mode(), found.uid()), (0o40755, 0), "{path}");
    }
    assert_eq!(std::fs::read_to_string(format!("{root}/kept/file")).unwrap(), "of the image");
    let mounted = std::fs::read_to_string(format!("{root}/run/socket")).unwrap();
    assert_eq!(mounted, "a file in the volume's place");
    assert!(!inside.exists() && !Path::new("/made").exists(), "nothing is made on the host");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_volume_below_a_file_of_the_image_is_named_by_the_failed_start() {
    let mut host = Host::new();
    let layer = layer(&[("demo-app", 0o755, &demo_program()), ("file", 0o644, b"x")]);
    write_layout_with(&host.path("images/volumes"), "volumes:1", &layer, |mut config| {
        config["config"]["Volumes"] = json!({"/file/volume": {}});
        config.to_string()
    });
    let mut cri = host.start().await;
    cri.pull("volumes:1").await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let image = Some(image_spec("volumes:1"));
    let id = cri.create(&pod, ContainerConfig { image, ..container("c", &["/demo-app"]) }).await.unwrap();
    let error = cri.start(&id).await.unwrap_err();
    let text = "start container c: make directory /file/volume, a volume of the image: ";
    assert!(error.message().starts_with(text), "{}", error.message());
    assert!(error.message().contains("Not a directory"), "{}", error.message());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// kubelet shows the status's image as that of the pod.
#[tokio::test]
async fn the_status_of_a_container_has_its_images_name_although_it_was_asked_for_by_id() {
    let mut host = Host::new();
    write_layout(&host.path("images/other"), "other:1", &layer(&[("file", 0o644, b"x")]));
    let digest = manifest_digest(&host.path("images/other"));
    let mut cri = host.start().await;
    let id = cri.pull(IMAGE).await.unwrap();
    let without_tag = cri.pull(&format!("other@{digest}")).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    for (name, id, shown) in [("c", id, "docker.io/library/demo:latest"), ("d", without_tag, "as:asked")] {
        let user_specified_image = "as:asked".to_owned();
        let image = Some(ImageSpec { user_specified_image: user_specified_image.clone(), ..image_spec(&id) });
        let config = ContainerConfig { image, ..container(name, &["/demo-app"]) };
        let container_id = cri.create(&pod, config).await.unwrap();
        let status = cri.status(&container_id).await;
        let image = status.image.unwrap();
        assert_eq!((image.image.as_str(), &image.user_specified_image), (shown, &user_specified_image));
        assert_eq!(status.image_id, id);
        let listed =
            cri.runtime.list_containers(ListContainersRequest::default()).await.unwrap().into_inner();
        let item = listed.containers.iter().find(|item| item.id == container_id).unwrap();
        assert_eq!(item.image.as_ref().unwrap().image, id);
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

fn pack(layout: &Path, archive: &Path) {
    let mut tar = tar::Builder::new(std::fs::File::create(archive).unwrap());
    tar.append_dir_all(".", layout).unwrap();
    tar.finish().unwrap();
}

#[tokio::test]
async fn an_archive_is_imported_like_a_directory() {
    let mut host = Host::new();
    let layout = host.path("layout");
    write_layout(&layout, "example.com/packed:1", &layer(&[("file", 0o644, b"x")]));
    pack(&layout, &host.path("images/packed.tar"));
    let mut cri = host.start().await;
    cri.pull("example.com/packed:1").await.unwrap();
}

#[tokio::test]
async fn a_missing_image_is_named_with_the_place_that_was_searched() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let error = cri.pull("nowhere").await.unwrap_err();
    // Its registry cannot be reached from here.
    assert_eq!(error.code(), Code::Unavailable);
    let expected = format!(
        "image \"docker.io/library/nowhere:latest\" is in no OCI layout or archive under {}, and was not \
         pulled: registry-1.docker.io: manifest of tag latest: find the address of registry-1.docker.io: ",
        host.path("images").display()
    );
    assert!(error.message().starts_with(&expected), "{error}");
}

#[tokio::test]
async fn a_corrupt_layer_is_refused_and_leaves_nothing() {
    let mut host = Host::new();
    let blob = write_layout(&host.path("images/bad"), "bad", &layer(&[("file", 0o644, &[7; 5000])]));
    let mut bytes = std::fs::read(&blob).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let mut cri = host.start().await;
    let error = cri.pull("bad").await.unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("has digest sha256:"), "{}", error.message());
    assert_eq!(std::fs::read_dir(host.path("root/images/layers")).unwrap().count(), 0, "layers");
}

#[tokio::test]
async fn no_image_writes_a_line_or_a_control_character_to_the_log() {
    let mut host = Host::new();
    // The error quotes the header's name and its checksum, which is no number.
    let mut header = [b'x'; 512];
    let forged = b"\n2026-11-23T00:00:00Z  INFO forged \x1b[31mred\x07\xc2\x9b\0";
    header[..forged.len()].copy_from_slice(forged);
    header[148..156].copy_from_slice(b"\n\r\x1bxxxxx");
    write_layout(&host.path("images/forger"), "forger:1", &header);
    let mut cri = host.start().await;
    let error = cri.pull("forger:1").await.unwrap_err();
    assert!(error.message().contains(['\n', '\u{1b}']), "the log must escape it: {error:?}");
    let log = host.log();
    let line = log.lines().find(|line| line.contains("INFO forged")).unwrap();
    assert!(line.contains(" WARN ") && line.contains("\\n2026-11-23T00:00:00Z  INFO forged"), "{line:?}");
    assert!(!log.contains(|letter: char| letter.is_control() && letter != '\n'), "{log:?}");
}

#[tokio::test]
async fn links_within_a_layout_are_not_followed_and_do_not_keep_other_images_from_being_pulled() {
    let mut host = Host::new();
    let elsewhere = host.path("elsewhere");
    write_layout(&elsewhere, "linked", &layer(&[("file", 0o644, b"x")]));
    // Its digests hold: only the way to its blobs is wrong.
    let blobs = host.path("images/a-blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::copy(elsewhere.join("index.json"), blobs.join("index.json")).unwrap();
    std::os::unix::fs::symlink(elsewhere.join("blobs"), blobs.join("blobs")).unwrap();
    let index = host.path("images/b-index");
    std::fs::create_dir_all(&index).unwrap();
    std::os::unix::fs::symlink(elsewhere.join("index.json"), index.join("index.json")).unwrap();
    let blob = write_layout(&host.path("images/c-layer"), "layer", &layer(&[("file", 0o644, b"x")]));
    std::fs::rename(&blob, host.path("the-layer")).unwrap();
    std::os::unix::fs::symlink(host.path("the-layer"), &blob).unwrap();
    let mut cri = host.start().await;
    let error = cri.pull("linked").await.unwrap_err();
    for place in ["a-blobs: open blobs/sha256/", "b-index: open index.json: a symbolic link"] {
        assert!(error.message().contains(place), "{}", error.message());
    }
    let error = cri.pull("layer").await.unwrap_err();
    assert!(error.message().contains("a symbolic link, which an image layout may not have"), "{error}");
    assert_eq!(std::fs::read_dir(host.path("root/images/layers")).unwrap().count(), 0, "layers");
    cri.pull(IMAGE).await.unwrap();
}

#[tokio::test]
async fn an_invalid_name_is_an_invalid_argument() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let error = cri.pull("Not A Name").await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

/// Replaces the layers of the manifest in `dir`, whose configuration stays as it is.
fn list_layer(dir: &Path, blob: &Path) {
    let hex = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let mut index: Value = serde_json::from_slice(&std::fs::read(dir.join("index.json")).unwrap()).unwrap();
    let blobs = dir.join("blobs/sha256");
    let of = |digest: &Value| blobs.join(digest.as_str().unwrap().trim_start_matches("sha256:"));
    let old = of(&index["manifests"][0]["digest"]);
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(old).unwrap()).unwrap();
    manifest["layers"][0]["digest"] = format!("sha256:{}", hex(blob)).into();
    manifest["layers"][0]["size"] = std::fs::metadata(blob).unwrap().len().into();
    let text = manifest.to_string();
    let digest = digest_of(text.as_bytes());
    std::fs::write(of(&digest.clone().into()), &text).unwrap();
    index["manifests"][0]["digest"] = digest.into();
    index["manifests"][0]["size"] = text.len().into();
    std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
    if blob.parent() != Some(&blobs) {
        std::fs::copy(blob, blobs.join(hex(blob))).unwrap();
    }
}

#[tokio::test]
async fn no_image_takes_the_place_of_another_with_its_configuration() {
    let mut host = Host::new();
    let victims = layer(&[("file", 0o644, b"the victim's")]);
    write_layout(&host.path("images/victim"), "victim:1", &victims);
    let evils = write_layout(&host.path("images/one"), "evil/one:1", &layer(&[("file", 0o644, b"evil")]));
    // The victim's configuration, and the layer that is unpacked already.
    let two = host.path("images/two");
    write_layout(&two, "evil/two:1", &victims);
    list_layer(&two, &evils);
    let mut cri = host.start().await;
    let victim = cri.pull("victim:1").await.unwrap();
    cri.pull("evil/one:1").await.unwrap();
    let layers = || {
        let records = std::fs::read_dir(host.path("root/images/records")).unwrap();
        let texts = records.map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap());
        let records = texts.map(|text| serde_json::from_str::<Value>(&text).unwrap());
        records
            .filter(|record| record["id"] == victim.as_str())
            .map(|r| r["layers"].clone())
            .collect::<Vec<_>>()
    };
    let before = layers();
    assert_eq!(before.len(), 1);
    let error = cri.pull("evil/two:1").await.unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("unpacks to"), "{}", error.message());
    assert_eq!(layers(), before);
}

#[tokio::test]
async fn a_layer_of_another_image_is_not_had_for_its_digest_alone() {
    let mut host = Host::new();
    let private = layer(&[("key", 0o600, b"private")]);
    let blob = write_layout(&host.path("images/private"), "private:1", &private);
    let thief = host.path("images/thief");
    let own = write_layout(&thief, "thief:1", &private);
    std::fs::write(&own, "").unwrap();
    let mut cri = host.start().await;
    cri.pull("private:1").await.unwrap();
    let error = cri.pull("thief:1").await.unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("has digest"), "{}", error.message());
    // With the layer it is an image as any other, and its layer is there once.
    std::fs::copy(blob, own).unwrap();
    cri.pull("thief:1").await.unwrap();
    assert_eq!(std::fs::read_dir(host.path("root/images/layers")).unwrap().count(), 1);
}

/// Empty, if no image has the name.
async fn id_of(cri: &mut Cri, name: &str) -> String {
    let request = ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    cri.images.image_status(request).await.unwrap().into_inner().image.unwrap_or_default().id
}

/// What `index.json` names first.
fn manifest_digest(layout: &Path) -> String {
    let index: Value = serde_json::from_slice(&std::fs::read(layout.join("index.json")).unwrap()).unwrap();
    index["manifests"][0]["digest"].as_str().unwrap().to_owned()
}

/// Has images/genuine and, as an archive that comes first by name, another image of the name `volume:1`.
/// Returns the digests of both.
fn with_two_of_a_name(host: &Host) -> (String, String) {
    let (genuine, evil) = (host.path("images/genuine"), host.path("evil"));
    write_layout(&genuine, "volume:1", &layer(&[("file", 0o644, b"genuine")]));
    write_layout(&evil, "volume:1", &layer(&[("file", 0o644, b"evil")]));
    pack(&evil, &host.path("images/aa-evil.tar"));
    (manifest_digest(&genuine), manifest_digest(&evil))
}

#[tokio::test]
async fn a_name_that_two_sources_give_to_different_images_is_refused() {
    let mut host = Host::new();
    let (genuine, evil) = with_two_of_a_name(&host);
    // Neither hides what comes after it.
    std::fs::write(host.path("images/a-broken.tar"), "no archive").unwrap();
    std::fs::write(host.path("images/b-broken.tar"), "no archive").unwrap();
    let mut cri = host.start().await;
    let error = cri.pull("volume:1").await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(
        error.message(),
        format!(
            "image \"docker.io/library/volume:1\" is {evil} in {} but {genuine} in {}: \
             remove one of them, or name the image with its digest",
            host.path("images/aa-evil.tar").display(),
            host.path("images/genuine").display()
        )
    );
    assert_eq!(std::fs::read_dir(host.path("root/images/layers")).unwrap().count(), 0, "layers");
    cri.pull(IMAGE).await.unwrap();
}

#[tokio::test]
async fn an_image_loses_its_name_to_another_one_only_when_its_own_source_is_gone() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    write_layout(&host.path("images/genuine"), "volume:1", &layer(&[("file", 0o644, b"genuine")]));
    let genuine = cri.pull("volume:1").await.unwrap();
    let (_, digest) = with_two_of_a_name(&host);
    cri.pull("volume:1").await.unwrap_err();
    assert_eq!(id_of(&mut cri, "volume:1").await, genuine);
    // A digest says which one is meant, and moves no tag.
    let evil = cri.pull(&format!("volume:1@{digest}")).await.unwrap();
    assert_ne!(evil, genuine);
    assert_eq!(id_of(&mut cri, &format!("volume@{digest}")).await, evil);
    assert_eq!(id_of(&mut cri, "volume:1").await, genuine);
    std::fs::remove_dir_all(host.path("images/genuine")).unwrap();
    assert_eq!(cri.pull("volume:1").await.unwrap(), evil);
    assert_eq!(id_of(&mut cri, "volume:1").await, evil);
}

#[tokio::test]
async fn a_name_may_be_in_two_sources_that_agree() {
    let mut host = Host::new();
    let layout = host.path("images/layout");
    write_layout(&layout, "twice:1", &layer(&[("file", 0o644, b"x")]));
    pack(&layout, &host.path("images/archive.tar"));
    let mut cri = host.start().await;
    cri.pull("twice:1").await.unwrap();
}

#[tokio::test]
async fn an_image_of_several_platforms_is_named_by_the_digest_of_its_index() {
    let mut host = Host::new();
    let layout = host.path("images/layout");
    write_layout(&layout, "platforms:1", &layer(&[("file", 0o644, b"x")]));
    let index = std::fs::read(layout.join("index.json")).unwrap();
    let digest = digest_of(&index);
    std::fs::write(layout.join("blobs/sha256").join(&digest["sha256:".len()..]), &index).unwrap();
    let descriptor = json!({
        "mediaType": "application/vnd.oci.image.index.v1+json", "digest": digest, "size": index.len(),
        "annotations": {"org.opencontainers.image.ref.name": "platforms:1"},
    });
    std::fs::write(layout.join("index.json"), json!({"manifests": [descriptor]}).to_string()).unwrap();
    let mut cri = host.start().await;
    let name = format!("platforms@{digest}");
    let id = cri.pull(&name).await.unwrap();
    assert_eq!(id_of(&mut cri, &name).await, id);
}
