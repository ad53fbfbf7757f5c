//! Memory that outlives the process that wrote it: a memfd (memfd_create(2)), mapped as words.
//!
//! Invariant: the memfd cannot shrink (F_SEAL_SHRINK), so access to the mapping never raises SIGBUS,
//! whatever another holder of the descriptor does.

#![expect(unsafe_code, reason = "mmap(2) has no safe form")]

use std::ops::{Deref, Range};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use nix::errno::Errno;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{Error, Result};

const WORD_BYTES: usize = size_of::<AtomicU64>();

/// A memfd of `bytes` zero bytes, whose size is fixed. Memory is taken when it is written.
pub fn create(name: &str, bytes: u64) -> Result<OwnedFd> {
    let failed = |call: &'static str| move |e: rustix::io::Errno| Error::new(call, name, e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create(name, flags).map_err(failed("memfd_create"))?;
    rustix::fs::ftruncate(&memfd, bytes).map_err(failed("set the size of memfd"))?;
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(failed("seal memfd"))?;
    Ok(memfd)
}

/// A memfd with these bytes, sealed against any change.
pub fn sealed(name: &str, bytes: &[u8]) -> Result<OwnedFd> {
    let failed = |call: &'static str| move |e: rustix::io::Errno| Error::new(call, name, e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create(name, flags).map_err(failed("memfd_create"))?;
    let mut written = 0;
    while written < bytes.len() {
        let offset = u64::try_from(written).unwrap_or(u64::MAX);
        written += rustix::io::pwrite(&memfd, &bytes[written..], offset).map_err(failed("write memfd"))?;
    }
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memfd, seals).map_err(failed("seal memfd"))?;
    Ok(memfd)
}

/// A shared mapping of a whole memfd.
#[derive(Debug)]
pub struct SharedWords {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping belongs to this value alone until its drop, and it is only accessed as atomic
// words, which any thread may access at the same time.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps `memfd` for reading and writing. `EINVAL` if it could shrink, or is empty.
    pub fn map(memfd: impl AsFd) -> Result<Self> {
        let failed = |call: &'static str| move |e: rustix::io::Errno| Error::new(call, "memfd", e);
        let seals = rustix::fs::fcntl_get_seals(&memfd).map_err(failed("read the seals of"))?;
        let size = rustix::fs::fstat(&memfd).map_err(failed("stat"))?.st_size;
        let words = usize::try_from(size).unwrap_or_default() / WORD_BYTES;
        if !seals.contains(SealFlags::SHRINK) || words == 0 {
            return Err(Error::new("map", format!("memfd of {size} bytes with {seals:?}"), Errno::EINVAL));
        }
        let (length, protection) = (words * WORD_BYTES, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses an unused address range, so no existing mapping changes.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &memfd, 0)
        };
        let start = start.map_err(failed("map"))?.cast();
        NonNull::new(start)
            .map(|start| Self { start, words })
            .ok_or_else(|| Error::new("map", "memfd at address 0", Errno::EINVAL))
    }

    /// Returns the memory of these words to the kernel: they read as zero afterwards. The range is
    /// narrowed to whole pages.
    pub fn give_back(&self, words: Range<usize>) -> Result<()> {
        let words_per_page = crate::memory::page_bytes() / WORD_BYTES;
        let end = words.end.min(self.words) / words_per_page * words_per_page;
        let start = words.start.next_multiple_of(words_per_page);
        if start >= end {
            return Ok(());
        }
        let (at, length) = (self[start..end].as_ptr(), (end - start) * WORD_BYTES);
        // SAFETY: the range lies in this mapping, and its content is accessed as atomic words alone,
        // for which the change to zero is one more store.
        unsafe { rustix::mm::madvise(at.cast_mut().cast(), length, Advice::LinuxRemove) }
            .map_err(|e| Error::new("return memory of", "memfd", e))
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this many words, is aligned to a page, stays until the drop and
        // cannot lose its memory (F_SEAL_SHRINK). Every bit pattern is a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: this is exactly the range that `map` got from the kernel, and no reference into it
        // outlives this value.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.words * WORD_BYTES) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn sealed_bytes_cannot_be_changed() {
        let memfd = super::sealed("test", b"text").unwrap();
        let mut read = [0; 5];
        assert_eq!(rustix::io::pread(&memfd, &mut read, 0).unwrap(), 4);
        assert_eq!(&read[..4], b"text");
        assert_eq!(rustix::io::pwrite(&memfd, b"x", 0), Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&memfd, 3), Err(rustix::io::Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&memfd, 5), Err(rustix::io::Errno::PERM));
    }

    #[test]
    fn what_one_mapping_stores_another_reads_and_the_size_is_fixed() {
        let memfd = create("test", 1 << 20).unwrap();
        let (one, other) = (SharedWords::map(&memfd).unwrap(), SharedWords::map(&memfd).unwrap());
        assert_eq!(one.len(), (1 << 20) / 8);
        one[7].store(42, Ordering::Release);
        drop(one);
        assert_eq!(other[7].load(Ordering::Acquire), 42);
        for size in [0, 2 << 20] {
            assert_eq!(rustix::fs::ftruncate(&memfd, size), Err(rustix::io::Errno::PERM));
        }
    }

    #[test]
    fn returned_memory_reads_as_zero_and_its_neighbours_stay() {
        let memfd = create("test", 1 << 16).unwrap();
        let words = SharedWords::map(&memfd).unwrap();
        words.iter().for_each(|word| word.store(1, Ordering::Relaxed));
        words.give_back(1..1025).unwrap();
        let zeros: Vec<usize> =
            (0..words.len()).filter(|at| words[*at].load(Ordering::Relaxed) == 0).collect();
        assert_eq!((zeros.first(), zeros.last(), zeros.len()), (Some(&512), Some(&1023), 512));
        words.give_back(0..10).unwrap();
        assert_eq!(words[0].load(Ordering::Relaxed), 1, "less than a page stays");
    }

    #[test]
    fn a_file_that_could_shrink_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        SharedWords::map(&file).unwrap_err();
        let memfd =
            rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memfd, 4096).unwrap();
        let refused = SharedWords::map(&memfd).unwrap_err();
        assert_eq!(refused.errno(), Errno::EINVAL);
    }
}
