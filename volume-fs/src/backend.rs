//! The one seam to what a volume is kept in: a [`Backend`] gets a call for each FUSE request,
//! named as FUSE names it, and gives one answer to each.
//!
//! A backend answers from any thread, when it likes. One that does its work in the call keeps an
//! event loop busy meanwhile; one with a runtime of its own returns at once, and answers later.

use std::ffi::OsStr;
use std::sync::Arc;

use linux::credentials::Caller;
use rustix::fs::{FallocateFlags, OFlags, RenameFlags, SeekFrom, XattrFlags};

use crate::failure::Result;
use crate::figures::{Counted, Figures, Limits, Shrinks};
use crate::file::{Attributes, Handle, Known, Listed, Name, NodeId, Statistics};
use crate::notifications::Kernel;
use crate::request::{Changes, Data, Permissions, Range, Special, Xattr};

/// Takes the answer to a request. Where it is dropped instead, the application gets `EIO`.
pub trait Reply<T>: FnOnce(Result<T>) + Send + 'static {}

impl<T, F: FnOnce(Result<T>) + Send + 'static> Reply<T> for F {}

/// Takes an answer of bytes, which it does not keep.
pub trait DataReply: FnOnce(Result<&[u8]>) + Send + 'static {}

impl<F: FnOnce(Result<&[u8]>) + Send + 'static> DataReply for F {}

/// What a [`Listing`] says to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    Yes,
    /// There was no room: the entry comes again with the next request.
    No,
}

/// Takes the entries of a directory, until it has no room or [`Self::end`].
pub trait Listing: Send + 'static {
    fn add(&mut self, entry: &Listed<'_>) -> Taken;
    fn end(self, result: Result<()>);
}

/// Takes entries with their attributes. Each entry that is taken counts as a lookup, but for `.`
/// and `..`.
pub trait KnownListing: Send + 'static {
    fn add(&mut self, entry: &Listed<'_>, known: &Known) -> Taken;
    fn end(self, result: Result<()>);
}

/// Why a volume cannot be paused: the backend has no means to hold writes back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CannotPause(pub String);

/// How a snapshot is cut: nothing changes while a volume is paused.
pub trait Pausing: Send + Sync + 'static {
    /// Calls `paused` once nothing changes and the use is known, from any thread. Until
    /// [`Self::resume`] nothing changes then. Changes that applications ask for meanwhile wait.
    fn pause(&self, paused: impl FnOnce(std::result::Result<Counted, CannotPause>) + Send + 'static);

    /// Lets changes go on. A pause that has not begun does not begin any more.
    fn resume(&self);

    /// What a pause that has not begun waits for, in words.
    fn pause_waits_for(&self) -> &'static str;
}

/// One volume, and where it is kept.
///
/// The kernel has checked permissions before a request is sent (FUSE_POSIX_ACL implies
/// default_permissions). What is created belongs to its caller.
pub trait Backend: Pausing {
    /// What is behind a name.
    fn lookup(&self, name: Name<'_>, reply: impl Reply<Known>);
    /// The kernel has forgotten so many lookups. Must never wait.
    fn forget(&self, node: NodeId, lookups: u64);

    fn getattr(&self, node: NodeId, handle: Option<Handle>, reply: impl Reply<Attributes>);
    fn setattr(&self, node: NodeId, handle: Option<Handle>, changes: Changes, reply: impl Reply<Attributes>);
    /// `size` 0 asks how many bytes the value has.
    fn getxattr(&self, node: NodeId, name: &OsStr, size: usize, reply: impl Reply<Xattr>);
    fn setxattr(&self, node: NodeId, name: &OsStr, value: &[u8], flags: XattrFlags, reply: impl Reply<()>);
    /// Names, each with a zero behind it. `size` 0 asks how many bytes they have.
    fn listxattr(&self, node: NodeId, size: usize, reply: impl Reply<Xattr>);
    fn removexattr(&self, node: NodeId, name: &OsStr, reply: impl Reply<()>);

    fn readlink(&self, node: NodeId, reply: impl DataReply);
    fn mknod(
        &self,
        name: Name<'_>,
        special: Special,
        permissions: Permissions,
        caller: Caller,
        reply: impl Reply<Known>,
    );
    fn mkdir(&self, name: Name<'_>, permissions: Permissions, caller: Caller, reply: impl Reply<Known>);
    fn symlink(&self, name: Name<'_>, target: &OsStr, caller: Caller, reply: impl Reply<Known>);
    fn link(&self, node: NodeId, name: Name<'_>, reply: impl Reply<Known>);
    fn unlink(&self, name: Name<'_>, caller: Caller, reply: impl Reply<()>);
    fn rmdir(&self, name: Name<'_>, caller: Caller, reply: impl Reply<()>);
    fn rename(&self, from: Name<'_>, to: Name<'_>, flags: RenameFlags, caller: Caller, reply: impl Reply<()>);

    /// Creates a file and opens it.
    fn create(
        &self,
        name: Name<'_>,
        permissions: Permissions,
        flags: OFlags,
        caller: Caller,
        reply: impl Reply<(Known, Handle)>,
    );
    fn open(&self, node: NodeId, flags: OFlags, reply: impl Reply<Handle>);
    /// Fewer bytes than `size` are the end of the file.
    fn read(&self, handle: Handle, offset: u64, size: u32, reply: impl DataReply);
    /// Answers how many bytes were written.
    fn write(&self, handle: Handle, data: Data<'_>, reply: impl Reply<usize>);
    fn copy_file_range(&self, from: Range, to: Range, length: u64, reply: impl Reply<usize>);
    /// `range`: offset and length.
    fn fallocate(&self, handle: Handle, range: (u64, u64), mode: FallocateFlags, reply: impl Reply<()>);
    /// Data and holes alone: other positions are the kernel's affair.
    fn lseek(&self, handle: Handle, position: SeekFrom, reply: impl Reply<u64>);
    /// One of the descriptors of this handle is closed.
    fn flush(&self, handle: Handle, reply: impl Reply<()>);
    fn fsync(&self, handle: Handle, data_only: bool, reply: impl Reply<()>);
    /// Nothing uses the handle any more. Must never wait.
    fn release(&self, handle: Handle, reply: impl Reply<()>);

    fn opendir(&self, node: NodeId, reply: impl Reply<Handle>);
    /// The entries from `offset` on: 0, or [`Listed::next`] of one.
    fn readdir(&self, handle: Handle, offset: u64, listing: impl Listing);
    fn readdirplus(&self, node: NodeId, handle: Handle, offset: u64, listing: impl KnownListing);
    fn fsyncdir(&self, handle: Handle, data_only: bool, reply: impl Reply<()>);
    /// Nothing uses the handle any more. Must never wait.
    fn releasedir(&self, handle: Handle, reply: impl Reply<()>);

    fn statfs(&self, reply: impl Reply<Statistics>);

    /// From now on requests come; the process can do nothing but serve. Starts the threads that
    /// a backend needs beside the event loops.
    fn start(self: Arc<Self>, kernel: Kernel) -> crate::Result<()>;
    /// What is shown of the volume. Must never wait.
    fn figures(&self) -> Figures;
    /// Both limits or none; the same again is no change. Must never wait.
    fn set_limits(&self, wanted: Limits) -> std::result::Result<(), Shrinks>;
    /// The volume is unmounted.
    fn end(&self);
}
