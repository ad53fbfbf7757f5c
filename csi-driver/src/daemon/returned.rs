//! Checks what a running daemon calls its volume's connection, directory, usage file and state table.
//! An attacker may control the daemon, and another daemon of the volume will get these descriptors.
//!
//! Invariant: no check sends a request to a FUSE daemon or waits for a file system.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use proto::handover::Role;
use rustix::fs::{AtFlags, Statx, StatxFlags};

use crate::daemon::keeper::Role as Kept;
use crate::error::{Error, Result};
use crate::model::ids::VolumeId;
use crate::model::records::DataId;

/// What the driver knows of a volume.
pub(crate) struct Known<'a> {
    pub(crate) volume_id: &'a VolumeId,
    pub(crate) connection_minor: u32,
    pub(crate) data: DataId,
    /// The pool's own.
    pub(crate) usage_file: BorrowedFd<'a>,
    pub(crate) table_bytes: u64,
}

/// All that a successor of the daemon needs, the connection last. Empty if the daemon reports that no
/// other one can continue its connection.
pub(crate) fn check(known: &Known<'_>, returned: Vec<(Role, OwnedFd)>) -> Result<Vec<(Kept, OwnedFd)>> {
    if returned.is_empty() {
        return Ok(Vec::new());
    }
    let mut returned = returned;
    let mut kept = Vec::new();
    for (role, as_kept) in [
        (Role::StateTable, Kept::StateTable),
        (Role::Directory, Kept::Directory),
        (Role::UsageFile, Kept::UsageFile),
        (Role::FuseDevice, Kept::Connection),
    ] {
        let wrong = |reason| {
            let volume_id = known.volume_id.clone();
            Error::WrongDescriptor { volume_id, role: role.as_str_name(), reason }
        };
        let at = returned.iter().position(|(other, _)| *other == role);
        let (_, descriptor) = returned.swap_remove(at.ok_or_else(|| wrong("it is missing".to_owned()))?);
        check_one(known, as_kept, descriptor.as_fd()).map_err(wrong)?;
        kept.push((as_kept, descriptor));
    }
    Ok(kept)
}

fn check_one(known: &Known<'_>, role: Kept, fd: BorrowedFd<'_>) -> std::result::Result<(), String> {
    use keeper::wire::Role as Held;
    let is = |held| keeper::descriptors::check(held, fd).map_err(|refusal| refusal.to_string());
    match role {
        Kept::Connection => {
            is(Held::Connection)?;
            match linux::mount::fuse_connection_of(fd).map_err(|e| linux::chain(&e))? {
                Some(minor) if minor == known.connection_minor => Ok(()),
                Some(other) => {
                    Err(format!("of FUSE connection {other}, and the volume has {}", known.connection_minor))
                }
                None => {
                    Err("of no FUSE connection, or of one that the kernel does not report (before Linux \
                             6.16)"
                        .to_owned())
                }
            }
        }
        Kept::Directory => {
            is(Held::Directory)?;
            let DataId { device, inode } = known.data;
            let found = look(fd)?;
            let is_it = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor) == device
                && found.stx_ino == inode;
            if is_it { Ok(()) } else { Err("not the directory that the daemon was assigned".to_owned()) }
        }
        Kept::UsageFile => {
            is(Held::UsageFile)?;
            let identity = |found: Statx| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
            let is_it = identity(look(fd)?) == identity(look(known.usage_file)?);
            if is_it { Ok(()) } else { Err("not the usage file of the volume in the pool".to_owned()) }
        }
        Kept::StateTable => {
            is(Held::StateTable)?;
            let bytes = look(fd)?.stx_size;
            if bytes == known.table_bytes {
                Ok(())
            } else {
                Err(format!("{bytes} bytes, and the daemon was given {}", known.table_bytes))
            }
        }
        Kept::ParkedMount
        | Kept::ControlListener
        | Kept::MetricsListener
        | Kept::Assignment
        | Kept::Daemon => Err("no daemon returns it".to_owned()),
    }
}

fn look(fd: BorrowedFd<'_>) -> std::result::Result<Statx, String> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, "", flags, StatxFlags::INO | StatxFlags::SIZE).map_err(|e| format!("statx: {e}"))
}
