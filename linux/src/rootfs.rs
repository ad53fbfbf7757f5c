//! Builds a container's root file system from detached mounts: made by fsopen(2) or open_tree(2),
//! configured, then attached below a root directory whose symbolic links cannot lead outside.
//!
//! Invariant: no function here resolves a container's path in the host's root; targets are found
//! with openat2(RESOLVE_IN_ROOT).

#![expect(unsafe_code, reason = "mount_setattr(2) has no safe wrapper")]

mod device;
mod empty_mounts;
mod mask;
mod target;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

pub use device::{Device, make_device, make_device_of, make_link, verify_device};
pub use empty_mounts::EmptyMounts;
pub(crate) use mask::verify_magic;
pub use mask::{KernelFs, Masks, open_kernel_fs};
pub use target::{Target, ensure_target, resolve};

use crate::mount::{self, AccessTimes, MountFlags};
use crate::{Error, Result, beneath};

/// The extended attribute of a layer's directory that hides the directories of its name in the layers
/// below.
pub const OPAQUE_ATTRIBUTE: &str = "trusted.overlay.opaque";

const OVERLAY: &str = "overlay";
const UPPER_DIR: &str = "upperdir";
const VOLATILE: &str = "volatile";

/// How mounts and unmounts propagate between a mount and its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    Private,
    Slave,
    Shared,
}

/// Changes of a mount; unnamed attributes stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attributes {
    pub read_only: bool,
    pub nosuid: bool,
    pub nodev: bool,
    pub noexec: bool,
    /// [`AccessTimes::Kernels`]: as they are.
    pub access_times: AccessTimes,
    pub nodiratime: bool,
    pub propagation: Option<Propagation>,
    /// Also changes the mounts below.
    pub recursive: bool,
}

/// A writable view over read-only layers.
#[derive(Debug, Clone, Copy)]
pub struct Overlay<'a> {
    /// Topmost first.
    pub lower: &'a [PathBuf],
    pub upper: &'a Path,
    pub work: &'a Path,
}

impl Overlay<'_> {
    /// Returns a detached overlayfs mount. Layers are passed one by one (`lowerdir+`, Linux 6.5),
    /// so the page of mount(2) does not limit their number. Older kernels get one string.
    ///
    /// The mount is `volatile` (Linux 5.10): its unmount, which the end of a container waits for, does
    /// not write the whole file system of `upper` to the disk, and neither does fsync(2) in it. So
    /// what is in `upper` may be incomplete after a crash of the node, and must not be mounted again.
    pub fn mount(&self) -> Result<OwnedFd> {
        mount_layers(self.lower, &[(UPPER_DIR, self.upper), ("workdir", self.work)])
    }
}

/// A view of layers, topmost first: a detached, read-only overlayfs mount. A single layer is opened
/// itself, because overlayfs needs two.
pub fn merge_layers(layers: &[PathBuf]) -> Result<OwnedFd> {
    match layers {
        [only] => open_root(only),
        _ => mount_layers(layers, &[]),
    }
}

fn mount_layers(lower: &[PathBuf], writable: &[(&str, &Path)]) -> Result<OwnedFd> {
    let one_by_one = lower.iter().map(|dir| ("lowerdir+", dir.as_path()));
    let options: Vec<(&str, &Path)> = one_by_one.chain(writable.iter().copied()).collect();
    match new_overlay(&options) {
        // Linux 6.1 checks options when the file system is created, later kernels one by one.
        Err(e) if e.errno() == Errno::EINVAL => mount_layers_at_once(lower, writable),
        result => result,
    }
}

