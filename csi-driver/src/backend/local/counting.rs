//! What the kernel counts of volumes: that Btrfs keeps counting rightly, and that daemons get the figures
//! which they may not ask for.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use linux::btrfs::{quota as groups, subvolume};

use super::{Pool, open_root, quota, usage};
use crate::error::chain;
use crate::model::capacity::VolumeLimits;
use crate::model::ids::VolumeId;

/// Of a count that something has ended.
const COUNT_AGAIN: Duration = Duration::from_secs(30);

impl Pool {
    /// Lets Btrfs count through deletions, and again where its count is wrong.
    pub(super) fn keep_counting(&self) {
        let keep = || -> linux::Result<()> {
            let dir = open_root(&self.dir)?;
            self.remover.forget_groups(&dir);
            if quota::kind(&self.dir)? != Ok(quota::Kind::Groups) {
                return Ok(());
            }
            if let Err(error) = groups::count_through_deletions(&dir) {
                tracing::debug!(error = chain(&error), "the pool's quota groups");
            }
            let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
            if groups::quotas(&dir)? != (groups::Quotas::Groups { exact: false }) {
                *counted = None;
                return Ok(());
            }
            if counted.is_none_or(|begun| begun.elapsed() >= COUNT_AGAIN) {
                tracing::warn!(pool = %self.dir.display(), "the pool's quota groups are inexact: they are counted anew");
                *counted = Some(Instant::now());
                groups::rescan(&dir)?;
            }
            Ok(())
        };
        if let Err(error) = keep() {
            tracing::debug!(error = chain(&error), "look at the pool's quota groups");
        }
    }
}

/// Writes down what the kernel counts for a daemon that cannot ask it: statfs(2) of a project has that
/// count, and that of a subvolume has not.
pub(super) fn publish(data: &OwnedFd, usage_path: &Path) -> linux::Result<()> {
    if subvolume::with_root(data)?.is_none() {
        return Ok(());
    }
    match quota::used(data)? {
        Some(used) => usage::publish(&usage::open(usage_path)?, used),
        None => Ok(()),
    }
}

/// Limits a served volume again: Btrfs forgets all limits when an administrator turns quotas off and on.
///
/// `limits` may be those of before an expansion, so a larger one stays.
pub(super) fn limit_again(data: &OwnedFd, limits: VolumeLimits, id: &VolumeId) -> linux::Result<()> {
    if quota::group_limit(data)?.is_some_and(|limit| limit >= limits.bytes) {
        return Ok(());
    }
    quota::limit(quota::Kind::Groups, data, limits)?;
    tracing::warn!(volume_id = %id, bytes = limits.bytes, "a served volume had lost its limit: it has one again");
    Ok(())
}
