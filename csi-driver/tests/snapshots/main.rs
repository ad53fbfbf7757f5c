//! Snapshots, restores and clones by the driver as a process: on file systems
//! that reflink (XFS and Btrfs on loop devices) and on one that does not (ext4).

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod claims;
mod copies;
mod full_disk;
mod kills;
mod kit;
mod pool;
mod refusals;
#[path = "../driver/scene.rs"]
#[allow(dead_code, reason = "each suite uses a part")]
mod scene;
mod served;
mod unserved;
