//! Images from registries (OCI Distribution Specification 1.1).
//!
//! `hosts` decides whom to ask; `client` asks one host, with what `token` brings, over `transport`,
//! `connection` and `tls`; `blob` stores what comes; this module puts an image together. The image store then imports the files as
//! it imports a layout.
//!
//! Invariant: no byte of a registry is used before its digest was checked, except to learn a tag's
//! digest.

mod blob;
mod challenge;
mod client;
mod config;
mod connection;
mod credentials;
pub(crate) mod error;
mod hosts;
mod progress;
mod proxy;
mod resolve;
mod tls;
mod token;
mod transport;
mod url;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};

use crate::blocking::blocking;
use crate::disk::trash::Trash;
use crate::error::{Error, Result as RuntimeResult};
use crate::images::documents::{Configuration, Descriptor, Index, Kind, Manifest, Shape};
use crate::images::error::{ImageError, InvalidJson};
use crate::images::pulled::Pulled;
use crate::images::reference::{Reference, is_digest};
use crate::images::{ImageLimits, ImageStore, LayerIds, Pins};
use blob::{Announced, BlobFile, Blobs};
use client::{Client, Document};
pub use config::RegistryConfig;
pub(crate) use credentials::Credentials;
use error::{AtHost, Problem, PullProblem, Result};
use hosts::Host;
use progress::Progress;
use proxy::Proxies;
pub(crate) use resolve::run as run_resolver;
use transport::Transport;

/// Layers of one pull that are fetched at the same time, as in containerd and Docker.
const LAYERS_AT_ONCE: usize = 3;

#[derive(Debug)]
pub(crate) struct Registries {
    config: RegistryConfig,
    proxies: Proxies,
    limits: ImageLimits,
    blobs: Blobs,
}

/// What was fetched. The files exist as long as this value.
#[derive(Debug)]
pub(crate) struct Fetched {
    image: Pulled,
    files: Vec<Arc<BlobFile>>,
}

impl Fetched {
    /// The image, and what keeps its files.
    pub(crate) fn into_parts(self) -> (Pulled, impl Sized + Send) {
        (self.image, self.files)
    }
}

/// One pull: what each of its steps needs.
struct Pull<'a, 's> {
    registries: &'a Registries,
    store: &'s ImageStore,
    domain: &'a str,
    /// The tag or digest that was asked for.
    reference: &'a str,
    /// Fetched so far, by digest: another host need not send it again.
    blobs: BTreeMap<String, Arc<BlobFile>>,
}

impl Registries {
    /// Downloads go to `dir`. Those of an earlier runtime, which was killed, are removed.
    pub(crate) fn open(dir: PathBuf, config: &crate::Config, trash: &Trash) -> RuntimeResult<Self> {
        // Made by the first download: a disk may be full now.
        trash.remove_later(&dir)?;
        let (limits, blobs) = (config.image_limits.clone(), Blobs::new(dir));
        let proxies = config.registries.proxies();
        Ok(Self { config: config.registries.clone(), proxies, limits, blobs })
    }

