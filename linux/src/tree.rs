//! Trees of untrusted processes: walking one ([`walk`]), removing it ([`remove`]) and changing its
//! group ([`give_group`]).
//!
//! The processes that filled the tree may still change it. So no symbolic link is followed and no
//! mount is entered (openat2(2)), no name is resolved twice for one effect, and no function
//! recurses. One directory is open at a time, however deep the tree is. The walk returns through
//! `..`, and verifies that this is the directory it came from. A FUSE daemon may present an endless
//! tree: so the remembered names and the depth are limited.

mod group;
mod removal;
mod trash;

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;

pub use group::{GroupAccess, give_group, has_group};
pub use removal::{remove, remove_in};
pub use trash::{Trash, remove_in_background, set_aside};

use crate::{Error, Result};

/// How names in such a tree are resolved.
pub const WITHIN: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// Limits of a walk.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Limit of the remembered names of directories, on all levels together. A directory with more
    /// of them is listed again for the next ones.
    name_bytes: i64,
    /// A deeper tree is refused with `ENAMETOOLONG`.
    levels: usize,
    /// How many entries may be read again in repeated listings. Each entry of a first listing allows [`MOST_AGAIN`]
    /// more. Beyond that: `E2BIG`.
    again: u64,
}

const BOUNDS: Bounds = Bounds { name_bytes: 16 << 20, levels: 200_000, again: 100_000_000 };
/// Enough for a directory with five million subdirectories whose names have 36 bytes.
const MOST_AGAIN: u64 = 32;
/// The memory of a remembered name in addition to its length: an allocation, and its entry in a
/// set.
const NAME_OVERHEAD_BYTES: i64 = 64;

/// How a walk handles a tree that changed since it was listed, or that contains mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// The walk fails, since its result would match no moment.
    Refused,
    /// The walk skips entries that vanished or changed their type, and mounts. It enters
    /// subvolumes: the owner of a directory on Btrfs may make one in it. A directory that was moved
    /// during the walk is `ESTALE`.
    Tolerated,
}

/// The steps of a walk. The root gets only [`Self::leave`], last of all.
pub trait Visitor {
    /// Each entry that is read, also one of a directory that is listed again. An error ends the walk.
    fn entry(&mut self) -> Result<()> {
        Ok(())
    }
    /// Anything but a directory.
    fn file(&mut self, parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> Result<()>;
    /// A directory, before its contents. With [`Changes::Tolerated`] it may have vanished; then it
    /// gets no [`Self::leave`].
    fn enter(&mut self, name: &CStr) -> Result<()>;
    /// A directory, after its contents.
    fn leave(&mut self, directory: BorrowedFd<'_>) -> Result<()>;
}

/// Visits everything below `root`, then `root`. `ECANCELED` once `stop` is set, `ENAMETOOLONG`
/// below 200,000 levels, `E2BIG` if the shape of the tree would make the walk list directories again without end.
pub fn walk(
    root: BorrowedFd<'_>,
    changes: Changes,
    stop: &AtomicBool,
    visitor: &mut impl Visitor,
) -> Result<()> {
    walk_within(BOUNDS, root, changes, stop, visitor)
}

fn walk_within(
    bounds: Bounds,
    root: BorrowedFd<'_>,
    changes: Changes,
    stop: &AtomicBool,
    visitor: &mut impl Visitor,
) -> Result<()> {
    let mut directory = open_dir(root, c".", ResolveFlags::empty()).map_err(at("open", c"."))?;
    let root_identity = Identity::of(&directory)?;
    let mut lister =
        Lister { changes, stop, visitor, free_bytes: bounds.name_bytes, free_again: bounds.again };
    let mut above = Vec::new();
    let mut pending = lister.list(&directory)?;
    loop {
        if let Some(name) = lister.next(&mut pending, &directory)? {
            lister.visitor.enter(&name)?;
            let child = match open_dir(&directory, &name, WITHIN) {
                Err(e) if changes == Changes::Tolerated && is_change(e) => continue,
                opened => opened.map_err(at("open", &name))?,
            };
            if changes == Changes::Refused && !Identity::of(&child)?.is_on_device_of(root_identity) {
                // A subvolume: its inode numbers overlap with the volume's.
                return Err(at("enter", &name)(Errno::XDEV));
            }
            if above.len() >= bounds.levels {
                return Err(at("enter", &name)(Errno::NAMETOOLONG));
            }
            above.push((Identity::of(&directory)?, std::mem::take(&mut pending)));
            directory = child;
            pending = lister.list(&directory)?;
            continue;
        }
        lister.visitor.leave(directory.as_fd())?;
        let Some((identity, rest)) = above.pop() else { return Ok(()) };
        directory = identity.open_parent(&directory)?;
        pending = rest;
    }
}

/// The errors of openat2(2) with [`WITHIN`] for a name that vanished, changed its type, or is a
/// mount point.
fn is_change(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV)
}

/// The subdirectories of one directory that are still to be entered.
#[derive(Debug, Default)]
struct Pending {
    /// In reverse order.
    names: Vec<CString>,
    /// The last remembered name, if there was no space for all.
    listed_to: Option<CString>,
}

struct Lister<'a, V> {
    changes: Changes,
    stop: &'a AtomicBool,
    visitor: &'a mut V,
    /// The rest of [`Bounds::name_bytes`]. Negative if many levels remember their one name.
    free_bytes: i64,
    /// How many entries may be read again.
    free_again: u64,
}

