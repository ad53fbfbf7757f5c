//! Space and inodes that are reserved for a change in progress.

use super::{Quota, change};
use crate::charge::Charged;
use crate::errno::Result;

/// Reserved space. The part that is not settled is released on drop.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    pub(super) quota: &'a Quota,
    pub(super) bytes: u64,
}

/// A change of one file in progress, with the space that is reserved for it. The space is released on
/// drop; then the charge stays as it was before.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    pub(super) quota: &'a Quota,
    pub(super) id: u64,
    pub(super) before: Charged,
    pub(super) reserved: Option<Reservation<'a>>,
    pub(super) is_settled: bool,
}

/// One reserved inode, released on drop unless it is kept.
#[derive(Debug)]
pub(crate) struct InodeReservation<'a> {
    pub(super) quota: &'a Quota,
}

impl Reservation<'_> {
    /// Takes the reserved bytes; the caller must release them.
    pub(super) fn take(mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }
}

impl<'a> Change<'a> {
    /// The charge before the change.
    pub(crate) fn before(&self) -> Charged {
        self.before
    }

    pub(crate) fn with(self, reserved: Reservation<'a>) -> Self {
        let mut change = self;
        change.reserved = Some(reserved);
        change
    }

    /// Called after the change: as [`Quota::settle`], and releases the reserved space.
    pub(crate) fn settle(mut self, measure: impl FnOnce(Charged) -> Result<Charged>) {
        self.is_settled = true;
        let mut shard = self.quota.shard(self.id);
        let Some(charge) = shard.get_mut(&self.id) else { return };
        charge.changes = charge.changes.saturating_sub(1);
        self.quota.settle_charge(charge, self.reserved.take(), measure);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if self.is_settled {
            return;
        }
        if let Some(charge) = self.quota.shard(self.id).get_mut(&self.id) {
            charge.changes = charge.changes.saturating_sub(1);
            self.quota.write(charge);
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        change(&self.quota.used_bytes, 0, self.bytes);
    }
}

impl InodeReservation<'_> {
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for InodeReservation<'_> {
    fn drop(&mut self) {
        self.quota.free_inode();
    }
}
