//! Snapshots, restores and clones by the driver as a process: on file systems
//! that reflink (XFS and Btrfs on loop devices) and on one that does not (ext4).

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod claims;
mod copies;
mod full_disk;
mod kernel_limits;
mod kills;
mod pool;
mod refusals;
mod served;
mod unserved;
