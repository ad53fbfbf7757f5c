//! Images that are made to hurt the node: each is refused by name of its limit
//! and its layer, and nothing of it is left.

use std::path::Path;

use tests::cri::{
    Cri, Host, PRELOAD, container, demo_program, digest_of, eventually, image_spec, layer, write_layout,
    write_layout_with_history,
};
use tonic::Code;

use crate::exec_limits::peak_memory;
use crate::image_imports::pull;

/// The refusal of `image`; the flags are limits small enough for a test.
async fn refusal(host: &mut Host, image: &str, flags: &[&str]) -> String {
    let mut cri = host.start_with(flags).await;
    let error = cri.pull(image).await.unwrap_err();
    assert_eq!(error.code(), Code::DataLoss, "{}", error.message());
    assert_nothing_is_left(host, host.runtime.as_ref().unwrap().id());
    still_imports(host, &mut cri).await;
    error.message().to_owned()
}

/// Neither a layer nor a control group of this runtime's unpackers.
pub(crate) fn assert_nothing_is_left(host: &Host, runtime: u32) {
    assert_eq!(std::fs::read_dir(host.path("root/images/layers")).unwrap().count(), 0, "layers");
    let groups = linux::cgroup::Hierarchies::detect().unwrap();
    let prefix = format!("hawser-unpack-{runtime}-");
    let names = groups.names_below(Path::new("/")).unwrap();
    let left: Vec<_> = names.iter().filter(|name| name.starts_with(&prefix)).collect();
    assert!(left.is_empty(), "control groups: {left:?}");
}

async fn still_imports(host: &Host, cri: &mut Cri) {
    write_layout(&host.path("images/good"), "good:1", &layer(&[("file", 0o644, b"x")]));
    cri.pull("good:1").await.unwrap();
}

/// An image `bad:1` of this layer; the layer's digest.
fn bad(host: &Host, layer: &[u8]) -> String {
    let blob = write_layout(&host.path("images/bad"), "bad:1", layer);
    format!("layer sha256:{}", blob.file_name().unwrap().to_str().unwrap())
}

fn tar_of(build: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    build(&mut tar);
    tar.into_inner().unwrap()
}

fn header(kind: tar::EntryType, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(size);
    header.set_cksum();
    header
}

#[tokio::test]
async fn an_image_of_too_many_bytes_is_refused() {
    let mut host = Host::new();
    // A megabyte of zeros is a kilobyte of gzip.
    let name = bad(&host, &layer(&[("zeros", 0o644, &vec![0; 1 << 20])]));
    let said = refusal(&mut host, "bad:1", &["--image-max-unpacked-bytes", "100000"]).await;
    assert!(
        said.contains(&name) && said.contains("more than 100000 bytes (--image-max-unpacked-bytes)"),
        "{said}"
    );
}

#[tokio::test]
async fn bytes_behind_the_end_of_the_tar_count() {
    let mut host = Host::new();
    let mut layer = layer(&[("file", 0o644, b"x")]);
    layer.resize(1 << 20, 0);
    let name = bad(&host, &layer);
    let said = refusal(&mut host, "bad:1", &["--image-max-unpacked-bytes", "100000"]).await;
    assert!(said.contains(&name) && said.contains("--image-max-unpacked-bytes"), "{said}");
}

#[tokio::test]
async fn an_image_of_too_many_entries_is_refused() {
    let mut host = Host::new();
    let files: Vec<String> = (0..30).map(|number| format!("file{number}")).collect();
    let files: Vec<(&str, u32, &[u8])> = files.iter().map(|name| (name.as_str(), 0o644, &b""[..])).collect();
    let name = bad(&host, &layer(&files));
    let said = refusal(&mut host, "bad:1", &["--image-max-entries", "20"]).await;
    assert!(said.contains(&name) && said.contains("more than 20 entries (--image-max-entries)"), "{said}");
}

