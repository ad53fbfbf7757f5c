//! Shared mappings of files.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

pub(crate) const BYTES: usize = 4 << 20;

/// A shared mapping of the first [`BYTES`] of a file.
#[derive(Debug)]
pub(crate) struct Mapping {
    bytes: &'static [AtomicU8],
}

impl Mapping {
    /// Of a new file without any block.
    pub(crate) fn of_new(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(BYTES as u64).unwrap();
        Self::of(&file)
    }

    /// The file is not shortened before the drop.
    #[expect(unsafe_code, reason = "there is no safe mmap")]
    pub(crate) fn of(file: &File) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the mapping is new.
        let start = unsafe { mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0) };
        // SAFETY: so many bytes are mapped until the drop, which no one outlives that borrows them from here.
        let bytes = unsafe { std::slice::from_raw_parts(start.unwrap().cast::<AtomicU8>(), BYTES) };
        Self { bytes }
    }

    pub(crate) fn store(&self, at: usize) {
        self.bytes[at].store(b'M', Ordering::Relaxed);
    }

    pub(crate) fn load(&self, at: usize) -> u8 {
        self.bytes[at].load(Ordering::Relaxed)
    }
}

impl Drop for Mapping {
    #[expect(unsafe_code, reason = "there is no safe mmap")]
    fn drop(&mut self) {
        let start = self.bytes.as_ptr().cast_mut().cast();
        // SAFETY: it is mapped, and not used any more.
        unsafe { rustix::mm::munmap(start, BYTES).unwrap() };
    }
}
