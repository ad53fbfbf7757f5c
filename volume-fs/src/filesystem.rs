//! Translates FUSE requests: unpacks fuser's arguments, calls the [`Backend`], and passes it
//! fuser's reply for the answer. Makes no decisions about files.

mod answers;
mod convert;
mod passthrough;

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno as FuseErrno, FileHandle, Filesystem, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use linux::credentials::Caller;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, Timestamps, XattrFlags};
use rustix::io::Errno;

use self::answers::{Entries, KnownEntries};
use self::convert::{handle, name, node, timespec};
use crate::backend::Backend;
use crate::event_loops::{EventLoops, Turn};
use crate::metrics::{Call, Metrics, Operation};
use crate::request::{Changes, Data, Permissions, Position, RequestId, Requester, Special};
use crate::service::DataPath;

/// The kernel would send four times as much (fs.fuse.max_pages_limit = 256 pages). Then a daemon that
/// another one can follow would keep four times as much present for each event loop.
pub(crate) const MAX_WRITE_BYTES: u32 = 256 * 1024;
/// With its headers, at any place in its first page.
pub(crate) const LARGEST_REQUEST_BYTES: usize = MAX_WRITE_BYTES as usize + 2 * 4096;

/// Backing files may lie on a file system that is not stacked on another one. The mount counts as stacked
/// once, so that a container may still put an overlay on it (FILESYSTEM_MAX_STACK_DEPTH is 2).
const BACKING_DEPTH: u32 = 1;

/// docs/SEMANTICS.md depends on these: umask and default ACLs (DONT_MASK), enforced ACLs
/// (POSIX_ACL), and suid and sgid cleared without a GETXATTR round trip before every write
/// (HANDLE_KILLPRIV_V2, Linux 5.12; fuser 0.18 hides its flag on truncate, so a backend must always
/// clear them there).
pub(crate) const NEEDED: InitFlags =
    InitFlags::FUSE_DONT_MASK.union(InitFlags::FUSE_POSIX_ACL).union(InitFlags::FUSE_HANDLE_KILLPRIV_V2);

/// Only for speed. Without FUSE_ATOMIC_O_TRUNC: truncation is a separate request. Without locks:
/// the kernel handles them, since all users are on this node. Without FUSE_ASYNC_DIO: at the end of
/// an asynchronous O_DIRECT write the kernel discards no cached pages, so that what a read brought
/// into the page cache meanwhile would be shown as long as it is cached.
const WELCOME: InitFlags = InitFlags::FUSE_PARALLEL_DIROPS
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_CACHE_SYMLINKS);

/// Daemons of earlier releases asked for these. This one serves a connection that has them.
pub(crate) const OF_EARLIER_RELEASES: InitFlags = InitFlags::FUSE_ASYNC_DIO;

/// FUSE_UNIQUE_RESEND (linux/fuse.h): set in `unique` of requests after FUSE_NOTIFY_RESEND.
const RESENT: u64 = 1 << 63;

/// What the volume's class asks of FUSE_INIT, beside what every volume needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// FUSE_PASSTHROUGH, Linux 6.9.
    pub(crate) passthrough: bool,
    /// FUSE_WRITEBACK_CACHE. The kernel refuses passthrough on such a connection.
    pub(crate) writeback_cache: bool,
}

impl Wanted {
    /// What fuser always asks for, and this volume cannot have. During a pause, what the
    /// kernel writes back takes all of its background requests (fs/fuse/dev.c, flush_bg_queue): a read that
    /// is one of those would wait for the end of the pause.
    pub(crate) fn refuses(self) -> InitFlags {
        match self.writeback_cache {
            true => InitFlags::FUSE_ASYNC_READ,
            false => InitFlags::empty(),
        }
    }

    pub(crate) fn of(data_path: DataPath, writeback_cache: bool) -> Self {
        Self { passthrough: data_path == DataPath::Passthrough, writeback_cache }
    }
}

/// Bytes that one copy_file_range(2) copies. An event loop reads no other requests meanwhile, and callers go on after a
/// short copy.
const MOST_COPIED: u64 = 16 << 20;

/// Bytes of data of a request that takes long.
const MUCH_DATA: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Adapter<B> {
    wanted: Wanted,
    backend: Arc<B>,
    metrics: Arc<Metrics>,
    event_loops: Arc<EventLoops>,
}

impl<B: Backend> Adapter<B> {
    pub(crate) fn new(
        wanted: Wanted,
        backend: Arc<B>,
        metrics: Arc<Metrics>,
        event_loops: Arc<EventLoops>,
    ) -> Self {
        Self { wanted, backend, metrics, event_loops }
    }

    /// The turn must last until the request is answered or set aside.
    fn begin(&self, request: &Request, operation: Operation) -> (Turn<'_>, Call) {
        self.begin_transfer(request, operation, 0)
    }

