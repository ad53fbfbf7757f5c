//! What is held: the descriptors of all volumes. Its only I/O is to close them, and to leave copies with
//! the service manager.
//!
//! Invariant: a volume has an entry exactly as long as something of it is held or its daemon is
//! connected.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use linux::fuse_backing::Registrar;
use nix::errno::Errno;

use crate::closer::Closer;
use crate::descriptors;
use crate::packets;
use crate::store::{Name, Store};
use crate::wire::{Counts, Entry, Refusal, Role, Roles, VolumeKey};

/// Removed files of one volume.
pub(crate) const MOST_REMOVED: usize = 65_536;
/// Backing files of one volume. Each keeps an inode and an open file in the kernel's memory.
const MOST_BACKINGS: u32 = 16_384;
/// Descriptors that removed files never take: a new volume, and a new daemon, always find some.
const LARGEST_RESERVE: u64 = 4096;

#[derive(Debug)]
pub(crate) struct Held {
    volumes: BTreeMap<VolumeKey, Volume>,
    totals: Totals,
    /// Descriptors that may be open for volumes.
    most_open: u64,
    closer: Closer,
    store: Option<Store>,
    /// `None`: no file passes through.
    registrar: Option<Registrar>,
}

/// Of all volumes.
#[derive(Debug, Default, Clone, Copy)]
struct Totals {
    /// With a role.
    descriptors: usize,
    removed: usize,
    daemons: usize,
}

#[derive(Debug, Default)]
struct Volume {
    roles: [Option<OwnedFd>; Role::ALL.len()],
    removed: BTreeMap<u64, OwnedFd>,
    /// The socket of its daemon, as the server numbers it.
    daemon: Option<u64>,
    /// How many backing files its connection has, as far as this process has registered them.
    backings: Arc<AtomicU32>,
}

impl Volume {
    fn role(&mut self, role: Role) -> &mut Option<OwnedFd> {
        &mut self.roles[role as usize - 1]
    }

    fn descriptors(&self) -> usize {
        self.roles.iter().flatten().count()
    }

    fn is_unused(&self) -> bool {
        self.descriptors() == 0 && self.removed.is_empty() && self.daemon.is_none()
    }
}

/// Why a file was not registered. `cause`: the kernel's reason, if it was asked.
#[derive(Debug)]
pub(crate) struct NotRegistered {
    pub(crate) refusal: Refusal,
    pub(crate) cause: Option<Errno>,
}

impl From<Refusal> for NotRegistered {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, cause: None }
    }
}

/// What [`Held::forget_volume`] closed, and the socket that is still to be closed.
#[derive(Debug)]
pub(crate) struct Forgotten {
    pub(crate) closed: usize,
    pub(crate) daemon: Option<u64>,
}

impl Held {
    pub(crate) fn new(most_open: u64, closer: Closer) -> Self {
        let (volumes, totals) = (BTreeMap::new(), Totals::default());
        Self { volumes, totals, most_open, closer, store: None, registrar: None }
    }

    /// From here on backing files are registered, by the calling thread.
    pub(crate) fn registered_by(self, registrar: Option<Registrar>) -> Self {
        Self { registrar, ..self }
    }

    /// The calling thread has its own credentials again.
    pub(crate) fn end_registrations(&mut self) {
        self.registrar = None;
    }

    /// From here on the service manager has a copy of everything.
    pub(crate) fn stored_in(self, store: Option<Store>) -> Self {
        Self { store, ..self }
    }

    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Spare daemons end with this process, so the next one has no use for pidfds.
    fn store_of(&self, role: Role) -> Option<&Store> {
        self.store.as_ref().filter(|_| role != Role::Daemon)
    }

