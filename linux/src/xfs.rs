//! How xfs allocates for a file whose blocks another one shares.

use std::os::fd::AsFd;

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

fn errno(e: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(e as i32)
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
