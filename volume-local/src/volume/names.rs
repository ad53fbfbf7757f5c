//! Names: looking up, creating, linking, moving and removing files.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use linux::credentials::{self, Caller, CapabilitySet};
use rustix::fs::{AtFlags, FileType as BackingType, Mode, OFlags, RenameFlags, Statx, StatxFlags};
use rustix::io::Errno;
use volume_fs::file::{Known, LookedUp, Name, NodeId, Opened};
use volume_fs::request::{Permissions, Special};

use super::charges::{Loss, keep};
use super::data::both_ways;
use super::{OpenFile, Running, Volume, component, mode_bits};
use crate::backings::Wanted;
use crate::charge::charge;
use crate::errno::{self, Result};
use crate::nodes::{Admission, Removal, Unused, stat};
use crate::place::Place;
use crate::state_table::requests::Effect;

/// Capabilities kept while acting as a caller: the kernel has checked the directory's mode with all
/// of the caller's groups, and has cleared a setgid bit that the new mode may not have.
const KEPT_AS_CALLER: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FSETID);

impl Volume {
    pub(crate) fn look_up(&self, running: &mut Running, name: Name<'_>) -> Result<LookedUp> {
        match self.find_known(running, name) {
            Err(Errno::NOENT) => Ok(LookedUp::Missing(self.trust.of_missing_name())),
            found => found.map(LookedUp::Found),
        }
    }

    pub(super) fn find_known(&self, running: &mut Running, name: Name<'_>) -> Result<Known> {
        self.find(running, place(name)?, Admission::IfRoom).map(|(known, _seen)| known)
    }

    fn find(&self, running: &mut Running, place: Place, admission: Admission) -> Result<(Known, Statx)> {
        let parent = self.nodes.descriptor(place.directory).map_err(for_kernel)?;
        loop {
            let names = self.nodes.names_now(place.directory);
            let fd = self.nodes.open_path(&parent, &place.name).map_err(for_kernel)?;
            let seen = stat(&fd)?;
            let known = self.known(&seen, fd.as_fd(), c"")?;
            let NodeId(id) = known.attributes.id;
            // It must be looked up again only after a rename or a removal.
            if self.nodes.remember_if_still_there(id, &place, fd, names, admission)?.is_none() {
                running.counted(id);
                return Ok((known, seen));
            }
        }
    }

    pub(crate) fn forget(&self, NodeId(id): NodeId, lookups: u64) {
        self.settle_before_forget(id);
        self.forget_lookups(id, lookups);
    }

    /// The kernel does not learn of one lookup that was counted.
    pub(super) fn forget_unanswered(&self, id: u64) {
        self.forget_lookups(id, 1);
    }

    fn forget_lookups(&self, id: u64, lookups: u64) {
        self.nodes.forget(id, lookups);
        self.is_unknown(id);
    }

    pub(crate) fn make_directory(
        &self,
        running: &mut Running,
        name: Name<'_>,
        permissions: Permissions,
        caller: Caller,
    ) -> Result<Known> {
        self.create_name(running, name, AtFlags::REMOVEDIR, |parent, new| {
            let mode = self.granted(name.directory.0, parent, permissions)?;
            as_caller(caller, || rustix::fs::mkdirat(parent, new, mode))
        })
    }

    pub(crate) fn make_special(
        &self,
        running: &mut Running,
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
        self.create_name(running, name, AtFlags::empty(), |parent, new| {
            let mode = self.granted(name.directory.0, parent, permissions)?;
            as_caller(caller, || rustix::fs::mknodat(parent, new, kind, mode, 0))
        })
    }

    pub(crate) fn make_symlink(
        &self,
        running: &mut Running,
        name: Name<'_>,
        target: &OsStr,
        caller: Caller,
    ) -> Result<Known> {
        self.create_name(running, name, AtFlags::empty(), |parent, name| {
            as_caller(caller, || rustix::fs::symlinkat(target, parent, name))
        })
    }

    pub(crate) fn create(
        &self,
        running: &mut Running,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        caller: Caller,
    ) -> Result<(Known, Opened)> {
        self.create_new(running, name, permissions, flags, caller).map_err(|errno| match errno {
            // The kernel looks the name up again and opens the file that it finds.
            Errno::EXIST if !flags.contains(OFlags::EXCL) => Errno::STALE,
            other => other,
        })
    }

