//! FUSE requests in, answers out: takes fuser's arguments apart, calls
//! [`Volume`], puts the result into the reply. Decides nothing about files.
//!
//! Whatever changes the volume goes through the [`Gate`]. RELEASE and FORGET
//! do not: they must never wait.

mod convert;

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno as FuseErrno, FileHandle, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use linux::credentials::Caller;
use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, Timestamps, XattrFlags};
use rustix::io::Errno;

use self::convert::{fuse_attributes, fuse_kind, handle, timespec};
use crate::directory::Taken;
use crate::errno::{Result, to_fuse};
use crate::file::{Handle, Known};
use crate::gate::{Gate, Shut};
use crate::metrics::{Call, Metrics, Operation};
use crate::volume::{Changes, Permissions, Range, Special, Volume, Xattr};

/// What the kernel allows by default (fs.fuse.max_pages_limit = 256 pages).
pub(crate) const MAX_WRITE_BYTES: u32 = 1024 * 1024;

/// How long the kernel may trust a name or an attribute without asking. This
/// daemon alone serves the volume, so only changes made behind the mount are
/// seen this late.
const TRUSTED_FOR: Duration = Duration::from_secs(1);

/// Without these the promises of docs/SEMANTICS.md cannot be kept: umask and
/// default ACLs (DONT_MASK), ACLs enforced (POSIX_ACL), suid and sgid cleared
/// without a GETXATTR round trip before every write (HANDLE_KILLPRIV_V2,
/// Linux 5.12; fuser 0.18 hides its flag on truncate: see `Volume::truncate`).
const NEEDED: InitFlags =
    InitFlags::FUSE_DONT_MASK.union(InitFlags::FUSE_POSIX_ACL).union(InitFlags::FUSE_HANDLE_KILLPRIV_V2);

/// Speed only. Not FUSE_ATOMIC_O_TRUNC: truncation comes as its own request.
/// Not locks: they are the kernel's, all users are on this node.
const WELCOME: InitFlags = InitFlags::FUSE_PARALLEL_DIROPS
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_ASYNC_DIO)
    .union(InitFlags::FUSE_CACHE_SYMLINKS);

#[derive(Debug)]
pub(crate) struct VolumeFilesystem {
    volume: Arc<Volume>,
    gate: Arc<Gate>,
    metrics: Arc<Metrics>,
}

impl VolumeFilesystem {
    pub(crate) fn new(volume: Arc<Volume>, gate: Arc<Gate>, metrics: Arc<Metrics>) -> Self {
        Self { volume, gate, metrics }
    }

    fn call(&self, operation: Operation) -> Call {
        Call::begin(&self.metrics, operation)
    }

    /// Makes a change, now or when the gate is opened.
    fn change(&self, change: impl FnOnce(&Volume) + Send + 'static) {
        match self.gate.enter() {
            Ok(_pass) => change(&self.volume),
            Err(shut) => self.change_later(shut, 0, change),
        }
    }

    /// `bytes`: what the change keeps in memory until then.
    fn change_later(&self, shut: Shut<'_>, bytes: usize, change: impl FnOnce(&Volume) + Send + 'static) {
        if shut.has_room(bytes) {
            let volume = Arc::clone(&self.volume);
            shut.put_aside(bytes, Box::new(move || change(&volume)));
        } else {
            let _pass = shut.wait();
            change(&self.volume);
        }
    }
}