/// All layers in one option. fsconfig(2) takes 255 bytes of it, mount(2) a page, and only at a path: in a
/// mount namespace of its own, of which a detached copy stays. Descriptors instead of names, so that some
/// two hundred layers fit.
fn mount_layers_at_once(lower: &[PathBuf], writable: &[(&str, &Path)]) -> Result<OwnedFd> {
    let mounted = || -> Result<OwnedFd> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
            .map_err(|e| Error::new("unshare", "mount namespace", e))?;
        mount::make_private(Path::new("/"))?;
        // Opened in this namespace: overlayfs takes no directories of another one.
        let mut open = Vec::new();
        let mut link = |dir: &Path| -> Result<String> {
            let dir = open_root(dir)?;
            let link = format!("/proc/self/fd/{}", dir.as_raw_fd());
            open.push(dir);
            Ok(link)
        };
        let layers = lower.iter().map(|dir| link(dir)).collect::<Result<Vec<_>>>()?;
        let mut options = vec![format!("lowerdir={}", layers.join(":"))];
        for (key, dir) in writable {
            options.push(format!("{key}={}", link(dir)?));
        }
        if !writable.is_empty() {
            options.push(VOLATILE.to_owned());
        }
        mount::mount_fs(OVERLAY, OVERLAY, &lower[0], MountFlags::default(), &options.join(","))?;
        clone_tree(&lower[0], MountsBelow::Without)
    };
    // A thread's mount namespace ends with it.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, mounted);
        let thread = thread.map_err(|e| Error::new("start", "thread", e))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn new_overlay(options: &[(&str, &Path)]) -> Result<OwnedFd> {
    let config = open_fs(OVERLAY)?;
    for (key, path) in options {
        rustix::mount::fsconfig_set_string(&config, *key, *path)
            .map_err(|e| Error::new("fsconfig", format!("{OVERLAY} {key}={}", path.display()), e))?;
    }
    // Without an upper directory the kernel logs that the option is meaningless.
    if options.iter().any(|(key, _)| *key == UPPER_DIR) {
        rustix::mount::fsconfig_set_flag(&config, VOLATILE)
            .map_err(|e| Error::new("fsconfig", format!("{OVERLAY} {VOLATILE}"), e))?;
    }
    create_fs(&config, OVERLAY)
}

/// A detached mount of a new file system: `proc`, `tmpfs`, `sysfs`, ... An
/// option without `=` is a flag.
pub fn new_fs(fs_type: &str, options: &[String]) -> Result<OwnedFd> {
    let config = open_fs(fs_type)?;
    for option in options {
        match option.split_once('=') {
            Some((key, value)) => rustix::mount::fsconfig_set_string(&config, key, value),
            None => rustix::mount::fsconfig_set_flag(&config, option.as_str()),
        }
        .map_err(|e| Error::new("fsconfig", format!("{fs_type} {option}"), e))?;
    }
    create_fs(&config, fs_type)
}

fn open_fs(fs_type: &str) -> Result<OwnedFd> {
    let config = rustix::mount::fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC)
        .map_err(|e| Error::new("fsopen", fs_type, e))?;
    rustix::mount::fsconfig_set_string(&config, "source", fs_type)
        .map_err(|e| Error::new("fsconfig", format!("{fs_type} source"), e))?;
    Ok(config)
}

fn create_fs(config: &OwnedFd, fs_type: &str) -> Result<OwnedFd> {
    rustix::mount::fsconfig_create(config).map_err(|e| Error::new("create file system", fs_type, e))?;
    rustix::mount::fsmount(config, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
        .map_err(|e| Error::new("fsmount", fs_type, e))
}

/// Whether a copy of a mount has copies of the mounts below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountsBelow {
    With,
    Without,
}

/// A detached copy of the mount at `path`, in the same peer groups.
pub fn clone_tree(path: &Path, below: MountsBelow) -> Result<OwnedFd> {
    clone_tree_at(rustix::fs::CWD, path, below)
}

/// [`clone_tree`] for an open file or directory (`O_PATH` suffices).
pub fn clone_opened(found: impl AsFd, below: MountsBelow) -> Result<OwnedFd> {
    clone_tree_at(found.as_fd(), Path::new(""), below)
}

/// [`clone_tree`] for a path that had no link when it was checked: a link that was added since is
/// `ELOOP`.
pub fn clone_tree_without_links(path: &Path, below: MountsBelow) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        .map_err(|e| Error::at("open mount source", path, e))?;
    clone_tree_at(found.as_fd(), Path::new(""), below)
}

