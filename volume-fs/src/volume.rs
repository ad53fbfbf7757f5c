//! The file system over the volume's directory: what each request does to the
//! backing files. Knows nothing of fuser's replies.
//!
//! Permissions are checked by the kernel before a request is sent (FUSE_POSIX_ACL
//! implies default_permissions); here every file is reached with
//! CAP_DAC_OVERRIDE, and only what is created is created as its caller.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use fuser::{FileAttr, FileHandle, FileType};
use linux::credentials::{self, Caller, CapabilitySet};
use linux::fs_at::{self, DescriptorDir};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType as BackingType, Gid, Mode, OFlags, RenameFlags, SeekFrom, StatVfs,
    Statx, StatxFlags, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::attributes::{Origin, file_type};
use crate::count;
use crate::directory::{Directory, Entry, Taken};
use crate::errno::{self, Result};
use crate::handles::Handles;
use crate::nodes::{Nodes, Place, stat};
use crate::quota::{self, BLOCK_BYTES, Charged, Quota, Reservation, Use, charge};

/// While acting as a caller: the kernel has checked the directory's mode with
/// all the caller's groups, and has taken setgid off a mode that may not have it.
const KEPT_AS_CALLER: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FSETID);

/// open(2) flags that reach the backing file. Not O_APPEND (pwrite(2) would
/// ignore the offset, which the kernel has computed) nor O_DIRECT (our buffers
/// are not aligned; the request itself already went past the page cache above).
const PASSED_ON: OFlags = OFlags::RWMODE.union(OFlags::SYNC).union(OFlags::DSYNC).union(OFlags::NOATIME);

/// Extended attributes of one file, names and values together: what ext4 has
/// room for beside the inode. They are not charged, and xfs would keep any number.
const MOST_XATTR_BYTES: usize = 4096;

/// Descriptors that no open file takes: directories are listed in half of them,
/// and the driver and scrapers are answered, whatever a pod has opened.
const MOST_KEPT_FREE: usize = 2048;

/// What is served.
#[derive(Debug)]
pub struct Source {
    /// O_PATH descriptor of a detached mount's root.
    pub directory: OwnedFd,
    pub read_only: bool,
}

#[derive(Debug)]
pub(crate) struct Volume {
    origin: Origin,
    nodes: Nodes,
    root: Arc<OwnedFd>,
    descriptors: DescriptorDir,
    files: Handles<OpenFile>,
    directories: Handles<Directory>,
    quota: Arc<Quota>,
    read_only: bool,
}

#[derive(Debug)]
struct OpenFile {
    id: u64,
    fd: OwnedFd,
}

/// A file the kernel is told of.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) attributes: FileAttr,
    pub(crate) generation: u64,
}

/// The part of setattr that is asked for.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) times: Option<Timestamps>,
}

/// One end of copy_file_range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) handle: FileHandle,
    pub(crate) offset: u64,
}

/// What a file is to be created with, as asked for (FUSE_DONT_MASK).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permissions {
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

/// What mknod may create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Regular,
    Fifo,
    Socket,
}

impl Volume {
    pub(crate) fn open(
        source: Source,
        descriptors: DescriptorDir,
        descriptor_limit: u64,
        quota: Arc<Quota>,
    ) -> crate::Result<Self> {
        let root = Arc::new(source.directory);
        let seen = stat(&root).map_err(|e| crate::Error::Kernel {
            step: "open volume",
            source: linux::Error::new("statx", "the volume's directory", e),
        })?;
        let origin = Origin::of_root(&seen);
        let nodes = Nodes::new(Arc::clone(&root), origin, descriptor_limit, Arc::clone(&quota));
        let limit = usize::try_from(descriptor_limit).unwrap_or(usize::MAX);
        let kept_free = (limit / 4).min(MOST_KEPT_FREE);
        Ok(Self {
            origin,
            files: Handles::new(limit.saturating_sub(nodes.most_descriptors() + kept_free)),
            directories: Handles::new(kept_free / 2),
            nodes,
            root,
            descriptors,
            quota,
            read_only: source.read_only,
        })
    }

    /// What the whole tree takes. Nothing may change meanwhile.
    pub(crate) fn count(&self) -> Result<Use> {
        count::count(&*self.root, self.origin)
    }

