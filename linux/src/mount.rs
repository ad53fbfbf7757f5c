//! Mounting and unmounting: mount(2), umount2(2), open_tree(2), move_mount(2), and aborting a FUSE
//! connection.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags};
use nix::sys::statfs::FsType;
use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};

use crate::{Error, Result};

/// Restrictions of a mount, in addition to those of its file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountFlags {
    pub read_only: bool,
    pub nosuid: bool,
    pub nodev: bool,
    pub noexec: bool,
    pub access_times: AccessTimes,
    pub nodiratime: bool,
    /// Writes wait for the storage. Belongs to the file system: [`remount_bind`] does not set it.
    pub sync: bool,
}

/// When a read updates the file's access time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AccessTimes {
    /// The kernel's default, relatime; on a remount, unchanged.
    #[default]
    Kernels,
    Never,
    /// If the file was changed since, or once a day.
    Relative,
}

impl MountFlags {
    fn ms_flags(self) -> MsFlags {
        [
            (self.read_only, MsFlags::MS_RDONLY),
            (self.nosuid, MsFlags::MS_NOSUID),
            (self.nodev, MsFlags::MS_NODEV),
            (self.noexec, MsFlags::MS_NOEXEC),
            (self.access_times == AccessTimes::Never, MsFlags::MS_NOATIME),
            (self.access_times == AccessTimes::Relative, MsFlags::MS_RELATIME),
            (self.nodiratime, MsFlags::MS_NODIRATIME),
            (self.sync, MsFlags::MS_SYNCHRONOUS),
        ]
        .into_iter()
        .filter_map(|(wanted, flag)| wanted.then_some(flag))
        .collect()
    }

