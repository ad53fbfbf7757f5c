//! The inodes of a pool's file system. ext4 has a fixed number. xfs creates them in a limited part
//! of its space, Btrfs as long as there is space.

use std::path::Path;

use rustix::fs::{CWD, ResolveFlags};

use crate::model::capacity::BYTES_PER_INODE;

/// One inode of this many is reserved for the journal and other files of the node.
const RESERVE: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inodes {
    total: u64,
    file_system_bytes: u64,
}

impl Inodes {
    /// The inodes of the file system of `directory`; `None` if it has no fixed number.
    pub(super) fn of(directory: &Path) -> rustix::io::Result<Option<Self>> {
        let directory = linux::tree::open_dir(CWD, directory, ResolveFlags::empty())?;
        let fs = rustix::fs::fstatvfs(&directory)?;
        let total = match linux::xfs::is_xfs(&directory)? {
            // statvfs(2) reports what the free space allows, which shrinks as the space is used.
            true => linux::xfs::most_inodes(&directory)?,
            false => Some(fs.f_files).filter(|total| *total > 0),
        };
        let file_system_bytes = fs.f_blocks.saturating_mul(fs.f_frsize);
        Ok(total.map(|total| Self { total, file_system_bytes }))
    }

    /// The inodes that volumes of `pool_bytes` together may claim. If the pool is configured with
    /// more bytes than its file system has, the inodes are scaled by the same factor.
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

    /// A claim gets one inode for this many bytes.
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
