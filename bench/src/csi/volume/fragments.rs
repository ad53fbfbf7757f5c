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
    /// At most a third of the memory that is available.
    pub(super) fn hold() -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).with_context(|| path.to_owned());
        let small =
            || small_pieces(&read("/proc/buddyinfo")?).context("/proc/buddyinfo: no number of pieces");
        let available = available(&read("/proc/meminfo")?).context("/proc/meminfo: no MemAvailable")?;
        let mut file = File::from(memfd_create("fragments", MemfdFlags::CLOEXEC)?);
        let block = vec![1; BLOCK_BYTES];
        let mut held = 0;
        // Other processes free memory meanwhile.
        while held < available / 3 {
            let more = small()?;
            if held > 0 && more < FEW_BYTES {
                break;
            }
            for _ in 0..(more + MORE_BYTES) / BLOCK_BYTES {
                file.write_all(&block).context("a file in memory")?;
                held += BLOCK_BYTES;
            }
        }
        Ok(Self { _held: file })
    }
}

/// Bytes (Documentation/filesystems/proc.rst, buddyinfo).
fn small_pieces(buddyinfo: &str) -> Option<usize> {
    let mut sum = 0;
    for line in buddyinfo.lines() {
        let (_, counts) = line.split_once("zone")?;
        for (order, count) in counts.split_whitespace().skip(1).take(LARGE_ORDER).enumerate() {
            sum += (count.parse::<usize>().ok()? << order) * PAGE;
        }
    }
    Some(sum)
}

/// Bytes.
fn available(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_below_2_mib_are_counted() {
        let shown = "Node 0, zone      DMA      1      0      0      0      0      0      0      0      1      1      3 \n\
                     Node 0, zone   Normal      2      1      0      0      0      0      0      0      0      7      8 \n";
        assert_eq!(small_pieces(shown), Some((1 + 256 + 2 + 2) * PAGE));
        assert_eq!(small_pieces("Node 0, zone DMA x"), None);
    }

    #[test]
    fn available_memory_is_read_in_kib() {
        assert_eq!(available("MemFree: 1 kB\nMemAvailable:   5 kB\n"), Some(5 * 1024));
        assert_eq!(available("MemFree: 1 kB\n"), None);
    }
}
