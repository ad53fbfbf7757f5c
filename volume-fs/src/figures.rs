//! A backend's figures of its whole volume.

/// The limits of a volume. 0: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    pub bytes: u64,
    pub inodes: u64,
}

/// What a volume holds, with its root directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    pub bytes: u64,
    pub inodes: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageNow {
    pub limits: Limits,
    pub used: Counted,
    /// `used` is not known yet.
    pub counting: bool,
}

/// Figures of the inodes that the kernel knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KnownNow {
    pub nodes: usize,
    /// The limit above which the kernel is asked to forget inodes.
    pub limit: usize,
    /// Removed files that are still open or known to the kernel.
    pub nameless: usize,
    /// Total of the inodes that the kernel was asked to forget.
    pub asked_to_forget: u64,
    /// Total of the lookups and creations that were refused.
    pub refused: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    pub usage: UsageNow,
    pub open_files: usize,
    pub known: KnownNow,
}

/// Why limits cannot be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {wanted} is less than the {now} of now, and a volume never shrinks (0: no limit)")]
pub struct Shrinks {
    field: &'static str,
    now: u64,
    wanted: u64,
}

impl Limits {
    /// Whether a volume with these limits can get the `wanted` ones: neither may shrink.
    pub fn check_growth(self, wanted: Self) -> Result<(), Shrinks> {
        let unlimited = |limit: u64| if limit == 0 { u64::MAX } else { limit };
        for (field, now, wanted) in
            [("capacity_bytes", self.bytes, wanted.bytes), ("inode_limit", self.inodes, wanted.inodes)]
        {
            if unlimited(wanted) < unlimited(now) {
                return Err(Shrinks { field, now, wanted });
            }
        }
        Ok(())
    }
}