    /// Always exclusive: opening a file that another process created meanwhile would bypass the permission check.
    fn create_new(
        &self,
        running: &mut Running,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        caller: Caller,
    ) -> Result<(Known, Opened)> {
        self.writable()?;
        let place = place(name)?;
        let directory = place.directory;
        let passed_on = self.passed_on(flags);
        let may_pass = self.passing.is_some();
        let access = if may_pass { both_ways(passed_on) } else { passed_on };
        let open = access | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        if running.is_done() {
            let known = self.find_made(running, place, Admission::Admitted)?;
            // The kernel learns of no lookup from an error.
            let opened = self.open_file(running, known.attributes.id, passed_on).map_err(|_| {
                running.counted(0);
                self.forget_unanswered(known.attributes.id.0);
                Errno::EXIST
            })?;
            return Ok((known, opened));
        }
        let parent = self.nodes.descriptor(directory)?;
        let mode = self.granted(directory, &parent, permissions)?;
        self.files.admit()?;
        self.nodes.admit(directory)?;
        let inode = self.admit_file()?;
        running.note(|| self.about_to_make(&parent, &place, true))?;
        let created = self.settling(directory, &parent, || {
            self.nodes.with_descriptors(|| {
                as_caller(caller, || rustix::fs::openat(&parent, &place.name, open, mode))
            })
        });
        self.trust.outdates(directory);
        let file = created.inspect_err(|_| self.charge_nothing(running))?;
        let seen = stat(&file).and_then(|seen| Ok((self.known(&seen, file.as_fd(), c"")?, seen)));
        let (known, seen) = match seen {
            Ok(seen) => seen,
            Err(errno) => {
                drop(file);
                return Err(self.take_back(running, &parent, &place, AtFlags::empty(), errno, || {
                    keep(inode);
                    self.charge_at(running.slot(), &parent, &place.name);
                }));
            }
        };
        keep(inode);
        let NodeId(id) = known.attributes.id;
        self.charge_created(running.slot(), id, &seen);
        self.nodes.remember(id, place, None);
        self.lacks_capability(id);
        running.counted(id);
        let opened =
            self.opened(OpenFile { id, flags: passed_on, fd: file }, Wanted::Passing(()), running.number());
        Ok((known, opened))
    }

    pub(crate) fn link(&self, running: &mut Running, NodeId(id): NodeId, name: Name<'_>) -> Result<Known> {
        self.writable()?;
        let place = place(name)?;
        if running.is_done() {
            let found = self.find_made(running, place, Admission::IfRoom);
            return found.inspect_err(|_| self.trust.outdates(id));
        }
        let directory = place.directory;
        let (file, parent) = (self.nodes.descriptor(id)?, self.nodes.descriptor(directory)?);
        let inode = self.admit_link()?;
        running.note(|| self.about_to_make(&parent, &place, false))?;
        let link = || self.descriptors.link(file.as_fd(), parent.as_fd(), &place.name);
        let linked = self.settling(directory, &parent, link);
        self.trust.outdates(directory);
        linked.inspect_err(|_| self.charge_nothing(running))?;
        let slot = running.slot();
        let charge = || {
            keep(inode);
            self.charge_name(slot);
        };
        match self.find(running, place.clone(), Admission::IfRoom) {
            Ok((known, _seen)) => {
                charge();
                Ok(known)
            }
            Err(errno) => {
                let errno = self.take_back(running, &parent, &place, AtFlags::empty(), errno, charge);
                self.trust.outdates(id);
                Err(errno)
            }
        }
    }

