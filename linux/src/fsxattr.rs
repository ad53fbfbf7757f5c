//! File attributes that XFS and ext4 keep beside the mode: `struct fsxattr` of linux/fs.h, read and
//! written as a whole by ioctl(2).

#![expect(unsafe_code, reason = "names the structure of FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR")]

use std::os::fd::AsFd;

use crate::ioctl::Request;

/// Sizes in bytes.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Attributes {
    pub(crate) flags: u32,
    extent_size: u32,
    extents: u32,
    pub(crate) project: u32,
    pub(crate) cow_extent_size: u32,
    unused: [u8; 8],
}

/// `_IOR('X', 31, struct fsxattr)`, `_IOW('X', 32, struct fsxattr)`.
// SAFETY: `Attributes` is `struct fsxattr`, all numbers.
const FS_IOC_FSGETXATTR: Request<Attributes> = unsafe { Request::new(0x801c_581f) };
// SAFETY: the same.
const FS_IOC_FSSETXATTR: Request<Attributes> = unsafe { Request::new(0x401c_5820) };

/// The attributes of a file or directory that is open for reading.
pub(crate) fn get(file: impl AsFd) -> rustix::io::Result<Attributes> {
    let mut attributes = Attributes::default();
    FS_IOC_FSGETXATTR.send(file, &mut attributes)?;
    Ok(attributes)
}

pub(crate) fn set(file: impl AsFd, mut attributes: Attributes) -> rustix::io::Result<()> {
    FS_IOC_FSSETXATTR.send(file, &mut attributes)
}
