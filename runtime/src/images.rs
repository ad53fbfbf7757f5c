//! The image store: images imported from `images_dir` or from a registry. Layers are unpacked once for each digest and
//! shared by all images and containers.
//!
//! Invariant: a layer's directory gets its final name only when it is complete and on disk. An
//! image exists if its record does; the record is written last.

mod archive;
pub(crate) mod documents;
pub(crate) mod error;
mod files;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod job;
mod layers;
mod limits;
pub(crate) mod pulled;
pub(crate) mod reference;
mod semaphore;
mod source;
mod unpack;
mod unpacker;
pub(crate) mod watch;
mod zstd;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use proto::cri::ImageSpec;
use serde::{Deserialize, Serialize};

use crate::disk::record;
use crate::disk::trash::{self, Trash};
use crate::error::{Error, Result, chain};
use documents::Configuration;
use error::ImageError;
use job::Job;
use layers::{Layers, Pin};
pub use limits::ImageLimits;
use limits::Used;
pub(crate) use pulled::Pins;
use reference::{Reference, beginning_of_id, is_digest, is_hex_digest};
use semaphore::Semaphore;
use source::{Manifest, Source};
pub(crate) use unpacker::run as run_unpacker;

/// Limits how many pulls list an archive or parse a document at once, since both take memory of this
/// process. An import holds no permit while a layer unpacks, which may take long.
static READERS: Semaphore = Semaphore::new(4);

/// Whether a container uses the layer with this digest.
type InUse<'a> = dyn Fn(&str) -> bool + 'a;

/// One image, as its record on disk and in memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Image {
    /// `sha256:` of the image configuration; Kubernetes' image id.
    pub(crate) id: String,
    /// Full names with tag, in the order of their pulls.
    pub(crate) repo_tags: Vec<String>,
    /// Full names with the digest that `index.json` gives, of a manifest or of an index of platforms.
    pub(crate) repo_digests: Vec<String>,
    /// Digests of the layers, lowest first.
    pub(crate) layers: Vec<String>,
    /// Of the unpacked layers. Empty in records of earlier versions.
    #[serde(default)]
    pub(crate) diff_ids: Vec<String>,
    /// Bytes of configuration and layers, compressed.
    pub(crate) size_bytes: u64,
    pub(crate) config: ImageConfig,
}

/// The parts of an image's configuration that a container uses.
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
    /// Paths at which the image expects directories, as it has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) volumes: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct ImageStore {
    dir: PathBuf,
    images_dir: PathBuf,
    limits: ImageLimits,
    cgroup_root: PathBuf,
    images: Mutex<BTreeMap<String, Image>>,
    /// Held while `images` and their records change.
    writing: Mutex<()>,
    layers: Layers,
    trash: Arc<Trash>,
}

/// A layer as the manifest names it, and as the configuration does: uncompressed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerIds<'a> {
    pub(crate) digest: &'a str,
    pub(crate) diff_id: &'a str,
}

impl ImageStore {
    /// Opens the store in `dir` and removes incomplete imports.
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
            // An image without its record is pulled again.
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

    /// [`Self::find`], or else by the first digits of an id. Not for a name in a pod's manifest: `cafe` is an
    /// image there, and guessed digits of an id must not find one.
    pub(crate) fn resolve(&self, wanted: &ImageSpec) -> Result<Option<Image>> {
        let found = self.find(&wanted.image)?;
        if found.is_some() || !wanted.user_specified_image.is_empty() {
            return Ok(found);
        }
        let Some(beginning) = beginning_of_id(&wanted.image) else { return Ok(None) };
        let images = self.locked();
        let mut found = images.values().filter(|image| image.id.starts_with(&beginning));
        match (found.next(), found.next()) {
            (Some(one), Some(other)) => {
                let problem = format!("several ids begin with it, such as {} and {}", one.id, other.id);
                Err(Error::invalid(format!("image {:?}", wanted.image), problem))
            }
            (found, _) => Ok(found.cloned()),
        }
    }

    pub(crate) fn get(&self, name: &str) -> Result<Image> {
        self.find(name)?.ok_or_else(|| not_found(name))
    }

    /// The image, whose layers stay while the pins are held.
    pub(crate) fn get_pinned(&self, name: &str) -> Result<(Image, Pins<'_>)> {
        let image = self.get(name)?;
        let pins = self.pin(image.layers.iter().map(String::as_str));
        // A removal that came before the pins took the image first.
        if !self.locked().contains_key(&image.id) {
            return Err(not_found(name));
        }
        Ok((image, pins))
    }

    /// Imports `name` from `images_dir`, also if an older image has that name.
    pub(crate) fn pull(&self, name: &str) -> Result<Image> {
        let wanted = Reference::parse(name)?;
        let (source, manifest) = self.source_of(&wanted)?;
        self.import(&wanted, &source, &manifest)
    }

