//! Paths that a container must not read or write: masks, read-only paths, and
//! the check that a kernel file system is what its name says.
//!
//! The source of a mask comes from a tmpfs below the container's root, to which no path leads. Taken
//! from the container's own /dev, it could be a file of a volume (CVE-2025-31133).
//!
//! Invariant: every mask is verified by descriptor when it is made, and again by [`Masks::verify`]
//! after everything else is mounted.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{FsWord, Mode, OFlags, PROC_SUPER_MAGIC, ResolveFlags, StatVfsMountFlags};

use super::device::{self, NULL};
use super::{
    Attributes, MountsBelow, attach, clone_tree_at, is_directory, new_fs, open_in_root, set_attributes,
};
use crate::mount::AccessTimes;
use crate::{Error, Result};

/// linux/magic.h
const SYSFS_MAGIC: FsWord = 0x6265_6572;
const TMPFS_MAGIC: FsWord = 0x0102_1994;
const READ_ONLY: Attributes = Attributes {
    read_only: true,
    nosuid: true,
    nodev: false,
    noexec: true,
    access_times: AccessTimes::Kernels,
    nodiratime: false,
    propagation: None,
    recursive: false,
};

/// A kernel file system, identified by its magic number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelFs {
    Proc,
    Sysfs,
}

/// The masks and read-only paths of one container.
#[derive(Debug)]
pub struct Masks {
    /// Opened to be read.
    null: OwnedFd,
    masked: Vec<PathBuf>,
    read_only: Vec<PathBuf>,
}

impl Masks {
    /// Mounts the private tmpfs on the directory `at`, over which the container's root is mounted
    /// later. The caller's mount namespace must be its own, and its umask 0.
    pub fn mount(at: impl AsFd, name: &Path) -> Result<Self> {
        let options = ["mode=700", "size=4k", "nr_inodes=2"].map(str::to_owned);
        let tmpfs = new_fs("tmpfs", &options)?;
        // Attached to a namespace, since only such a mount can be cloned (open_tree(2) before Linux
        // 6.15).
        attach(&tmpfs, at, name)?;
        device::make_device(&tmpfs, "null", NULL, 0o666)?;
        // The node must not be changed by a descriptor that the container's program gets.
        set_attributes(&tmpfs, READ_ONLY)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let null = rustix::fs::openat(&tmpfs, "null", flags, Mode::empty())
            .map_err(|e| Error::at("open mask", name, e))?;
        NULL.verify(&null, name)?;
        Ok(Self { null, masked: Vec::new(), read_only: Vec::new() })
    }

    /// The null device, to read from. Its node is this container's own, and it cannot be changed by the
    /// descriptor: it is on a read-only mount.
    pub fn into_null(self) -> OwnedFd {
        self.null
    }

    /// Covers `path` in `root` so that nothing in it can be read: a null device over a file, an
    /// empty tmpfs over a directory, both read-only. A missing path is a success.
    pub fn mask(&mut self, root: impl AsFd, path: &Path) -> Result<()> {
        let Some(target) = find(&root, path)? else { return Ok(()) };
        let cover = if is_directory(&target)? {
            new_fs("tmpfs", &["nr_blocks=1", "nr_inodes=1"].map(str::to_owned))?
        } else {
            let cover = clone_tree_at(self.null.as_fd(), Path::new(""), MountsBelow::Without)?;
            NULL.verify(&cover, path)?;
            cover
        };
        set_attributes(&cover, READ_ONLY)?;
        attach(cover, target, path)?;
        self.masked.push(path.to_owned());
        Ok(())
    }

    /// Makes `path` in `root` read-only, with the mounts below. A missing path is a success.
    pub fn make_read_only(&mut self, root: impl AsFd, path: &Path) -> Result<()> {
        let Some(target) = find(&root, path)? else { return Ok(()) };
        let tree = clone_tree_at(target.as_fd(), Path::new(""), MountsBelow::With)?;
        set_attributes(&tree, Attributes { read_only: true, recursive: true, ..Attributes::default() })?;
        attach(tree, target, path)?;
        self.read_only.push(path.to_owned());
        Ok(())
    }

    /// Checks every mask and read-only path as a process in `root` would see it.
    pub fn verify(&self, root: impl AsFd) -> Result<()> {
        const OP: &str = "verify mask";
        for path in &self.masked {
            // A path below another mask is hidden by that mask.
            let Some(found) = find(&root, path)? else { continue };
            if is_directory(&found)? {
                verify_magic(OP, &found, path, TMPFS_MAGIC)?;
            } else {
                NULL.verify(&found, path)?;
            }
            verify_read_only(OP, &found, path)?;
        }
        for path in &self.read_only {
            let Some(found) = find(&root, path)? else { continue };
            verify_read_only("verify read-only path", &found, path)?;
        }
        Ok(())
    }
}

/// Opens the directory `path` of `root` and verifies that it is the root of such a file system.
/// Links are not followed.
pub fn open_kernel_fs(root: impl AsFd, path: &Path, kind: KernelFs) -> Result<OwnedFd> {
    const OP: &str = "verify file system";
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let found =
        rustix::fs::openat2(root, path, flags, Mode::empty(), how).map_err(|e| Error::at(OP, path, e))?;
    let magic = match kind {
        KernelFs::Proc => PROC_SUPER_MAGIC,
        KernelFs::Sysfs => SYSFS_MAGIC,
    };
    verify_magic(OP, &found, path, magic)?;
    // PROC_ROOT_INO of linux/proc_ns.h, and the first node of kernfs: both 1.
    let stat = rustix::fs::fstat(&found).map_err(|e| Error::at(OP, path, e))?;
    if stat.st_ino != 1 {
        let problem = format!("it is a part of {kind:?}, not its root");
        return Err(Error::at(OP, path, std::io::Error::other(problem)));
    }
    Ok(found)
}

