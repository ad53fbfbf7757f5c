//! When what is written need not pass by the kernel's pages of the file.
//!
//! write(2) of a cached file copies the data to the kernel's pages, from which the daemon reads them. Past the
//! pages, one copy fewer is made, the first write to a file needs no request for `security.capability`, and a
//! short answer reaches the caller. A later read asks the daemon once.
//!
//! Only handles that are open for writing alone: no mapping can be made of them (mm/mmap.c, `do_mmap`).

use linux::release::Release;
use rustix::fs::OFlags;

/// Whether the kernel discards its pages of what was written past them also after the write, so that a read at
/// the same time cannot leave the earlier content there (fs/fuse/file.c, `fuse_direct_io`): since Linux 6.19,
/// and in the series 6.12 and 6.18 since these.
#[must_use]
pub fn follow_bypassing_writes(kernel: Release) -> bool {
    match (kernel.major, kernel.minor) {
        (6, 12) => kernel.patch >= 64,
        (6, 18) => kernel.patch >= 3,
        version => version >= (6, 19),
    }
}

/// Whether a file that is open with `flags` cannot be read.
pub(crate) fn only_writes(flags: OFlags) -> bool {
    flags & OFlags::RWMODE == OFlags::WRONLY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_bypass_pages_only_where_the_kernel_discards_them_afterwards() {
        for ((major, minor, patch), follow) in [
            ((6, 1, 170), false),
            ((6, 6, 200), false),
            ((6, 12, 63), false),
            ((6, 12, 64), true),
            ((6, 17, 90), false),
            ((6, 18, 2), false),
            ((6, 18, 3), true),
            ((6, 19, 0), true),
            ((7, 0, 0), true),
        ] {
            let kernel = Release::new(major, minor, patch);
            assert_eq!(follow_bypassing_writes(kernel), follow, "{kernel}");
        }
    }
}
