//! The root directory's mount on itself, and how it differs from a file system that the user
//! mounted there.
//!
//! Invariant: [`unshare`] unmounts only the recorded mount, of this boot, that maps a directory to
//! itself. The record is written before the mount is attached: a kubelet killed in between has
//! attached nothing.

use std::path::{Path, PathBuf};

use linux::mount::{self, UnmountMode};
use linux::mountinfo::{self, MountEntry};
use linux::rootfs::{self, MountsBelow};
use serde::{Deserialize, Serialize};

const RECORD: &str = "hawser/own_mount.json";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Mount ids are valid for one boot.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    boot_id: String,
    mount_id: u64,
}

/// Makes the root directory a shared mount point.
pub(super) fn share(root: &Path) -> linux::Result<()> {
    if mountinfo::at(root)?.is_none() {
        // Recursive, so that mounts below it stay visible.
        let tree = rootfs::clone_tree(root, MountsBelow::With)?;
        let record = Record { boot_id: boot_id()?, mount_id: mount::id_of(&tree)? };
        let text = serde_json::to_vec(&record).map_err(|e| linux::Error::at("write", root, e))?;
        linux::atomic_file::replace(&root.join(RECORD), &text, 0o600)?;
        mount::move_mount(&tree, root)?;
    }
    mount::make_shared(root)
}

/// Unmounts what [`share`] mounted, in this or an earlier run, and nothing else.
pub(super) fn unshare(root: &Path) -> linux::Result<()> {
    let mounts = mountinfo::read()?;
    let recorded = recorded(root)?;
    let is_own = |found: &MountEntry| recorded == Some(found.mount_id) && is_on_itself(found, &mounts);
    if mountinfo::at(root)?.is_some_and(|found| is_own(&found)) {
        // Our own listening sockets keep the mount busy until we exit.
        mount::unmount(root, UnmountMode::Detach)?;
    }
    linux::atomic_file::discard(&root.join(RECORD))
}

/// The id of the mount made in this boot; `None` if the record is unreadable.
fn recorded(root: &Path) -> linux::Result<Option<u64>> {
    let Ok(text) = std::fs::read(root.join(RECORD)) else { return Ok(None) };
    let boot_id = boot_id()?;
    let record = serde_json::from_slice::<Record>(&text).ok().filter(|record| record.boot_id == boot_id);
    Ok(record.map(|record| record.mount_id))
}

/// Whether the mount shows the directory that it covers. The kernel reuses ids, so another mount
/// may have ours.
fn is_on_itself(found: &MountEntry, mounts: &[MountEntry]) -> bool {
    let Some(parent) = mounts.iter().find(|mount| mount.mount_id == found.parent_id) else { return false };
    let Ok(relative) = found.mount_point.strip_prefix(&parent.mount_point) else { return false };
    let covered: PathBuf = parent.root.join(relative);
    (found.major, found.minor) == (parent.major, parent.minor) && found.root == covered
}

fn boot_id() -> linux::Result<String> {
    let path = Path::new(BOOT_ID);
    let text = std::fs::read_to_string(path).map_err(|e| linux::Error::at("read", path, e))?;
    Ok(text.trim().to_owned())
}
