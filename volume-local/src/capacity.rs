//! Who enforces the limits of a volume, and knows its use: one policy for each volume.
//!
//! [`CountedByDaemon`] works on every file system. [`LimitedByKernel`] (project quotas, quota groups)
//! and [`Unlimited`] have no [`Quota`]: then no request calls anything of this crate's accounting.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use volume_fs::figures::{Counted, Limits, Shrinks, UsageNow};

use crate::errno::Result;
use crate::quota::{Quota, Use};
use crate::state_table::charges::Charges;
use crate::usage_file::UsageFile;

/// Measures the whole tree of the volume.
pub(crate) type Count = Box<dyn FnOnce() -> Result<Use> + Send>;

/// The capacity of one volume. Its limits are known from the start. The default methods are those of a
/// policy whose use the daemon does not count.
pub(crate) trait Policy: Debug + Send + Sync {
    /// What requests ask for admission and charge; `None` if the kernel enforces the limits.
    fn quota(&self) -> Option<Arc<Quota>> {
        None
    }

    /// Whether the volume may not change before [`Self::prepare`] calls `prepared`.
    fn must_prepare(&self) -> bool {
        false
    }

    /// Called once if [`Self::must_prepare`], before the first request. `_count` may be called in
    /// another thread: nothing changes the volume until `prepared` is called.
    ///
    /// # Errors
    ///
    /// The step that failed: the volume cannot be served.
    fn prepare(self: Arc<Self>, _count: Count, prepared: Box<dyn FnOnce() + Send>) -> volume_fs::Result<()> {
        prepared();
        Ok(())
    }

    fn usage(&self) -> UsageNow;

    /// Sets both limits or none; unchanged limits are a success.
    fn expand(&self, wanted: Limits) -> std::result::Result<(), Shrinks>;

    /// Called last, if the volume is prepared and nothing changes it any more.
    fn end(&self) {}
}

/// Nothing keeps the volume within its size, and nothing counts what it holds.
#[derive(Debug)]
pub(crate) struct Unlimited;

impl Unlimited {
    /// # Errors
    ///
    /// The usage file cannot be truncated: a later daemon would trust it.
    pub(crate) fn open(usage_file: &UsageFile) -> volume_fs::Result<Self> {
        forget(usage_file).map(|()| Self)
    }
}

impl Policy for Unlimited {
    fn usage(&self) -> UsageNow {
        UsageNow::default()
    }

    fn expand(&self, _wanted: Limits) -> std::result::Result<(), Shrinks> {
        Ok(())
    }
}

/// A quota of the file system keeps the volume within its limits.
///
/// A project has its own figures in statfs(2). A quota group has not, and only the driver may read
/// them: it writes them into the usage file, again and again.
#[derive(Debug)]
pub(crate) struct LimitedByKernel {
    usage_file: UsageFile,
    /// Of the volume.
    root: OwnedFd,
    limits: Mutex<Limits>,
    /// The last figures of a quota group.
    counted: Mutex<Option<Counted>>,
}

impl LimitedByKernel {
    /// # Errors
    ///
    /// The usage file cannot be truncated: a later daemon would trust a count in it.
    pub(crate) fn open(usage_file: UsageFile, root: OwnedFd, limits: Limits) -> volume_fs::Result<Self> {
        let counted = usage_file.kernels_count();
        if counted.is_none() {
            forget(&usage_file)?;
        }
        Ok(Self { usage_file, root, limits: Mutex::new(limits), counted: Mutex::new(counted) })
    }

    /// The figures that the file system itself has for the volume's root.
    fn of_file_system(&self) -> UsageNow {
        let Ok(found) = rustix::fs::fstatvfs(&self.root) else { return UsageNow::default() };
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        UsageNow {
            limits: Limits { bytes: bytes(found.f_blocks), inodes: found.f_files },
            used: Counted {
                bytes: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
                inodes: found.f_files.saturating_sub(found.f_ffree),
            },
            counting: false,
        }
    }
}

impl Policy for LimitedByKernel {
    fn usage(&self) -> UsageNow {
        let mut counted = locked(&self.counted);
        *counted = self.usage_file.kernels_count().or(*counted);
        match *counted {
            // A group limits no number of inodes.
            Some(used) => {
                let limits = Limits { inodes: 0, ..*locked(&self.limits) };
                UsageNow { limits, used, counting: false }
            }
            None => self.of_file_system(),
        }
    }

    /// The driver has given the group or project its limits before.
    fn expand(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
        let mut limits = locked(&self.limits);
        limits.check_growth(wanted)?;
        *limits = wanted;
        Ok(())
    }
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section is one assignment.
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn forget(usage_file: &UsageFile) -> volume_fs::Result<()> {
    usage_file.forget().map_err(|errno| volume_fs::Error::Kernel {
        step: "usage file",
        source: linux::Error::new("truncate", "", errno),
    })
}

/// The daemon counts what each request takes. A successor continues from the charges in the state
/// table, the next daemon from the usage file. It counts the whole tree if there is neither.
#[derive(Debug)]
pub(crate) struct CountedByDaemon {
    quota: Arc<Quota>,
    usage_file: UsageFile,
}

impl CountedByDaemon {
    /// `quota`: of a use that is not known. `earlier`: what the daemon before has left in the state
    /// table.
    ///
    /// # Errors
    ///
    /// The usage file cannot be truncated.
    pub(crate) fn open(
        usage_file: UsageFile,
        quota: Quota,
        earlier: Option<&Charges>,
    ) -> volume_fs::Result<Self> {
        let found = usage_file.read();
        forget(&usage_file)?;
        match (earlier, found) {
            (Some(earlier), _) => quota.restore(earlier),
            (None, Some(found)) => quota.set_counted(found),
            (None, None) => {}
        }
        Ok(Self { quota: Arc::new(quota), usage_file })
    }
}

impl Policy for CountedByDaemon {
    fn quota(&self) -> Option<Arc<Quota>> {
        Some(Arc::clone(&self.quota))
    }

    fn must_prepare(&self) -> bool {
        self.usage().counting
    }

    /// Counts in a thread of its own: reads are served meanwhile.
    fn prepare(self: Arc<Self>, count: Count, prepared: Box<dyn FnOnce() + Send>) -> volume_fs::Result<()> {
        let counting = move || {
            let begun = Instant::now();
            match count() {
                Ok(found) => {
                    let (files, took) = (found.counted.inodes, begun.elapsed());
                    tracing::info!(files, ?took, "counted what the volume holds");
                    self.quota.set_counted(found);
                }
                Err(error) => {
                    tracing::error!(%error, "the volume cannot be counted: it takes no more data");
                    self.quota.set_uncounted();
                }
            }
            prepared();
        };
        let thread = std::thread::Builder::new().name("count".to_owned());
        let started = thread.spawn(counting).map(drop);
        started.map_err(|source| volume_fs::Error::Thread { name: "count", source })
    }

    fn usage(&self) -> UsageNow {
        self.quota.usage()
    }

    fn expand(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
        self.quota.set_limits(wanted)
    }

    /// Saves the next daemon a count, if this one knows the use.
    fn end(&self) {
        let Some(known) = self.quota.at_the_end() else { return };
        if let Err(error) = self.usage_file.keep(&known) {
            tracing::warn!(%error, "usage file: the next daemon will count anew");
        }
    }
}