    /// [`Self::begin`] of a request that moves so many bytes of data.
    fn begin_transfer(&self, request: &Request, operation: Operation, bytes: usize) -> (Turn<'_>, Call) {
        use Operation::{CopyFileRange, Fallocate, Fsync, Fsyncdir};
        let waits_for_the_disk = matches!(operation, Fsync | Fsyncdir | Fallocate | CopyFileRange);
        let turn = self.event_loops.begin(request.pid(), waits_for_the_disk || bytes >= MUCH_DATA);
        (turn, Call::begin(&self.metrics, operation))
    }
}

/// Asks the kernel for what this daemon uses.
fn negotiate(wanted: Wanted, config: &mut KernelConfig) -> io::Result<()> {
    config.add_capabilities(NEEDED).map_err(|missing| {
        io::Error::other(format!("this kernel's FUSE lacks {missing:?}: Linux 5.12 or newer is needed"))
    })?;
    config
        .add_capabilities(WELCOME & config.capabilities())
        .map_err(|refused| io::Error::other(format!("offered, then refused: {refused:?}")))?;
    if wanted.passthrough {
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(|_| {
            io::Error::other(
                "data path passthrough: this kernel lacks FUSE_PASSTHROUGH (CONFIG_FUSE_PASSTHROUGH, Linux 6.9 or newer)",
            )
        })?;
        config.set_max_stack_depth(BACKING_DEPTH).map_err(|nearest| {
            io::Error::other(format!("max_stack_depth: {nearest} is the nearest possible"))
        })?;
    }
    if wanted.writeback_cache {
        config
            .add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE)
            .map_err(|_| io::Error::other("writeback cache: this kernel lacks FUSE_WRITEBACK_CACHE"))?;
    }
    config
        .set_max_write(MAX_WRITE_BYTES)
        .map_err(|nearest| io::Error::other(format!("max_write: {nearest} is the nearest possible")))?;
    Ok(())
}

/// Answers FUSE_INIT as the [`Adapter`] does, without a backend, and nothing else.
pub(crate) struct InitOnly(pub(crate) Wanted);

impl Filesystem for InitOnly {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        negotiate(self.0, config)
    }
}

