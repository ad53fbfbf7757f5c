//! Operations on whole trees of users' files: copy, count, change of group.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, SeekFrom, Statx, StatxFlags, StatxTimestamp, Timespec,
    Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::backend::copies::{Count, Progress};
use linux::tree::{self, Changes, GroupAccess, Identity, Visitor, WITHIN, at, file_type, open_dir, stat};

/// How a copied file gets its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyMode {
    /// The copy shares the extents (FICLONE) until one of the two is written to.
    Reflink,
    Bytes,
}

impl Count {
    fn add(&mut self, stat: &Statx) {
        self.bytes = self.bytes.saturating_add(charge(stat));
        self.inodes += 1;
    }
}

const BLOCK: u64 = 4096;

/// The bytes that a file is charged: its blocks, but none beyond the end of a regular file with
/// content, where XFS preallocates.
fn charge(stat: &Statx) -> u64 {
    let blocks = stat.stx_blocks.saturating_mul(512);
    match file_type(stat) {
        FileType::RegularFile if stat.stx_size > 0 => blocks.min(stat.stx_size.next_multiple_of(BLOCK)),
        _ => blocks,
    }
}

/// Counts everything below `root`, with `root` itself. A file with several links counts once. No file is remembered: a
/// tree may have tens of millions with several links.
pub(super) fn count_tree(root: BorrowedFd<'_>, stop: &AtomicBool) -> linux::Result<Count> {
    #[derive(Default)]
    struct Counter {
        count: Count,
        /// By the number of a file's links, all of which are in the tree: how many were seen, and the bytes of the file
        /// at each of them.
        linked: HashMap<u32, Count>,
        /// Whether each further name of a file counts as an inode, as in the daemon's own count;
        /// not on Btrfs.
        names_take_inodes: bool,
    }
    impl Visitor for Counter {
        fn file(&mut self, _parent: BorrowedFd<'_>, _name: &CStr, stat: &Statx) -> linux::Result<()> {
            match stat.stx_nlink {
                0 | 1 => self.count.add(stat),
                links => self.linked.entry(links).or_default().add(stat),
            }
            Ok(())
        }
        fn enter(&mut self, _name: &CStr) -> linux::Result<()> {
            Ok(())
        }
        fn leave(&mut self, directory: BorrowedFd<'_>) -> linux::Result<()> {
            stat(directory, c"").map(|stat| self.count.add(&stat))
        }
    }
    let names_take_inodes = linux::btrfs::is_btrfs(root).map_err(at("statfs", c"."))?;
    let mut counter = Counter { names_take_inodes, ..Counter::default() };
    tree::walk(root, Changes::Refused, stop, &mut counter)?;
    let Counter { mut count, linked, names_take_inodes } = counter;
    for (links, names) in linked {
        let links = u64::from(links);
        count.bytes = count.bytes.saturating_add(names.bytes.div_ceil(links));
        count.inodes += if names_take_inodes { names.inodes } else { names.inodes.div_ceil(links) };
    }
    Ok(count)
}

/// Gives the tree to a group. Does nothing if the root has the group, because the root changes
/// last.
pub(super) fn give_group_once(root: BorrowedFd<'_>, gid: u32) -> linux::Result<()> {
    if tree::has_group(root, gid, GroupAccess::ReadWrite)? {
        return Ok(());
    }
    tree::give_group(root, gid, GroupAccess::ReadWrite, &AtomicBool::new(false))
}

/// Copies everything below `from` into the empty directory `to`: content with its holes, modes,
/// owners, times, extended attributes and ACLs, symbolic links as they are, FIFOs, sockets and hard
/// links. Returns what the copy holds. `links` is an empty directory on the same file system that
/// the copy uses to find hard links.
///
/// The tree must not change meanwhile: a directory that was moved away is `ESTALE`.
pub(super) fn copy_tree(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    links: BorrowedFd<'_>,
    mode: CopyMode,
    progress: &Progress,
) -> linux::Result<Count> {
    let to = open_dir(to, c".", rustix::fs::ResolveFlags::empty()).map_err(at("open", c"."))?;
    // All files created below inherit it: overwriting shared extents then takes only the written
    // size.
    if let Err(errno) = linux::xfs::copy_single_blocks_below(&to) {
        tracing::warn!(%errno, "xfs: overwriting what a copy shares will take more than is written");
    }
    let mut copier = Copier {
        to,
        above: Vec::new(),
        links,
        mode,
        made: Made { progress, count: Count::default(), names: 0, attribute_bytes: 0 },
        names_take_inodes: linux::btrfs::is_btrfs(from).map_err(at("statfs", c"."))?,
        buffer: vec![0; CHUNK],
    };
    tree::walk(from, Changes::Refused, &progress.stop, &mut copier)?;
    Ok(copier.made.count)
}

