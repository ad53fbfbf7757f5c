//! Blobs on their way into the image store: files below the runtime's directory that end with their
//! last user.
//!
//! Invariant: a [`BlobFile`] has the bytes of its digest.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use super::client::Client;
use super::error::{Problem, Result};
use super::progress::Progress;
use crate::locks::Locks;

/// What is written at a time. Twice as much of a blob is in memory.
const PIECE_BYTES: usize = 32 << 10;
/// What must come within [`PACE`]: a registry that sends single bytes would hold a pull for days.
const LEAST_BYTES: u64 = 64 << 10;
const PACE: Duration = Duration::from_secs(60);

/// A fetched blob. Its file is removed with the last reference.
#[derive(Debug)]
pub(super) struct BlobFile {
    path: PathBuf,
    size: u64,
    /// Keeps the entry of [`Blobs`] for those who ask for the same blob.
    _slot: Arc<Slot>,
}

/// Held while a blob is fetched.
type Slot = Mutex<Weak<BlobFile>>;

/// The blobs under way, each fetched once, by registry and digest. One of another registry is fetched
/// again: this registry has to show that it has it.
#[derive(Debug)]
pub(super) struct Blobs {
    dir: PathBuf,
    slots: Locks<(String, String), Slot>,
}

/// What a manifest says of a blob.
#[derive(Debug, Clone, Copy)]
pub(super) struct Announced<'a> {
    pub(super) digest: &'a str,
    pub(super) size: u64,
}

impl BlobFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for BlobFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a download stays until the next start");
        }
    }
}

impl Blobs {
    /// `dir` does not exist, or is empty.
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir, slots: Locks::default() }
    }

    pub(super) async fn get(
        &self,
        domain: &str,
        client: &Client,
        announced: Announced<'_>,
        progress: &Progress,
    ) -> Result<Arc<BlobFile>> {
        let slot = self.slots.of(&(domain.to_owned(), announced.digest.to_owned()));
        let mut known = slot.lock().await;
        if let Some(blob) = known.upgrade() {
            return match blob.size {
                size if size == announced.size => Ok(blob),
                found => Err(Problem::Length { announced: announced.size, found }),
            };
        }
        let name = linux::random::hexadecimal().map_err(|e| Problem::Store { source: e.source })?;
        let path = self.dir.join(name);
        let mut private = DirBuilder::new();
        private.recursive(true).mode(0o700).create(&self.dir).map_err(|source| Problem::Store { source })?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|source| Problem::Store { source })?;
        // From here on it is removed if the download fails or is dropped.
        let blob = Arc::new(BlobFile { path, size: announced.size, _slot: Arc::clone(&slot) });
        fetch(client, announced, file, progress).await?;
        *known = Arc::downgrade(&blob);
        Ok(blob)
    }
}

/// Reads while another thread computes the digest of what came before, and writes it. None is held while the
/// registry sends nothing.
async fn fetch(client: &Client, announced: Announced<'_>, file: File, progress: &Progress) -> Result<()> {
    let mut answer = client.blob(announced.digest, announced.size).await?;
    let mut sink = Sink::new(file);
    let (mut piece, mut received) = (Vec::new(), 0);
    let (mut since, mut before) = (Instant::now(), 0);
    while let Some(bytes) = answer.next().await? {
        received += bytes.len() as u64;
        if received > announced.size {
            return Err(Problem::TooLarge { most: announced.size, flag: "as its manifest announces" });
        }
        progress.add(bytes.len());
        if since.elapsed() >= PACE {
            if received - before < LEAST_BYTES {
                return Err(Problem::Drips { least: LEAST_BYTES, within: PACE });
            }
            (since, before) = (Instant::now(), received);
        }
        piece.extend_from_slice(&bytes);
        if piece.len() >= PIECE_BYTES {
            sink.write(std::mem::take(&mut piece)).await?;
        }
    }
    sink.write(piece).await?;
    let found = sink.end().await?;
    if received != announced.size {
        return Err(Problem::Length { announced: announced.size, found: received });
    }
    if found != announced.digest {
        return Err(Problem::OtherDigest { wanted: announced.digest.to_owned(), found });
    }
    Ok(())
}

/// A file, and the digest of what was written to it.
#[derive(Debug)]
struct Sink {
    written: Option<(File, Sha256)>,
    /// `None`: nothing is being written.
    writing: Option<JoinHandle<std::io::Result<(File, Sha256)>>>,
}

impl Sink {
    fn new(file: File) -> Self {
        Self { written: Some((file, Sha256::new())), writing: None }
    }

    /// Begins to write, once what came before is written.
    async fn write(&mut self, piece: Vec<u8>) -> Result<()> {
        let (mut file, mut hash) = self.written().await?;
        self.writing = Some(tokio::task::spawn_blocking(move || {
            hash.update(&piece);
            file.write_all(&piece)?;
            Ok((file, hash))
        }));
        Ok(())
    }

    async fn written(&mut self) -> Result<(File, Sha256)> {
        let failed = |source| Problem::Store { source };
        match (self.writing.take(), self.written.take()) {
            (Some(writing), _) => {
                writing.await.map_err(std::io::Error::other).map_err(failed)?.map_err(failed)
            }
            (None, Some(written)) => Ok(written),
            (None, None) => Err(failed(std::io::Error::other("an earlier write failed"))),
        }
    }

    /// The digest of what was written.
    async fn end(mut self) -> Result<String> {
        let (_file, hash) = self.written().await?;
        Ok(format!("sha256:{}", base16ct::lower::encode_string(&hash.finalize())))
    }
}
