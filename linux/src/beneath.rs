//! Paths below a directory whose content others control and change meanwhile: the kernel resolves
//! each path in one call, and refuses one that leads outside (openat2(2), `RESOLVE_BENEATH`).
//!
//! Symbolic links are followed as long as they stay below the directory; absolute ones are refused
//! (`EXDEV`), and so are /proc's magic links (`ELOOP`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::{Error, Result};

const WITHIN: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// The permission bits, and setgid: a directory inherits it with its group.
const INHERITED: u32 = 0o2000;
/// A rename during the call can make it fail with `EAGAIN` (openat2(2)). A user who renames all the
/// time gets this error for a path of that user's own.
const ATTEMPTS: u32 = 64;

/// Opens the file at `path` below `root` (`O_PATH`).
pub fn open(root: impl AsFd, path: &Path) -> Result<OwnedFd> {
    resolve(root.as_fd(), path, OFlags::PATH | OFlags::CLOEXEC).map_err(|e| Error::at("open", path, e))
}

/// Opens the file at `path` below `root`, and makes a directory for each missing component, with the
/// permission bits `mode`, without regard to the umask.
pub fn ensure(root: impl AsFd, path: &Path, mode: u32) -> Result<OwnedFd> {
    let root = root.as_fd();
    match resolve(root, path, OFlags::PATH | OFlags::CLOEXEC) {
        Err(Errno::NOENT) => {}
        found => return found.map_err(|e| Error::at("open", path, e)),
    }
    let (mut parent, mut reached) = (PathBuf::from("."), PathBuf::new());
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::CurDir => continue,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(Error::at("create directory", path, Errno::INVAL));
            }
        };
        reached.push(name);
        match resolve(root, &reached, OFlags::PATH | OFlags::CLOEXEC) {
            Ok(_) => {}
            Err(Errno::NOENT) => make(root, &parent, Path::new(name), mode)
                .map_err(|e| Error::at("create directory", &reached, e))?,
            Err(e) => return Err(Error::at("open", &reached, e)),
        }
        parent.clone_from(&reached);
    }
    open(root, path)
}

fn make(root: BorrowedFd<'_>, parent: &Path, name: &Path, mode: u32) -> rustix::io::Result<()> {
    let parent = resolve(root, parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
    match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode & 0o777)) {
        // Another one made it: its mode is that one's.
        Err(Errno::EXIST) => return Ok(()),
        made => made?,
    }
    let made =
        rustix::fs::openat2(&parent, name, DIRECTORY, Mode::empty(), WITHIN | ResolveFlags::NO_SYMLINKS)?;
    let inherited = rustix::fs::fstat(&made)?.st_mode & INHERITED;
    rustix::fs::fchmod(&made, Mode::from_raw_mode(mode & 0o777 | inherited))
}

fn resolve(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    resolve_within(root, path, flags, WITHIN)
}

/// openat2(2) that a rename during the call does not fail.
pub(crate) fn resolve_within(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    within: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let mut left = ATTEMPTS;
    loop {
        left -= 1;
        match rustix::fs::openat2(root, path, flags, Mode::empty(), within) {
            Err(Errno::AGAIN) if left > 0 => {}
            resolved => return resolved,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn missing_directories_are_made_with_their_mode() {
        let dir = tempfile::tempdir().unwrap();
        let root = File::open(dir.path()).unwrap();
        ensure(&root, Path::new("a/b"), 0o777).unwrap();
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("a/b")), (0o777, 0o777));
        ensure(&root, Path::new("a/b"), 0o700).unwrap();
        assert_eq!(mode("a/b"), 0o777, "it was there");
        fs::set_permissions(dir.path().join("a"), fs::Permissions::from_mode(0o2770)).unwrap();
        ensure(&root, Path::new("a/c"), 0o750).unwrap();
        assert_eq!(mode("a/c"), 0o2750);
        // A link inside is followed, and what is missing is made behind it.
        symlink("a/b", dir.path().join("link")).unwrap();
        ensure(&root, Path::new("link/d"), 0o755).unwrap();
        assert!(dir.path().join("a/b/d").is_dir());
    }

    #[test]
    fn no_path_leads_outside() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir(&inside).unwrap();
        fs::create_dir(&outside).unwrap();
        symlink("../out", inside.join("relative")).unwrap();
        symlink(&outside, inside.join("absolute")).unwrap();
        symlink("../out/missing", inside.join("dangling")).unwrap();
        symlink("/proc/self/root", inside.join("magic")).unwrap();
        let root = File::open(&inside).unwrap();
        for path in
            ["relative", "relative/x", "absolute/x", "dangling", "dangling/x", "magic/x", "../out", "/"]
        {
            let path = Path::new(path);
            open(&root, path).unwrap_err();
            ensure(&root, path, 0o755).unwrap_err();
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    /// A user of the volume swaps a directory with a link while the path is resolved.
    #[test]
    fn a_directory_that_becomes_a_link_meanwhile_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir_all(inside.join("a/b")).unwrap();
        fs::create_dir_all(outside.join("b")).unwrap();
        fs::write(outside.join("b/secret"), "").unwrap();
        symlink(&outside, inside.join("swap")).unwrap();
        let (root, stop) = (File::open(&inside).unwrap(), AtomicBool::new(false));
        let (mut opened, mut refused) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let flags = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(&root, "a", &root, "swap", flags).unwrap();
                }
            });
            while (opened < 500 || refused < 500) && opened + refused < 1_000_000 {
                match ensure(&root, Path::new("a/b/new"), 0o755) {
                    Ok(found) => {
                        let above = rustix::fs::openat(&found, "..", OFlags::PATH, Mode::empty()).unwrap();
                        let secret = rustix::fs::statat(&above, "secret", rustix::fs::AtFlags::empty());
                        assert_eq!(secret.unwrap_err(), Errno::NOENT, "it lies outside");
                        opened += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(opened >= 500 && refused >= 500, "{opened} opened, {refused} refused");
        let outside: Vec<_> =
            fs::read_dir(outside.join("b")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(outside, ["secret"], "nothing was made outside");
    }
}
