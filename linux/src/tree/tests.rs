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

/// Counts what is visited, by name.
#[derive(Default)]
struct Names {
    files: Vec<CString>,
    entered: Vec<CString>,
    left: usize,
}

impl Visitor for Names {
    fn file(&mut self, _parent: BorrowedFd<'_>, name: &CStr, _stat: &Statx) -> Result<()> {
        self.files.push(name.to_owned());
        Ok(())
    }
    fn enter(&mut self, name: &CStr) -> Result<()> {
        self.entered.push(name.to_owned());
        Ok(())
    }
    fn leave(&mut self, _directory: BorrowedFd<'_>) -> Result<()> {
        self.left += 1;
        Ok(())
    }
}

fn walk_names(bounds: Bounds, root: &Path) -> (Names, Result<()>) {
    let root = open_dir(CWD, root, ResolveFlags::empty()).unwrap();
    let mut names = Names::default();
    let ended = walk_within(bounds, root.as_fd(), Changes::Refused, &AtomicBool::new(false), &mut names);
    (names, ended)
}

#[test]
fn more_directories_than_a_walk_remembers_are_visited_once_each() {
    let dir = tempfile::tempdir().unwrap();
    for (first, second) in (0..40).flat_map(|first| (0..40).map(move |second| (first, second))) {
        let inner = dir.path().join(format!("{first:02}/{first:02}-{second:02}"));
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(inner.join(format!("file-{first:02}-{second:02}")), "").unwrap();
    }
    for name_bytes in [0, 200, 2000, BOUNDS.name_bytes] {
        let (mut names, ended) = walk_names(Bounds { name_bytes, ..BOUNDS }, dir.path());
        ended.unwrap();
        assert_eq!((names.entered.len(), names.files.len(), names.left), (1640, 1600, 1641), "{name_bytes}");
        names.files.sort();
        names.files.dedup();
        names.entered.sort();
        names.entered.dedup();
        assert_eq!((names.entered.len(), names.files.len()), (1640, 1600), "{name_bytes}");
    }
}

/// A tree can be made so that the walk remembers one name of each directory only.
#[test]
fn a_tree_that_must_be_listed_again_and_again_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (first, second) in (0..40).flat_map(|first| (0..40).map(move |second| (first, second))) {
        std::fs::create_dir_all(dir.path().join(format!("{first}/{second}"))).unwrap();
    }
    let few = Bounds { name_bytes: 0, again: 1000, ..BOUNDS };
    let (names, ended) = walk_names(few, dir.path());
    let error = ended.unwrap_err();
    assert_eq!((error.errno(), names.left < 1641), (nix::errno::Errno::E2BIG, true), "{error}");
    assert!(error.to_string().contains("too many directories in directories"), "{error}");
    walk_names(Bounds { name_bytes: 0, again: 100_000, ..BOUNDS }, dir.path()).1.unwrap();
}

#[test]
fn a_tree_deeper_than_the_bound_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("a/b/c/d")).unwrap();
    walk_names(Bounds { levels: 4, ..BOUNDS }, dir.path()).1.unwrap();
    let (names, ended) = walk_names(Bounds { levels: 3, ..BOUNDS }, dir.path());
    let error = ended.unwrap_err();
    assert_eq!((error.errno(), names.left), (nix::errno::Errno::ENAMETOOLONG, 0));
    assert!(error.to_string().contains("enter d"), "{error}");
}

/// On a thread in a mount namespace of its own: what is mounted there ends with it.
pub(crate) fn in_own_mounts(test: impl FnOnce() + Send) {
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