pub(crate) fn verify_magic(op: &'static str, file: impl AsFd, path: &Path, wanted: FsWord) -> Result<()> {
    let found = rustix::fs::fstatfs(file).map_err(|e| Error::at(op, path, e))?.f_type;
    if found == wanted {
        return Ok(());
    }
    let problem = format!("file system type {found:#x} instead of {wanted:#x}");
    Err(Error::at(op, path, std::io::Error::other(problem)))
}

fn verify_read_only(op: &'static str, file: impl AsFd, path: &Path) -> Result<()> {
    let found = rustix::fs::fstatvfs(file).map_err(|e| Error::at(op, path, e))?;
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Ok(());
    }
    Err(Error::at(op, path, std::io::Error::other("it is writable")))
}

fn find(root: impl AsFd, path: &Path) -> Result<Option<OwnedFd>> {
    match open_in_root(root, path) {
        Ok(found) => Ok(Some(found)),
        Err(e) if matches!(e.errno(), Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::{self, UnmountMode};
    use crate::rootfs::open_root;

    /// A root with `/secret/file` and `/setting`, and masks for it, in a mount
    /// namespace of this thread's own.
    fn fixture() -> (tempfile::TempDir, OwnedFd, Masks) {
        crate::process::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
            .expect("these tests mount: run them as root");
        mount::make_private(Path::new("/")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for sub in ["masks", "root", "root/secret", "root/dev", "root/proc"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        std::fs::write(dir.path().join("root/secret/file"), "secret").unwrap();
        std::fs::write(dir.path().join("root/setting"), "old").unwrap();
        let private = dir.path().join("masks");
        let masks = Masks::mount(open_root(&private).unwrap(), &private).unwrap();
        let root = open_root(&dir.path().join("root")).unwrap();
        (dir, root, masks)
    }

    fn tidy(dir: &tempfile::TempDir, mounted: &[&str]) {
        for name in mounted.iter().chain(&["masks"]) {
            mount::unmount(&dir.path().join(name), UnmountMode::Detach).unwrap();
        }
    }

    #[test]
    fn a_mask_is_the_private_null_device_whatever_the_containers_dev_holds() {
        let (dir, root, mut masks) = fixture();
        std::os::unix::fs::symlink("/setting", dir.path().join("root/dev/null")).unwrap();
        let file = dir.path().join("root/secret/file");
        masks.mask(&root, Path::new("/secret/file")).unwrap();
        masks.verify(&root).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"");
        std::fs::write(&file, "new").unwrap();
        assert_eq!(std::fs::read(dir.path().join("root/setting")).unwrap(), b"old");
        // Nor does the mask's own node change.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        let error = std::fs::set_permissions(&file, mode).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        tidy(&dir, &["root/secret/file"]);
    }

    #[test]
    fn a_masked_directory_is_empty_and_read_only() {
        let (dir, root, mut masks) = fixture();
        masks.mask(&root, Path::new("/secret")).unwrap();
        masks.mask(&root, Path::new("/missing")).unwrap();
        masks.verify(&root).unwrap();
        let secret = dir.path().join("root/secret");
        assert_eq!(std::fs::read_dir(&secret).unwrap().count(), 0);
        let error = std::fs::write(secret.join("file"), "").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS));
        tidy(&dir, &["root/secret"]);
    }

    #[test]
    fn a_mask_or_read_only_path_that_is_covered_later_is_noticed() {
        let (dir, root, mut masks) = fixture();
        masks.mask(&root, Path::new("/secret/file")).unwrap();
        masks.make_read_only(&root, Path::new("/proc")).unwrap();
        masks.verify(&root).unwrap();
        let (secret, setting) = (dir.path().join("root/secret/file"), dir.path().join("root/setting"));
        mount::bind(&setting, &secret).unwrap();
        let error = masks.verify(&root).unwrap_err();
        assert_eq!(error.op, "verify device");
        mount::unmount(&secret, UnmountMode::Detach).unwrap();
        let proc = dir.path().join("root/proc");
        mount::bind(&dir.path().join("root/dev"), &proc).unwrap();
        let error = masks.verify(&root).unwrap_err();
        assert_eq!(crate::reason(&error.source), "it is writable");
        mount::unmount(&proc, UnmountMode::Detach).unwrap();
        tidy(&dir, &["root/secret/file", "root/proc"]);
    }

    #[test]
    fn only_procs_own_root_is_taken_for_proc() {
        let (dir, root, _masks) = fixture();
        let proc = dir.path().join("root/proc");
        open_kernel_fs(&root, Path::new("/proc"), KernelFs::Proc).unwrap_err();
        mount::bind(Path::new("/proc/sys"), &proc).unwrap();
        let error = open_kernel_fs(&root, Path::new("/proc"), KernelFs::Proc).unwrap_err();
        assert_eq!(crate::reason(&error.source), "it is a part of Proc, not its root");
        mount::unmount(&proc, UnmountMode::Detach).unwrap();
        attach(new_fs("proc", &[]).unwrap(), open_root(&proc).unwrap(), &proc).unwrap();
        open_kernel_fs(&root, Path::new("/proc"), KernelFs::Proc).unwrap();
        open_kernel_fs(&root, Path::new("/proc"), KernelFs::Sysfs).unwrap_err();
        std::os::unix::fs::symlink("proc", dir.path().join("root/link")).unwrap();
        open_kernel_fs(&root, Path::new("/link"), KernelFs::Proc).unwrap_err();
        tidy(&dir, &["root/proc"]);
    }
}
