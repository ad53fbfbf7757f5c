//! The small pieces of free memory, held during a measurement.
//!
//! The kernel takes pages one by one from the smallest free pieces first, and reads memory two to three times as
//! fast whose pages lie in order. Without this, who is measured first would get the pieces.

use std::fs::File;
use std::io::Write;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

const PAGE: usize = 4096;
/// Pieces of this many pages, 2 MiB, are large enough.
const LARGE_ORDER: usize = 9;
/// More than the pieces, since each processor keeps some pages aside.
const MORE_BYTES: usize = 256 << 20;
const FEW_BYTES: usize = 32 << 20;
const BLOCK_BYTES: usize = 1 << 20;

/// A file in memory, whose pages the kernel takes one by one.
pub(super) struct Fragments {
    _held: File,
}

impl Fragments {
    /// At most half of the free memory.
    pub(super) fn hold() -> Result<Self> {
        let most = Free::now()?.bytes / 2;
        let mut file = File::from(memfd_create("fragments", MemfdFlags::CLOEXEC)?);
        let block = vec![1; BLOCK_BYTES];
        let (mut held, mut wanted) = (0, Free::now()?.small_bytes + MORE_BYTES);
        // Other processes free memory meanwhile.
        while held < most && wanted > MORE_BYTES + FEW_BYTES {
            let bytes = wanted.min(most - held).next_multiple_of(BLOCK_BYTES);
            (0..bytes / BLOCK_BYTES).try_for_each(|_| file.write_all(&block)).context("a file in memory")?;
            held += bytes;
            wanted = Free::now()?.small_bytes + MORE_BYTES;
        }
        Ok(Self { _held: file })
    }
}

/// Free memory.
#[derive(Debug, PartialEq, Eq)]
struct Free {
    bytes: usize,
    /// In small pieces.
    small_bytes: usize,
}

impl Free {
    fn now() -> Result<Self> {
        const PATH: &str = "/proc/buddyinfo";
        Self::of(&std::fs::read_to_string(PATH).context(PATH)?)
            .context("/proc/buddyinfo: no number of pieces")
    }

    /// Each line counts the pieces of a zone by their order (Documentation/filesystems/proc.rst, buddyinfo).
    fn of(buddyinfo: &str) -> Option<Self> {
        let mut free = Self { bytes: 0, small_bytes: 0 };
        for line in buddyinfo.lines() {
            let (_, counts) = line.split_once("zone")?;
            for (order, count) in counts.split_whitespace().skip(1).enumerate() {
                let bytes = (count.parse::<usize>().ok()? << order) * PAGE;
                free.bytes += bytes;
                free.small_bytes += if order < LARGE_ORDER { bytes } else { 0 };
            }
        }
        Some(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_below_2_mib_are_small() {
        let shown = "Node 0, zone      DMA      1      0      0      0      0      0      0      0      1      1      3 \n\
                     Node 0, zone   Normal      2      1      0      0      0      0      0      0      0      7      0 \n";
        let (small, large) = (1 + 256 + 2 + 2, (1 + 7) * 512 + 3 * 1024);
        assert_eq!(Free::of(shown), Some(Free { bytes: (small + large) * PAGE, small_bytes: small * PAGE }));
        assert_eq!(Free::of("Node 0, zone DMA x"), None);
    }
}
