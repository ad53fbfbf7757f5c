use super::*;
use rustix::fs::CWD;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::mount::{self, MountFlags, UnmountMode};

/// Does something to the tree at the wrong moment.
struct Meddler<F, E>(F, E);

impl<F: FnMut(), E: FnMut()> Visitor for Meddler<F, E> {
    fn file(&mut self, _parent: BorrowedFd<'_>, _name: &CStr, _stat: &Statx) -> Result<()> {
        (self.0)();
        Ok(())
    }
    fn enter(&mut self, _name: &CStr) -> Result<()> {
        (self.1)();
        Ok(())
    }
    fn leave(&mut self, _directory: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }
}

fn errno_of(root: &Path, visitor: &mut impl Visitor) -> nix::errno::Errno {
    let root = open_dir(CWD, root, ResolveFlags::empty()).unwrap();
    walk(root.as_fd(), Changes::Refused, &AtomicBool::new(false), visitor).unwrap_err().errno()
}

#[test]
fn a_directory_that_becomes_a_link_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("child")).unwrap();
    let swap = || {
        std::fs::rename(root.join("child"), dir.path().join("aside")).unwrap();
        symlink("/etc", root.join("child")).unwrap();
    };
    assert_eq!(errno_of(&root, &mut Meddler(|| {}, swap)), nix::errno::Errno::ENOTDIR);
}

#[test]
fn a_directory_that_is_moved_away_does_not_lead_the_walk_out() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("child")).unwrap();
    std::fs::write(root.join("child/file"), "").unwrap();
    let move_away = || std::fs::rename(root.join("child"), dir.path().join("elsewhere")).unwrap();
    assert_eq!(errno_of(&root, &mut Meddler(move_away, || {})), nix::errno::Errno::ESTALE);
}

#[test]
fn a_mount_is_not_entered() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let mounted = dir.path().join("mounted");
        std::fs::create_dir(&mounted).unwrap();
        mount::mount_fs("tmpfs", "t", &mounted, MountFlags::default(), "").unwrap();
        let errno = errno_of(dir.path(), &mut Meddler(|| {}, || {}));
        mount::unmount(&mounted, UnmountMode::Detach).unwrap();
        assert_eq!(errno, nix::errno::Errno::EXDEV);
    });
}

/// On a thread in a mount namespace of its own: what is mounted there ends with it.
pub(super) fn in_own_mounts(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("root may unshare");
            mount::make_private(Path::new("/")).unwrap();
            test();
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}
