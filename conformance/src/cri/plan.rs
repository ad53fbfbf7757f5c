//! One run of critest: against which runtime, and with which protocol for its streams.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Side {
    Hawser,
    Containerd,
}

/// How a client's streams reach the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Streams {
    Spdy,
    WebSocket,
}

/// What the stages of a node need.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// Of this run: short, and new.
    pub(super) dir: PathBuf,
    pub(super) side: Side,
    pub(super) streams: Streams,
    /// A regular expression for the names of specs.
    pub(super) focus: Option<String>,
    pub(super) critest: PathBuf,
    /// The OCI layout with all images.
    pub(super) images: PathBuf,
    /// Directory of the CNI plugins.
    pub(super) plugins: PathBuf,
    /// `hawser-runtime` or `containerd`.
    pub(super) runtime: PathBuf,
}

impl Plan {
    /// Of the node, in every hierarchy.
    pub(super) fn group(&self) -> PathBuf {
        Path::new("/").join(self.dir.file_name().unwrap_or_default())
    }

    /// ginkgo's report.
    pub(super) fn report(&self) -> PathBuf {
        self.dir.join("report.json")
    }

    pub(super) fn save(&self) -> Result<PathBuf> {
        let file = self.dir.join("plan.json");
        let text = serde_json::to_vec(self).context("write the plan")?;
        fs::write(&file, text).with_context(|| file.display().to_string())?;
        Ok(file)
    }

    pub(super) fn load(file: &Path) -> Result<Self> {
        let text = fs::read(file).with_context(|| file.display().to_string())?;
        serde_json::from_slice(&text).with_context(|| file.display().to_string())
    }
}
