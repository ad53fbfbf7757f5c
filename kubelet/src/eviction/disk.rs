//! Disk usage of a file system, with kubelet's rounding.

use std::path::Path;

use nix::sys::statvfs::statvfs;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) capacity: u64,
    pub(super) available: u64,
}

impl Space {
    /// `None` if the file system does not exist or reports no size.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let found = statvfs(path).ok()?;
        let unit: u64 = found.fragment_size();
        let space = Self {
            capacity: found.blocks().saturating_mul(unit),
            available: found.blocks_available().saturating_mul(unit),
        };
        (space.capacity > 0).then_some(space)
    }

    pub(super) fn percent_used(self) -> u64 {
        let available = u128::from(self.available) * 100 / u128::from(self.capacity);
        100_u64.saturating_sub(u64::try_from(available).unwrap_or(100))
    }

    /// The bytes to free until usage is at most `percent`.
    pub(super) fn missing_for(self, percent: u64) -> u64 {
        let wanted = u128::from(self.capacity) * u128::from(100_u64.saturating_sub(percent)) / 100;
        u64::try_from(wanted).unwrap_or(u64::MAX).saturating_sub(self.available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_round_as_kubelets() {
        let space = Space { capacity: 1000, available: 149 };
        assert_eq!(space.percent_used(), 86);
        assert_eq!(space.missing_for(80), 51);
        let space = Space { capacity: 1000, available: 150 };
        assert_eq!(space.percent_used(), 85);
        assert_eq!(Space { capacity: 1000, available: 500 }.missing_for(80), 0);
    }
}
