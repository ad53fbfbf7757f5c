//! The [`Backend`]: each request is a call of the volume, which works in the event loop that read
//! the request.
//!
//! Every change of the volume passes the [`Gate`], except RELEASE and FORGET, which must never
//! wait.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use keeper::daemon::Removed;
use linux::credentials::Caller;
use rustix::fs::{AtFlags, FallocateFlags, OFlags, RenameFlags, SeekFrom, XattrFlags};
use rustix::io::Errno;
use volume_fs::backend::{Backend, CannotPause, DataReply, Held, KnownListing, Listing, Pausing, Reply};
use volume_fs::failure::Failure;
use volume_fs::figures::{Counted, Figures, Limits, Shrinks};
use volume_fs::file::{
    Attributes, Handle, Known, LookedUp, Name, NodeId, Opened, OpenedDirectory, Statistics,
};
use volume_fs::gate::{Gate, Shut};
use volume_fs::notifications::Kernel;
use volume_fs::request::{Changes, Data, Permissions, Position, RequestId, Requester, Special, Xattr};
use volume_fs::service::{Capacity, Terms};

use crate::backings;
use crate::capacity::{CountedByDaemon, LimitedByKernel, Policy, Unlimited};
use crate::ender;
use crate::errno::Result;
use crate::held_back::HeldBack;
use crate::nodes::NodeLimits;
use crate::pruner;
use crate::quota::Quota;
use crate::sweeper;
use crate::trust::{self, Access};
use crate::usage_file::{BootId, UsageFile};
use crate::volume::{NewXattr, Policies, Running, Shared, Volume};

/// Most that the end of the connection waits for changes in progress.
const CHANGES_END: Duration = Duration::from_secs(1);

/// Where the volume's data are, from the driver's assignment.
#[derive(Debug)]
pub struct Storage {
    /// O_PATH descriptor of a detached mount's root.
    pub(crate) directory: OwnedFd,
    /// Keeps the use for the next daemon.
    pub(crate) usage_file: OwnedFd,
}

/// A volume that is a directory of a pool.
#[derive(Debug)]
pub struct Local {
    volume: Arc<Volume>,
    gate: Arc<Gate>,
    /// Changes of names, attributes and extended attributes that wait for the gate.
    names_held: Arc<HeldBack>,
    capacity: Arc<dyn Policy>,
    /// An earlier daemon had the connection.
    continues: bool,
}

impl Local {
    pub(crate) fn open(storage: Storage, terms: Terms, boot: Option<BootId>) -> volume_fs::Result<Self> {
        let Terms { volume: terms, process, succession } = terms;
        let shared = succession.map(Shared::open).transpose()?;
        let continues = shared.as_ref().is_some_and(Shared::continues);
        let usage_file = UsageFile::new(storage.usage_file, boot);
        let capacity: Arc<dyn Policy> = match terms.capacity {
            Capacity::Daemon => Arc::new(CountedByDaemon::open(
                usage_file,
                Quota::new(
                    terms.limits,
                    process.event_loops,
                    shared.as_ref().and_then(Shared::table_of_charges),
                ),
                shared.as_ref().and_then(Shared::earlier_charges),
            )?),
            Capacity::Kernel => {
                let root = storage.directory.try_clone().map_err(|e| volume_fs::Error::Kernel {
                    step: "volume directory",
                    source: linux::Error::new("duplicate", "its descriptor", e),
                })?;
                Arc::new(LimitedByKernel::open(usage_file, root, terms.limits)?)
            }
            Capacity::None => Arc::new(Unlimited::open(&usage_file)?),
        };
        let gate = Arc::new(Gate::new(capacity.must_prepare()));
        let limits = NodeLimits {
            descriptors: process.descriptor_limit,
            known: terms.known_inode_limit,
            event_loops: process.event_loops,
        };
        let (data_path, writeback_cache) = (terms.data_path, terms.writeback_cache);
        let policies = Policies { data_path, quota: capacity.quota(), writeback_cache };
        let access = Access { read_only: terms.read_only, changed_from_outside: terms.changed_from_outside };
        let volume = Volume::open(storage.directory, access, process.descriptors, limits, policies, shared)?;
        let names_held = Arc::default();
        Ok(Self { volume: Arc::new(volume), gate, names_held, capacity, continues })
    }

