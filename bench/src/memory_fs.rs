//! A file system in memory, which the kernel and fuser serve as they serve a volume. It does what `bench volume`
//! needs and touches no disk, so it shows what FUSE itself costs.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, SessionACL, TimeOrNow, WriteFlags,
};

/// The first argument of the process that serves it.
pub(crate) const MODE: &str = "serve-memory-file-system";

/// As volumes: nothing changes without a request.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// As volumes (volume-fs/src/filesystem.rs).
const FLAGS: InitFlags = InitFlags::FUSE_DONT_MASK
    .union(InitFlags::FUSE_POSIX_ACL)
    .union(InitFlags::FUSE_HANDLE_KILLPRIV_V2)
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_CACHE_SYMLINKS);
const MAX_WRITE_BYTES: u32 = 1 << 20;
const ROOT: u64 = 1;
const BLOCK_BYTES: u32 = 4096;

#[derive(Debug)]
struct Memory(Mutex<Nodes>);

#[derive(Debug)]
struct Nodes {
    by_number: HashMap<u64, Node>,
    last: u64,
}

#[derive(Debug)]
struct Node {
    attributes: FileAttr,
    /// Of a file.
    content: Vec<u8>,
    /// Of a directory.
    names: BTreeMap<OsString, u64>,
    lookups: u64,
}

/// An entry of a directory.
struct Listed {
    name: OsString,
    number: INodeNo,
    next: u64,
}

type Answer<T> = std::result::Result<T, Errno>;

/// Mounts it there, and serves it until it is unmounted.
pub(crate) fn serve(at: &Path) -> Result<()> {
    let root = Node::new(attributes(ROOT, FileType::Directory, 0o777, (0, 0)));
    let nodes = Nodes { by_number: HashMap::from([(ROOT, root)]), last: ROOT };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("memory".to_owned()), MountOption::DefaultPermissions];
    config.acl = SessionACL::All;
    fuser::mount(Memory(Mutex::new(nodes)), at, &config).with_context(|| format!("mount on {}", at.display()))
}

