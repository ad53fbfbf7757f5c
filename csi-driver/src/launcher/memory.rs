//! The memory that a volume's daemon may use where nobody says otherwise.
//!
//! Invariant: the daemon's bounds come first, and this limit has room for all of
//! them. A daemon that the kernel kills for memory takes its volume's users along.

/// Event loops, buffers, tables of a fixed size; measured below 30 MiB.
const BASE_BYTES: u64 = 64 << 20;
/// A known inode takes 168 bytes in the daemon's tables, its name included, and up to
/// half as much again while a table grows.
const KNOWN_INODE_BYTES: u64 = 256;
/// The daemon refuses lookups beyond twice its bound of known inodes.
const REFUSED_BEYOND: u64 = 2;
/// The daemon's bound where its class names none.
const KNOWN_INODES: u64 = 500_000;
/// A file whose use of the disk is not settled (sparse, large attributes).
const UNSETTLED_BYTES: u64 = 64;
/// More unsettled files than this are nobody's ordinary use: a class that has them names a limit.
const MOST_UNSETTLED: u64 = 4 << 20;
/// A volume may grow while it is served, and its daemon's limit does not grow with it.
const LEAST_BYTES: u64 = 512 << 20;
const STEP_BYTES: u64 = 64 << 20;

/// For a volume of so many inodes; 0 stands for any number.
pub(super) fn default_limit_bytes(inode_limit: u64) -> u64 {
    let inodes = if inode_limit == 0 { u64::MAX } else { inode_limit };
    let known = inodes.min(KNOWN_INODES) * REFUSED_BEYOND * KNOWN_INODE_BYTES;
    let unsettled = inodes.min(MOST_UNSETTLED) * UNSETTLED_BYTES;
    (BASE_BYTES + known + unsettled).max(LEAST_BYTES).next_multiple_of(STEP_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_with_more_inodes_has_more_memory_up_to_the_daemons_bounds() {
        let mebibytes = |inodes| default_limit_bytes(inodes) >> 20;
        assert_eq!(mebibytes(1024), 512);
        assert_eq!(mebibytes(3 << 20), 512);
        assert_eq!(mebibytes(4 << 20), 576);
        assert_eq!(mebibytes(1 << 30), 576);
        assert_eq!(mebibytes(0), 576);
    }
}
