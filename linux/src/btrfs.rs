//! Properties of Btrfs that matter to root's code.
//!
//! *Subvolumes.* The owner of a directory may make a subvolume in it, and may make it read-only.
//! Then removing its contents fails with `EROFS`, for root too.
//!
//! *Names.* They are stored in the metadata trees, and `st_blocks` of a directory is 0: the names
//! of a file with thousands of links take kilobytes that no count of blocks shows.

#![expect(
    unsafe_code,
    reason = "names the argument of BTRFS_IOC_SUBVOL_GETFLAGS and BTRFS_IOC_SUBVOL_SETFLAGS"
)]

pub mod quota;
pub mod subvolume;

use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::ioctl::Request;

/// linux/magic.h.
const BTRFS_SUPER_MAGIC: u32 = 0x9123_683e;
/// `_IOR(0x94, 25, u64)`, `_IOW(0x94, 26, u64)` of linux/btrfs.h.
// SAFETY: the argument is one `__u64`.
const BTRFS_IOC_SUBVOL_GETFLAGS: Request<u64> = unsafe { Request::new(0x8008_9419) };
// SAFETY: the same.
const BTRFS_IOC_SUBVOL_SETFLAGS: Request<u64> = unsafe { Request::new(0x4008_941a) };
const BTRFS_SUBVOL_RDONLY: u64 = 1 << 1;

/// Whether `file`, which may be O_PATH, is on Btrfs.
pub fn is_btrfs(file: impl AsFd) -> rustix::io::Result<bool> {
    Ok(u32::try_from(rustix::fs::fstatfs(file)?.f_type) == Ok(BTRFS_SUPER_MAGIC))
}

/// The approximate metadata of a name of `length` bytes: three items (two of the directory, one of
/// the inode) of about 60 bytes plus the name each, stored twice (mkfs.btrfs' default for
/// metadata).
pub fn bytes_of_name(length: usize) -> u64 {
    6 * (u64::try_from(length).unwrap_or(u64::MAX / 8) + 60)
}

/// The size of an empty subvolume: a tree of one node, stored twice.
pub const BYTES_OF_SUBVOLUME: u64 = 32 << 10;
/// The inode number of a subvolume's root (BTRFS_FIRST_FREE_OBJECTID).
pub const INODE_OF_SUBVOLUME: u64 = 256;

/// Makes the subvolume with the root `directory`, open for reading, writable. Returns whether it
/// was read-only; false on other file systems and for any other directory.
pub(crate) fn make_writable(directory: impl AsFd) -> rustix::io::Result<bool> {
    let directory = directory.as_fd();
    if !is_btrfs(directory)? {
        return Ok(false);
    }
    let mut flags = 0;
    match BTRFS_IOC_SUBVOL_GETFLAGS.send(directory, &mut flags) {
        // Not the root of a subvolume.
        Err(Errno::INVAL) => return Ok(false),
        asked => asked?,
    }
    if flags & BTRFS_SUBVOL_RDONLY == 0 {
        return Ok(false);
    }
    flags &= !BTRFS_SUBVOL_RDONLY;
    BTRFS_IOC_SUBVOL_SETFLAGS.send(directory, &mut flags)?;
    Ok(true)
}

#[cfg(test)]
pub(crate) mod tests;
