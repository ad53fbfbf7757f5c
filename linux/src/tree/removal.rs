//! Removes a tree that untrusted processes filled and may still be filling.
//!
//! Entries that cannot be removed (an immutable file) are skipped, and reported at the end. A
//! read-only Btrfs subvolume is made writable first. A mount stops the removal at once: it was left
//! by mistake, and its contents do not belong to the tree. Nothing is created, and no step depends on a rename, so a full
//! disk is no problem. Directories on very deep levels are moved up where possible: otherwise each level would take
//! memory, and nothing would be removed before the deepest one is reached. Writers cannot keep the removal busy forever: a directory that fills again
//! is listed [`MOST_ROUNDS`] times, and the whole removal stops after [`TIME_LIMIT`].

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;

use super::{Identity, WITHIN, open_dir};
use crate::{Error, Result, btrfs};

/// How often a directory is emptied that always fills again.
const MOST_ROUNDS: u8 = 8;
/// How often the walk starts over because its current directory was moved.
const MOST_STARTS: u8 = 8;
/// A repeated call continues. Far more than millions of files take.
const TIME_LIMIT: Duration = Duration::from_secs(600);
/// Subdirectories remembered for a directory that is being emptied: it is listed again after them.
/// Fewer on deeper levels, so that all together remember some 50,000 names, and one more for each level: who
/// made the tree chooses its shape.
const fn batch(depth: usize) -> usize {
    match depth {
        0..4 => 4096,
        4..64 => 256,
        64..1024 => 16,
        _ => 1,
    }
}
/// Directories on deeper levels are moved to the top of the tree. More than [`TOP`].
const MOST_LEVELS: usize = 10_000;
/// The level of the tree itself. The one before is the directory that contains it.
const TOP: usize = 1;
/// After this many failed entries in one directory, the rest is skipped.
const MOST_FAILED: usize = 1024;

/// Removes `path` with its contents; a missing one is a success. After a kill or a failure at any
/// point, a repeated call continues. `path` may lead through links, but its last component may not
/// be one: `ENOTDIR`.
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

/// [`remove`] for the directory `name` in `parent`; errors name it `shown`.
pub fn remove_in(parent: BorrowedFd<'_>, name: &CStr, shown: &Path) -> Result<()> {
    Removal::new(shown, TIME_LIMIT).run(parent, name)
}

struct Removal<'a> {
    shown: &'a Path,
    until: Instant,
    most_levels: usize,
    failed: usize,
    first: Option<Error>,
}

/// A directory that is being emptied.
struct Level {
    name: CString,
    /// The directory that contains it.
    parent: Identity,
    /// Its subdirectories, and how often each was emptied.
    pending: Vec<(CString, u8)>,
    rounds: u8,
    /// Whether the last listing was complete.
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
        let until = Instant::now() + limit;
        Self { shown, until, most_levels: MOST_LEVELS, failed: 0, first: None }
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

