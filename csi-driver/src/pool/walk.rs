//! A way through a tree that somebody else filled.
//!
//! No symbolic link is followed and no mount is entered (openat2(2)). One
//! directory is open at a time however deep the tree is: the way back is `..`,
//! and what is found there must be where the walk came from.

use std::ffi::{CStr, CString};
use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;

pub(super) const WITHIN: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// What is done at each step of a walk. The root is neither entered nor given
/// to [`Self::file`]; it is left, last of all.
pub(super) trait Visitor {
    /// Anything but a directory.
    fn file(&mut self, parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> linux::Result<()>;
    /// A directory, before what is in it.
    fn enter(&mut self, name: &CStr) -> linux::Result<()>;
    /// A directory, after all that is in it.
    fn leave(&mut self, directory: BorrowedFd<'_>) -> linux::Result<()>;
}

/// Visits everything below `root`, and `root`. `ECANCELED` once `stop` is set.
pub(super) fn walk(root: BorrowedFd<'_>, stop: &AtomicBool, visitor: &mut impl Visitor) -> linux::Result<()> {
    let mut directory = open_dir(root, c".", ResolveFlags::empty()).map_err(at("open", c"."))?;
    let device = Identity::of(&directory)?.device();
    let mut above = Vec::new();
    let mut pending = visit_files(&directory, stop, visitor)?;
    loop {
        if let Some(name) = pending.pop() {
            visitor.enter(&name)?;
            let child = open_dir(&directory, &name, WITHIN).map_err(at("open", &name))?;
            if Identity::of(&child)?.device() != device {
                // A subvolume: its inode numbers are the volume's too.
                return Err(at("enter", &name)(Errno::XDEV));
            }
            above.push((Identity::of(&directory)?, std::mem::take(&mut pending)));
            directory = child;
            pending = visit_files(&directory, stop, visitor)?;
            continue;
        }
        visitor.leave(directory.as_fd())?;
        let Some((identity, rest)) = above.pop() else { return Ok(()) };
        directory = identity.open_parent(&directory)?;
        pending = rest;
    }
}

/// The names of the directories in `directory`; all else is visited.
fn visit_files(
    directory: &OwnedFd,
    stop: &AtomicBool,
    visitor: &mut impl Visitor,
) -> linux::Result<Vec<CString>> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(directory).map_err(at("list", c"."))? {
        if stop.load(Ordering::Relaxed) {
            return Err(at("walk", c".")(Errno::CANCELED));
        }
        let entry = entry.map_err(at("list", c"."))?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = stat(directory.as_fd(), name)?;
        if file_type(&stat) == FileType::Directory {
            directories.push(name.to_owned());
        } else {
            visitor.file(directory.as_fd(), name, &stat)?;
        }
    }
    Ok(directories)
}

/// Which directory it is, by device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(u32, u32, u64);

impl Identity {
    pub(super) fn of(directory: impl AsFd) -> linux::Result<Self> {
        stat(directory.as_fd(), c"").map(|stat| Self(stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino))
    }

    fn device(self) -> (u32, u32) {
        (self.0, self.1)
    }

    /// `..` of `child`, which must be this directory: `ESTALE` if the child was moved meanwhile.
    pub(super) fn open_parent(self, child: &OwnedFd) -> linux::Result<OwnedFd> {
        let parent = open_dir(child, c"..", ResolveFlags::empty()).map_err(at("open", c".."))?;
        if Self::of(&parent)? == self { Ok(parent) } else { Err(at("return to", c"..")(Errno::STALE)) }
    }
}

/// Of `name` in `parent`, a link not followed; of `parent` itself if the name is empty.
pub(super) fn stat(parent: BorrowedFd<'_>, name: &CStr) -> linux::Result<Statx> {
    let own = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::empty() };
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | own;
    rustix::fs::statx(parent, name, flags, StatxFlags::BASIC_STATS).map_err(at("stat", name))
}

pub(super) fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

pub(super) fn open_dir(
    parent: impl AsFd,
    path: impl rustix::path::Arg,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(
        parent,
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )
}

/// Gives an errno its operation and the name, which may be anything, that it is about.
pub(super) fn at(op: &'static str, name: &CStr) -> impl FnOnce(Errno) -> linux::Error {
    move |errno| linux::Error::new(op, Shown(name), errno)
}

struct Shown<'a>(&'a CStr);

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.to_bytes().escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::CWD;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// Does something to the tree at the wrong moment.
    struct Meddler<F, E>(F, E);

    impl<F: FnMut(), E: FnMut()> Visitor for Meddler<F, E> {
        fn file(&mut self, _parent: BorrowedFd<'_>, _name: &CStr, _stat: &Statx) -> linux::Result<()> {
            (self.0)();
            Ok(())
        }
        fn enter(&mut self, _name: &CStr) -> linux::Result<()> {
            (self.1)();
            Ok(())
        }
        fn leave(&mut self, _directory: BorrowedFd<'_>) -> linux::Result<()> {
            Ok(())
        }
    }

    fn errno_of(root: &Path, visitor: &mut impl Visitor) -> nix::errno::Errno {
        let root = open_dir(CWD, root, ResolveFlags::empty()).unwrap();
        walk(root.as_fd(), &AtomicBool::new(false), visitor).unwrap_err().errno()
    }

    #[test]
    fn a_directory_that_becomes_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("child")).unwrap();
        let swap = || {
            std::fs::rename(root.join("child"), dir.path().join("aside")).unwrap();
            symlink("/etc", root.join("child")).unwrap();
        };
        assert_eq!(errno_of(&root, &mut Meddler(|| {}, swap)), nix::errno::Errno::ENOTDIR);
    }

    #[test]
    fn a_directory_that_is_moved_away_does_not_lead_the_walk_out() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("child")).unwrap();
        std::fs::write(root.join("child/file"), "").unwrap();
        let move_away = || std::fs::rename(root.join("child"), dir.path().join("elsewhere")).unwrap();
        assert_eq!(errno_of(&root, &mut Meddler(move_away, || {})), nix::errno::Errno::ESTALE);
    }

    #[test]
    fn a_mount_is_not_entered() {
        let sandbox = ::tests::Sandbox::new();
        let root = sandbox.make_dir("root").unwrap();
        let mounted = sandbox.make_dir("root/mounted").unwrap();
        linux::mount::mount_fs("tmpfs", "t", &mounted, linux::mount::MountFlags::default(), "").unwrap();
        assert_eq!(errno_of(&root, &mut Meddler(|| {}, || {})), nix::errno::Errno::EXDEV);
    }
}
