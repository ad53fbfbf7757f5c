//! Quota groups: the file system's own limit on what a subvolume refers to, data and metadata.
//!
//! Every subvolume N has a group `0/N`. Limits are set by ioctl(2) (CAP_SYS_ADMIN). Figures are read
//! from sysfs (Linux 5.9), which shows them without a search of the quota tree. What a group refers
//! to follows the commits of the file system; what was written since is reserved, and counts for the
//! limit.
//!
//! Invariant: "simple quotas" are never used. They charge shared data only to the subvolume that
//! wrote it, so a clone could hold more than its limit.

#![expect(unsafe_code, reason = "names the structures of Btrfs' requests")]

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::subvolume::SubvolumeId;
use crate::ioctl::Request;
use crate::{Error, Result};

const SYSFS: &str = "/sys/fs/btrfs";
/// Where a deleted subvolume has a higher tree, Linux 6.1 and newer stop to count instead of taking
/// the time that its deletion needs. No tree is higher than eight levels.
const DROP_SUBTREE_THRESHOLD: &str = "drop_subtree_threshold";
const ALWAYS_COUNT: &str = "8";

/// What a file system counts and limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quotas {
    Off,
    /// See the module's invariant.
    Simple,
    /// Not `exact`: the figures are wrong until a rescan ends.
    Groups {
        exact: bool,
    },
}

/// The quota group of a subvolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Data and metadata of the subvolume at the last commit; a shared part counts in full.
    pub referenced_bytes: u64,
    /// Reserved since for what is being written.
    pub reserved_bytes: u64,
    /// Most that both may be together; a write above it fails with EDQUOT.
    pub limit_bytes: Option<u64>,
}

/// `struct btrfs_ioctl_fs_info_args` (linux/btrfs.h).
#[repr(C)]
struct FileSystem {
    devices: [u64; 2],
    id: [u8; 16],
    unused: [u64; 124],
}

/// `struct btrfs_ioctl_qgroup_limit_args`.
#[repr(C)]
#[derive(Default)]
struct Limit {
    /// 0: the group of the subvolume that the descriptor is in.
    group: u64,
    flags: u64,
    most_referenced: u64,
    most_exclusive: u64,
    reserved: [u64; 2],
}

/// `struct btrfs_ioctl_qgroup_create_args`.
#[repr(C)]
struct Creation {
    /// 0: removes it.
    create: u64,
    group: u64,
}

/// `struct btrfs_ioctl_quota_rescan_args`.
#[repr(C)]
#[derive(Default)]
struct Rescan {
    flags: u64,
    progress: u64,
    reserved: [u64; 6],
}

/// `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)`.
// SAFETY: `FileSystem` has its size, and only numbers.
const BTRFS_IOC_FS_INFO: Request<FileSystem> = unsafe { Request::new(0x8400_941f) };
/// `_IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)`.
// SAFETY: `Limit` is that structure, all numbers.
const BTRFS_IOC_QGROUP_LIMIT: Request<Limit> = unsafe { Request::new(0x8030_942b) };
/// `_IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)`.
// SAFETY: `Creation` is that structure, all numbers.
const BTRFS_IOC_QGROUP_CREATE: Request<Creation> = unsafe { Request::new(0x4010_942a) };
/// `_IOW(0x94, 44, struct btrfs_ioctl_quota_rescan_args)`.
// SAFETY: `Rescan` is that structure, all numbers.
const BTRFS_IOC_QUOTA_RESCAN: Request<Rescan> = unsafe { Request::new(0x4040_942c) };
const BTRFS_QGROUP_LIMIT_MAX_RFER: u64 = 1;

/// Whether sysfs shows the quotas of the file system of `file`, open for reading.
pub fn are_shown(file: impl AsFd) -> Result<bool> {
    let path = path_of(file)?;
    path.try_exists().map_err(|e| Error::at("look at", &path, e))
}

/// What the file system of `file`, open for reading, counts and limits.
pub fn quotas(file: impl AsFd) -> Result<Quotas> {
    let dir = directory_of(file)?;
    // It is there as long as quotas are on; the attributes are newer.
    if !dir.join("qgroups").try_exists().map_err(|e| Error::at("look at", &dir, e))? {
        return Ok(Quotas::Off);
    }
    let attribute = |name| read_if_there(&dir.join("qgroups").join(name));
    if attribute("mode")?.is_some_and(|mode| mode == "squota") {
        return Ok(Quotas::Simple);
    }
    if attribute("enabled")?.is_some_and(|enabled| enabled == "0") {
        return Ok(Quotas::Off);
    }
    Ok(Quotas::Groups { exact: attribute("inconsistent")?.is_none_or(|inconsistent| inconsistent == "0") })
}

/// Makes the file system count through deletions of any size. Returns false if this kernel cannot be
/// asked: before Linux 6.1, which always does.
pub fn count_through_deletions(file: impl AsFd) -> Result<bool> {
    let path = directory_of(file)?.join("qgroups").join(DROP_SUBTREE_THRESHOLD);
    match read_if_there(&path)? {
        None => Ok(false),
        Some(found) if found == ALWAYS_COUNT => Ok(true),
        Some(_) => {
            std::fs::write(&path, ALWAYS_COUNT).map(|()| true).map_err(|e| Error::at("write", &path, e))
        }
    }
}

