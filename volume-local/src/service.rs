//! The descriptors of this backend's daemon, and its privileges.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use libc::c_long;
use linux::credentials::CapabilitySet;
use proto::handover::{Local as Wire, Role, assignment};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use volume_fs::descriptors::{Descriptors, Wrong};
use volume_fs::service::{Network, Service, Terms};

use crate::backend::{Local, Storage};
use crate::usage_file::BootId;

/// To read and change files below descriptors, and to act as a caller with capabilities that are
/// already limited. No socket, connect, execve, fork, mount, ptrace or bpf, and no ioctl: so FUSE
/// clones and backing files cannot be requested.
pub const SYSTEM_CALLS: &[c_long] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat2,
    libc::SYS_readlinkat,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_copy_file_range,
    libc::SYS_setxattr,
    libc::SYS_fsetxattr,
    libc::SYS_getxattr,
    libc::SYS_fgetxattr,
    libc::SYS_listxattr,
    libc::SYS_flistxattr,
    libc::SYS_removexattr,
    libc::SYS_fremovexattr,
    libc::SYS_name_to_handle_at,
    // Ends of registrations, to the keeper.
    libc::SYS_sendmmsg,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capget,
];

/// The daemon of a volume that is a directory of a pool.
#[derive(Debug)]
pub struct LocalService {
    boot: Option<BootId>,
}

impl LocalService {
    /// Must be called while the process sees the node's /proc.
    pub fn new() -> Self {
        Self { boot: BootId::of_this_boot() }
    }
}

impl Default for LocalService {
    fn default() -> Self {
        Self::new()
    }
}

impl Service for LocalService {
    type Backend = Local;
    type Storage = Storage;

    /// Exactly what serving files of every owner needs: no CAP_SYS_ADMIN, CAP_MKNOD,
    /// CAP_DAC_READ_SEARCH or CAP_SETFCAP.
    const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
        .union(CapabilitySet::DAC_OVERRIDE)
        .union(CapabilitySet::FOWNER)
        .union(CapabilitySet::FSETID)
        .union(CapabilitySet::SETUID)
        .union(CapabilitySet::SETGID);

    const SYSTEM_CALLS: &'static [c_long] = SYSTEM_CALLS;

    /// The data is in a directory of this node.
    const NETWORK: Network = Network::None;

    fn check(
        &self,
        backend: Option<assignment::Backend>,
        descriptors: &mut Descriptors,
    ) -> Result<Storage, Wrong> {
        let Some(assignment::Backend::Local(Wire {})) = backend else {
            return Err(("backend", "not local, the only one that this daemon serves".to_owned()));
        };
        Ok(Storage {
            directory: descriptors.take(Role::Directory, check_directory)?,
            usage_file: descriptors.take(Role::UsageFile, check_usage_file)?,
        })
    }

    fn open(self, storage: Storage, terms: Terms) -> volume_fs::Result<Arc<Local>> {
        Local::open(storage, terms, self.boot).map(Arc::new)
    }
}

/// If `..` led out of the directory, the whole host would be in the volume.
fn check_directory(fd: &OwnedFd) -> Result<(), String> {
    let seen = |name: &str| {
        rustix::fs::statx(fd, name, AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
            .map_err(|e| e.to_string())
    };
    let (own, parent) = (seen("")?, seen("..")?);
    let identity = |s: &rustix::fs::Statx| (s.stx_dev_major, s.stx_dev_minor, s.stx_ino, s.stx_mnt_id);
    if identity(&own) != identity(&parent) {
        return Err("not the root of a detached mount: .. leads out of the volume".to_owned());
    }
    Ok(())
}

fn check_usage_file(fd: &OwnedFd) -> Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| e.to_string())?;
    if kind != FileType::RegularFile || flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(format!("not a regular file open for reading and writing but {kind:?}, {flags:?}"));
    }
    Ok(())
}
