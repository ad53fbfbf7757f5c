//! The inodes of a pool's file system: ext4 has a fixed number, xfs makes them up to a
//! part of its space, Btrfs as long as there is space.

use std::path::Path;

use rustix::fs::{CWD, ResolveFlags};

use crate::model::capacity::BYTES_PER_INODE;

/// Kept back for the journal and what else the node keeps there: one of so many.
const RESERVE: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inodes {
    total: u64,
    file_system_bytes: u64,
}

impl Inodes {
    /// Those of the file system of `directory`; `None` where it has no fixed number.
    pub(super) fn of(directory: &Path) -> rustix::io::Result<Option<Self>> {
        let directory = linux::tree::open_dir(CWD, directory, ResolveFlags::empty())?;
        let fs = rustix::fs::fstatvfs(&directory)?;
        let total = match linux::xfs::is_xfs(&directory)? {
            // statvfs tells what the free space allows, which shrinks as it is used.
            true => linux::xfs::most_inodes(&directory)?,
            false => Some(fs.f_files).filter(|total| *total > 0),
        };
        let file_system_bytes = fs.f_blocks.saturating_mul(fs.f_frsize);
        Ok(total.map(|total| Self { total, file_system_bytes }))
    }

    /// What volumes of `pool_bytes` may have together. Who gives the pool more bytes than its
    /// file system has gives it as many times more inodes.
    pub(crate) fn claimable_by(&self, pool_bytes: u64) -> u64 {
        let file_system_bytes = self.file_system_bytes.max(1);
        let claimable = u128::from(self.claimable());
        let scaled =
            claimable * u128::from(pool_bytes.max(file_system_bytes)) / u128::from(file_system_bytes);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }

    fn claimable(&self) -> u64 {
        self.total - self.total / RESERVE
    }

    /// One for so many bytes of a claim.
    pub(crate) fn bytes_each(&self) -> u64 {
        self.file_system_bytes.div_ceil(self.claimable().max(1)).max(BYTES_PER_INODE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_of_all_bytes_have_no_more_than_all_inodes() {
        for (total, file_system_bytes) in [(44_832, 700 << 20), (16_777_216, 252 << 30), (1 << 30, 1 << 30)] {
            let inodes = Inodes { total, file_system_bytes };
            assert!(inodes.bytes_each() >= BYTES_PER_INODE);
            assert!(file_system_bytes / inodes.bytes_each() <= inodes.claimable());
            assert_eq!(inodes.claimable_by(1), inodes.claimable(), "a part has no part of them alone");
            assert_eq!(inodes.claimable_by(3 * file_system_bytes), 3 * inodes.claimable());
        }
    }
}
