//! The [`Backend`]: each request is a call of the volume, which works in the event loop that read
//! the request.
//!
//! Every change of the volume passes the [`Gate`], except RELEASE and FORGET, which must never
//! wait.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use linux::credentials::Caller;
use rustix::fs::{AtFlags, FallocateFlags, OFlags, RenameFlags, SeekFrom, XattrFlags};
use rustix::io::Errno;
use volume_fs::backend::{Backend, CannotPause, DataReply, KnownListing, Listing, Pausing, Reply};
use volume_fs::failure::Failure;
use volume_fs::figures::{Counted, Figures, Limits, Shrinks};
use volume_fs::file::{Attributes, Handle, Known, Name, NodeId, Statistics};
use volume_fs::gate::{Gate, Shut};
use volume_fs::notifications::Kernel;
use volume_fs::request::{Changes, Data, Permissions, Position, Special, Xattr};
use volume_fs::service::Terms;

use crate::capacity::{CountedByDaemon, Policy};
use crate::errno::Result;
use crate::nodes::NodeLimits;
use crate::pruner;
use crate::usage_file::BootId;
use crate::volume::Volume;

/// The driver's assignment, checked.
#[derive(Debug)]
pub struct Assigned {
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
    capacity: Arc<dyn Policy>,
}

impl Local {
    pub(crate) fn open(assigned: Assigned, terms: Terms, boot: Option<BootId>) -> volume_fs::Result<Self> {
        let capacity = CountedByDaemon::open(assigned.usage_file, boot, terms.limits, terms.event_loops)?;
        let gate = Arc::new(Gate::new(capacity.must_prepare()));
        let limits = NodeLimits {
            descriptors: terms.descriptor_limit,
            known: terms.known_inode_limit,
            event_loops: terms.event_loops,
        };
        let Terms { descriptors, read_only, .. } = terms;
        let volume = Volume::open(assigned.directory, read_only, descriptors, limits, capacity.quota())?;
        Ok(Self { volume: Arc::new(volume), gate, capacity: Arc::new(capacity) })
    }

    /// The state that a successor of this daemon needs. It is consistent only while the volume is
    /// paused and nothing is opened or looked up.
    pub fn state(&self) -> proto::local::State {
        self.volume.state()
    }

    /// Makes a change, now or when the gate opens.
    fn change(&self, change: impl FnOnce(&Volume) + Send + 'static) {
        match self.gate.enter() {
            Ok(_pass) => change(&self.volume),
            Err(shut) => self.change_later(shut, 0, change),
        }
    }

    /// `bytes`: the memory that the change keeps until then.
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
    fn pause(&self, paused: impl FnOnce(std::result::Result<Counted, CannotPause>) + Send + 'static) {
        let capacity = Arc::clone(&self.capacity);
        self.gate.pause(move || paused(Ok(capacity.usage().used)));
    }

    fn resume(&self) {
        self.gate.resume();
    }

    fn pause_waits_for(&self) -> &'static str {
        if self.capacity.usage().counting { "the count of its use" } else { "changes under way" }
    }
}

impl Backend for Local {
    fn lookup(&self, name: Name<'_>, reply: impl Reply<Known>) {
        reply(answer(self.volume.look_up(name)));
    }

    fn forget(&self, node: NodeId, lookups: u64) {
        self.volume.forget(node, lookups);
    }

    fn getattr(&self, node: NodeId, handle: Option<Handle>, reply: impl Reply<Attributes>) {
        reply(answer(self.volume.attributes(node, handle)));
    }

    fn setattr(&self, node: NodeId, handle: Option<Handle>, changes: Changes, reply: impl Reply<Attributes>) {
        self.change(move |volume| reply(answer(volume.change(node, handle, &changes))));
    }

