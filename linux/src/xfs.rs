//! How xfs allocates for a file whose blocks another one shares, and how many inodes
//! it makes.

#![expect(unsafe_code, reason = "no crate wraps XFS_IOC_FSGEOMETRY_V1")]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

use crate::fsxattr;

const FS_XFLAG_COWEXTSIZE: u32 = 0x0001_0000;
const XFS_SUPER_MAGIC: u32 = 0x5846_5342;

/// What is made below `directory` from now on, which is open for reading, gets
/// a block of its own for each shared one that is overwritten: unasked, xfs
/// allocates 128 KiB ahead of the first and takes back the rest minutes later.
///
/// Returns whether it is so: not on another file system, nor on one without
/// shared blocks. A size that somebody has chosen before is left as it is.
pub fn copy_single_blocks_below(directory: impl AsFd) -> rustix::io::Result<bool> {
    let directory = directory.as_fd();
    let kind = rustix::fs::fstatfs(directory)?;
    if u32::try_from(kind.f_type) != Ok(XFS_SUPER_MAGIC) {
        return Ok(false);
    }
    let mut attributes = fsxattr::get(directory).map_err(errno)?;
    if attributes.flags & FS_XFLAG_COWEXTSIZE != 0 {
        return Ok(true);
    }
    attributes.flags |= FS_XFLAG_COWEXTSIZE;
    attributes.cow_extent_size = u32::try_from(kind.f_bsize).map_err(|_| Errno::INVAL)?;
    match fsxattr::set(directory, attributes).map_err(errno) {
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
const XFS_IOC_FSGEOMETRY_V1: libc::c_ulong = 0x8070_5864;

/// How many inodes the file system of `directory`, open for reading, makes at most; `None`
/// where all of its space may become inodes. `ENOTTY` on another file system.
pub fn most_inodes(directory: impl AsFd) -> rustix::io::Result<Option<u64>> {
    let mut geometry = Geometry::default();
    // SAFETY: `geometry` has the layout and size (112 bytes) that the request says in its
    // number, and is ours alone during the call.
    let done = unsafe {
        libc::ioctl(
            directory.as_fd().as_raw_fd(),
            XFS_IOC_FSGEOMETRY_V1 as libc::Ioctl,
            std::ptr::from_mut(&mut geometry),
        )
    };
    if done < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
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

fn errno(e: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(e as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_geometry_has_the_size_that_the_request_names() {
        assert_eq!(size_of::<Geometry>(), 112);
    }

    #[test]
    fn on_another_file_system_there_is_nothing_to_choose() {
        let proc = std::fs::File::open("/proc").unwrap();
        assert_eq!(copy_single_blocks_below(&proc), Ok(false));
    }
}