    /// Removes `name` and its contents, except entries that are recorded as failed.
    fn empty(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<()> {
        let mut here = open_dir(parent, c".", ResolveFlags::empty())
            .map_err(|e| Error::at("open directory of", self.shown, e))?;
        // The first level is the directory that contains the tree; only one of its entries is
        // removed.
        let mut levels = vec![Level {
            name: CString::default(),
            parent: Identity::of(&here)?,
            pending: vec![(name.to_owned(), 0)],
            rounds: 0,
            listed: true,
            failed: BTreeSet::new(),
        }];
        let mut tops = Tops::default();
        while let Some(level) = levels.last_mut() {
            if Instant::now() > self.until {
                return Err(self.is_late(&levels));
            }
            if let Some((name, rounds)) = level.pending.pop() {
                if level.pending.is_empty() {
                    // One name is remembered on most levels.
                    level.pending = Vec::new();
                }
                if levels.len() > self.most_levels && tops.take(&here, &name, &mut levels) {
                    continue;
                }
                match open_dir(&here, &name, WITHIN) {
                    Ok(child) => {
                        let parent = Identity::of(&here)?;
                        if !Identity::of(&child)?.is_on_device_of(parent) {
                            if let Err(e) = btrfs::make_writable(&child) {
                                self.fail(&mut levels, name, "make subvolume writable", e);
                                continue;
                            }
                            if tops.take_subvolume(&here, &name, &mut levels) {
                                continue;
                            }
                            tops.enter_subvolume(&child, &levels);
                        }
                        levels.push(Level {
                            name,
                            parent,
                            pending: Vec::new(),
                            rounds,
                            listed: false,
                            failed: BTreeSet::new(),
                        });
                        if levels.len() == TOP + 1 {
                            tops.tree = child.try_clone().ok();
                        }
                        here = child;
                    }
                    Err(Errno::NOENT) => {}
                    // Its type changed; for the root of the tree that is an error.
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
                if levels.len() == TOP + 1 {
                    tops.subvolume = None;
                }
                here = done.parent.open_parent(&here)?;
                self.leave(&here, done, &mut levels)?;
            }
        }
        Ok(())
    }

    /// Unlinks everything but directories, and remembers those up to a limit.
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
            // The type is unknown if the file system does not report it.
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

    /// Removes the emptied directory `done` from `here`.
    fn leave(&mut self, here: &OwnedFd, done: Level, levels: &mut [Level]) -> Result<()> {
        if !done.failed.is_empty() {
            // Reported already, with the failed entry in it.
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

    /// For errors: the beginning and the end of a path of any length.
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

/// Where directories on deep levels are moved to.
#[derive(Default)]
struct Tops {
    /// The root of the tree, once it was entered.
    tree: Option<OwnedFd>,
    /// The root of a Btrfs subvolume directly in the tree, while that is emptied: a directory cannot be moved out of a
    /// subvolume. The entry of a subvolume can.
    subvolume: Option<OwnedFd>,
}

impl Tops {
    /// Moves the directory `name` up. False if it cannot be moved: the disk is full, or something is mounted on it, or
    /// it belongs to another project.
    fn take(&self, here: &OwnedFd, name: &CStr, levels: &mut [Level]) -> bool {
        match (&self.subvolume, &self.tree) {
            (Some(top), _) => move_into(top, here, name, levels, TOP + 1),
            (None, Some(top)) => move_into(top, here, name, levels, TOP),
            (None, None) => false,
        }
    }

    /// Moves the subvolume `name` up, unless it is directly in the tree.
    fn take_subvolume(&self, here: &OwnedFd, name: &CStr, levels: &mut [Level]) -> bool {
        let tree = self.tree.as_ref().filter(|_| levels.len() > TOP + 1);
        tree.is_some_and(|tree| move_into(tree, here, name, levels, TOP))
    }

    /// Called before its level is added.
    fn enter_subvolume(&mut self, root: &OwnedFd, levels: &[Level]) {
        if levels.len() == TOP + 1 {
            self.subvolume = root.try_clone().ok();
        }
    }
}

/// Moves the directory `name` from `here` to `top`, the directory of `level`, under a name that nothing has.
fn move_into(top: &OwnedFd, here: &OwnedFd, name: &CStr, levels: &mut [Level], level: usize) -> bool {
    let moved = crate::random::hexadecimal().ok().and_then(|name| CString::new(name).ok());
    let (Some(moved), Some(found)) = (moved, levels.get_mut(level)) else { return false };
    if rustix::fs::renameat_with(here, name, top, &*moved, RenameFlags::NOREPLACE).is_err() {
        return false;
    }
    if found.pending.len() < batch(level + 1) {
        found.pending.push((moved, 0));
    } else {
        // It is listed again.
        found.listed = false;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btrfs::tests::on_btrfs;
    use crate::mount::{self, UnmountMode};
    use crate::tree::tests::in_own_mounts;
    use rustix::fs::{IFlags, ioctl_setflags};
    use std::os::fd::AsRawFd;
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
    /// directories without any permission bits.
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

    /// Directories on deeper levels are moved up.
    fn remove_with(root: &Path, most_levels: usize) -> Result<()> {
        let parent = open_dir(CWD, root.parent().unwrap(), ResolveFlags::empty()).unwrap();
        let name = CString::new(root.file_name().unwrap().as_bytes()).unwrap();
        Removal { most_levels, ..Removal::new(root, TIME_LIMIT) }.run(parent.as_fd(), &name)
    }

    /// On how many levels below `root` the directory is now.
    fn levels_below(root: &Path, directory: &OwnedFd) -> usize {
        let now = std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap();
        now.strip_prefix(root).unwrap().components().count()
    }

    #[test]
    fn directories_on_deep_levels_are_moved_up_and_removed_there() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let root = dir.path().join("root");
        let deepest = root.join("a/b/c/d/e/f/g/h");
        for name in ["a/beside", "a/b/c/d/beside", "a/b/c/d/e/beside/below", "a/b/c/d/e/f/g/h"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("file"), "").unwrap();
        }
        let fixed = open_dir(CWD, &deepest, ResolveFlags::empty()).unwrap();
        ioctl_setflags(&fixed, IFlags::IMMUTABLE).unwrap();
        let failed = remove_with(&root, 3);
        ioctl_setflags(&fixed, IFlags::empty()).unwrap();
        assert_eq!(failed.unwrap_err().errno(), nix::errno::Errno::EPERM);
        let levels = levels_below(&root, &fixed);
        assert!((1..=3).contains(&levels), "{levels}");
        drop(fixed);
        remove_with(&root, TOP + 1).unwrap();
        assert!(!root.exists());
    }

    /// A directory cannot be moved out of a subvolume. The subvolume can.
    #[test]
    fn deep_directories_of_a_subvolume_are_moved_up_inside_it() {
        on_btrfs(|at| {
            let root = at.join("root");
            let mut here = root.join("a/b/c");
            std::fs::create_dir_all(&here).unwrap();
            for subvolume in [c"outer", c"inner"] {
                drop(btrfs::tests::create(&here, subvolume));
                here = here.join(subvolume.to_str().unwrap()).join("d/e/f/g/h/i");
                std::fs::create_dir_all(&here).unwrap();
                std::fs::write(here.join("file"), "").unwrap();
            }
            let fixed = open_dir(CWD, &here, ResolveFlags::empty()).unwrap();
            ioctl_setflags(&fixed, IFlags::IMMUTABLE).unwrap();
            let failed = remove_with(&root, TOP + 3);
            ioctl_setflags(&fixed, IFlags::empty()).unwrap();
            assert_eq!(failed.unwrap_err().errno(), nix::errno::Errno::EPERM);
            let levels = levels_below(&root, &fixed);
            assert!((2..=4).contains(&levels), "{levels}");
            assert!(!root.join("a").exists(), "the outer subvolume and what contained it are gone");
            drop(fixed);
            remove_with(&root, TOP + 3).unwrap();
            assert!(!root.exists());
        });
    }

    #[test]
    fn more_deep_directories_than_are_remembered_are_removed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = dir.path().join("root");
        let deep = root.join("a/b/c");
        for number in 0..3 * batch(TOP + 1) {
            std::fs::create_dir_all(deep.join(format!("{number}/below"))).unwrap();
        }
        remove_with(&root, TOP + 2).unwrap();
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
                // A bind of the same file system has the same st_dev.
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