    pub(crate) fn open_files(&self) -> usize {
        self.files.count()
    }

    pub(crate) fn known_nodes(&self) -> usize {
        self.nodes.count()
    }

    // Names.

    pub(crate) fn look_up(&self, directory: u64, name: &OsStr) -> Result<Known> {
        self.find(directory, name).map(|(known, _seen)| known)
    }

    fn find(&self, directory: u64, name: &OsStr) -> Result<(Known, Statx)> {
        let place = Place { directory, name: component(name)? };
        let parent = self.nodes.descriptor(directory)?;
        loop {
            let names = self.nodes.names_now(directory);
            let fd = self.nodes.open_path(&parent, &place.name)?;
            let seen = stat(&fd)?;
            let known = self.known(&seen, fd.as_fd(), c"")?;
            let id = known.attributes.ino.0;
            // Whenever it has to be looked up again, a rename or a removal has been made.
            if self.nodes.remember_if_still_there((id, &place), fd, names).is_none() {
                return Ok((known, seen));
            }
        }
    }

    pub(crate) fn forget(&self, id: u64, lookups: u64) {
        // Written back since it was last measured, most likely.
        if self.quota.is_unsettled(id)
            && let Ok(file) = self.nodes.descriptor(id)
        {
            self.quota.settle(id, None, || measure(&file));
        }
        self.nodes.forget(id, lookups);
    }

    pub(crate) fn make_directory(
        &self,
        directory: u64,
        name: &OsStr,
        permissions: Permissions,
        caller: Caller,
    ) -> Result<Known> {
        self.create_name(directory, name, |parent, name| {
            let mode = self.granted(parent, permissions)?;
            as_caller(caller, || rustix::fs::mkdirat(parent, name, mode))
        })
    }

    pub(crate) fn make_special(
        &self,
        directory: u64,
        name: &OsStr,
        (special, permissions): (Special, Permissions),
        caller: Caller,
    ) -> Result<Known> {
        let kind = match special {
            Special::Regular => BackingType::RegularFile,
            Special::Fifo => BackingType::Fifo,
            Special::Socket => BackingType::Socket,
        };
        self.create_name(directory, name, |parent, name| {
            let mode = self.granted(parent, permissions)?;
            as_caller(caller, || rustix::fs::mknodat(parent, name, kind, mode, 0))
        })
    }

    pub(crate) fn make_symlink(
        &self,
        directory: u64,
        name: &OsStr,
        target: &OsStr,
        caller: Caller,
    ) -> Result<Known> {
        self.create_name(directory, name, |parent, name| {
            as_caller(caller, || rustix::fs::symlinkat(target, parent, name))
        })
    }

    pub(crate) fn link(&self, id: u64, directory: u64, name: &OsStr) -> Result<Known> {
        self.writable()?;
        let new_name = component(name)?;
        let (file, parent) = (self.nodes.descriptor(id)?, self.nodes.descriptor(directory)?);
        self.quota.admit_block()?;
        self.settling(directory, &parent, || self.descriptors.link(file.as_fd(), parent.as_fd(), &new_name))?;
        self.look_up(directory, name)
    }

    pub(crate) fn remove(&self, directory: u64, name: &OsStr, kind: AtFlags) -> Result<()> {
        self.writable()?;
        let place = Place { directory, name: component(name)? };
        let parent = self.nodes.descriptor(directory)?;
        let found = self.found_at(&parent, &place)?;
        self.settling(directory, &parent, || rustix::fs::unlinkat(&parent, &place.name, kind))?;
        if let Some(found) = found {
            self.lost(found, &place);
        }
        Ok(())
    }

