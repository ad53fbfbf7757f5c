//! The leases of one network: the files, and the index for lookups.
//!
//! Invariants: leases are made and removed only while [`LockedStore`] is held; the reference holds
//! the same lock. The index is used only if the directory is as the index knows it and the lease
//! files agree. Otherwise it is built anew from them; if that fails too, the files are read one by
//! one. So the index may be lost, torn or wrong at any time.
//!
//! The index is in `<data dir>/.hawser/<network>/`, since the reference reads every file beside the
//! leases. Like the reference's own `lock`, it stays, small, after the last lease: rmdir(2) takes
//! milliseconds. A directory's stamp shows every added or removed name. It does not show a lease
//! overwritten in place, which neither implementation does. DEL and CHECK know their addresses, and
//! read those files too.

use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::files::{LeaseFiles, Place};
use crate::host::Host;
use crate::index::format::{self, Entry, Origin, Stamp};
use crate::index::{Contents, Index, Unusable};
use crate::lease::{Holder, Owner};
use crate::range::Segment;
use crate::{Error, reclaim};

/// Most builds of the index in one call; then the call does without. A second build is needed if a
/// process without the lock changes the leases meanwhile.
const BUILDS: u32 = 2;

/// The directory of one network's leases.
#[derive(Debug)]
pub struct LeaseStore {
    files: LeaseFiles,
    network: String,
    index_path: PathBuf,
    host: Host,
}

impl LeaseStore {
    /// Opens `<data_dir>/<network>`, and creates it if it is missing. `network` is a validated
    /// name.
    pub fn create(data_dir: &Path, network: &str) -> Result<Self, Error> {
        let files = LeaseFiles::create(data_dir.join(network), own_dir(data_dir, network))?;
        Ok(Self::of(files, data_dir, network))
    }

    /// `None` if there is no such directory, and so no lease.
    pub fn find(data_dir: &Path, network: &str) -> Result<Option<Self>, Error> {
        let files = LeaseFiles::open(data_dir.join(network), own_dir(data_dir, network))?;
        Ok(files.map(|files| Self::of(files, data_dir, network)))
    }

    fn of(files: LeaseFiles, data_dir: &Path, network: &str) -> Self {
        let index_path = own_dir(data_dir, network).join("index");
        Self { files, network: network.to_owned(), index_path, host: Host::default() }
    }

    /// Waits for the lock, which the reference uses too.
    pub fn lock(&self) -> Result<LockedStore<'_>, Error> {
        Ok(LockedStore {
            _lock: self.files.lock()?,
            store: self,
            index: None,
            boot: None,
            machine: None,
            made: Vec::new(),
            seen: Stamp::default(),
            to_seal: false,
            builds: 0,
        })
    }

    /// Whether one of `segments` has a free address, without waiting for the lock. `None`: unknown.
    pub(crate) fn glance(&self, segments: &[Segment<'_>]) -> Result<Option<bool>, Error> {
        let stamp = self.files.stamp()?;
        let index = Index::open(&self.index_path).filter(|index| index.describes(stamp, self.host.boot()));
        let Some(index) = index else { return Ok(None) };
        let Ok(free) = first_free(&index, segments) else { return Ok(None) };
        // Every process changes the directory before the index.
        if self.files.stamp()? != stamp {
            return Ok(None);
        }
        Ok(if free.is_some() { Some(true) } else { (index.earlier() == 0).then_some(false) })
    }

    /// Whether there is no lease of `ip`, without waiting for the lock.
    pub(crate) fn is_free(&self, ip: IpAddr) -> Result<bool, Error> {
        Ok(self.files.read(ip)?.is_none_or(|found| found.holder == Holder::Empty))
    }

    /// The round-robin position in range set `set`.
    pub(crate) fn place(&self, set: usize) -> Place {
        self.files.place(set)
    }
}

/// Addresses that STATUS checks before it takes the lock.
const LOOKS: usize = 16;

