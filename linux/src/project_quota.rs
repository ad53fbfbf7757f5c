//! Project quotas: the file system's own limits on everything below a directory. XFS and ext4
//! support them if mounted with `prjquota` (ext4 also needs the features `quota` and `project`).
//!
//! Invariant: project 0 belongs to all files without a project and is never limited here.

#![expect(unsafe_code, reason = "no crate wraps quotactl_fd(2)")]

use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use crate::{Error, Result, fsxattr};

/// Limits of a project. Above them, a write fails with EDQUOT (ext4) or ENOSPC (XFS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Stored in whole KiB, rounded up.
    pub bytes: u64,
    pub inodes: u64,
}

/// What a project uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
}

/// What a file system knows of a project.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    pub used: Usage,
    /// 0: no limit.
    pub limits: Limits,
}

/// `struct fs_quota_stat` (linux/dqblk_xfs.h), as far as it is read.
#[repr(C)]
#[derive(Debug, Default)]
struct State {
    version: i8,
    flags: u16,
    pad: i8,
    unused: [u64; 9],
}

/// `struct if_dqblk` (linux/quota.h).
#[repr(C)]
#[derive(Debug, Default)]
struct Record {
    /// In KiB, like the next field.
    bytes_limit: u64,
    bytes_soft_limit: u64,
    bytes: u64,
    inodes_limit: u64,
    inodes_soft_limit: u64,
    inodes: u64,
    bytes_grace: u64,
    inodes_grace: u64,
    valid: u32,
}

const FS_XFLAG_PROJINHERIT: u32 = 0x200;
/// `QCMD(command, PRJQUOTA)` of linux/quota.h.
const GET_PROJECT_QUOTA: libc::c_uint = (0x80_0007 << 8) | 2;
const SET_PROJECT_QUOTA: libc::c_uint = (0x80_0008 << 8) | 2;
/// `QCMD(Q_XGETQSTAT, PRJQUOTA)` of linux/dqblk_xfs.h.
const GET_STATE: libc::c_uint = (0x5805 << 8) | 2;
/// FS_QUOTA_PDQ_ENFD: limits of projects are enforced, not only counted.
const ENFORCED: u16 = 1 << 5;
/// The record contains the limits of bytes and inodes.
const QIF_LIMITS: u32 = 1 | 4;
const KIB: u64 = 1024;

/// Assigns `directory`, open for reading, to `project`, and everything that is created below it
/// later. Existing contents do not change.
pub fn assign(directory: impl AsFd, project: NonZeroU32) -> Result<()> {
    let wrong = |e| Error::new("make a directory belong to project", project, e);
    let mut attributes = fsxattr::get(&directory).map_err(wrong)?;
    attributes.flags |= FS_XFLAG_PROJINHERIT;
    attributes.project = project.get();
    fsxattr::set(&directory, attributes).map_err(wrong)
}

/// The project of a file or directory that is open for reading; `None` for project 0.
pub fn project_of(file: impl AsFd) -> Result<Option<NonZeroU32>> {
    let attributes = fsxattr::get(file).map_err(|e| Error::new("read the project of", "a file", e))?;
    Ok(NonZeroU32::new(attributes.project))
}

/// Whether the file system of `mount` keeps projects within their limits. False also where this kernel
/// or this file system has no quotas.
pub fn is_enforced(mount: impl AsFd) -> Result<bool> {
    let mut state = State::default();
    let fd = mount.as_fd().as_raw_fd();
    // SAFETY: the command writes one `struct fs_quota_stat` at the pointer: `state` has its size, and
    // is ours alone during the call.
    let done = unsafe { libc::syscall(libc::SYS_quotactl_fd, fd, GET_STATE, 0, &raw mut state) };
    match Errno::result(done) {
        Ok(_) => Ok(state.flags & ENFORCED != 0),
        Err(Errno::ENOSYS | Errno::ESRCH | Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(false),
        Err(e) => Err(Error::new("read the state of", "project quotas", e)),
    }
}

/// Limits `project` on the file system of `mount`. ESRCH: it is not mounted with `prjquota`.
/// ENOSYS: this kernel has no quotas for it.
pub fn limit(mount: impl AsFd, project: NonZeroU32, limits: Limits) -> Result<()> {
    let mut record = Record {
        bytes_limit: limits.bytes.div_ceil(KIB),
        inodes_limit: limits.inodes,
        valid: QIF_LIMITS,
        ..Record::default()
    };
    quotactl(mount.as_fd().as_raw_fd(), SET_PROJECT_QUOTA, project, &mut record)
        .map_err(|e| Error::new("set the quota of project", project, e))
}

/// The use of `project` on the file system of `mount`.
pub fn usage(mount: impl AsFd, project: NonZeroU32) -> Result<Usage> {
    find(mount, project).map(|known| known.map_or(Usage::default(), |known| known.used))
}

/// What the file system of `mount` knows of `project`: `None` if it was never used or limited there.
pub fn find(mount: impl AsFd, project: NonZeroU32) -> Result<Option<Known>> {
    let mut record = Record::default();
    match quotactl(mount.as_fd().as_raw_fd(), GET_PROJECT_QUOTA, project, &mut record) {
        // XFS has no record of it. ext4 answers with an empty one.
        Err(Errno::ENOENT) => return Ok(None),
        asked => asked.map_err(|e| Error::new("read the quota of project", project, e))?,
    }
    let used = Usage { bytes: record.bytes, inodes: record.inodes };
    let limits = Limits { bytes: record.bytes_limit.saturating_mul(KIB), inodes: record.inodes_limit };
    let is_unused = used == Usage::default() && limits == Limits { bytes: 0, inodes: 0 };
    Ok((!is_unused).then_some(Known { used, limits }))
}

fn quotactl(fd: i32, command: libc::c_uint, project: NonZeroU32, record: &mut Record) -> nix::Result<()> {
    // SAFETY: both commands read or write one `struct if_dqblk` at the pointer,
    // which `record` is and which is ours alone during the call.
    let done = unsafe {
        libc::syscall(libc::SYS_quotactl_fd, fd, command, project.get(), std::ptr::from_mut(record))
    };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_project_quotas_refuses_and_the_error_names_the_project() {
        // if_dqblk has four bytes of padding at its end.
        assert_eq!((size_of::<Record>(), size_of::<State>()), (72, 80));
        let proc = std::fs::File::open("/proc").unwrap();
        let project = NonZeroU32::new(7).unwrap();
        let error = limit(&proc, project, Limits { bytes: 1, inodes: 1 }).unwrap_err();
        assert!(error.to_string().contains("set the quota of project 7"), "{error}");
        assert!(!is_enforced(&proc).unwrap());
    }
}