    pub(crate) fn rename(
        &self,
        (from_directory, from_name): (u64, &OsStr),
        (to_directory, to_name): (u64, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        self.writable()?;
        // A whiteout is a device node.
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(Errno::INVAL);
        }
        let from = Place { directory: from_directory, name: component(from_name)? };
        let to = Place { directory: to_directory, name: component(to_name)? };
        let (from_parent, to_parent) =
            (self.nodes.descriptor(from_directory)?, self.nodes.descriptor(to_directory)?);
        let moving = self.found_at(&from_parent, &from)?;
        let in_the_way = self.found_at(&to_parent, &to)?;
        if in_the_way.is_none() {
            self.quota.admit_block()?;
        }
        self.settling(from_directory, &from_parent, || {
            self.settling(to_directory, &to_parent, || {
                rustix::fs::renameat_with(&from_parent, &from.name, &to_parent, &to.name, flags)
            })
        })?;
        let id = |found: &Option<Found>| found.as_ref().map(|found| found.id);
        if id(&moving).is_some() && id(&moving) == id(&in_the_way) {
            // Two names of one file: rename(2) does nothing.
            return Ok(());
        }
        match in_the_way {
            Some(other) if flags.contains(RenameFlags::EXCHANGE) => {
                self.nodes.moved(other.id, &to, from.clone());
            }
            Some(replaced) => self.lost(replaced, &to),
            None => {}
        }
        if let Some(moved) = moving {
            self.nodes.moved(moved.id, &from, to);
        }
        Ok(())
    }

    pub(crate) fn read_link(&self, id: u64) -> Result<Vec<u8>> {
        let fd = self.nodes.descriptor(id)?;
        rustix::fs::readlinkat(&*fd, c"", Vec::new()).map(CString::into_bytes)
    }

    // Attributes.

    pub(crate) fn attributes(&self, id: u64, handle: Option<FileHandle>) -> Result<FileAttr> {
        // An open file answers for itself: no descriptor has to be opened again.
        if let Some(file) = handle.and_then(|handle| self.files.get(handle).ok()) {
            return self.origin.attributes(&stat(&file.fd)?);
        }
        self.origin.attributes(&stat(self.nodes.descriptor(id)?)?)
    }

