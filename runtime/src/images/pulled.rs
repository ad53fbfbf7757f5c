//! Images that a registry sent.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::layers::Pin;
use super::reference::Reference;
use super::source::{Manifest, Source};
use super::{Image, ImageStore, LayerIds, documents};
use crate::error::Result;

/// An image whose files lie on this node.
#[derive(Debug)]
pub(crate) struct Pulled {
    pub(crate) host: String,
    /// Of the manifest, or of the index that the tag names.
    pub(crate) digest: String,
    pub(crate) manifest: documents::Manifest,
    /// Configuration and layers by digest, except layers that the store has.
    pub(crate) blobs: BTreeMap<String, PathBuf>,
}

/// Keeps layers from removal.
pub(crate) type Pins<'a> = Vec<Pin<'a>>;

impl ImageStore {
    pub(crate) fn import_pulled(&self, wanted: &Reference, pulled: Pulled) -> Result<Image> {
        let Pulled { host, digest, manifest, blobs } = pulled;
        let source = Source::of_registry(&host, blobs, &self.limits);
        self.import(wanted, &source, &Manifest { digest, manifest })
    }

    pub(crate) fn pin<'a>(&self, digests: impl Iterator<Item = &'a str>) -> Pins<'_> {
        digests.map(|digest| self.layers.pin(digest)).collect()
    }

    /// Whether the layer is unpacked and an image of the registry `domain` has it: then the registry
    /// has shown before that the digest and the unpacked digest belong together. Images of another
    /// registry do not count: a registry must not open the layers of another one by their digests.
    pub(crate) fn has_layer_of(&self, domain: &str, wanted: LayerIds<'_>) -> bool {
        let prefix = format!("{domain}/");
        let has = |image: &Image| {
            let mut pairs = image.layers.iter().zip(&image.diff_ids);
            image.repo_digests.iter().any(|name| name.starts_with(&prefix))
                && pairs.any(|(digest, diff_id)| digest == wanted.digest && diff_id == wanted.diff_id)
        };
        let is_known = self.locked().values().any(has);
        is_known && self.layer_dir(wanted.digest).is_dir()
    }
}
