//! An OCI image layout of several images, made on the spot. Images may share layers.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::image::{append, descriptor, digest, header, to_bytes};

/// A directory with blobs, and with the index when it is finished.
#[derive(Debug)]
pub struct Layout {
    dir: PathBuf,
    entries: Vec<Value>,
}

impl Layout {
    pub fn create(dir: &Path) -> Result<Self> {
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| blobs.display().to_string())?;
        Ok(Self { dir: dir.to_owned(), entries: Vec::new() })
    }

    /// Adds an image of `layers`, lowest first, with the `config` section of its configuration, under
    /// each of the names. Returns the digest of its manifest.
    pub fn add(&mut self, names: &[&str], config: &Value, layers: &[&[u8]]) -> Result<String> {
        let diff_ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", digest(layer))).collect();
        let config = to_bytes(&json!({
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        }))?;
        let of_layer = |layer: &&[u8]| descriptor("application/vnd.oci.image.layer.v1.tar", layer);
        let manifest = to_bytes(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": layers.iter().map(of_layer).collect::<Vec<_>>(),
        }))?;
        for blob in layers.iter().copied().chain([&config[..], &manifest[..]]) {
            self.write_blob(blob)?;
        }
        let entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        for name in names {
            let mut entry = entry.clone();
            entry["annotations"] = json!({ "io.containerd.image.name": name });
            self.entries.push(entry);
        }
        Ok(format!("sha256:{}", digest(&manifest)))
    }

    fn write_blob(&self, blob: &[u8]) -> Result<()> {
        let path = self.dir.join("blobs/sha256").join(digest(blob));
        fs::write(&path, blob).with_context(|| path.display().to_string())
    }

    pub fn finish(self) -> Result<()> {
        let index = to_bytes(&json!({ "schemaVersion": 2, "manifests": self.entries }))?;
        for (name, content) in
            [("index.json", &index[..]), ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)]
        {
            let path = self.dir.join(name);
            fs::write(&path, content).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

/// The tar archive of one layer. Paths have no leading slash.
pub struct Layer(tar::Builder<Vec<u8>>);

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Layer of {} bytes", self.0.get_ref().len())
    }
}

impl Default for Layer {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

impl Layer {
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        let mut header = header(0, mode);
        header.set_entry_type(tar::EntryType::Directory);
        let path = format!("{path}/");
        self.0.append_data(&mut header, &path, std::io::empty()).with_context(|| format!("add {path}"))
    }

    pub fn file(&mut self, path: &str, content: &[u8], mode: u32) -> Result<()> {
        append(&mut self.0, path, content, mode)
    }

    /// A second name of the file at `target` in this layer.
    pub fn hard_link(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = header(0, 0o755);
        header.set_entry_type(tar::EntryType::Link);
        self.0.append_link(&mut header, path, target).with_context(|| format!("add {path}"))
    }

    /// A file of this machine, which stands at `path` in the image.
    pub fn host_file(&mut self, file: &Path, path: &str, mode: u32) -> Result<()> {
        let content = fs::read(file).with_context(|| file.display().to_string())?;
        self.file(path, &content, mode)
    }

    pub fn finish(self) -> Result<Vec<u8>> {
        self.0.into_inner().context("finish the layer")
    }
}