    pub(crate) fn change(&self, id: u64, handle: Option<FileHandle>, changes: &Changes) -> Result<FileAttr> {
        self.writable()?;
        let fd = self.nodes.descriptor(id)?;
        if let Some(size) = changes.size {
            self.truncate((id, &fd), handle, size)?;
        }
        let asked_for_nothing = changes.mode.or(changes.uid).or(changes.gid).is_none()
            && changes.size.is_none()
            && changes.times.is_none();
        if changes.uid.is_some() || changes.gid.is_some() || asked_for_nothing {
            // A request for nothing is how FUSE_HANDLE_KILLPRIV_V2 says "clear
            // suid and sgid" (and chown(-1, -1), which does the same).
            let (uid, gid) = (changes.uid.map(Uid::from_raw), changes.gid.map(Gid::from_raw));
            rustix::fs::chownat(&*fd, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = changes.mode {
            // After chown, which clears suid and sgid.
            self.descriptors.chmod(fd.as_fd(), mode_bits(mode))?;
        }
        if let Some(times) = &changes.times {
            rustix::fs::utimensat(&*fd, c"", times, AtFlags::EMPTY_PATH)?;
        }
        self.origin.attributes(&stat(&*fd)?)
    }

    /// Always clears suid and sgid: the request says whether the caller may
    /// keep them, but fuser 0.18 does not say it on. POSIX leaves it open.
    fn truncate(&self, (id, node): (u64, &OwnedFd), handle: Option<FileHandle>, size: u64) -> Result<()> {
        let file = match handle.and_then(|handle| self.files.get(handle).ok()) {
            Some(open) => open,
            None => Arc::new(OpenFile { id, fd: self.reopen(node, OFlags::WRONLY)? }),
        };
        self.settling(id, &file.fd, || clearing_setid(|| rustix::fs::ftruncate(&file.fd, size)))
    }

    /// Of a volume with a limit its own numbers: size less free is what it
    /// uses. Available is never more than the backing file system has; of
    /// inodes FUSE has no such number.
    pub(crate) fn statistics(&self) -> Result<StatVfs> {
        let mut statistics = rustix::fs::fstatvfs(&*self.root)?;
        let quota::UsageNow { limits, used, .. } = self.quota.usage();
        if limits.bytes > 0 {
            let backing = statistics.f_bavail.saturating_mul(statistics.f_frsize);
            let free = limits.bytes.saturating_sub(used.bytes);
            (statistics.f_bsize, statistics.f_frsize) = (BLOCK_BYTES, BLOCK_BYTES);
            statistics.f_blocks = limits.bytes / BLOCK_BYTES;
            statistics.f_bfree = free / BLOCK_BYTES;
            statistics.f_bavail = free.min(backing) / BLOCK_BYTES;
        }
        if limits.inodes > 0 {
            let free = limits.inodes.saturating_sub(used.inodes);
            statistics.f_files = limits.inodes;
            (statistics.f_ffree, statistics.f_favail) = (free, free);
        }
        Ok(statistics)
    }

    // Files.

    pub(crate) fn create(
        &self,
        directory: u64,
        name: &OsStr,
        (permissions, flags): (Permissions, OFlags),
        caller: Caller,
    ) -> Result<(Known, FileHandle)> {
        self.writable()?;
        let place = Place { directory, name: component(name)? };
        let parent = self.nodes.descriptor(directory)?;
        // Always exclusive: opening what somebody else created meanwhile would
        // go past the permission check.
        let open = (flags & PASSED_ON) | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = self.granted(&parent, permissions)?;
        self.files.admit()?;
        let inode = self.quota.reserve_inode()?;
        self.quota.admit_block()?;
        let created = self.settling(directory, &parent, || {
            self.nodes.with_descriptors(|| {
                as_caller(caller, || rustix::fs::openat(&parent, &place.name, open, mode))
            })
        });
        let file = match created {
            // The kernel looks again, and opens what it finds.
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => return Err(Errno::STALE),
            other => other?,
        };
        inode.keep();
        let seen = stat(&file)?;
        let known = self.known(&seen, file.as_fd(), c"")?;
        let id = known.attributes.ino.0;
        self.quota.add(id, charge(&seen));
        self.nodes.remember(id, place, None);
        Ok((known, self.files.insert(OpenFile { id, fd: file })))
    }

    pub(crate) fn open_file(&self, id: u64, flags: OFlags) -> Result<FileHandle> {
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            self.writable()?;
        }
        self.files.admit()?;
        let node = self.nodes.descriptor(id)?;
        let fd = self.reopen(&node, flags & PASSED_ON)?;
        Ok(self.files.insert(OpenFile { id, fd }))
    }

    pub(crate) fn release_file(&self, handle: FileHandle) {
        if let Some(file) = self.files.remove(handle) {
            // What was written late may have taken or given back a block.
            self.quota.settle(file.id, None, || measure(&file.fd));
            self.quota.closed(file.id);
        }
    }

    pub(crate) fn read(&self, handle: FileHandle, offset: u64, size: u32) -> Result<Vec<u8>> {
        let file = self.files.get(handle)?;
        let size = usize::try_from(size).map_err(|_| Errno::INVAL)?;
        let mut data = Vec::with_capacity(size);
        // FUSE takes a short answer for the end of the file.
        while data.len() < size {
            let at = offset + data.len() as u64;
            match rustix::io::pread(&file.fd, rustix::buffer::spare_capacity(&mut data), at) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) if data.is_empty() => return Err(errno),
                Err(_) => break,
            }
        }
        data.truncate(size);
        Ok(data)
    }

    /// How many bytes of `data` were written: as many as fit. `clear_setid`:
    /// the caller may not keep suid and sgid.
    pub(crate) fn write(
        &self,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        clear_setid: bool,
    ) -> Result<usize> {
        let file = self.files.get(handle)?;
        let (fitting, reserved) = self.make_room(&file, offset, data.len() as u64)?;
        let data = &data[..data.len().min(usize::try_from(fitting).unwrap_or(usize::MAX))];
        let write = || write_all(&file.fd, offset, data);
        // With CAP_FSETID, which we have, the backing file would keep the bits.
        let written = if clear_setid && has_setid(&file.fd)? { clearing_setid(write) } else { write() };
        self.quota.settle(file.id, Some(reserved), || measure(&file.fd));
        written
    }

    /// What close(2) of the backing file would report.
    pub(crate) fn flush(&self, handle: FileHandle) -> Result<()> {
        let file = self.files.get(handle)?;
        let duplicate = self.nodes.with_descriptors(|| rustix::io::fcntl_dupfd_cloexec(&file.fd, 0))?;
        nix::unistd::close(duplicate).map_err(errno::from_nix)
    }

    pub(crate) fn synchronise(&self, handle: FileHandle, data_only: bool) -> Result<()> {
        let file = self.files.get(handle)?;
        synchronise(file.fd.as_fd(), data_only)?;
        self.quota.settle(file.id, None, || measure(&file.fd));
        Ok(())
    }

    pub(crate) fn allocate(
        &self,
        handle: FileHandle,
        (offset, length): (u64, u64),
        mode: FallocateFlags,
    ) -> Result<()> {
        let file = self.files.get(handle)?;
        let allocate = || rustix::fs::fallocate(&file.fd, mode, offset, length);
        if mode.contains(FallocateFlags::PUNCH_HOLE) {
            return self.settling(file.id, &file.fd, allocate);
        }
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        // Blocks beyond the end of a file are not charged for, so nobody gets any.
        if mode.contains(FallocateFlags::KEEP_SIZE) && end > quota::whole_blocks(stat(&file.fd)?.stx_size) {
            return Err(Errno::OPNOTSUPP);
        }
        let before = self.quota.before_change(file.id, || measure(&file.fd))?;
        let reserved = self.quota.retrying(|| self.reserve(&file.fd, (offset, end), before))?;
        let allocated = allocate();
        self.quota.settle(file.id, Some(reserved), || measure(&file.fd));
        allocated
    }

    pub(crate) fn seek(&self, handle: FileHandle, position: SeekFrom) -> Result<u64> {
        rustix::fs::seek(&self.files.get(handle)?.fd, position)
    }

    pub(crate) fn copy_range(&self, from: Range, to: Range, length: u64) -> Result<usize> {
        let (source, target) = (self.files.get(from.handle)?, self.files.get(to.handle)?);
        let (mut from_offset, mut to_offset) = (from.offset, to.offset);
        let length = length.min(stat(&source.fd)?.stx_size.saturating_sub(from.offset));
        let (fitting, reserved) = self.make_room(&target, to.offset, length)?;
        let copied = rustix::fs::copy_file_range(
            &source.fd,
            Some(&mut from_offset),
            &target.fd,
            Some(&mut to_offset),
            usize::try_from(fitting).unwrap_or(usize::MAX),
        );
        self.quota.settle(target.id, Some(reserved), || measure(&target.fd));
        copied
    }

    // Directories.

    pub(crate) fn open_directory(&self, id: u64) -> Result<FileHandle> {
        self.directories.admit()?;
        let node = self.nodes.descriptor(id)?;
        let fd = self.reopen(&node, OFlags::RDONLY | OFlags::DIRECTORY)?;
        Ok(self.directories.insert(Directory::new(fd)))
    }

    pub(crate) fn release_directory(&self, handle: FileHandle) {
        drop(self.directories.remove(handle));
    }

    pub(crate) fn synchronise_directory(&self, handle: FileHandle, data_only: bool) -> Result<()> {
        synchronise(self.directories.get(handle)?.as_fd(), data_only)
    }

    /// Names and kinds from the cookie `offset` on.
    pub(crate) fn list(
        &self,
        handle: FileHandle,
        offset: u64,
        mut take: impl FnMut(Listed<'_>) -> Taken,
    ) -> Result<()> {
        self.directories.get(handle)?.read(offset, |entry| take(self.listed(entry)))
    }

    /// The same with attributes; each entry taken counts as a lookup, but for `.` and `..`.
    pub(crate) fn list_known(
        &self,
        id: u64,
        handle: FileHandle,
        offset: u64,
        mut take: impl FnMut(Listed<'_>, &Known) -> Taken,
    ) -> Result<()> {
        let directory = self.directories.get(handle)?;
        let own = self.origin.attributes(&stat(&*directory)?)?;
        directory.read(offset, |entry| {
            let listed = self.listed(entry);
            if matches!(entry.name.as_bytes(), b"." | b"..") {
                // Only number and kind of these are looked at; the root's
                // parent is the root.
                let ino =
                    fuser::INodeNo(if entry.name.as_bytes() == b"." || id == 1 { id } else { listed.id });
                return take(listed, &Known { attributes: FileAttr { ino, ..own }, generation: 0 });
            }
            let seen = rustix::fs::statx(&*directory, &entry.name, AtFlags::SYMLINK_NOFOLLOW, WANTED);
            let known = seen.and_then(|seen| self.known(&seen, directory.as_fd(), &entry.name));
            // Removed since it was read, or not of this volume: not there.
            let Ok(known) = known else { return Taken::Yes };
            // Remembered first: an answer that was sent may be used at once.
            let place = Place { directory: id, name: entry.name.clone() };
            self.nodes.remember(known.attributes.ino.0, place, None);
            let taken = take(listed, &known);
            if taken == Taken::No {
                self.nodes.forget(known.attributes.ino.0, 1);
            }
            taken
        })
    }

    // Extended attributes. trusted.* and security.capability are refused by
    // the kernel: the process lacks CAP_SYS_ADMIN and CAP_SETFCAP.

    pub(crate) fn set_xattr(&self, id: u64, name: &OsStr, value: &[u8], flags: XattrFlags) -> Result<()> {
        self.writable()?;
        let (fd, name) = (self.nodes.descriptor(id)?, c_string(name)?);
        let together = self.other_xattr_bytes(fd.as_fd(), &name)? + name.as_bytes().len() + value.len();
        if together > MOST_XATTR_BYTES {
            return Err(Errno::NOSPC);
        }
        self.quota.admit_block()?;
        self.settling(id, &fd, || self.descriptors.set_xattr(fd.as_fd(), &name, value, flags))
    }

    /// Names and values of a file's extended attributes but for `name`. The
    /// kernel lets nobody change them meanwhile.
    fn other_xattr_bytes(&self, fd: BorrowedFd<'_>, name: &CString) -> Result<usize> {
        let size = match self.descriptors.xattr_names_size(fd) {
            Err(Errno::OPNOTSUPP) | Ok(0) => return Ok(0),
            size => size?,
        };
        let names = self.descriptors.xattr_names(fd, size)?;
        let others = names.split(|byte| *byte == 0).filter(|one| !one.is_empty() && *one != name.as_bytes());
        let mut sum = 0;
        for other in others {
            let other = CString::new(other).map_err(|_| Errno::INVAL)?;
            sum += other.as_bytes().len() + self.descriptors.xattr_size(fd, &other)?;
        }
        Ok(sum)
    }

    pub(crate) fn xattr(&self, id: u64, name: &OsStr, size: usize) -> Result<Xattr> {
        let (fd, name) = (self.nodes.descriptor(id)?, c_string(name)?);
        let answer = match size {
            0 => self.descriptors.xattr_size(fd.as_fd(), &name).map(Xattr::Size),
            _ => self.descriptors.xattr(fd.as_fd(), &name, size).map(Xattr::Value),
        };
        match answer {
            // A backing file system without ACLs: to the kernel above, which
            // has them switched on, that is a file without one.
            Err(Errno::OPNOTSUPP) if name.to_bytes().starts_with(b"system.posix_acl_") => Err(Errno::NODATA),
            other => other,
        }
    }

    pub(crate) fn xattr_names(&self, id: u64, size: usize) -> Result<Xattr> {
        let fd = self.nodes.descriptor(id)?;
        match size {
            0 => self.descriptors.xattr_names_size(fd.as_fd()).map(Xattr::Size),
            _ => self.descriptors.xattr_names(fd.as_fd(), size).map(Xattr::Value),
        }
    }

    pub(crate) fn remove_xattr(&self, id: u64, name: &OsStr) -> Result<()> {
        self.writable()?;
        let (fd, name) = (self.nodes.descriptor(id)?, c_string(name)?);
        self.settling(id, &fd, || self.descriptors.remove_xattr(fd.as_fd(), &name))
    }

    // Below the requests.

    fn create_name(
        &self,
        directory: u64,
        name: &OsStr,
        create: impl Fn(&OwnedFd, &CString) -> Result<()>,
    ) -> Result<Known> {
        self.writable()?;
        let new_name = component(name)?;
        let parent = self.nodes.descriptor(directory)?;
        let inode = self.quota.reserve_inode()?;
        self.quota.admit_block()?;
        self.settling(directory, &parent, || create(&parent, &new_name))?;
        inode.keep();
        let (known, seen) = self.find(directory, name)?;
        self.quota.add(known.attributes.ino.0, charge(&seen));
        Ok(known)
    }

    /// Makes a change to a file, and charges it for what that took or gave back.
    fn settling<T>(&self, id: u64, file: &OwnedFd, change: impl FnOnce() -> Result<T>) -> Result<T> {
        self.quota.before_change(id, || measure(file))?;
        let changed = change();
        self.quota.settle(id, None, || measure(file));
        changed
    }

    /// Space for as much of `length` bytes at `offset` as fits, at least one.
    fn make_room(&self, file: &OpenFile, offset: u64, length: u64) -> Result<(u64, Reservation<'_>)> {
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        let before = self.quota.before_change(file.id, || measure(&file.fd))?;
        let most = quota::whole_blocks(end).saturating_sub(offset - offset % BLOCK_BYTES);
        if let Ok(reserved) = self.quota.reserve_amply(most) {
            return Ok((length, reserved));
        }
        match self.quota.retrying(|| self.reserve(&file.fd, (offset, end), before)) {
            Err(Errno::NOSPC) => {}
            other => return other.map(|reserved| (length, reserved)),
        }
        let fitting = quota::longest_fitting(&file.fd, (offset, end), self.quota.free_bytes())?;
        if fitting == offset {
            return Err(Errno::NOSPC);
        }
        self.reserve(&file.fd, (offset, fitting), before).map(|reserved| (fitting - offset, reserved))
    }

    /// Space for exactly what writing the range adds to the charge of `before`.
    fn reserve(&self, file: &OwnedFd, (start, end): (u64, u64), before: u64) -> Result<Reservation<'_>> {
        let whole = quota::whole_blocks(stat(file)?.stx_size.max(end));
        self.quota.reserve(quota::growth(file, (start, end), whole.saturating_sub(before))?)
    }

    /// The umask takes bits away, but not where a default ACL says what a new
    /// file may have (acl(5)): the backing file system applies that one.
    fn granted(&self, parent: &OwnedFd, permissions: Permissions) -> Result<Mode> {
        let Permissions { mode, umask } = permissions;
        if mode & umask & 0o777 == 0 {
            return Ok(mode_bits(mode));
        }
        match self.descriptors.xattr_size(parent.as_fd(), c"system.posix_acl_default") {
            Ok(_) => Ok(mode_bits(mode)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(mode_bits(mode & !umask)),
            Err(errno) => Err(errno),
        }
    }

    fn listed<'a>(&self, entry: &'a Entry) -> Listed<'a> {
        Listed {
            id: self.origin.node_id_of_inode(entry.inode),
            kind: file_type(entry.kind).unwrap_or(FileType::RegularFile),
            name: OsStr::from_bytes(entry.name.as_bytes()),
            next: entry.next,
        }
    }

    fn reopen(&self, node: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
        // Only regular files and directories are opened through FUSE; a FIFO
        // that slipped in must not block an event loop.
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
        self.nodes.with_descriptors(|| self.descriptors.reopen(node.as_fd(), flags))
    }

    fn found_at(&self, parent: &OwnedFd, place: &Place) -> Result<Option<Found>> {
        let seen = match rustix::fs::statx(parent, &place.name, AtFlags::SYMLINK_NOFOLLOW, WANTED) {
            Ok(seen) => seen,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let id = self.origin.node_id(&seen)?;
        let held = if self.nodes.contains(id) { Some(self.held_at(id, parent, place)?) } else { None };
        Ok(Some(Found { id, seen, held }))
    }

    /// A descriptor of a node that has just been seen at `place`.
    fn held_at(&self, id: u64, parent: &OwnedFd, place: &Place) -> Result<Arc<OwnedFd>> {
        match self.nodes.descriptor(id) {
            // Changed behind the mount: it was known by another name.
            Err(Errno::STALE) => {
                let fd = self.nodes.open_path(parent, &place.name)?;
                if self.origin.node_id(&stat(&fd)?)? == id { Ok(Arc::new(fd)) } else { Err(Errno::STALE) }
            }
            other => other,
        }
    }

    /// The file that was found at `place` is not there any more. The kernel
    /// lets no two requests take names from one file at a time.
    fn lost(&self, found: Found, place: &Place) {
        let Found { id, seen, held } = found;
        let is_directory = BackingType::from_raw_mode(seen.stx_mode.into()) == BackingType::Directory;
        let links = match &held {
            Some(held) => stat(held).map_or(0, |now| now.stx_nlink),
            None => seen.stx_nlink.saturating_sub(1),
        };
        let names_left = !is_directory && links > 0;
        match held {
            Some(held) => {
                if !names_left {
                    self.quota.removed(id, charge(&seen));
                }
                self.nodes.removed(id, place, held, names_left);
            }
            None if !names_left => self.quota.free(id, charge(&seen)),
            None => {}
        }
    }

    fn known(&self, seen: &Statx, file: BorrowedFd<'_>, name: &std::ffi::CStr) -> Result<Known> {
        let attributes = self.origin.attributes(seen)?;
        let generation = match fs_at::generation(file, name) {
            // No handles here, or a container's own filter refuses the call:
            // the birth time tells two lives of a number apart nearly as well.
            Err(Errno::OPNOTSUPP | Errno::PERM | Errno::NOSYS) => {
                seen.stx_btime.tv_sec.cast_unsigned().rotate_left(30) ^ u64::from(seen.stx_btime.tv_nsec)
            }
            other => other?,
        };
        Ok(Known { attributes, generation })
    }

    fn writable(&self) -> Result<()> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }
}

