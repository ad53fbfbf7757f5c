//! xfs: allocation for files with shared blocks, and its limit of inodes.

#![expect(unsafe_code, reason = "names the structure of XFS_IOC_FSGEOMETRY_V1")]

use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::fsxattr;
use crate::ioctl::Request;

const FS_XFLAG_COWEXTSIZE: u32 = 0x0001_0000;
const XFS_SUPER_MAGIC: u32 = 0x5846_5342;

/// Makes files created below `directory`, open for reading, allocate single blocks when shared ones
/// are overwritten. By default, xfs allocates 128 KiB ahead of the first block and frees the rest
/// minutes later.
///
/// Returns whether that is in effect: not on another file system, nor on one without shared blocks.
/// An existing size setting is not changed.
pub fn copy_single_blocks_below(directory: impl AsFd) -> rustix::io::Result<bool> {
    let directory = directory.as_fd();
    if !is_xfs(directory)? {
        return Ok(false);
    }
    let mut attributes = fsxattr::get(directory)?;
    if attributes.flags & FS_XFLAG_COWEXTSIZE != 0 {
        return Ok(true);
    }
    attributes.flags |= FS_XFLAG_COWEXTSIZE;
    let block = rustix::fs::fstatfs(directory)?.f_bsize;
    attributes.cow_extent_size = u32::try_from(block).map_err(|_| Errno::INVAL)?;
    match fsxattr::set(directory, attributes) {
        // Made without reflink.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
        other => other.map(|()| true),
    }
}

/// `struct xfs_fsop_geom_v1` (fs/xfs/libxfs/xfs_fs.h).
#[repr(C)]
#[derive(Default)]
struct Geometry {
    block_bytes: u32,
    unused: [u32; 5],
    inode_bytes: u32,
    most_inodes_percent: u32,
    data_blocks: u64,
    also_unused: [u64; 9],
}

/// `_IOR('X', 100, struct xfs_fsop_geom_v1)`.
// SAFETY: `Geometry` is that structure, all numbers.
const XFS_IOC_FSGEOMETRY_V1: Request<Geometry> = unsafe { Request::new(0x8070_5864) };

/// The most inodes that the file system of `directory`, open for reading, can have; `None` if all
/// of its space may become inodes. `ENOTTY` on another file system.
pub fn most_inodes(directory: impl AsFd) -> rustix::io::Result<Option<u64>> {
    let mut geometry = Geometry::default();
    XFS_IOC_FSGEOMETRY_V1.send(directory, &mut geometry)?;
    let Geometry { block_bytes, inode_bytes, most_inodes_percent, data_blocks, .. } = geometry;
    if most_inodes_percent == 0 || inode_bytes == 0 {
        return Ok(None);
    }
    let blocks = data_blocks / 100 * u64::from(most_inodes_percent);
    Ok(Some(blocks * u64::from(block_bytes) / u64::from(inode_bytes)))
}

/// Whether `directory` is on xfs.
pub fn is_xfs(directory: impl AsFd) -> rustix::io::Result<bool> {
    Ok(u32::try_from(rustix::fs::fstatfs(directory)?.f_type) == Ok(XFS_SUPER_MAGIC))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_another_file_system_there_is_nothing_to_choose() {
        let proc = std::fs::File::open("/proc").unwrap();
        assert_eq!(copy_single_blocks_below(&proc), Ok(false));
    }
}