    /// The flags for fsmount(2), whose default is relatime. `sync` belongs to the file system.
    fn attributes(self) -> MountAttrFlags {
        [
            (self.read_only, MountAttrFlags::MOUNT_ATTR_RDONLY),
            (self.nosuid, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (self.nodev, MountAttrFlags::MOUNT_ATTR_NODEV),
            (self.noexec, MountAttrFlags::MOUNT_ATTR_NOEXEC),
            (self.access_times == AccessTimes::Never, MountAttrFlags::MOUNT_ATTR_NOATIME),
            (self.nodiratime, MountAttrFlags::MOUNT_ATTR_NODIRATIME),
        ]
        .into_iter()
        .filter_map(|(wanted, flag)| wanted.then_some(flag))
        .collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmountMode {
    /// `EBUSY` while it is in use.
    Plain,
    /// MNT_DETACH: leaves the tree at once and is freed when unused. On a FUSE mount the connection
    /// outlives it: abort it first.
    Detach,
    /// MNT_FORCE: for FUSE, aborts the connection, then unmounts.
    Force,
}

/// What mountinfo shows of a FUSE mount: `fuse.<subtype>` and `source`.
#[derive(Debug, Clone, Copy)]
pub struct FuseName<'a> {
    pub source: &'a str,
    pub subtype: &'a str,
}

/// How a FUSE connection is mounted (fs/fuse/inode.c, `fuse_fs_parameters`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FuseMountOptions {
    pub flags: MountFlags,
    /// Users other than the mounter have access.
    pub allow_other: bool,
    /// The kernel checks modes and owners, not the daemon.
    pub default_permissions: bool,
}

/// Shows `source` (a file or directory) at `target` too, without the mounts below it.
pub fn bind(source: &Path, target: &Path) -> Result<()> {
    bind_with(source, target, MsFlags::empty())
}

/// Shows `source` at `target` too, with the mounts below it.
pub fn bind_recursive(source: &Path, target: &Path) -> Result<()> {
    bind_with(source, target, MsFlags::MS_REC)
}

fn bind_with(source: &Path, target: &Path, more: MsFlags) -> Result<()> {
    nix::mount::mount(Some(source), target, NONE, MsFlags::MS_BIND | more, NONE)
        .map_err(|e| Error::new("bind mount", format!("{} -> {}", source.display(), target.display()), e))
}

/// Sets exactly `flags` on this mount (not on its file system), and clears all others.
pub fn remount_bind(target: &Path, flags: MountFlags) -> Result<()> {
    let ms_flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags.ms_flags();
    nix::mount::mount(NONE, target, NONE, ms_flags, NONE).map_err(|e| Error::at("remount", target, e))
}

/// mount(2) of a file system; `data` as its options string.
pub fn mount_fs(fs_type: &str, source: &str, target: &Path, flags: MountFlags, data: &str) -> Result<()> {
    nix::mount::mount(Some(source), target, Some(fs_type), flags.ms_flags(), Some(data))
        .map_err(|e| Error::new("mount", format!("{fs_type} on {}", target.display()), e))
}

pub fn unmount(target: &Path, mode: UnmountMode) -> Result<()> {
    let flags = match mode {
        UnmountMode::Plain => MntFlags::empty(),
        UnmountMode::Detach => MntFlags::MNT_DETACH,
        UnmountMode::Force => MntFlags::MNT_FORCE,
    } | MntFlags::UMOUNT_NOFOLLOW;
    nix::mount::umount2(target, flags).map_err(|e| Error::at("unmount", target, e))
}

/// [`unmount`] with [`UnmountMode::Detach`]; a missing path, or one without a mount, is a success.
pub fn unmount_if_mounted(target: &Path) -> Result<()> {
    match unmount(target, UnmountMode::Detach) {
        Err(e) if !matches!(e.errno(), Errno::EINVAL | Errno::ENOENT) => Err(e),
        _ => Ok(()),
    }
}

/// [`remount_bind`] for the mount with its root at the descriptor `root`; errors name it `shown`.
pub fn remount_bind_at(root: impl AsFd, shown: &Path, flags: MountFlags) -> Result<()> {
    let ms_flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags.ms_flags();
    nix::mount::mount(NONE, &by_descriptor(root), NONE, ms_flags, NONE)
        .map_err(|e| Error::at("remount", shown, e))
}

/// [`unmount`] for the mount on `name` in the directory `parent`: only the name is resolved.
/// umount2(2) takes no directory descriptor, so the path leads through /proc. Errors name it
/// `shown`.
pub fn unmount_in(parent: impl AsFd, name: &OsStr, shown: &Path, mode: UnmountMode) -> Result<()> {
    unmount(&by_descriptor(parent).join(name), mode).map_err(|e| Error::at("unmount", shown, e.source))
}

/// Detaches the mount with its root at the descriptor `root` at once (MNT_DETACH). A plain unmount
/// is not possible: the descriptor keeps the mount busy.
pub fn detach(root: impl AsFd, shown: &Path) -> Result<()> {
    nix::mount::umount2(&by_descriptor(root), MntFlags::MNT_DETACH).map_err(|e| Error::at("detach", shown, e))
}

/// The path of an open file now, as mountinfo shows it. Sends no request to a file system.
pub fn path_of(open: impl AsFd) -> Result<PathBuf> {
    let link = by_descriptor(open);
    std::fs::read_link(&link).map_err(|e| Error::at("read link", &link, e))
}

/// A path to an open file, for calls that take no descriptor.
fn by_descriptor(open: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", open.as_fd().as_raw_fd()))
}

/// Mounts and unmounts below `target` no longer propagate in either direction.
pub fn make_private(target: &Path) -> Result<()> {
    propagation("make private", target, MsFlags::MS_PRIVATE | MsFlags::MS_REC)
}

/// Mounts below `target` still propagate from its peers, but not to them.
pub fn make_slave(target: &Path) -> Result<()> {
    propagation("make slave", target, MsFlags::MS_SLAVE | MsFlags::MS_REC)
}

/// Mounts below `target` propagate in both directions.
pub fn make_shared(target: &Path) -> Result<()> {
    propagation("make shared", target, MsFlags::MS_SHARED | MsFlags::MS_REC)
}

fn propagation(op: &'static str, target: &Path, flags: MsFlags) -> Result<()> {
    nix::mount::mount(NONE, target, NONE, flags, NONE).map_err(|e| Error::at(op, target, e))
}

/// A detached copy of the mount at `path`, with its root at `path` and without the mounts below:
/// `..` ends there, and no path of the host leads to it.
pub fn open_tree_clone(path: &Path) -> Result<OwnedFd> {
    rustix::mount::open_tree(
        rustix::fs::CWD,
        path,
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW,
    )
    .map_err(|e| Error::at("open_tree", path, e))
}

/// Attaches a detached mount at `target`.
pub fn move_mount(tree: impl AsFd, target: &Path) -> Result<()> {
    rustix::mount::move_mount(tree, "", rustix::fs::CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|e| Error::at("move_mount", target, e))
}

/// At most this many descriptors of a process are looked at.
const MOST_DESCRIPTORS: usize = 65_536;

/// The minor device number of the FUSE mount whose connection this /dev/fuse is; `None` if it is of
/// no mount, or if the kernel does not report it (before Linux 6.16).
pub fn fuse_connection_of(device: impl AsFd) -> Result<Option<u32>> {
    let path = format!("/proc/self/fdinfo/{}", device.as_fd().as_raw_fd());
    let path = Path::new(&path);
    let text = std::fs::read_to_string(path).map_err(|e| Error::at("read", path, e))?;
    Ok(connection_in(&text))
}

/// Whether a process has the /dev/fuse of the FUSE mount with this minor device number open. False, too, if it has ended,
/// if the kernel does not report it (before Linux 6.16), or if the first 65,536 descriptors are others.
pub fn has_fuse_connection(pid: i32, minor: u32) -> Result<bool> {
    let dir = format!("/proc/{pid}/fdinfo");
    let is_gone = |e: &std::io::Error| {
        e.kind() == std::io::ErrorKind::NotFound || e.raw_os_error() == Some(Errno::ESRCH as i32)
    };
    let failed = |e| Error::at("list", Path::new(&dir), e);
    let entries = match std::fs::read_dir(&dir) {
        Err(e) if is_gone(&e) => return Ok(false),
        entries => entries.map_err(failed)?,
    };
    for entry in entries.take(MOST_DESCRIPTORS) {
        let path = match entry {
            Err(e) if is_gone(&e) => return Ok(false),
            entry => entry.map_err(failed)?.path(),
        };
        // Closed meanwhile, if it cannot be read.
        if std::fs::read_to_string(path).is_ok_and(|text| connection_in(&text) == Some(minor)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// In a file of /proc/PID/fdinfo.
fn connection_in(fdinfo: &str) -> Option<u32> {
    fdinfo.lines().find_map(|line| line.strip_prefix("fuse_connection:"))?.trim().parse().ok()
}

/// The minor device number of a mount's files, as in mountinfo. Sends no request to the file system
/// (statx(2), `AT_STATX_DONT_SYNC`), since a FUSE daemon may be stuck. If a daemon has reported
/// invalid attributes of the root, statx(2) fails with `EIO`; then mountinfo is read.
pub fn minor_of(tree: impl AsFd) -> Result<u32> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    match rustix::fs::statx(&tree, "", flags, StatxFlags::empty()) {
        Ok(found) => Ok(found.stx_dev_minor),
        Err(rustix::io::Errno::IO) => {
            let entry = crate::mountinfo::of_id(id_of(tree)?)?;
            let detached = || Error::new("statx", "a mount", Errno::EIO);
            entry.map(|entry| entry.minor).ok_or_else(detached)
        }
        Err(e) => Err(Error::new("statx", "a mount", e)),
    }
}

/// The id in mountinfo of the mount that `tree` is on, also of a detached one that will keep the
/// id. Sends no request to a FUSE daemon, disk or server (except with 9p, GFS2 and OCFS2, which
/// ignore `AT_STATX_DONT_SYNC`). If statx(2) fails, as for an inode with invalid attributes from a
/// daemon, or lacks such ids (before Linux 5.8), the descriptor's entry in /proc is read.
pub fn id_of(tree: impl AsFd) -> Result<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    match rustix::fs::statx(&tree, c"", flags, StatxFlags::MNT_ID) {
        Ok(found) if StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID) => {
            Ok(found.stx_mnt_id)
        }
        Ok(_) | Err(_) => id_in_fdinfo(tree),
    }
}

fn id_in_fdinfo(tree: impl AsFd) -> Result<u64> {
    let path = format!("/proc/self/fdinfo/{}", tree.as_fd().as_raw_fd());
    let failed = |e: std::io::Error| Error::at("read mount id from", Path::new(&path), e);
    let text = std::fs::read_to_string(&path).map_err(failed)?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()))
}

