//! Converts between fuser's types and the backend's.

use std::ffi::OsStr;
use std::time::SystemTime;

use fuser::{FileAttr, FileHandle, FileType, INodeNo, TimeOrNow};
use rustix::fs::{Timespec, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;

use crate::file::{Attributes, FileKind, Handle, Name, NodeId};

pub(super) fn node(ino: INodeNo) -> NodeId {
    NodeId(ino.0)
}

pub(super) fn name(directory: INodeNo, name: &OsStr) -> Name<'_> {
    Name { directory: node(directory), name }
}

pub(super) fn fuse_errno(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

pub(super) fn handle(fh: FileHandle) -> Handle {
    Handle(fh.0)
}

pub(super) fn fuse_kind(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharacterDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

pub(super) fn fuse_attributes(attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.id.0),
        size: attributes.bytes,
        blocks: attributes.blocks,
        atime: attributes.accessed,
        mtime: attributes.modified,
        ctime: attributes.changed,
        crtime: attributes.born,
        kind: fuse_kind(attributes.kind),
        perm: attributes.mode,
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.device,
        blksize: attributes.block_bytes,
        flags: 0,
    }
}

/// The attributes of an entry that stands for a missing name: the kernel ignores them.
pub(super) fn no_file() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

pub(super) fn timespec(time: Option<TimeOrNow>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => Timespec {
                tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: after.subsec_nanos().into(),
            },
            // fuser 0.18 turns (-2 s, 800 ms) into 2.8 s before the epoch, not 1.2 s: splitting it
            // the same way restores the kernel's numbers.
            Err(before) => Timespec {
                tv_sec: i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |seconds| -seconds),
                tv_nsec: before.duration().subsec_nanos().into(),
            },
        },
    }
}
