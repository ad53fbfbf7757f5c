//! Removal of a tree that somebody else filled, and may be filling still.
//!
//! What cannot be removed (an immutable file) is passed over, and named when the rest
//! is gone. A read-only subvolume of Btrfs is made writable first. A mount ends the removal at once: it was left by mistake, and what is in
//! it is not the tree's. Nothing is created or renamed, so a full disk is no obstacle.
//! Writers cannot keep it busy for ever: a directory that fills again is listed
//! [`MOST_ROUNDS`] times, and the whole ends after [`TIME_LIMIT`].

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{Identity, WITHIN, open_dir};
use crate::{Error, Result, btrfs};

/// How often a directory is emptied that is never found empty afterwards.
const MOST_ROUNDS: u8 = 8;
/// How often the walk begins anew because the directory it was in was moved.
const MOST_STARTS: u8 = 8;
/// A repetition goes on from there. Far beyond what millions of files take.
const TIME_LIMIT: Duration = Duration::from_secs(600);
/// Directories that are remembered of one that is being emptied: it is listed again
/// when they are gone. Fewer where many levels remember some.
const fn batch(depth: usize) -> usize {
    if depth < 64 { 4096 } else { 64 }
}
/// Entries of one directory that could not be removed, before it is given up.
const MOST_FAILED: usize = 1024;

/// Removes `path` and all below; its absence is a success. Killed or failed at any
/// point, a repetition goes on. `path` may be reached through links, but the last
/// component is none: `ENOTDIR`.
pub fn remove(path: &Path) -> Result<()> {
    let Some(name) = path.file_name() else {
        return Err(Error::at("remove tree", path, Errno::INVAL));
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = match rustix::fs::openat(CWD, parent, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => opened.map_err(|e| Error::at("open", parent, e))?,
    };
    let name = CString::new(name.as_bytes()).map_err(|e| Error::at("remove tree", path, e))?;
    Removal::new(path, TIME_LIMIT).run(parent.as_fd(), &name)
}

/// [`remove`] of the directory `name` in `parent`, called `shown` in errors.
pub fn remove_in(parent: BorrowedFd<'_>, name: &CStr, shown: &Path) -> Result<()> {
    Removal::new(shown, TIME_LIMIT).run(parent, name)
}

struct Removal<'a> {
    shown: &'a Path,
    until: Instant,
    failed: usize,
    first: Option<Error>,
}

/// A directory that is being emptied.
struct Level {
    name: CString,
    /// Of the directory that it is in.
    parent: Identity,
    /// Directories in it, and how often each was emptied already.
    pending: Vec<(CString, u8)>,
    rounds: u8,
    /// Whether the last listing came to its end.
    listed: bool,
    failed: BTreeSet<CString>,
}

impl Level {
    fn is_given_up(&self) -> bool {
        self.failed.len() >= MOST_FAILED
    }
}

impl<'a> Removal<'a> {
    fn new(shown: &'a Path, limit: Duration) -> Self {
        Self { shown, until: Instant::now() + limit, failed: 0, first: None }
    }