#[tokio::test]
async fn a_tar_header_of_too_many_bytes_is_refused() {
    let mut host = Host::new();
    let long = "n".repeat(2 << 20);
    let name = bad(
        &host,
        &tar_of(|tar| {
            tar.append(&header(tar::EntryType::GNULongName, long.len() as u64), long.as_bytes()).unwrap();
            tar.append_data(&mut header(tar::EntryType::Regular, 1), "file", &b"x"[..]).unwrap();
        }),
    );
    let said = refusal(&mut host, "bad:1", &[]).await;
    assert!(
        said.contains(&name) && said.contains("more than 1048576 bytes (--image-max-header-bytes)"),
        "{said}"
    );
}

#[tokio::test]
async fn a_layer_that_is_too_deep_is_refused() {
    let mut host = Host::new();
    let name = bad(
        &host,
        &tar_of(|tar| {
            let path = "d/".repeat(300);
            tar.append_data(&mut header(tar::EntryType::Directory, 0), path, &b""[..]).unwrap();
        }),
    );
    let said = refusal(&mut host, "bad:1", &[]).await;
    assert!(said.contains(&name) && said.contains("more than 256 directories inside one another"), "{said}");
}

#[tokio::test]
async fn a_manifest_of_too_many_bytes_is_refused() {
    let mut host = Host::new();
    write_layout(&host.path("images/bad"), "bad:1", &layer(&[("file", 0o644, b"x")]));
    let index = host.path("images/bad/index.json");
    let mut text = std::fs::read(&index).unwrap();
    text.resize(5 << 20, b' ');
    std::fs::write(&index, text).unwrap();
    let mut cri = host.start().await;
    let error = cri.pull("bad:1").await.unwrap_err();
    assert!(
        error.message().contains("more than 4194304 (--image-max-manifest-bytes)"),
        "{}",
        error.message()
    );
    assert_nothing_is_left(&host, host.runtime.as_ref().unwrap().id());
}

/// Also when the archive's own headers are the attack.
#[tokio::test]
async fn an_archive_with_a_huge_header_is_refused() {
    let mut host = Host::new();
    let long = "n".repeat(2 << 20);
    let archive = tar_of(|tar| {
        tar.append(&header(tar::EntryType::GNULongName, long.len() as u64), long.as_bytes()).unwrap();
        tar.append_data(&mut header(tar::EntryType::Regular, 1), "file", &b"x"[..]).unwrap();
    });
    std::fs::write(host.path("images/bad.tar"), archive).unwrap();
    let mut cri = host.start().await;
    let error = cri.pull("bad:1").await.unwrap_err();
    assert!(
        error.message().contains("bad.tar: a tar header has more than 1048576 bytes"),
        "{}",
        error.message()
    );
    still_imports(&host, &mut cri).await;
}

