//! Which descriptors are held: each is inspected by itself, since its sender may be hostile.
//!
//! Invariant: no call here waits for a file system. A FUSE daemon that does not answer would
//! otherwise stop the keeper, which its successor needs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{getsockopt, sockopt as nix_sockopt};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, SealFlags, Statx, StatxAttributes, StatxFlags,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::PidfdFlags;

use crate::wire::standby::Assignment;
use crate::wire::{Refusal, Role};

/// Major and minor number of /dev/fuse (Documentation/admin-guide/devices.txt).
const FUSE_DEVICE: (u32, u32) = (10, 229);
const MOST_TABLE_BYTES: u64 = 4 << 30;
/// PIDFS_MAGIC of linux/magic.h: the file system of pidfds.
const PIDFS: u64 = 0x5049_4446;
/// A mount or rename elsewhere on the machine interrupts a lookup that may not wait.
const LOOKUPS: usize = 64;

/// Whether the descriptor may be held with this role.
pub fn check(role: Role, fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    let file = File::of(fd)?;
    match role {
        Role::Connection => {
            file.is_not_path_only()?;
            if file.kind() != FileType::CharacterDevice || file.device() != FUSE_DEVICE {
                return Err(Refusal::NotFuseDevice);
            }
            file.is_read_write()
        }
        Role::Directory => {
            file.is_path_only_directory()?;
            is_root_of_detached_mount(fd, &file)
        }
        Role::StateTable => {
            file.is_not_path_only()?;
            file.is_regular()?;
            is_memfd_that_cannot_shrink(fd)?;
            if file.found.stx_size > MOST_TABLE_BYTES {
                return Err(Refusal::TooLarge);
            }
            file.is_read_write()
        }
        Role::UsageFile => {
            file.is_not_path_only()?;
            file.is_regular()?;
            file.is_read_write()
        }
        Role::ParkedMount => file.is_path_only_directory(),
        Role::ControlListener => is_listener(fd, &file, SocketType::SEQPACKET),
        Role::MetricsListener => is_listener(fd, &file, SocketType::STREAM),
        Role::Assignment => {
            file.is_not_path_only()?;
            file.is_regular()?;
            read_assignment(fd).map(drop)
        }
        Role::Daemon => is_pidfd(&file),
    }
}

/// Reads what is held as [`Role::Assignment`], which cannot change.
pub(crate) fn read_assignment(fd: BorrowedFd<'_>) -> Result<Assignment, Refusal> {
    let needed = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| Refusal::NotMemfd)?;
    if !seals.contains(needed) {
        return Err(Refusal::NotAssignment);
    }
    // One byte more, so that a longer one is known.
    let mut bytes = vec![0; Assignment::MOST_BYTES + 1];
    let mut len = 0;
    while len < bytes.len() {
        match rustix::io::pread(fd, &mut bytes[len..], len as u64) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(Errno::INTR) => {}
            Err(_) => return Err(Refusal::NotInspected),
        }
    }
    Assignment::decode(&bytes[..len]).ok_or(Refusal::NotAssignment)
}

/// Whether the descriptor may be held as the socket of a spare daemon; a pidfd of that daemon.
pub(crate) fn check_spare(fd: BorrowedFd<'_>) -> Result<OwnedFd, Refusal> {
    let file = File::of(fd)?;
    let is_listening = unix_socket(fd, &file, SocketType::SEQPACKET).ok_or(Refusal::NotSpare)?;
    let peer = getsockopt(&fd, nix_sockopt::PeerCredentials).map_err(|_| Refusal::NotSpare)?;
    let pidfd = getsockopt(&fd, nix_sockopt::PeerPidfd).map_err(|_| Refusal::NotSpare)?;
    if is_listening || peer.uid() != 0 {
        return Err(Refusal::NotSpare);
    }
    is_pidfd(&File::of(pidfd.as_fd())?)?;
    Ok(pidfd)
}

fn is_listener(fd: BorrowedFd<'_>, file: &File, kind: SocketType) -> Result<(), Refusal> {
    if unix_socket(fd, file, kind) == Some(true) { Ok(()) } else { Err(Refusal::NotListener) }
}

/// Whether a unix socket of this type listens; `None` for any other file.
fn unix_socket(fd: BorrowedFd<'_>, file: &File, kind: SocketType) -> Option<bool> {
    if file.kind() != FileType::Socket || file.is_not_path_only().is_err() {
        return None;
    }
    let is_of_kind =
        sockopt::socket_domain(fd).ok()? == AddressFamily::UNIX && sockopt::socket_type(fd).ok()? == kind;
    is_of_kind.then(|| sockopt::socket_acceptconn(fd).ok())?
}

