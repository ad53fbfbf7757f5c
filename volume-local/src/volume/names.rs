//! Names: looking up, creating, linking, moving and removing files.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use linux::credentials::{self, Caller, CapabilitySet};
use rustix::fs::{AtFlags, FileType as BackingType, Mode, OFlags, RenameFlags, Statx};
use rustix::io::Errno;
use volume_fs::file::{Handle, Known, Name, NodeId};
use volume_fs::request::{Permissions, Special};

use super::charges::{Loss, keep};
use super::data::PASSED_ON;
use super::{OpenFile, Volume, WANTED, component, mode_bits};
use crate::errno::{self, Result};
use crate::nodes::{Admission, Place, Removal, stat};

/// Capabilities kept while acting as a caller: the kernel has checked the directory's mode with all
/// of the caller's groups, and has cleared a setgid bit that the new mode may not have.
const KEPT_AS_CALLER: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FSETID);

impl Volume {
    pub(crate) fn look_up(&self, name: Name<'_>) -> Result<Known> {
        self.find(place(name)?, Admission::IfRoom).map(|(known, _seen)| known)
    }

    fn find(&self, place: Place, admission: Admission) -> Result<(Known, Statx)> {
        let parent = self.nodes.descriptor(place.directory)?;
        loop {
            let names = self.nodes.names_now(place.directory);
            let fd = self.nodes.open_path(&parent, &place.name)?;
            let seen = stat(&fd)?;
            let known = self.known(&seen, fd.as_fd(), c"")?;
            let NodeId(id) = known.attributes.id;
            // It must be looked up again only after a rename or a removal.
            if self.nodes.remember_if_still_there(id, &place, fd, names, admission)?.is_none() {
                return Ok((known, seen));
            }
        }
    }

    pub(crate) fn forget(&self, NodeId(id): NodeId, lookups: u64) {
        self.settle_before_forget(id);
        self.nodes.forget(id, lookups);
    }

    pub(crate) fn make_directory(
        &self,
        name: Name<'_>,
        permissions: Permissions,
        caller: Caller,
    ) -> Result<Known> {
        self.create_name(name, |parent, name| {
            let mode = self.granted(parent, permissions)?;
            as_caller(caller, || rustix::fs::mkdirat(parent, name, mode))
        })
    }

    pub(crate) fn make_special(
        &self,
        name: Name<'_>,
        special: Special,
        permissions: Permissions,
        caller: Caller,
    ) -> Result<Known> {
        let kind = match special {
            Special::Regular => BackingType::RegularFile,
            Special::Fifo => BackingType::Fifo,
            Special::Socket => BackingType::Socket,
        };
        self.create_name(name, |parent, name| {
            let mode = self.granted(parent, permissions)?;
            as_caller(caller, || rustix::fs::mknodat(parent, name, kind, mode, 0))
        })
    }

    pub(crate) fn make_symlink(&self, name: Name<'_>, target: &OsStr, caller: Caller) -> Result<Known> {
        self.create_name(name, |parent, name| {
            as_caller(caller, || rustix::fs::symlinkat(target, parent, name))
        })
    }

    pub(crate) fn create(
        &self,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        caller: Caller,
    ) -> Result<(Known, Handle)> {
        self.writable()?;
        let place = place(name)?;
        let directory = place.directory;
        let parent = self.nodes.descriptor(directory)?;
        // Always exclusive: opening a file that another process created meanwhile would bypass the
        // permission check.
        let passed_on = flags & PASSED_ON;
        let open = passed_on | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = self.granted(&parent, permissions)?;
        self.files.admit()?;
        self.nodes.admit(directory)?;
        let inode = self.admit_file()?;
        let created = self.settling(directory, &parent, || {
            self.nodes.with_descriptors(|| {
                as_caller(caller, || rustix::fs::openat(&parent, &place.name, open, mode))
            })
        });
        let file = match created {
            // The kernel looks the name up again and opens the file it finds.
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => return Err(Errno::STALE),
            other => other?,
        };
        keep(inode);
        let seen = stat(&file)?;
        let known = self.known(&seen, file.as_fd(), c"")?;
        let NodeId(id) = known.attributes.id;
        self.charge_new(id, &seen);
        self.nodes.remember(id, place, None);
        Ok((known, self.files.insert(OpenFile { id, flags: passed_on, fd: file })))
    }

