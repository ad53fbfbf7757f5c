//! The daemon's count on the way of each request: a change is admitted before it is made, and its
//! file is charged after it.
//!
//! Invariant: in a volume without a [`Quota`], whose capacity another party enforces, each function
//! here admits at once, makes no system call and takes no lock.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use linux::fs_at::Xattrs;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Statx};
use rustix::io::Errno;

use super::{OpenFile, Running, Volume, WANTED};
use crate::charge::{self, BLOCK_BYTES, Charged, charge};
use crate::errno::Result;
use crate::nodes::stat;
use crate::quota::{Change, InodeReservation, Quota, Reservation};
use crate::state_table::requests::Slot;
use crate::xattrs::{self, Total};

/// The largest offset of a file (loff_t).
const MOST_BYTES: u64 = i64::MAX.unsigned_abs();

/// What happened to a file that lost a name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loss {
    pub(super) names_left: bool,
    /// The kernel knows the file: it may be open.
    pub(super) is_known: bool,
}

/// The file exists: its inode stays charged.
pub(super) fn keep(inode: Option<InodeReservation<'_>>) {
    if let Some(inode) = inode {
        inode.keep();
    }
}

impl Volume {
    /// Makes a change to a file, and updates its charge.
    pub(super) fn settling<T>(
        &self,
        id: u64,
        file: &OwnedFd,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let in_progress = match &self.quota {
            Some(quota) => Some(quota.begin_change(id, || self.measure_first(file))?),
            None => None,
        };
        let changed = change();
        self.settle(file, in_progress);
        changed
    }

    /// Updates the charge of a file after a change.
    pub(super) fn settle(&self, file: &OwnedFd, change: Option<Change<'_>>) {
        if let Some(change) = change {
            change.settle(|before| self.measure(file, before));
        }
    }

    /// As [`Self::settle`], after a change of attributes to `now`; `None` if that is not known. The
    /// kernel serializes requests that change one file's attributes.
    pub(super) fn settle_attributes(
        &self,
        file: &OwnedFd,
        xattrs: &Xattrs<'_>,
        now: Option<Total>,
        change: Option<Change<'_>>,
    ) {
        let Some(change) = change else { return };
        let blocks = || match now {
            Some(total) => Ok(self.attribute_blocks.most(total)),
            None => self.attribute_blocks_of(xattrs),
        };
        change.settle(|_before| measure_with(file, blocks));
    }

    /// Updates the charge of a file after its file system may have changed its blocks.
    pub(super) fn charge_again(&self, id: u64, file: &OwnedFd) {
        if let Some(quota) = &self.quota {
            quota.settle(id, |before| self.measure(file, before));
        }
    }

    /// Updates the charge of a file that an earlier daemon was changing, perhaps its attributes.
    pub(super) fn charge_after_kill(&self, id: u64) {
        if let Some(quota) = &self.quota
            && let Ok(file) = self.nodes.descriptor(id)
        {
            quota.settle(id, |_before| self.measure_all(&file));
        }
    }

    /// The kernel is about to forget a node. Its file was probably written back since the last
    /// measurement.
    pub(super) fn settle_before_forget(&self, id: u64) {
        if let Some(quota) = &self.quota
            && quota.is_unsettled(id)
            && let Ok(file) = self.nodes.descriptor(id)
        {
            quota.settle(id, |before| self.measure(&file, before));
        }
    }

    /// An open file was closed. Writeback may have added or freed a block.
    pub(super) fn closed(&self, file: &OpenFile) {
        if let Some(quota) = &self.quota {
            quota.settle(file.id, |before| self.measure(&file.fd, before));
            quota.closed(file.id);
        }
    }

