//! Trees that somebody else filled: the way through one ([`walk`]), its removal
//! ([`remove`]) and its change of group ([`give_group`]).
//!
//! The processes that filled the tree may still be at work in it. So no symbolic link is
//! followed and no mount is entered (openat2(2)), no name is resolved twice for one
//! effect, and nothing calls itself: one directory is open at a time however deep
//! the tree is. The way back is `..`, and what is found there must be where the walk
//! came from. Memory grows by about a hundred bytes a level.

mod group;
mod removal;

use std::ffi::{CStr, CString};
use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;

pub use group::{GroupAccess, give_group, has_group};
pub use removal::{remove, remove_in};

use crate::{Error, Result};

/// How a name in such a tree is resolved.
pub const WITHIN: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// What a walk does where the tree is not as it was listed, or not of one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// It fails: what it saw would be no picture of any moment.
    Refused,
    /// It passes over what vanished or became something else, and over mounts and
    /// subvolumes. A directory that was moved while the walk was in it is `ESTALE`.
    Tolerated,
}

/// What is done at each step of a walk. The root is neither entered nor given
/// to [`Self::file`]; it is left, last of all.
pub trait Visitor {
    /// Anything but a directory.
    fn file(&mut self, parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> Result<()>;
    /// A directory, before what is in it. With [`Changes::Tolerated`] it may turn out
    /// to have vanished; it is not left then.
    fn enter(&mut self, name: &CStr) -> Result<()>;
    /// A directory, after all that is in it.
    fn leave(&mut self, directory: BorrowedFd<'_>) -> Result<()>;
}

/// Visits everything below `root`, and `root`. `ECANCELED` once `stop` is set.
pub fn walk(
    root: BorrowedFd<'_>,
    changes: Changes,
    stop: &AtomicBool,
    visitor: &mut impl Visitor,
) -> Result<()> {
    let mut directory = open_dir(root, c".", ResolveFlags::empty()).map_err(at("open", c"."))?;
    let device = Identity::of(&directory)?.device();
    let mut above = Vec::new();
    let mut pending = visit_files(&directory, changes, stop, visitor)?;
    loop {
        if let Some(name) = pending.pop() {
            visitor.enter(&name)?;
            let child = match open_dir(&directory, &name, WITHIN) {
                Err(e) if changes == Changes::Tolerated && is_change(e) => continue,
                opened => opened.map_err(at("open", &name))?,
            };
            if Identity::of(&child)?.device() != device {
                if changes == Changes::Tolerated {
                    continue;
                }
                // A subvolume: its inode numbers are the volume's too.
                return Err(at("enter", &name)(Errno::XDEV));
            }
            above.push((Identity::of(&directory)?, std::mem::take(&mut pending)));
            directory = child;
            pending = visit_files(&directory, changes, stop, visitor)?;
            continue;
        }
        visitor.leave(directory.as_fd())?;
        let Some((identity, rest)) = above.pop() else { return Ok(()) };
        directory = identity.open_parent(&directory)?;
        pending = rest;
    }
}

/// What openat2(2) with [`WITHIN`] says of a name that vanished, became something
/// else, or is a mount point.
fn is_change(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV)
}

/// The names of the directories in `directory`; all else is visited.
fn visit_files(
    directory: &OwnedFd,
    changes: Changes,
    stop: &AtomicBool,
    visitor: &mut impl Visitor,
) -> Result<Vec<CString>> {
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
        let stat = match stat(directory.as_fd(), name) {
            Err(e) if changes == Changes::Tolerated && e.errno() == nix::errno::Errno::ENOENT => continue,
            found => found?,
        };
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
pub struct Identity(u32, u32, u64);

impl Identity {
    pub fn of(directory: impl AsFd) -> Result<Self> {
        stat(directory.as_fd(), c"").map(|stat| Self(stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino))
    }

    fn device(self) -> (u32, u32) {
        (self.0, self.1)
    }

    /// `..` of `child`, which must be this directory: `ESTALE` if the child was moved meanwhile.
    pub fn open_parent(self, child: &OwnedFd) -> Result<OwnedFd> {
        let parent = open_dir(child, c"..", ResolveFlags::NO_XDEV).map_err(at("open", c".."))?;
        if Self::of(&parent)? == self { Ok(parent) } else { Err(at("return to", c"..")(Errno::STALE)) }
    }
}

/// Of `name` in `parent`, a link not followed; of `parent` itself if the name is empty.
pub fn stat(parent: BorrowedFd<'_>, name: &CStr) -> Result<Statx> {
    let own = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::empty() };
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | own;
    rustix::fs::statx(parent, name, flags, StatxFlags::BASIC_STATS).map_err(at("stat", name))
}

pub fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

pub fn open_dir(
    parent: impl AsFd,
    path: impl rustix::path::Arg,
    resolve: ResolveFlags,
) -> std::result::Result<OwnedFd, Errno> {
    rustix::fs::openat2(
        parent,
        path,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )
}

/// Gives an errno its operation and the name, which may be anything, that it is about.
pub fn at(op: &'static str, name: &CStr) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::new(op, Shown(name), errno)
}

struct Shown<'a>(&'a CStr);

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.to_bytes().escape_ascii())
    }
}

#[cfg(test)]
mod tests;
