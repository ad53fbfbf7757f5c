//! The memory that a volume's daemon may use unless its class sets a limit.
//!
//! Invariant: the daemon's bounds come first, and this limit has room for all of
//! them. A daemon that the kernel kills for memory takes its volume's users along.

/// Event loops, buffers, tables of a fixed size, measured below 30 MiB; and the requests that wait for the
/// end of a pause, 32 MiB of data at most.
const BASE_BYTES: u64 = 64 << 20;
/// A known inode takes 155 bytes in the daemon's tables with a name of 15 bytes, up to 400
/// with the longest name, and some more while a table grows.
const KNOWN_INODE_BYTES: u64 = 448;
/// The daemon refuses lookups beyond twice its bound of known inodes.
const REFUSED_BEYOND: u64 = 2;
/// A file whose use of the disk is not settled (sparse, large attributes).
const UNSETTLED_BYTES: u64 = 64;
/// A class whose volumes have more unsettled files than this sets a limit of its own.
const MOST_UNSETTLED: u64 = 4 << 20;
/// A volume may grow while it is served, and its daemon's limit does not grow with it.
const LEAST_BYTES: u64 = 512 << 20;
const STEP_BYTES: u64 = 64 << 20;

/// For a volume of so many inodes; 0 stands for any number. `known_inodes` is the daemon's bound.
pub(crate) fn default_limit_bytes(inode_limit: u64, known_inodes: u32) -> u64 {
    let inodes = if inode_limit == 0 { u64::MAX } else { inode_limit };
    let known = inodes.min(known_inodes.into()) * REFUSED_BEYOND * KNOWN_INODE_BYTES;
    let unsettled = inodes.min(MOST_UNSETTLED) * UNSETTLED_BYTES;
    (BASE_BYTES + known + unsettled).max(LEAST_BYTES).next_multiple_of(STEP_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_with_more_inodes_has_more_memory_up_to_the_daemons_bounds() {
        let mebibytes = |inodes| default_limit_bytes(inodes, 500_000) >> 20;
        assert_eq!(mebibytes(1024), 512);
        assert_eq!(mebibytes(3 << 20), 704);
        assert_eq!(mebibytes(4 << 20), 768);
        assert_eq!(mebibytes(1 << 30), 768);
        assert_eq!(mebibytes(0), 768);
        assert_eq!(default_limit_bytes(0, 1000) >> 20, 512);
        assert_eq!(default_limit_bytes(0, 2_000_000) >> 20, 2048);
    }
}