/// Before Linux 6.9, pidfds have no file system of their own, and no other daemon can continue a
/// connection anyway.
fn is_pidfd(file: &File) -> Result<(), Refusal> {
    let refused = |_| Refusal::NotPidfd;
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).map_err(refused)?;
    let device = |found: &Statx| (found.stx_dev_major, found.stx_dev_minor);
    // Not statfs(2) of the descriptor itself, which a FUSE daemon would have to answer.
    let is_pidfs = rustix::fs::fstatfs(&own).is_ok_and(|fs| u64::try_from(fs.f_type) == Ok(PIDFS));
    if !is_pidfs || device(&inspect(own.as_fd())?) != device(&file.found) {
        return Err(Refusal::NotPidfd);
    }
    file.is_not_path_only()?;
    // PIDFD_THREAD: a thread may end before its process.
    if file.flags.contains(OFlags::EXCL) { Err(Refusal::NotPidfd) } else { Ok(()) }
}

/// Whether the descriptor may be held as a removed file. `directory` is the volume's, if it is
/// held: the file must be on the same mount.
pub fn check_removed(fd: BorrowedFd<'_>, directory: Option<BorrowedFd<'_>>) -> Result<(), Refusal> {
    let file = File::of(fd)?;
    match file.kind() {
        FileType::RegularFile | FileType::Directory => {}
        // Open sockets and pipes are not files of a volume, and some can be sent only by
        // descriptor: a socket that is held for its own sender never ends.
        FileType::Symlink | FileType::Fifo | FileType::Socket => file.is_path_only()?,
        _ => return Err(Refusal::Device),
    }
    let Some(directory) = directory else { return Ok(()) };
    if file.mount() == File::of(directory)?.mount() { Ok(()) } else { Err(Refusal::OtherMount) }
}

/// Whether the kernel may read and write the descriptor's file for the volume's users. `directory` is
/// the volume's. Opens of other access modes will follow, so only a daemon that can read and write the
/// file may offer it.
pub fn check_backing(fd: BorrowedFd<'_>, directory: BorrowedFd<'_>) -> Result<(), Refusal> {
    let file = File::of(fd)?;
    file.is_not_path_only()?;
    file.is_regular()?;
    file.is_read_write()?;
    match (file.mount(), File::of(directory)?.mount()) {
        (Some(one), Some(other)) if one == other => Ok(()),
        _ => Err(Refusal::OtherMount),
    }
}

struct File {
    found: Statx,
    flags: OFlags,
}

impl File {
    fn of(fd: BorrowedFd<'_>) -> Result<Self, Refusal> {
        let flags = rustix::fs::fcntl_getfl(fd).map_err(|_| Refusal::NotInspected)?;
        Ok(Self { found: inspect(fd)?, flags })
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.found.stx_mode.into())
    }

    fn device(&self) -> (u32, u32) {
        (self.found.stx_rdev_major, self.found.stx_rdev_minor)
    }

    /// `None` on a kernel without the ids of mounts.
    fn mount(&self) -> Option<u64> {
        let mask = StatxFlags::from_bits_retain(self.found.stx_mask);
        mask.contains(StatxFlags::MNT_ID).then_some(self.found.stx_mnt_id)
    }

    fn is_path_only(&self) -> Result<(), Refusal> {
        if self.flags.contains(OFlags::PATH) { Ok(()) } else { Err(Refusal::NotPathOnly) }
    }

    fn is_not_path_only(&self) -> Result<(), Refusal> {
        if self.flags.contains(OFlags::PATH) { Err(Refusal::PathOnly) } else { Ok(()) }
    }

    fn is_path_only_directory(&self) -> Result<(), Refusal> {
        if self.kind() != FileType::Directory {
            return Err(Refusal::NotDirectory);
        }
        self.is_path_only()
    }

    fn is_regular(&self) -> Result<(), Refusal> {
        if self.kind() == FileType::RegularFile { Ok(()) } else { Err(Refusal::NotRegular) }
    }

    fn is_read_write(&self) -> Result<(), Refusal> {
        if self.flags & OFlags::RWMODE == OFlags::RDWR { Ok(()) } else { Err(Refusal::NotReadWrite) }
    }
}

/// Sends no request to a FUSE daemon or a server (`AT_STATX_DONT_SYNC`).
fn inspect(fd: BorrowedFd<'_>) -> Result<Statx, Refusal> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, c"", flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
        .map_err(|_| Refusal::NotInspected)
}

