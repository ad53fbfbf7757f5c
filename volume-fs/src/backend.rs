//! The interface to a volume's storage: a [`Backend`] gets one call for each FUSE request, with
//! FUSE's name, and gives one answer to each.
//!
//! A backend may answer from any thread and at any time. One that works inside the call occupies an
//! event loop meanwhile; one with its own runtime returns at once and answers later.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;

use keeper::daemon::Removed;
use linux::credentials::Caller;
use rustix::fs::{FallocateFlags, OFlags, RenameFlags, SeekFrom, XattrFlags};

use crate::failure::Result;
use crate::figures::{Counted, Figures, Limits, Shrinks};
use crate::file::{
    Attributes, Handle, Known, Listed, LookedUp, Name, NodeId, Opened, OpenedDirectory, Statistics,
};
use crate::notifications::Kernel;
use crate::request::{Changes, Data, Permissions, Position, RequestId, Requester, Special, Xattr};

/// Takes the answer to a request. If it is dropped instead, the application gets `EIO`.
pub trait Reply<T>: FnOnce(Result<T>) + Send + 'static {}

impl<T, F: FnOnce(Result<T>) + Send + 'static> Reply<T> for F {}

/// Takes an answer of bytes; it does not keep them.
pub trait DataReply: FnOnce(Result<&[u8]>) + Send + 'static {}

impl<F: FnOnce(Result<&[u8]>) + Send + 'static> DataReply for F {}

/// A [`Listing`]'s response to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    Yes,
    /// There was no space: the next request repeats the entry.
    No,
}

/// Takes the entries of a directory until it has no space, or until [`Self::end`].
pub trait Listing: Send + 'static {
    fn add(&mut self, entry: &Listed<'_>) -> Taken;
    fn end(self, result: Result<()>);
}

/// Takes entries with their attributes. Each accepted entry counts as a lookup, except `.` and
/// `..`.
pub trait KnownListing: Send + 'static {
    fn add(&mut self, entry: &Listed<'_>, known: &Known) -> Taken;
    fn end(self, result: Result<()>);
}

/// Why a volume cannot be paused: the backend cannot hold writes back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CannotPause(pub String);

/// What a pause holds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Every change.
    All,
    /// What the kernel writes to backing files itself may go on.
    RequestsOnly,
}

/// Pauses for snapshots: a paused volume does not change.
pub trait Pausing: Send + Sync + 'static {
    /// Calls `paused`, from any thread, once nothing changes and the use is known. After that
    /// nothing changes until [`Self::resume`]; applications' changes wait. A pause that cannot be is
    /// ended by [`Self::resume`] too.
    fn pause(
        &self,
        held: Held,
        paused: impl FnOnce(std::result::Result<Counted, CannotPause>) + Send + 'static,
    );

    /// Ends the pause. A pause that has not begun is cancelled.
    fn resume(&self);

    /// What a pause that has not begun waits for, as text.
    fn pause_waits_for(&self) -> &'static str;
}

