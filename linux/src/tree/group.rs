//! Gives a tree to a group with access to it: Kubernetes' fsGroup.
//!
//! Other processes may use the tree meanwhile. So each file is opened once (O_PATH, which calls no
//! driver and waits for no writer), and all changes use that descriptor: a name that becomes a link
//! in between has no effect elsewhere. Hard links have none either: link(2) does not cross mounts,
//! so every other name of a file is in the tree's own mount.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Statx};

use super::{Changes, Visitor, WITHIN, at, file_type, is_change, stat, walk};
use crate::Result;

/// The group's access: kubelet's masks (pkg/volume/volume_linux.go).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupAccess {
    /// Files at least 0660, directories 2770.
    ReadWrite,
    /// Files at least 0440, directories 2550.
    ReadOnly,
}

impl GroupAccess {
    fn of_files(self) -> Mode {
        Mode::from_raw_mode(match self {
            Self::ReadWrite => 0o660,
            Self::ReadOnly => 0o440,
        })
    }

    fn of_directories(self) -> Mode {
        // Files that are created below inherit the group.
        self.of_files() | Mode::from_raw_mode(0o2110)
    }
}

/// How often a walk starts over because its current directory was moved.
const ATTEMPTS: u32 = 8;

/// Gives everything below `root`, and finally `root`, to group `gid`, with access for the group.
/// Owners stay. No file outside is changed, whatever other processes do to the tree meanwhile.
/// Mounts in the tree are skipped.
///
/// `root` may be O_PATH and of any file type.
pub fn give_group(root: impl AsFd, gid: u32, access: GroupAccess, stop: &AtomicBool) -> Result<()> {
    let root = root.as_fd();
    let mut giver = Giver { gid, access };
    if file_type(&stat(root, c"")?) != FileType::Directory {
        return giver.give(root, c".");
    }
    let mut left = ATTEMPTS;
    loop {
        left -= 1;
        match walk(root, Changes::Tolerated, stop, &mut giver) {
            Err(e) if left > 0 && e.errno() == nix::errno::Errno::ESTALE => {}
            outcome => return outcome,
        }
    }
}

/// Whether the tree has been given, which its root shows, since it changes last. This is kubelet's
/// test for `OnRootMismatch`: the group, its permissions, and setgid.
pub fn has_group(root: impl AsFd, gid: u32, access: GroupAccess) -> Result<bool> {
    let found = stat(root.as_fd(), c"")?;
    Ok(file_type(&found) == FileType::Directory
        && found.stx_gid == gid
        && mode_of(&found).contains(access.of_directories()))
}

struct Giver {
    gid: u32,
    access: GroupAccess,
}

impl Giver {
    fn give(&self, file: BorrowedFd<'_>, name: &CStr) -> Result<()> {
        let found = stat(file, c"")?;
        let changes_group = found.stx_gid != self.gid;
        if changes_group {
            rustix::fs::chownat(file, c"", None, Some(Gid::from_raw(self.gid)), AtFlags::EMPTY_PATH)
                .map_err(at("chgrp", name))?;
        }
        let kind = file_type(&found);
        if kind == FileType::Symlink {
            return Ok(());
        }
        // Read again: its owner may have changed it, and a change of group changes it too.
        let found = stat(file, c"")?;
        let wanted = match kind {
            FileType::Directory => mode_of(&found) | self.access.of_directories(),
            // chown(2) cleared these bits. Restoring them would give its owner, who need not be in
            // the group, a program that runs with it.
            _ if changes_group => (mode_of(&found) | self.access.of_files()) - (Mode::SUID | Mode::SGID),
            _ => mode_of(&found) | self.access.of_files(),
        };
        if wanted == mode_of(&found) {
            return Ok(());
        }
        rustix::fs::chmod(by_descriptor(file).as_c_str(), wanted).map_err(at("chmod", name))
    }
}

impl Visitor for Giver {
    fn file(&mut self, parent: BorrowedFd<'_>, name: &CStr, _stat: &Statx) -> Result<()> {
        match open_path(parent, name) {
            Err(e) if is_change(e) => Ok(()),
            opened => self.give(opened.map_err(at("open", name))?.as_fd(), name),
        }
    }

    fn enter(&mut self, _name: &CStr) -> Result<()> {
        Ok(())
    }

