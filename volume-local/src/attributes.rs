//! Converts statx(2) of a backing file to the FUSE side's types.

use std::time::{Duration, SystemTime};

use rustix::fs::{FileType as BackingType, Statx, StatxTimestamp};
use rustix::io::Errno;

use volume_fs::file::{Attributes, FileKind, NodeId, Validity};

use crate::errno::Result;

/// The node id of the volume's root.
pub(crate) const ROOT: u64 = NodeId::ROOT.0;

/// The origin of the volume's inodes: one device, and the inode number of its root.
///
/// A node id is the backing inode number. It is also reported as st_ino, so both are stable over
/// restarts. FUSE requires 1 for the root, so the root's number and 1 are exchanged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    device: (u32, u32),
    root_inode: u64,
}

impl Origin {
    pub(crate) fn of_root(root: &Statx) -> Self {
        Self { device: (root.stx_dev_major, root.stx_dev_minor), root_inode: root.stx_ino }
    }

    /// `EXDEV` for a file on another file system (or subvolume), which may have the same inode
    /// numbers.
    pub(crate) fn node_id(self, backing: &Statx) -> Result<u64> {
        if (backing.stx_dev_major, backing.stx_dev_minor) != self.device {
            return Err(Errno::XDEV);
        }
        Ok(self.node_id_of_inode(backing.stx_ino))
    }

    pub(crate) fn node_id_of_inode(self, inode: u64) -> u64 {
        if inode == self.root_inode {
            ROOT
        } else if inode == ROOT {
            self.root_inode
        } else {
            inode
        }
    }

    pub(crate) fn attributes(self, backing: &Statx, valid: Validity) -> Result<Attributes> {
        Ok(Attributes {
            id: NodeId(self.node_id(backing)?),
            kind: file_kind(BackingType::from_raw_mode(backing.stx_mode.into())).ok_or(Errno::IO)?,
            mode: backing.stx_mode & 0o7777,
            links: backing.stx_nlink,
            uid: backing.stx_uid,
            gid: backing.stx_gid,
            bytes: backing.stx_size,
            blocks: backing.stx_blocks,
            block_bytes: backing.stx_blksize,
            device: kernel_device_number(backing.stx_rdev_major, backing.stx_rdev_minor),
            accessed: system_time(backing.stx_atime),
            modified: system_time(backing.stx_mtime),
            changed: system_time(backing.stx_ctime),
            born: system_time(backing.stx_btime),
            valid,
        })
    }
}

pub(crate) fn file_kind(backing: BackingType) -> Option<FileKind> {
    match backing {
        BackingType::RegularFile => Some(FileKind::Regular),
        BackingType::Directory => Some(FileKind::Directory),
        BackingType::Symlink => Some(FileKind::Symlink),
        BackingType::Fifo => Some(FileKind::Fifo),
        BackingType::Socket => Some(FileKind::Socket),
        BackingType::CharacterDevice => Some(FileKind::CharacterDevice),
        BackingType::BlockDevice => Some(FileKind::BlockDevice),
        BackingType::Unknown => None,
    }
}

/// The encoding that new_decode_dev() of linux/kdev_t.h reads.
fn kernel_device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12)
}

fn system_time(stamp: StatxTimestamp) -> SystemTime {
    let whole = Duration::from_secs(stamp.tv_sec.unsigned_abs());
    let base =
        if stamp.tv_sec >= 0 { SystemTime::UNIX_EPOCH + whole } else { SystemTime::UNIX_EPOCH - whole };
    base + Duration::from_nanos(stamp.tv_nsec.into())
}