    /// Makes a change that is not the same if it is made twice. The kernel may have locked a directory for it.
    ///
    /// `bytes`: the memory that the change keeps if it waits.
    fn change_once(
        &self,
        id: RequestId,
        bytes: usize,
        change: impl FnOnce(&Volume, &mut Running) + Send + 'static,
    ) {
        let mut running = self.volume.begin(id);
        self.change_locked(true, bytes, move |volume| change(volume, &mut running));
    }

    /// `kind`: REMOVEDIR for a directory.
    fn remove(&self, by: Requester, name: Name<'_>, kind: AtFlags, reply: impl Reply<()>) {
        let (directory, name) = owned(name);
        self.change_once(by.id, name.len(), move |volume, running| {
            let name = Name { directory, name: &name };
            reply(answer(volume.remove(running, name, kind, by.caller.uid)));
        });
    }

    /// Makes a change, now or when the gate opens. `bytes`: the memory that it keeps until then.
    fn change(&self, bytes: usize, change: impl FnOnce(&Volume) + Send + 'static) {
        self.change_locked(false, bytes, change);
    }

    /// [`Self::change`]. `locks`: the kernel may have locked a directory for it.
    fn change_locked(&self, locks: bool, bytes: usize, change: impl FnOnce(&Volume) + Send + 'static) {
        match self.gate.enter() {
            Ok(_pass) => change(&self.volume),
            Err(shut) => {
                let held = locks.then(|| self.names_held.another());
                self.change_later(shut, bytes, move |volume| {
                    drop(held);
                    change(volume);
                });
            }
        }
    }

    fn change_later(&self, shut: Shut<'_>, bytes: usize, change: impl FnOnce(&Volume) + Send + 'static) {
        if shut.has_room(bytes) {
            let volume = Arc::clone(&self.volume);
            shut.put_aside(bytes, Box::new(move || change(&volume)));
        } else {
            let _pass = shut.wait();
            change(&self.volume);
        }
    }
}

impl Pausing for Local {
    fn pause(
        &self,
        held: Held,
        paused: impl FnOnce(std::result::Result<Counted, CannotPause>) + Send + 'static,
    ) {
        let (capacity, volume) = (Arc::clone(&self.capacity), Arc::clone(&self.volume));
        self.gate.pause(move || {
            // Asked when the gate is shut: no open for writing can follow.
            if held == Held::RequestsOnly || !volume.may_be_written() {
                return paused(Ok(capacity.usage().used));
            }
            let reason = "dataPath passthrough: the kernel may still write files (one was opened for writing since this \
                          daemon began to serve, or it continues for another daemon): delete the pods that use the \
                          volume first, or use a class with dataPath: daemon";
            paused(Err(CannotPause(reason.to_owned())));
        });
    }

    fn resume(&self) {
        self.gate.resume();
    }

    fn pause_waits_for(&self) -> &'static str {
        if self.capacity.usage().counting { "the count of its use" } else { "changes under way" }
    }
}

impl Backend for Local {
    fn lookup(&self, id: RequestId, name: Name<'_>, reply: impl Reply<LookedUp>) {
        let mut running = self.volume.begin(id);
        reply(answer(self.volume.look_up(&mut running, name)));
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        self.volume.forget(node, lookups);
    }

    fn getattr(&self, node: NodeId, handle: Option<Handle>, reply: impl Reply<Attributes>) {
        reply(answer(self.volume.attributes(node, handle)));
    }

    fn setattr(
        &self,
        by: Caller,
        node: NodeId,
        handle: Option<Handle>,
        changes: Changes,
        reply: impl Reply<Attributes>,
    ) {
        // The kernel locks a directory whose attributes change. A new size is of a file.
        let locks = changes.size.is_none();
        self.change_locked(locks, 0, move |volume| {
            reply(answer(volume.change(by, node, handle, &changes)));
        });
    }

    fn getxattr(&self, node: NodeId, name: &OsStr, size: usize, reply: impl Reply<Xattr>) {
        reply(answer(self.volume.xattr(node, name, size)));
    }

    fn setxattr(
        &self,
        by: Requester,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: XattrFlags,
        reply: impl Reply<()>,
    ) {
        let (name, value) = (name.to_owned(), value.to_vec());
        self.change_once(by.id, name.len() + value.len(), move |volume, running| {
            let wanted = NewXattr { name: &name, value: &value, flags };
            reply(answer(volume.set_xattr(running, by.caller, node, wanted)));
        });
    }