    /// Holds what an earlier keeper has stored. The service manager drops what is refused.
    pub(crate) fn take_over(&mut self, name: Name, fd: OwnedFd) -> Result<(), Refusal> {
        let taken = match name {
            Name::Role(volume, role) => descriptors::check(role, fd.as_fd()).map(|()| {
                self.hold(volume, role, fd);
            }),
            Name::Removed(volume, node) => {
                let directory = self.get(volume, Role::Directory);
                let checked = directory
                    .ok_or(Refusal::NotHeld)
                    .and_then(|directory| descriptors::check_removed(fd.as_fd(), Some(directory)));
                checked.and_then(|()| self.hold_removed(volume, node, fd))
            }
        };
        if let (Err(_), Some(store)) = (&taken, &self.store) {
            store.remove(name);
        }
        taken
    }

    pub(crate) fn closer(&self) -> &Closer {
        &self.closer
    }

    /// Closes a descriptor that is not held, in the background.
    pub(crate) fn close(&self, fd: OwnedFd) {
        self.closer.close(fd);
    }

    /// Returns whether it replaced another descriptor, which is closed.
    pub(crate) fn put(&mut self, volume: VolumeKey, role: Role, fd: OwnedFd) -> bool {
        if let Some(store) = self.store_of(role) {
            let name = Name::Role(volume, role);
            if self.get(volume, role).is_some() {
                store.remove(name);
            }
            store.add(name, fd.as_fd());
        }
        self.hold(volume, role, fd)
    }

    fn hold(&mut self, volume: VolumeKey, role: Role, fd: OwnedFd) -> bool {
        let replaced = self.volumes.entry(volume).or_default().role(role).replace(fd);
        self.totals.descriptors += usize::from(replaced.is_none());
        self.close_role(role, replaced)
    }

