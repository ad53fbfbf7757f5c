//! Files that the kernel reads and writes for a FUSE connection without its daemon (FUSE_PASSTHROUGH,
//! Linux 6.9). Registering one needs CAP_SYS_ADMIN in the first user namespace
//! (fs/fuse/backing.c, `fuse_backing_open`).

#![expect(unsafe_code, reason = "names the structure of FUSE_DEV_IOC_BACKING_OPEN")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;

use crate::credentials::{Caller, CapabilitySet, FsIds, ReducedSets};
use crate::ioctl::Request;

/// `struct fuse_backing_map` of linux/fuse.h.
#[repr(C)]
#[derive(Debug)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

// SAFETY: the structure that linux/fuse.h names for the request, without a pointer; the kernel writes
// nothing to it.
const BACKING_OPEN: Request<BackingMap> = unsafe { Request::new(0x4010_e501) };
// SAFETY: a number, which the kernel only reads.
const BACKING_CLOSE: Request<u32> = unsafe { Request::new(0x4004_e502) };

/// An unprivileged user: of no file system's reserved blocks.
const OWNER: Caller = Caller { uid: 65534, gid: 65534 };

/// Registers files from the thread that made it, which has the credentials of backing files until its drop.
///
/// The kernel reads and writes a backing file with the credentials of its registration. They have no
/// capability that changes what a file system does: with CAP_FSETID, set-id bits would survive a write, with
/// CAP_SYS_RESOURCE ext4 would ignore quotas, and root may use reserved blocks.
#[derive(Debug)]
pub struct Registrar {
    _sets: ReducedSets,
    _ids: FsIds,
}

impl Registrar {
    /// # Errors
    ///
    /// `EPERM`: this thread may not change its credentials.
    pub fn on_this_thread() -> Result<Self, Errno> {
        let ids = FsIds::set(OWNER)?;
        // A change to another fsuid has taken the file capabilities from the effective set (capabilities(7)). With
        // this one the thread still looks into directories of any user.
        let sets = ReducedSets::keeping(CapabilitySet::DAC_READ_SEARCH, CapabilitySet::SYS_RESOURCE)?;
        Ok(Self { _sets: sets, _ids: ids })
    }

    /// Registers `file` with the connection; the number that names it there. The file's access mode does
    /// not limit that of later opens: the caller checks it.
    ///
    /// # Errors
    ///
    /// `EPERM`: the connection has no passthrough, or this thread lacks CAP_SYS_ADMIN. `EOPNOTSUPP`: a file
    /// that cannot be read or written in this way. `ELOOP`: a file on a stacked file system.
    pub fn register(&self, connection: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32, Errno> {
        let mut map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        let number = BACKING_OPEN.send_for_number(connection, &mut map);
        number.map_err(|e| Errno::from_raw(e.raw_os_error()))
    }
}

/// Ends a registration. Files that are open stay open. May take as long as a close of the file.
///
/// # Errors
///
/// `ENOENT`: no file has this number.
pub fn unregister(connection: impl AsFd, number: u32) -> Result<(), Errno> {
    let mut number = number;
    BACKING_CLOSE.send(connection, &mut number).map_err(|e| Errno::from_raw(e.raw_os_error()))
}
