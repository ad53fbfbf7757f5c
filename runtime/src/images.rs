//! The image store: what was imported from `images_dir`, layers unpacked once
//! per digest and shared by all images and containers.
//!
//! Invariant: a layer's directory has its final name only when it is complete
//! and on disk; an image exists when its record does, which is written last.

mod archive;
mod documents;
pub(crate) mod error;
mod files;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod job;
mod layers;
mod limits;
mod reference;
mod semaphore;
mod source;
mod unpack;
mod unpacker;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, chain};
use crate::record;
use crate::trash::{self, Trash};
use documents::Configuration;
use error::ImageError;
use job::Job;
use layers::{Layers, Pin};
pub use limits::ImageLimits;
use limits::Used;
use reference::{Reference, is_digest, is_hex_digest};
use semaphore::Semaphore;
use source::{Manifest, Source};
pub(crate) use unpacker::run as run_unpacker;

/// Limits how many pulls list an archive or parse a document at once, since both take memory of this
/// process. An import holds no permit while a layer unpacks, which may take long.
static READERS: Semaphore = Semaphore::new(4);

/// One image, as its record on disk and in memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Image {
    /// `sha256:` of the image configuration: what Kubernetes calls the image id.
    pub(crate) id: String,
    /// Full names with tag, in the order they were pulled.
    pub(crate) repo_tags: Vec<String>,
    /// Full names with the digest that `index.json` gives, of a manifest or of an index of platforms.
    pub(crate) repo_digests: Vec<String>,
    /// Digests of the layers, lowest first.
    pub(crate) layers: Vec<String>,
    /// Bytes of configuration and layers, compressed.
    pub(crate) size_bytes: u64,
    pub(crate) config: ImageConfig,
}

/// What a container takes from its image.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ImageConfig {
    pub(crate) entrypoint: Vec<String>,
    pub(crate) cmd: Vec<String>,
    /// `NAME=value`.
    pub(crate) env: Vec<String>,
    pub(crate) working_dir: String,
    /// `uid`, `uid:gid`, `name`, ... ; empty for root.
    pub(crate) user: String,
    /// `SIGINT`, `2`; empty for SIGTERM.
    pub(crate) stop_signal: String,
}

#[derive(Debug)]
pub(crate) struct ImageStore {
    dir: PathBuf,
    images_dir: PathBuf,
    limits: ImageLimits,
    cgroup_root: PathBuf,
    images: Mutex<BTreeMap<String, Image>>,
    /// Held while `images` and the records of them change.
    writing: Mutex<()>,
    layers: Layers,
    trash: Arc<Trash>,
}

