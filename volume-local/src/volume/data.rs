//! The content of files.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use volume_fs::file::{Handle, NodeId, Opened};
use volume_fs::request::{Data, Position};

use super::{OpenFile, Running, Volume, clearing_setid, synchronise};
use crate::charge;
use crate::errno::{self, Result};
use crate::nodes::stat;

/// The open(2) flags passed to the backing file. Not O_APPEND (pwrite(2) would ignore the offset,
/// which the kernel has computed), nor O_DIRECT (our buffers are not aligned; the request has
/// already bypassed the page cache above).
pub(super) const PASSED_ON: OFlags =
    OFlags::RWMODE.union(OFlags::SYNC).union(OFlags::DSYNC).union(OFlags::NOATIME);

/// The modes of fallocate(2) that can be repeated without a difference.
const REPEATABLE: FallocateFlags =
    FallocateFlags::KEEP_SIZE.union(FallocateFlags::PUNCH_HOLE).union(FallocateFlags::ZERO_RANGE);

impl Volume {
    pub(crate) fn open_file(&self, running: &Running, NodeId(id): NodeId, flags: OFlags) -> Result<Opened> {
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            self.writable()?;
        }
        self.files.admit()?;
        let node = self.nodes.descriptor(id)?;
        let flags = flags & PASSED_ON;
        let fd = self.reopen(&node, flags)?;
        let handle = self.files.insert(OpenFile { id, flags, fd }, running.number());
        self.keep_if_removed(id, &node);
        Ok(Opened::by_daemon(handle))
    }

    pub(crate) fn release_file(&self, handle: Handle) {
        if let Some(file) = self.files.remove(handle) {
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
                Err(errno) if data.is_empty() => return Err(errno),
                Err(_) => break,
            }
        }
        data.truncate(size);
        Ok(data)
    }

    /// The number of bytes of `data` that were written: as many as fit.
    pub(crate) fn write(&self, handle: Handle, data: Data<'_>) -> Result<usize> {
        let Data { offset, bytes: data, clears_setid, is_mapped } = data;
        let file = self.file(handle)?;
        let (fitting, change) = self.make_room(&file, offset, data.len() as u64)?;
        let data = &data[..data.len().min(usize::try_from(fitting).unwrap_or(usize::MAX))];
        let write = || write_all(&file.fd, offset, data);
        // With our CAP_FSETID, the backing file would keep the bits.
        let written = if clears_setid && has_setid(&file.fd)? { clearing_setid(write) } else { write() };
        self.settle(&file.fd, change);
        if is_mapped {
            self.trust.outdates(file.id);
        }
        written
    }

    /// The errors that close(2) of the backing file would report.
    pub(crate) fn flush(&self, handle: Handle) -> Result<()> {
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

    pub(crate) fn seek(&self, handle: Handle, position: SeekFrom) -> Result<u64> {
        rustix::fs::seek(&self.file(handle)?.fd, position)
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

fn has_setid(file: &OwnedFd) -> Result<bool> {
    let mode = Mode::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    Ok(mode.intersects(Mode::SUID | Mode::SGID))
}

fn write_all(file: &OwnedFd, offset: u64, data: &[u8]) -> Result<usize> {
    let mut written = 0;
    while written < data.len() {
        match rustix::io::pwrite(file, &data[written..], offset + written as u64) {
            Ok(0) => break,
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            // The written part stays written: the next write gets the error.
            Err(_) if written > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(written)
}