    /// Reserves space for as much of `length` bytes at `offset` as fits, at least one. Returns this
    /// length.
    pub(super) fn make_room(
        &self,
        file: &OpenFile,
        offset: u64,
        length: u64,
    ) -> Result<(u64, Option<Change<'_>>)> {
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        let Some(quota) = &self.quota else { return Ok((length, None)) };
        let change = quota.begin_change(file.id, || self.measure_first(&file.fd))?;
        let before = change.before();
        let ahead = self.allocated_ahead(quota, file, before, offset)?;
        let written = charge::whole_blocks(end).saturating_sub(offset - offset % BLOCK_BYTES);
        let most = written.saturating_add(ahead);
        if let Ok(reserved) = quota.reserve_amply(most) {
            return Ok((length, Some(change.with(reserved))));
        }
        let before = self.with_attributes(file, before)?;
        match quota.retrying(|| reserve_range(quota, &file.fd, &(offset..end), before, ahead)) {
            Err(Errno::NOSPC) => {}
            other => return other.map(|reserved| (length, Some(change.with(reserved)))),
        }
        let free = quota.free_bytes().saturating_sub(ahead);
        let fitting = charge::longest_fitting(&file.fd, &(offset..end), free)?;
        if fitting == offset {
            return Err(Errno::NOSPC);
        }
        let reserved = reserve_range(quota, &file.fd, &(offset..fitting), before, ahead)?;
        Ok((fitting - offset, Some(change.with(reserved))))
    }

