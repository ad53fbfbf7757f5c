//! Stages that wait for their daemon to dial in, and the ways to end such a wait early.
//!
//! NodeUnstageVolume ends it: by the CSI spec ("Timeouts"), the reverse call is the only way to
//! cancel a call. Without it, a pod whose mount pod cannot start would be Terminating until the
//! wait is over. The driver's stop ends all waits.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::error::{Result, Step};
use crate::model::ids::VolumeId;

#[derive(Debug, Default)]
pub(crate) struct Waits {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<VolumeId, Arc<EventFd>>,
    /// Volumes whose daemon has died and is to have a successor.
    orphaned: Vec<VolumeId>,
    is_closed: bool,
}

/// The wait of one stage, until dropped. Its descriptor becomes readable when the wait must end.
#[derive(Debug)]
pub(crate) struct Wait<'a> {
    waits: &'a Waits,
    volume_id: VolumeId,
    abandoned: Arc<EventFd>,
}

/// One daemon after the other is started for a volume, until this is dropped.
#[derive(Debug)]
pub(crate) struct Takeover<'a> {
    waits: &'a Waits,
    volume_id: VolumeId,
}

impl Waits {
    pub(crate) fn take_over(&self, volume_id: &VolumeId) -> Takeover<'_> {
        self.lock().orphaned.push(volume_id.clone());
        Takeover { waits: self, volume_id: volume_id.clone() }
    }

    pub(crate) fn begin(&self, volume_id: &VolumeId) -> Result<Wait<'_>> {
        let abandoned = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| linux::Error::new("eventfd", volume_id, e))
            .step("wait for daemon")?;
        let abandoned = Arc::new(abandoned);
        let mut state = self.lock();
        if state.is_closed {
            end(&abandoned);
        }
        state.waiting.insert(volume_id.clone(), abandoned.clone());
        drop(state);
        Ok(Wait { waits: self, volume_id: volume_id.clone(), abandoned })
    }

    /// Ends the volume's wait, if there is one. The stage then rolls back.
    pub(crate) fn abandon(&self, volume_id: &VolumeId) {
        if let Some(abandoned) = self.lock().waiting.get(volume_id) {
            end(abandoned);
        }
    }

    /// Whether the volume waits for a daemon, or for the start of one.
    pub(crate) fn is_waiting(&self, volume_id: &str) -> bool {
        let state = self.lock();
        state.waiting.keys().chain(&state.orphaned).any(|waiting| waiting.as_str() == volume_id)
    }

    /// Ends all waits, also those that begin later.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.waiting.values().for_each(|abandoned| end(abandoned));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn end(abandoned: &EventFd) {
    // Fails only if the counter is full: then the descriptor is readable already.
    let _readable_either_way = abandoned.write(1);
}

impl AsFd for Wait<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.abandoned.as_fd()
    }
}

impl Drop for Takeover<'_> {
    fn drop(&mut self) {
        let orphaned = &mut self.waits.lock().orphaned;
        if let Some(place) = orphaned.iter().position(|id| *id == self.volume_id) {
            orphaned.swap_remove(place);
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.waits.lock().waiting.remove(&self.volume_id);
    }
}