    pub(crate) fn get(&self, volume: VolumeKey, role: Role) -> Option<BorrowedFd<'_>> {
        self.volumes.get(&volume)?.roles[role as usize - 1].as_ref().map(AsFd::as_fd)
    }

    /// Closes it. Returns whether there was one.
    pub(crate) fn forget(&mut self, volume: VolumeKey, role: Role) -> bool {
        let forgotten = self.volumes.get_mut(&volume).and_then(|found| found.role(role).take());
        if let (Some(_), Some(store)) = (&forgotten, self.store_of(role)) {
            store.remove(Name::Role(volume, role));
        }
        self.totals.descriptors -= usize::from(forgotten.is_some());
        self.prune(volume);
        self.close_role(role, forgotten)
    }

    pub(crate) fn forget_volume(&mut self, volume: VolumeKey) -> Forgotten {
        let found = self.volumes.remove(&volume).unwrap_or_default();
        let (descriptors, removed) = (found.descriptors(), found.removed.len());
        self.totals.descriptors -= descriptors;
        self.totals.removed -= removed;
        self.totals.daemons -= usize::from(found.daemon.is_some());
        if let Some(store) = &self.store {
            let roles = Role::ALL.into_iter().zip(&found.roles).filter(|(_, fd)| fd.is_some());
            roles.for_each(|(role, _)| store.remove(Name::Role(volume, role)));
            found.removed.keys().for_each(|node| store.remove(Name::Removed(volume, *node)));
        }
        for (role, fd) in Role::ALL.into_iter().zip(found.roles) {
            self.close_role(role, fd);
        }
        found.removed.into_values().for_each(|fd| self.closer.close(fd));
        Forgotten { closed: descriptors + removed, daemon: found.daemon }
    }

    /// Returns whether there is something to close.
    fn close_role(&self, role: Role, fd: Option<OwnedFd>) -> bool {
        let Some(fd) = fd else { return false };
        match role {
            // With the last descriptor go the backing files that are still registered, and perhaps their content
            // (fs/fuse/inode.c, `fuse_conn_put`).
            Role::Connection if packets::is_aborted(&fd) => self.closer.close(fd),
            // Before the reply: the driver relies on the end of the FUSE connection, and these wait
            // for no file system. As long as the connection has not ended, a mount holds
            // it too: this close ends no backing file.
            Role::Connection | Role::ParkedMount | Role::StateTable | Role::Assignment | Role::Daemon => {
                drop(fd);
            }
            Role::Directory | Role::UsageFile | Role::ControlListener | Role::MetricsListener => {
                self.closer.close(fd);
            }
        }
        true
    }

    /// Returns the number of the older socket.
    pub(crate) fn set_daemon(&mut self, volume: VolumeKey, number: u64) -> Option<u64> {
        let older = self.volumes.entry(volume).or_default().daemon.replace(number);
        self.totals.daemons += usize::from(older.is_none());
        older
    }

    /// Everything else of the volume stays: its next daemon needs it.
    pub(crate) fn unset_daemon(&mut self, volume: VolumeKey, number: u64) {
        if let Some(found) = self.volumes.get_mut(&volume)
            && found.daemon == Some(number)
        {
            found.daemon = None;
            self.totals.daemons -= 1;
            self.prune(volume);
        }
    }

    pub(crate) fn daemon(&self, volume: VolumeKey) -> Option<u64> {
        self.volumes.get(&volume)?.daemon
    }

    /// Closes an older one of this node, or this one if it is refused. The volume's daemon must be
    /// connected.
    pub(crate) fn put_removed(&mut self, volume: VolumeKey, node: u64, fd: OwnedFd) -> Result<(), Refusal> {
        let Some(store) = &self.store else { return self.hold_removed(volume, node, fd) };
        let name = Name::Removed(volume, node);
        if self.volumes.get(&volume).is_some_and(|found| found.removed.contains_key(&node)) {
            store.remove(name);
        }
        store.add(name, fd.as_fd());
        let held = self.hold_removed(volume, node, fd);
        if let (Err(_), Some(store)) = (&held, &self.store) {
            store.remove(name);
        }
        held
    }

    fn hold_removed(&mut self, volume: VolumeKey, node: u64, fd: OwnedFd) -> Result<(), Refusal> {
        let most = self.share();
        let found = self.volumes.get_mut(&volume).map(|found| &mut found.removed);
        match found.filter(|removed| removed.len() < most || removed.contains_key(&node)) {
            Some(removed) => {
                let replaced = removed.insert(node, fd);
                self.totals.removed += usize::from(replaced.is_none());
                replaced.into_iter().for_each(|fd| self.closer.close(fd));
                Ok(())
            }
            None => {
                self.closer.close(fd);
                Err(Refusal::Full)
            }
        }
    }

    pub(crate) fn drop_removed(&mut self, volume: VolumeKey, node: u64) {
        if let Some(dropped) = self.volumes.get_mut(&volume).and_then(|found| found.removed.remove(&node)) {
            self.totals.removed -= 1;
            if let Some(store) = &self.store {
                store.remove(Name::Removed(volume, node));
            }
            self.closer.close(dropped);
            self.prune(volume);
        }
    }

    /// Registers a backing file with the volume's connection; its number there.
    pub(crate) fn register_backing(
        &self,
        volume: VolumeKey,
        fd: BorrowedFd<'_>,
    ) -> Result<u32, NotRegistered> {
        let connection = self.get(volume, Role::Connection).ok_or(Refusal::NotHeld)?;
        let directory = self.get(volume, Role::Directory).ok_or(Refusal::NotHeld)?;
        descriptors::check_backing(fd, directory)?;
        let found = self.volumes.get(&volume).ok_or(Refusal::NotHeld)?;
        if found.backings.load(Ordering::Relaxed) >= MOST_BACKINGS {
            return Err(Refusal::Full.into());
        }
        let refused = |cause| NotRegistered { refusal: Refusal::NotPassthrough, cause };
        let registrar = self.registrar.as_ref().ok_or(refused(None))?;
        let number = registrar.register(connection, fd).map_err(|cause| refused(Some(cause)))?;
        found.backings.fetch_add(1, Ordering::Relaxed);
        Ok(number)
    }

    /// Ends registrations, in the background.
    pub(crate) fn unregister_backings(&self, volume: VolumeKey, numbers: &[u32]) -> Result<(), Refusal> {
        let found = self.volumes.get(&volume).ok_or(Refusal::NotHeld)?;
        let connection = self.get(volume, Role::Connection).ok_or(Refusal::NotHeld)?;
        let connection = connection.try_clone_to_owned().map_err(|_| Refusal::Full)?;
        self.closer.unregister(connection, numbers.to_vec(), Arc::clone(&found.backings));
        Ok(())
    }

    /// The volume's removed files, from the first node above `after`.
    pub(crate) fn removed_after(
        &self,
        volume: VolumeKey,
        after: Option<u64>,
    ) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        let begin = after.map_or(Bound::Unbounded, Bound::Excluded);
        let found = self.volumes.get(&volume).into_iter();
        found.flat_map(move |volume| {
            volume.removed.range((begin, Bound::Unbounded)).map(|(node, fd)| (*node, fd.as_fd()))
        })
    }

    /// All volumes, from the first one above `after`, with their roles of version 1.
    pub(crate) fn entries_after(&self, after: Option<VolumeKey>) -> impl Iterator<Item = Entry> {
        let begin = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.volumes.range((begin, Bound::Unbounded)).map(|(key, volume)| {
            let is_held = |role: &Role| role.version() == 1 && volume.roles[*role as usize - 1].is_some();
            Entry {
                volume: *key,
                roles: Role::ALL.into_iter().filter(is_held).collect::<Roles>(),
                has_daemon: volume.daemon.is_some(),
                removed: small(volume.removed.len()),
            }
        })
    }

    /// How many descriptors one volume's daemon may have open here: twice what is left. So one can take
    /// two thirds of all, and leaves room for others.
    pub(crate) fn share(&self) -> usize {
        MOST_REMOVED.min(self.room().saturating_mul(2))
    }

    /// How many removed files there is room for.
    pub(crate) fn room(&self) -> usize {
        let Totals { descriptors, removed, daemons } = self.totals;
        let reserve = (self.most_open / 4).min(LARGEST_RESERVE);
        let open = (descriptors + daemons + removed) as u64 + self.closer.waiting();
        usize::try_from(self.most_open.saturating_sub(reserve + open)).unwrap_or(usize::MAX)
    }

    /// Whether no descriptor is held, not even a removed file.
    pub(crate) fn is_empty(&self) -> bool {
        self.totals.descriptors + self.totals.removed == 0
    }

    pub(crate) fn counts(&self) -> Counts {
        let Totals { descriptors, removed, daemons } = self.totals;
        Counts {
            volumes: small(self.volumes.len()),
            descriptors: small(descriptors),
            removed: small(removed),
            room: small(self.room()),
            daemons: small(daemons),
        }
    }

    fn prune(&mut self, volume: VolumeKey) {
        if self.volumes.get(&volume).is_some_and(Volume::is_unused) {
            self.volumes.remove(&volume);
        }
    }
}