/// The peak of the runtime's memory, after eight pulls of `bad:1` at the same time.
async fn peak_of_eight_pulls(host: &mut Host, expected: Code) -> u64 {
    let cri = host.start().await;
    let pulls: Vec<_> = (0..8).map(|_| pull(&cri, "bad:1")).collect();
    for pulled in pulls {
        assert_eq!(pulled.await.unwrap().map_or_else(|status| status.code(), |_| Code::Ok), expected);
    }
    let status = format!("/proc/{}/status", host.runtime.as_ref().unwrap().id());
    let status = std::fs::read_to_string(status).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Far more than eight pulls take, and far less than eight copies of the document or the names.
const MUCH_MEMORY: u64 = 256 << 20;

#[tokio::test]
async fn a_configuration_of_a_million_elements_takes_little_memory() {
    let mut host = Host::new();
    let history = format!("[{}{{}}]", "{},".repeat(1_390_000));
    let layer = layer(&[("file", 0o644, b"x")]);
    write_layout_with_history(&host.path("images/bad"), "bad:1", &layer, &history);
    let peak = peak_of_eight_pulls(&mut host, Code::Ok).await;
    assert!(peak < MUCH_MEMORY, "{peak} bytes");
}

/// Every pull reads every archive.
#[tokio::test]
async fn an_archive_of_long_names_takes_little_memory() {
    let mut host = Host::new();
    let archive = std::fs::File::create(host.path("images/names.tar")).unwrap();
    let mut tar = tar::Builder::new(archive);
    for number in 0..64 {
        let name = format!("blobs/{number}{}", "n".repeat(1_000_000));
        let header_of_name = header(tar::EntryType::GNULongName, name.len() as u64);
        tar.append(&header_of_name, name.as_bytes()).unwrap();
        tar.append_data(&mut header(tar::EntryType::Regular, 1), "file", &b"x"[..]).unwrap();
    }
    tar.into_inner().unwrap();
    let peak = peak_of_eight_pulls(&mut host, Code::Unavailable).await;
    assert!(peak < MUCH_MEMORY, "{peak} bytes");
}

/// The digest comes first: of a blob that is not what it says nothing is unpacked.
#[tokio::test]
async fn nothing_of_a_blob_with_a_wrong_digest_is_unpacked() {
    let mut host = Host::new();
    let blob = write_layout(&host.path("images/bad"), "bad:1", &layer(&[("file", 0o644, b"x")]));
    // A well-formed layer in another one's place, of more entries than are allowed.
    let other = layer(&[("a", 0o644, b"x"), ("b", 0o644, b"x"), ("c", 0o644, b"x")]);
    std::fs::write(&blob, &other).unwrap();
    let said = refusal(&mut host, "bad:1", &["--image-max-entries", "2"]).await;
    assert!(said.contains(&format!("has digest {}", digest_of(&other))), "{said}");
}

#[tokio::test]
async fn a_fifo_in_place_of_a_blob_is_refused() {
    let mut host = Host::new();
    let blob = write_layout(&host.path("images/bad"), "bad:1", &layer(&[("file", 0o644, b"x")]));
    std::fs::remove_file(&blob).unwrap();
    nix::unistd::mkfifo(&blob, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let said = refusal(&mut host, "bad:1", &[]).await;
    assert!(said.contains("no regular file"), "{said}");
}

/// A kubelet with `imagePullPolicy: Never` asks for the image, and does not pull it.
#[tokio::test]
async fn images_of_the_directory_are_listed_before_they_are_pulled() {
    use proto::cri::{ImageStatusRequest, ListImagesRequest};
    let mut host = Host::new();
    let mut cri = host.start_with(&[PRELOAD]).await;
    eventually("the image", || host.log().contains("image imported").then_some(())).await;
    let listed = cri.images.list_images(ListImagesRequest { filter: None }).await.unwrap().into_inner();
    let names: Vec<String> = listed.images.into_iter().flat_map(|image| image.repo_tags).collect();
    assert_eq!(names, ["docker.io/library/demo:latest"]);
    write_layout(&host.path("later"), "later:1", &layer(&[("file", 0o644, b"x")]));
    std::fs::rename(host.path("later"), host.path("images/later")).unwrap();
    eventually("the later image", || (host.log().matches("image imported").count() == 2).then_some(())).await;
    let image = Some(image_spec("later:1"));
    let status = ImageStatusRequest { image, verbose: false };
    assert!(cri.images.image_status(status).await.unwrap().into_inner().image.is_some());
}

/// As large as a file of accounts may be.
#[tokio::test]
async fn accounts_of_a_single_line_of_colons_take_little_memory() {
    let mut host = Host::new();
    let line = ":".repeat(4 << 20);
    let accounts = [("etc/passwd", 0o644, line.as_bytes()), ("etc/group", 0o644, line.as_bytes())];
    let program = demo_program();
    let files = [&accounts[..], &[("demo-app", 0o755, &*program)]].concat();
    write_layout(&host.path("images/bad"), "bad:1", &layer(&files));
    let mut cri = host.start().await;
    cri.pull("bad:1").await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let runtime = host.runtime.as_ref().unwrap().id();
    // Resets the peak (proc_pid_clear_refs(5)).
    std::fs::write(format!("/proc/{runtime}/clear_refs"), "5").unwrap();
    let peak = || peak_memory(runtime.cast_signed());
    let before = peak();
    let mut config = container("c", &["/demo-app", "print", "c"]);
    config.image = Some(image_spec("bad:1"));
    cri.create(&pod, config).await.unwrap();
    let taken = peak() - before;
    // Each file, and its text: 16 MiB. A list of the fields of one would take 64 MiB.
    assert!(taken < 32 << 20, "{taken} bytes");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
