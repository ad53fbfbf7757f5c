//! The sources of images: OCI image layouts, as directories or tar archives, and what a registry has
//! sent.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::READERS;
use super::archive::{self, Listing};
use super::documents::{self, Descriptor, Index};
use super::error::{ImageError, InvalidJson, Result};
use super::files::{open, open_dir, open_within};
use super::limits::ImageLimits;
use super::reference::{Reference, is_digest};

/// One layout. The caller adds the image and the place to its errors.
#[derive(Debug)]
pub(crate) struct Source {
    place: Place,
    limits: ImageLimits,
}

#[derive(Debug)]
enum Place {
    Directory(PathBuf),
    Archive { path: PathBuf, entries: Arc<Listing> },
    Registry { host: PathBuf, blobs: BTreeMap<String, PathBuf> },
}

/// The location of a blob's bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Blob {
    /// An archive, or the directory of a layout.
    pub(crate) place: PathBuf,
    /// The file's name in that directory.
    pub(crate) inner: Option<PathBuf>,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Blob {
    /// Opens the file at the blob's first byte.
    pub(crate) fn open(&self) -> Result<File> {
        let mut file = match &self.inner {
            Some(inner) => open_within(&self.place, inner)?,
            None => open(&self.place)?,
        };
        file.seek(SeekFrom::Start(self.offset)).map_err(ImageError::io("seek"))?;
        Ok(file)
    }
}

#[derive(Debug)]
pub(crate) struct Manifest {
    /// The digest in `index.json`: of the manifest, or of an index with one manifest for each
    /// platform.
    pub(crate) digest: String,
    pub(crate) manifest: documents::Manifest,
}