impl<V: Visitor> Lister<'_, V> {
    /// Visits the contents of `directory`, except its subdirectories, and returns those.
    fn list(&mut self, directory: &OwnedFd) -> Result<Pending> {
        self.list_after(directory, None)
    }

    fn next(&mut self, pending: &mut Pending, directory: &OwnedFd) -> Result<Option<CString>> {
        if pending.names.is_empty()
            && let Some(last) = pending.listed_to.take()
        {
            *pending = self.list_after(directory, Some(&last))?;
        }
        let name = pending.names.pop();
        self.free_bytes += name.as_deref().map_or(0, bytes_of);
        Ok(name)
    }

    /// Remembers the subdirectories whose names follow `last`; half of the free bytes is left for
    /// the levels below. Other entries are visited only in the first listing.
    fn list_after(&mut self, directory: &OwnedFd, last: Option<&CStr>) -> Result<Pending> {
        let mut names = BTreeSet::new();
        let most_bytes = self.free_bytes.max(0) / 2;
        let (mut bytes, mut is_cut) = (0, false);
        for entry in Dir::read_from(directory).map_err(at("list", c"."))? {
            if self.stop.load(Ordering::Relaxed) {
                return Err(at("walk", c".")(Errno::CANCELED));
            }
            let entry = entry.map_err(at("list", c"."))?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.visitor.entry()?;
            self.free_again = match last {
                None => self.free_again.saturating_add(MOST_AGAIN),
                Some(_) => {
                    let left = self.free_again.checked_sub(1).ok_or(Errno::TOOBIG);
                    left.map_err(at("list again (too many directories in directories)", name))?
                }
            };
            if last.is_some_and(|last| name <= last) {
                continue;
            }
            let stat = match stat(directory.as_fd(), name) {
                Err(e) if self.changes == Changes::Tolerated && e.errno() == nix::errno::Errno::ENOENT => {
                    continue;
                }
                found => found?,
            };
            if file_type(&stat) != FileType::Directory {
                if last.is_none() {
                    self.visitor.file(directory.as_fd(), name, &stat)?;
                }
                continue;
            }
            if !names.insert(name.to_owned()) {
                continue;
            }
            bytes += bytes_of(name);
            // One name is always kept, so that the walk makes progress.
            while bytes > most_bytes
                && names.len() > 1
                && let Some(last) = names.pop_last()
            {
                bytes -= bytes_of(&last);
                is_cut = true;
            }
        }
        self.free_bytes -= bytes;
        let listed_to = names.last().filter(|_| is_cut).cloned();
        Ok(Pending { names: names.into_iter().rev().collect(), listed_to })
    }
}

fn bytes_of(name: &CStr) -> i64 {
    i64::try_from(name.count_bytes()).map_or(i64::MAX, |bytes| bytes + NAME_OVERHEAD_BYTES)
}

/// Identifies a directory by device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    device_major: u32,
    device_minor: u32,
    inode: u64,
}

impl Identity {
    pub fn of(directory: impl AsFd) -> Result<Self> {
        stat(directory.as_fd(), c"").map(|stat| Self {
            device_major: stat.stx_dev_major,
            device_minor: stat.stx_dev_minor,
            inode: stat.stx_ino,
        })
    }

    fn is_on_device_of(self, other: Self) -> bool {
        (self.device_major, self.device_minor) == (other.device_major, other.device_minor)
    }

    /// Opens `..` of `child`, which must be this directory: `ESTALE` if the child was moved
    /// meanwhile.
    pub fn open_parent(self, child: &OwnedFd) -> Result<OwnedFd> {
        let parent = open_dir(child, c"..", ResolveFlags::NO_XDEV).map_err(at("open", c".."))?;
        if Self::of(&parent)? == self { Ok(parent) } else { Err(at("return to", c"..")(Errno::STALE)) }
    }
}

/// Attributes of `name` in `parent`, without following a link; of `parent` itself if the name is
/// empty.
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

/// Adds to an errno its operation and the untrusted name.
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
pub(crate) mod tests;