    fn listxattr(&self, node: NodeId, size: usize, reply: impl Reply<Xattr>) {
        reply(answer(self.volume.xattr_names(node, size)));
    }

    fn removexattr(&self, id: RequestId, node: NodeId, name: &OsStr, reply: impl Reply<()>) {
        let name = name.to_owned();
        self.change_once(id, name.len(), move |volume, running| {
            reply(answer(volume.remove_xattr(running, node, &name)));
        });
    }

    fn readlink(&self, node: NodeId, reply: impl DataReply) {
        answer_data(self.volume.read_link(node), reply);
    }

    fn mknod(
        &self,
        by: Requester,
        name: Name<'_>,
        special: Special,
        permissions: Permissions,
        reply: impl Reply<Known>,
    ) {
        let (directory, name) = owned(name);
        self.change_once(by.id, name.len(), move |volume, running| {
            let name = Name { directory, name: &name };
            reply(answer(volume.make_special(running, name, special, permissions, by.caller)));
        });
    }

    fn mkdir(&self, by: Requester, name: Name<'_>, permissions: Permissions, reply: impl Reply<Known>) {
        let (directory, name) = owned(name);
        self.change_once(by.id, name.len(), move |volume, running| {
            let name = Name { directory, name: &name };
            reply(answer(volume.make_directory(running, name, permissions, by.caller)));
        });
    }

    fn symlink(&self, by: Requester, name: Name<'_>, target: &OsStr, reply: impl Reply<Known>) {
        let ((directory, name), target) = (owned(name), target.to_owned());
        self.change_once(by.id, name.len() + target.len(), move |volume, running| {
            let name = Name { directory, name: &name };
            reply(answer(volume.make_symlink(running, name, &target, by.caller)));
        });
    }

    fn link(&self, id: RequestId, node: NodeId, name: Name<'_>, reply: impl Reply<Known>) {
        let (directory, name) = owned(name);
        self.change_once(id, name.len(), move |volume, running| {
            reply(answer(volume.link(running, node, Name { directory, name: &name })));
        });
    }

    fn unlink(&self, by: Requester, name: Name<'_>, reply: impl Reply<()>) {
        self.remove(by, name, AtFlags::empty(), reply);
    }

    fn rmdir(&self, by: Requester, name: Name<'_>, reply: impl Reply<()>) {
        self.remove(by, name, AtFlags::REMOVEDIR, reply);
    }

    fn rename(&self, by: Requester, from: Name<'_>, to: Name<'_>, flags: RenameFlags, reply: impl Reply<()>) {
        let ((from_directory, from), (to_directory, to)) = (owned(from), owned(to));
        self.change_once(by.id, from.len() + to.len(), move |volume, running| {
            let from = Name { directory: from_directory, name: &from };
            let to = Name { directory: to_directory, name: &to };
            reply(answer(volume.rename(running, from, to, flags, by.caller.uid)));
        });
    }

    fn create(
        &self,
        by: Requester,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        reply: impl Reply<(Known, Opened)>,
    ) {
        let (directory, name) = owned(name);
        self.change_once(by.id, name.len(), move |volume, running| {
            let name = Name { directory, name: &name };
            reply(answer(volume.create(running, name, permissions, flags, by.caller)));
        });
    }

    fn open(&self, id: RequestId, node: NodeId, flags: OFlags, reply: impl Reply<Opened>) {
        if backings::writes(flags) && self.volume.passes() {
            // Its writes would pass the gate by.
            let running = self.volume.begin(id);
            return self.change(0, move |volume| reply(answer(volume.open_file(&running, node, flags))));
        }
        let running = self.volume.begin(id);
        reply(answer(self.volume.open_file(&running, node, flags)));
    }

    fn read(&self, handle: Handle, offset: u64, size: u32, reply: impl DataReply) {
        answer_data(self.volume.read(handle, offset, size), reply);
    }

    fn write(&self, handle: Handle, data: Data<'_>, reply: impl Reply<usize>) {
        match self.gate.enter() {
            Ok(_pass) => reply(answer(self.volume.write(handle, data))),
            // Only a change that waits is copied.
            Err(shut) => {
                let Data { offset, by, clears_setid, from_pages, .. } = data;
                let bytes = data.bytes.to_vec();
                self.change_later(shut, bytes.len(), move |volume| {
                    let data = Data { offset, bytes: &bytes, by, clears_setid, from_pages };
                    reply(answer(volume.write(handle, data)));
                });
            }
        }
    }