impl Filesystem for VolumeFilesystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config.add_capabilities(NEEDED).map_err(|missing| {
            io::Error::other(format!("this kernel's FUSE lacks {missing:?}: Linux 5.12 or newer is needed"))
        })?;
        config
            .add_capabilities(WELCOME & config.capabilities())
            .map_err(|refused| io::Error::other(format!("offered, then refused: {refused:?}")))?;
        config
            .set_max_write(MAX_WRITE_BYTES)
            .map_err(|nearest| io::Error::other(format!("max_write: {nearest} is the nearest possible")))?;
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let call = self.call(Operation::Lookup);
        answer_entry(call.ended(self.volume.look_up(parent.0, name)), reply);
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        self.volume.forget(ino.0, nlookup);
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let call = self.call(Operation::Getattr);
        match call.ended(self.volume.attributes(ino.0, fh.map(handle))) {
            Ok(attributes) => reply.attr(&TRUSTED_FOR, &fuse_attributes(&attributes)),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
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
        let call = self.call(Operation::Setattr);
        let times = (atime.is_some() || mtime.is_some())
            .then(|| Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) });
        let (changes, fh) = (Changes { mode, uid, gid, size, times }, fh.map(handle));
        self.change(move |volume| match call.ended(volume.change(ino.0, fh, &changes)) {
            Ok(attributes) => reply.attr(&TRUSTED_FOR, &fuse_attributes(&attributes)),
            Err(errno) => reply.error(to_fuse(errno)),
        });
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let call = self.call(Operation::Readlink);
        answer_data(call.ended(self.volume.read_link(ino.0)), reply);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let call = self.call(Operation::Mknod);
        let special = match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => Special::Regular,
            libc::S_IFIFO => Special::Fifo,
            libc::S_IFSOCK => Special::Socket,
            // A device node would be a device of the node's own hardware.
            libc::S_IFCHR | libc::S_IFBLK => return reply.error(FuseErrno::EPERM),
            _ => return reply.error(FuseErrno::EINVAL),
        };
        let (name, caller) = (name.to_owned(), caller(request));
        let what = (special, Permissions { mode, umask });
        self.change(move |volume| {
            answer_entry(call.ended(volume.make_special(parent.0, &name, what, caller)), reply);
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let call = self.call(Operation::Mkdir);
        let (name, caller) = (name.to_owned(), caller(request));
        self.change(move |volume| {
            let made =
                call.ended(volume.make_directory(parent.0, &name, Permissions { mode, umask }, caller));
            answer_entry(made, reply);
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let call = self.call(Operation::Unlink);
        let (name, uid) = (name.to_owned(), request.uid());
        self.change(move |volume| {
            answer_empty(call.ended(volume.remove(parent.0, &name, (AtFlags::empty(), uid))), reply);
        });
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let call = self.call(Operation::Rmdir);
        let (name, uid) = (name.to_owned(), request.uid());
        self.change(move |volume| {
            answer_empty(call.ended(volume.remove(parent.0, &name, (AtFlags::REMOVEDIR, uid))), reply);
        });
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let call = self.call(Operation::Symlink);
        let (caller, name, target) = (caller(request), link_name.to_owned(), target.to_owned());
        self.change(move |volume| {
            answer_entry(call.ended(volume.make_symlink(parent.0, &name, target.as_os_str(), caller)), reply);
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Operation::Rename);
        let by = (rustix::fs::RenameFlags::from_bits_retain(flags.bits()), request.uid());
        let (from, to) = (name.to_owned(), newname.to_owned());
        self.change(move |volume| {
            answer_empty(call.ended(volume.rename((parent.0, &from), (newparent.0, &to), by)), reply);
        });
    }

    fn link(&self, _request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let call = self.call(Operation::Link);
        let name = newname.to_owned();
        self.change(move |volume| answer_entry(call.ended(volume.link(ino.0, newparent.0, &name)), reply));
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let call = self.call(Operation::Open);
        match call.ended(self.volume.open_file(ino.0, open_flags(flags.0))) {
            Ok(Handle(number)) => reply.opened(FileHandle(number), FopenFlags::empty()),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self.call(Operation::Read).ended(self.volume.read(handle(fh), offset, size));
        if let Ok(data) = &read {
            self.metrics.read(data.len());
        }
        answer_data(read, reply);
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let clear_setid = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let (call, metrics) = (self.call(Operation::Write), Arc::clone(&self.metrics));
        let write = move |volume: &Volume, data: &[u8]| {
            let written = call.ended(volume.write(handle(fh), offset, data, clear_setid));
            metrics.written(written.unwrap_or_default());
            answer_written(written, reply);
        };
        match self.gate.enter() {
            Ok(_pass) => write(&self.volume, data),
            // Only what waits is copied.
            Err(shut) => {
                let data = data.to_vec();
                self.change_later(shut, data.len(), move |volume| write(volume, &data));
            }
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Operation::Flush);
        answer_empty(call.ended(self.volume.flush(handle(fh))), reply);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Operation::Release);
        self.volume.release_file(handle(fh));
        answer_empty(call.ended(Ok(())), reply);
    }

    fn fsync(&self, _request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let call = self.call(Operation::Fsync);
        answer_empty(call.ended(self.volume.synchronise(handle(fh), datasync)), reply);
    }

    fn opendir(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let call = self.call(Operation::Opendir);
        match call.ended(self.volume.open_directory(ino.0)) {
            Ok(Handle(number)) => reply.opened(FileHandle(number), FopenFlags::empty()),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let call = self.call(Operation::Readdir);
        let listed = self.volume.list(handle(fh), offset, |entry| {
            taken_unless(reply.add(INodeNo(entry.id), entry.next, fuse_kind(entry.kind), entry.name))
        });
        match call.ended(listed) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let call = self.call(Operation::Readdirplus);
        let listed = self.volume.list_known(ino.0, handle(fh), offset, |entry, known| {
            let Known { attributes, generation } = known;
            taken_unless(reply.add(
                INodeNo(attributes.id),
                entry.next,
                entry.name,
                &TRUSTED_FOR,
                &fuse_attributes(attributes),
                Generation(*generation),
            ))
        });
        match call.ended(listed) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Operation::Releasedir);
        self.volume.release_directory(handle(fh));
        answer_empty(call.ended(Ok(())), reply);
    }

    fn fsyncdir(&self, _request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let call = self.call(Operation::Fsyncdir);
        answer_empty(call.ended(self.volume.synchronise_directory(handle(fh), datasync)), reply);
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let call = self.call(Operation::Statfs);
        match call.ended(self.volume.statistics()) {
            Ok(s) => reply.statfs(
                s.f_blocks,
                s.f_bfree,
                s.f_bavail,
                s.f_files,
                s.f_ffree,
                saturated(s.f_bsize),
                saturated(s.f_namemax),
                saturated(s.f_frsize),
            ),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn setxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Operation::Setxattr);
        let flags = XattrFlags::from_bits_retain(flags.cast_unsigned());
        let (name, value) = (name.to_owned(), value.to_vec());
        self.change(move |volume| {
            answer_empty(call.ended(volume.set_xattr(ino.0, &name, &value, flags)), reply);
        });
    }

    fn getxattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let call = self.call(Operation::Getxattr);
        let value = buffer_size(size).and_then(|size| self.volume.xattr(ino.0, name, size));
        answer_xattr(call.ended(value), reply);
    }

    fn listxattr(&self, _request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let call = self.call(Operation::Listxattr);
        let names = buffer_size(size).and_then(|size| self.volume.xattr_names(ino.0, size));
        answer_xattr(call.ended(names), reply);
    }

    fn removexattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let call = self.call(Operation::Removexattr);
        let name = name.to_owned();
        self.change(move |volume| answer_empty(call.ended(volume.remove_xattr(ino.0, &name)), reply));
    }

    /// FUSE_POSIX_ACL makes the kernel check permissions itself, so it never
    /// asks; were it to ask, this tells it to go on checking itself.
    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(FuseErrno::ENOSYS);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let call = self.call(Operation::Create);
        let (name, caller) = (name.to_owned(), caller(request));
        let wanted = (Permissions { mode, umask }, open_flags(flags));
        self.change(move |volume| match call.ended(volume.create(parent.0, &name, wanted, caller)) {
            Ok((known, Handle(number))) => reply.created(
                &TRUSTED_FOR,
                &fuse_attributes(&known.attributes),
                Generation(known.generation),
                FileHandle(number),
                FopenFlags::empty(),
            ),
            Err(errno) => reply.error(to_fuse(errno)),
        });
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let call = self.call(Operation::Fallocate);
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        self.change(move |volume| {
            answer_empty(call.ended(volume.allocate(handle(fh), (offset, length), mode)), reply);
        });
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        // The others are the kernel's own business.
        let position = match (whence, u64::try_from(offset)) {
            (libc::SEEK_DATA, Ok(offset)) => SeekFrom::Data(offset),
            (libc::SEEK_HOLE, Ok(offset)) => SeekFrom::Hole(offset),
            _ => return reply.error(FuseErrno::EINVAL),
        };
        let call = self.call(Operation::Lseek);
        match call.ended(self.volume.seek(handle(fh), position)).map(i64::try_from) {
            Ok(Ok(found)) => reply.offset(found),
            Ok(Err(_)) => reply.error(FuseErrno::EOVERFLOW),
            Err(errno) => reply.error(to_fuse(errno)),
        }
    }

    fn copy_file_range(
        &self,
        _request: &Request,
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
        let call = self.call(Operation::CopyFileRange);
        let from = Range { handle: handle(fh_in), offset: offset_in };
        let to = Range { handle: handle(fh_out), offset: offset_out };
        // The answer has 32 bits.
        self.change(move |volume| {
            answer_written(call.ended(volume.copy_range(from, to, len.min(1 << 30))), reply);
        });
    }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

fn open_flags(flags: i32) -> OFlags {
    OFlags::from_bits_retain(flags.cast_unsigned())
}

fn taken_unless(full: bool) -> Taken {
    if full { Taken::No } else { Taken::Yes }
}

fn buffer_size(size: u32) -> Result<usize> {
    usize::try_from(size).map_err(|_| Errno::INVAL)
}

fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn answer_entry(result: Result<Known>, reply: ReplyEntry) {
    match result {
        Ok(known) => {
            reply.entry(&TRUSTED_FOR, &fuse_attributes(&known.attributes), Generation(known.generation));
        }
        Err(errno) => reply.error(to_fuse(errno)),
    }
}

fn answer_empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(to_fuse(errno)),
    }
}

fn answer_data(result: Result<Vec<u8>>, reply: ReplyData) {
    match result {
        Ok(data) => reply.data(&data),
        Err(errno) => reply.error(to_fuse(errno)),
    }
}

fn answer_written(result: Result<usize>, reply: ReplyWrite) {
    match result.map(u32::try_from) {
        Ok(Ok(length)) => reply.written(length),
        Ok(Err(_)) => reply.error(FuseErrno::EOVERFLOW),
        Err(errno) => reply.error(to_fuse(errno)),
    }
}

fn answer_xattr(result: Result<Xattr>, reply: ReplyXattr) {
    match result {
        Ok(Xattr::Size(size)) => match u32::try_from(size) {
            Ok(size) => reply.size(size),
            Err(_) => reply.error(FuseErrno::E2BIG),
        },
        Ok(Xattr::Value(value)) => reply.data(&value),
        Err(errno) => reply.error(to_fuse(errno)),
    }
}
