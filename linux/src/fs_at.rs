//! Files by descriptor, never by path: uses an O_PATH descriptor where the kernel needs a name, and
//! distinguishes successive files with the same inode number.
//!
//! Errors of single files are plain errnos: they go to an application that knows its request.

#![expect(unsafe_code, reason = "no crate wraps name_to_handle_at(2)")]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use rustix::path::DecInt;

use crate::{Error, Result, mount};

const PROC_SELF_FD: &str = "/proc/self/fd";

/// The process's own /proc/self/fd. There, descriptor N has the name `N`; following that name opens
/// the file anew (proc(5)), even a symbolic link or a file without any other name.
///
/// It also becomes the process's working directory: the xattr calls have no *at form before Linux
/// 6.13, so they use the relative name. No other code may call chdir(2).
#[derive(Debug)]
pub struct DescriptorDir {
    fd: OwnedFd,
}

impl DescriptorDir {
    /// Opens the directory in this mount namespace.
    pub fn open() -> Result<Self> {
        let path = Path::new(PROC_SELF_FD);
        rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| Error::at("open", path, e))
            .and_then(Self::enter)
    }

    /// Opens a detached mount of this directory only (CAP_SYS_ADMIN): it is in no mount namespace,
    /// and `..` does not lead to the rest of /proc.
    pub fn open_detached() -> Result<Self> {
        mount::open_tree_clone(Path::new(PROC_SELF_FD)).and_then(Self::enter)
    }

    fn enter(fd: OwnedFd) -> Result<Self> {
        let directory = Self { fd };
        directory.make_working_directory()?;
        Ok(directory)
    }

    /// Must be repeated after pivot_root(2), which changes working directories.
    pub fn make_working_directory(&self) -> Result<()> {
        rustix::process::fchdir(&self.fd).map_err(|e| Error::new("change directory to", PROC_SELF_FD, e))
    }

    /// Opens the same file again with `flags` (its mode is checked again).
    pub fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        // The name is a link: O_NOFOLLOW would open the link.
        let flags = (flags - OFlags::NOFOLLOW) | OFlags::CLOEXEC;
        rustix::fs::openat(&self.fd, DecInt::from_fd(file), flags, Mode::empty())
    }

    /// chmod(2); `EOPNOTSUPP` on a symbolic link.
    pub fn chmod(&self, file: BorrowedFd<'_>, mode: Mode) -> rustix::io::Result<()> {
        rustix::fs::chmodat(&self.fd, DecInt::from_fd(file), mode, AtFlags::empty())
    }

    /// Makes a further hard link to `file`.
    pub fn link(
        &self,
        file: BorrowedFd<'_>,
        directory: BorrowedFd<'_>,
        name: &CStr,
    ) -> rustix::io::Result<()> {
        rustix::fs::linkat(&self.fd, DecInt::from_fd(file), directory, name, AtFlags::SYMLINK_FOLLOW)
    }

    pub fn set_xattr(
        &self,
        file: BorrowedFd<'_>,
        name: &CStr,
        value: &[u8],
        flags: XattrFlags,
    ) -> rustix::io::Result<()> {
        rustix::fs::setxattr(DecInt::from_fd(file), name, value, flags)
    }

    /// The value, at most `size` bytes (`ERANGE` if it is longer).
    pub fn xattr(&self, file: BorrowedFd<'_>, name: &CStr, size: usize) -> rustix::io::Result<Vec<u8>> {
        let mut value = vec![0; size];
        let length = rustix::fs::getxattr(DecInt::from_fd(file), name, &mut value)?;
        value.truncate(length);
        Ok(value)
    }

    pub fn xattr_size(&self, file: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<usize> {
        rustix::fs::getxattr_query(DecInt::from_fd(file), name)
    }

    /// The names, each ended by a zero byte, at most `size` bytes together.
    pub fn xattr_names(&self, file: BorrowedFd<'_>, size: usize) -> rustix::io::Result<Vec<u8>> {
        let mut names = vec![0; size];
        let length = rustix::fs::listxattr(DecInt::from_fd(file), &mut names)?;
        names.truncate(length);
        Ok(names)
    }

    pub fn xattr_names_size(&self, file: BorrowedFd<'_>) -> rustix::io::Result<usize> {
        rustix::fs::listxattr_query(DecInt::from_fd(file))
    }

    pub fn remove_xattr(&self, file: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<()> {
        rustix::fs::removexattr(DecInt::from_fd(file), name)
    }
}

impl AsFd for DescriptorDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// MAX_HANDLE_SZ of linux/fs.h.
const MAX_HANDLE_BYTES: u32 = 128;
/// A handle that only identifies a file, for file systems that cannot open by handle (Linux 6.5).
const AT_HANDLE_FID: libc::c_int = 0x200;

/// `struct file_handle`, large enough for any file system.
#[repr(C)]
struct FileHandle {
    handle_bytes: u32,
    handle_type: i32,
    handle: [u8; MAX_HANDLE_BYTES as usize],
}

/// A number that differs between two files of one file system that had the same inode number one
/// after the other: a digest of the file handle, which contains the inode's generation. It is the
/// same in every process and after every restart. An empty `name` means `file` itself; otherwise
/// that entry of the directory `file`; a symbolic link is not followed. `EOPNOTSUPP` if the file
/// system has no handles.
pub fn generation(file: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<u64> {
    let own = if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    match name_to_handle(file, name, own) {
        Err(Errno::OPNOTSUPP) => match name_to_handle(file, name, own | AT_HANDLE_FID) {
            // An older kernel, which lacks the flag.
            Err(Errno::INVAL) => Err(Errno::OPNOTSUPP),
            other => other,
        },
        other => other,
    }
}

fn name_to_handle(file: BorrowedFd<'_>, name: &CStr, flags: libc::c_int) -> rustix::io::Result<u64> {
    let mut handle =
        FileHandle { handle_bytes: MAX_HANDLE_BYTES, handle_type: 0, handle: [0; MAX_HANDLE_BYTES as usize] };
    let mut mount_id: libc::c_int = 0;
    // SAFETY: `name` ends with NUL, `handle` is a file_handle whose length field
    // has the size of the space behind it, and both out-pointers outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            name.as_ptr(),
            &raw mut handle,
            &raw mut mount_id,
            flags,
        )
    };
    if result != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    let length = handle.handle_bytes.min(MAX_HANDLE_BYTES) as usize;
    Ok(fnv1a(handle.handle_type, &handle.handle[..length]))
}

/// FNV-1a, 64 bits: the number must be the same in another process.
fn fnv1a(kind: i32, bytes: &[u8]) -> u64 {
    kind.to_le_bytes()
        .iter()
        .chain(bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::CWD;

    #[test]
    fn a_generation_is_the_files_own_by_name_and_by_descriptor() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(dir.path().join("a"), "").unwrap();
        std::fs::write(dir.path().join("b"), "").unwrap();
        let open = |path: &Path| rustix::fs::openat(CWD, path, OFlags::PATH, Mode::empty()).unwrap();
        let directory = open(dir.path());
        let by_name = |name| generation(directory.as_fd(), name).unwrap();
        let a = open(&dir.path().join("a"));
        assert_eq!(generation(a.as_fd(), c"").unwrap(), by_name(c"a"));
        assert_ne!(by_name(c"a"), by_name(c"b"));
    }
}