    fn copy_file_range(&self, from: Position, to: Position, length: u64, reply: impl Reply<usize>) {
        self.change(0, move |volume| reply(answer(volume.copy_range(from, to, length))));
    }

    fn fallocate(&self, handle: Handle, range: Range<u64>, mode: FallocateFlags, reply: impl Reply<()>) {
        self.change(0, move |volume| reply(answer(volume.allocate(handle, range, mode))));
    }

    fn lseek(&self, handle: Handle, position: SeekFrom, reply: impl Reply<u64>) {
        reply(answer(self.volume.seek(handle, position)));
    }

    fn flush(&self, handle: Handle, reply: impl Reply<()>) {
        reply(answer(self.volume.flush(handle)));
    }

    fn fsync(&self, handle: Handle, data_only: bool, reply: impl Reply<()>) {
        reply(answer(self.volume.synchronise(handle, data_only)));
    }

    fn release(&self, handle: Handle, reply: impl Reply<()>) {
        self.volume.release_file(handle);
        reply(Ok(()));
    }

    fn opendir(&self, by: Requester, node: NodeId, reply: impl Reply<OpenedDirectory>) {
        let running = self.volume.begin(by.id);
        reply(answer(self.volume.open_directory(&running, node, by.caller.uid)));
    }

    fn readdir(&self, handle: Handle, offset: u64, mut listing: impl Listing) {
        let listed = self.volume.list(handle, offset, |entry| listing.add(&entry));
        listing.end(answer(listed));
    }

    fn readdirplus(&self, node: NodeId, handle: Handle, offset: u64, mut listing: impl KnownListing) {
        let listed = self.volume.list_known(node, handle, offset, |entry, known| listing.add(&entry, known));
        listing.end(answer(listed));
    }

    fn fsyncdir(&self, handle: Handle, data_only: bool, reply: impl Reply<()>) {
        reply(answer(self.volume.synchronise_directory(handle, data_only)));
    }

    fn releasedir(&self, handle: Handle, reply: impl Reply<()>) {
        self.volume.release_directory(handle);
        reply(Ok(()));
    }

    fn statfs(&self, reply: impl Reply<Statistics>) {
        reply(answer(self.volume.statistics(self.capacity.usage())));
    }

    fn start(self: Arc<Self>, kernel: Kernel) -> volume_fs::Result<()> {
        let kernel = Arc::new(kernel);
        if self.continues {
            sweeper::start(Arc::clone(&self.volume), Arc::clone(&kernel))
                .map_err(|source| volume_fs::Error::Thread { name: "sweeper", source })?;
        }
        let trust = self.volume.trust();
        trust::start(Arc::clone(trust), Arc::clone(&kernel))
            .map_err(|source| volume_fs::Error::Thread { name: "attributes", source })?;
        if kernel.has_prune() {
            trust.kernel_prunes();
        }
        pruner::start(Arc::clone(&self.volume), kernel, Arc::clone(&self.names_held))
            .map_err(|source| volume_fs::Error::Thread { name: "pruner", source })?;
        if self.volume.passes() {
            ender::start(Arc::clone(&self.volume))
                .map_err(|source| volume_fs::Error::Thread { name: "ender", source })?;
        }
        if !self.capacity.must_prepare() {
            return Ok(());
        }
        let (volume, gate) = (Arc::clone(&self.volume), Arc::clone(&self.gate));
        let count = Box::new(move || volume.count());
        Arc::clone(&self.capacity).prepare(count, Box::new(move || gate.counted()))
    }

    fn figures(&self) -> Figures {
        Figures {
            usage: self.capacity.usage(),
            open_files: self.volume.open_files(),
            known: self.volume.nodes().known_now(),
        }
    }

    fn written(&self, after: NodeId, most: usize) -> std::result::Result<Vec<(NodeId, u64)>, String> {
        self.volume.written(after, most)
    }

    fn set_limits(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
        self.capacity.expand(wanted)
    }

    fn replace_keeper(&self, keeper: Removed) -> std::result::Result<usize, String> {
        let replaced = self.volume.nodes().replace_keeper(keeper);
        self.volume.keeper_was_replaced();
        replaced
    }

