//! Reads and writes through a shared mapping of a file.
#![expect(unsafe_code, reason = "mmap(2) has no safe form")]

use std::fs::File;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

/// The first `length` bytes of a file. This process alone changes its length, and not while this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<u8>,
    length: usize,
}

impl Mapping {
    pub(crate) fn new(file: &File, length: usize) -> Result<Self> {
        ensure!(length > 0, "an empty mapping");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses changes no memory of ours.
        let at = unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0) };
        let at = NonNull::new(at.context("mmap")?.cast()).context("a mapping at address zero")?;
        Ok(Self { at, length })
    }

    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.length);
        // SAFETY: the range is inside the mapping, which nothing else refers to.
        unsafe { self.at.add(offset).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) }
    }

    pub(crate) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.length);
        let mut bytes = vec![0; length];
        // SAFETY: the range is inside the mapping, and `bytes` is as long.
        unsafe { self.at.add(offset).copy_to_nonoverlapping(NonNull::from(&mut bytes[..]).cast(), length) }
        bytes
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        // SAFETY: the range is the whole mapping.
        unsafe { msync(self.at.as_ptr().cast(), self.length, MsyncFlags::SYNC) }.context("msync")
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and nothing refers to it any more.
        let _unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.length) };
    }
}