/// The type of the file system mounted on the directory `path`; `None` if nothing is mounted there.
/// Unlike mountinfo, its cost does not depend on the number of mounts, but it sends a request to
/// the file system: do not use it for daemons' mounts.
pub fn type_at(path: &Path) -> Result<Option<FsType>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Error::at("open", path, e))?;
    let found = rustix::fs::statx(&directory, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())
        .map_err(|e| Error::at("stat", path, e))?;
    if !found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(None);
    }
    let found = nix::sys::statfs::fstatfs(&directory).map_err(|e| Error::at("statfs", path, e))?;
    Ok(Some(found.filesystem_type()))
}

/// A new FUSE connection, not mounted yet.
pub fn open_fuse_device() -> Result<OwnedFd> {
    let path = Path::new("/dev/fuse");
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map(OwnedFd::from)
        .map_err(|e| Error::at("open", path, e))
}

/// Mounts the connection behind `fuse_device` on the directory `target`. The FUSE_INIT request
/// waits for the first reader of the descriptor.
pub fn mount_fuse(
    fuse_device: impl AsFd,
    name: FuseName<'_>,
    target: &Path,
    options: FuseMountOptions,
) -> Result<()> {
    let mut data =
        format!("fd={},rootmode={:o},user_id=0,group_id=0", fuse_device.as_fd().as_raw_fd(), libc::S_IFDIR);
    for (wanted, name) in
        [(options.allow_other, "allow_other"), (options.default_permissions, "default_permissions")]
    {
        if wanted {
            write!(data, ",{name}").expect("a String takes any text");
        }
    }
    mount_fs(&format!("fuse.{}", name.subtype), name.source, target, options.flags, &data)
}

