//! The Probe call: whether the driver can work.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::VolumeBackend;
use crate::error::{Error, Result, chain};
use crate::kernel::bounded::Shared;
use crate::kernel::private_dir::probe_dir;

/// What cannot be used, and why; one result for all callers.
#[derive(Debug, Clone)]
struct Unready {
    what: &'static str,
    reason: String,
}

#[derive(Debug)]
pub(crate) struct Readiness {
    backend: Arc<dyn VolumeBackend>,
    /// Directories that must be writable, with their names for messages.
    dirs: Vec<(&'static str, PathBuf)>,
    probes: Shared<(), std::result::Result<(), Unready>>,
}

impl Readiness {
    pub(crate) fn new(backend: Arc<dyn VolumeBackend>, dirs: Vec<(&'static str, PathBuf)>) -> Self {
        Self { backend, dirs, probes: Shared::default() }
    }

    /// Whether the next CreateVolume and NodeStageVolume can do their work. All callers share one
    /// check, so a hanging file system costs one thread.
    pub(crate) fn check(self: &Arc<Self>, limit: Duration) -> Result<()> {
        let this = self.clone();
        self.probes
            .within(&(), "probe", limit, move || this.probe())?
            .map_err(|Unready { what, reason }| Error::Unready { what, reason })
    }

    fn probe(&self) -> std::result::Result<(), Unready> {
        let unready = |what| move |e: linux::Error| Unready { what, reason: chain(&e) };
        self.backend.probe().map_err(unready("pool"))?;
        for (what, dir) in &self.dirs {
            probe_dir(dir).map_err(unready(what))?;
        }
        linux::mount::open_fuse_device().map(drop).map_err(unready("FUSE"))
    }
}