impl<B: Backend> Filesystem for Adapter<B> {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        negotiate(self.wanted, config)
    }

    fn lookup(&self, request: &Request, parent: INodeNo, child: &OsStr, reply: ReplyEntry) {
        let (_turn, call) = self.begin(request, Operation::Lookup);
        self.backend.lookup(id(request), name(parent, child), answers::looked_up(call, reply));
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        let _forget = self.event_loops.begin_forget();
        self.backend.forget(node(ino), nlookup);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let (_turn, call) = self.begin(request, Operation::Getattr);
        self.backend.getattr(node(ino), fh.map(handle), answers::attributes(call, reply));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (_turn, call) = self.begin(request, Operation::Setattr);
        let times = (atime.is_some() || mtime.is_some())
            .then(|| Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) });
        let changes = Changes { mode, uid, gid, size, times };
        let answer = answers::attributes(call, reply);
        self.backend.setattr(caller(request), node(ino), fh.map(handle), changes, answer);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let (_turn, call) = self.begin(request, Operation::Readlink);
        self.backend.readlink(node(ino), answers::data(call, reply));
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        child: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let (_turn, call) = self.begin(request, Operation::Mknod);
        let answer = answers::entry(call, reply);
        let special = match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => Special::Regular,
            libc::S_IFIFO => Special::Fifo,
            libc::S_IFSOCK => Special::Socket,
            // A device node would give access to the node's hardware.
            libc::S_IFCHR | libc::S_IFBLK => return answer(Err(Errno::PERM.into())),
            _ => return answer(Err(Errno::INVAL.into())),
        };
        let permissions = Permissions { mode, umask };
        self.backend.mknod(requester(request), name(parent, child), special, permissions, answer);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        child: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (_turn, call) = self.begin(request, Operation::Mkdir);
        let permissions = Permissions { mode, umask };
        let answer = answers::entry(call, reply);
        self.backend.mkdir(requester(request), name(parent, child), permissions, answer);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, child: &OsStr, reply: ReplyEmpty) {
        let (_turn, call) = self.begin(request, Operation::Unlink);
        self.backend.unlink(requester(request), name(parent, child), answers::empty(call, reply));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, child: &OsStr, reply: ReplyEmpty) {
        let (_turn, call) = self.begin(request, Operation::Rmdir);
        self.backend.rmdir(requester(request), name(parent, child), answers::empty(call, reply));
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let (_turn, call) = self.begin(request, Operation::Symlink);
        let answer = answers::entry(call, reply);
        self.backend.symlink(requester(request), name(parent, link_name), target.as_os_str(), answer);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        child: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (_turn, call) = self.begin(request, Operation::Rename);
        let (from, to) = (name(parent, child), name(newparent, newname));
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        self.backend.rename(requester(request), from, to, flags, answers::empty(call, reply));
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let (_turn, call) = self.begin(request, Operation::Link);
        self.backend.link(id(request), node(ino), name(newparent, newname), answers::entry(call, reply));
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (_turn, call) = self.begin(request, Operation::Open);
        self.backend.open(id(request), node(ino), open_flags(flags.0), answers::opened(call, reply));
    }

    fn read(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (_turn, call) = self.begin_transfer(request, Operation::Read, buffer_size(size));
        let answer = answers::read(call, Arc::clone(&self.metrics), reply);
        self.backend.read(handle(fh), offset, size, answer);
    }

    fn write(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (_turn, call) = self.begin_transfer(request, Operation::Write, data.len());
        let answer = answers::written(call, Some(Arc::clone(&self.metrics)), reply);
        let clears_setid = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let from_pages = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        self.backend.write(
            handle(fh),
            Data { offset, bytes: data, by: caller(request), clears_setid, from_pages },
            answer,
        );
    }

    fn flush(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let (_turn, call) = self.begin(request, Operation::Flush);
        self.backend.flush(handle(fh), answers::empty(call, reply));
    }

    fn release(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let (_turn, call) = self.begin(request, Operation::Release);
        self.backend.release(handle(fh), answers::empty(call, reply));
    }

    fn fsync(&self, request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let (_turn, call) = self.begin(request, Operation::Fsync);
        self.backend.fsync(handle(fh), datasync, answers::empty(call, reply));
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let (_turn, call) = self.begin(request, Operation::Opendir);
        self.backend.opendir(requester(request), node(ino), answers::opened_directory(call, reply));
    }

    fn readdir(&self, request: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        let (_turn, call) = self.begin(request, Operation::Readdir);
        self.backend.readdir(handle(fh), offset, Entries { call, reply });
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let (_turn, call) = self.begin(request, Operation::Readdirplus);
        self.backend.readdirplus(node(ino), handle(fh), offset, KnownEntries { call, reply });
    }

    fn releasedir(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let (_turn, call) = self.begin(request, Operation::Releasedir);
        self.backend.releasedir(handle(fh), answers::empty(call, reply));
    }

    fn fsyncdir(&self, request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let (_turn, call) = self.begin(request, Operation::Fsyncdir);
        self.backend.fsyncdir(handle(fh), datasync, answers::empty(call, reply));
    }

    fn statfs(&self, request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let (_turn, call) = self.begin(request, Operation::Statfs);
        self.backend.statfs(answers::statistics(call, reply));
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (_turn, call) = self.begin(request, Operation::Setxattr);
        let flags = XattrFlags::from_bits_retain(flags.cast_unsigned());
        let answer = answers::empty(call, reply);
        self.backend.setxattr(requester(request), node(ino), name, value, flags, answer);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let (_turn, call) = self.begin(request, Operation::Getxattr);
        self.backend.getxattr(node(ino), name, buffer_size(size), answers::xattr(call, reply));
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let (_turn, call) = self.begin(request, Operation::Listxattr);
        self.backend.listxattr(node(ino), buffer_size(size), answers::xattr(call, reply));
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (_turn, call) = self.begin(request, Operation::Removexattr);
        self.backend.removexattr(id(request), node(ino), name, answers::empty(call, reply));
    }

    /// FUSE_POSIX_ACL makes the kernel check permissions itself, so it never sends this request. If
    /// it did, ENOSYS would make it continue to check by itself.
    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(FuseErrno::ENOSYS);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        child: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (_turn, call) = self.begin(request, Operation::Create);
        let permissions = Permissions { mode, umask };
        let answer = answers::created(call, reply);
        self.backend.create(requester(request), name(parent, child), permissions, open_flags(flags), answer);
    }

    fn fallocate(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (_turn, call) = self.begin(request, Operation::Fallocate);
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        // The kernel has checked that the sum is a valid size of a file.
        let range = offset..offset.saturating_add(length);
        self.backend.fallocate(handle(fh), range, mode, answers::empty(call, reply));
    }

    fn lseek(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let (_turn, call) = self.begin(request, Operation::Lseek);
        let answer = answers::position(call, reply);
        // The kernel handles the others itself.
        let position = match (whence, u64::try_from(offset)) {
            (libc::SEEK_DATA, Ok(offset)) => SeekFrom::Data(offset),
            (libc::SEEK_HOLE, Ok(offset)) => SeekFrom::Hole(offset),
            // As of every position that is not in the file.
            (libc::SEEK_DATA | libc::SEEK_HOLE, Err(_)) => return answer(Err(Errno::NXIO.into())),
            _ => return answer(Err(Errno::INVAL.into())),
        };
        self.backend.lseek(handle(fh), position, answer);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let (_turn, call) = self.begin(request, Operation::CopyFileRange);
        let from = Position { handle: handle(fh_in), offset: offset_in };
        let to = Position { handle: handle(fh_out), offset: offset_out };
        self.backend.copy_file_range(from, to, len.min(MOST_COPIED), answers::written(call, None, reply));
    }
}

fn id(request: &Request) -> RequestId {
    let unique = request.unique().0;
    RequestId { number: unique & !RESENT, resent: unique & RESENT != 0 }
}

fn requester(request: &Request) -> Requester {
    Requester { id: id(request), caller: caller(request) }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

fn open_flags(flags: i32) -> OFlags {
    OFlags::from_bits_retain(flags.cast_unsigned())
}

fn buffer_size(size: u32) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}