    /// Reserves space for the whole range.
    pub(super) fn make_all_room(&self, file: &OpenFile, range: &Range<u64>) -> Result<Option<Change<'_>>> {
        let Some(quota) = &self.quota else { return Ok(None) };
        let change = quota.begin_change(file.id, || self.measure_first(&file.fd))?;
        let ahead = self.allocated_ahead(quota, file, change.before(), range.start)?;
        let before = self.with_attributes(file, change.before())?;
        let reserved = quota.retrying(|| reserve_range(quota, &file.fd, range, before, ahead))?;
        Ok(Some(change.with(reserved)))
    }

    /// Makes a file longer or shorter, and updates its charge.
    pub(super) fn resizing(
        &self,
        file: &OpenFile,
        size: u64,
        resize: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(quota) = &self.quota else { return resize() };
        let mut change = quota.begin_change(file.id, || self.measure_first(&file.fd))?;
        let ahead = self.allocated_ahead(quota, file, change.before(), size)?;
        if ahead > 0 {
            change = change.with(quota.retrying(|| quota.reserve(ahead))?);
        }
        let resized = resize();
        self.settle(&file.fd, Some(change));
        resized
    }

    /// Called before a request that makes a file end at `start` or behind it, and reserves nothing before
    /// `start`: returns what must be reserved for that.
    ///
    /// xfs has allocated blocks beyond the end of a file that has grown. They are not charged, but would be
    /// once the file ends behind them. They are given back, unless another request may be writing there.
    fn allocated_ahead(&self, quota: &Quota, file: &OpenFile, before: Charged, start: u64) -> Result<u64> {
        let attributes = charge::attribute_bytes(before.attribute_blocks.unwrap_or(0));
        // A file without holes has as much content as it is charged for: no system call for each write that appends.
        if !self.allocates_ahead || start <= before.bytes.saturating_sub(attributes) {
            return Ok(0);
        }
        let until = charge::whole_blocks(start).min(MOST_BYTES);
        // From the end, as far as the charge would grow.
        let find = || -> Result<Range<u64>> {
            let seen = stat(&file.fd)?;
            Ok(charge::whole_blocks(seen.stx_size)..until.min(seen.stx_blocks.saturating_mul(512)))
        };
        let give_back = || -> Result<()> {
            let ahead = find()?;
            if ahead.is_empty() {
                return Ok(());
            }
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file.fd, punch, ahead.start, until - ahead.start)
        };
        // What other programs write is not known here.
        let given_back = self.trust.knows_all_changes().then(|| quota.if_sole_change(file.id, give_back));
        match given_back.flatten() {
            Some(given_back) => given_back.map(|()| 0),
            // Of other requests, which have reserved them: the kernel sends several parts of a file at a time.
            None if self.writeback_cache => Ok(0),
            None => find().map(|ahead| ahead.end.saturating_sub(ahead.start)),
        }
    }

    /// The charge with the blocks of the file's attributes, which a count does not know apart.
    fn with_attributes(&self, file: &OpenFile, charged: Charged) -> Result<Charged> {
        if charged.attribute_blocks.is_some() {
            return Ok(charged);
        }
        let most = || self.attribute_blocks_of(&self.descriptors.xattrs(file.fd.as_fd()));
        Ok(Charged { attribute_blocks: Some(attribute_blocks_seen(&stat(&file.fd)?, most)?), ..charged })
    }

    /// Called before a change of attributes that adds at most `bytes`.
    pub(super) fn make_room_for_attributes(
        &self,
        id: u64,
        file: &OwnedFd,
        xattrs: &Xattrs<'_>,
        bytes: u64,
    ) -> Result<Option<Change<'_>>> {
        let Some(quota) = &self.quota else { return Ok(None) };
        let change = quota.begin_change(id, || self.measure_first_with(file, xattrs))?;
        let reserved = quota.retrying(|| quota.reserve(bytes))?;
        Ok(Some(change.with(reserved)))
    }

    /// Called before a file is created.
    pub(super) fn admit_file(&self) -> Result<Option<InodeReservation<'_>>> {
        let Some(quota) = &self.quota else { return Ok(None) };
        let inode = quota.reserve_inode()?;
        quota.admit_block()?;
        Ok(Some(inode))
    }

    /// Called before a name is added to a file that exists.
    pub(super) fn admit_link(&self) -> Result<Option<InodeReservation<'_>>> {
        let Some(quota) = &self.quota else { return Ok(None) };
        quota.admit_block()?;
        if self.names_take_inodes { quota.reserve_inode().map(Some) } else { Ok(None) }
    }

    /// Called before a file gets its name in another directory.
    pub(super) fn admit_name(&self) -> Result<()> {
        self.quota.as_ref().map_or(Ok(()), |quota| quota.admit_block())
    }

    /// Charges a new file, whose inode was reserved.
    pub(super) fn charge_new(&self, slot: Option<Slot>, id: u64, seen: &Statx) {
        if let Some(quota) = &self.quota {
            quota.add(id, charge(seen, 0), slot);
        }
    }

    /// As [`Self::charge_new`], for a file that is open.
    pub(super) fn charge_created(&self, slot: Option<Slot>, id: u64, seen: &Statx) {
        match &self.quota {
            // Its attributes have blocks, which are not counted yet.
            Some(quota) if seen.stx_blocks > 0 => quota.add(id, charge(seen, 0), slot),
            Some(quota) => quota.add_open(id, charge(seen, 0), slot),
            None => {}
        }
    }

    /// As [`Self::charge_new`], for the file with this name.
    pub(super) fn charge_at(&self, slot: Option<Slot>, parent: &OwnedFd, name: &CStr) {
        if self.quota.is_some()
            && let Ok(seen) = rustix::fs::statx(parent, name, AtFlags::SYMLINK_NOFOLLOW, WANTED)
            && let Ok(id) = self.origin.node_id(&seen)
        {
            self.charge_new(slot, id, &seen);
        }
    }

    /// Charges a new name of a file that exists, whose inode was reserved.
    pub(super) fn charge_name(&self, slot: Option<Slot>) {
        if let Some(quota) = self.quota.as_ref().filter(|_| self.names_take_inodes) {
            quota.add_name(slot);
        }
    }

    /// The request had no effect.
    pub(super) fn charge_nothing(&self, running: &Running) {
        if let Some(quota) = &self.quota {
            quota.no_change(running.slot());
        }
    }

    /// A file lost a name. It `takes` this much if it was not changed.
    pub(super) fn discharge(&self, slot: Option<Slot>, id: u64, takes: Charged, loss: Loss) {
        let Some(quota) = &self.quota else { return };
        match loss {
            Loss { names_left: true, .. } if self.names_take_inodes => quota.free_name(slot),
            Loss { names_left: true, .. } => {}
            Loss { is_known: true, .. } => quota.removed(id, takes, slot),
            Loss { is_known: false, .. } => quota.free(id, takes, slot),
        }
    }

    /// Repeats `attempt` while it fails for lack of space that a FORGET is about to free.
    pub(super) fn retrying<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        match &self.quota {
            Some(quota) => quota.retrying(attempt),
            None => attempt(),
        }
    }

    /// The charge of a file without a remembered charge: that of a file without attribute blocks,
    /// see [`charge`].
    fn measure_first(&self, file: &OwnedFd) -> Result<Charged> {
        self.measure_first_with(file, &self.descriptors.xattrs(file.as_fd()))
    }

    fn measure_first_with(&self, file: &OwnedFd, xattrs: &Xattrs<'_>) -> Result<Charged> {
        let seen = stat(file)?;
        let attribute_blocks = Some(attribute_blocks_seen(&seen, || self.attribute_blocks_of(xattrs))?);
        Ok(Charged { attribute_blocks, ..charge(&seen, 0) })
    }

    /// The charge of a file now. Only setxattr and removexattr change the blocks of its attributes,
    /// so these are not counted again.
    fn measure(&self, file: &OwnedFd, before: Charged) -> Result<Charged> {
        match before.attribute_blocks {
            Some(blocks) => Ok(charge(&stat(file)?, blocks)),
            None => self.measure_all(file),
        }
    }

    /// The charge of a file now, with its attributes.
    fn measure_all(&self, file: &OwnedFd) -> Result<Charged> {
        measure_with(file, || self.attribute_blocks_of(&self.descriptors.xattrs(file.as_fd())))
    }

    pub(super) fn attribute_blocks_of(&self, xattrs: &Xattrs<'_>) -> Result<u8> {
        Ok(self.attribute_blocks.most(xattrs::total(xattrs, &xattrs::names(xattrs)?, None)?))
    }
}