fn clone_tree_at(dir: BorrowedFd<'_>, path: &Path, below: MountsBelow) -> Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, below == MountsBelow::With);
    flags.set(OpenTreeFlags::AT_EMPTY_PATH, path.as_os_str().is_empty());
    rustix::mount::open_tree(dir, path, flags).map_err(|e| Error::at("open_tree", path, e))
}

/// Changes a mount, detached or attached, by a descriptor of its root.
pub fn set_attributes(mount: impl AsFd, wanted: Attributes) -> Result<()> {
    // struct mount_attr of linux/mount.h.
    #[repr(C)]
    struct MountAttr {
        attr_set: u64,
        attr_clr: u64,
        propagation: u64,
        userns_fd: u64,
    }
    let flags = [
        (wanted.read_only, MountAttrFlags::MOUNT_ATTR_RDONLY),
        (wanted.nosuid, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (wanted.nodev, MountAttrFlags::MOUNT_ATTR_NODEV),
        (wanted.noexec, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (wanted.nodiratime, MountAttrFlags::MOUNT_ATTR_NODIRATIME),
        (wanted.access_times == AccessTimes::Never, MountAttrFlags::MOUNT_ATTR_NOATIME),
    ];
    let attr_set = flags.iter().filter(|(on, _)| *on).fold(0, |set, (_, flag)| set | u64::from(flag.bits()));
    // The rules for access times exclude each other, and relatime is none of the bits.
    let attr_clr = match wanted.access_times {
        AccessTimes::Kernels => 0,
        AccessTimes::Never | AccessTimes::Relative => u64::from(MountAttrFlags::MOUNT_ATTR__ATIME.bits()),
    };
    let propagation = match wanted.propagation {
        None => 0,
        Some(Propagation::Private) => libc::MS_PRIVATE,
        Some(Propagation::Slave) => libc::MS_SLAVE,
        Some(Propagation::Shared) => libc::MS_SHARED,
    };
    let attr = MountAttr { attr_set, attr_clr, propagation, userns_fd: 0 };
    let mut at_flags = libc::AT_EMPTY_PATH;
    if wanted.recursive {
        at_flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the path is a NUL-terminated constant, `attr` has the size that is
    // passed with it, and both live across the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            at_flags,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    Errno::result(done).map(drop).map_err(|e| Error::new("mount_setattr", format!("{wanted:?}"), e))
}

/// Attaches a detached mount on `target`, an O_PATH descriptor.
pub fn attach(tree: impl AsFd, target: impl AsFd, name: &Path) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(tree, "", target, "", flags).map_err(|e| Error::at("move_mount", name, e))
}

/// Stops propagation of mounts from this mount namespace to the host's.
pub fn make_all_slaves() -> Result<()> {
    crate::mount::make_slave(Path::new("/"))
}

/// Opens a directory of the host as the root to build in.
pub fn open_root(path: &Path) -> Result<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::at("open", path, e))
}

/// Resolves `path` as a process inside `root` would.
pub fn open_in_root(root: impl AsFd, path: &Path) -> Result<OwnedFd> {
    open_how(root.as_fd(), path, OFlags::PATH)
}

/// The content of a regular file of at most `max_bytes`. Another kind of file, which an untrusted
/// image may have there, is not opened (`EINVAL`): reading a device may never end, and a pipe
/// blocks. A larger file is `EFBIG`.
pub fn read_in_root(root: impl AsFd, path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    use std::io::Read;
    const OP: &str = "read";
    let found = open_in_root(root, path)?;
    let stat = rustix::fs::fstat(&found).map_err(|e| Error::at(OP, path, e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::at(OP, path, Errno::EINVAL));
    }
    let file = std::fs::File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
        .map_err(|e| Error::at(OP, path, e))?;
    let mut content = Vec::new();
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut content).map_err(|e| Error::at(OP, path, e))?;
    if u64::try_from(content.len()).is_ok_and(|length| length > max_bytes) {
        return Err(Error::at(OP, path, Errno::EFBIG));
    }
    Ok(content)
}