/// linux/limits.h.
const XATTR_SIZE_MAX: usize = 65536;
const CHUNK: usize = 256 << 10;
const TOO_MUCH: &str = "copy (more than its volume may hold)";

struct Copier<'a> {
    /// The copy of the current directory.
    to: OwnedFd,
    above: Vec<Identity>,
    /// Has one more name of each copied file with further names still to come. They are not remembered: a tree may have
    /// tens of millions.
    links: BorrowedFd<'a>,
    mode: CopyMode,
    made: Made<'a>,
    names_take_inodes: bool,
    buffer: Vec<u8>,
}

/// What the copy holds so far, with its limits.
struct Made<'a> {
    progress: &'a Progress,
    count: Count,
    names: u64,
    /// Bytes of names and values of extended attributes, which `progress` does not report.
    attribute_bytes: u64,
}

impl Made<'_> {
    fn add_name(&mut self, name: &CStr) -> linux::Result<()> {
        self.names += 1;
        self.check().map_err(at(TOO_MUCH, name))
    }

    fn add_attribute(&mut self, bytes: usize) -> Result<(), Errno> {
        self.attribute_bytes = self.attribute_bytes.saturating_add(bytes as u64);
        self.check()
    }

    fn check(&self) -> Result<(), Errno> {
        self.progress.check(self.count, self.names, self.attribute_bytes)
    }
}

impl Visitor for Copier<'_> {
    fn file(&mut self, parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> linux::Result<()> {
        self.made.add_name(name)?;
        if self.link(name, stat).map_err(at("link", name))? {
            if self.names_take_inodes {
                self.made.count.inodes += 1;
            }
            return Ok(());
        }
        match file_type(stat) {
            FileType::RegularFile => self.regular(parent, name)?,
            FileType::Symlink => {
                let target =
                    rustix::fs::readlinkat(parent, name, Vec::new()).map_err(at("read link", name))?;
                rustix::fs::symlinkat(&target, &self.to, name).map_err(at("symlink", name))?;
                self.special(parent, name, stat)?;
            }
            kind => {
                let device = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
                rustix::fs::mknodat(&self.to, name, kind, Mode::RUSR, device).map_err(at("mknod", name))?;
                self.special(parent, name, stat)?;
            }
        }
        self.made.count.add(&tree::stat(self.to.as_fd(), name)?);
        self.made.check().map_err(at(TOO_MUCH, name))?;
        self.keep_link(name, stat).map_err(at("link", name))
    }

    fn enter(&mut self, name: &CStr) -> linux::Result<()> {
        self.made.add_name(name)?;
        rustix::fs::mkdirat(&self.to, name, Mode::RWXU).map_err(at("mkdir", name))?;
        let child = open_dir(&self.to, name, WITHIN).map_err(at("open", name))?;
        self.above.push(Identity::of(&self.to)?);
        self.to = child;
        Ok(())
    }

    fn leave(&mut self, directory: BorrowedFd<'_>) -> linux::Result<()> {
        // Last: each new entry changes the times, and a default ACL would have been inherited by
        // the children.
        copy_attributes(&mut self.made, directory, self.to.as_fd(), c".", &stat(directory, c"")?)?;
        self.made.count.add(&stat(self.to.as_fd(), c"")?);
        if let Some(above) = self.above.pop() {
            self.to = above.open_parent(&self.to)?;
        }
        Ok(())
    }
}