    /// If no change is in progress, the next daemon need not count. Waits for changes whose answers were sent, but not
    /// for long, and not for a count.
    fn end(&self) {
        let (still, is_still) = channel();
        self.gate.end(move || {
            // Refused if the wait is over.
            let _waits = still.send(());
        });
        let limit = if self.capacity.usage().counting { Duration::ZERO } else { CHANGES_END };
        if is_still.recv_timeout(limit).is_ok() {
            self.capacity.end();
        }
    }
}

fn owned(name: Name<'_>) -> (NodeId, OsString) {
    (name.directory, name.name.to_owned())
}

fn answer_data(result: Result<Vec<u8>>, reply: impl DataReply) {
    match result {
        Ok(data) => reply(Ok(&data)),
        Err(errno) => reply(Err(failure(errno))),
    }
}

fn answer<T>(result: Result<T>) -> volume_fs::failure::Result<T> {
    result.map_err(failure)
}

/// Adds a reason if the errno alone does not help an administrator.
fn failure(errno: Errno) -> Failure {
    match errno {
        Errno::IO => {
            Failure::because(errno, "the volume's directory cannot be read or written: see the kernel's log")
        }
        // A quota of the file system that limits the volume: for its users, the volume is full.
        Errno::DQUOT => Errno::NOSPC.into(),
        _ => errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, TryRecvError};

    use volume_fs::figures::UsageNow;
    use volume_fs::request::Permissions;

    use super::*;
    use crate::volume::testing::{CALLER, volume};

    /// The memory of the gate for requests that wait.
    const MOST_BYTES: usize = 32 << 20;

    #[test]
    fn what_waits_for_the_end_of_a_pause_counts_with_its_names_and_values() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let volume = Arc::new(volume(directory.path(), Access::default(), None));
        let (gate, capacity) = (Arc::new(Gate::new(false)), Arc::new(Unlimited));
        let local = Local { volume, gate, names_held: Arc::default(), capacity, continues: false };
        local.gate.pause(|| {});
        let id = RequestId { number: 1, resent: false };
        let by = Requester { id, caller: CALLER };
        let name = |name| Name { directory: NodeId::ROOT, name: OsStr::new(name) };
        let mut kept = 0;
        let mut takes = |bytes: usize| {
            kept += bytes;
            let shut = local.gate.enter().unwrap_err();
            assert!(shut.has_room(MOST_BYTES - kept), "more than {bytes}");
            assert!(!shut.has_room(MOST_BYTES - kept + 1), "less than {bytes}");
        };
        local.setxattr(by, NodeId::ROOT, OsStr::new("user.a"), &[1; 65_536], XattrFlags::empty(), |_| {});
        takes(65_536 + 6);
        local.removexattr(id, NodeId::ROOT, OsStr::new("user.a"), |_| {});
        takes(6);
        local.symlink(by, name("link"), OsStr::new("target"), |_| {});
        takes(10);
        local.mkdir(by, name("directory"), Permissions { mode: 0o755, umask: 0 }, |_| {});
        takes(9);
        local.rename(by, name("one"), name("other"), RenameFlags::empty(), |_| {});
        takes(8);
        local.unlink(by, name("none"), |_| {});
        takes(4);
    }

    /// Sends when it ends.
    #[derive(Debug)]
    struct Ending(Sender<()>);

    impl Policy for Ending {
        fn usage(&self) -> UsageNow {
            Unlimited.usage()
        }

        fn expand(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
            Unlimited.expand(wanted)
        }

        fn end(&self) {
            self.0.send(()).unwrap();
        }
    }

    #[test]
    fn the_end_waits_for_a_change_whose_answer_was_sent() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let volume = Arc::new(volume(directory.path(), Access::default(), None));
        let (ends, ended) = channel();
        let (gate, capacity) = (Arc::new(Gate::new(false)), Arc::new(Ending(ends)));
        let local = Local { volume, gate, names_held: Arc::default(), capacity, continues: false };
        std::thread::scope(|scope| {
            let change = local.gate.enter().unwrap();
            scope.spawn(|| local.end());
            // The end shuts the gate first.
            while local.gate.enter().is_ok() {
                std::thread::yield_now();
            }
            assert_eq!(ended.try_recv(), Err(TryRecvError::Empty));
            drop(change);
        });
        assert_eq!(ended.try_recv(), Ok(()));
    }
}
