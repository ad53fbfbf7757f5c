//! Attributes of files and of the volume. The kernel refuses trusted.* and security.capability: the
//! process lacks CAP_SYS_ADMIN and CAP_SETFCAP.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use linux::credentials::{self, Caller, CapabilitySet};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, XattrFlags};
use rustix::io::Errno;
use volume_fs::figures::UsageNow;
use volume_fs::file::{Attributes, Handle, NodeId, Statistics};
use volume_fs::request::{Changes, Xattr};

use super::{OpenFile, Running, Volume, c_string, clearing_setid, mode_bits};
use crate::charge::{self, BLOCK_BYTES};
use crate::errno::{self, Result};
use crate::nodes::stat;
use crate::place::{MOST_NAME_BYTES, Place};
use crate::state_table::requests::Effect;
use crate::xattrs;

/// Extended attributes of one file, names and values together: the space that ext4 has besides the
/// inode. xfs would store any number.
const MOST_XATTR_BYTES: usize = 4096;

const ACCESS_ACL: &CStr = c"system.posix_acl_access";

/// The kernel asks for it before the first write to a file since it was looked up (file_remove_privs of
/// fs/inode.c).
const CAPABILITY: &str = "security.capability";

/// Whether setting an ACL leaves the setgid bit, as it does for members of the file's group
/// (posix_acl_update_mode of fs/posix_acl.c). Of a caller's groups only the first is known. For a
/// directory the bit gives no rights: it stays.
fn may_keep_setgid(by: Caller, file: &OwnedFd) -> Result<bool> {
    let seen = rustix::fs::fstat(file)?;
    let is_file = FileType::from_raw_mode(seen.st_mode) == FileType::RegularFile;
    Ok(!is_file || is_member(by, seen.st_gid))
}

/// Whether the caller may set the setgid bit of a file of this group, as far as that is known.
fn is_member(by: Caller, gid: u32) -> bool {
    by.uid == 0 || by.gid == gid
}

/// Makes a change on behalf of `by`, which clears suid, and sgid as setattr_should_drop_sgid of
/// fs/attr.c has it: not of a file that its group may not execute, if `by` is a member.
pub(super) fn clearing_setid_for<T>(
    by: Caller,
    file: &OwnedFd,
    change: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let seen = rustix::fs::fstat(file)?;
    if !Mode::from_raw_mode(seen.st_mode).intersects(Mode::SUID | Mode::SGID) {
        return change();
    }
    // The kernel asks whether this thread is a member: its own group would decide for files of that group.
    let gid = if is_member(by, seen.st_gid) { seen.st_gid } else { by.gid };
    credentials::as_caller(Caller { uid: 0, gid }, CapabilitySet::empty(), || clearing_setid(change))
        .map_err(errno::from_nix)?
}

/// Stored as it is set, and always listed.
fn is_of_users(attribute: &CStr) -> bool {
    attribute.to_bytes().starts_with(b"user.")
}

/// An extended attribute that is to be set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewXattr<'a> {
    pub(crate) name: &'a OsStr,
    pub(crate) value: &'a [u8],
    pub(crate) flags: XattrFlags,
}

impl Volume {
    pub(crate) fn attributes(&self, NodeId(id): NodeId, handle: Option<Handle>) -> Result<Attributes> {
        // An open file has a descriptor: none must be reopened.
        if let Some(file) = handle.and_then(|handle| self.file(handle).ok()) {
            return self.attributes_now(&stat(&file.fd)?);
        }
        self.attributes_now(&stat(self.nodes.descriptor(id)?)?)
    }

    pub(crate) fn change(
        &self,
        by: Caller,
        NodeId(id): NodeId,
        handle: Option<Handle>,
        changes: &Changes,
    ) -> Result<Attributes> {
        self.writable()?;
        let fd = self.nodes.descriptor(id)?;
        // Part of it may have been made, which the kernel does not learn from an error.
        self.change_file(by, id, &fd, handle, changes).inspect_err(|_| self.trust.outdates(id))?;
        self.attributes_now(&stat(&*fd)?)
    }