impl Copier<'_> {
    fn regular(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> linux::Result<()> {
        let source = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOATIME | OFlags::CLOEXEC;
        let source =
            rustix::fs::openat2(parent, name, source, Mode::empty(), WITHIN).map_err(at("open", name))?;
        let found = stat(source.as_fd(), c"")?;
        if file_type(&found) != FileType::RegularFile {
            return Err(at("open", name)(Errno::STALE));
        }
        let copy = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let copy =
            rustix::fs::openat2(&self.to, name, copy, Mode::RUSR, WITHIN).map_err(at("create", name))?;
        self.content(&source, &copy, found.stx_size).map_err(at("copy", name))?;
        copy_attributes(&mut self.made, source.as_fd(), copy.as_fd(), name, &found)
    }

    fn content(&mut self, source: &OwnedFd, copy: &OwnedFd, size: u64) -> Result<(), Errno> {
        if self.mode == CopyMode::Reflink {
            match rustix::fs::ioctl_ficlone(copy, source) {
                // Some files share no extents even where others do: swap files, and files without
                // checksums next to files with them.
                Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::TXTBSY) => {}
                done => return done,
            }
        }
        rustix::fs::ftruncate(copy, size)?;
        let mut offset = 0;
        while let Some((start, end)) = next_data(source, offset, size)? {
            self.bytes(source, copy, start, end)?;
            offset = end;
        }
        Ok(())
    }

    fn bytes(&mut self, source: &OwnedFd, copy: &OwnedFd, mut start: u64, end: u64) -> Result<(), Errno> {
        while start < end {
            self.made.check()?;
            let wanted = usize::try_from(end - start).unwrap_or(CHUNK).min(CHUNK);
            let read = rustix::io::pread(source, &mut self.buffer[..wanted], start)?;
            if read == 0 {
                return Err(Errno::STALE);
            }
            let mut written = 0;
            while written < read {
                written += rustix::io::pwrite(copy, &self.buffer[written..read], start + written as u64)?;
            }
            start += read as u64;
            self.made.progress.done_bytes.fetch_add(read as u64, Ordering::Relaxed);
            self.made.progress.all_bytes.inc_by(read as u64);
        }
        Ok(())
    }

    fn special(&mut self, parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> linux::Result<()> {
        let (source, copy) = (open_path(parent, name)?, open_path(self.to.as_fd(), name)?);
        copy_attributes(&mut self.made, source.as_fd(), copy.as_fd(), name, stat)
    }

    /// Makes `name` a further link if its file is copied already. True if it was.
    fn link(&mut self, name: &CStr, stat: &Statx) -> Result<bool, Errno> {
        if stat.stx_nlink < 2 {
            return Ok(false);
        }
        let kept = kept_name(stat);
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let copied = match rustix::fs::statx(self.links, &*kept, flags, StatxFlags::NLINK) {
            Err(Errno::NOENT) => return Ok(false),
            found => found?.stx_nlink,
        };
        if copied < stat.stx_nlink {
            rustix::fs::linkat(self.links, &*kept, &self.to, name, AtFlags::empty())?;
        } else {
            // Never one link more than the source has: the source may be at the file system's
            // limit.
            rustix::fs::renameat(self.links, &*kept, &self.to, name)?;
        }
        Ok(true)
    }

    /// Keeps a name of the copy, by which its further links are made.
    fn keep_link(&mut self, name: &CStr, stat: &Statx) -> Result<(), Errno> {
        if stat.stx_nlink > 1 {
            rustix::fs::linkat(&self.to, name, self.links, &*kept_name(stat), AtFlags::empty())?;
        }
        Ok(())
    }
}

/// How the calls that copy attributes reach a file. Calls on descriptors are faster, but they
/// refuse an O_PATH descriptor.
enum Reach<'a> {
    Open(BorrowedFd<'a>),
    ByName(CString),
}

impl<'a> Reach<'a> {
    fn of(file: BorrowedFd<'a>, kind: FileType) -> Self {
        match kind {
            FileType::RegularFile | FileType::Directory => Self::Open(file),
            _ => Self::ByName(by_descriptor(file)),
        }
    }

    /// Total bytes of the attributes' names.
    fn attributes_length(&self) -> Result<usize, Errno> {
        match self {
            Self::Open(file) => rustix::fs::flistxattr_query(file),
            Self::ByName(path) => rustix::fs::listxattr_query(path.as_c_str()),
        }
    }

    fn attributes(&self, names: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Self::Open(file) => rustix::fs::flistxattr(file, names),
            Self::ByName(path) => rustix::fs::listxattr(path.as_c_str(), names),
        }
    }

    fn attribute(&self, name: &CStr, value: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Self::Open(file) => rustix::fs::fgetxattr(file, name, value),
            Self::ByName(path) => rustix::fs::getxattr(path.as_c_str(), name, value),
        }
    }

    fn set_attribute(&self, name: &CStr, value: &[u8]) -> Result<(), Errno> {
        match self {
            Self::Open(file) => rustix::fs::fsetxattr(file, name, value, XattrFlags::empty()),
            Self::ByName(path) => rustix::fs::setxattr(path.as_c_str(), name, value, XattrFlags::empty()),
        }
    }

    fn set_mode(&self, mode: Mode) -> Result<(), Errno> {
        match self {
            Self::Open(file) => rustix::fs::fchmod(file, mode),
            Self::ByName(path) => rustix::fs::chmod(path.as_c_str(), mode),
        }
    }

    fn set_times(&self, times: &Timestamps) -> Result<(), Errno> {
        match self {
            Self::Open(file) => rustix::fs::futimens(file, times),
            Self::ByName(path) => rustix::fs::utimensat(CWD, path.as_c_str(), times, AtFlags::empty()),
        }
    }
}

