//! fsGroup: a volume's files belong to the pod's group, which can write them (kubernetes,
//! pkg/volume/volume_linux.go).
//!
//! Invariant: a volume's group is changed once per pod, before the pod's first container starts. A
//! marker on disk records it, since a restarted kubelet mounts the volumes of running pods again.
//! Other pods may use the volume meanwhile, so the walk is `linux::tree`'s, which is safe against
//! renames.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use linux::tree::{self, GroupAccess};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::error::Error;
use super::files;
use crate::objects::FsGroupChangePolicy;

/// A volume and its new group.
#[derive(Debug)]
pub(super) struct GroupChange {
    pub(super) root: PathBuf,
    pub(super) group: u32,
    pub(super) policy: FsGroupChangePolicy,
    /// A file that exists once the group was changed.
    pub(super) marker: PathBuf,
}

/// Walks the whole tree, outside the async threads.
pub(super) async fn change_group(change: GroupChange) -> Result<(), Error> {
    let walk = tokio::task::spawn_blocking(move || change_once(&change));
    walk.await.unwrap_or(Err(Error::Interrupted { what: "the change of group" }))
}

fn change_once(change: &GroupChange) -> Result<(), Error> {
    if change.marker.exists() {
        return Ok(());
    }
    change_if_needed(&change.root, change.group, change.policy).map_err(|source| Error::FsGroup {
        root: change.root.clone(),
        group: change.group,
        source,
    })?;
    files::make_dir(change.marker.parent().unwrap_or(Path::new("/")), 0o750)?;
    // A power cut may lose the marker, but then no container runs.
    std::fs::write(&change.marker, "").map_err(|e| Error::io("create", &change.marker, e))
}

fn change_if_needed(path: &Path, group: u32, policy: FsGroupChangePolicy) -> linux::Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let root = open(path, flags, Mode::empty()).map_err(|e| linux::Error::at("open", path, e))?;
    let access = GroupAccess::ReadWrite;
    if policy == FsGroupChangePolicy::OnRootMismatch && tree::has_group(&root, group, access)? {
        return Ok(());
    }
    tree::give_group(&root, group, access, &AtomicBool::new(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn group_of(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().gid()
    }

    fn change(dir: &Path, marker: &str, group: u32, policy: FsGroupChangePolicy) -> GroupChange {
        GroupChange { root: dir.join("root"), group, policy, marker: dir.join("pods/u").join(marker) }
    }

    #[test]
    fn the_group_is_changed_once_per_pod() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("root/file");
        std::fs::create_dir(dir.path().join("root")).unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::Always)).unwrap();
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::chown(&file, None, Some(0)).unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::Always)).unwrap();
        assert_eq!(group_of(&file), 0, "its containers may have started");
        change_once(&change(dir.path(), "b", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&file), 0, "the root is the group's");
        change_once(&change(dir.path(), "c", 2000, FsGroupChangePolicy::Always)).unwrap();
        assert_eq!(group_of(&file), 2000);
    }

    #[test]
    fn on_root_mismatch_walks_when_the_root_lacks_setgid() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        std::os::unix::fs::chown(&root, None, Some(2000)).unwrap();
        std::fs::set_permissions(&root, PermissionsExt::from_mode(0o770)).unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&root.join("file")), 2000);
        assert_eq!(std::fs::metadata(&root).unwrap().mode() & 0o7777, 0o2770);
    }

    #[test]
    fn the_group_of_a_single_file_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("root"), "").unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&dir.path().join("root")), 2000);
    }
}