/// Whether one of `segments`, of one range set's round, has a free address or one that can be
/// reclaimed. Waits for the lock only if nearly all are taken.
pub(crate) fn has_room(store: &LeaseStore, segments: &[Segment<'_>]) -> Result<bool, Error> {
    for ip in segments.iter().flat_map(Segment::addresses).take(LOOKS) {
        if store.is_free(ip)? {
            return Ok(true);
        }
    }
    match store.glance(segments)? {
        Some(answer) => Ok(answer),
        None => store.lock()?.has_room(segments),
    }
}

/// Our directory beside the reference's; no network's name begins with a dot.
fn own_dir(data_dir: &Path, network: &str) -> PathBuf {
    data_dir.join(".hawser").join(network)
}

/// The addresses that an owner holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Leases of the attachment.
    pub attachment: Vec<IpAddr>,
    /// Leases of the oldest format, held by all interfaces of the container.
    pub container: Vec<IpAddr>,
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.attachment.is_empty() && self.container.is_empty()
    }

    pub fn contains(&self, ip: IpAddr) -> bool {
        self.all().any(|held| held == ip)
    }

    pub fn all(&self) -> impl Iterator<Item = IpAddr> {
        self.attachment.iter().chain(&self.container).copied()
    }

    /// Records a lease; `false` if another owner holds it.
    fn note(&mut self, ip: IpAddr, holder: &Holder, owner: &Owner) -> bool {
        let list = match holder {
            Holder::Attachment(found) if found == owner => &mut self.attachment,
            Holder::Container(id) if *id == owner.container_id => &mut self.container,
            _ => return false,
        };
        list.push(ip);
        true
    }
}

/// The leases while this process holds the lock. Changes take effect at once;
/// [`finish`](Self::finish) updates the index.
#[derive(Debug)]
pub struct LockedStore<'a> {
    _lock: File,
    store: &'a LeaseStore,
    /// Valid for a directory with the stamp `seen`.
    index: Option<Index>,
    /// [`Host::boot`] and [`Host::machine`], read on demand: DEL and CHECK do not need them.
    boot: Option<u64>,
    machine: Option<u64>,
    /// Leases of this call, which a new index must record as ours.
    made: Vec<Entry>,
    seen: Stamp,
    /// Whether `index` was built or changed.
    to_seal: bool,
    builds: u32,
}

