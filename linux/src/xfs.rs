//! How xfs allocates for a file whose blocks another one shares.

#![expect(unsafe_code, reason = "no crate wraps FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR")]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

/// `struct fsxattr` (linux/fs.h), sizes in bytes.
#[repr(C)]
#[derive(Debug, Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    unused: [u8; 8],
}

/// `_IOR('X', 31, struct fsxattr)`, `_IOW('X', 32, struct fsxattr)`.
const FS_IOC_FSGETXATTR: libc::c_ulong = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::c_ulong = 0x401c_5820;
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
    let mut attributes = Attributes::default();
    ask(directory.as_raw_fd(), FS_IOC_FSGETXATTR, &mut attributes)?;
    if attributes.flags & FS_XFLAG_COWEXTSIZE != 0 {
        return Ok(true);
    }
    attributes.flags |= FS_XFLAG_COWEXTSIZE;
    attributes.cow_extent_size = u32::try_from(kind.f_bsize).map_err(|_| Errno::INVAL)?;
    match ask(directory.as_raw_fd(), FS_IOC_FSSETXATTR, &mut attributes) {
        // Made without reflink.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(false),
        other => other.map(|()| true),
    }
}

fn ask(fd: i32, what: libc::c_ulong, attributes: &mut Attributes) -> rustix::io::Result<()> {
    // SAFETY: `attributes` has the layout and size (28 bytes) that both requests
    // say in their number, and is ours alone during the call.
    let done = unsafe { libc::ioctl(fd, what as libc::Ioctl, std::ptr::from_mut(attributes)) };
    if done == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(nix::errno::Errno::last_raw())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_another_file_system_there_is_nothing_to_choose() {
        assert_eq!(size_of::<Attributes>(), 28);
        let proc = std::fs::File::open("/proc").unwrap();
        assert_eq!(copy_single_blocks_below(&proc), Ok(false));
    }
}
