//! Finds the target of a mount inside a root directory.
//!
//! Other processes use the volumes mounted below the root, and may replace a directory by a link at
//! any time. So each component is opened separately, relative to the previous one. A link is
//! followed only on the root's own mount: the image, which has no other user.
//!
//! Invariant: [`Target::path`] is the descriptor's real path, seen from the root, without links.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};

use super::Kind;
use crate::{Error, Result, mount};

const OP: &str = "find mount point";
/// The kernel's own limit (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// A target below a root, held by an `O_PATH` descriptor.
#[derive(Debug)]
pub struct Target {
    pub fd: OwnedFd,
    /// Absolute from the root, without links.
    pub path: PathBuf,
}

/// The target at `path` in `root`. Missing parts are made: directories with mode 0755, a file with
/// 0644. A link inside a volume or a kernel file system is `ELOOP`.
pub fn ensure_target(root: impl AsFd, path: &Path, kind: Kind) -> Result<Target> {
    let mut walk = Walk::new(root.as_fd(), path)?;
    while let Some(name) = walk.todo.pop_front() {
        let is_last = walk.todo.is_empty();
        match walk.step(&name) {
            Err(e) if e.errno() == Errno::ENOENT => {
                walk.make(&name, if is_last { kind } else { Kind::Directory })?;
                walk.step(&name)?;
            }
            other => other?,
        }
    }
    walk.into_target()
}

/// Resolves `path` in `root` with the links of the image; parts of it may be missing.
pub fn resolve(root: impl AsFd, path: &Path) -> Result<PathBuf> {
    let mut walk = Walk::new(root.as_fd(), path)?;
    while let Some(name) = walk.todo.pop_front() {
        match walk.step(&name) {
            // Below a missing part or a file, there are no links.
            Err(e) if matches!(e.errno(), Errno::ENOENT | Errno::ENOTDIR) => {
                let mut found = walk.path();
                for name in std::iter::once(name).chain(walk.todo) {
                    if name == ".." {
                        found.pop();
                    } else {
                        found.push(name);
                    }
                }
                return Ok(found);
            }
            other => other?,
        }
    }
    Ok(walk.path())
}

struct Walk<'a> {
    wanted: &'a Path,
    root: OwnedFd,
    image_mount: u64,
    /// The open directories from the root down to the walk's position.
    open: Vec<(OsString, OwnedFd)>,
    todo: VecDeque<OsString>,
    links: usize,
}

impl<'a> Walk<'a> {
    fn new(root: BorrowedFd<'_>, wanted: &'a Path) -> Result<Self> {
        let root =
            open_beneath(root, OsStr::new("."), OFlags::DIRECTORY).map_err(|e| Error::at(OP, wanted, e))?;
        let image_mount = mount::id_of(&root)?;
        let mut walk = Self { wanted, root, image_mount, open: Vec::new(), todo: VecDeque::new(), links: 0 };
        walk.push_front(wanted);
        Ok(walk)
    }

    fn push_front(&mut self, path: &Path) {
        for component in path.components().rev() {
            match component {
                Component::Normal(name) => self.todo.push_front(name.to_owned()),
                Component::ParentDir => self.todo.push_front(OsString::from("..")),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
    }

    fn here(&self) -> BorrowedFd<'_> {
        self.open.last().map_or(self.root.as_fd(), |(_, fd)| fd.as_fd())
    }

    fn path(&self) -> PathBuf {
        let mut path = PathBuf::from("/");
        path.extend(self.open.iter().map(|(name, _)| name));
        path
    }

    fn step(&mut self, name: &OsStr) -> Result<()> {
        if name == ".." {
            // At the root, `..` stays there.
            self.open.pop();
            return Ok(());
        }
        let problem = |e: rustix::io::Errno| Error::at(OP, self.wanted, e);
        let found = open_beneath(self.here(), name, OFlags::empty()).map_err(problem)?;
        let stat = rustix::fs::fstat(&found).map_err(problem)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            self.open.push((name.to_owned(), found));
            return Ok(());
        }
        self.links += 1;
        if self.links > MAX_LINKS || mount::id_of(&found)? != self.image_mount {
            return Err(Error::new(
                OP,
                format!("{}: link {name:?} in {}", self.wanted.display(), self.path().display()),
                Errno::ELOOP,
            ));
        }
        let text = rustix::fs::readlinkat(&found, c"", Vec::new()).map_err(problem)?;
        let leads_to = PathBuf::from(OsString::from_vec(text.into_bytes()));
        if leads_to.is_absolute() {
            self.open.clear();
        }
        self.push_front(&leads_to);
        Ok(())
    }

