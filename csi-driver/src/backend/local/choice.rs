//! Which policies a new volume of the pool gets, and what the pool or its node lacks for those that a class asks for.

use linux::fuse_backing;

use super::{Pool, quota};
use crate::backend::VolumeBackend;
use crate::error::{Error, Result, Step};
use crate::kernel::release;
use crate::model::policies::{CapacityPolicy, DataPath, Lacking, Policies, Supported, Wanted};

impl Pool {
    /// Whether the kernel has FUSE_PASSTHROUGH. It is asked until it has answered once.
    pub(super) fn kernel_has_passthrough(&self) -> Result<bool> {
        if let Some(known) = self.passthrough.get() {
            return Ok(*known);
        }
        let found = fuse_backing::is_supported().step("ask the kernel for FUSE_PASSTHROUGH")?;
        Ok(*self.passthrough.get_or_init(|| found))
    }

    pub(super) fn choose(&self, wanted: Wanted, keeper: bool) -> Result<Policies> {
        self.check_present()?;
        let kind = quota::kind(&self.dir).step("look at the pool's quotas")?;
        let may_pass = match wanted.data_path {
            Some(data_path) => data_path == DataPath::Passthrough,
            None => keeper && kind.is_ok() && matches!(wanted.capacity, None | Some(CapacityPolicy::Kernel)),
        };
        let passthrough = may_pass && self.kernel_has_passthrough()?;
        let supported = Supported { kernel_quota: kind.is_ok(), passthrough, keeper };
        Policies::choose(wanted, supported).map_err(|lacking| match (lacking, kind) {
            (Lacking::KernelQuota, Err(missing)) => {
                let what = match wanted.capacity {
                    Some(capacity) => format!("parameters.capacity \"{capacity}\""),
                    None => "parameters.dataPath \"passthrough\"".to_owned(),
                };
                // The daemon does not see the writes that pass it by.
                let passes = wanted.data_path == Some(DataPath::Passthrough);
                let other = if passes { CapacityPolicy::None } else { CapacityPolicy::Daemon };
                let (pool, reason) = (self.dir.clone(), missing.reason);
                let remedy = format!("{}, or choose capacity {other}", missing.remedy);
                Error::NoKernelQuota { what, pool, reason, remedy }
            }
            (Lacking::Keeper, _) => Error::NoKeeper,
            (Lacking::KernelQuota | Lacking::Passthrough, _) => {
                Error::NoPassthrough { release: release::running() }
            }
        })
    }
}