fn attributes(number: u64, kind: FileType, mode: u32, (uid, gid): (u32, u32)) -> FileAttr {
    let now = SystemTime::now();
    FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: now,
        mtime: now,
        ctime: now,
        crtime: now,
        kind,
        perm: permissions(mode),
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

fn permissions(mode: u32) -> u16 {
    (mode & 0o7777) as u16
}

impl Node {
    fn new(attributes: FileAttr) -> Self {
        Self { attributes, content: Vec::new(), names: BTreeMap::new(), lookups: 1 }
    }

    fn resize(&mut self, bytes: u64) -> Answer<()> {
        self.content.resize(usize::try_from(bytes).map_err(|_| Errno::EFBIG)?, 0);
        self.resized();
        Ok(())
    }

    fn resized(&mut self) {
        self.attributes.size = self.content.len() as u64;
        self.attributes.blocks = self.attributes.size.div_ceil(512);
        self.changed();
    }

    fn changed(&mut self) {
        let now = SystemTime::now();
        (self.attributes.mtime, self.attributes.ctime) = (now, now);
    }
}

impl Nodes {
    fn node(&mut self, INodeNo(number): INodeNo) -> Answer<&mut Node> {
        self.by_number.get_mut(&number).ok_or(Errno::ENOENT)
    }

    fn make(
        &mut self,
        directory: INodeNo,
        name: &OsStr,
        kind: FileType,
        mode: u32,
        request: &Request,
    ) -> Answer<FileAttr> {
        self.last += 1;
        let number = self.last;
        let parent = self.node(directory)?;
        parent.names.insert(name.to_owned(), number);
        parent.changed();
        let attributes = attributes(number, kind, mode, (request.uid(), request.gid()));
        self.by_number.insert(number, Node::new(attributes));
        Ok(attributes)
    }

    fn remove(&mut self, directory: INodeNo, name: &OsStr) -> Answer<()> {
        let parent = self.node(directory)?;
        let number = parent.names.remove(name).ok_or(Errno::ENOENT)?;
        parent.changed();
        let removed = self.node(INodeNo(number))?;
        removed.attributes.nlink = 0;
        self.drop_unused(number);
        Ok(())
    }

    /// Passes on the entries behind the one with this offset (0: all) until `is_full`.
    fn list(
        &mut self,
        directory: INodeNo,
        offset: u64,
        mut is_full: impl FnMut(&Listed, &mut Node) -> bool,
    ) -> Answer<()> {
        let node = self.node(directory)?;
        let dots = [".", ".."].map(|name| (OsString::from(name), directory.0));
        let names = node.names.iter().map(|(name, number)| (name.clone(), *number));
        let all = dots.into_iter().chain(names).zip(1..);
        let listed = all.map(|((name, number), next)| Listed { name, number: INodeNo(number), next });
        let behind: Vec<_> = listed.skip(usize::try_from(offset).unwrap_or(usize::MAX)).collect();
        for entry in behind {
            let Ok(node) = self.node(entry.number) else { continue };
            if is_full(&entry, node) {
                break;
            }
        }
        Ok(())
    }

    fn drop_unused(&mut self, number: u64) {
        let is_unused = |node: &Node| node.lookups == 0 && node.attributes.nlink == 0;
        if self.by_number.get(&number).is_some_and(is_unused) {
            self.by_number.remove(&number);
        }
    }
}

impl Memory {
    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_generation() -> Generation {
    Generation(0)
}

impl Filesystem for Memory {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let missing = |flags| io::Error::other(format!("this kernel lacks {flags:?}"));
        config.add_capabilities(FLAGS).map_err(missing)?;
        config.set_max_write(MAX_WRITE_BYTES).map(drop).map_err(|_| io::Error::other("max_write"))
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut nodes = self.nodes();
        let number = nodes.node(parent).and_then(|node| node.names.get(name).copied().ok_or(Errno::ENOENT));
        match number.and_then(|number| nodes.node(INodeNo(number))) {
            Ok(node) => {
                node.lookups += 1;
                reply.entry(&FOR_EVER, &node.attributes, no_generation());
            }
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        let mut nodes = self.nodes();
        if let Ok(node) = nodes.node(ino) {
            node.lookups = node.lookups.saturating_sub(nlookup);
            nodes.drop_unused(ino.0);
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.nodes().node(ino) {
            Ok(node) => reply.attr(&FOR_EVER, &node.attributes),
            Err(error) => reply.error(error),
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
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let time = |time| match time {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => SystemTime::now(),
        };
        let mut nodes = self.nodes();
        let changed = nodes.node(ino).and_then(|node| {
            size.map_or(Ok(()), |bytes| node.resize(bytes))?;
            let now = &mut node.attributes;
            now.perm = mode.map_or(now.perm, permissions);
            (now.uid, now.gid) = (uid.unwrap_or(now.uid), gid.unwrap_or(now.gid));
            (now.atime, now.mtime) = (atime.map_or(now.atime, time), mtime.map_or(now.mtime, time));
            now.ctime = SystemTime::now();
            Ok(*now)
        });
        match changed {
            Ok(attributes) => reply.attr(&FOR_EVER, &attributes),
            Err(error) => reply.error(error),
        }
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
        match self.nodes().make(parent, name, FileType::Directory, mode & !umask, request) {
            Ok(attributes) => reply.entry(&FOR_EVER, &attributes, no_generation()),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        match self.nodes().make(parent, name, FileType::RegularFile, mode & !umask, request) {
            Ok(attributes) => {
                let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
                reply.created(&FOR_EVER, &attributes, no_generation(), FileHandle(0), flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        done(self.nodes().remove(parent, name), reply);
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        done(self.nodes().remove(parent, name), reply);
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut nodes = self.nodes();
        let moved = nodes.node(parent).and_then(|from| {
            from.changed();
            from.names.remove(name).ok_or(Errno::ENOENT)
        });
        let renamed = moved.and_then(|number| {
            // What is replaced, if anything is.
            let _replaced = nodes.remove(newparent, newname);
            nodes.node(newparent).map(|to| {
                to.names.insert(newname.to_owned(), number);
            })
        });
        done(renamed, reply);
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.nodes().node(ino) {
            Ok(node) => {
                let begin = usize::try_from(offset).unwrap_or(usize::MAX).min(node.content.len());
                let end = (begin + size as usize).min(node.content.len());
                reply.data(&node.content[begin..end]);
            }
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut nodes = self.nodes();
        let written = nodes.node(ino).and_then(|node| {
            let begin = usize::try_from(offset).map_err(|_| Errno::EFBIG)?;
            let end = begin.checked_add(data.len()).ok_or(Errno::EFBIG)?;
            if node.content.len() < end {
                node.content.resize(end, 0);
            }
            node.content[begin..end].copy_from_slice(data);
            node.resized();
            u32::try_from(data.len()).map_err(|_| Errno::EFBIG)
        });
        match written {
            Ok(bytes) => reply.written(bytes),
            Err(error) => reply.error(error),
        }
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.nodes().list(ino, offset, |entry, node| {
            reply.add(entry.number, entry.next, node.attributes.kind, &entry.name)
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self.nodes().list(ino, offset, |Listed { name, number, next }, node| {
            let attributes = &node.attributes;
            let is_full = reply.add(*number, *next, name, &FOR_EVER, attributes, no_generation());
            node.lookups += u64::from(!is_full && *number != ino);
            is_full
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let (blocks, files) = (1 << 24, 1 << 20);
        reply.statfs(blocks, blocks, blocks, files, files, BLOCK_BYTES, 255, BLOCK_BYTES);
    }

    fn getxattr(&self, _request: &Request, _ino: INodeNo, _name: &OsStr, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENODATA);
    }
}

fn done(result: Answer<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}
