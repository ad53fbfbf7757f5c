//! Probe: whether the driver can work.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::VolumeBackend;
use crate::error::{Error, Result, chain};
use crate::kernel::bounded::Shared;
use crate::kernel::private_dir::probe_dir;

/// What cannot be used, and why: the same for all who asked.
#[derive(Debug, Clone)]
struct Unready {
    what: &'static str,
    reason: String,
}

#[derive(Debug)]
pub(crate) struct Readiness {
    backend: Arc<dyn VolumeBackend>,
    /// Directories that must take files, each with what it is called.
    dirs: Vec<(&'static str, PathBuf)>,
    probes: Shared<(), std::result::Result<(), Unready>>,
}

impl Readiness {
    pub(crate) fn new(backend: Arc<dyn VolumeBackend>, dirs: Vec<(&'static str, PathBuf)>) -> Self {
        Self { backend, dirs, probes: Shared::default() }
    }

    /// Whether the next CreateVolume and NodeStageVolume can do their work. One look for all who
    /// ask: of a file system that hangs, one thread is kept.
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
