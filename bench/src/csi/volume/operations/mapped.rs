//! Content by shared mappings.

#![expect(unsafe_code, reason = "there is no safe mmap")]

use std::fs::{File, OpenOptions};
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::PAGE;

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

/// Stores to a word of each page, in an order that meets each once.
pub(super) fn write_pages(path: &Path, bytes: usize) -> Result<()> {
    with_words(path, bytes, |words| pages(words.len()).for_each(|at| words[at] = 12))
}

/// Loads a word of each page, in the same order.
pub(super) fn read_pages(path: &Path, bytes: usize) -> Result<()> {
    with_words(path, bytes, |words| load_pages(words))
}

/// Of the file's pages, the share that lies behind its predecessor in physical memory
/// (Documentation/admin-guide/mm/pagemap.rst). Only root sees where pages lie.
pub(super) fn pages_in_order(path: &Path, bytes: usize) -> Result<f64> {
    const FRAME: u64 = (1 << 55) - 1;
    let mut entries = vec![0; bytes / PAGE * 8];
    let mut shown = Ok(());
    with_words(path, bytes, |words| {
        load_pages(words);
        let first = words.as_ptr().addr() / PAGE;
        shown = File::open("/proc/self/pagemap")
            .and_then(|map| map.read_exact_at(&mut entries, first as u64 * 8));
    })?;
    shown?;
    let (entries, _) = entries.as_chunks();
    let frames: Vec<u64> = entries.iter().map(|entry| u64::from_ne_bytes(*entry) & FRAME).collect();
    let in_order = frames.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
    Ok(in_order as f64 / frames.len() as f64)
}

fn load_pages(words: &[u64]) {
    std::hint::black_box(pages(words.len()).fold(0, |sum: u64, at| sum.wrapping_add(words[at])));
}

/// Indices of words. `words` fill a power of two of pages.
fn pages(words: usize) -> impl Iterator<Item = usize> {
    const WORDS: usize = PAGE / 8;
    let pages = words / WORDS;
    // Odd, so that each page is met.
    (0..pages).map(move |number| number * 0x9e37_79b1 % pages * WORDS)
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