/// [`mount_fuse`] without a target: a detached mount, to be attached with
/// [`crate::rootfs::attach`]. Closing it before that ends the connection.
pub fn new_fuse(fuse_device: impl AsFd, name: FuseName<'_>, options: FuseMountOptions) -> Result<OwnedFd> {
    let failed = |op: &'static str| move |e: rustix::io::Errno| Error::new(op, "fuse", e);
    let context = mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("fsopen"))?;
    let fd = fuse_device.as_fd().as_raw_fd().to_string();
    let root_mode = format!("{:o}", libc::S_IFDIR);
    for (key, value) in [
        ("source", name.source),
        ("subtype", name.subtype),
        ("fd", &fd),
        ("rootmode", &root_mode),
        ("user_id", "0"),
        ("group_id", "0"),
    ] {
        mount::fsconfig_set_string(&context, key, value).map_err(failed("fsconfig"))?;
    }
    let FuseMountOptions { flags, allow_other, default_permissions } = options;
    for (wanted, name) in [
        (allow_other, "allow_other"),
        (default_permissions, "default_permissions"),
        (flags.read_only, "ro"),
        (flags.sync, "sync"),
    ] {
        if wanted {
            mount::fsconfig_set_flag(&context, name).map_err(failed("fsconfig"))?;
        }
    }
    mount::fsconfig_create(&context).map_err(failed("create file system"))?;
    mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags.attributes()).map_err(failed("fsmount"))
}

