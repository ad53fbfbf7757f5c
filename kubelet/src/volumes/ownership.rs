//! fsGroup: a volume's files belong to the pod's group and are writable by it
//! (kubernetes, pkg/volume/volume_linux.go).
//!
//! Invariant: a volume is given once for each pod, before the pod's first container
//! starts. A marker on disk says that it was, since a restarted kubelet mounts the
//! volumes of running pods again. Other pods may run in the volume meanwhile: the walk
//! is `linux::tree`'s, which follows no name twice.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use linux::tree::{self, GroupAccess};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::error::Error;
use super::files;
use crate::objects::FsGroupChangePolicy;

/// What is to be given, and to whom.
#[derive(Debug)]
pub(super) struct Gift {
    pub(super) root: PathBuf,
    pub(super) group: u32,
    pub(super) policy: FsGroupChangePolicy,
    /// A file that is there once the volume has been given.
    pub(super) marker: PathBuf,
}

/// Walks the whole tree, off the reactor.
pub(super) async fn give_to_group(gift: Gift) -> Result<(), Error> {
    let walk = tokio::task::spawn_blocking(move || give_once(&gift));
    walk.await.unwrap_or(Err(Error::Interrupted { what: "the change of group" }))
}

fn give_once(gift: &Gift) -> Result<(), Error> {
    if gift.marker.exists() {
        return Ok(());
    }
    give(&gift.root, gift.group, gift.policy).map_err(|source| Error::FsGroup {
        root: gift.root.clone(),
        group: gift.group,
        source,
    })?;
    files::make_dir(gift.marker.parent().unwrap_or(Path::new("/")), 0o750)?;
    // After a power cut it may be missing. No container runs then.
    std::fs::write(&gift.marker, "").map_err(|e| Error::io("create", &gift.marker, e))
}

fn give(path: &Path, group: u32, policy: FsGroupChangePolicy) -> linux::Result<()> {
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

    fn gift(dir: &Path, marker: &str, group: u32, policy: FsGroupChangePolicy) -> Gift {
        Gift { root: dir.join("root"), group, policy, marker: dir.join("pods/u").join(marker) }
    }

    #[test]
    fn a_volume_is_given_once_for_each_pod() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("root/file");
        std::fs::create_dir(dir.path().join("root")).unwrap();
        give_once(&gift(dir.path(), "a", 2000, FsGroupChangePolicy::Always)).unwrap();
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::chown(&file, None, Some(0)).unwrap();
        give_once(&gift(dir.path(), "a", 2000, FsGroupChangePolicy::Always)).unwrap();
        assert_eq!(group_of(&file), 0, "its containers may have started");
        give_once(&gift(dir.path(), "b", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&file), 0, "the root is the group's");
        give_once(&gift(dir.path(), "c", 2000, FsGroupChangePolicy::Always)).unwrap();
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
        give_once(&gift(dir.path(), "a", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&root.join("file")), 2000);
        assert_eq!(std::fs::metadata(&root).unwrap().mode() & 0o7777, 0o2770);
    }

    #[test]
    fn a_volume_of_one_file_is_given_too() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("root"), "").unwrap();
        give_once(&gift(dir.path(), "a", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&dir.path().join("root")), 2000);
    }
}