    fn make(&self, name: &OsStr, kind: Kind) -> Result<()> {
        let made = match kind {
            Kind::Directory => rustix::fs::mkdirat(self.here(), name, Mode::from(0o755)),
            Kind::File => rustix::fs::mknodat(self.here(), name, FileType::RegularFile, Mode::from(0o644), 0),
        };
        match made {
            // Another process has created it; the next step checks it.
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(e) => Err(Error::at("create mount point", self.wanted, e)),
        }
    }

    fn into_target(mut self) -> Result<Target> {
        let path = self.path();
        let fd = self.open.pop().map_or(self.root, |(_, fd)| fd);
        Ok(Target { fd, path })
    }
}

/// Opens one name in a directory; a link itself, not its target.
fn open_beneath(dir: BorrowedFd<'_>, name: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(dir, name, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::rootfs::{attach, new_fs, open_root};

    /// A root as a container's launcher sees it: an image, and a volume mounted
    /// at /volume in a mount namespace of this thread's own.
    struct Fixture(tempfile::TempDir);

    impl Fixture {
        fn new() -> Self {
            crate::process::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
                .expect("these tests mount: run them as root");
            crate::mount::make_private(Path::new("/")).unwrap();
            let dir = tempfile::tempdir().unwrap();
            for sub in ["volume", "real", "etc"] {
                std::fs::create_dir(dir.path().join(sub)).unwrap();
            }
            let root = open_root(dir.path()).unwrap();
            let place = ensure_target(&root, Path::new("/volume"), Kind::Directory).unwrap();
            attach(new_fs("tmpfs", &[]).unwrap(), place.fd, Path::new("/volume")).unwrap();
            Self(dir)
        }

        fn root(&self) -> OwnedFd {
            open_root(self.0.path()).unwrap()
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            let _not_mounted = crate::mount::unmount(&self.at("volume"), crate::mount::UnmountMode::Detach);
        }
    }

    #[test]
    fn links_of_the_image_are_followed_inside_the_root() {
        let fixture = Fixture::new();
        symlink("/real", fixture.at("absolute")).unwrap();
        symlink("../../..//real", fixture.at("etc/climbs")).unwrap();
        for path in ["/absolute/sub", "/etc/climbs/sub", "/etc/../real/sub"] {
            let target = ensure_target(fixture.root(), Path::new(path), Kind::Directory).unwrap();
            assert_eq!(target.path, Path::new("/real/sub"), "{path}");
        }
        assert!(fixture.at("real/sub").is_dir());
        let resolved = resolve(fixture.root(), Path::new("/absolute/missing/../file")).unwrap();
        assert_eq!(resolved, Path::new("/real/file"));
    }

    #[test]
    fn links_inside_a_volume_are_never_followed() {
        let fixture = Fixture::new();
        symlink("/etc", fixture.at("volume/link")).unwrap();
        symlink("..", fixture.at("volume/up")).unwrap();
        for path in ["/volume/link", "/volume/link/sub", "/volume/up/etc"] {
            let error = ensure_target(fixture.root(), Path::new(path), Kind::Directory).unwrap_err();
            assert_eq!(error.errno(), Errno::ELOOP, "{path}");
            assert_eq!(resolve(fixture.root(), Path::new(path)).unwrap_err().errno(), Errno::ELOOP);
        }
        assert_eq!(std::fs::read_dir(fixture.at("etc")).unwrap().count(), 0);
    }

    #[test]
    fn mount_points_inside_a_volume_are_made_there() {
        let fixture = Fixture::new();
        let target = ensure_target(fixture.root(), Path::new("/volume/a/file"), Kind::File).unwrap();
        assert_eq!(target.path, Path::new("/volume/a/file"));
        assert!(fixture.at("volume/a/file").is_file());
    }

    #[test]
    fn a_circle_of_links_ends() {
        let fixture = Fixture::new();
        symlink("/b", fixture.at("a")).unwrap();
        symlink("/a", fixture.at("b")).unwrap();
        let error = ensure_target(fixture.root(), Path::new("/a"), Kind::Directory).unwrap_err();
        assert_eq!(error.errno(), Errno::ELOOP);
    }

    #[test]
    fn a_component_that_is_swapped_all_the_time_never_leads_out_of_the_volume() {
        let fixture = Fixture::new();
        let (root, volume) = (fixture.root(), fixture.at("volume"));
        std::fs::create_dir(volume.join("dir")).unwrap();
        symlink("/etc", volume.join("link")).unwrap();
        let volume_fd = rustix::fs::open(&volume, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(&volume_fd, "dir", &volume_fd, "link", exchange).unwrap();
                }
            });
            for _ in 0..5000 {
                match ensure_target(&root, Path::new("/volume/dir/sub"), Kind::Directory) {
                    Ok(target) => assert_eq!(target.path, Path::new("/volume/dir/sub")),
                    Err(error) => assert_eq!(error.errno(), Errno::ELOOP, "{error}"),
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(std::fs::read_dir(fixture.at("etc")).unwrap().count(), 0);
    }
}