    fn run(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<()> {
        let mut starts = 0;
        loop {
            starts += 1;
            (self.failed, self.first) = (0, None);
            match self.empty(parent, name) {
                Err(e) if starts < MOST_STARTS && e.errno() == nix::errno::Errno::ESTALE => {}
                Err(e) => return Err(e),
                Ok(()) => break,
            }
        }
        match self.first.take() {
            Some(first) if self.failed > 1 => {
                let object = format!("{} and {} more", first.object, self.failed - 1);
                Err(Error { object, ..first })
            }
            Some(first) => Err(first),
            None => Ok(()),
        }
    }

    /// Removes `name` and all below, but for what is recorded as failed.
    fn empty(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<()> {
        let mut here = open_dir(parent, c".", ResolveFlags::empty())
            .map_err(|e| Error::at("open directory of", self.shown, e))?;
        // The first level is the directory that holds the tree, of which one entry is removed.
        let mut levels = vec![Level {
            name: CString::default(),
            parent: Identity::of(&here)?,
            pending: vec![(name.to_owned(), 0)],
            rounds: 0,
            listed: true,
            failed: BTreeSet::new(),
        }];
        while let Some(level) = levels.last_mut() {
            if Instant::now() > self.until {
                return Err(self.is_late(&levels));
            }
            if let Some((name, rounds)) = level.pending.pop() {
                match open_dir(&here, &name, WITHIN) {
                    Ok(child) => {
                        let parent = Identity::of(&here)?;
                        if Identity::of(&child)?.device() != parent.device()
                            && let Err(e) = btrfs::make_writable(&child)
                        {
                            self.fail(&mut levels, name, "make subvolume writable", e);
                            continue;
                        }
                        levels.push(Level {
                            name,
                            parent,
                            pending: Vec::new(),
                            rounds,
                            listed: false,
                            failed: BTreeSet::new(),
                        });
                        here = child;
                    }
                    Err(Errno::NOENT) => {}
                    // It became something else; the root of the tree must not have.
                    Err(Errno::NOTDIR | Errno::LOOP) if levels.len() > 1 => {
                        self.unlink(&here, &name, &mut levels)?;
                    }
                    Err(Errno::XDEV) => return Err(self.is_mounted(&levels, &name)),
                    Err(e) => self.fail(&mut levels, name, "open directory", e),
                }
            } else if !level.listed && !level.is_given_up() {
                self.list(&here, &mut levels)?;
            } else {
                let Some(done) = levels.pop() else { break };
                if levels.is_empty() {
                    break;
                }
                here = done.parent.open_parent(&here)?;
                self.leave(&here, done, &mut levels)?;
            }
        }
        Ok(())
    }

    /// Unlinks what is no directory and notes the directories, until there are many.
    fn list(&mut self, here: &OwnedFd, levels: &mut [Level]) -> Result<()> {
        let failed = |e| Error::new("list", self.path(levels, c""), e);
        let mut entries = Dir::read_from(here).map_err(failed)?;
        loop {
            if Instant::now() > self.until {
                return Err(self.is_late(levels));
            }
            let Some(entry) = entries.next() else { break };
            let entry = entry.map_err(|e| Error::new("list", self.path(levels, c""), e))?;
            let name = entry.file_name();
            let Some(level) = levels.last_mut() else { return Ok(()) };
            if name == c"." || name == c".." || level.failed.contains(name) {
                continue;
            }
            if entry.file_type() == FileType::Directory {
                level.pending.push((name.to_owned(), 0));
            } else {
                self.unlink(here, name, levels)?;
            }
            let most = batch(levels.len());
            if levels.last().is_some_and(|level| level.pending.len() >= most || level.is_given_up()) {
                return Ok(());
            }
        }
        if let Some(level) = levels.last_mut() {
            level.listed = true;
        }
        Ok(())
    }

    fn unlink(&mut self, here: &OwnedFd, name: &CStr, levels: &mut [Level]) -> Result<()> {
        match rustix::fs::unlinkat(here, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            // Of unknown type where the file system does not say.
            Err(Errno::ISDIR) => {
                if let Some(level) = levels.last_mut() {
                    level.pending.push((name.to_owned(), 0));
                }
            }
            Err(Errno::BUSY) => return Err(self.is_mounted(levels, name)),
            Err(e) => self.fail(levels, name.to_owned(), "remove", e),
        }
        Ok(())
    }

    /// Removes the directory `done`, which is emptied, from `here`.
    fn leave(&mut self, here: &OwnedFd, done: Level, levels: &mut [Level]) -> Result<()> {
        if !done.failed.is_empty() {
            // Named already, by what is in it.
            if let Some(level) = levels.last_mut() {
                level.failed.insert(done.name);
            }
            return Ok(());
        }
        match rustix::fs::unlinkat(here, &done.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) if done.rounds < MOST_ROUNDS => {
                if let Some(level) = levels.last_mut() {
                    level.pending.push((done.name, done.rounds + 1));
                }
            }
            Err(Errno::BUSY) => return Err(self.is_mounted(levels, &done.name)),
            Err(e) => self.fail(levels, done.name, "remove directory", e),
        }
        Ok(())
    }

    fn fail(&mut self, levels: &mut [Level], name: CString, op: &'static str, errno: Errno) {
        self.failed += 1;
        if self.first.is_none() {
            let op = match errno {
                Errno::PERM => "remove (is it immutable? see lsattr(1))",
                _ => op,
            };
            self.first = Some(Error::new(op, self.path(levels, &name), errno));
        }
        if let Some(level) = levels.last_mut() {
            level.failed.insert(name);
        }
    }

    fn is_late(&self, levels: &[Level]) -> Error {
        Error::new("remove in time (is it being filled?)", self.path(levels, c""), Errno::TIMEDOUT)
    }

    fn is_mounted(&self, levels: &[Level], name: &CStr) -> Error {
        Error::new("remove mount point (unmount it first)", self.path(levels, name), Errno::BUSY)
    }

    /// For errors: the beginning and the end of a path that may have any length.
    fn path(&self, levels: &[Level], name: &CStr) -> String {
        const SHOWN: usize = 4;
        let names = levels.iter().map(|level| level.name.as_c_str()).chain([name]);
        // The first level has no name, and the root's own is in `shown`.
        let names: Vec<&[u8]> = names.map(CStr::to_bytes).filter(|name| !name.is_empty()).skip(1).collect();
        let mut path = PathBuf::from(self.shown);
        let push = |path: &mut PathBuf, names: &[&[u8]]| {
            for name in names {
                path.push(std::ffi::OsString::from_vec(name.to_vec()));
            }
        };
        if names.len() <= 2 * SHOWN {
            push(&mut path, &names);
        } else {
            push(&mut path, &names[..SHOWN]);
            path.push(format!("({} directories)", names.len() - 2 * SHOWN));
            push(&mut path, &names[names.len() - SHOWN..]);
        }
        path.as_os_str().as_bytes().escape_ascii().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::{self, UnmountMode};
    use crate::tree::tests::in_own_mounts;
    use rustix::fs::{IFlags, ioctl_setflags};
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

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
        remove(&root).unwrap();
        assert!(!root.exists());
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn a_root_that_is_a_link_is_refused_and_a_missing_one_is_a_success() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("real")).unwrap();
        symlink(dir.path().join("real"), dir.path().join("root")).unwrap();
        let err = remove(&dir.path().join("root")).unwrap_err();
        assert_eq!(err.errno(), nix::errno::Errno::ENOTDIR);
        assert!(dir.path().join("real").exists());
        remove(&dir.path().join("none")).unwrap();
        remove(&dir.path().join("no/parent")).unwrap();
    }

