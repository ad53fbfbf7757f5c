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
                self.forget_unanswered(node);
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

    /// Closes what an earlier daemon has opened of a node that the kernel has forgotten. An open file would
    /// keep its inode known: so the kernel has dropped the request that opened it, which was not answered,
    /// because its process was killed before it could be sent again.
    pub(super) fn close_unopened(&self, id: u64) {
        if self.nodes.is_looked_up(id) {
            return;
        }
        self.files.unused_of(id).into_iter().for_each(|handle| self.release_file(handle));
        self.directories.unused_of(id).into_iter().for_each(|handle| self.release_directory(handle));
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

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::time::Duration;

    use keeper::daemon::Removed;
    use linux::fd_passing::PacketSocket;
    use linux::fs_at::DescriptorDir;
    use linux::shared_memory;
    use rustix::fs::{Mode, OFlags};
    use rustix::io::Errno;
    use volume_fs::file::{Handle, NodeId};
    use volume_fs::service::{DataPath, Succession};
    use volume_fs::state::Region;

    use super::*;
    use crate::nodes::{NodeLimits, stat};
    use crate::place::Place;
    use crate::state_table::{HandleRecord, NodeView, Opened};
    use crate::trust::Access;
    use crate::volume::{Policies, Shared};

    /// A daemon that continues with what the table has.
    fn successor(directory: &Path, memory: &OwnedFd) -> Volume {
        let root = rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        // The keeper has ended.
        let (_, socket) = PacketSocket::pair().unwrap();
        let socket = OwnedFd::from(socket);
        rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK).unwrap();
        let removed = Removed::new(socket, Duration::from_secs(1)).unwrap();
        let state = Region::of_backend(memory).unwrap();
        let shared = Shared::open(Succession { state, version: 2, removed, continues: true }).unwrap();
        let limits = NodeLimits { descriptors: 1024, known: 1000, event_loops: 4 };
        let policies = Policies { data_path: DataPath::Daemon, quota: None, writeback_cache: false };
        let descriptors = DescriptorDir::open().unwrap();
        Volume::open(root, Access::default(), descriptors, limits, policies, Some(shared)).unwrap()
    }

    #[test]
    fn what_an_earlier_daemon_has_opened_is_closed_when_the_kernel_forgets_the_file() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let memory = shared_memory::create("test", 8 << 20).unwrap();
        let earlier = StateTable::new(Region::of_backend(&memory).unwrap());
        let mut ids = Vec::new();
        for (name, kind) in [(c"f", Opened::File), (c"d", Opened::Directory), (c"g", Opened::File)] {
            let path = directory.path().join(name.to_str().unwrap());
            match kind {
                Opened::File => drop(std::fs::File::create(&path).unwrap()),
                Opened::Directory => std::fs::create_dir(&path).unwrap(),
            }
            let id = stat(std::fs::File::open(&path).unwrap()).unwrap().stx_ino;
            let place = Place { directory: 1, name: name.to_owned() };
            earlier.put_node(None, &NodeView { id, lookups: 2, place: Some(&place), removed_by: None });
            let handle = earlier.next_handle(kind);
            let flags = OFlags::RDONLY.bits();
            earlier.put_handle(&HandleRecord { kind, handle, node: id, flags, request: id });
            ids.push(id);
        }
        let volume = successor(directory.path(), &memory);
        let open = || (volume.files.count(), volume.directories.count());
        // The third one is in use.
        volume.read(Handle(2), 0, 10).unwrap();
        for id in &ids {
            volume.forget(NodeId(*id), 1);
        }
        assert_eq!(open(), (2, 1), "the kernel still knows them");
        for id in &ids {
            volume.forget(NodeId(*id), 1);
        }
        assert_eq!(open(), (1, 0));
        assert_eq!(volume.read(Handle(1), 0, 10).unwrap_err(), Errno::BADF);
        let (_table, recovered) = StateTable::recover(Region::of_backend(&memory).unwrap()).unwrap();
        assert_eq!(recovered.handles.len(), 1, "and no successor opens them");
    }
}
