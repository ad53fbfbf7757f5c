//! Files by descriptor, never by path: uses an O_PATH descriptor where the kernel needs a name, and
//! distinguishes successive files with the same inode number.
//!
//! Errors of single files are plain errnos: they go to an application that knows its request.

#![expect(unsafe_code, reason = "no crate wraps name_to_handle_at(2) and open_by_handle_at(2)")]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, XattrFlags};
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

    /// For one call. More calls are faster with [`Self::open_xattrs`].
    pub fn xattrs<'file>(&self, file: BorrowedFd<'file>) -> Xattrs<'file> {
        Xattrs::Named(file)
    }

    /// For several calls, with a request about `name`: opens the file, if that has no effect on others, as
    /// opening a FIFO or a device has. These have no `user.*` attributes (fs/xattr.c,
    /// `xattr_permission`), so no request asks for one.
    pub fn open_xattrs<'file>(&self, file: BorrowedFd<'file>, name: &CStr) -> Xattrs<'file> {
        let is_plain = || {
            let kind = rustix::fs::fstat(file).map(|found| FileType::from_raw_mode(found.st_mode));
            matches!(kind, Ok(FileType::RegularFile | FileType::Directory))
        };
        if !name.to_bytes().starts_with(b"user.") && !is_plain() {
            return Xattrs::Named(file);
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        // It may not be opened, or there are too many descriptors.
        self.reopen(file, flags).map_or(Xattrs::Named(file), Xattrs::Open)
    }
}

/// The extended attributes of one file (xattr(7)).
#[derive(Debug)]
pub enum Xattrs<'file> {
    /// By its name in the working directory, which each call looks up: see [`DescriptorDir`].
    Named(BorrowedFd<'file>),
    Open(OwnedFd),
}

impl Xattrs<'_> {
    pub fn set(&self, name: &CStr, value: &[u8], flags: XattrFlags) -> rustix::io::Result<()> {
        match self {
            Self::Named(file) => rustix::fs::setxattr(DecInt::from_fd(file), name, value, flags),
            Self::Open(file) => rustix::fs::fsetxattr(file, name, value, flags),
        }
    }

    /// The value, at most `size` bytes (`ERANGE` if it is longer).
    pub fn get(&self, name: &CStr, size: usize) -> rustix::io::Result<Vec<u8>> {
        let mut value = vec![0; size];
        let length = match self {
            Self::Named(file) => rustix::fs::getxattr(DecInt::from_fd(file), name, &mut value)?,
            Self::Open(file) => rustix::fs::fgetxattr(file, name, &mut value)?,
        };
        value.truncate(length);
        Ok(value)
    }

    pub fn size(&self, name: &CStr) -> rustix::io::Result<usize> {
        match self {
            Self::Named(file) => rustix::fs::getxattr_query(DecInt::from_fd(file), name),
            Self::Open(file) => rustix::fs::fgetxattr_query(file, name),
        }
    }

    /// The names, each ended by a zero byte, at most `size` bytes together.
    pub fn names(&self, size: usize) -> rustix::io::Result<Vec<u8>> {
        let mut names = vec![0; size];
        let length = match self {
            Self::Named(file) => rustix::fs::listxattr(DecInt::from_fd(file), &mut names)?,
            Self::Open(file) => rustix::fs::flistxattr(file, &mut names)?,
        };
        names.truncate(length);
        Ok(names)
    }

    /// All names, each ended by a zero byte: by one call, unless they are unusually long.
    pub fn all_names(&self) -> rustix::io::Result<Vec<u8>> {
        const USUAL_BYTES: usize = 512;
        match self.names(USUAL_BYTES) {
            Err(Errno::RANGE) => self.names(self.names_size()?),
            names => names,
        }
    }

    pub fn names_size(&self) -> rustix::io::Result<usize> {
        match self {
            Self::Named(file) => rustix::fs::listxattr_query(DecInt::from_fd(file)),
            Self::Open(file) => rustix::fs::flistxattr_query(file),
        }
    }

    pub fn remove(&self, name: &CStr) -> rustix::io::Result<()> {
        match self {
            Self::Named(file) => rustix::fs::removexattr(DecInt::from_fd(file), name),
            Self::Open(file) => rustix::fs::fremovexattr(file, name),
        }
    }
}

impl AsFd for DescriptorDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// FILEID_INO64_GEN of linux/exportfs.h.
const FILEID_INO64_GEN: i32 = 0x81;
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

const LOWER_HALF: u64 = 0xffff_ffff;