    /// Fetches what `store` does not have of an image. The layers that it does have stay while the
    /// returned pins live.
    pub(crate) async fn fetch<'a>(
        &self,
        wanted: &Reference,
        credentials: Option<&Credentials>,
        store: &'a ImageStore,
    ) -> RuntimeResult<(Fetched, Pins<'a>)> {
        let (dir, repository) = (self.config.registry_config.clone(), wanted.repository.clone());
        let hosts = move || Ok(hosts::of(&dir, repository.split('/').next().unwrap_or_default()));
        let hosts = blocking("read the settings of a registry", hosts).await?;
        let failed = |source| Error::Pull { source: Box::new(source) };
        let hosts = hosts.map_err(|problem| failed(problem.into()))?;
        self.fetch_from(hosts, wanted, credentials, store).await.map_err(failed)
    }

    async fn fetch_from<'a>(
        &self,
        hosts: Vec<Host>,
        wanted: &Reference,
        credentials: Option<&Credentials>,
        store: &'a ImageStore,
    ) -> std::result::Result<(Fetched, Pins<'a>), PullProblem> {
        let (domain, repository) = wanted.repository.split_once('/').unwrap_or(("", &wanted.repository));
        let mut clients = Vec::new();
        let mut failures = Vec::new();
        for host in hosts {
            let name = host.authority.clone();
            let transport = Transport::new(host.tls.clone(), self.config.clone(), self.proxies.clone());
            match Client::new(host, (domain, repository), credentials, transport) {
                Ok(client) => clients.push(client),
                Err(problem) => failures.push(problem.at(&name, "configuration")),
            }
        }
        let root = self.root(wanted, &mut clients, &mut failures).await?;
        let reference = reference_of(wanted);
        let mut pull = Pull { registries: self, store, domain, reference, blobs: BTreeMap::new() };
        clients.retain(|client| client.host.pulls);
        if clients.is_empty() && failures.is_empty() {
            return Err(PullProblem::NothingPulls { dir: self.config.registry_config.clone() });
        }
        for client in &clients {
            match pull.content(client, &root).await {
                Ok(fetched) => return Ok(fetched),
                Err(failure) => failures.push(failure),
            }
        }
        Err(PullProblem::NoHost { failures })
    }

    /// The manifest or index of `wanted`, from the first host that has it. Removes hosts that failed
    /// before it: they are not asked again.
    async fn root(
        &self,
        wanted: &Reference,
        clients: &mut Vec<Client>,
        failures: &mut Vec<AtHost>,
    ) -> std::result::Result<Document, PullProblem> {
        let reference = reference_of(wanted);
        let may_answer = |client: &Client| match wanted.digest {
            Some(_) => client.host.pulls,
            None => client.host.resolves,
        };
        let mut failed = Vec::new();
        let mut found = None;
        for (at, client) in clients.iter().enumerate().filter(|(_, client)| may_answer(client)) {
            match client.manifest(reference, self.limits.manifest_bytes).await {
                Ok(document) => {
                    found = Some(document);
                    break;
                }
                Err(problem) => {
                    failures.push(problem.at(&client.host.authority, name_of_manifest(wanted)));
                    failed.push(at);
                }
            }
        }
        for at in failed.into_iter().rev() {
            clients.remove(at);
        }
        match found {
            Some(document) => Ok(document),
            None if failures.is_empty() => {
                Err(PullProblem::NothingResolves { dir: self.config.registry_config.clone() })
            }
            None => Err(PullProblem::NoHost { failures: std::mem::take(failures) }),
        }
    }
}