    /// `kind`: REMOVEDIR for a directory.
    pub(crate) fn remove(
        &self,
        running: &mut Running,
        name: Name<'_>,
        kind: AtFlags,
        uid: u32,
    ) -> Result<()> {
        self.writable()?;
        if running.is_done() {
            return Ok(());
        }
        let place = place(name)?;
        let directory = place.directory;
        let parent = self.nodes.descriptor(directory)?;
        let found = self.found_at(&parent, &place)?;
        self.admit_loss(found.as_ref(), uid)?;
        running.note(|| {
            let removed_by = found.as_ref().filter(|found| found.has_one_name()).map(|_| uid);
            let takes = found.as_ref().map_or(0, Found::takes);
            let found = found.as_ref().map(|found| found.id);
            Ok::<_, Errno>(Effect::Remove { at: place.clone(), found, removed_by, takes })
        })?;
        self.keep_before_loss(found.as_ref(), &place);
        let moves_names = self.nodes.moves_names();
        let removed = self.settling(directory, &parent, || rustix::fs::unlinkat(&parent, &place.name, kind));
        self.trust.outdates(directory);
        if let Err(errno) = removed {
            drop(moves_names);
            self.after_failure(running, found.as_ref());
            return Err(errno);
        }
        let lost = found.map(|found| self.lost(running, found, uid, &place));
        drop(moves_names);
        lost.into_iter().for_each(|lost| self.after_loss(lost));
        Ok(())
    }

