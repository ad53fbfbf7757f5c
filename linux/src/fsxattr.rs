//! Attributes of files that XFS and ext4 keep beside the mode: `struct fsxattr`
//! of linux/fs.h, read and written as a whole by ioctl(2).

#![expect(unsafe_code, reason = "no crate wraps FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR")]

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

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
const FS_IOC_FSGETXATTR: libc::c_ulong = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::c_ulong = 0x401c_5820;

/// The attributes of a file or directory that is open for reading.
pub(crate) fn get(file: impl AsFd) -> nix::Result<Attributes> {
    let mut attributes = Attributes::default();
    request(file, FS_IOC_FSGETXATTR, &mut attributes)?;
    Ok(attributes)
}

pub(crate) fn set(file: impl AsFd, mut attributes: Attributes) -> nix::Result<()> {
    request(file, FS_IOC_FSSETXATTR, &mut attributes)
}

fn request(file: impl AsFd, what: libc::c_ulong, attributes: &mut Attributes) -> nix::Result<()> {
    // SAFETY: `attributes` has the layout and size (28 bytes) that both requests
    // say in their number, and is ours alone during the call.
    let done =
        unsafe { libc::ioctl(file.as_fd().as_raw_fd(), what as libc::Ioctl, std::ptr::from_mut(attributes)) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_has_the_size_that_the_requests_name() {
        assert_eq!(size_of::<Attributes>(), 28);
    }
}
