//! What a backend says of its volume as a whole.

/// How much a volume may hold. 0: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    pub bytes: u64,
    pub inodes: u64,
}

/// How much a volume holds, its root directory included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    pub bytes: u64,
    pub inodes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageNow {
    pub limits: Limits,
    pub used: Counted,
    /// `used` is not known yet.
    pub counting: bool,
}

/// How many inodes the kernel knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KnownNow {
    pub nodes: usize,
    /// Beyond it the kernel is asked to forget.
    pub limit: usize,
    /// Removed files that are still held.
    pub nameless: usize,
    /// Inodes that the kernel was asked to forget, ever.
    pub asked_to_forget: u64,
    /// Lookups and creations that were refused, ever.
    pub refused: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    pub usage: UsageNow,
    pub open_files: usize,
    pub known: KnownNow,
}

/// Why limits are not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {wanted} is less than the {now} of now, and a volume never shrinks (0: no limit)")]
pub struct Shrinks {
    field: &'static str,
    now: u64,
    wanted: u64,
}

impl Limits {
    /// Whether a volume of these limits can get the `wanted` ones: both grow, or stay.
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
