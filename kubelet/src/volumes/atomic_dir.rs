//! Replaces all files of a volume at once (kubernetes, pkg/volume/util/atomic_writer.go).
//!
//! The files lie in a directory `..<time>.<random>`. The link `..data` leads to it, and each first
//! component of a path is a link `<name>` to `..data/<name>`. One rename of `..data` replaces
//! everything. A program that is killed leaves the old files or the new ones: the next call removes
//! directories to which `..data` does not lead.
//!
//! Everything is opened below the volume's root, without following a link.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use linux::tree::{self, GroupAccess};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::error::Error;
use super::projected::{File, Files};

const DATA: &CStr = c"..data";
const NEW_DATA: &CStr = c"..data_tmp";
/// No name of a volume's file starts so.
const OWN: &[u8] = b"..";
const DIR_MODE: Mode = Mode::from_raw_mode(0o755);
/// `RESOLVE_BENEATH` can fail spuriously while others rename (openat2(2)), and only this kubelet renames here.
const WITHIN: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A volume's root, open.
#[derive(Debug)]
pub(super) struct AtomicDir {
    fd: OwnedFd,
    /// For errors.
    path: PathBuf,
}

impl AtomicDir {
    /// `path` is a directory of the kubelet, which no container can write.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let fd = rustix::fs::open(path, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
            .map_err(|e| Error::io("open", path, e.into()))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Whether the files were written before, at least once.
    pub(super) fn is_written(&self) -> Result<bool, Error> {
        Ok(self.current()?.is_some())
    }

    /// Makes `files` the volume's only files; `group`: fsGroup. Changes nothing if they are.
    pub(super) fn write(&self, files: &Files, group: Option<u32>) -> Result<(), Error> {
        let current = self.current()?;
        self.remove_leftovers(current.as_deref())?;
        let wanted = with_group_access(files, group);
        let is_same = match &current {
            Some(name) => self.read(name)?.is_some_and(|found| found == wanted),
            None => false,
        };
        if !is_same {
            self.replace(files, group)?;
        }
        self.link_names(files)?;
        if !is_same {
            // No link leads to the former directory any more.
            self.remove_leftovers(self.current()?.as_deref())?;
        }
        Ok(())
    }

    /// The name of the directory to which `..data` leads; `None` if there is no such directory.
    fn current(&self) -> Result<Option<CString>, Error> {
        let target = match rustix::fs::readlinkat(&self.fd, DATA, Vec::new()) {
            Ok(target) => target,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(self.error("read link", DATA, e)),
        };
        match rustix::fs::statat(&self.fd, &target, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Directory => Ok(Some(target)),
            Ok(_) | Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(self.error("stat", &target, e)),
        }
    }

    fn replace(&self, files: &Files, group: Option<u32>) -> Result<(), Error> {
        let name = new_name()?;
        rustix::fs::mkdirat(&self.fd, &name, DIR_MODE)
            .map_err(|e| self.error("create directory", &name, e))?;
        let dir = self.open_below(self.fd.as_fd(), &name, DIRECTORY)?;
        self.set_mode(&dir, &name, DIR_MODE)?;
        for (path, file) in files {
            self.write_file(&dir, path, file)?;
        }
        if let Some(group) = group {
            tree::give_group(&dir, group, GroupAccess::ReadOnly, &AtomicBool::new(false))
                .map_err(|source| Error::FsGroup { root: self.path.clone(), group, source })?;
        }
        rustix::fs::symlinkat(&name, &self.fd, NEW_DATA).map_err(|e| self.error("link", NEW_DATA, e))?;
        rustix::fs::renameat(&self.fd, NEW_DATA, &self.fd, DATA).map_err(|e| self.error("rename to", DATA, e))
    }

