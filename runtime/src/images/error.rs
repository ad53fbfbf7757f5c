//! Errors in an image, or in the files that it is read from.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tar::EntryType;

pub(crate) type Result<T> = std::result::Result<T, ImageError>;

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    // Files of a layout or an archive.
    #[error("open {}", .path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("open {}: no regular file", .path.display())]
    NoRegularFile { path: PathBuf },
    #[error("open {}: not in the archive", .path.display())]
    NotInArchive { path: PathBuf },
    #[error("read {what}")]
    Read {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("parse {}", .path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: InvalidJson,
    },

    // Contradictions in an image's documents.
    #[error("digest {digest:?} is not sha256:<64 hex digits>")]
    NoDigest { digest: String },
    #[error("blob {wanted} has digest {found}")]
    OtherDigest { wanted: String, found: String },
    #[error("blob {digest} unpacks to {found}, the image configuration has {wanted}")]
    OtherDiffId { digest: String, found: String, wanted: String },
    #[error("index {digest} has no manifest for linux/{architecture}")]
    NoPlatform { digest: String, architecture: String },
    #[error("{layers} layers but {diff_ids} diff_ids")]
    LayerCount { layers: usize, diff_ids: usize },
    /// The process that imports has only the layers that the node did not have.
    #[error("blob {digest} was not fetched")]
    NotFetched { digest: String },

    // Limits.
    #[error("{} has {bytes} bytes, more than {most} (--image-max-manifest-bytes)", .path.display())]
    DocumentTooLarge { path: PathBuf, bytes: u64, most: u64 },
    #[error("the image unpacks to more than {most} bytes (--image-max-unpacked-bytes)")]
    TooManyBytes { most: u64 },
    #[error("the image has more than {most} entries (--image-max-entries)")]
    TooManyEntries { most: u64 },
    #[error("a tar header has more than {most} bytes (--image-max-header-bytes)")]
    HeaderTooLarge { most: u64 },
    #[error("more than {most} directories inside one another (--image-max-depth)")]
    TooDeep { most: usize },
    #[error("the archive's headers have more than {most} bytes together")]
    HeadersTooLarge { most: u64 },
    #[error("more than {most} blobs in one archive")]
    TooManyBlobs { most: usize },

    // Entries of a layer.
    #[error("the path leads out of the layer")]
    OutOfLayer,
    #[error("the whiteout names no entry of its directory")]
    EmptyWhiteout,
    #[error("tar entry type {kind:?} is not supported")]
    EntryType { kind: EntryType },
    #[error("link without a target")]
    NoTarget,
    #[error("hard link to {}", .target.display())]
    HardLink { target: PathBuf },
    #[error("owner is not a 32 bit number")]
    Owner,
    #[error("device without numbers")]
    DeviceNumbers,
    #[error("set {key}")]
    Attribute {
        key: String,
        #[source]
        source: io::Error,
    },

    // The process that unpacks.
    #[error("the layer needs more than {bytes} bytes of memory to unpack")]
    Memory { bytes: u64 },
    #[error("the unpacker was ended by signal {signal}: {said}")]
    Killed { signal: i32, said: String },
    /// The unpacker's last line.
    #[error("{said}")]
    Unpacker { said: String },
    #[error("the parent has ended")]
    NoParent,
    /// From the unpacker's job or answer.
    #[error("{op}")]
    Message {
        op: &'static str,
        #[source]
        source: serde_json::Error,
    },

    #[error("{op}")]
    Io {
        op: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    /// An entry of a layer or a layer of an image, with the error in it.
    #[error("{part}")]
    In {
        part: String,
        #[source]
        source: Box<ImageError>,
    },
    /// From an archive that was read before and has not changed.
    #[error(transparent)]
    Known(Arc<ImageError>),
}

/// Shows the beginning of serde's message, which quotes the invalid text: it may have megabytes.
#[derive(Debug, thiserror::Error)]
#[error("{}", trace::shortened(.0.to_string(), 300))]
pub struct InvalidJson(pub(crate) serde_json::Error);

impl ImageError {
    pub(crate) fn within(self, part: impl Into<String>) -> Self {
        Self::In { part: part.into(), source: Box::new(self) }
    }

    /// For `map_err`: names the operation.
    pub(crate) fn io<E: Into<io::Error>>(op: &'static str) -> impl Fn(E) -> Self + Copy {
        move |source| Self::Io { op, source: source.into() }
    }

    pub(crate) fn reading<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self::Read { what: what.into(), source: source.into() }
    }
}