/// What a mount needs at its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Directory,
    File,
}

/// Finds `path` inside `root` and makes its missing parts (directories 0755, a file 0644). No link
/// leads outside of `root`.
pub fn ensure_in_root(root: impl AsFd, path: &Path, kind: Kind) -> Result<OwnedFd> {
    const OP: &str = "create mount point";
    let root = root.as_fd();
    if let Ok(found) = open_in_root(root, path) {
        return Ok(found);
    }
    let mut dir = open_in_root(root, Path::new("."))?;
    let mut walked = PathBuf::new();
    let mut components =
        path.components().filter(|c| !matches!(c, Component::RootDir | Component::CurDir)).peekable();
    while let Some(component) = components.next() {
        let Component::Normal(name) = component else {
            return Err(Error::at(OP, path, Errno::EINVAL));
        };
        walked.push(name);
        let is_file = components.peek().is_none() && kind == Kind::File;
        let next = match open_in_root(root, &walked) {
            Ok(found) => found,
            Err(e) if e.errno() == Errno::ENOENT => {
                if is_file {
                    rustix::fs::mknodat(&dir, name, FileType::RegularFile, Mode::from(0o644), 0)
                } else {
                    rustix::fs::mkdirat(&dir, name, Mode::from(0o755))
                }
                .map_err(|e| Error::at(OP, path, e))?;
                open_in_root(root, &walked)?
            }
            Err(e) => return Err(e),
        };
        dir = next;
    }
    Ok(dir)
}

/// Whether an O_PATH descriptor refers to a directory, as [`file_type`].
pub fn is_directory(fd: impl AsFd) -> Result<bool> {
    Ok(file_type(fd)? == FileType::Directory)
}

/// The file type of an O_PATH descriptor, from the kernel's memory: no request goes to a FUSE
/// daemon, which may never answer.
pub fn file_type(fd: impl AsFd) -> Result<FileType> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(fd, "", flags, StatxFlags::TYPE);
    let stat = stat.map_err(|e| Error::new("statx", "mount source", e))?;
    Ok(FileType::from_raw_mode(stat.stx_mode.into()))
}

/// Finds the source of a mount: resolves links, and returns the path and the file type. Sends no
/// request to a FUSE daemon whose volume is mounted there.
pub fn find_source(path: &Path) -> Result<(PathBuf, FileType)> {
    const OP: &str = "find mount source";
    let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::at(OP, path, e))?;
    let shown = std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()));
    Ok((shown.map_err(|e| Error::at(OP, path, e))?, file_type(&found)?))
}

/// Makes the mount at `root` this process's root directory, and removes the old root from its mount
/// namespace.
pub fn pivot_into(root: impl AsFd) -> Result<()> {
    const OP: &str = "pivot_root";
    rustix::process::fchdir(root).map_err(|e| Error::new(OP, "fchdir", e))?;
    // Both are ".": the old root is stacked on the new one and unmounted at once (pivot_root(2),
    // "pivot_root(".", ".")").
    rustix::process::pivot_root(".", ".").map_err(|e| Error::new(OP, "new root", e))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(|e| Error::new(OP, "unmount old root", e))?;
    rustix::process::chdir("/").map_err(|e| Error::new(OP, "chdir /", e))
}

/// Makes the mount at `root`, which is over this process's root directory, its root directory. See
/// [`EmptyMounts`] for what is below.
pub fn enter_over_root(root: impl AsFd) -> Result<()> {
    rustix::process::fchdir(root).map_err(|e| Error::new("fchdir", "new root", e))?;
    rustix::process::chroot(".").map_err(|e| Error::new("chroot", "new root", e))
}

/// Whether `path` leads to a file without /proc's magic links, which could lead to the host's
/// program that starts the container.
pub fn is_plain_path(path: &Path) -> bool {
    let opened = rustix::fs::openat2(
        rustix::fs::CWD,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_MAGICLINKS,
    );
    !matches!(opened, Err(rustix::io::Errno::LOOP))
}

