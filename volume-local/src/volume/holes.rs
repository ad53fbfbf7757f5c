//! Holes of files, beside stores by shared mappings that the kernel has not sent yet.
//!
//! The kernel sends LSEEK without writing its pages back, so a page that was stored to may be a hole in the
//! backing file. While a file is open for reading and writing, and so for as long as such a mapping exists
//! (it holds the open file), the parts of it that can have such pages count as data.
//!
//! To make the kernel write the pages back first (FUSE_NOTIFY_INVAL_INODE) would be exact, but a thread that
//! waits for that cannot be killed before the write is answered: a killed daemon would not end, and no
//! successor would answer.

use std::ops::Range;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::Volume;
use crate::backings::Backings;
use crate::errno::Result;

impl Volume {
    /// The part of the file whose holes may be data that the kernel has not sent.
    pub(super) fn may_hide_data(&self, id: u64) -> Range<u64> {
        let passes = |passing: &Backings| passing.passes(id);
        if !self.files.has_open_both_ways(id) || self.passing.as_ref().is_some_and(passes) {
            return 0..0;
        }
        let zeros = if self.notes_zeros() { self.nodes.zeros_of(id) } else { None };
        zeros.unwrap_or(0..u64::MAX)
    }

    /// Whether a file without blocks may have data that the kernel has not sent.
    ///
    /// For this a file need not be open: the kernel asks for the attributes after a read, and not when the
    /// file is opened for writing later.
    pub(super) fn may_have_unsent_data(&self, id: u64, bytes: u64) -> bool {
        if self.writeback_cache {
            return true;
        }
        let has_zeros = || self.nodes.zeros_of(id).is_some_and(|zeros| !zeros.is_empty());
        bytes > 0 && !self.read_only && (!self.notes_zeros() || has_zeros())
    }

    /// Whether the kernel's pages over holes are known.
    fn notes_zeros(&self) -> bool {
        self.holes_are_pages && self.trust.knows_all_changes()
    }

    /// Called before the answer to a read of `size` bytes that got `data`.
    pub(super) fn note_zeros(&self, id: u64, offset: u64, data: &[u8], size: usize) {
        if self.read_only || self.writeback_cache || !self.notes_zeros() {
            return;
        }
        if let Some(part) = pages_of_zeros(offset, data, size) {
            self.nodes.zeros_were_read(id, &part);
        }
    }
}

/// A divisor of the kernel's page size.
const PAGE_BYTES: usize = 4096;

/// Whether a hole of a file always has whole pages of the kernel.
pub(super) fn are_pages(block_bytes: u64) -> bool {
    block_bytes > 0 && block_bytes.is_multiple_of(linux::memory::page_bytes() as u64)
}

/// From the first page of zeros to the end of the last one. Whole pages that the file does not have are zeros
/// for the kernel.
fn pages_of_zeros(offset: u64, data: &[u8], size: usize) -> Option<Range<u64>> {
    const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    let is_zero = |page: &[u8]| *page == ZEROS[..page.len()];
    let at = |page: usize| offset + (page * PAGE_BYTES) as u64;
    let pages = || data.chunks(PAGE_BYTES).map(is_zero).enumerate();
    let missing = data.len().next_multiple_of(PAGE_BYTES) < size;
    let first = pages().find(|(_, zero)| *zero).map(|(page, _)| page);
    let first = first.or_else(|| missing.then(|| data.len().div_ceil(PAGE_BYTES)))?;
    let end = if missing { size.div_ceil(PAGE_BYTES) } else { 1 + pages().rfind(|(_, zero)| *zero)?.0 };
    // A direct read need not begin with a page.
    let end = at(end).min(offset + size as u64).next_multiple_of(PAGE_BYTES as u64);
    Some(at(first) - at(first) % PAGE_BYTES as u64..end)
}

/// lseek(2) of a file of `size` bytes, by `seek` of the backing file, with the part `hidden` as data.
pub(super) fn seek_with(
    hidden: &Range<u64>,
    size: u64,
    position: SeekFrom,
    seek: impl Fn(SeekFrom) -> Result<u64>,
) -> Result<u64> {
    let end = hidden.end.min(size);
    let found = seek(position);
    match (position, found) {
        (SeekFrom::Data(from), Ok(data)) if hidden.start.max(from) < end => {
            Ok(data.min(hidden.start.max(from)))
        }
        (SeekFrom::Data(from), Err(Errno::NXIO)) if hidden.start.max(from) < end => {
            Ok(hidden.start.max(from))
        }
        (SeekFrom::Hole(_), Ok(hole)) if (hidden.start..end).contains(&hole) => {
            if end == size {
                Ok(size)
            } else {
                seek(SeekFrom::Hole(end))
            }
        }
        _ => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    #[test]
    fn pages_of_zeros_are_found_with_those_beyond_the_end_of_the_file() {
        let mut data = vec![1; 4 * PAGE_BYTES];
        assert_eq!(pages_of_zeros(0, &data, data.len()), None);
        data[PAGE_BYTES + 1..2 * PAGE_BYTES].fill(0);
        assert_eq!(pages_of_zeros(0, &data, data.len()), None, "one byte is data");
        data[PAGE_BYTES] = 0;
        assert_eq!(pages_of_zeros(PAGE, &data, data.len()), Some(2 * PAGE..3 * PAGE));
        data[3 * PAGE_BYTES..].fill(0);
        assert_eq!(pages_of_zeros(0, &data, data.len()), Some(PAGE..4 * PAGE));
        assert_eq!(pages_of_zeros(0, &data[..100], PAGE_BYTES), None, "the rest of a page with data");
        assert_eq!(pages_of_zeros(0, &data[..100], 3 * PAGE_BYTES), Some(PAGE..3 * PAGE));
        assert_eq!(pages_of_zeros(8 * PAGE, &[], PAGE_BYTES), Some(8 * PAGE..9 * PAGE));
        assert_eq!(pages_of_zeros(100, &data[PAGE_BYTES..][..10], 10), Some(0..PAGE));
    }

    #[test]
    fn what_may_hide_data_is_no_hole_and_the_other_holes_stay() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = std::fs::File::create_new(directory.path().join("f")).unwrap();
        file.set_len(20 * PAGE).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"data", 10 * PAGE).unwrap();
        let seek = |hidden: Range<u64>, position| {
            seek_with(&hidden, 20 * PAGE, position, |position| rustix::fs::seek(&file, position))
        };
        let pages = |from: u64, to: u64| from * PAGE..to * PAGE;
        for hidden in [pages(0, 0), pages(12, 14), pages(12, 20), 0..u64::MAX] {
            let is_data = |page: u64| page == 10 || hidden.contains(&(page * PAGE));
            for from in 0..20 {
                let next = |data| (from..20).find(|page| is_data(*page) == data).map(|page| page * PAGE);
                let at = from * PAGE;
                assert_eq!(
                    seek(hidden.clone(), SeekFrom::Data(at)),
                    next(true).ok_or(Errno::NXIO),
                    "{hidden:?} from {from}"
                );
                let hole = next(false).unwrap_or(20 * PAGE);
                assert_eq!(seek(hidden.clone(), SeekFrom::Hole(at)), Ok(hole), "{hidden:?} from {from}");
            }
            assert_eq!(seek(hidden.clone(), SeekFrom::Data(20 * PAGE)), Err(Errno::NXIO));
            assert_eq!(seek(hidden.clone(), SeekFrom::Hole(20 * PAGE)), Err(Errno::NXIO));
        }
    }
}