    fn change_file(
        &self,
        by: Caller,
        id: u64,
        fd: &OwnedFd,
        handle: Option<Handle>,
        changes: &Changes,
    ) -> Result<()> {
        if let Some(size) = changes.size {
            self.truncate(by, id, fd, handle, size)?;
        }
        let asked_for_nothing = changes.mode.or(changes.uid).or(changes.gid).is_none()
            && changes.size.is_none()
            && changes.times.is_none();
        let (uid, gid) = (changes.uid.map(Uid::from_raw), changes.gid.map(Gid::from_raw));
        let chown = || rustix::fs::chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH);
        if asked_for_nothing {
            // FUSE_HANDLE_KILLPRIV_V2 clears suid and sgid by an empty request (as chown(-1, -1)
            // does), for example before fallocate(2).
            clearing_setid_for(by, fd, chown)?;
        } else if changes.uid.is_some() || changes.gid.is_some() {
            chown()?;
        }
        if let Some(mode) = changes.mode {
            // After chown, which clears suid and sgid.
            self.descriptors.chmod(fd.as_fd(), mode_bits(mode))?;
        }
        if let Some(times) = &changes.times {
            rustix::fs::utimensat(fd, c"", times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// Always clears suid, and sgid of what the group may execute: the request has a flag that lets the
    /// caller keep them, but fuser 0.18 does not pass it on. POSIX allows both.
    fn truncate(&self, by: Caller, id: u64, node: &OwnedFd, handle: Option<Handle>, size: u64) -> Result<()> {
        let file = match handle.and_then(|handle| self.file(handle).ok()) {
            Some(open) => open,
            None => {
                let flags = OFlags::WRONLY;
                Arc::new(OpenFile { id, flags, fd: self.reopen(node, flags)? })
            }
        };
        let truncate = || rustix::fs::ftruncate(&file.fd, size);
        self.resizing(&file, size, || clearing_setid_for(by, &file.fd, truncate))
    }

    /// A volume with a limit has its own figures: size minus free is its use. Available is never
    /// more than the backing file system has; FUSE has no such figure for inodes.
    pub(crate) fn statistics(&self, UsageNow { limits, used, .. }: UsageNow) -> Result<Statistics> {
        let backing = rustix::fs::fstatvfs(&*self.root)?;
        let mut statistics = Statistics {
            block_bytes: backing.f_bsize,
            fragment_bytes: backing.f_frsize,
            blocks: backing.f_blocks,
            free_blocks: backing.f_bfree,
            available_blocks: backing.f_bavail,
            inodes: backing.f_files,
            free_inodes: backing.f_ffree,
            longest_name: backing.f_namemax.min(MOST_NAME_BYTES as u64),
        };
        if limits.bytes > 0 {
            let available = backing.f_bavail.saturating_mul(backing.f_frsize);
            let free = limits.bytes.saturating_sub(used.bytes);
            (statistics.block_bytes, statistics.fragment_bytes) = (BLOCK_BYTES, BLOCK_BYTES);
            statistics.blocks = limits.bytes / BLOCK_BYTES;
            statistics.free_blocks = free / BLOCK_BYTES;
            statistics.available_blocks = free.min(available) / BLOCK_BYTES;
        }
        if limits.inodes > 0 {
            statistics.inodes = limits.inodes;
            statistics.free_inodes = limits.inodes.saturating_sub(used.inodes);
        }
        Ok(statistics)
    }

    pub(crate) fn set_xattr(
        &self,
        running: &mut Running,
        by: Caller,
        NodeId(id): NodeId,
        NewXattr { name, value, flags }: NewXattr<'_>,
    ) -> Result<()> {
        self.writable()?;
        if running.is_done() {
            return Ok(());
        }
        let (fd, name) = (self.nodes.descriptor(id)?, c_string(name)?);
        let file = self.descriptors.open_xattrs(fd.as_fd(), &name);
        let others = xattrs::total(&file, &xattrs::names(&file)?, Some(&name))?;
        let (had, replaced) = match file.size(&name) {
            Ok(length) => (true, others.with(&name, length)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => (false, others),
            Err(errno) => return Err(errno),
        };
        let wanted = others.with(&name, value.len());
        if wanted.bytes() > MOST_XATTR_BYTES {
            return Err(Errno::NOSPC);
        }
        let growth = charge::attribute_bytes(self.attribute_blocks.growth(replaced, wanted));
        let change = self.make_room_for_attributes(id, &fd, &file, growth)?;
        // Repeating it makes a difference only with these flags.
        if !flags.is_empty() {
            let at = Place { directory: id, name: name.clone() };
            running.note(|| Ok::<_, Errno>(Effect::Attribute { at, had, sets: true }))?;
        }
        let set = || file.set(&name, value, flags);
        let set = if name.as_c_str() == ACCESS_ACL && !may_keep_setgid(by, &fd)? {
            clearing_setid_for(by, &fd, set)
        } else {
            set()
        };
        self.trust.outdates(id);
        self.nodes.set_lacks_default_acl(id, false);
        // An ACL that says what the mode says is not stored.
        let now = (set.is_ok() && is_of_users(&name)).then_some(wanted);
        self.settle_attributes(&fd, &file, now, change);
        set
    }

    pub(crate) fn xattr(&self, NodeId(id): NodeId, name: &OsStr, size: usize) -> Result<Xattr> {
        let is_capability = name == CAPABILITY;
        if is_capability && self.nodes.lacks_capability(id) {
            return Err(Errno::NODATA);
        }
        let (fd, name) = (self.nodes.descriptor(id)?, c_string(name)?);
        let answer = match size {
            0 => self.descriptors.xattrs(fd.as_fd()).size(&name).map(Xattr::Size),
            _ => self.descriptors.xattrs(fd.as_fd()).get(&name, size).map(Xattr::Value),
        };
        match answer {
            Err(Errno::NODATA) if is_capability => {
                self.lacks_capability(id);
                answer
            }
            // A backing file system without ACLs: the kernel above, which has ACLs enabled, sees a
            // file without one.
            Err(Errno::OPNOTSUPP) if name.to_bytes().starts_with(b"system.posix_acl_") => Err(Errno::NODATA),
            other => other,
        }
    }

    /// The file was created or seen without security.capability.
    pub(super) fn lacks_capability(&self, id: u64) {
        if self.trust.knows_all_changes() {
            self.nodes.set_lacks_capability(id);
        }
    }

    pub(crate) fn xattr_names(&self, NodeId(id): NodeId, size: usize) -> Result<Xattr> {
        let fd = self.nodes.descriptor(id)?;
        match size {
            0 => self.descriptors.xattrs(fd.as_fd()).names_size().map(Xattr::Size),
            _ => self.descriptors.xattrs(fd.as_fd()).names(size).map(Xattr::Value),
        }
    }

    pub(crate) fn remove_xattr(&self, running: &mut Running, NodeId(id): NodeId, name: &OsStr) -> Result<()> {
        self.writable()?;
        if running.is_done() {
            return Ok(());
        }
        let (fd, name) = (self.nodes.descriptor(id)?, c_string(name)?);
        let file = self.descriptors.open_xattrs(fd.as_fd(), &name);
        let change = self.make_room_for_attributes(id, &fd, &file, 0)?;
        // One call tells whether it was there, and what is left.
        let (had, left) = if self.table.is_some() || change.is_some() {
            let names = xattrs::names(&file)?;
            // Others exist that a listing may leave out.
            let is_listed = names.contains(&name);
            let had = is_listed || !is_of_users(&name) && file.size(&name).is_ok();
            (had, Some(xattrs::total(&file, &names, Some(&name))?))
        } else {
            (false, None)
        };
        running.note(|| {
            let at = Place { directory: id, name: name.clone() };
            Ok::<_, Errno>(Effect::Attribute { at, had, sets: false })
        })?;
        let removed = file.remove(&name);
        self.trust.outdates(id);
        self.nodes.set_lacks_default_acl(id, false);
        self.settle_attributes(&fd, &file, left.filter(|_| removed.is_ok()), change);
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::Access;
    use crate::volume::testing::{create, volume};

    /// `struct vfs_cap_data` of revision 2 with CAP_NET_RAW permitted.
    const NET_RAW: [u8; 20] = [0, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    /// What the kernel hears about a new file's capabilities, which another program has set meanwhile.
    fn capability_of_new_file(changed_from_outside: bool) -> Result<Xattr> {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let access = Access { read_only: false, changed_from_outside };
        let volume = volume(directory.path(), access, None);
        let (id, _) = create(&volume, "new").unwrap();
        let file = directory.path().join("new");
        rustix::fs::setxattr(&file, CAPABILITY, &NET_RAW, XattrFlags::empty()).unwrap();
        volume.xattr(id, OsStr::new(CAPABILITY), 0)
    }

    #[test]
    fn a_new_file_has_no_capabilities_unless_others_may_change_it() {
        assert_eq!(capability_of_new_file(false).unwrap_err(), Errno::NODATA);
        assert!(matches!(capability_of_new_file(true), Ok(Xattr::Size(20 | 24))));
    }
}
