//! Answers that name a backing file. The keeper has registered it, since that needs CAP_SYS_ADMIN in the
//! first user namespace.

#![expect(unsafe_code, reason = "fuser's owner of such a number has no safe constructor")]

use std::time::Duration;

use fuser::{FileAttr, FileHandle, FopenFlags, Generation, ReplyCreate, ReplyOpen};

use crate::file::BackingId;

/// A file that was created and opened.
pub(super) struct New {
    pub(super) valid_for: Duration,
    pub(super) attributes: FileAttr,
    pub(super) generation: Generation,
    pub(super) handle: FileHandle,
    pub(super) flags: FopenFlags,
}

pub(super) fn opened(reply: ReplyOpen, handle: FileHandle, flags: FopenFlags, BackingId(number): BackingId) {
    // SAFETY: the wrapper only sends the number, which `into_raw` takes from it before its drop would
    // close it. No memory depends on it: the kernel refuses a number that is not open with EIO.
    let backing = unsafe { reply.wrap_backing(number) };
    reply.opened_passthrough(handle, flags, &backing);
    let _stays_open = backing.into_raw();
}

pub(super) fn created(reply: ReplyCreate, new: &New, BackingId(number): BackingId) {
    // SAFETY: as in `opened`.
    let backing = unsafe { reply.wrap_backing(number) };
    let New { valid_for, attributes, generation, handle, flags } = new;
    reply.created_passthrough(valid_for, attributes, *generation, *handle, *flags, &backing);
    let _stays_open = backing.into_raw();
}