fn open_how(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    beneath::resolve_within(root, path, flags | OFlags::CLOEXEC, within)
        .map_err(|e| Error::at("open in container root", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_layers_of_any_name_are_mounted_at_once_as_on_older_kernels() {
        const LAYERS: usize = 100;
        let dir = tempfile::tempdir().unwrap();
        let long = "a:b,c\\d".repeat(10);
        let lower: Vec<PathBuf> =
            (0..LAYERS).map(|number| dir.path().join(format!("{long}{number}"))).collect();
        for (number, layer) in lower.iter().enumerate() {
            std::fs::create_dir(layer).unwrap();
            std::fs::write(layer.join(format!("file{number}")), "").unwrap();
        }
        let (upper, work) = (dir.path().join("upper"), dir.path().join("work"));
        for dir in [&upper, &work] {
            std::fs::create_dir(dir).unwrap();
        }
        let made = mount_layers_at_once(&lower, &[(UPPER_DIR, &upper), ("workdir", &work)]).unwrap();
        assert_eq!(crate::mountinfo::below(dir.path()).unwrap(), [], "it is mounted nowhere");
        for number in 0..LAYERS {
            rustix::fs::statat(&made, format!("file{number}"), AtFlags::empty()).unwrap();
        }
        rustix::fs::mkdirat(&made, "new", Mode::RWXU).unwrap();
        assert!(upper.join("new").is_dir());
        let read_only = mount_layers_at_once(&lower, &[]).unwrap();
        let refused = rustix::fs::mkdirat(&read_only, "new", Mode::RWXU).unwrap_err();
        assert_eq!(refused, rustix::io::Errno::ROFS);
    }

    #[test]
    fn a_mount_point_behind_an_absolute_link_is_made_inside_the_root() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/outside-of-nowhere", dir.path().join("run")).unwrap();
        std::fs::create_dir(dir.path().join("outside-of-nowhere")).unwrap();
        let root = open_root(dir.path()).unwrap();
        ensure_in_root(&root, Path::new("/run/a/file"), Kind::File).unwrap();
        assert!(dir.path().join("outside-of-nowhere/a/file").is_file());
        assert!(!Path::new("/outside-of-nowhere").exists());
    }

    #[test]
    fn reading_inside_a_root_does_not_follow_links_out_of_it() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("passwd")).unwrap();
        let root = open_root(dir.path()).unwrap();
        assert_eq!(read_in_root(&root, Path::new("passwd"), 1 << 20).unwrap_err().errno(), Errno::ENOENT);
    }

    /// openat2(2) answers `EAGAIN` if a file was renamed anywhere while it resolved `..`.
    #[test]
    fn renames_elsewhere_do_not_fail_a_path_with_dots() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["a", "b"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let root = open_root(dir.path()).unwrap();
        let (first, second) = (elsewhere.path().join("1"), elsewhere.path().join("2"));
        std::fs::write(&first, "").unwrap();
        let stop = AtomicBool::new(false);
        let failed = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::fs::rename(&first, &second).unwrap();
                    std::fs::rename(&second, &first).unwrap();
                }
            });
            let path = Path::new("a/../b");
            let failed = (0..100_000).find_map(|_| open_in_root(&root, path).err());
            stop.store(true, Ordering::Relaxed);
            failed
        });
        assert_eq!(failed.map(|e| e.errno()), None);
    }

    #[test]
    fn only_regular_files_of_a_sane_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read_in_root(&root, Path::new("pipe"), 8).unwrap_err().errno(), Errno::EINVAL);
        std::fs::write(dir.path().join("file"), "12345678").unwrap();
        assert_eq!(read_in_root(&root, Path::new("file"), 8).unwrap(), b"12345678");
        assert_eq!(read_in_root(&root, Path::new("file"), 7).unwrap_err().errno(), Errno::EFBIG);
    }

    #[test]
    fn magic_links_are_not_plain_paths() {
        assert!(!is_plain_path(Path::new("/proc/self/exe")));
        assert!(is_plain_path(Path::new("/bin/sh")));
        assert!(is_plain_path(Path::new("/nonexistent")));
    }
}