impl<'s> Pull<'_, 's> {
    async fn content(
        &mut self,
        client: &Client,
        root: &Document,
    ) -> std::result::Result<(Fetched, Pins<'s>), AtHost> {
        let host = client.host.authority.clone();
        let at = |what: String| {
            let host = host.clone();
            move |problem: Problem| problem.at(&host, what)
        };
        let manifest = self.manifest(client, root).await;
        let manifest = manifest.map_err(at(self.named("manifest", &root.digest)))?;
        let config = &manifest.config;
        let configuration = self.configuration(client, config).await;
        let configuration = configuration.map_err(at(self.named("configuration", &shown(&config.digest))))?;
        let (layers, diff_ids) = (&manifest.layers, &configuration.rootfs.diff_ids);
        check_layers(layers, diff_ids, &self.registries.limits)
            .map_err(at(self.named("manifest", &root.digest)))?;
        let pins = self.store.pin(layers.iter().map(|layer| layer.digest.as_str()));
        let mut missing: Vec<&Descriptor> = Vec::new();
        for (layer, diff_id) in layers.iter().zip(diff_ids) {
            let ids = LayerIds { digest: &layer.digest, diff_id };
            let is_listed = missing.iter().any(|other| other.digest == layer.digest);
            if !is_listed && !self.store.has_layer_of(self.domain, ids) {
                missing.push(layer);
            }
        }
        self.layers(client, missing).await?;
        let paths = self.blobs.iter().map(|(digest, blob)| (digest.clone(), blob.path().to_owned()));
        let image = Pulled { host, digest: root.digest.clone(), manifest, blobs: paths.collect() };
        Ok((Fetched { image, files: self.blobs.values().cloned().collect() }, pins))
    }

    /// For errors. A digest alone does not tell its reader which tag it is of.
    fn named(&self, what: &str, digest: &str) -> String {
        if self.reference == digest {
            format!("{what} {digest}")
        } else {
            format!("{what} {digest} of {}", self.reference)
        }
    }

    /// The manifest for this node.
    async fn manifest(&self, client: &Client, root: &Document) -> Result<Manifest> {
        if kind(root)? == Kind::Manifest {
            return parsed(&root.bytes);
        }
        let index: Index = parsed(&root.bytes)?;
        let descriptor = index.of_this_node(&root.digest)?;
        checked(&descriptor.digest)?;
        let document = client.manifest(&descriptor.digest, self.registries.limits.manifest_bytes).await?;
        match kind(&document)? {
            Kind::Manifest => parsed(&document.bytes),
            Kind::Index => {
                Err(Problem::MediaType { media_type: document.media_type.clone().unwrap_or_default() })
            }
        }
    }

    async fn configuration(&mut self, client: &Client, config: &Descriptor) -> Result<Configuration> {
        checked(&config.digest)?;
        let most = self.registries.limits.manifest_bytes;
        if config.size > most {
            return Err(Problem::TooLarge { most, flag: "--image-max-manifest-bytes" });
        }
        let blob = self.blob(client, config, &Progress::default()).await?;
        let path = blob.path().to_owned();
        self.blobs.insert(config.digest.clone(), blob);
        let bytes = tokio::fs::read(path).await.map_err(|source| Problem::Store { source })?;
        parsed(&bytes)
    }

    /// Fetches several at the same time. What has come stays in `self` after an error.
    async fn layers(
        &mut self,
        client: &Client,
        mut missing: Vec<&Descriptor>,
    ) -> std::result::Result<(), AtHost> {
        missing.retain(|layer| !self.blobs.contains_key(&layer.digest));
        let total = missing.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
        let progress = Progress::default();
        let (this, count) = (&*self, missing.len());
        let one = async |layer: &Descriptor| {
            let blob = this.blob(client, layer, &progress).await;
            let named =
                |problem: Problem| problem.at(&client.host.authority, this.named("layer", &layer.digest));
            Ok::<_, AtHost>((layer.digest.clone(), blob.map_err(named)?))
        };
        let all = stream::iter(missing.into_iter().map(one)).buffer_unordered(LAYERS_AT_ONCE);
        let mut arrived = Vec::new();
        let fetching = all.try_for_each(|blob| {
            arrived.push(blob);
            std::future::ready(Ok(()))
        });
        let begun = std::time::Instant::now();
        let result = progress.report(&client.host.authority, total, fetching).await;
        self.blobs.extend(arrived);
        let milliseconds = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        if result.is_ok() {
            let host = &client.host.authority;
            tracing::info!(host, layers = count, bytes = progress.fetched(), milliseconds, "layers fetched");
        }
        result
    }

    async fn blob(&self, client: &Client, blob: &Descriptor, progress: &Progress) -> Result<Arc<BlobFile>> {
        let announced = Announced { digest: &blob.digest, size: blob.size };
        self.registries.blobs.get(self.domain, client, announced, progress).await
    }
}

/// The tag or digest to ask for.
fn reference_of(wanted: &Reference) -> &str {
    wanted.digest.as_deref().or(wanted.tag.as_deref()).unwrap_or("latest")
}

/// For messages.
fn name_of_manifest(wanted: &Reference) -> String {
    let kind = if wanted.digest.is_some() { "manifest" } else { "manifest of tag" };
    format!("{kind} {}", reference_of(wanted))
}

fn kind(document: &Document) -> Result<Kind> {
    let shape: Shape = parsed(&document.bytes)?;
    shape.kind(document.media_type.as_deref()).map_err(|media_type| Problem::MediaType { media_type })
}

fn parsed<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|source| Problem::Json { source: InvalidJson(source) })
}

fn checked(digest: &str) -> Result<()> {
    if is_digest(digest) { Ok(()) } else { Err(ImageError::NoDigest { digest: digest.to_owned() }.into()) }
}

/// Before anything is fetched of them.
fn check_layers(layers: &[Descriptor], diff_ids: &[String], limits: &ImageLimits) -> Result<()> {
    if layers.len() != diff_ids.len() {
        return Err(ImageError::LayerCount { layers: layers.len(), diff_ids: diff_ids.len() }.into());
    }
    layers.iter().try_for_each(|layer| checked(&layer.digest))?;
    // Layers are compressed: more than this unpacks to more.
    let total = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    if total > limits.unpacked_bytes {
        return Err(ImageError::TooManyBytes { most: limits.unpacked_bytes }.into());
    }
    Ok(())
}

/// A digest that may have any form yet.
fn shown(digest: &str) -> String {
    trace::shortened(digest.to_owned(), 100)
}
