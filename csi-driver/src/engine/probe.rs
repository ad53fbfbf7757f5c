//! Probe: whether the driver can work.

use crate::engine::driver::Driver;
use crate::engine::ready::Unready;
use crate::error::chain;
use crate::journal;
use crate::kernel::private_dir::probe_dir;

impl Driver {
    /// Whether the next CreateVolume and NodeStageVolume can do their work.
    pub(crate) fn probe(&self) -> std::result::Result<(), Unready> {
        let unready = |what| move |e: linux::Error| Unready { what, reason: chain(&e) };
        self.pool.probe().map_err(unready("pool"))?;
        for dir in journal::dirs(&self.config.state_dir) {
            probe_dir(&dir).map_err(unready("state directory"))?;
        }
        probe_dir(&self.config.run_dir).map_err(unready("run directory"))?;
        linux::mount::open_fuse_device().map(drop).map_err(unready("FUSE"))
    }
}