    fn leave(&mut self, directory: BorrowedFd<'_>) -> Result<()> {
        self.give(directory, c".")
    }
}

fn mode_of(stat: &Statx) -> Mode {
    Mode::from_raw_mode(u32::from(stat.stx_mode) & 0o7777)
}

/// Opens the file itself, of any type, without following a symbolic link.
fn open_path(parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), WITHIN)
}

/// The path by which chmod(2) reaches a descriptor's file (proc(5)): fchmod(2) refuses O_PATH, and
/// fchmodat2(2) exists since Linux 6.6.
fn by_descriptor(file: BorrowedFd<'_>) -> CString {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    CString::new(path).expect("digits hold no zero byte")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::open_dir;
    use rustix::fs::{CWD, ResolveFlags};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;
    use std::sync::atomic::Ordering;

    const GID: u32 = 4711;

    fn give(root: &Path) -> Result<()> {
        let root = open_dir(CWD, root, ResolveFlags::empty()).unwrap();
        give_group(root.as_fd(), GID, GroupAccess::ReadWrite, &AtomicBool::new(false))
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn group_and_mode(path: &Path) -> (u32, u32) {
        let found = std::fs::symlink_metadata(path).unwrap();
        (found.gid(), found.mode() & 0o7777)
    }

    #[test]
    fn files_become_writable_directories_inherit_and_links_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        std::fs::create_dir_all(root.join("sub")).unwrap();
        for (name, mode) in [("root/sub/file", 0o640), ("root/program", 0o4755), ("outside", 0o600)] {
            std::fs::write(dir.path().join(name), "").unwrap();
            set_mode(&dir.path().join(name), mode);
        }
        symlink(&outside, root.join("link")).unwrap();
        rustix::fs::mknodat(CWD, root.join("fifo"), FileType::Fifo, Mode::from(0o600), 0).unwrap();
        for path in [&root, &root.join("sub")] {
            set_mode(path, 0o755);
        }
        give(&root).unwrap();
        assert_eq!(group_and_mode(&root), (GID, 0o2775));
        assert_eq!(group_and_mode(&root.join("sub")), (GID, 0o2775));
        assert_eq!(group_and_mode(&root.join("sub/file")), (GID, 0o660));
        assert_eq!(group_and_mode(&root.join("fifo")), (GID, 0o660));
        assert_eq!(group_and_mode(&root.join("program")), (GID, 0o775), "not with the group's rights");
        assert_eq!(group_and_mode(&root.join("link")).0, GID);
        assert_eq!(group_and_mode(&outside), (0, 0o600));
    }

    #[test]
    fn a_root_that_lacks_group_permission_or_setgid_has_not_been_given() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), None, Some(GID)).unwrap();
        let root = open_dir(CWD, dir.path(), ResolveFlags::empty()).unwrap();
        let has = |mode, gid, access| {
            set_mode(dir.path(), mode);
            has_group(root.as_fd(), gid, access).unwrap()
        };
        assert!(has(0o2770, GID, GroupAccess::ReadWrite));
        assert!(has(0o3777, GID, GroupAccess::ReadWrite));
        assert!(!has(0o2770, GID + 1, GroupAccess::ReadWrite));
        assert!(!has(0o770, GID, GroupAccess::ReadWrite));
        assert!(!has(0o2750, GID, GroupAccess::ReadWrite));
        assert!(has(0o2550, GID, GroupAccess::ReadOnly));
    }

    /// What a container does that runs in the volume: a directory and a link take each
    /// other's name, as quickly as it can.
    #[test]
    fn names_that_become_links_meanwhile_change_nothing_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        for name in ["root/a/x", "root/a/b/x", "outside/x"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        std::fs::create_dir(outside.join("b")).unwrap();
        symlink(&outside, root.join("link")).unwrap();
        set_mode(&outside, 0o755);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (one, two) = (root.join("a"), root.join("link"));
                while !stop.load(Ordering::Relaxed) {
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(CWD, &one, CWD, &two, exchange).unwrap();
                }
            });
            for _ in 0..2000 {
                give(&root).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        for name in ["", "x", "b"] {
            assert_eq!(group_and_mode(&outside.join(name)).0, 0, "{name:?}");
        }
        assert_eq!(group_and_mode(&outside), (0, 0o755));
    }
}
