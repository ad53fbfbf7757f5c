//! Subvolumes: made, cut and deleted by descriptors, never by a path that other processes can swap.
//!
//! A subvolume is a tree of its own. Its root directory has inode 256 and a device number of its own.

#![expect(unsafe_code, reason = "names the structures of Btrfs' requests")]

use std::ffi::CStr;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

use super::{INODE_OF_SUBVOLUME, is_btrfs};
use crate::ioctl::Request;
use crate::{Error, Result};

/// The number of a subvolume on its file system. It is never given to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SubvolumeId(pub(super) u64);

impl fmt::Display for SubvolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether a snapshot can be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changeable {
    No,
    Yes,
}

/// BTRFS_SUBVOL_NAME_MAX + 1.
const NAME_BYTES: usize = 4040;

/// `struct btrfs_ioctl_vol_args_v2` (linux/btrfs.h), without a pointer: BTRFS_SUBVOL_QGROUP_INHERIT
/// is never set.
#[repr(C)]
struct Target {
    fd: i64,
    transaction: u64,
    flags: u64,
    unused: [u64; 4],
    /// BTRFS_SUBVOL_SPEC_BY_ID: the first eight bytes are the subvolume's number.
    name: [u8; NAME_BYTES],
}

/// `struct btrfs_ioctl_ino_lookup_args`.
#[repr(C)]
struct Lookup {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

/// `_IOW(0x94, 24, struct btrfs_ioctl_vol_args_v2)`.
// SAFETY: `Target` is that structure, all numbers, and its union holds no pointer without the flag
// that is never set.
const BTRFS_IOC_SUBVOL_CREATE_V2: Request<Target> = unsafe { Request::new(0x5000_9418) };
/// `_IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)`.
// SAFETY: the same.
const BTRFS_IOC_SNAP_CREATE_V2: Request<Target> = unsafe { Request::new(0x5000_9417) };
/// `_IOW(0x94, 63, struct btrfs_ioctl_vol_args_v2)`, Linux 5.7.
// SAFETY: the same.
const BTRFS_IOC_SNAP_DESTROY_V2: Request<Target> = unsafe { Request::new(0x5000_943f) };
/// `_IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)`.
// SAFETY: `Lookup` is that structure, all numbers.
const BTRFS_IOC_INO_LOOKUP: Request<Lookup> = unsafe { Request::new(0xd000_9412) };

const BTRFS_SUBVOL_RDONLY: u64 = 1 << 1;
const BTRFS_SUBVOL_SPEC_BY_ID: u64 = 1 << 4;

impl Target {
    fn empty() -> Self {
        Self { fd: 0, transaction: 0, flags: 0, unused: [0; 4], name: [0; NAME_BYTES] }
    }

    fn named(name: &CStr) -> rustix::io::Result<Self> {
        let mut target = Self::empty();
        let bytes = name.to_bytes_with_nul();
        target.name.get_mut(..bytes.len()).ok_or(Errno::NAMETOOLONG)?.copy_from_slice(bytes);
        Ok(target)
    }
}

/// Creates an empty subvolume `name` in `parent`, a directory that is open for reading. It belongs
/// to the caller.
pub fn create(parent: impl AsFd, name: &CStr) -> Result<()> {
    Target::named(name)
        .and_then(|mut target| BTRFS_IOC_SUBVOL_CREATE_V2.send(parent, &mut target))
        .map_err(|e| Error::new("create subvolume", name.to_string_lossy(), e))
}

/// Cuts the subvolume with the root `source` into a new one, `name` in `parent`. When it returns,
/// the snapshot is on disk. It has all that returned from a write before the call. The quota group
/// of the new subvolume has the limit of the source's.
pub fn snapshot(source: impl AsFd, parent: impl AsFd, name: &CStr, changeable: Changeable) -> Result<()> {
    let send = || {
        let mut target = Target::named(name)?;
        target.fd = source.as_fd().as_raw_fd().into();
        if changeable == Changeable::No {
            target.flags = BTRFS_SUBVOL_RDONLY;
        }
        BTRFS_IOC_SNAP_CREATE_V2.send(parent, &mut target)
    };
    send().map_err(|e| Error::new("cut snapshot", name.to_string_lossy(), e))
}

/// Deletes a subvolume with its contents, read-only or not. `file` is anything on its file system
/// that is open for reading. The space is free a moment later. `ENOTEMPTY`: it contains other
/// subvolumes. `ENOTTY` before Linux 5.7.
pub fn delete(file: impl AsFd, id: SubvolumeId) -> Result<()> {
    let mut target = Target::empty();
    target.flags = BTRFS_SUBVOL_SPEC_BY_ID;
    target.name[..size_of::<u64>()].copy_from_slice(&id.0.to_ne_bytes());
    BTRFS_IOC_SNAP_DESTROY_V2.send(file, &mut target).map_err(|e| Error::new("delete subvolume", id, e))
}

/// The subvolume of which `directory`, open for reading, is the root. `None` for any other directory,
/// also on another file system.
pub fn with_root(directory: impl AsFd) -> Result<Option<SubvolumeId>> {
    let find = || {
        let directory = directory.as_fd();
        if !is_btrfs(directory)? || rustix::fs::fstat(directory)?.st_ino != INODE_OF_SUBVOLUME {
            return Ok(None);
        }
        let mut lookup = Lookup { tree: 0, object: INODE_OF_SUBVOLUME, name: [0; 4080] };
        BTRFS_IOC_INO_LOOKUP.send(directory, &mut lookup)?;
        Ok(Some(SubvolumeId(lookup.tree)))
    };
    find().map_err(|e: Errno| Error::new("find the subvolume of", "a directory", e))
}
