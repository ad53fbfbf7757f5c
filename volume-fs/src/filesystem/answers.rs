//! Sends a backend's answers as fuser's replies, and counts the requests.

use std::sync::Arc;
use std::time::Duration;

use fuser::{
    Errno as FuseErrno, FileHandle, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr,
};
use rustix::io::Errno;

use super::convert::{fuse_attributes, fuse_errno, fuse_kind, no_file};
use super::passthrough;
use crate::backend::{DataReply, KnownListing, Listing, Reply, Taken};
use crate::failure::Result;
use crate::file::{
    Attributes, Handle, Known, Listed, LookedUp, Opened, OpenedDirectory, Statistics, Validity,
};
use crate::metrics::{Call, Metrics};
use crate::request::Xattr;

pub(super) fn empty(call: Call, reply: ReplyEmpty) -> impl Reply<()> {
    move |result| match call.ended(result) {
        Ok(()) => reply.ok(),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn entry(call: Call, reply: ReplyEntry) -> impl Reply<Known> {
    move |result: Result<Known>| match call.ended(result) {
        Ok(known) => send_entry(reply, &known),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

fn send_entry(reply: ReplyEntry, Known { attributes, generation, name_valid }: &Known) {
    let (attributes_valid, name_valid) = (attributes.valid.duration(), name_valid.duration());
    let (attributes, generation) = (fuse_attributes(attributes), Generation(*generation));
    reply.entry_with_ttls(&attributes_valid, &name_valid, &attributes, generation);
}

/// A missing name that the kernel may remember is an entry with node id 0 (linux/fuse.h, struct
/// fuse_entry_out). It counts as a failed request, like one that the kernel may not remember.
pub(super) fn looked_up(call: Call, reply: ReplyEntry) -> impl Reply<LookedUp> {
    move |result: Result<LookedUp>| match result {
        Ok(LookedUp::Found(known)) => {
            if let Ok(known) = call.ended(Ok(known)) {
                send_entry(reply, &known);
            }
        }
        Ok(LookedUp::Missing(valid)) => {
            let _counted = call.ended::<()>(Err(Errno::NOENT.into()));
            match valid {
                Validity::Second => reply.error(FuseErrno::ENOENT),
                Validity::Endless => reply.entry(&valid.duration(), &no_file(), Generation(0)),
            }
        }
        Err(failure) => {
            let errno = fuse_errno(failure.errno());
            let _counted = call.ended::<()>(Err(failure));
            reply.error(errno);
        }
    }
}

pub(super) fn attributes(call: Call, reply: ReplyAttr) -> impl Reply<Attributes> {
    move |result| match call.ended(result) {
        Ok(attributes) => reply.attr(&attributes.valid.duration(), &fuse_attributes(&attributes)),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn opened_directory(call: Call, reply: ReplyOpen) -> impl Reply<OpenedDirectory> {
    move |result: Result<OpenedDirectory>| match call.ended(result) {
        Ok(OpenedDirectory { handle: Handle(number), keeps_listing }) => {
            let mut flags = FopenFlags::empty();
            flags.set(FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE, keeps_listing);
            reply.opened(FileHandle(number), flags);
        }
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn opened(call: Call, reply: ReplyOpen) -> impl Reply<Opened> {
    move |result: Result<Opened>| match call.ended(result) {
        Ok(opened @ Opened { handle: Handle(number), backing, .. }) => {
            let (handle, flags) = (FileHandle(number), flags(opened));
            match backing {
                Some(backing) => passthrough::opened(reply, handle, flags, backing),
                None => reply.opened(handle, flags),
            }
        }
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

/// Linux refuses FOPEN_KEEP_CACHE with a backing file (fs/fuse/iomode.c).
fn flags(opened: Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.keeps_pages && opened.backing.is_none());
    flags.set(FopenFlags::FOPEN_NOFLUSH, !opened.reports_close);
    flags
}

pub(super) fn created(call: Call, reply: ReplyCreate) -> impl Reply<(Known, Opened)> {
    move |result: Result<(Known, Opened)>| match call.ended(result) {
        Ok((known, opened @ Opened { handle: Handle(number), backing, .. })) => {
            let Known { attributes, generation, .. } = &known;
            let new = passthrough::New {
                valid_for: of_both(&known),
                attributes: fuse_attributes(attributes),
                generation: Generation(*generation),
                handle: FileHandle(number),
                flags: flags(opened),
            };
            match backing {
                Some(backing) => passthrough::created(reply, &new, backing),
                None => {
                    reply.created(&new.valid_for, &new.attributes, new.generation, new.handle, new.flags);
                }
            }
        }
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn data(call: Call, reply: ReplyData) -> impl DataReply {
    move |result: Result<&[u8]>| match call.ended(result) {
        Ok(data) => reply.data(data),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn read(call: Call, metrics: Arc<Metrics>, reply: ReplyData) -> impl DataReply {
    move |result: Result<&[u8]>| match call.ended(result) {
        Ok(data) => {
            metrics.read(data.len());
            reply.data(data);
        }
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

/// `metrics` counts the bytes that users wrote.
pub(super) fn written(call: Call, metrics: Option<Arc<Metrics>>, reply: ReplyWrite) -> impl Reply<usize> {
    move |result| match call.ended(result) {
        Ok(length) => {
            if let Some(metrics) = metrics {
                metrics.written(length);
            }
            match u32::try_from(length) {
                Ok(length) => reply.written(length),
                Err(_) => reply.error(FuseErrno::EOVERFLOW),
            }
        }
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn position(call: Call, reply: ReplyLseek) -> impl Reply<u64> {
    move |result: Result<u64>| match call.ended(result).map(i64::try_from) {
        Ok(Ok(found)) => reply.offset(found),
        Ok(Err(_)) => reply.error(FuseErrno::EOVERFLOW),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn statistics(call: Call, reply: ReplyStatfs) -> impl Reply<Statistics> {
    move |result: Result<Statistics>| match call.ended(result) {
        Ok(now) => reply.statfs(
            now.blocks,
            now.free_blocks,
            now.available_blocks,
            now.inodes,
            now.free_inodes,
            saturated(now.block_bytes),
            saturated(now.longest_name),
            saturated(now.fragment_bytes),
        ),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

pub(super) fn xattr(call: Call, reply: ReplyXattr) -> impl Reply<Xattr> {
    move |result| match call.ended(result) {
        Ok(Xattr::Size(size)) => match u32::try_from(size) {
            Ok(size) => reply.size(size),
            Err(_) => reply.error(FuseErrno::E2BIG),
        },
        Ok(Xattr::Value(value)) => reply.data(&value),
        Err(failure) => reply.error(fuse_errno(failure.errno())),
    }
}

/// The answer to readdir.
pub(super) struct Entries {
    pub(super) call: Call,
    pub(super) reply: ReplyDirectory,
}

impl Listing for Entries {
    fn add(&mut self, entry: &Listed<'_>) -> Taken {
        taken_unless(self.reply.add(INodeNo(entry.id.0), entry.next, fuse_kind(entry.kind), entry.name))
    }

    fn end(self, result: Result<()>) {
        match self.call.ended(result) {
            Ok(()) => self.reply.ok(),
            Err(failure) => self.reply.error(fuse_errno(failure.errno())),
        }
    }
}

/// The answer to readdirplus.
pub(super) struct KnownEntries {
    pub(super) call: Call,
    pub(super) reply: ReplyDirectoryPlus,
}

impl KnownListing for KnownEntries {
    fn add(&mut self, entry: &Listed<'_>, known: &Known) -> Taken {
        let Known { attributes, generation, .. } = known;
        taken_unless(self.reply.add(
            INodeNo(attributes.id.0),
            entry.next,
            entry.name,
            &of_both(known),
            &fuse_attributes(attributes),
            Generation(*generation),
        ))
    }

    fn end(self, result: Result<()>) {
        match self.call.ended(result) {
            Ok(()) => self.reply.ok(),
            Err(failure) => self.reply.error(fuse_errno(failure.errno())),
        }
    }
}

/// fuser has one time for name and attributes here.
fn of_both(known: &Known) -> Duration {
    known.attributes.valid.min(known.name_valid).duration()
}

fn taken_unless(full: bool) -> Taken {
    if full { Taken::No } else { Taken::Yes }
}

fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
