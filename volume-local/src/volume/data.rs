//! The content of files.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;
use volume_fs::file::{Handle, NodeId, Opened};
use volume_fs::request::{Data, Position};

use super::attributes::clearing_setid_for;
use super::{OpenFile, Running, Volume, holes, synchronise};
use crate::backings::{self, Backings, Entered, Wanted};
use crate::charge;
use crate::errno::{self, Result};
use crate::handles::Closed;
use crate::nodes::stat;

/// The open(2) flags passed to the backing file. Not O_APPEND (pwrite(2) would ignore the offset,
/// which the kernel has computed), nor O_DIRECT (our buffers are not aligned; the request has
/// already bypassed the page cache above).
const PASSED_ON: OFlags = OFlags::RWMODE.union(OFlags::SYNC).union(OFlags::DSYNC).union(OFlags::NOATIME);

/// The modes of fallocate(2) that can be repeated without a difference.
const REPEATABLE: FallocateFlags =
    FallocateFlags::KEEP_SIZE.union(FallocateFlags::PUNCH_HOLE).union(FallocateFlags::ZERO_RANGE);

/// A file up to this size is read by the daemon, with one request, rather than registered with the keeper.
const SMALL_BYTES: u64 = 64 << 10;

impl Volume {
    pub(crate) fn open_file(&self, running: &Running, NodeId(id): NodeId, flags: OFlags) -> Result<Opened> {
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            self.writable()?;
        }
        self.files.admit()?;
        let node = self.nodes.descriptor(id)?;
        let reads_pages = !backings::writes(flags) && !flags.contains(OFlags::DIRECT);
        let flags = self.passed_on(flags);
        let (fd, wanted) = self.open_to_pass(id, &node, flags, reads_pages)?;
        let opened = self.opened(OpenFile { id, flags, fd }, wanted, running.number());
        self.keep_if_removed(id, &node);
        Ok(opened)
    }

    /// The flags for the backing file. With the writeback cache the kernel also reads from a file that is
    /// open for writing, to complete a page (fuse_write_begin).
    pub(super) fn passed_on(&self, flags: OFlags) -> OFlags {
        let flags = flags & PASSED_ON;
        match self.writeback_cache && flags.contains(OFlags::WRONLY) {
            true => both_ways(flags),
            false => flags,
        }
    }

    /// A descriptor of the file, and which way its open is to take: `Passing` if the descriptor is open for
    /// reading and writing, as the keeper wants it.
    fn open_to_pass(
        &self,
        id: u64,
        node: &OwnedFd,
        flags: OFlags,
        reads_pages: bool,
    ) -> Result<(OwnedFd, Wanted<()>)> {
        let Some(passing) = &self.passing else {
            return self.reopen(node, flags).map(|fd| (fd, Wanted::Same));
        };
        let sizes_follow_writes = self.trust.sizes_follow_writes();
        let keeps_pages = reads_pages
            && self.trust.knows_all_changes()
            && passing.may_be_read_by_daemon(id, sizes_follow_writes);
        if keeps_pages && stat(node)?.stx_size <= SMALL_BYTES {
            return self.reopen(node, flags).map(|fd| (fd, Wanted::Daemon { sizes_follow_writes }));
        }
        if passing.would_register(id)
            && let Ok(fd) = self.reopen(node, both_ways(flags))
        {
            return Ok((fd, Wanted::Passing(())));
        }
        // Such as a file with the immutable flag: only the daemon reads it.
        self.reopen(node, flags).map(|fd| (fd, Wanted::Same))
    }

    /// Records an open file; `request`: the number of the request that opened it.
    pub(super) fn opened(&self, file: OpenFile, wanted: Wanted<()>, request: u64) -> Opened {
        let wanted = wanted.map(|()| file.fd.as_fd());
        let enter = |passing: &Backings| passing.enter(file.id, file.flags, wanted);
        let Entered { backing, keeps_pages } =
            self.passing.as_ref().map_or(Entered { backing: None, keeps_pages: true }, enter);
        if backing.is_some() {
            self.outdate_passing(file.id, file.flags);
        }
        let keeps_pages = keeps_pages && self.trust.knows_all_changes();
        let reports_close = self.trust.reports_close(file.flags);
        let (handle, _) = self.files.insert(file, request);
        Opened { handle, backing, keeps_pages, reports_close }
    }

    /// The kernel's attributes of a file that passes through are valid without end until the file is
    /// opened for writing, and again after its last close.
    fn outdate_passing(&self, id: u64, flags: OFlags) {
        if backings::writes(flags) {
            self.trust.outdates(id);
        }
    }

    pub(crate) fn release_file(&self, handle: Handle) {
        let Some(Closed { node, flags, file }) = self.files.remove(handle) else { return };
        if let Some(passing) = &self.passing {
            let flags = OFlags::from_bits_retain(flags);
            self.outdate_passing(node, flags);
            passing.leave(node, flags);
        }
        if let Some(file) = file {
            self.closed(&file);
        }
    }

    pub(crate) fn read(&self, handle: Handle, offset: u64, size: u32) -> Result<Vec<u8>> {
        let file = self.file(handle)?;
        let size = usize::try_from(size).map_err(|_| Errno::INVAL)?;
        let mut data = Vec::with_capacity(size);
        // A short answer means the end of the file to FUSE.
        while data.len() < size {
            let at = offset + data.len() as u64;
            match rustix::io::pread(&file.fd, rustix::buffer::spare_capacity(&mut data), at) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        data.truncate(size);
        self.note_zeros(file.id, offset, &data, size);
        Ok(data)
    }

    /// The number of bytes of `data` that were written: as many as fit. `ENOSPC` if not all of a mapping's
    /// fit.
    pub(crate) fn write(&self, handle: Handle, data: Data<'_>) -> Result<usize> {
        let Data { offset, bytes: data, by, clears_setid, from_pages } = data;
        let file = self.file(handle)?;
        let (fitting, change) = self.make_room(&file, offset, data.len() as u64)?;
        let all = data.len();
        let data = &data[..all.min(usize::try_from(fitting).unwrap_or(usize::MAX))];
        let write = || write_all(&file.fd, offset, data);
        // With our CAP_FSETID, the backing file would keep the bits.
        let written = if clears_setid { clearing_setid_for(by, &file.fd, write) } else { write() };
        self.settle(&file.fd, change);
        if from_pages {
            self.trust.outdates(file.id);
            // The kernel takes no notice of a short answer then (fs/fuse/file.c, fuse_writepage_end), and does not send
            // the rest again.
            return match written? {
                (written, _) if written == all => Ok(written),
                (_, stopped) => Err(stopped.unwrap_or(Errno::NOSPC)),
            };
        }
        written.map(|(written, _)| written)
    }

    /// The errors that close(2) of the backing file would report. Without a request the kernel still
    /// reports those of a shared mapping.
    pub(crate) fn flush(&self, handle: Handle) -> Result<()> {
        if !self.trust.backing_reports_close() {
            return Err(Errno::NOSYS);
        }
        let file = self.file(handle)?;
        let duplicate = self.nodes.with_descriptors(|| rustix::io::fcntl_dupfd_cloexec(&file.fd, 0))?;
        nix::unistd::close(duplicate).map_err(errno::from_nix)
    }

    pub(crate) fn synchronise(&self, handle: Handle, data_only: bool) -> Result<()> {
        let file = self.file(handle)?;
        synchronise(file.fd.as_fd(), data_only)?;
        self.charge_again(file.id, &file.fd);
        Ok(())
    }

    pub(crate) fn allocate(&self, handle: Handle, range: Range<u64>, mode: FallocateFlags) -> Result<()> {
        let file = self.file(handle)?;
        // Others move content, so they must not be repeated. The kernel sends none of them.
        if !REPEATABLE.contains(mode) {
            return Err(Errno::OPNOTSUPP);
        }
        let allocate = || {
            let allocated = rustix::fs::fallocate(&file.fd, mode, range.start, range.end - range.start);
            self.trust.outdates(file.id);
            allocated
        };
        if mode.contains(FallocateFlags::PUNCH_HOLE) {
            return self.settling(file.id, &file.fd, allocate);
        }
        // Blocks beyond the end of a file are not charged, so none are allocated.
        if mode.contains(FallocateFlags::KEEP_SIZE)
            && range.end > charge::whole_blocks(stat(&file.fd)?.stx_size)
        {
            return Err(Errno::OPNOTSUPP);
        }
        let change = self.make_all_room(&file, &range)?;
        let allocated = allocate();
        self.settle(&file.fd, change);
        allocated
    }

    /// `ENOSYS` with the writeback cache: the kernel does not send what it keeps before it asks, so the
    /// answer would show holes where data is. Then the kernel treats the whole file as data.
    pub(crate) fn seek(&self, handle: Handle, position: SeekFrom) -> Result<u64> {
        if self.writeback_cache {
            return Err(Errno::NOSYS);
        }
        let file = self.file(handle)?;
        let hidden = self.may_hide_data(file.id);
        if hidden.is_empty() {
            return rustix::fs::seek(&file.fd, position);
        }
        let size = stat(&file.fd)?.stx_size;
        holes::seek_with(&hidden, size, position, |position| rustix::fs::seek(&file.fd, position))
    }

    pub(crate) fn copy_range(&self, from: Position, to: Position, length: u64) -> Result<usize> {
        let (source, target) = (self.file(from.handle)?, self.file(to.handle)?);
        let (mut from_offset, mut to_offset) = (from.offset, to.offset);
        let length = length.min(stat(&source.fd)?.stx_size.saturating_sub(from.offset));
        let (fitting, change) = self.make_room(&target, to.offset, length)?;
        let copied = rustix::fs::copy_file_range(
            &source.fd,
            Some(&mut from_offset),
            &target.fd,
            Some(&mut to_offset),
            usize::try_from(fitting).unwrap_or(usize::MAX),
        );
        self.settle(&target.fd, change);
        copied
    }
}

/// The flags of an open for reading and writing.
pub(super) fn both_ways(flags: OFlags) -> OFlags {
    (flags - OFlags::RWMODE) | OFlags::RDWR
}

/// The number of bytes that were written, and the error that ended the write before its end.
fn write_all(file: &OwnedFd, offset: u64, data: &[u8]) -> Result<(usize, Option<Errno>)> {
    let mut written = 0;
    while written < data.len() {
        match rustix::io::pwrite(file, &data[written..], offset + written as u64) {
            Ok(0) => break,
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            // The written part stays written: the next write gets the error.
            Err(errno) if written > 0 => return Ok((written, Some(errno))),
            Err(errno) => return Err(errno),
        }
    }
    Ok((written, None))
}