/// Without this, `..` of a volume's directory could lead to the whole host.
fn is_root_of_detached_mount(fd: BorrowedFd<'_>, own: &File) -> Result<(), Refusal> {
    if !own.found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Err(Refusal::NotDetached);
    }
    let parent = inspect(parent_without_waiting(fd)?.as_fd())?;
    let identity = |s: &Statx| (s.stx_dev_major, s.stx_dev_minor, s.stx_ino, s.stx_mnt_id);
    if identity(&own.found) == identity(&parent) { Ok(()) } else { Err(Refusal::NotDetached) }
}

/// RESOLVE_CACHED: a lookup that would send a request, for example for permissions, fails instead.
fn parent_without_waiting(fd: BorrowedFd<'_>) -> Result<OwnedFd, Refusal> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for _ in 0..LOOKUPS {
        match rustix::fs::openat2(fd, c"..", flags, Mode::empty(), ResolveFlags::CACHED) {
            Ok(parent) => return Ok(parent),
            Err(Errno::AGAIN) => {}
            Err(_) => return Err(Refusal::NotInspected),
        }
    }
    Err(Refusal::WouldWait)
}

/// Only files of memfd_create(2) with MFD_ALLOW_SEALING take seals (fcntl(2), F_ADD_SEALS).
fn is_memfd_that_cannot_shrink(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| Refusal::NotMemfd)?;
    if seals.contains(SealFlags::SHRINK) { Ok(()) } else { Err(Refusal::NotSealed) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::fs::{FileExt, symlink};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    use rustix::fs::{CWD, FileType, MemfdFlags, Mode, OFlags, SealFlags, memfd_create};
    use tempfile::TempDir;

    use super::*;

    fn path_only(path: &Path) -> OwnedFd {
        rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    fn table(flags: MemfdFlags, seals: SealFlags) -> File {
        let table = memfd_create("table", flags | MemfdFlags::CLOEXEC).unwrap();
        if !seals.is_empty() {
            rustix::fs::fcntl_add_seals(&table, seals).unwrap();
        }
        File::from(table)
    }

    fn read_write(dir: &TempDir, name: &str) -> OwnedFd {
        let path = dir.path().join(name);
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap().into()
    }

    #[track_caller]
    fn assert_refused(role: Role, fd: impl AsFd, refusal: Refusal) {
        assert_eq!(check(role, fd.as_fd()), Err(refusal), "{role:?}");
    }

    #[test]
    fn a_connection_is_dev_fuse_open_for_reading_and_writing() {
        let device = linux::mount::open_fuse_device().unwrap();
        assert_eq!(check(Role::Connection, device.as_fd()), Ok(()));
        let read_only = File::open("/dev/fuse").unwrap();
        assert_refused(Role::Connection, &read_only, Refusal::NotReadWrite);
        assert_refused(Role::Connection, path_only(Path::new("/dev/fuse")), Refusal::PathOnly);
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert_refused(Role::Connection, &null, Refusal::NotFuseDevice);
        assert_refused(Role::Connection, UnixStream::pair().unwrap().0, Refusal::NotFuseDevice);
        assert_refused(Role::Connection, tempfile::tempfile().unwrap(), Refusal::NotFuseDevice);
    }

    #[test]
    fn a_directory_is_the_root_of_a_detached_mount() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("below")).unwrap();
        let tree = linux::mount::open_tree_clone(dir.path()).unwrap();
        assert_eq!(check(Role::Directory, tree.as_fd()), Ok(()));
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let below = rustix::fs::openat(&tree, "below", flags, Mode::empty()).unwrap();
        assert_refused(Role::Directory, below, Refusal::NotDetached);
        assert_refused(Role::Directory, path_only(dir.path()), Refusal::NotDetached);
        // The root of an attached mount.
        assert_refused(Role::Directory, path_only(Path::new("/proc")), Refusal::NotDetached);
        assert_refused(Role::Directory, File::open(dir.path()).unwrap(), Refusal::NotPathOnly);
        assert_refused(Role::Directory, tempfile::tempfile().unwrap(), Refusal::NotDirectory);
    }

    #[test]
    fn a_state_table_is_a_memfd_that_cannot_shrink() {
        let good = table(MemfdFlags::ALLOW_SEALING, SealFlags::SHRINK | SealFlags::GROW);
        assert_eq!(check(Role::StateTable, good.as_fd()), Ok(()));
        let unsealed = table(MemfdFlags::ALLOW_SEALING, SealFlags::GROW);
        assert_refused(Role::StateTable, &unsealed, Refusal::NotSealed);
        let never_sealed = table(MemfdFlags::empty(), SealFlags::empty());
        assert_refused(Role::StateTable, &never_sealed, Refusal::NotSealed);
        let large = table(MemfdFlags::ALLOW_SEALING, SealFlags::empty());
        large.set_len(MOST_TABLE_BYTES + 1).unwrap();
        rustix::fs::fcntl_add_seals(&large, SealFlags::SHRINK).unwrap();
        assert_refused(Role::StateTable, &large, Refusal::TooLarge);
        let of_a_disk = tempfile::tempfile_in("/var/tmp").unwrap();
        of_a_disk.write_at(b"x", 0).unwrap();
        assert_refused(Role::StateTable, &of_a_disk, Refusal::NotMemfd);
        assert_refused(Role::StateTable, File::open("/dev/null").unwrap(), Refusal::NotRegular);
    }

    #[test]
    fn a_usage_file_is_regular_and_open_for_reading_and_writing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(check(Role::UsageFile, read_write(&dir, "usage").as_fd()), Ok(()));
        let path = dir.path().join("usage");
        assert_refused(Role::UsageFile, File::open(&path).unwrap(), Refusal::NotReadWrite);
        assert_refused(Role::UsageFile, path_only(&path), Refusal::PathOnly);
        assert_refused(Role::UsageFile, UnixStream::pair().unwrap().0, Refusal::NotRegular);
    }

    #[test]
    fn a_parked_mount_is_a_path_only_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(check(Role::ParkedMount, path_only(dir.path()).as_fd()), Ok(()));
        assert_refused(Role::ParkedMount, File::open(dir.path()).unwrap(), Refusal::NotPathOnly);
        assert_refused(Role::ParkedMount, tempfile::tempfile().unwrap(), Refusal::NotDirectory);
    }

    #[test]
    fn a_removed_file_is_of_any_kind_but_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("nowhere", at("symlink")).unwrap();
        rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for file in [
            read_write(&dir, "file"),
            path_only(&at("file")),
            path_only(dir.path()),
            File::open(dir.path()).unwrap().into(),
            path_only(&at("socket")),
            path_only(&at("symlink")),
            path_only(&at("fifo")),
        ] {
            assert_eq!(check_removed(file.as_fd(), None), Ok(()), "{file:?}");
        }
        for (file, refusal) in [
            (File::open("/dev/null").unwrap().into(), Refusal::Device),
            (path_only(Path::new("/dev/null")), Refusal::Device),
            (linux::mount::open_fuse_device().unwrap(), Refusal::Device),
            (UnixStream::pair().unwrap().0.into(), Refusal::NotPathOnly),
            (std::io::pipe().unwrap().0.into(), Refusal::NotPathOnly),
        ] {
            assert_eq!(check_removed(file.as_fd(), None), Err(refusal), "{file:?}");
        }
    }

    #[test]
    fn a_removed_file_is_on_the_mount_of_the_volumes_directory() {
        let dir = tempfile::tempdir().unwrap();
        drop(read_write(&dir, "file"));
        let tree = linux::mount::open_tree_clone(dir.path()).unwrap();
        let inside =
            rustix::fs::openat(&tree, "file", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert_eq!(check_removed(inside.as_fd(), Some(tree.as_fd())), Ok(()));
        let outside = read_write(&dir, "file");
        assert_eq!(check_removed(outside.as_fd(), Some(tree.as_fd())), Err(Refusal::OtherMount));
    }

    #[test]
    fn a_backing_file_is_regular_and_open_for_reading_and_writing_on_the_mount_of_the_directory() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        drop(read_write(&dir, "file"));
        rustix::fs::mknodat(CWD, dir.path().join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let tree = linux::mount::open_tree_clone(dir.path()).unwrap();
        let inside = |name: &str, flags: OFlags| {
            rustix::fs::openat(&tree, name, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
        };
        let check = |file: OwnedFd| check_backing(file.as_fd(), tree.as_fd());
        assert_eq!(check(inside("file", OFlags::RDWR)), Ok(()));
        assert_eq!(check(inside("file", OFlags::PATH)), Err(Refusal::PathOnly));
        assert_eq!(check(inside("file", OFlags::RDONLY)), Err(Refusal::NotReadWrite));
        assert_eq!(check(inside("file", OFlags::WRONLY)), Err(Refusal::NotReadWrite));
        assert_eq!(check(inside(".", OFlags::RDONLY)), Err(Refusal::NotRegular));
        assert_eq!(check(inside("fifo", OFlags::RDWR)), Err(Refusal::NotRegular));
        assert_eq!(check(read_write(&dir, "file")), Err(Refusal::OtherMount));
        let device = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert_eq!(check(device.into()), Err(Refusal::NotRegular));
    }
}