impl ImageStore {
    /// Opens the store under `dir` and drops what an interrupted import left.
    pub(crate) fn open(dir: &Path, config: &crate::Config, trash: Arc<Trash>) -> Result<Self> {
        for sub in ["records", "layers"] {
            record::ensure_dir(&dir.join(sub))?;
        }
        for name in record::names(&dir.join("layers"))? {
            if name.starts_with('.') {
                trash.remove_later(&dir.join("layers").join(name))?;
            }
        }
        unpacker::remove_abandoned_cgroups(&config.cgroup_root);
        let mut images = BTreeMap::new();
        for name in record::names(&dir.join("records"))? {
            let path = dir.join("records").join(&name);
            if name.starts_with('.') {
                continue;
            }
            // Without its record an image is pulled again.
            if let Some(image) = record::find_or_drop::<Image>(&path)? {
                images.insert(image.id.clone(), image);
            }
        }
        Ok(Self {
            dir: dir.to_owned(),
            images_dir: config.images_dir.clone(),
            limits: config.image_limits.clone(),
            cgroup_root: config.cgroup_root.clone(),
            images: Mutex::new(images),
            writing: Mutex::new(()),
            layers: Layers::default(),
            trash,
        })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn limits(&self) -> &ImageLimits {
        &self.limits
    }

    pub(crate) fn list(&self) -> Vec<Image> {
        self.locked().values().cloned().collect()
    }

    /// By name, by name and digest, or by id (also without `sha256:`).
    pub(crate) fn find(&self, name: &str) -> Result<Option<Image>> {
        let id = if is_hex_digest(name) { format!("sha256:{name}") } else { name.to_owned() };
        let images = self.locked();
        if is_digest(&id) {
            return Ok(images.get(&id).cloned());
        }
        let wanted = Reference::parse(name)?;
        let matches = |image: &&Image| match &wanted.digest {
            Some(digest) => image.repo_digests.contains(&format!("{}@{digest}", wanted.repository)),
            None => wanted.tagged().is_some_and(|tag| image.repo_tags.contains(&tag)),
        };
        Ok(images.values().find(matches).cloned())
    }

    pub(crate) fn get(&self, name: &str) -> Result<Image> {
        self.find(name)?.ok_or_else(|| Error::NotFound { kind: "image", id: name.to_owned() })
    }

    /// Imports `name` from `images_dir`, also when an older image has the name already.
    pub(crate) fn pull(&self, name: &str) -> Result<Image> {
        let wanted = Reference::parse(name)?;
        let (source, manifest) = self.source_of(&wanted)?;
        self.import(&wanted, &source, &manifest)
    }

    /// The first source that has `wanted`. The author of an archive chooses its names, so a name
    /// alone does not decide between sources with different digests.
    fn source_of(&self, wanted: &Reference) -> Result<(Source, Manifest)> {
        let candidates = Source::candidates(&self.images_dir)
            .map_err(|e| Error::io("read images directory", &self.images_dir, e))?;
        let mut found: Option<(Source, Manifest)> = None;
        let mut broken = Vec::new();
        for path in candidates {
            let offer =
                Source::open(&path, &self.limits).and_then(|source| Ok((source.find(wanted)?, source)));
            let (source, manifest) = match offer {
                Ok((Some(manifest), source)) => (source, manifest),
                Ok((None, _)) => continue,
                Err(problem) => {
                    broken.push(format!("{}: {}", path.display(), chain(&problem)));
                    continue;
                }
            };
            match &found {
                None => found = Some((source, manifest)),
                Some((first, known)) if known.digest != manifest.digest => {
                    let offers = [(first, known), (&source, &manifest)]
                        .map(|(source, found)| format!("{} in {}", found.digest, source.path().display()));
                    return Err(Error::ImageAmbiguous { image: wanted.to_string(), offers });
                }
                Some(_) => {}
            }
        }
        let images_dir = self.images_dir.clone();
        found.ok_or_else(|| Error::ImageMissing { image: wanted.to_string(), images_dir, broken })
    }

    fn import(&self, wanted: &Reference, source: &Source, found: &Manifest) -> Result<Image> {
        let place = source.path().display().to_string();
        let corrupt = |source: ImageError| Error::ImageCorrupt {
            image: wanted.to_string(),
            place: place.clone(),
            source: Box::new(source),
        };
        let descriptor = &found.manifest.config;
        let config: Configuration = source.blob_json(&descriptor.digest).map_err(corrupt)?;
        let layers = &found.manifest.layers;
        let diff_ids = &config.rootfs.diff_ids;
        if layers.len() != diff_ids.len() {
            let (layers, diff_ids) = (layers.len(), diff_ids.len());
            return Err(corrupt(ImageError::LayerCount { layers, diff_ids }));
        }
        let layer_digests: Vec<String> = layers.iter().map(|layer| layer.digest.clone()).collect();
        let repo_digest = format!("{}@{}", wanted.repository, found.digest);
        let is_known = self
            .locked()
            .get(&descriptor.digest)
            .is_some_and(|known| known.layers == layer_digests && known.repo_digests.contains(&repo_digest));
        // Until the record is written nothing else says that the layers are needed.
        let pins: Vec<Pin<'_>> = layers.iter().map(|layer| self.layers.pin(&layer.digest)).collect();
        let mut used = Used::default();
        for ((layer, diff_id), pin) in layers.iter().zip(diff_ids).zip(&pins) {
            if layer.is_zstd_layer() {
                return Err(corrupt(ImageError::Zstd.within(format!("layer {}", layer.digest))));
            }
            let problem = |e: ImageError| corrupt(e.within(format!("layer {}", layer.digest)));
            let _alone = pin.lock();
            let wanted = (layer.digest.as_str(), diff_id.as_str());
            used.add(self.ensure_layer(source, wanted, is_known, used, &problem)?);
        }
        let image = Image {
            id: descriptor.digest.clone(),
            // With a digest the tag was not compared with the names in the index: it moves nothing.
            repo_tags: wanted.tagged().filter(|_| wanted.digest.is_none()).into_iter().collect(),
            repo_digests: vec![repo_digest],
            layers: layer_digests,
            size_bytes: layers.iter().fold(descriptor.size, |sum, layer| sum.saturating_add(layer.size)),
            config: config.config.into(),
        };
        self.remember(image)
    }

    /// A layer that another image brought is not taken for this one's before its blob is here,
    /// and is what this image's configuration says: otherwise an image could show another's
    /// files, or put its own files into an image of the same configuration. `is_known`: this was
    /// seen before of the image with this name.
    fn ensure_layer(
        &self,
        source: &Source,
        (digest, diff_id): (&str, &str),
        is_known: bool,
        used: Used,
        corrupt: &dyn Fn(ImageError) -> Error,
    ) -> Result<Used> {
        let blob = source.blob(digest).map_err(corrupt)?;
        let target = self.layer_dir(digest);
        let (digest, diff_id, limits) = (digest.to_owned(), diff_id.to_owned(), self.limits.clone());
        let is_unpacked = target.is_dir();
        if is_unpacked && is_known {
            return Ok(Used::default());
        }
        if is_unpacked {
            let job = Job { blob, digest, diff_id, target, is_unpacked, limits, used };
            return unpacker::run_in_child(&job, &self.cgroup_root).map_err(corrupt);
        }
        let temp = target.with_file_name(format!(".{}", digest.replace(':', "-")));
        record::remove_tree(&temp)?;
        record::ensure_dir(&temp)?;
        fs::set_permissions(&temp, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .map_err(|e| Error::io("set mode of", &temp, e))?;
        let job = Job { blob, digest, diff_id, target: temp.clone(), is_unpacked, limits, used };
        let placed = unpacker::run_in_child(&job, &self.cgroup_root).map_err(corrupt).and_then(|taken| {
            sync_file_system(&temp)?;
            fs::rename(&temp, &target).map_err(|e| Error::io("rename to", &target, e))?;
            Ok(taken)
        });
        placed.map_err(|cause| cause.after_rollback(record::remove_tree(&temp).err().into_iter().collect()))
    }

    /// Takes the names from older images that had them, and writes the record.
    fn remember(&self, mut image: Image) -> Result<Image> {
        // Records are written one after the other; those who read the list do not wait for it.
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut images = self.locked().clone();
        if let Some(known) = images.get(&image.id) {
            image.repo_tags = union(&known.repo_tags, &image.repo_tags);
            image.repo_digests = union(&known.repo_digests, &image.repo_digests);
        }
        for other in images.values_mut().filter(|other| other.id != image.id) {
            let before = other.repo_tags.len();
            other.repo_tags.retain(|tag| !image.repo_tags.contains(tag));
            if other.repo_tags.len() != before {
                record::save_durably(&self.record_path(&other.id), other)?;
            }
        }
        record::save_durably(&self.record_path(&image.id), &image)?;
        images.insert(image.id.clone(), image.clone());
        *self.locked() = images;
        Ok(image)
    }

    /// Forgets the image; absence is a success. Layers that neither an image nor
    /// `in_use` (digests) needs go with it.
    pub(crate) fn remove(&self, name: &str, in_use: &BTreeSet<String>) -> Result<()> {
        let Some(image) = self.find(name)? else { return Ok(()) };
        {
            let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            linux::atomic_file::remove(&self.record_path(&image.id))?;
            self.locked().remove(&image.id);
        }
        self.remove_unused_layers(in_use)
    }

    /// Drops layers that no image and no container refers to. Their space is free
    /// when this returns.
    pub(crate) fn remove_unused_layers(&self, in_use: &BTreeSet<String>) -> Result<()> {
        self.take_unused_layers(in_use)?.iter().try_for_each(|layer| record::remove_tree(layer))
    }

    /// The same at a start, which does not wait for it.
    pub(crate) fn remove_unused_layers_later(&self, in_use: &BTreeSet<String>) -> Result<()> {
        self.take_unused_layers(in_use).map(trash::remove_in_background)
    }

    /// Where they are now.
    fn take_unused_layers(&self, in_use: &BTreeSet<String>) -> Result<Vec<PathBuf>> {
        let layers = self.dir.join("layers");
        let mut taken = Vec::new();
        for name in record::names(&layers)? {
            // Those with a dot are being filled.
            if name.starts_with('.') {
                continue;
            }
            let digest = name.replacen('-', ":", 1);
            // Under the pins: an import that begins now finds it whole, or gone.
            let gone = self.layers.unless_pinned(&digest, || -> Result<Option<PathBuf>> {
                let is_needed = in_use.contains(&digest)
                    || self.locked().values().any(|image| image.layers.contains(&digest));
                if is_needed { Ok(None) } else { self.trash.take(&layers.join(&name)) }
            });
            taken.extend(gone.transpose()?.flatten());
        }
        Ok(taken)
    }

    /// Directories of the layers, topmost first, as overlayfs wants them.
    pub(crate) fn lower_dirs(&self, layers: &[String]) -> Vec<PathBuf> {
        layers.iter().rev().map(|digest| self.layer_dir(digest)).collect()
    }

    fn layer_dir(&self, digest: &str) -> PathBuf {
        self.dir.join("layers").join(digest.replace(':', "-"))
    }

    fn record_path(&self, id: &str) -> PathBuf {
        self.dir.join("records").join(format!("{}.json", id.replace(':', "-")))
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Image>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The names of the images that can be pulled from `images_dir`. Layouts that
/// cannot be read are left out: pulling one of their images says why.
pub fn offered(images_dir: &Path, limits: &ImageLimits) -> std::io::Result<Vec<String>> {
    let sources =
        Source::candidates(images_dir)?.into_iter().filter_map(|path| Source::open(&path, limits).ok());
    let mut names: Vec<String> = sources.filter_map(|source| source.names().ok()).flatten().collect();
    names.sort();
    names.dedup();
    Ok(names)
}

fn union(a: &[String], b: &[String]) -> Vec<String> {
    let mut all = a.to_vec();
    all.extend(b.iter().filter(|x| !a.contains(x)).cloned());
    all
}

fn sync_file_system(dir: &Path) -> Result<()> {
    let dir_fd = fs::File::open(dir).map_err(|e| Error::io("open", dir, e))?;
    rustix::fs::syncfs(dir_fd).map_err(|e| Error::io("syncfs", dir, e.into()))
}