/// Starts a count of the whole file system. One that is under way is a success.
pub fn rescan(file: impl AsFd) -> Result<()> {
    match BTRFS_IOC_QUOTA_RESCAN.send(file, &mut Rescan::default()) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(e) => Err(Error::new("count the quota groups of", "a file system", e)),
    }
}

/// Limits the subvolume that contains `directory`, open for reading. `ENOTCONN`: quotas are off.
pub fn limit(directory: impl AsFd, bytes: u64) -> Result<()> {
    let mut wanted = Limit { flags: BTRFS_QGROUP_LIMIT_MAX_RFER, most_referenced: bytes, ..Limit::default() };
    BTRFS_IOC_QGROUP_LIMIT
        .send(directory, &mut wanted)
        .map_err(|e| Error::new("limit the quota group of a subvolume to", format!("{bytes} bytes"), e))
}

/// Ends the limit of the group of the subvolume that `directory` is in.
///
/// # Errors
///
/// `ENOTCONN`: quotas are off.
pub fn unlimit(directory: impl AsFd) -> Result<()> {
    // BTRFS_QGROUP_CLEAR_VALUE of linux/btrfs.h.
    let mut wanted =
        Limit { flags: BTRFS_QGROUP_LIMIT_MAX_RFER, most_referenced: u64::MAX, ..Limit::default() };
    BTRFS_IOC_QGROUP_LIMIT
        .send(directory, &mut wanted)
        .map_err(|e| Error::new("end the limit of", "the quota group of a subvolume", e))
}

/// The group of a subvolume on the file system of `file`. `None` if there is no such group: quotas
/// are off, or the subvolume is gone.
pub fn group(file: impl AsFd, subvolume: SubvolumeId) -> Result<Option<Group>> {
    const LIMITS_REFERENCED: u64 = BTRFS_QGROUP_LIMIT_MAX_RFER;
    let dir = directory_of(file)?.join("qgroups").join(format!("0_{subvolume}"));
    let number = |name: &str| -> Result<Option<u64>> {
        let path = dir.join(name);
        let Some(text) = read_if_there(&path)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| Error::at("understand", &path, Errno::INVAL))
    };
    let Some(referenced_bytes) = number("referenced")? else { return Ok(None) };
    let mut reserved_bytes = 0_u64;
    for kind in ["rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"] {
        reserved_bytes = reserved_bytes.saturating_add(number(kind)?.unwrap_or_default());
    }
    let is_limited = number("limit_flags")?.is_some_and(|flags| flags & LIMITS_REFERENCED != 0);
    let limit_bytes = if is_limited { number("max_referenced")? } else { None };
    Ok(Some(Group { referenced_bytes, reserved_bytes, limit_bytes }))
}

/// Removes the group of a subvolume that was deleted, on the file system of `file`.
///
/// # Errors
///
/// `EBUSY`: parts of the subvolume are still there. (Linux 5.4 to 6.6 with later fixes, and from 6.8 on; from 6.11
/// on, the kernel removes the group itself when all of the subvolume is gone.) `ENOENT`: there is no such group.
pub fn remove(file: impl AsFd, subvolume: SubvolumeId) -> Result<()> {
    let mut removed = Creation { create: 0, group: subvolume.0 };
    BTRFS_IOC_QGROUP_CREATE
        .send(file, &mut removed)
        .map_err(|e| Error::new("remove the quota group of subvolume", subvolume, e))
}

/// The directory of sysfs for the file system of `file`.
fn directory_of(file: impl AsFd) -> Result<PathBuf> {
    let dir = path_of(file)?;
    match dir.try_exists() {
        Ok(true) => Ok(dir),
        Ok(false) => Err(Error::at("find", &dir, Errno::NOENT)),
        Err(e) => Err(Error::at("look at", &dir, e)),
    }
}

fn path_of(file: impl AsFd) -> Result<PathBuf> {
    let mut found = FileSystem { devices: [0; 2], id: [0; 16], unused: [0; 124] };
    BTRFS_IOC_FS_INFO.send(file, &mut found).map_err(|e| Error::new("read the id of", "a file system", e))?;
    Ok(Path::new(SYSFS).join(dashed(found.id)))
}

/// As in /sys: 8-4-4-4-12 digits.
fn dashed(id: [u8; 16]) -> String {
    let mut text = String::new();
    for (index, byte) in id.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// `None` if there is no such file, or it has just gone.
fn read_if_there(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(e) => Err(Error::at("read", path, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_written_as_in_sysfs() {
        let id =
            [0x38, 0x63, 0x4c, 9, 0xe7, 0x79, 0x4d, 0x28, 0xa9, 0x9c, 0xe7, 0xf6, 0x95, 0x37, 0x94, 0xfe];
        assert_eq!(dashed(id), "38634c09-e779-4d28-a99c-e7f6953794fe");
    }
}