    fn write_file(&self, dir: &OwnedFd, path: &str, file: &File) -> Result<(), Error> {
        let mut parents: Vec<&str> = path.split('/').collect();
        let name = self.c_string(parents.pop().unwrap_or_default())?;
        let mut at = dir.try_clone().map_err(|e| Error::io("open", &self.path, e))?;
        for parent in parents {
            let parent = self.c_string(parent)?;
            match rustix::fs::mkdirat(&at, &parent, DIR_MODE) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(self.error("create directory", &parent, e)),
            }
            at = self.open_below(at.as_fd(), &parent, DIRECTORY)?;
            self.set_mode(&at, &parent, DIR_MODE)?;
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&at, &name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| self.error("create", &name, e))?;
        let mut made = std::fs::File::from(made);
        made.write_all(&file.content).map_err(|e| Error::io("write", &self.path.join(path), e))?;
        // The process's umask does not apply here.
        self.set_mode(made.as_fd(), &name, Mode::from_raw_mode(file.mode))
    }

    /// Makes the links `<name>` to `..data/<name>`, and removes those of files that are gone.
    fn link_names(&self, files: &Files) -> Result<(), Error> {
        let mut wanted: BTreeMap<&str, ()> = BTreeMap::new();
        for path in files.keys() {
            wanted.insert(path.split('/').next().unwrap_or(path), ());
        }
        for name in wanted.keys() {
            let (name, target) = (self.c_string(name)?, self.c_string(&format!("..data/{name}"))?);
            match rustix::fs::symlinkat(&target, &self.fd, &name) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(self.error("link", &name, e)),
            }
        }
        for name in self.names()? {
            let is_wanted = name.to_str().is_ok_and(|name| wanted.contains_key(name));
            if !is_wanted && !name.to_bytes().starts_with(OWN) {
                rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty())
                    .map_err(|e| self.error("remove", &name, e))?;
            }
        }
        Ok(())
    }

    /// Removes what killed or finished calls left: every `..*` but `..data` and `current`.
    fn remove_leftovers(&self, current: Option<&CStr>) -> Result<(), Error> {
        for name in self.names()? {
            let is_own = name.to_bytes().starts_with(OWN) && name.as_c_str() != DATA;
            if !is_own || Some(name.as_c_str()) == current {
                continue;
            }
            match rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR | Errno::PERM) => {
                    let shown = self.path.join(OsStr::from_bytes(name.to_bytes()));
                    tree::remove_in(self.fd.as_fd(), &name, &shown).map_err(Error::Kernel)?;
                }
                Err(e) => return Err(self.error("remove", &name, e)),
            }
        }
        Ok(())
    }

    /// The files below the directory `name`; `None` if they cannot be the kubelet's.
    fn read(&self, name: &CStr) -> Result<Option<Files>, Error> {
        let root = self.open_below(self.fd.as_fd(), name, DIRECTORY)?;
        let mut files = Files::new();
        // Paths, since a volume may have more directories than this process may have descriptors.
        let mut pending = vec![String::new()];
        while let Some(prefix) = pending.pop() {
            let below = if prefix.is_empty() { "." } else { &prefix };
            let dir = self.open_below(root.as_fd(), &self.c_string(below)?, DIRECTORY)?;
            for (name, kind) in list(dir.as_fd()).map_err(|e| self.error("list", name, e))? {
                let Ok(text) = name.to_str() else { return Ok(None) };
                let path = format!("{prefix}{text}");
                match kind {
                    FileType::Directory => {
                        pending.push(format!("{path}/"));
                    }
                    FileType::RegularFile => {
                        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                        let mut file = std::fs::File::from(self.open_below(dir.as_fd(), &name, flags)?);
                        let found = rustix::fs::fstat(&file).map_err(|e| self.error("stat", &name, e))?;
                        let mut content = Vec::new();
                        file.read_to_end(&mut content)
                            .map_err(|e| Error::io("read", &self.path.join(&path), e))?;
                        files.insert(path, File { content, mode: found.st_mode & 0o777 });
                    }
                    _ => return Ok(None),
                }
            }
        }
        Ok(Some(files))
    }

    fn names(&self) -> Result<Vec<CString>, Error> {
        let listed = list(self.fd.as_fd()).map_err(|e| Error::io("list", &self.path, e.into()))?;
        Ok(listed.into_iter().map(|(name, _)| name).collect())
    }

    fn open_below(&self, dir: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> Result<OwnedFd, Error> {
        rustix::fs::openat2(dir, name, flags, Mode::empty(), WITHIN).map_err(|e| self.error("open", name, e))
    }

    fn set_mode(&self, file: impl AsFd, name: &CStr, mode: Mode) -> Result<(), Error> {
        rustix::fs::fchmod(file, mode).map_err(|e| self.error("set permissions of", name, e))
    }

    fn c_string(&self, name: &str) -> Result<CString, Error> {
        CString::new(name).map_err(|e| Error::io("open", &self.path.join(name), e.into()))
    }

    fn error(&self, op: &'static str, name: &CStr, errno: Errno) -> Error {
        Error::io(op, &self.path.join(OsStr::from_bytes(name.to_bytes())), errno.into())
    }
}

/// The modes that the files have once they are the group's.
fn with_group_access(files: &Files, group: Option<u32>) -> Files {
    let mut wanted = files.clone();
    if group.is_some() {
        wanted.values_mut().for_each(|file| file.mode |= 0o440);
    }
    wanted
}

