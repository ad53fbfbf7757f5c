//! The errors of requests: the kernel's errno from the backing file, unchanged, or one of ours.

use rustix::io::Errno;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

pub(crate) fn from_nix(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}
