//! Content by shared mappings.

#![expect(unsafe_code, reason = "there is no safe mmap")]

use std::fs::OpenOptions;
use std::io::Result;
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Stores to every word of the file, which has `bytes`.
pub(super) fn write(path: &Path, bytes: usize) -> Result<()> {
    with_words(path, bytes, |words| words.fill(11))
}

/// Loads every word of the file, which has `bytes`.
pub(super) fn read(path: &Path, bytes: usize) -> Result<()> {
    with_words(path, bytes, |words| {
        std::hint::black_box(words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word)));
    })
}

fn with_words(path: &Path, bytes: usize, work: impl FnOnce(&mut [u64])) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the mapping is new, page-aligned and `bytes` long, and used only until munmap. The file is
    // as long, and only this process knows it.
    unsafe {
        let at = mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0)?;
        work(std::slice::from_raw_parts_mut(at.cast::<u64>(), bytes / 8));
        munmap(at, bytes)?;
    }
    Ok(())
}