    /// The first source that has `wanted`. An archive's author chooses the names in it, so a name
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
        // Until the record is written, only these pins show that the layers are in use.
        let pins: Vec<Pin<'_>> = layers.iter().map(|layer| self.layers.pin(&layer.digest)).collect();
        let mut used = Used::default();
        for ((layer, diff_id), pin) in layers.iter().zip(diff_ids).zip(&pins) {
            let problem = |e: ImageError| corrupt(e.within(format!("layer {}", layer.digest)));
            let _alone = pin.lock();
            let wanted = LayerIds { digest: &layer.digest, diff_id };
            used.add(self.ensure_layer(source, wanted, is_known, used, &problem)?);
        }
        let image = Image {
            id: descriptor.digest.clone(),
            // With a digest, the tag was not compared with the names in the index, so it is not
            // assigned.
            repo_tags: wanted.tagged().filter(|_| wanted.digest.is_none()).into_iter().collect(),
            repo_digests: vec![repo_digest],
            layers: layer_digests,
            diff_ids: diff_ids.clone(),
            size_bytes: layers.iter().fold(descriptor.size, |sum, layer| sum.saturating_add(layer.size)),
            config: config.config.into(),
        };
        self.remember(image)
    }

    /// An existing layer is used only after this image's own blob was found and matches its
    /// configuration: otherwise an image could show another image's files, or add files to an image
    /// with the same configuration. `is_known`: this was checked before for the image with this
    /// name.
    fn ensure_layer(
        &self,
        source: &Source,
        LayerIds { digest, diff_id }: LayerIds<'_>,
        is_known: bool,
        used: Used,
        corrupt: &dyn Fn(ImageError) -> Error,
    ) -> Result<Used> {
        let target = self.layer_dir(digest);
        if source.leaves_out(digest) && target.is_dir() {
            return Ok(Used::default());
        }
        let blob = source.blob(digest).map_err(corrupt)?;
        let is_checked = source.is_checked();
        let (digest, diff_id, limits) = (digest.to_owned(), diff_id.to_owned(), self.limits.clone());
        let is_unpacked = target.is_dir();
        if is_unpacked && is_known {
            return Ok(Used::default());
        }
        if is_unpacked {
            let job = Job { blob, is_checked, digest, diff_id, target, is_unpacked, limits, used };
            return unpacker::run_in_child(&job, &self.cgroup_root).map_err(corrupt);
        }
        let temp = target.with_file_name(format!(".{}", digest.replace(':', "-")));
        record::remove_tree(&temp)?;
        record::ensure_dir(&temp)?;
        fs::set_permissions(&temp, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .map_err(|e| Error::io("set mode of", &temp, e))?;
        let job = Job { blob, is_checked, digest, diff_id, target: temp.clone(), is_unpacked, limits, used };
        let placed = unpacker::run_in_child(&job, &self.cgroup_root).map_err(corrupt).and_then(|taken| {
            sync_file_system(&temp)?;
            fs::rename(&temp, &target).map_err(|e| Error::io("rename to", &target, e))?;
            Ok(taken)
        });
        placed.map_err(|cause| cause.after_rollback(record::remove_tree(&temp).err().into_iter().collect()))
    }

    /// Moves the names from older images to this one, and writes the record.
    fn remember(&self, mut image: Image) -> Result<Image> {
        // Records are written one after the other; readers of the list do not wait.
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

    /// Removes the image; a missing one is a success. Also removes layers that neither another
    /// image nor a container needs (`is_in_use`, by digest; asked when a layer is about to go).
    pub(crate) fn remove(&self, name: &str, is_in_use: &InUse<'_>) -> Result<()> {
        let Some(image) = self.find(name)? else { return Ok(()) };
        {
            let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            linux::atomic_file::remove(&self.record_path(&image.id))?;
            self.locked().remove(&image.id);
        }
        self.remove_unused_layers(is_in_use)
    }

    /// Removes layers that no image and no container uses. Their space is free when this returns.
    pub(crate) fn remove_unused_layers(&self, is_in_use: &InUse<'_>) -> Result<()> {
        self.take_unused_layers(is_in_use)?.iter().try_for_each(|layer| record::remove_tree(layer))
    }

    /// [`Self::remove_unused_layers`] in the background, for the start.
    pub(crate) fn remove_unused_layers_later(&self, is_in_use: &InUse<'_>) -> Result<()> {
        self.take_unused_layers(is_in_use).map(trash::remove_in_background)
    }

    /// Moves unused layers to the trash, and returns their paths there.
    fn take_unused_layers(&self, is_in_use: &InUse<'_>) -> Result<Vec<PathBuf>> {
        let layers = self.dir.join("layers");
        let mut taken = Vec::new();
        for name in record::names(&layers)? {
            // Names with a dot are incomplete.
            if name.starts_with('.') {
                continue;
            }
            let digest = name.replacen('-', ":", 1);
            // Under the pins' lock: an import that begins now finds the layer complete or not at
            // all.
            let gone = self.layers.unless_pinned(&digest, || -> Result<Option<PathBuf>> {
                let is_needed =
                    is_in_use(&digest) || self.locked().values().any(|image| image.layers.contains(&digest));
                if is_needed { Ok(None) } else { self.trash.take(&layers.join(&name)) }
            });
            taken.extend(gone.transpose()?.flatten());
        }
        Ok(taken)
    }

    /// The layers' directories, topmost first, as overlayfs needs them.
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

/// The names of the images in `images_dir`. Omits unreadable layouts: pulling one of their images
/// reports the error.
pub fn offered(images_dir: &Path, limits: &ImageLimits) -> std::io::Result<Vec<String>> {
    let sources =
        Source::candidates(images_dir)?.into_iter().filter_map(|path| Source::open(&path, limits).ok());
    let mut names: Vec<String> = sources.filter_map(|source| source.names().ok()).flatten().collect();
    names.sort();
    names.dedup();
    Ok(names)
}

fn not_found(name: &str) -> Error {
    Error::NotFound { kind: "image", id: name.to_owned() }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A store with one image of one empty layer.
    fn store(dir: &Path) -> ImageStore {
        let config = crate::Config {
            root_dir: dir.to_owned(),
            images_dir: dir.to_owned(),
            cni_conf_dir: dir.to_owned(),
            cni_bin_dir: dir.to_owned(),
            cni_cache_dir: dir.to_owned(),
            oci_runtime: None,
            allow_without_device_control: false,
            log_ceiling: None,
            cgroup_root: PathBuf::from("/hawser-test-of-images"),
            image_limits: ImageLimits::default(),
            registries: crate::RegistryConfig { registry_config: dir.to_owned(), image_pull_idle_seconds: 1 },
            preload_images: false,
        };
        let trash = Arc::new(Trash::open(dir.join("trash")).unwrap());
        let store = ImageStore::open(&dir.join("images"), &config, trash).unwrap();
        fs::create_dir(store.layer_dir("sha256:1")).unwrap();
        store.remember(image("0", "docker.io/library/a:1")).unwrap();
        store
    }

    /// Its id begins with these digits.
    fn image(digits: &str, tag: &str) -> Image {
        Image {
            id: format!("sha256:{digits:0<64}"),
            repo_tags: vec![tag.to_owned()],
            repo_digests: Vec::new(),
            layers: vec!["sha256:1".to_owned()],
            diff_ids: Vec::new(),
            size_bytes: 0,
            config: ImageConfig::default(),
        }
    }

    #[test]
    fn the_first_digits_of_one_id_name_its_image_unless_they_are_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        for (digits, tag) in
            [("cafe1", "one"), ("cafe2", "two"), ("beef", "three"), ("f00", "docker.io/library/beef:latest")]
        {
            store.remember(image(digits, tag)).unwrap();
        }
        let spec = |name: &str| ImageSpec { image: name.to_owned(), ..ImageSpec::default() };
        let tag = |name: &str| store.resolve(&spec(name)).unwrap().map(|image| image.repo_tags[0].clone());
        for (name, found) in [
            ("cafe1", Some("one")),
            ("cafe2", Some("two")),
            ("beef", Some("docker.io/library/beef:latest")),
            ("bee", Some("three")),
            ("sha256:cafe1", None),
            ("be", None),
            ("cafe3", None),
            ("cafe1:latest", None),
        ] {
            assert_eq!(tag(name).as_deref(), found, "{name}");
        }
        let error = store.resolve(&spec("cafe")).unwrap_err().to_string();
        assert!(
            error.starts_with("image \"cafe\": several ids begin with it, such as sha256:cafe10"),
            "{error}"
        );
        let in_manifest = ImageSpec { user_specified_image: "cafe1".to_owned(), ..spec("cafe1") };
        assert!(store.resolve(&in_manifest).unwrap().is_none());
    }

    #[test]
    fn a_removal_leaves_the_layers_of_a_container_that_is_being_created() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let (image, pins) = store.get_pinned("a:1").unwrap();
        store.remove(&image.id, &|_| false).unwrap();
        let layer = store.layer_dir(&image.layers[0]);
        assert!(layer.is_dir(), "pinned");
        // The container is known now.
        drop(pins);
        store.remove_unused_layers(&|digest| digest == image.layers[0]).unwrap();
        assert!(layer.is_dir(), "in use");
        store.remove_unused_layers(&|_| false).unwrap();
        assert!(!layer.exists());
        let missing = store.get_pinned("a:1").map(drop).unwrap_err();
        assert_eq!(missing.to_string(), "image \"a:1\" not found");
    }

    #[test]
    fn whether_a_layer_is_in_use_is_asked_when_the_image_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let had_image = Cell::new(None);
        let is_in_use = |_: &str| {
            had_image.set(Some(store.find("a:1").unwrap().is_some()));
            true
        };
        store.remove("a:1", &is_in_use).unwrap();
        assert_eq!(had_image.get(), Some(false));
    }
}