impl Source {
    /// Every layout directory and every `*.tar` file directly in `images_dir`, by name; others are
    /// skipped.
    pub(crate) fn candidates(images_dir: &Path) -> std::io::Result<Vec<PathBuf>> {
        let mut paths: Vec<PathBuf> = Vec::new();
        if is_layout(images_dir) {
            paths.push(images_dir.to_owned());
        }
        for entry in std::fs::read_dir(images_dir)? {
            let path = entry?.path();
            let hidden = path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
            let archive = path.extension().is_some_and(|e| e == "tar") && path.is_file();
            if !hidden && (archive || is_layout(&path)) {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }

    pub(crate) fn open(path: &Path, limits: &ImageLimits) -> Result<Self> {
        let limits = limits.clone();
        if path.is_dir() {
            return Ok(Self { place: Place::Directory(path.to_owned()), limits });
        }
        let entries = archive::listing(path, &limits)?;
        Ok(Self { place: Place::Archive { path: path.to_owned(), entries }, limits })
    }

    /// What the registry at `host` has sent: files by digest, whose digests were checked. A layer of
    /// the image that is not among them is on this node already.
    pub(crate) fn of_registry(host: &str, blobs: BTreeMap<String, PathBuf>, limits: &ImageLimits) -> Self {
        Self { place: Place::Registry { host: host.into(), blobs }, limits: limits.clone() }
    }

    /// For errors: an archive, the directory of a layout, or a host.
    pub(crate) fn path(&self) -> &Path {
        match &self.place {
            Place::Directory(path) | Place::Archive { path, .. } | Place::Registry { host: path, .. } => path,
        }
    }

    /// Whether the digests of its blobs were checked, and only this runtime can change them.
    pub(crate) fn is_checked(&self) -> bool {
        matches!(self.place, Place::Registry { .. })
    }

    /// Whether a registry was not asked for this layer, because the node has it.
    pub(crate) fn leaves_out(&self, digest: &str) -> bool {
        matches!(&self.place, Place::Registry { blobs, .. } if !blobs.contains_key(digest))
    }

    /// The manifest of `wanted` in `index.json`, for this machine's platform.
    pub(crate) fn find(&self, wanted: &Reference) -> Result<Option<Manifest>> {
        let index: Index = self.json(Path::new("index.json"), None)?;
        let Some(descriptor) = index.manifests.iter().find(|d| is_named(d, wanted)) else { return Ok(None) };
        self.manifest(descriptor).map(Some)
    }

    /// Every name of an image in `index.json`, as written.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let index: Index = self.json(Path::new("index.json"), None)?;
        Ok(index.manifests.iter().filter_map(|d| d.names().next()).map(str::to_owned).collect())
    }

    fn manifest(&self, descriptor: &Descriptor) -> Result<Manifest> {
        let digest = descriptor.digest.clone();
        if !descriptor.is_index() {
            return Ok(Manifest { manifest: self.blob_json(&digest)?, digest });
        }
        let index: Index = self.blob_json(&digest)?;
        let descriptor = index.of_this_node(&digest)?;
        Ok(Manifest { manifest: self.blob_json(&descriptor.digest)?, digest })
    }

    /// A JSON blob, checked against its digest.
    pub(crate) fn blob_json<T: serde::de::DeserializeOwned>(&self, digest: &str) -> Result<T> {
        self.json(&blob_path(digest)?, Some(digest))
    }

    fn json<T: serde::de::DeserializeOwned>(&self, path: &Path, digest: Option<&str>) -> Result<T> {
        let limit = self.limits.manifest_bytes;
        let blob = self.file(path)?;
        if blob.size > limit {
            let path = path.to_owned();
            return Err(ImageError::DocumentTooLarge { path, bytes: blob.size, most: limit });
        }
        let _permit = READERS.acquire();
        let mut bytes = Vec::new();
        let file = blob.open()?;
        file.take(blob.size)
            .read_to_end(&mut bytes)
            .map_err(ImageError::reading(path.display().to_string()))?;
        if let Some(wanted) = digest {
            let found = format!("sha256:{}", base16ct::lower::encode_string(&Sha256::digest(&bytes)));
            if found != wanted {
                return Err(ImageError::OtherDigest { wanted: wanted.to_owned(), found });
            }
        }
        let invalid = |source| ImageError::Parse { path: path.to_owned(), source: InvalidJson(source) };
        serde_json::from_slice(&bytes).map_err(invalid)
    }

    /// A blob, not checked: the reader must check the digest.
    pub(crate) fn blob(&self, digest: &str) -> Result<Blob> {
        self.file(&blob_path(digest)?)
    }

    fn file(&self, inner: &Path) -> Result<Blob> {
        match &self.place {
            Place::Registry { blobs, .. } => {
                let name = inner.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                let digest = format!("sha256:{name}");
                let path = blobs.get(&digest).ok_or(ImageError::NotFetched { digest })?;
                let metadata = path.metadata();
                let size = metadata.map_err(|source| ImageError::Open { path: path.clone(), source })?.len();
                Ok(Blob { place: path.clone(), inner: None, offset: 0, size })
            }
            Place::Directory(dir) => {
                let metadata = open_within(dir, inner)?.metadata();
                let open = |source| ImageError::Open { path: inner.to_owned(), source };
                let size = metadata.map_err(open)?.len();
                Ok(Blob { place: dir.clone(), inner: Some(inner.to_owned()), offset: 0, size })
            }
            Place::Archive { path, entries } => {
                let missing = || ImageError::NotInArchive { path: inner.to_owned() };
                let (offset, size) = *entries.get(inner).ok_or_else(missing)?;
                Ok(Blob { place: path.clone(), inner: None, offset, size })
            }
        }
    }
}

/// Whether there is an `index.json`. An index that is a link counts: reading it reports the error.
fn is_layout(dir: &Path) -> bool {
    let Ok(dir) = open_dir(dir) else { return false };
    rustix::fs::statat(dir, "index.json", rustix::fs::AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn is_named(descriptor: &Descriptor, wanted: &Reference) -> bool {
    let mut found = descriptor.names().filter_map(|name| Reference::parse(name).ok());
    match &wanted.digest {
        // With a digest, only the repository and the content must match, not the tag.
        Some(digest) => {
            descriptor.digest == *digest && found.any(|name| name.repository == wanted.repository)
        }
        None => found.any(|name| name.repository == wanted.repository && name.tag == wanted.tag),
    }
}

fn blob_path(digest: &str) -> Result<PathBuf> {
    if !is_digest(digest) {
        return Err(ImageError::NoDigest { digest: digest.to_owned() });
    }
    Ok(Path::new("blobs/sha256").join(&digest["sha256:".len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_quotes_the_beginning_of_a_long_text() {
        let dir = tempfile::tempdir().unwrap();
        let index = format!("{{\"manifests\": \"{}\"}}", "x".repeat(1 << 20));
        std::fs::write(dir.path().join("index.json"), index).unwrap();
        let error = Source::open(dir.path(), &ImageLimits::default()).unwrap().names().unwrap_err();
        let problem = crate::error::chain(&error);
        assert!(problem.starts_with("parse index.json: invalid type: string \"xxx"), "{}", problem.len());
        assert!(problem.ends_with("x...") && problem.len() < 400, "{}", problem.len());
    }
}