/// Opens a file of a FUSE mount by its node id, if the kernel knows the node (CAP_DAC_READ_SEARCH): else
/// `ESTALE`. No name is looked up. `generation`: that of the node's entry, of which the kernel compares the
/// lower half. `mount`: any file of it, not O_PATH.
pub fn open_fuse_node(
    mount: BorrowedFd<'_>,
    node: u64,
    generation: u64,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    // fuse_encode_fh of fs/fuse/inode.c: the id, upper half first, then the generation.
    let halves = [node >> 32, node & LOWER_HALF, generation & LOWER_HALF]
        .map(|half| u32::try_from(half).unwrap_or_default().to_ne_bytes());
    let mut own = FileHandle {
        handle_bytes: 12,
        handle_type: FILEID_INO64_GEN,
        handle: [0; MAX_HANDLE_BYTES as usize],
    };
    for (at, half) in own.handle.chunks_exact_mut(4).zip(halves) {
        at.copy_from_slice(&half);
    }
    let flags = (flags | OFlags::CLOEXEC).bits();
    // SAFETY: `own` is a file_handle with space for more bytes than its length field says.
    let opened =
        unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut own, flags) };
    match i32::try_from(opened) {
        // SAFETY: a new descriptor that nothing else owns.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(last_errno()),
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
        return Err(last_errno());
    }
    let length = handle.handle_bytes.min(MAX_HANDLE_BYTES) as usize;
    Ok(fnv1a(handle.handle_type, &handle.handle[..length]))
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
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
    use std::ffi::CString;

    use super::*;
    use rustix::fs::CWD;

    #[test]
    fn a_generation_is_the_files_own_by_name_and_by_descriptor() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(dir.path().join("a"), "").unwrap();
        std::fs::write(dir.path().join("b"), "").unwrap();
        let directory = open_path(dir.path());
        let by_name = |name| generation(directory.as_fd(), name).unwrap();
        let a = open_path(&dir.path().join("a"));
        assert_eq!(generation(a.as_fd(), c"").unwrap(), by_name(c"a"));
        assert_ne!(by_name(c"a"), by_name(c"b"));
    }

    #[test]
    fn attributes_are_the_same_by_name_and_by_descriptor() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let file = open_path(&dir.path().join("file"));
        let descriptors = DescriptorDir::open().unwrap();
        let (named, open) =
            (descriptors.xattrs(file.as_fd()), descriptors.open_xattrs(file.as_fd(), c"user.key"));
        assert!(matches!((&named, &open), (Xattrs::Named(_), Xattrs::Open(_))));
        let name = c"user.key";
        for (one, other) in [(&named, &open), (&open, &named)] {
            one.set(name, b"value", XattrFlags::CREATE).unwrap();
            assert_eq!(other.set(name, b"", XattrFlags::CREATE), Err(Errno::EXIST));
            assert_eq!((other.size(name), other.get(name, 5)), (Ok(5), Ok(b"value".to_vec())));
            assert_eq!(other.get(name, 4), Err(Errno::RANGE));
            assert_eq!((other.names_size(), other.names(9)), (Ok(9), Ok(b"user.key\0".to_vec())));
            assert_eq!(other.all_names(), Ok(b"user.key\0".to_vec()));
            let long = CString::new(format!("user.{}", "x".repeat(200))).unwrap();
            let longs =
                [1_u8, 2, 3].map(|last| CString::new([long.to_bytes(), &[b'a' + last]].concat()).unwrap());
            longs.iter().for_each(|name| one.set(name, b"", XattrFlags::CREATE).unwrap());
            assert_eq!(other.all_names().unwrap().len(), 9 + 3 * 207);
            longs.iter().for_each(|name| one.remove(name).unwrap());
            other.remove(name).unwrap();
            assert_eq!((one.size(name), one.remove(name)), (Err(Errno::NODATA), Err(Errno::NODATA)));
        }
    }

    #[test]
    fn a_file_whose_open_has_an_effect_on_others_is_not_opened_for_its_attributes() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let fifo = open_path(&path);
        let found = DescriptorDir::open().unwrap();
        let found = found.open_xattrs(fifo.as_fd(), c"security.key");
        assert!(matches!(found, Xattrs::Named(_)));
        // Only a FIFO without a reader answers so.
        let writes = OFlags::WRONLY | OFlags::NONBLOCK;
        assert_eq!(rustix::fs::openat(CWD, &path, writes, Mode::empty()).unwrap_err(), Errno::NXIO);
        assert_eq!(found.names_size(), Ok(0));
    }

    fn open_path(path: &Path) -> OwnedFd {
        rustix::fs::openat(CWD, path, OFlags::PATH, Mode::empty()).unwrap()
    }
}