    fn getxattr(&self, node: NodeId, name: &OsStr, size: usize, reply: impl Reply<Xattr>) {
        reply(answer(self.volume.xattr(node, name, size)));
    }

    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: XattrFlags, reply: impl Reply<()>) {
        let (name, value) = (name.to_owned(), value.to_vec());
        self.change(move |volume| reply(answer(volume.set_xattr(node, &name, &value, flags))));
    }

    fn listxattr(&self, node: NodeId, size: usize, reply: impl Reply<Xattr>) {
        reply(answer(self.volume.xattr_names(node, size)));
    }

    fn removexattr(&self, node: NodeId, name: &OsStr, reply: impl Reply<()>) {
        let name = name.to_owned();
        self.change(move |volume| reply(answer(volume.remove_xattr(node, &name))));
    }

    fn readlink(&self, node: NodeId, reply: impl DataReply) {
        answer_data(self.volume.read_link(node), reply);
    }

    fn mknod(
        &self,
        name: Name<'_>,
        special: Special,
        permissions: Permissions,
        caller: Caller,
        reply: impl Reply<Known>,
    ) {
        let (directory, name) = owned(name);
        self.change(move |volume| {
            let name = Name { directory, name: &name };
            reply(answer(volume.make_special(name, special, permissions, caller)));
        });
    }

    fn mkdir(&self, name: Name<'_>, permissions: Permissions, caller: Caller, reply: impl Reply<Known>) {
        let (directory, name) = owned(name);
        self.change(move |volume| {
            reply(answer(volume.make_directory(Name { directory, name: &name }, permissions, caller)));
        });
    }

    fn symlink(&self, name: Name<'_>, target: &OsStr, caller: Caller, reply: impl Reply<Known>) {
        let ((directory, name), target) = (owned(name), target.to_owned());
        self.change(move |volume| {
            reply(answer(volume.make_symlink(Name { directory, name: &name }, &target, caller)));
        });
    }

    fn link(&self, node: NodeId, name: Name<'_>, reply: impl Reply<Known>) {
        let (directory, name) = owned(name);
        self.change(move |volume| reply(answer(volume.link(node, Name { directory, name: &name }))));
    }

    fn unlink(&self, name: Name<'_>, caller: Caller, reply: impl Reply<()>) {
        let (directory, name) = owned(name);
        self.change(move |volume| {
            let name = Name { directory, name: &name };
            reply(answer(volume.remove(name, AtFlags::empty(), caller.uid)));
        });
    }

    fn rmdir(&self, name: Name<'_>, caller: Caller, reply: impl Reply<()>) {
        let (directory, name) = owned(name);
        self.change(move |volume| {
            let name = Name { directory, name: &name };
            reply(answer(volume.remove(name, AtFlags::REMOVEDIR, caller.uid)));
        });
    }

    fn rename(
        &self,
        from: Name<'_>,
        to: Name<'_>,
        flags: RenameFlags,
        caller: Caller,
        reply: impl Reply<()>,
    ) {
        let ((from_directory, from), (to_directory, to)) = (owned(from), owned(to));
        self.change(move |volume| {
            let from = Name { directory: from_directory, name: &from };
            let to = Name { directory: to_directory, name: &to };
            reply(answer(volume.rename(from, to, flags, caller.uid)));
        });
    }

    fn create(
        &self,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        caller: Caller,
        reply: impl Reply<(Known, Handle)>,
    ) {
        let (directory, name) = owned(name);
        self.change(move |volume| {
            let name = Name { directory, name: &name };
            reply(answer(volume.create(name, permissions, flags, caller)));
        });
    }

    fn open(&self, node: NodeId, flags: OFlags, reply: impl Reply<Handle>) {
        reply(answer(self.volume.open_file(node, flags)));
    }

    fn read(&self, handle: Handle, offset: u64, size: u32, reply: impl DataReply) {
        answer_data(self.volume.read(handle, offset, size), reply);
    }

    fn write(&self, handle: Handle, data: Data<'_>, reply: impl Reply<usize>) {
        match self.gate.enter() {
            Ok(_pass) => reply(answer(self.volume.write(handle, data))),
            // Only a change that waits is copied.
            Err(shut) => {
                let Data { offset, clears_setid, .. } = data;
                let bytes = data.bytes.to_vec();
                self.change_later(shut, bytes.len(), move |volume| {
                    reply(answer(volume.write(handle, Data { offset, bytes: &bytes, clears_setid })));
                });
            }
        }
    }

    fn copy_file_range(&self, from: Position, to: Position, length: u64, reply: impl Reply<usize>) {
        self.change(move |volume| reply(answer(volume.copy_range(from, to, length))));
    }

    fn fallocate(&self, handle: Handle, range: Range<u64>, mode: FallocateFlags, reply: impl Reply<()>) {
        self.change(move |volume| reply(answer(volume.allocate(handle, range, mode))));
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

    fn opendir(&self, node: NodeId, reply: impl Reply<Handle>) {
        reply(answer(self.volume.open_directory(node)));
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
        pruner::start(Arc::clone(&self.volume), kernel)
            .map_err(|source| volume_fs::Error::Thread { name: "pruner", source })?;
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

    fn set_limits(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
        self.capacity.expand(wanted)
    }

    /// If no change is in progress, the next daemon need not count.
    fn end(&self) {
        self.gate.pause(|| {});
        if self.gate.is_still() {
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
        _ => errno.into(),
    }
}