/// Ends every request of the FUSE connection whose files have the minor device number `minor`:
/// waiting callers get `ECONNABORTED`, later ones `ENOTCONN`. `fusectl` is the mount point of the
/// fusectl file system. A missing connection is a success.
pub fn abort_fuse(fusectl: &Path, minor: u32) -> Result<()> {
    let path = fusectl.join(minor.to_string()).join("abort");
    let written = OpenOptions::new().write(true).open(&path).and_then(|mut f| f.write_all(b"1"));
    match written {
        Err(e) if e.raw_os_error() == Some(Errno::ENOENT as i32) => Ok(()),
        other => other.map_err(|e| Error::at("abort FUSE connection", &path, e)),
    }
}

/// One connection, and never another one that got its number after its end (fs/fuse/control.c,
/// `fuse_ctl_remove_conn`).
#[derive(Debug)]
pub struct FuseConnection {
    minor: u32,
    abort: File,
}

impl FuseConnection {
    /// [`abort_fuse`]. A connection that has ended is a success.
    pub fn abort(mut self) -> Result<()> {
        self.abort.write_all(b"1").map_err(|e| Error::new("abort FUSE connection", self.minor, e))
    }
}

/// The fusectl file system, mounted nowhere: its root directory has one subdirectory for each FUSE
/// connection (Documentation/filesystems/fuse.rst, "Control filesystem"). It needs no mount on the
/// host and leaves none.
#[derive(Debug)]
pub struct FuseConnections {
    root: OwnedFd,
}

impl FuseConnections {
    /// Needs CAP_SYS_ADMIN in the initial user namespace.
    pub fn open() -> Result<Self> {
        let wrong = |op: &'static str| move |e: rustix::io::Errno| Error::new(op, "fusectl", e);
        let context = mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC).map_err(wrong("fsopen"))?;
        mount::fsconfig_create(&context).map_err(wrong("fsconfig"))?;
        mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
            .map(|root| Self { root })
            .map_err(wrong("fsmount"))
    }

    /// The connection with number `minor` now; `None` if there is none.
    pub fn connection(&self, minor: u32) -> Result<Option<FuseConnection>> {
        match self.open_file(minor, "abort", OFlags::WRONLY) {
            Ok(abort) => Ok(Some(FuseConnection { minor, abort })),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(Error::new("open FUSE connection", minor, e)),
        }
    }

    /// Number of requests of connection `minor` without an answer yet; `None` if there is no such
    /// connection.
    pub fn waiting(&self, minor: u32) -> Result<Option<u64>> {
        let failed = |e: std::io::Error| Error::new("look at FUSE connection", minor, e);
        let mut file = match self.open_file(minor, "waiting", OFlags::RDONLY) {
            Ok(file) => file,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(e) => return Err(failed(e.into())),
        };
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed)?;
        if text.is_empty() {
            // It has ended since it was opened (fs/fuse/control.c, `fuse_conn_waiting_read`).
            return Ok(None);
        }
        let invalid = || failed(std::io::Error::from(std::io::ErrorKind::InvalidData));
        text.trim().parse().map(Some).map_err(|_| invalid())
    }

    fn open_file(&self, minor: u32, name: &str, mode: OFlags) -> rustix::io::Result<File> {
        let path = format!("{minor}/{name}");
        rustix::fs::openat(&self.root, path, mode | OFlags::CLOEXEC, Mode::empty()).map(File::from)
    }
}

const NONE: Option<&str> = None;

#[cfg(test)]
mod fdinfo_tests {
    use super::*;

    #[test]
    fn a_connection_is_known_only_once_it_is_mounted() {
        let fuse = open_fuse_device().unwrap();
        assert_eq!(fuse_connection_of(&fuse).unwrap(), None);
        assert_eq!(connection_in("pos:\t0\nfuse_connection:\t39\n"), Some(39));
        assert_eq!(connection_in("fuse_connection:\tx\n"), None);
    }
}
