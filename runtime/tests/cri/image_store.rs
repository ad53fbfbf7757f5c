//! Images: imported, refused, removed.

use proto::cri::{ImageStatusRequest, RemoveImageRequest};
use tonic::Code;

use crate::kit::{Host, IMAGE, image_spec, layer, write_layout};

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
async fn an_archive_is_imported_like_a_directory() {
    let mut host = Host::new();
    let layout = host.path("layout");
    write_layout(&layout, "example.com/packed:1", &layer(&[("file", 0o644, b"x")]));
    let mut tar = tar::Builder::new(std::fs::File::create(host.path("images/packed.tar")).unwrap());
    tar.append_dir_all(".", &layout).unwrap();
    tar.finish().unwrap();
    let mut cri = host.start().await;
    cri.pull("example.com/packed:1").await.unwrap();
}

#[tokio::test]
async fn a_missing_image_is_named_with_the_place_that_was_searched() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let error = cri.pull("nowhere").await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    let dir = host.path("images");
    assert_eq!(
        error.message(),
        format!(
            "image \"docker.io/library/nowhere:latest\" is in no OCI layout or archive under {}",
            dir.display()
        )
    );
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
