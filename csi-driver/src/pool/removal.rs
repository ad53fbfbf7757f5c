//! Removal of a tree that somebody else filled.
//!
//! No symbolic link is followed and no mount is entered (openat2(2)), so the
//! removal cannot leave the tree. A directory found within is moved up to the
//! tree's root before it is looked into: one open directory is enough however
//! deep the tree is, and no path grows.

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, ResolveFlags};
use rustix::io::Errno;

use super::walk::{WITHIN, open_dir};

/// Removes `root` and all below; its absence is a success. Killed at any point,
/// a repetition goes on.
pub(super) fn remove_tree(root: &Path) -> linux::Result<()> {
    let at_root = |op| move |e: Errno| linux::Error::at(op, root, e);
    // The pool may itself be reached through links; from its own directories on there are none.
    let directory = match open_dir(CWD, root, ResolveFlags::empty()) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(at_root("open")(e)),
    };
    let mut moved_up = 0u64;
    // Every round empties the directories directly below the root, and what was
    // in them comes up for the next; done when a round finds none.
    loop {
        let children = remove_files(&directory).map_err(at_root("remove files of"))?;
        if children.is_empty() {
            break;
        }
        for child in children {
            empty_child(&directory, &child, &mut moved_up).map_err(at_root("remove directories of"))?;
        }
    }
    std::fs::remove_dir(root).map_err(|e| linux::Error::at("remove directory", root, e))
}

/// Removes the child after moving its own directories up beside it.
fn empty_child(root: &OwnedFd, child: &CStr, moved_up: &mut u64) -> Result<(), Errno> {
    let directory = open_dir(root, child, WITHIN)?;
    for grandchild in remove_files(&directory)? {
        loop {
            let name = format!(".up{moved_up}");
            *moved_up += 1;
            match rustix::fs::renameat_with(
                &directory,
                &grandchild,
                root,
                &*name,
                rustix::fs::RenameFlags::NOREPLACE,
            ) {
                // The name may be a file's of the volume, or of a run before this one.
                Err(Errno::EXIST) => {}
                other => break other?,
            }
        }
    }
    rustix::fs::unlinkat(root, child, AtFlags::REMOVEDIR)
}

/// Removes everything in `directory` that is no directory; the names of those.
fn remove_files(directory: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            directories.push(name.to_owned());
            continue;
        }
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            // Of unknown type where the file system does not say.
            Err(Errno::ISDIR) => directories.push(name.to_owned()),
            Err(e) => return Err(e),
        }
    }
    Ok(directories)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::Mode;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_removed_and_what_they_point_to_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let outside = dir.path().join("outside");
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("kept"), "").unwrap();
        for link in ["link", "a/link", "a/b/link"] {
            symlink(&outside, root.join(link)).unwrap();
        }
        symlink("/nonexistent", root.join("dangling")).unwrap();
        remove_tree(&root).unwrap();
        assert!(!root.exists());
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn a_root_that_is_a_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("real")).unwrap();
        symlink(dir.path().join("real"), dir.path().join("root")).unwrap();
        let err = remove_tree(&dir.path().join("root")).unwrap_err();
        assert_eq!(err.errno(), nix::errno::Errno::ENOTDIR);
    }

    /// Deeper than the limits of descriptors and of path lengths.
    #[test]
    fn a_tree_of_any_depth_and_with_awkward_names_goes() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let mut at = open_dir(CWD, &root, ResolveFlags::empty()).unwrap();
        for _ in 0..3000 {
            for name in [".up0", ".up1"] {
                rustix::fs::mkdirat(&at, name, Mode::from(0o000)).unwrap();
            }
            at = open_dir(&at, c".up0", WITHIN).unwrap();
        }
        drop(at);
        std::fs::write(root.join(".up7"), "").unwrap();
        remove_tree(&root).unwrap();
        assert!(!root.exists());
        remove_tree(&root).unwrap();
    }
}