/// What is behind a name.
struct Found {
    id: u64,
    seen: Statx,
    /// If the kernel knows it.
    held: Option<Arc<OwnedFd>>,
}

/// An entry of a directory.
#[derive(Debug)]
pub(crate) struct Listed<'a> {
    pub(crate) id: u64,
    pub(crate) kind: FileType,
    pub(crate) name: &'a OsStr,
    pub(crate) next: u64,
}

#[derive(Debug)]
pub(crate) enum Xattr {
    /// The caller asked how large its buffer has to be.
    Size(usize),
    Value(Vec<u8>),
}

const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Creates as `caller`.
fn as_caller<T>(caller: Caller, create: impl FnOnce() -> Result<T>) -> Result<T> {
    credentials::as_caller(caller, KEPT_AS_CALLER, create).map_err(errno::from_nix)?
}

/// Changes a file the way a process without CAP_FSETID would: suid and sgid go.
fn clearing_setid<T>(change: impl FnOnce() -> Result<T>) -> Result<T> {
    credentials::without_capability(CapabilitySet::FSETID, change).map_err(errno::from_nix)?
}

/// What a file is charged now.
fn measure(file: &OwnedFd) -> Result<Charged> {
    stat(file).map(|seen| charge(&seen))
}

fn has_setid(file: &OwnedFd) -> Result<bool> {
    let mode = Mode::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    Ok(mode.intersects(Mode::SUID | Mode::SGID))
}