/// As kubelet names it: the time in UTC, and a random number.
fn new_name() -> Result<CString, Error> {
    let time = jiff::Timestamp::now().strftime("%Y_%m_%d_%H_%M_%S");
    let random = u32::from_ne_bytes(linux::random::bytes().map_err(Error::Kernel)?);
    Ok(CString::new(format!("..{time}.{random}")).expect("digits contain no NUL"))
}

fn list(dir: BorrowedFd<'_>) -> rustix::io::Result<Vec<(CString, FileType)>> {
    let mut entries = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                let found = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(found.st_mode)
            }
            kind => kind,
        };
        entries.push((name.to_owned(), kind));
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn files(files: &[(&str, &str, u32)]) -> Files {
        let file = |(path, text, mode): &(&str, &str, u32)| {
            ((*path).to_owned(), File { content: text.as_bytes().to_vec(), mode: *mode })
        };
        files.iter().map(file).collect()
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_replaced_together_by_one_link() {
        let root = tempfile::tempdir().unwrap();
        let dir = AtomicDir::open(root.path()).unwrap();
        assert!(!dir.is_written().unwrap());
        dir.write(&files(&[("a", "1", 0o644), ("x/y/z", "2", 0o400)]), None).unwrap();
        assert!(dir.is_written().unwrap());
        let read = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
        assert_eq!((read("a").as_str(), read("x/y/z").as_str()), ("1", "2"));
        let mode = |path: &str| fs::metadata(root.path().join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("x/y/z"), mode("x")), (0o644, 0o400, 0o755));
        assert_eq!(fs::read_link(root.path().join("a")).unwrap(), Path::new("..data/a"));
        let before = fs::read_link(root.path().join("..data")).unwrap();

        dir.write(&files(&[("a", "1", 0o644), ("x/y/z", "2", 0o400)]), None).unwrap();
        assert_eq!(fs::read_link(root.path().join("..data")).unwrap(), before, "nothing has changed");

        dir.write(&files(&[("a", "new", 0o600)]), None).unwrap();
        assert_eq!((read("a").as_str(), mode("a")), ("new", 0o600));
        let after = fs::read_link(root.path().join("..data")).unwrap();
        assert_eq!(names(root.path()), [&after.display().to_string(), "..data", "a"]);
        dir.write(&Files::new(), None).unwrap();
        assert_eq!(names(root.path()).len(), 2);
    }

    #[test]
    fn what_a_killed_kubelet_left_is_completed_or_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = AtomicDir::open(root.path()).unwrap();
        dir.write(&files(&[("old", "1", 0o644)]), None).unwrap();
        // Killed while it wrote the files.
        fs::create_dir_all(root.path().join("..2020_01_01_00_00_00.7/x")).unwrap();
        fs::write(root.path().join("..2020_01_01_00_00_00.7/x/y"), "half").unwrap();
        // Killed before the rename.
        std::os::unix::fs::symlink("..2020_01_01_00_00_00.7", root.path().join("..data_tmp")).unwrap();
        dir.write(&files(&[("old", "1", 0o644)]), None).unwrap();
        assert_eq!(names(root.path()).len(), 3);
        // Killed after the rename, before the names were linked.
        fs::remove_file(root.path().join("old")).unwrap();
        std::os::unix::fs::symlink("..data/gone", root.path().join("gone")).unwrap();
        dir.write(&files(&[("old", "1", 0o644)]), None).unwrap();
        assert_eq!(names(root.path())[1..], ["..data", "old"]);
        assert_eq!(fs::read_to_string(root.path().join("old")).unwrap(), "1");
        // Killed, and then the disk lost the files.
        fs::write(root.path().join("..data/old"), "").unwrap();
        dir.write(&files(&[("old", "1", 0o644)]), None).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("old")).unwrap(), "1");
    }

    #[test]
    fn the_group_can_read_every_file_before_it_is_shown() {
        let root = tempfile::tempdir().unwrap();
        let dir = AtomicDir::open(root.path()).unwrap();
        dir.write(&files(&[("x/a", "1", 0o400)]), Some(2000)).unwrap();
        let found = fs::metadata(root.path().join("x/a")).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o777), (2000, 0o440));
        let before = fs::read_link(root.path().join("..data")).unwrap();
        dir.write(&files(&[("x/a", "1", 0o400)]), Some(2000)).unwrap();
        assert_eq!(fs::read_link(root.path().join("..data")).unwrap(), before);
    }
}