/// A count of descriptors, which are never 2^32.
pub(crate) fn small(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(digit: &str) -> VolumeKey {
        VolumeKey::parse(&digit.repeat(32)).unwrap()
    }

    fn held(most_open: u64) -> Held {
        Held::new(most_open, Closer::start().unwrap())
    }

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_volume_is_listed_as_long_as_something_is_held_or_its_daemon_is_connected() {
        let mut held = held(1024);
        let (a, b) = (key("a"), key("b"));
        assert!(!held.put(b, Role::Connection, fd()));
        assert!(held.put(b, Role::Connection, fd()));
        assert_eq!(held.set_daemon(a, 1), None);
        let entries: Vec<_> = held.entries_after(None).collect();
        let roles: Roles = [Role::Connection].into_iter().collect();
        assert_eq!(
            entries,
            [
                Entry { volume: a, roles: Roles::default(), has_daemon: true, removed: 0 },
                Entry { volume: b, roles, has_daemon: false, removed: 0 },
            ]
        );
        assert_eq!(held.entries_after(Some(a)).next().map(|entry| entry.volume), Some(b));
        held.unset_daemon(a, 1);
        assert!(held.forget(b, Role::Connection));
        assert!(!held.forget(b, Role::Connection));
        assert_eq!(held.entries_after(None).next(), None);
    }

    /// It may be the last one, with which backing files go.
    #[test]
    fn a_connection_that_has_ended_is_closed_in_the_background() {
        let name = linux::mount::FuseName { source: "hawser-test", subtype: "hawser" };
        let flags = linux::mount::MountFlags::default();
        let options = linux::mount::FuseMountOptions { flags, allow_other: true, default_permissions: true };
        for (is_mounted, in_background) in [(true, 0), (false, 1)] {
            let mut held = held(1024);
            let device = linux::mount::open_fuse_device().unwrap();
            let mount = linux::mount::new_fuse(&device, name, options).unwrap();
            held.put(key("a"), Role::Connection, device);
            let mount = Some(mount).filter(|_| is_mounted);
            held.forget_volume(key("a"));
            assert_eq!(held.closer().queued(), in_background, "mounted: {is_mounted}");
            drop(mount);
        }
    }

    #[test]
    fn the_end_of_an_older_daemon_does_not_end_the_newer() {
        let mut held = held(1024);
        assert_eq!(held.set_daemon(key("a"), 1), None);
        assert_eq!(held.set_daemon(key("a"), 2), Some(1));
        held.unset_daemon(key("a"), 1);
        assert_eq!(held.daemon(key("a")), Some(2));
        assert_eq!(held.counts().daemons, 1);
    }

    #[test]
    fn counts_are_what_is_held() {
        let mut held = held(1024);
        let (a, b) = (key("a"), key("b"));
        held.set_daemon(a, 1);
        for node in [5, 6, 6] {
            held.put_removed(a, node, fd()).unwrap();
        }
        held.put(a, Role::Directory, fd());
        held.put(b, Role::UsageFile, fd());
        // The room follows when the closer's thread has closed what was replaced.
        let counted = |held: &Held| Counts { room: 0, ..held.counts() };
        assert_eq!(counted(&held), Counts { volumes: 2, descriptors: 2, removed: 2, room: 0, daemons: 1 });
        let nodes =
            |held: &Held, after| held.removed_after(a, after).map(|(node, _)| node).collect::<Vec<_>>();
        assert_eq!(nodes(&held, None), [5, 6]);
        assert_eq!(nodes(&held, Some(5)), [6]);
        held.drop_removed(a, 5);
        held.drop_removed(a, 5);
        assert_eq!(nodes(&held, None), [6]);
        let forgotten = held.forget_volume(a);
        assert_eq!((forgotten.closed, forgotten.daemon), (2, Some(1)));
        assert_eq!(held.forget_volume(a).closed, 0);
        assert!(!held.is_empty());
        assert!(held.forget(b, Role::UsageFile));
        assert!(held.is_empty());
        assert_eq!(counted(&held), Counts { volumes: 0, descriptors: 0, removed: 0, room: 0, daemons: 0 });
    }

    #[test]
    fn one_volume_takes_two_thirds_of_the_room_and_a_reserve_stays() {
        let mut held = held(512);
        let all = held.room();
        assert_eq!(all, 512 - 512 / 4);
        for volume in ["a", "b"] {
            held.set_daemon(key(volume), 1);
        }
        let mut fill =
            |volume| (0..).take_while(|node| held.put_removed(key(volume), *node, fd()).is_ok()).count();
        let (first, second) = (fill("a"), fill("b"));
        assert!(first.abs_diff(all * 2 / 3) <= 2, "{first} of {all}");
        assert!(second.abs_diff(all * 2 / 9) <= 3, "{second} of {all}");
        // A replacement needs no room.
        held.put_removed(key("a"), 0, fd()).unwrap();
    }
}