    /// Deeper than the limits of stacks, of descriptors and of path lengths, and of
    /// directories that nobody may enter.
    #[test]
    fn a_tree_of_thirty_thousand_levels_goes() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let long = CString::new("n".repeat(200)).unwrap();
        let mut here = open_dir(CWD, &root, ResolveFlags::empty()).unwrap();
        for level in 0..30_000 {
            let name = if level % 100 == 0 { long.as_c_str() } else { c"d" };
            rustix::fs::mkdirat(&here, name, Mode::from(0o000)).unwrap();
            if level % 100 == 0 {
                rustix::fs::mkdirat(&here, c"beside", Mode::from(0o000)).unwrap();
            }
            here = open_dir(&here, name, WITHIN).unwrap();
        }
        drop(here);
        remove(&root).unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn a_mount_inside_ends_the_removal_and_keeps_what_is_in_it() {
        in_own_mounts(|| {
            for place in ["root", "root/a/mounted"] {
                let dir = tempfile::tempdir().unwrap();
                let (root, mounted, source) =
                    (dir.path().join("root"), dir.path().join(place), dir.path().join("source"));
                std::fs::create_dir_all(root.join("a")).unwrap();
                std::fs::create_dir_all(&mounted).unwrap();
                std::fs::create_dir(&source).unwrap();
                // A bind of the same file system, which st_dev does not tell apart.
                mount::bind(&source, &mounted).unwrap();
                std::fs::write(source.join("kept"), "").unwrap();
                let err = remove(&root).unwrap_err();
                assert_eq!(err.errno(), nix::errno::Errno::EBUSY);
                assert!(
                    err.to_string().contains(&format!("unmount it first) {}", mounted.display())),
                    "{err}"
                );
                assert!(source.join("kept").exists());
                mount::unmount(&mounted, UnmountMode::Detach).unwrap();
                remove(&root).unwrap();
                assert!(source.join("kept").exists());
            }
        });
    }

    #[test]
    fn a_file_that_is_mounted_on_ends_the_removal() {
        in_own_mounts(|| {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("root");
            std::fs::create_dir(&root).unwrap();
            let file = root.join("file");
            std::fs::write(&file, "").unwrap();
            mount::bind(Path::new("/etc/passwd"), &file).unwrap();
            assert_eq!(remove(&root).unwrap_err().errno(), nix::errno::Errno::EBUSY);
            mount::unmount(&file, UnmountMode::Detach).unwrap();
            remove(&root).unwrap();
        });
    }

    #[test]
    fn what_is_immutable_is_named_and_the_rest_goes() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let root = dir.path().join("root");
        for name in ["a/fixed", "b/c", "d"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("file"), "").unwrap();
        }
        let fixed = open_dir(CWD, root.join("a/fixed"), ResolveFlags::empty()).unwrap();
        ioctl_setflags(&fixed, IFlags::IMMUTABLE).unwrap();
        let failed = remove(&root);
        ioctl_setflags(&fixed, IFlags::empty()).unwrap();
        let err = failed.unwrap_err();
        assert_eq!(err.errno(), nix::errno::Errno::EPERM);
        let expected = format!("remove (is it immutable? see lsattr(1)) {}/a/fixed/file", root.display());
        assert_eq!(err.to_string(), expected);
        assert!(root.join("a/fixed/file").exists());
        assert!(!root.join("b").exists() && !root.join("d").exists());
        remove(&root).unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn writers_that_go_on_do_not_keep_it_busy_for_ever() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        let stop = AtomicBool::new(false);
        let name = CString::new("root").unwrap();
        let parent = open_dir(CWD, dir.path(), ResolveFlags::empty()).unwrap();
        let started = Instant::now();
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (stop, root) = (&stop, &root);
                scope.spawn(move || {
                    // The tree is made again, and a directory changes its place.
                    for number in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        drop(std::fs::create_dir_all(root.join(format!("a/b/{writer}-{}", number % 64))));
                        drop(std::fs::write(root.join(format!("a/{writer}-{number}")), ""));
                        drop(std::fs::rename(root.join("a/b"), root.join("b")));
                        drop(std::fs::rename(root.join("b"), root.join("a/b")));
                    }
                });
            }
            for _ in 0..20 {
                // Either is right; to go on without an end is not.
                drop(Removal::new(&root, Duration::from_millis(200)).run(parent.as_fd(), &name));
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(started.elapsed() < Duration::from_secs(60));
        remove(&root).unwrap();
        assert!(!root.exists());
    }
}
