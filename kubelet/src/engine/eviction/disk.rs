//! The file systems of the kubelet and of images: their usage, with kubelet's rounding, and whether they are
//! one.

use std::fs::File;
use std::path::Path;

use linux::{mount, mountinfo};
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

/// Whether both directories are in one file system, in any of its subvolumes; also if that is unknown.
pub(super) fn is_one_file_system(a: &Path, b: &Path) -> bool {
    match (device(a), device(b)) {
        (Ok(Some(a)), Ok(Some(b))) => a == b,
        (Ok(None) | Err(_), _) | (_, Ok(None) | Err(_)) => true,
    }
}

/// As in mountinfo: stat(2) has another device for each subvolume of Btrfs.
fn device(directory: &Path) -> linux::Result<Option<(u32, u32)>> {
    let open = File::open(directory).map_err(|e| linux::Error::at("open", directory, e))?;
    let mount = mountinfo::of_id(mount::id_of(open)?)?;
    Ok(mount.map(|mount| (mount.major, mount.minor)))
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

    #[test]
    fn file_systems_are_compared_by_their_device() {
        let is_one = |a, b| is_one_file_system(Path::new(a), Path::new(b));
        assert!(is_one("/proc", "/proc/self"));
        assert!(!is_one("/proc", "/dev"));
        assert!(is_one("/proc", "/missing"), "unknown");
    }
}
