//! Shared mappings of files.

use std::fs::{File, OpenOptions};
use std::path::Path;

pub(crate) const BYTES: usize = 4 << 20;

/// A shared mapping of a file.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut std::ffi::c_void,
}

impl Mapping {
    /// Of a new file without any block.
    pub(crate) fn of_new(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(BYTES as u64).unwrap();
        Self::of(&file)
    }

    /// The file has [`BYTES`].
    #[expect(unsafe_code, reason = "there is no safe mmap")]
    pub(crate) fn of(file: &File) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the mapping is new, and is used only until the drop; the file is not shortened.
        let start = unsafe { mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0) };
        Self { start: start.unwrap() }
    }

    #[expect(unsafe_code, reason = "there is no safe mmap")]
    pub(crate) fn store(&self, at: usize) {
        assert!(at < BYTES);
        // SAFETY: inside of the mapping, which no one else uses.
        unsafe { self.start.cast::<u8>().add(at).write_volatile(b'M') };
    }

    #[expect(unsafe_code, reason = "there is no safe mmap")]
    pub(crate) fn load(&self, at: usize) -> u8 {
        assert!(at < BYTES);
        // SAFETY: inside of the mapping; the file changes only by system calls.
        unsafe { self.start.cast::<u8>().add(at).read_volatile() }
    }
}

impl Drop for Mapping {
    #[expect(unsafe_code, reason = "there is no safe mmap")]
    fn drop(&mut self) {
        // SAFETY: it is mapped, and not used any more.
        unsafe { rustix::mm::munmap(self.start, BYTES).unwrap() };
    }
}