/// The charge of a file now; `blocks`: most of its attributes.
fn measure_with(file: &OwnedFd, blocks: impl FnOnce() -> Result<u8>) -> Result<Charged> {
    let seen = stat(file)?;
    Ok(charge(&seen, attribute_blocks_seen(&seen, blocks)?))
}

/// Matters only for regular files with at least one block.
fn attribute_blocks_seen(seen: &Statx, most: impl FnOnce() -> Result<u8>) -> Result<u8> {
    let is_file = FileType::from_raw_mode(seen.stx_mode.into()) == FileType::RegularFile;
    if is_file && seen.stx_blocks > 0 { most() } else { Ok(0) }
}

/// Reserves exactly what writing the range adds to the charge `before`, with the blocks `ahead` of it that become
/// content.
fn reserve_range<'q>(
    quota: &'q Quota,
    file: &OwnedFd,
    range: &Range<u64>,
    before: Charged,
    ahead: u64,
) -> Result<Reservation<'q>> {
    let attributes = charge::attribute_bytes(before.attribute_blocks.unwrap_or(0));
    let most = charge::whole_blocks(stat(file)?.stx_size.max(range.end)).saturating_add(attributes);
    let left = most.saturating_sub(before.bytes);
    quota.reserve(charge::growth(file, range, left)?.saturating_add(ahead).min(left))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::sync::Arc;

    use rustix::fs::{AtFlags, XattrFlags};
    use volume_fs::figures::{Counted, Limits};
    use volume_fs::file::{Name, NodeId};
    use volume_fs::request::Data;

    use super::*;
    use crate::quota::Use;
    use crate::trust::Access;
    use crate::volume::NewXattr;
    use crate::volume::testing::{CALLER, begin, create, volume};

    #[test]
    fn a_volume_whose_capacity_the_kernel_enforces_admits_everything_and_charges_nothing() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let limits = Limits { bytes: 3 * BLOCK_BYTES, inodes: 2 };
        let found = Use { counted: Counted { bytes: BLOCK_BYTES, inodes: 1 }, unsettled: Vec::new() };
        let quota = Quota::new(limits, 4, None);
        quota.set_counted(found);
        let counted = volume(dir.path(), Access::default(), Some(Arc::new(quota)));
        let data =
            Data { offset: 0, bytes: &[1; 4 * 4096], by: CALLER, clears_setid: false, from_pages: false };
        let (_, handle) = create(&counted, "counted").unwrap();
        assert_eq!(counted.write(handle, data), Ok(2 * 4096), "what fits");
        assert_eq!(create(&counted, "second").unwrap_err(), Errno::NOSPC);

        let free = volume(dir.path(), Access::default(), None);
        let (id, handle) = create(&free, "second").unwrap();
        assert_eq!(free.write(handle, data), Ok(4 * 4096));
        let attribute =
            NewXattr { name: OsStr::new("user.a"), value: &[1; 2048], flags: XattrFlags::empty() };
        free.set_xattr(&mut begin(&free), CALLER, id, attribute).unwrap();
        let (old, new) = (OsStr::new("second"), OsStr::new("third"));
        let name = |name| Name { directory: NodeId::ROOT, name };
        free.link(&mut begin(&free), id, name(new)).unwrap();
        free.remove(&mut begin(&free), name(old), AtFlags::empty(), 0).unwrap();
        free.remove(&mut begin(&free), name(new), AtFlags::empty(), 0).unwrap();
        free.release_file(handle);
        free.forget(id, 2);
        assert!(!dir.path().join("third").exists());
    }
}