impl LockedStore<'_> {
    /// The addresses that `owner` holds.
    pub fn held_by(&mut self, owner: &Owner) -> Result<Held, Error> {
        match self.ask(|index, files| look_up(index, files, owner))? {
            Some(held) => Ok(held),
            None => self.search(owner),
        }
    }

    /// Reserves the first free address of `segments` for `owner`, and records it in `place`. `None`
    /// if all are taken.
    pub(crate) fn reserve_first(
        &mut self,
        segments: &[Segment<'_>],
        place: &mut Place,
        owner: &Owner,
    ) -> Result<Option<IpAddr>, Error> {
        let lease = self.store.files.new_lease(&owner.content())?;
        while let Some(found) = self.ask(|index, _| Ok(first_free(index, segments)))? {
            match found {
                Some(ip) => {
                    if let Some(life) = self.change(|files| files.publish(&lease, ip))? {
                        return self.reserved(ip, life, place, owner).map(Some);
                    }
                    // Taken, but not in the index.
                    self.invalidate_index();
                }
                None if self.builds > 0 => return Ok(None),
                // Only the files can show that the set is full.
                None => self.invalidate_index(),
            }
        }
        for ip in segments.iter().flat_map(Segment::addresses) {
            if let Some(life) = self.change(|files| files.publish(&lease, ip))? {
                return self.reserved(ip, life, place, owner).map(Some);
            }
        }
        Ok(None)
    }

    /// Removes the leases of `owner` and returns them. Removes leases of the oldest format only if
    /// there is no other, or with `every_format`. `expected` are addresses that it should hold:
    /// their files are read in any case.
    pub fn release(&mut self, owner: &Owner, every_format: bool, expected: &[IpAddr]) -> Result<Held, Error> {
        let mut held = self.held_by(owner)?;
        for ip in expected {
            let found = if held.contains(*ip) { None } else { self.store.files.read(*ip)? };
            if found.is_some_and(|found| held.note(*ip, &found.holder, owner)) {
                self.invalidate_index();
            }
        }
        if !held.attachment.is_empty() && !every_format {
            held.container.clear();
        }
        for ip in held.all() {
            self.remove(ip, owner)?;
        }
        Ok(held)
    }

    /// Removes the lease of `ip`, which `owner` holds; a missing one is a success.
    pub fn remove(&mut self, ip: IpAddr, owner: &Owner) -> Result<(), Error> {
        self.remove_of(ip, Some(&owner.container_id))
    }

    /// Removes the leases that `is_stale` selects, and incomplete ones from a crash.
    pub(crate) fn remove_stale(&mut self, is_stale: impl Fn(&Holder) -> bool) -> Result<(), Error> {
        let mut stale = Vec::new();
        self.store.files.scan(|ip, found| {
            if found.holder == Holder::Empty || is_stale(&found.holder) {
                stale.push((ip, found.holder));
            }
        })?;
        // Opened before any change, so that it can be updated.
        self.ask(|_, _| Ok(Ok(())))?;
        stale.into_iter().try_for_each(|(ip, holder)| self.remove_of(ip, holder.container_id()))
    }

    /// Removes provably dead leases of `segments` (`reclaim`), and returns their number.
    pub(crate) fn reclaim(&mut self, segments: &[Segment<'_>]) -> Result<usize, Error> {
        let dead = self.dead(segments)?;
        for (ip, holder) in &dead {
            self.remove_of(*ip, holder.container_id())?;
        }
        Ok(dead.len())
    }

    fn has_room(&mut self, segments: &[Segment<'_>]) -> Result<bool, Error> {
        let free = match self.ask(|index, _| Ok(first_free(index, segments)))? {
            Some(free) => free,
            None => {
                let mut addresses = segments.iter().flat_map(Segment::addresses);
                loop {
                    match addresses.next() {
                        None => break None,
                        Some(ip) if self.store.is_free(ip)? => break Some(ip),
                        Some(_) => {}
                    }
                }
            }
        };
        let room = free.is_some() || !self.dead(segments)?.is_empty();
        self.finish();
        Ok(room)
    }

    fn dead(&mut self, segments: &[Segment<'_>]) -> Result<Vec<(IpAddr, Holder)>, Error> {
        let mut dead = Vec::new();
        let evidence = Index::open(&self.store.index_path).filter(|index| index.earlier() > 0);
        let Some(evidence) = evidence else { return Ok(dead) };
        let now = self.origin();
        if evidence.origin() != now {
            return Ok(dead);
        }
        let known = evidence.of_known_origin();
        self.store.files.scan(|ip, found| {
            let Some(container_id) = found.holder.container_id() else { return };
            let is_earlier = origin_of(&known, ip, container_id, found.life).is_past(now);
            let is_wanted = segments.iter().any(|segment| segment.contains(ip));
            if is_wanted && is_earlier && !reclaim::may_live(&self.store.network, &found.holder) {
                dead.push((ip, found.holder));
            }
        })?;
        Ok(dead)
    }

    /// The round-robin position in range set `set`.
    pub(crate) fn place(&self, set: usize) -> Place {
        self.store.files.place(set)
    }

    /// The error of a lease that was skipped, if any.
    pub(crate) fn unread(&self) -> Option<Error> {
        self.store.files.unread()
    }

    /// Seals the index for the current directory. Without it, or after a failure, the next call
    /// builds the index anew.
    pub fn finish(&mut self) {
        let Some(mut index) = self.index.take_if(|_| self.to_seal) else { return };
        self.to_seal = false;
        // The next call may be able to read an unreadable lease.
        if self.unread().is_some() {
            return self.discard_index();
        }
        if index.leases() == 0 && index.is_large() {
            self.discard_index();
            return;
        }
        // A process without the lock has changed it: unknown to the index.
        if !self.store.files.stamp().is_ok_and(|stamp| stamp == self.seen) {
            return;
        }
        let stamp = self.store.files.set_stamp().ok().flatten();
        if stamp.is_none_or(|stamp| index.seal(stamp).is_err()) {
            self.discard_index();
        }
    }

    /// Completes a reservation: writes the position, and updates the index.
    fn reserved(&mut self, ip: IpAddr, life: u64, place: &mut Place, owner: &Owner) -> Result<IpAddr, Error> {
        let entry = Entry {
            container: format::digest(&owner.container_id),
            ifname: format::digest(&owner.ifname),
            address: format::number(ip),
            life,
            origin: self.origin(),
        };
        self.update(|index| index.insert(entry));
        if self.index.is_none() {
            // Best effort: a later call cannot know whose lease it is.
            self.made.push(entry);
            let _no_index = self.open_index();
        }
        let noted = if place.is_new() {
            self.change(|files| files.note_last(place, ip))
        } else {
            self.store.files.note_last(place, ip)
        };
        match noted {
            Ok(()) => Ok(ip),
            Err(cause) => Err(match self.remove(ip, owner) {
                Ok(()) => cause,
                Err(undo) => Error::Rollback { cause: Box::new(cause), rollback: vec![undo] },
            }),
        }
    }

    fn remove_of(&mut self, ip: IpAddr, container_id: Option<&str>) -> Result<(), Error> {
        self.change(|files| files.remove(ip))?;
        if let Some(id) = container_id {
            self.update(|index| index.remove(format::digest(id), format::number(ip)));
        }
        Ok(())
    }

    /// Queries the index; builds it anew if it is unusable or contradicts the files. `None`: the
    /// files must be read.
    fn ask<T>(
        &mut self,
        question: impl Fn(&Index, &LeaseFiles) -> Result<Result<T, Unusable>, Error>,
    ) -> Result<Option<T>, Error> {
        loop {
            if self.index.is_none() && !self.open_index()? {
                return Ok(None);
            }
            let Some(index) = &self.index else { return Ok(None) };
            match question(index, &self.store.files)? {
                Ok(answer) => return Ok(Some(answer)),
                Err(Unusable) => self.invalidate_index(),
            }
        }
    }

    /// Opens or builds the index; `false` if that is impossible.
    fn open_index(&mut self) -> Result<bool, Error> {
        let (files, boot) = (&self.store.files, self.boot());
        let mut seen = files.stamp()?;
        let former = Index::open(&self.store.index_path);
        let trusted = self.builds == 0 && !self.to_seal;
        let index = match former {
            Some(index) if trusted && index.describes(seen, boot) => Some(index),
            _ if self.builds == BUILDS => None,
            former => {
                self.builds += 1;
                self.to_seal = true;
                let (contents, torn) = read_contents(files, &self.known(former.as_ref()))?;
                if !torn.is_empty() && files.stamp()? == seen {
                    // Removed: they could still be filled in place, which the stamp would not show.
                    torn.into_iter().try_for_each(|ip| files.remove(ip))?;
                    seen = files.stamp()?;
                }
                Index::build(&self.store.index_path, self.origin(), contents).ok()
            }
        };
        self.seen = seen;
        self.index = index;
        Ok(self.index.is_some())
    }

    /// Marks the index as wrong or unconfirmed.
    fn invalidate_index(&mut self) {
        self.index = None;
        self.to_seal = true;
    }

    /// Changes the directory. The index becomes invalid if another process has changed it, too.
    fn change<T>(&mut self, change: impl FnOnce(&LeaseFiles) -> Result<T, Error>) -> Result<T, Error> {
        let files = &self.store.files;
        if self.index.is_none() {
            return change(files);
        }
        let undisturbed = files.stamp()? == self.seen;
        let outcome = change(files);
        match files.stamp() {
            Ok(stamp) if undisturbed && outcome.is_ok() => self.seen = stamp,
            _ => self.invalidate_index(),
        }
        outcome
    }

    fn update(&mut self, update: impl FnOnce(&mut Index) -> Result<(), Unusable>) {
        let Some(index) = &mut self.index else { return };
        self.to_seal = true;
        if update(index).is_err() {
            self.invalidate_index();
        }
    }

    fn search(&self, owner: &Owner) -> Result<Held, Error> {
        let mut held = Held::default();
        self.store.files.scan(|ip, found| {
            held.note(ip, &found.holder, owner);
        })?;
        Ok(held)
    }

    fn boot(&mut self) -> u64 {
        *self.boot.get_or_insert_with(|| self.store.host.boot())
    }

    fn origin(&mut self) -> Origin {
        let machine = *self.machine.get_or_insert_with(|| self.store.host.machine());
        Origin { machine, boot: self.boot() }
    }

    /// Leases with a known origin, ordered by address.
    fn known(&self, former: Option<&Index>) -> Vec<Entry> {
        let mut known = former.map(Index::of_known_origin).unwrap_or_default();
        known.retain(|entry| !self.made.iter().any(|made| made.address == entry.address));
        known.extend(&self.made);
        known.sort_unstable_by_key(|entry| entry.address);
        known
    }

    /// Best effort: an index that stays does not describe the directory.
    fn discard_index(&self) {
        let _may_be_gone = std::fs::remove_file(&self.store.index_path);
    }
}

fn first_free(index: &Index, segments: &[Segment<'_>]) -> Result<Option<IpAddr>, Unusable> {
    for segment in segments {
        let free = index.first_free(format::number(segment.first), format::number(segment.last))?;
        if let Some(free) = free {
            return Ok(Some(format::address(free)));
        }
    }
    Ok(None)
}

/// `Unusable` if a file contradicts the index.
fn look_up(index: &Index, files: &LeaseFiles, owner: &Owner) -> Result<Result<Held, Unusable>, Error> {
    let Ok(entries) = index.entries_of(format::digest(&owner.container_id)) else { return Ok(Err(Unusable)) };
    let mut held = Held::default();
    let ifname = format::digest(&owner.ifname);
    for entry in entries.into_iter().filter(|entry| [0, ifname].contains(&entry.ifname)) {
        let ip = format::address(entry.address);
        let found = files.read(ip)?;
        if !found.is_some_and(|found| held.note(ip, &found.holder, owner)) {
            return Ok(Err(Unusable));
        }
    }
    Ok(Ok(held))
}

/// The origin of the lease file with this identity. `known` is ordered by address.
fn origin_of(known: &[Entry], ip: IpAddr, container_id: &str, life: u64) -> Origin {
    let address = format::number(ip);
    let Ok(at) = known.binary_search_by_key(&address, |entry| entry.address) else {
        return Origin::default();
    };
    let entry = known[at];
    let is_the_same = entry.life == life && entry.container == format::digest(container_id);
    if is_the_same { entry.origin } else { Origin::default() }
}

/// Reads every lease; those in `known` keep their origin. Also returns the addresses whose files a
/// crash left empty.
fn read_contents(files: &LeaseFiles, known: &[Entry]) -> Result<(Contents, Vec<IpAddr>), Error> {
    let mut contents = Contents { leases: Vec::with_capacity(known.len()), others: Vec::new() };
    let mut torn = Vec::new();
    files.scan(|ip, found| {
        let address = format::number(ip);
        let (container_id, ifname) = match &found.holder {
            Holder::Attachment(owner) => (owner.container_id.as_str(), format::digest(&owner.ifname)),
            Holder::Container(id) => (id.as_str(), 0),
            Holder::Other => return contents.others.push(address),
            Holder::Empty => return torn.push(ip),
        };
        let origin = origin_of(known, ip, container_id, found.life);
        let container = format::digest(container_id);
        contents.leases.push(Entry { container, ifname, address, life: found.life, origin });
    })?;
    Ok((contents, torn))
}

#[cfg(test)]
mod tests;
