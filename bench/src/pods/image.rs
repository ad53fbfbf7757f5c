//! An image's download from a registry on loopback: by our runtime and by containerd, in turn.
//!
//! Each run has an image of its own, so that neither finds what an earlier run has left.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ::tests::containerd::{Containerd, Settings};
use ::tests::cri::{digest_of, gzip, layer};
use ::tests::docker_registry::{ADDRESS, Access, DockerRegistry};
use ::tests::random::Random;
use ::tests::{Node, NodeOptions, Sandbox, examples};
use anyhow::{Context, Result, ensure};
use proto::cri::image_service_client::ImageServiceClient;
use proto::cri::{ImageSpec, PullImageRequest, RemoveImageRequest};
use serde_json::json;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use xtask::foreign::debian_program;
use xtask::progress::step;

use crate::rows::{Bar, Row, milliseconds};
use crate::statistics::median;

const LAYERS: usize = 4;
/// Of each layer, before compression; half of it does not compress.
const LAYER_BYTES: usize = 25 << 20;
/// Each image takes this much of the disk three times.
const MOST_RUNS: usize = 10;
const FILE_BYTES: usize = 1 << 20;

pub(super) fn scene(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let runs = runs.min(MOST_RUNS);
    let registry = DockerRegistry::start(
        Command::new(debian_program("docker-registry", "docker-registry")?),
        &sandbox.path("registry"),
        Access::default(),
    );
    step(&format!("{} images of {} MiB", runs + 1, (LAYERS * LAYER_BYTES) >> 20), || {
        (0..=runs).for_each(|run| put(&registry, run));
        Ok(())
    })?;
    let hosts = sandbox.make_dir(&format!("hosts/{ADDRESS}"))?;
    let text = format!("server = \"http://{ADDRESS}\"\n[host.\"http://{ADDRESS}\"]\n");
    fs::write(hosts.join("hosts.toml"), text).context("write hosts.toml")?;
    let hosts = sandbox.path("hosts");

    let flags = vec!["--registry-config".to_owned(), hosts.display().to_string()];
    let options = NodeOptions { kubelet_flags: flags, ..NodeOptions::default() };
    let mut node = Node::prepare(sandbox, options)?;
    step("start hawser-kubelet", || node.start_kubelet())?;
    let network = sandbox.make_dir("net")?;
    let conflist = examples::conflist(&sandbox.path("lease"))?;
    fs::write(network.join("10-hawser.conflist"), conflist).context("write the conflist")?;
    let containerd = step("start containerd", || {
        Containerd::start(
            &sandbox.make_dir("containerd")?,
            &Settings {
                program: &debian_program("containerd", "containerd")?,
                plugins: &node.cni_bin_dir(),
                network: &network,
                pause_image: examples::DEMO_IMAGE,
                snapshotter: "overlayfs",
                registries: Some(&hosts),
            },
        )
    })?;
    let mut ours = Images::connect(&node.root_dir().join("hawser/runtime.sock"))?;
    let mut theirs = Images::connect(&containerd.socket())?;
    let (mut by_ours, mut by_theirs) = (Vec::new(), Vec::new());
    step("pull each image", || {
        for run in 0..=runs {
            let times = if run % 2 == 0 {
                let first = ours.pull(run)?;
                [first, theirs.pull(run)?]
            } else {
                let first = theirs.pull(run)?;
                [ours.pull(run)?, first]
            };
            if run > 0 {
                by_ours.push(milliseconds(times[0]));
                by_theirs.push(milliseconds(times[1]));
            }
        }
        Ok(())
    })?;
    containerd.stop()?;
    node.stop()?;
    let ratio = median(&mut by_ours.clone()) / median(&mut by_theirs.clone());
    Ok(vec![
        Row::new("pull of a 100 MiB image", "ms", by_ours, None),
        Row::new("pull of a 100 MiB image: containerd", "ms", by_theirs, None),
        Row::new(
            "pull of a 100 MiB image: ours beside containerd",
            "ratio",
            vec![ratio],
            Some(Bar::AtMost(0.8)),
        ),
    ])
}

fn name(run: usize) -> String {
    format!("bench/image-{run}")
}

/// Stores the image of a run in the registry.
fn put(registry: &DockerRegistry, run: usize) {
    let mut random = Random::new(run as u64);
    let tars: Vec<Vec<u8>> = (0..LAYERS).map(|number| content(&mut random, number)).collect();
    let blobs: Vec<Vec<u8>> = tars.iter().map(|tar| gzip(tar)).collect();
    let diff_ids: Vec<String> = tars.iter().map(|tar| digest_of(tar)).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/demo-app"]},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = config.to_string().into_bytes();
    let descriptor = |kind: &str, bytes: &[u8]| {
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": digest_of(bytes), "size": bytes.len(),
        })
    };
    let layers: Vec<_> = blobs.iter().map(|blob| descriptor("layer.v1.tar+gzip", blob)).collect();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("config.v1+json", &config), "layers": layers,
    });
    let manifest = manifest.to_string().into_bytes();
    let mut all: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
    all.push(&config);
    registry.put(&name(run), &all, &[&manifest], "1");
}

/// A layer's tar: files of which every second one is of zeros.
fn content(random: &mut Random, number: usize) -> Vec<u8> {
    let files: Vec<(String, Vec<u8>)> = (0..LAYER_BYTES / FILE_BYTES)
        .map(|file| {
            let bytes = if file % 2 == 0 {
                (0..FILE_BYTES / 8).flat_map(|_| random.number().to_le_bytes()).collect()
            } else {
                vec![0; FILE_BYTES]
            };
            (format!("layer-{number}/file-{file}"), bytes)
        })
        .collect();
    let files: Vec<(&str, u32, &[u8])> =
        files.iter().map(|(name, bytes)| (name.as_str(), 0o644, bytes.as_slice())).collect();
    layer(&files)
}

/// A connection to an image service.
#[derive(Debug)]
struct Images {
    tokio: Runtime,
    client: ImageServiceClient<Channel>,
}

impl Images {
    fn connect(socket: &Path) -> Result<Self> {
        let tokio =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()))?;
        let channel = tokio.block_on(endpoint.connect()).with_context(|| socket.display().to_string())?;
        Ok(Self { tokio, client: ImageServiceClient::new(channel) })
    }

    /// Pulls the image of a run, and removes it again outside the time that is returned.
    fn pull(&mut self, run: usize) -> Result<Duration> {
        let image = ImageSpec { image: format!("{ADDRESS}/{}:1", name(run)), ..ImageSpec::default() };
        let request = PullImageRequest { image: Some(image.clone()), ..PullImageRequest::default() };
        let started = Instant::now();
        let pulled = self.tokio.block_on(self.client.pull_image(request)).context("PullImage")?.into_inner();
        let took = started.elapsed();
        ensure!(!pulled.image_ref.is_empty(), "PullImage of {}: no image", image.image);
        let request = RemoveImageRequest { image: Some(image) };
        self.tokio.block_on(self.client.remove_image(request)).context("RemoveImage")?;
        Ok(took)
    }
}
