//! Limits on what an image may use. Images are untrusted.
//!
//! Invariant: every error that a limit causes names the limit's flag.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::error::{ImageError, Result};

/// Limits of one image, as flags of `hawser-runtime` and `hawser-kubelet run`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
pub struct ImageLimits {
    /// Bytes of an image's index, manifest or configuration
    #[arg(long = "image-max-manifest-bytes", value_name = "BYTES", default_value_t = 4 << 20)]
    pub manifest_bytes: u64,
    /// Bytes of one tar header of a layer, with its long names and extended attributes
    #[arg(long = "image-max-header-bytes", value_name = "BYTES", default_value_t = 1 << 20)]
    pub header_bytes: u64,
    /// Bytes that the layers of one image may unpack to
    #[arg(long = "image-max-unpacked-bytes", value_name = "BYTES", default_value_t = 16 << 30)]
    pub unpacked_bytes: u64,
    /// Entries (files, directories, links) that the layers of one image may have
    #[arg(long = "image-max-entries", value_name = "N", default_value_t = 1_000_000)]
    pub entries: u64,
    /// Directories inside one another in a layer
    #[arg(long = "image-max-depth", value_name = "N", default_value_t = 256)]
    pub depth: usize,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self {
            manifest_bytes: 4 << 20,
            header_bytes: 1 << 20,
            unpacked_bytes: 16 << 30,
            entries: 1_000_000,
            depth: 256,
        }
    }
}

/// What was used of one image's limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Used {
    pub(crate) unpacked_bytes: u64,
    pub(crate) entries: u64,
}

impl Used {
    pub(crate) fn add(&mut self, more: Used) {
        self.unpacked_bytes = self.unpacked_bytes.saturating_add(more.unpacked_bytes);
        self.entries = self.entries.saturating_add(more.entries);
    }

    pub(crate) fn check(&self, limits: &ImageLimits) -> Result<()> {
        if self.unpacked_bytes > limits.unpacked_bytes {
            return Err(limits.too_many_bytes());
        }
        if self.entries > limits.entries {
            return Err(ImageError::TooManyEntries { most: limits.entries });
        }
        Ok(())
    }
}

impl ImageLimits {
    pub(crate) fn too_many_bytes(&self) -> ImageError {
        ImageError::TooManyBytes { most: self.unpacked_bytes }
    }

    pub(crate) fn header_too_large(&self) -> ImageError {
        ImageError::HeaderTooLarge { most: self.header_bytes }
    }

    pub(crate) fn too_deep(&self) -> ImageError {
        ImageError::TooDeep { most: self.depth }
    }
}

/// The bytes that may still be read, shared by the reader and by the code that knows what is read
/// next: the tar crate holds a whole header in memory.
#[derive(Debug, Clone)]
pub(crate) struct Allowance(Rc<Cell<u64>>);

impl Allowance {
    pub(crate) fn unlimited() -> Self {
        Self(Rc::new(Cell::new(u64::MAX)))
    }

    pub(crate) fn set(&self, bytes: u64) {
        self.0.set(bytes);
    }

    pub(crate) fn left(&self) -> u64 {
        self.0.get()
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.left() == 0
    }
}

/// A reader that fails once its allowance is used up.
#[derive(Debug)]
pub(crate) struct Limited<R> {
    inner: R,
    left: Allowance,
}

impl<R> Limited<R> {
    pub(crate) fn new(inner: R, left: Allowance) -> Self {
        Self { inner, left }
    }

    pub(crate) fn into_inner(self) -> R {
        self.inner
    }
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.0.get();
        if left == 0 {
            return Err(io::Error::other("more than is allowed"));
        }
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let length = self.inner.read(&mut buffer[..most])?;
        if left != u64::MAX {
            self.left.0.set(left - length as u64);
        }
        Ok(length)
    }
}

impl<R: Seek> Seek for Limited<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}