fn write_all(file: &OwnedFd, offset: u64, data: &[u8]) -> Result<usize> {
    let mut written = 0;
    while written < data.len() {
        match rustix::io::pwrite(file, &data[written..], offset + written as u64) {
            Ok(0) => break,
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            // What is written is written: the next write meets the error.
            Err(_) if written > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(written)
}

fn synchronise(file: BorrowedFd<'_>, data_only: bool) -> Result<()> {
    if data_only { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) }
}

fn mode_bits(mode: u32) -> Mode {
    Mode::from_raw_mode(mode) & Mode::from_raw_mode(0o7777)
}

/// A name in a directory: never a way out of it.
fn component(name: &OsStr) -> Result<CString> {
    match name.as_bytes() {
        b"" => Err(Errno::NOENT),
        b"." | b".." => Err(Errno::INVAL),
        bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
        _ => c_string(name),
    }
}

fn c_string(text: &OsStr) -> Result<CString> {
    CString::new(OsString::from(text).into_vec()).map_err(|_| Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component_or_refused() {
        for (name, refused) in
            [("", Errno::NOENT), (".", Errno::INVAL), ("..", Errno::INVAL), ("a/b", Errno::INVAL)]
        {
            assert_eq!(component(OsStr::new(name)), Err(refused), "{name:?}");
        }
        assert_eq!(component(OsStr::new("..a")).unwrap().as_c_str(), c"..a");
    }
}