    pub(crate) fn rename(
        &self,
        running: &mut Running,
        from: Name<'_>,
        to: Name<'_>,
        flags: RenameFlags,
        uid: u32,
    ) -> Result<()> {
        self.writable()?;
        if running.is_done() {
            return Ok(());
        }
        // A whiteout is a device node.
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(Errno::INVAL);
        }
        let (from, to) = (place(from)?, place(to)?);
        let (from_directory, to_directory) = (from.directory, to.directory);
        let (from_parent, to_parent) =
            (self.nodes.descriptor(from_directory)?, self.nodes.descriptor(to_directory)?);
        let moving = self.node_at(&from_parent, &from)?;
        let in_the_way = self.found_at(&to_parent, &to)?;
        if in_the_way.is_none() {
            self.admit_name()?;
        } else if !flags.contains(RenameFlags::EXCHANGE) {
            self.admit_loss(in_the_way.as_ref(), uid)?;
        }
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let in_the_way_id = in_the_way.as_ref().map(|found| found.id);
        running.note(|| {
            let removed_by = in_the_way.as_ref().filter(|found| found.has_one_name()).map(|_| uid);
            let takes = in_the_way.as_ref().map_or(0, Found::takes);
            let (from, to, in_the_way) = (from.clone(), to.clone(), in_the_way_id);
            Ok::<_, Errno>(Effect::Rename { from, moving, to, in_the_way, exchange, removed_by, takes })
        })?;
        if !exchange {
            self.keep_before_loss(in_the_way.as_ref(), &to);
        }
        let moves_names = self.nodes.moves_names();
        let rename = || rustix::fs::renameat_with(&from_parent, &from.name, &to_parent, &to.name, flags);
        let renamed = self.settling(from_directory, &from_parent, || match from_directory == to_directory {
            true => rename(),
            false => self.settling(to_directory, &to_parent, rename),
        });
        let others = [moving, in_the_way_id.filter(|_| exchange)];
        let outdated = [Some(from_directory), Some(to_directory)].into_iter().chain(others).flatten();
        outdated.for_each(|id| self.trust.outdates(id));
        if let Err(errno) = renamed {
            drop(moves_names);
            self.after_failure(running, in_the_way.as_ref());
            return Err(errno);
        }
        if moving.is_some() && moving == in_the_way_id {
            // Two names of one file: rename(2) does nothing.
            return Ok(());
        }
        let (mut unused, mut lost) = (Unused::default(), None);
        match in_the_way {
            Some(other) if exchange => unused.extend(self.nodes.moved(other.id, &to, from.clone())),
            Some(replaced) => lost = Some(self.lost(running, replaced, uid, &to)),
            None => {}
        }
        if let Some(moved) = moving {
            unused.extend(self.nodes.moved(moved, &from, to));
        }
        drop(moves_names);
        lost.into_iter().for_each(|lost| self.after_loss(lost));
        self.nodes.close(unused);
        Ok(())
    }

    pub(crate) fn read_link(&self, NodeId(id): NodeId) -> Result<Vec<u8>> {
        let fd = self.nodes.descriptor(id)?;
        rustix::fs::readlinkat(&*fd, c"", Vec::new()).map(CString::into_bytes)
    }

    /// `kind`: REMOVEDIR for a directory.
    fn create_name(
        &self,
        running: &mut Running,
        name: Name<'_>,
        kind: AtFlags,
        create: impl Fn(&OwnedFd, &CString) -> Result<()>,
    ) -> Result<Known> {
        self.writable()?;
        let place = place(name)?;
        let directory = place.directory;
        if running.is_done() {
            return self.find_made(running, place, Admission::Admitted);
        }
        let parent = self.nodes.descriptor(directory)?;
        self.nodes.admit(directory)?;
        let inode = self.admit_file()?;
        running.note(|| self.about_to_make(&parent, &place, true))?;
        let created = self.settling(directory, &parent, || create(&parent, &place.name));
        self.trust.outdates(directory);
        created.inspect_err(|_| self.charge_nothing(running))?;
        match self.find(running, place.clone(), Admission::Admitted) {
            Ok((known, seen)) => {
                keep(inode);
                self.charge_new(running.slot(), known.attributes.id.0, &seen);
                Ok(known)
            }
            Err(errno) => Err(self.take_back(running, &parent, &place, kind, errno, || {
                keep(inode);
                self.charge_at(running.slot(), &parent, &place.name);
            })),
        }
    }

    /// Removes a name that was made and cannot be answered, because of `errno`; the error to answer with. The
    /// kernel would take it for missing without end. It holds the directory's lock until the answer, so nothing
    /// has used the name yet. If the name stays, `charge` charges it, and the answer says that it exists: then the
    /// kernel asks again (fs/fuse/dir.c, `create_new_entry` and `fuse_atomic_open`).
    fn take_back(
        &self,
        running: &Running,
        parent: &OwnedFd,
        place: &Place,
        kind: AtFlags,
        errno: Errno,
        charge: impl FnOnce(),
    ) -> Errno {
        if !self.trust.knows_all_changes() {
            // Another program may have put it there. The kernel takes it for missing for a second.
            charge();
            return errno;
        }
        let remove = || rustix::fs::unlinkat(parent, &place.name, kind);
        match self.settling(place.directory, parent, remove) {
            Ok(()) => {
                self.charge_nothing(running);
                errno
            }
            Err(_) => {
                charge();
                Errno::EXIST
            }
        }
    }

    /// Finds a name that an earlier daemon has made for this request. If that fails, the kernel learns that it
    /// exists, as by [`Self::take_back`].
    fn find_made(&self, running: &mut Running, place: Place, admission: Admission) -> Result<Known> {
        self.trust.outdates(place.directory);
        let found = self.find(running, place, admission);
        found.map(|(known, _seen)| known).map_err(|_| Errno::EXIST)
    }

    /// Applies the umask, unless a default ACL defines the permissions of new files (acl(5)): the
    /// backing file system applies that.
    fn granted(&self, directory: u64, parent: &OwnedFd, permissions: Permissions) -> Result<Mode> {
        let Permissions { mode, umask } = permissions;
        if mode & umask & 0o777 == 0 {
            return Ok(mode_bits(mode));
        }
        if self.nodes.lacks_default_acl(directory) {
            return Ok(mode_bits(mode & !umask));
        }
        match self.descriptors.xattrs(parent.as_fd()).size(c"system.posix_acl_default") {
            Ok(_) => Ok(mode_bits(mode)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => {
                self.nodes.set_lacks_default_acl(directory, self.trust.knows_all_changes());
                Ok(mode_bits(mode & !umask))
            }
            Err(errno) => Err(errno),
        }
    }

    fn found_at(&self, parent: &OwnedFd, place: &Place) -> Result<Option<Found>> {
        let fd = match self.nodes.open_path(parent, &place.name) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let seen = stat(&fd)?;
        let id = self.origin.node_id(&seen)?;
        let held = self.nodes.contains(id).then(|| Arc::new(fd));
        Ok(Some(Found { id, seen, held }))
    }

    /// The note of a request that gives a file this name.
    ///
    /// The kernel asks for a new name only where it knows of no file, so there is none, unless other programs
    /// change the volume too.
    fn about_to_make(&self, parent: &OwnedFd, place: &Place, is_new: bool) -> Result<Effect> {
        let found = if self.trust.knows_all_changes() { None } else { self.node_at(parent, place)? };
        Ok(Effect::Make { at: place.clone(), found, is_new })
    }

    /// The node id of the file with this name.
    pub(super) fn node_at(&self, parent: &OwnedFd, place: &Place) -> Result<Option<u64>> {
        let wanted = StatxFlags::INO;
        match rustix::fs::statx(parent, &place.name, AtFlags::SYMLINK_NOFOLLOW, wanted) {
            Ok(seen) => self.origin.node_id(&seen).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Called before a file loses the name by which a successor would find it: if it may still be
    /// used, the keeper gets a descriptor.
    fn keep_before_loss(&self, found: Option<&Found>, place: &Place) {
        if self.table.is_none() {
            return;
        }
        let Some(found @ Found { id, held: Some(held), .. }) = found else { return };
        // The kernel opens a FIFO itself (fs/pipe.c), without a request.
        let is_seen_when_opened = !matches!(found.kind(), BackingType::Directory | BackingType::Fifo);
        let may_be_used = !is_seen_when_opened || !found.has_one_name() || self.is_open(*id);
        if may_be_used && self.nodes.is_at(*id, place) {
            self.nodes.let_keeper_hold(*id, held);
        }
    }

    /// The file has kept its name.
    fn after_failure(&self, running: &Running, found: Option<&Found>) {
        self.charge_nothing(running);
        if let Some(found) = found {
            self.nodes.let_keeper_release(found.id);
        }
    }

    fn is_open(&self, id: u64) -> bool {
        self.files.has(id) || self.directories.has(id)
    }

    /// Called after an open: the file may have lost its name meanwhile.
    pub(super) fn keep_if_removed(&self, id: u64, node: &OwnedFd) {
        if self.nodes.lacks_keeper(id) {
            self.nodes.let_keeper_hold(id, node);
        }
    }

    /// Called before a file loses a name. If it is the last one and the kernel knows the file, its
    /// descriptor is kept until the kernel forgets it. `EMFILE` if `uid` has too many of these.
    fn admit_loss(&self, found: Option<&Found>, uid: u32) -> Result<()> {
        if !found.is_some_and(|found| found.held.is_some() && found.has_one_name()) {
            return Ok(());
        }
        match self.retrying(|| self.nodes.admit_nameless(uid)) {
            Err(Errno::NOSPC) => Err(Errno::MFILE),
            other => other,
        }
    }

    /// The file at `place` was removed by `uid`. The kernel serializes requests that remove names
    /// of one file.
    fn lost(&self, running: &Running, found: Found, uid: u32, place: &Place) -> Lost {
        let is_directory = found.is_directory();
        let takes = charge(&found.seen, 0);
        let Found { id, seen, held } = found;
        let links = match &held {
            Some(held) if !self.trust.knows_all_changes() => stat(held).map_or(0, |now| now.stx_nlink),
            _ => seen.stx_nlink.saturating_sub(1),
        };
        let names_left = !is_directory && links > 0;
        self.discharge(running.slot(), id, takes, Loss { names_left, is_known: held.is_some() });
        let unused = held.as_ref().map_or_else(Unused::default, |held| {
            self.nodes.removed(id, place, Removal { uid, held: Arc::clone(held), names_left })
        });
        Lost { id, held, gone_bytes: (!names_left).then_some(takes.bytes), unused }
    }

    /// What follows [`Self::lost`] and may wait for the keeper.
    fn after_loss(&self, lost: Lost) {
        let Lost { id, held, gone_bytes, unused } = lost;
        if let (Some(passing), Some(bytes)) = (&self.passing, gone_bytes) {
            passing.is_gone(id, bytes);
        }
        self.nodes.close(unused);
        // It was opened after it was looked at.
        if let Some(held) = held
            && self.table.is_some()
            && self.is_open(id)
        {
            self.keep_if_removed(id, &held);
        }
    }
}

/// ENOMEM is the one error of a lookup after which the kernel keeps a name that it knows: after any other, it
/// unmounts what is mounted there, in all mount namespaces (fs/fuse/dir.c, `fuse_dentry_revalidate`).
fn for_kernel(errno: Errno) -> Errno {
    match errno {
        Errno::MFILE | Errno::NFILE => Errno::NOMEM,
        other => other,
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

impl Found {
    fn kind(&self) -> BackingType {
        BackingType::from_raw_mode(self.seen.stx_mode.into())
    }

    fn is_directory(&self) -> bool {
        self.kind() == BackingType::Directory
    }

    fn takes(&self) -> u64 {
        charge(&self.seen, 0).bytes
    }

    /// Whether the file is gone when it loses a name.
    fn has_one_name(&self) -> bool {
        self.is_directory() || self.seen.stx_nlink <= 1
    }
}

/// A file that has lost a name.
struct Lost {
    id: u64,
    /// Set if the kernel knows it.
    held: Option<Arc<OwnedFd>>,
    /// What it took, if it has lost its last name.
    gone_bytes: Option<u64>,
    unused: Unused,
}

/// Creates as `caller`.
fn as_caller<T>(caller: Caller, create: impl FnOnce() -> Result<T>) -> Result<T> {
    credentials::as_caller(caller, KEPT_AS_CALLER, create).map_err(errno::from_nix)?
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use linux::fd_passing::PacketSocket;
    use rustix::net::SendFlags;
    use volume_fs::figures::{Counted, Limits};

    use super::*;
    use crate::quota::{Quota, Use};
    use crate::trust::Access;
    use crate::volume::testing::{CALLER, begin, create, with_descriptors, with_keeper};

    const ROUNDS: usize = 3000;

    /// Calls `change` again and again while another thread finds the node.
    fn finds_it_beside(volume: &Volume, id: NodeId, mut change: impl FnMut(usize)) {
        let (found, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let finds = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(volume.attributes(id, None).map(|seen| seen.id), Ok(id));
                    found.fetch_add(1, Ordering::Relaxed);
                }
            });
            let goes_on = |round| round < ROUNDS || found.load(Ordering::Relaxed) < ROUNDS;
            (0..).take_while(|round| goes_on(*round) && !finds.is_finished()).for_each(&mut change);
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn what_is_renamed_exchanged_or_below_a_directory_that_moves_is_always_found() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        // So few descriptors that every file is found by its name each time.
        let volume = with_descriptors(3, directory.path(), Access::default(), None);
        let at = |directory, name: &'static str| Name { directory, name: OsStr::new(name) };
        let permissions = Permissions { mode: 0o755, umask: 0 };
        let made = volume.make_directory(&mut begin(&volume), at(NodeId::ROOT, "a"), permissions, CALLER);
        let inner = made.unwrap().attributes.id;
        let (file, _) = create(&volume, "f").unwrap();
        let rename = |from, to, flags| volume.rename(&mut begin(&volume), from, to, flags, 0).unwrap();
        let there_and_back = |one, other, flags| {
            move |round: usize| match round % 2 {
                0 => rename(one, other, flags),
                _ => rename(other, one, flags),
            }
        };
        let plain = RenameFlags::empty();
        finds_it_beside(&volume, file, there_and_back(root("f"), root("g"), plain));
        let now = if directory.path().join("f").exists() { "f" } else { "g" };
        rename(root(now), at(inner, "f"), plain);
        finds_it_beside(&volume, file, there_and_back(root("a"), root("b"), plain));
        let now = if directory.path().join("a").exists() { "a" } else { "b" };
        create(&volume, "other").unwrap();
        finds_it_beside(&volume, file, there_and_back(root(now), root("other"), RenameFlags::EXCHANGE));
    }

    #[test]
    fn a_file_is_found_while_it_is_removed() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let volume = with_descriptors(64, directory.path(), Access::default(), None);
        let name = Name { directory: NodeId::ROOT, name: OsStr::new("f") };
        for _ in 0..ROUNDS {
            let (id, handle) = create(&volume, "f").unwrap();
            let both = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    assert_eq!(volume.attributes(id, None).map(|seen| seen.id), Ok(id));
                });
                both.wait();
                volume.remove(&mut begin(&volume), name, AtFlags::empty(), 0).unwrap();
            });
            volume.release_file(handle);
            volume.forget(id, 1);
        }
    }

    /// What is made in a directory that the daemon cannot find any more: `change` moves it away.
    fn made_and_lost(change: impl Fn(&Path)) -> (tempfile::TempDir, Result<Known>, Arc<Quota>) {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let quota = Arc::new(Quota::new(Limits { bytes: 1 << 20, inodes: 10 }, 4, None));
        quota.set_counted(Use { counted: Counted { bytes: 0, inodes: 1 }, unsettled: Vec::new() });
        // So few descriptors that a directory is found by its name each time.
        let volume = with_descriptors(3, directory.path(), Access::default(), Some(Arc::clone(&quota)));
        let permissions = Permissions { mode: 0o755, umask: 0 };
        let outer = volume.make_directory(&mut begin(&volume), root("outer"), permissions, CALLER).unwrap();
        let name = Name { directory: outer.attributes.id, name: OsStr::new("new") };
        let made = volume.create_name(&mut begin(&volume), name, AtFlags::REMOVEDIR, |parent, name| {
            rustix::fs::mkdirat(parent, name, Mode::RWXU)?;
            change(directory.path());
            Ok(())
        });
        (directory, made, quota)
    }

    #[test]
    fn a_name_that_cannot_be_answered_is_taken_back() {
        let moved = |root: &Path| std::fs::rename(root.join("outer"), root.join("moved")).unwrap();
        let (directory, made, quota) = made_and_lost(moved);
        assert_eq!(made.unwrap_err(), Errno::STALE);
        assert!(!directory.path().join("moved/new").exists());
        assert_eq!(quota.usage().used.inodes, 2, "of the root and of `outer`");
    }

    #[test]
    fn a_name_that_cannot_be_taken_back_exists() {
        let (directory, made, quota) = made_and_lost(|root| {
            std::fs::write(root.join("outer/new/inner"), "").unwrap();
            std::fs::rename(root.join("outer"), root.join("moved")).unwrap();
        });
        assert_eq!(made.unwrap_err(), Errno::EXIST);
        assert!(directory.path().join("moved/new").exists());
        assert_eq!(quota.usage().used.inodes, 3);
    }

    fn root(name: &str) -> Name<'_> {
        Name { directory: NodeId::ROOT, name: OsStr::new(name) }
    }

    /// Each of these changes makes the daemon ask the keeper to drop what it holds of `d`.
    #[test]
    fn files_are_found_while_the_daemon_waits_for_a_keeper_that_stands_still() {
        const LIMIT: Duration = Duration::from_secs(20);
        let rename = |volume: &Volume, from, to, flags| {
            volume.rename(&mut begin(volume), root(from), root(to), flags, 0)
        };
        let change = |which, volume: &Volume| match which {
            "moves" => rename(volume, "d", "new", RenameFlags::empty()),
            "replaces nothing" => rename(volume, "other", "d", RenameFlags::NOREPLACE),
            _ => volume.remove(&mut begin(volume), root("d"), AtFlags::REMOVEDIR, 0),
        };
        let cases = [
            ("moves", Ok(())),
            ("replaces nothing", Err(Errno::EXIST)),
            ("removes nothing", Err(Errno::NOTEMPTY)),
        ];
        for (which, result) in cases {
            let directory = tempfile::tempdir_in("/var/tmp").unwrap();
            for path in ["d/f", "other"] {
                std::fs::create_dir_all(directory.path().join(path)).unwrap();
            }
            let (keeper, daemons) = PacketSocket::pair().unwrap();
            let daemons = OwnedFd::from(daemons);
            let volume = with_keeper(directory.path(), daemons.try_clone().unwrap(), LIMIT);
            let found = volume.look_up(&mut begin(&volume), root("d"));
            let Ok(LookedUp::Found(Known { attributes, .. })) = found else { panic!("{found:?}") };
            let NodeId(id) = attributes.id;
            volume.nodes.let_keeper_hold(id, &volume.nodes.descriptor(id).unwrap());
            while rustix::net::send(&daemons, b"full", SendFlags::DONTWAIT).is_ok() {}
            let begun = Instant::now();
            std::thread::scope(|scope| {
                let changes = scope.spawn(|| change(which, &volume));
                while volume.nodes.is_kept(id) && !changes.is_finished() {
                    std::thread::yield_now();
                }
                // It is not in the table, so the daemon also looks when no name moves.
                assert_eq!(volume.nodes.descriptor(u64::MAX).unwrap_err(), Errno::STALE);
                let waited = begun.elapsed();
                drop(keeper);
                assert_eq!(changes.join().unwrap(), result);
                assert!(waited < LIMIT, "{which}: {waited:?}");
            });
            assert!(!volume.nodes.is_kept(id), "{which}: the daemon has asked the keeper");
        }
    }
}