/// Copies everything but the content, in this order: a change of owner drops capabilities and
/// setuid, an ACL changes the mode, and all of them change the times.
fn copy_attributes(
    made: &mut Made<'_>,
    source: BorrowedFd<'_>,
    copy: BorrowedFd<'_>,
    name: &CStr,
    stat: &Statx,
) -> linux::Result<()> {
    // A new file belongs to root: no other process creates files in `incoming`.
    if (stat.stx_uid, stat.stx_gid) != (0, 0) {
        let owner = (Uid::from_raw(stat.stx_uid), Gid::from_raw(stat.stx_gid));
        rustix::fs::chownat(copy, c"", Some(owner.0), Some(owner.1), AtFlags::EMPTY_PATH)
            .map_err(at("chown", name))?;
    }
    let kind = file_type(stat);
    let (source, copy) = (Reach::of(source, kind), Reach::of(copy, kind));
    copy_xattrs(made, &source, &copy, name)?;
    if kind != FileType::Symlink {
        copy.set_mode(mode_of(stat)).map_err(at("chmod", name))?;
    }
    let times =
        Timestamps { last_access: timespec(stat.stx_atime), last_modification: timespec(stat.stx_mtime) };
    copy.set_times(&times).map_err(at("set times of", name))
}

fn copy_xattrs(made: &mut Made<'_>, source: &Reach<'_>, copy: &Reach<'_>, name: &CStr) -> linux::Result<()> {
    let length = match source.attributes_length() {
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(()),
        other => other.map_err(at("list attributes of", name))?,
    };
    let mut names = vec![0; length];
    let length = source.attributes(&mut names).map_err(at("list attributes of", name))?;
    let mut value = vec![0; XATTR_SIZE_MAX];
    for attribute in names[..length].split_inclusive(|byte| *byte == 0) {
        let Ok(attribute) = CStr::from_bytes_with_nul(attribute) else { continue };
        if !is_copied(attribute) {
            continue;
        }
        let length = source.attribute(attribute, &mut value).map_err(at("read an attribute of", name))?;
        made.add_attribute(attribute.count_bytes() + length).map_err(at(TOO_MUCH, name))?;
        copy.set_attribute(attribute, &value[..length]).map_err(at("set an attribute of", name))?;
    }
    Ok(())
}

/// Attributes that users set, and those that the kernel keeps for them: ACLs, capabilities, labels.
fn is_copied(attribute: &CStr) -> bool {
    let families: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
    families.iter().any(|family| attribute.to_bytes().starts_with(family))
}

/// The first range with content at or after `offset`. If the file system cannot report holes, all
/// the rest of the file.
fn next_data(file: &OwnedFd, offset: u64, size: u64) -> Result<Option<(u64, u64)>, Errno> {
    if offset >= size {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL) => return Ok(Some((offset, size))),
        other => other?,
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some((start, end.min(size))))
}

fn kept_name(stat: &Statx) -> String {
    stat.stx_ino.to_string()
}

fn mode_of(stat: &Statx) -> Mode {
    Mode::from_raw_mode(u32::from(stat.stx_mode) & 0o7777)
}

fn timespec(stamp: StatxTimestamp) -> Timespec {
    Timespec { tv_sec: stamp.tv_sec, tv_nsec: stamp.tv_nsec.into() }
}

/// Opens the file itself, of any type; symbolic links are not followed.
fn open_path(parent: BorrowedFd<'_>, name: &CStr) -> linux::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), WITHIN).map_err(at("open", name))
}

/// A path by which calls without a descriptor variant reach a descriptor's file, also a symbolic
/// link (proc(5)).
fn by_descriptor(file: BorrowedFd<'_>) -> CString {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    CString::new(path).expect("digits hold no zero byte")
}

#[cfg(test)]
mod tests;
