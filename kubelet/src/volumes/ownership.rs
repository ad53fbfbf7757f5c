//! fsGroup: a volume's files belong to the pod's group and are writable by it
//! (kubernetes, pkg/volume/volume_linux.go).

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

use super::error::Error;

/// Walks the whole tree, off the reactor.
pub(super) async fn give_to_group(root: PathBuf, group: u32) -> Result<(), Error> {
    let walk = tokio::task::spawn_blocking(move || {
        walk(&root, group).map_err(|e| Error::io("give to fsGroup", &root, e))
    });
    walk.await.unwrap_or(Err(Error::Interrupted { what: "the change of group" }))
}

fn walk(path: &Path, group: u32) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if metadata.gid() != group {
        lchown(path, None, Some(group))?;
    }
    if metadata.is_symlink() {
        return Ok(());
    }
    let mode = group_mode(metadata.mode(), metadata.is_dir());
    if mode != metadata.mode() {
        fs::set_permissions(path, Permissions::from_mode(mode & 0o7777))?;
    }
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            walk(&entry?.path(), group)?;
        }
    }
    Ok(())
}

/// Group may read and write, enter directories, and new files inherit the group.
fn group_mode(mode: u32, is_dir: bool) -> u32 {
    if is_dir { mode | 0o2770 } else { mode | 0o660 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_inherit_and_files_become_writable() {
        assert_eq!(group_mode(0o755, true), 0o2775);
        assert_eq!(group_mode(0o640, false), 0o660);
    }
}
