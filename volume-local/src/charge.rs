//! The space that a file takes, and what a write adds to it.
//!
//! A file is charged for its blocks, as du(1) counts them, but not for blocks beyond its end,
//! except those that its extended attributes can take: xfs allocates blocks beyond the end ahead
//! and frees them later.

use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::{FileType, SeekFrom, Statx};
use rustix::io::Errno;

use crate::errno::Result;

/// The unit in which space is charged and reserved.
pub(crate) const BLOCK_BYTES: u64 = 4096;

/// The space of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    pub(crate) bytes: u64,
    /// Only a request can change the charge: the backing file system has nothing left to map, trim
    /// or merge during writeback.
    pub(crate) lasting: bool,
    /// Most blocks of its attributes; `None` if they were not read yet.
    pub(crate) attribute_blocks: Option<u8>,
}

/// The space that a file takes in its volume, if its attributes take at most `attribute_blocks`.
///
/// The charge of a file with such blocks is not lasting. So a regular file with content that is not
/// remembered was charged without any.
pub(crate) fn charge(seen: &Statx, attribute_blocks: u8) -> Charged {
    let allocated = seen.stx_blocks.saturating_mul(512);
    let attributes = Some(attribute_blocks);
    let is_file = FileType::from_raw_mode(seen.stx_mode.into()) == FileType::RegularFile;
    match whole_blocks(seen.stx_size) {
        // More blocks: allocated ahead, mapping a fragmented file, or holding attributes. Fewer:
        // there are holes, which must be mapped around.
        whole if is_file && whole > 0 => Charged {
            bytes: allocated.min(whole.saturating_add(attribute_bytes(attribute_blocks))),
            lasting: allocated == whole && attribute_blocks == 0,
            attribute_blocks: attributes,
        },
        // Without content its blocks were not allocated ahead, so they hold attributes.
        _ => Charged { bytes: allocated, lasting: true, attribute_blocks: attributes },
    }
}

/// The bytes of this many blocks of attributes.
pub(crate) fn attribute_bytes(blocks: u8) -> u64 {
    u64::from(blocks) * BLOCK_BYTES
}

/// The most that writing `range` of `file` adds to its charge.
///
/// `left`: what can be added before the whole file up to the range's end is charged. Space that fallocate(2)
/// has reserved looks like a hole, but is charged already.
pub(crate) fn growth(file: impl AsFd, range: &Range<u64>, left: u64) -> Result<u64> {
    let mut sum = 0_u64;
    for hole in (Holes { file, at: floor(range.start), end: whole_blocks(range.end) }) {
        let (from, to) = hole?;
        sum = sum.saturating_add(to - from);
        if sum >= left {
            return Ok(left);
        }
    }
    Ok(sum)
}

/// The end of the longest part of `range`, from its start, that can be written with `free` bytes.
pub(crate) fn longest_fitting(file: impl AsFd, range: &Range<u64>, mut free: u64) -> Result<u64> {
    free -= free % BLOCK_BYTES;
    for hole in (Holes { file, at: floor(range.start), end: whole_blocks(range.end) }) {
        let (from, to) = hole?;
        if to - from > free {
            return Ok((from + free).clamp(range.start, range.end));
        }
        free -= to - from;
    }
    Ok(range.end)
}

/// The holes between `at` and `end`, both multiples of the block size, in whole blocks.
struct Holes<F> {
    file: F,
    at: u64,
    end: u64,
}

impl<F: AsFd> Iterator for Holes<F> {
    type Item = Result<(u64, u64)>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.end {
            let start = self.at;
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(start)) {
                Ok(data) => floor(data).min(self.end),
                // There is no data after this point.
                Err(Errno::NXIO) => self.end,
                Err(errno) => {
                    self.at = self.end;
                    return Some(Err(errno));
                }
            };
            self.at = self.end;
            if data < self.end {
                match rustix::fs::seek(&self.file, SeekFrom::Hole(data)) {
                    // At least the block in which the data was found.
                    Ok(hole) => self.at = whole_blocks(hole).max(data + BLOCK_BYTES),
                    // Truncated meanwhile.
                    Err(Errno::NXIO) => {}
                    Err(errno) => return Some(Err(errno)),
                }
            }
            if data > start {
                return Some(Ok((start, data)));
            }
        }
        None
    }
}

pub(crate) fn whole_blocks(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}

fn floor(bytes: u64) -> u64 {
    bytes - bytes % BLOCK_BYTES
}