    pub(crate) fn link(&self, NodeId(id): NodeId, name: Name<'_>) -> Result<Known> {
        self.writable()?;
        let Place { directory, name: new_name } = place(name)?;
        let (file, parent) = (self.nodes.descriptor(id)?, self.nodes.descriptor(directory)?);
        let inode = self.admit_link()?;
        self.settling(directory, &parent, || self.descriptors.link(file.as_fd(), parent.as_fd(), &new_name))?;
        keep(inode);
        self.look_up(name)
    }

    /// `kind`: REMOVEDIR for a directory.
    pub(crate) fn remove(&self, name: Name<'_>, kind: AtFlags, uid: u32) -> Result<()> {
        self.writable()?;
        let place = place(name)?;
        let directory = place.directory;
        let parent = self.nodes.descriptor(directory)?;
        let found = self.found_at(&parent, &place)?;
        self.admit_loss(found.as_ref(), uid)?;
        self.settling(directory, &parent, || rustix::fs::unlinkat(&parent, &place.name, kind))?;
        if let Some(found) = found {
            self.lost(found, uid, &place);
        }
        Ok(())
    }

    pub(crate) fn rename(&self, from: Name<'_>, to: Name<'_>, flags: RenameFlags, uid: u32) -> Result<()> {
        self.writable()?;
        // A whiteout is a device node.
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(Errno::INVAL);
        }
        let (from, to) = (place(from)?, place(to)?);
        let (from_directory, to_directory) = (from.directory, to.directory);
        let (from_parent, to_parent) =
            (self.nodes.descriptor(from_directory)?, self.nodes.descriptor(to_directory)?);
        let moving = self.found_at(&from_parent, &from)?;
        let in_the_way = self.found_at(&to_parent, &to)?;
        if in_the_way.is_none() {
            self.admit_name()?;
        } else if !flags.contains(RenameFlags::EXCHANGE) {
            self.admit_loss(in_the_way.as_ref(), uid)?;
        }
        self.settling(from_directory, &from_parent, || {
            self.settling(to_directory, &to_parent, || {
                rustix::fs::renameat_with(&from_parent, &from.name, &to_parent, &to.name, flags)
            })
        })?;
        let id = |found: &Option<Found>| found.as_ref().map(|found| found.id);
        if id(&moving).is_some() && id(&moving) == id(&in_the_way) {
            // Two names of one file: rename(2) does nothing.
            return Ok(());
        }
        match in_the_way {
            Some(other) if flags.contains(RenameFlags::EXCHANGE) => {
                self.nodes.moved(other.id, &to, from.clone());
            }
            Some(replaced) => self.lost(replaced, uid, &to),
            None => {}
        }
        if let Some(moved) = moving {
            self.nodes.moved(moved.id, &from, to);
        }
        Ok(())
    }

    pub(crate) fn read_link(&self, NodeId(id): NodeId) -> Result<Vec<u8>> {
        let fd = self.nodes.descriptor(id)?;
        rustix::fs::readlinkat(&*fd, c"", Vec::new()).map(CString::into_bytes)
    }

    fn create_name(
        &self,
        name: Name<'_>,
        create: impl Fn(&OwnedFd, &CString) -> Result<()>,
    ) -> Result<Known> {
        self.writable()?;
        let place = place(name)?;
        let directory = place.directory;
        let parent = self.nodes.descriptor(directory)?;
        self.nodes.admit(directory)?;
        let inode = self.admit_file()?;
        self.settling(directory, &parent, || create(&parent, &place.name))?;
        keep(inode);
        let (known, seen) = self.find(place, Admission::Admitted)?;
        self.charge_new(known.attributes.id.0, &seen);
        Ok(known)
    }

    /// Applies the umask, unless a default ACL defines the permissions of new files (acl(5)): the
    /// backing file system applies that.
    fn granted(&self, parent: &OwnedFd, permissions: Permissions) -> Result<Mode> {
        let Permissions { mode, umask } = permissions;
        if mode & umask & 0o777 == 0 {
            return Ok(mode_bits(mode));
        }
        match self.descriptors.xattr_size(parent.as_fd(), c"system.posix_acl_default") {
            Ok(_) => Ok(mode_bits(mode)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(mode_bits(mode & !umask)),
            Err(errno) => Err(errno),
        }
    }

    fn found_at(&self, parent: &OwnedFd, place: &Place) -> Result<Option<Found>> {
        let seen = match rustix::fs::statx(parent, &place.name, AtFlags::SYMLINK_NOFOLLOW, WANTED) {
            Ok(seen) => seen,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let id = self.origin.node_id(&seen)?;
        let held = if self.nodes.contains(id) { Some(self.held_at(id, parent, place)?) } else { None };
        Ok(Some(Found { id, seen, held }))
    }

    /// A descriptor of a node that was just seen at `place`.
    fn held_at(&self, id: u64, parent: &OwnedFd, place: &Place) -> Result<Arc<OwnedFd>> {
        match self.nodes.descriptor(id) {
            // Changed behind the mount: it was known by another name.
            Err(Errno::STALE) => {
                let fd = self.nodes.open_path(parent, &place.name)?;
                if self.origin.node_id(&stat(&fd)?)? == id { Ok(Arc::new(fd)) } else { Err(Errno::STALE) }
            }
            other => other,
        }
    }

    /// Called before a file loses a name. If it is the last one and the kernel knows the file, its
    /// descriptor is kept until the kernel forgets it. `EMFILE` if `uid` has too many of these.
    fn admit_loss(&self, found: Option<&Found>, uid: u32) -> Result<()> {
        let is_last = |found: &Found| {
            let kind = BackingType::from_raw_mode(found.seen.stx_mode.into());
            found.held.is_some() && (kind == BackingType::Directory || found.seen.stx_nlink <= 1)
        };
        if !found.is_some_and(is_last) {
            return Ok(());
        }
        match self.retrying(|| self.nodes.admit_nameless(uid)) {
            Err(Errno::NOSPC) => Err(Errno::MFILE),
            other => other,
        }
    }

    /// The file at `place` was removed by `uid`. The kernel serializes requests that remove names
    /// of one file.
    fn lost(&self, found: Found, uid: u32, place: &Place) {
        let Found { id, seen, held } = found;
        let is_directory = BackingType::from_raw_mode(seen.stx_mode.into()) == BackingType::Directory;
        let links = match &held {
            Some(held) => stat(held).map_or(0, |now| now.stx_nlink),
            None => seen.stx_nlink.saturating_sub(1),
        };
        let names_left = !is_directory && links > 0;
        self.discharge(id, &seen, Loss { names_left, is_known: held.is_some() });
        if let Some(held) = held {
            self.nodes.removed(id, place, Removal { uid, held, names_left });
        }
    }
}

/// The directory and name of a file: never outside its directory.
fn place(name: Name<'_>) -> Result<Place> {
    Ok(Place { directory: name.directory.0, name: component(name.name)? })
}

/// The file with a given name.
struct Found {
    id: u64,
    seen: Statx,
    /// Set if the kernel knows it.
    held: Option<Arc<OwnedFd>>,
}

/// Creates as `caller`.
fn as_caller<T>(caller: Caller, create: impl FnOnce() -> Result<T>) -> Result<T> {
    credentials::as_caller(caller, KEPT_AS_CALLER, create).map_err(errno::from_nix)?
}
