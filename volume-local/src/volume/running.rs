//! A request while it is answered, and what an earlier daemon has done for it.

use std::sync::Arc;

use volume_fs::request::RequestId;

use super::Volume;
use crate::state_table::StateTable;
use crate::state_table::requests::{Effect, Note, Slot};

/// Its drop means that the request is answered.
#[derive(Debug)]
pub(crate) struct Running {
    id: RequestId,
    table: Option<Arc<StateTable>>,
    slot: Option<Slot>,
    is_done: bool,
}

impl Volume {
    /// Called before a request is served. Undoes what an earlier daemon has counted and opened for
    /// it: the kernel did not learn of that.
    pub(crate) fn begin(&self, id: RequestId) -> Running {
        let mut running = Running { id, table: self.table.clone(), slot: None, is_done: false };
        let Some(table) = &self.table else { return running };
        if !id.resent {
            table.requests.new_request();
            return running;
        }
        if let Some(note) = table.requests.take_note(id.number) {
            running.slot = table.requests.slot(Some(&note));
            let Note { counted, is_done, .. } = note;
            running.is_done = is_done;
            if let (Some(node), Some(slot)) = (counted, running.slot) {
                // Cleared first: killed in between, the count is too high, which is corrected later.
                table.requests.counted(slot, 0);
                self.nodes.forget(node, 1);
            }
        }
        self.close_unanswered(id.number);
        running
    }

    /// Closes what the earlier daemon has opened for a request that it did not answer.
    fn close_unanswered(&self, request: u64) {
        if let Some(handle) = self.files.opened_by(request) {
            self.release_file(handle);
        }
        if let Some(handle) = self.directories.opened_by(request) {
            self.release_directory(handle);
        }
    }
}

impl Running {
    /// The request's number.
    pub(crate) fn number(&self) -> u64 {
        self.id.number
    }

    /// An earlier daemon has made the effect: it is only to be answered.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }

    /// The slot of its note, if it has one.
    pub(super) fn slot(&self) -> Option<Slot> {
        self.slot
    }

    /// Called before the effect. `effect` may need system calls, and is not called if no daemon can
    /// follow this one.
    ///
    /// # Errors
    ///
    /// Those of `effect`.
    pub(super) fn note<E>(&mut self, effect: impl FnOnce() -> Result<Effect, E>) -> Result<(), E> {
        let Some(table) = &self.table else { return Ok(()) };
        let effect = effect()?;
        if self.slot.is_none() {
            self.slot = table.requests.slot(None);
        }
        if let Some(slot) = self.slot {
            table.requests.note(slot, self.id.number, &effect);
        }
        Ok(())
    }

    /// The request has counted a lookup of `node`, and the answer reports it to the kernel.
    pub(super) fn counted(&mut self, node: u64) {
        let Some(table) = &self.table else { return };
        if self.slot.is_none() {
            self.slot = table.requests.slot(None);
            if let Some(slot) = self.slot {
                table.requests.note(slot, self.id.number, &Effect::Lookup);
            }
        }
        if let Some(slot) = self.slot {
            table.requests.counted(slot, node);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let (Some(table), Some(slot)) = (&self.table, self.slot) {
            table.requests.drop_note(slot);
        }
    }
}