/// One volume and its storage.
///
/// The kernel has checked permissions before it sends a request (FUSE_POSIX_ACL implies
/// default_permissions). A new file belongs to the caller.
pub trait Backend: Pausing {
    /// Finds the file with this name.
    fn lookup(&self, id: RequestId, name: Name<'_>, reply: impl Reply<LookedUp>);
    /// The kernel has forgotten this many lookups. Must never wait.
    fn forget(&self, node: NodeId, lookups: u64);

    fn getattr(&self, node: NodeId, handle: Option<Handle>, reply: impl Reply<Attributes>);
    fn setattr(
        &self,
        by: Caller,
        node: NodeId,
        handle: Option<Handle>,
        changes: Changes,
        reply: impl Reply<Attributes>,
    );
    /// `size` 0 asks for the length of the value.
    fn getxattr(&self, node: NodeId, name: &OsStr, size: usize, reply: impl Reply<Xattr>);
    fn setxattr(
        &self,
        by: Requester,
        node: NodeId,
        name: &OsStr,
        value: &[u8],
        flags: XattrFlags,
        reply: impl Reply<()>,
    );
    /// The names, each followed by a zero byte. `size` 0 asks for their length.
    fn listxattr(&self, node: NodeId, size: usize, reply: impl Reply<Xattr>);
    fn removexattr(&self, id: RequestId, node: NodeId, name: &OsStr, reply: impl Reply<()>);

    fn readlink(&self, node: NodeId, reply: impl DataReply);
    fn mknod(
        &self,
        by: Requester,
        name: Name<'_>,
        special: Special,
        permissions: Permissions,
        reply: impl Reply<Known>,
    );
    fn mkdir(&self, by: Requester, name: Name<'_>, permissions: Permissions, reply: impl Reply<Known>);
    fn symlink(&self, by: Requester, name: Name<'_>, target: &OsStr, reply: impl Reply<Known>);
    fn link(&self, id: RequestId, node: NodeId, name: Name<'_>, reply: impl Reply<Known>);
    fn unlink(&self, by: Requester, name: Name<'_>, reply: impl Reply<()>);
    fn rmdir(&self, by: Requester, name: Name<'_>, reply: impl Reply<()>);
    fn rename(&self, by: Requester, from: Name<'_>, to: Name<'_>, flags: RenameFlags, reply: impl Reply<()>);

    /// Creates a file and opens it.
    fn create(
        &self,
        by: Requester,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        reply: impl Reply<(Known, Opened)>,
    );
    fn open(&self, id: RequestId, node: NodeId, flags: OFlags, reply: impl Reply<Opened>);
    /// Fewer bytes than `size` mean the end of the file.
    fn read(&self, handle: Handle, offset: u64, size: u32, reply: impl DataReply);
    /// Answers the number of bytes written.
    fn write(&self, handle: Handle, data: Data<'_>, reply: impl Reply<usize>);
    fn copy_file_range(&self, from: Position, to: Position, length: u64, reply: impl Reply<usize>);
    fn fallocate(&self, handle: Handle, range: Range<u64>, mode: FallocateFlags, reply: impl Reply<()>);
    /// Only data and holes: the kernel handles other positions.
    fn lseek(&self, handle: Handle, position: SeekFrom, reply: impl Reply<u64>);
    /// One descriptor of this handle was closed. `ENOSYS`: close(2) never has anything to report, and
    /// the kernel need not ask again.
    fn flush(&self, handle: Handle, reply: impl Reply<()>);
    fn fsync(&self, handle: Handle, data_only: bool, reply: impl Reply<()>);
    /// The handle is no longer used. Must never wait.
    fn release(&self, handle: Handle, reply: impl Reply<()>);

    fn opendir(&self, by: Requester, node: NodeId, reply: impl Reply<OpenedDirectory>);
    /// The entries from `offset` on: 0, or an entry's [`Listed::next`].
    fn readdir(&self, handle: Handle, offset: u64, listing: impl Listing);
    fn readdirplus(&self, node: NodeId, handle: Handle, offset: u64, listing: impl KnownListing);
    fn fsyncdir(&self, handle: Handle, data_only: bool, reply: impl Reply<()>);
    /// The handle is no longer used. Must never wait.
    fn releasedir(&self, handle: Handle, reply: impl Reply<()>);

    fn statfs(&self, reply: impl Reply<Statistics>);

    /// Requests follow after this call, and the process can only serve. Starts the threads that a
    /// backend needs in addition to the event loops.
    fn start(self: Arc<Self>, kernel: Kernel) -> crate::Result<()>;
    /// The volume's figures. Must never wait.
    fn figures(&self) -> Figures;
    /// Files that are open for writing, with their generations, by ascending id from the one after `after`
    /// on; at most `most`. An error if the generation of one cannot be found.
    fn written(&self, after: NodeId, most: usize) -> std::result::Result<Vec<(NodeId, u64)>, String>;
    /// Sets both limits or none; unchanged limits are a success. Must never wait.
    fn set_limits(&self, wanted: Limits) -> std::result::Result<(), Shrinks>;
    /// Another keeper holds the removed files from now on: it gets those that the earlier one held.
    /// Returns how many. May wait for the keeper.
    fn replace_keeper(&self, keeper: Removed) -> std::result::Result<usize, String>;
    /// The volume was unmounted.
    fn end(&self);
}
