//! A tar archive of a container, unpacked on this machine.
//!
//! The archive is hostile: the container's owner writes it. So nothing is made outside of the
//! target directory: names with `..` and absolute ones are refused, links and devices are left out, and
//! the kernel resolves each path below the directory and through no link (openat2(2)). Memory, entries
//! and warnings are bounded; so is the file's size, by what the container really sends: sparse files,
//! whose holes it does not send, are refused.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use tar::EntryType;
use tokio::sync::mpsc;

use crate::cli::Error;

/// Of the headers of one entry: a name may have 4 KiB, and PAX headers repeat it.
const HEADER_BYTES: u64 = 1 << 20;
/// Linux' PATH_MAX.
const NAME_BYTES: usize = 4096;
/// Of an archive, with the directories that are made on the way to them.
const ENTRIES: usize = 1_000_000;
const WARNINGS: usize = 20;

const WITHIN: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Where an archive is unpacked.
#[derive(Debug)]
pub(super) struct Target {
    dir: OwnedFd,
    path: PathBuf,
    copy: CopyName,
    /// What it is called in the archive.
    prefix: Vec<OsString>,
    no_preserve: bool,
    /// [`ENTRIES`]; tests allow fewer.
    entries: usize,
}

/// What the copied file or directory is called in the target directory.
#[derive(Debug)]
pub(super) enum CopyName {
    As(OsString),
    /// A file has this name. The content of a directory goes into the target directory itself, as kubectl does it.
    FileAs(OsString),
}

/// What was left out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Skipped {
    pub(super) shown: Vec<String>,
    pub(super) more: usize,
}

impl Skipped {
    fn add(&mut self, what: String) {
        if self.shown.len() < WARNINGS { self.shown.push(what) } else { self.more += 1 }
    }
}

impl Target {
    /// Makes the directory if it is missing: its path is the user's own.
    pub(super) fn open(
        dir: &Path,
        copy: CopyName,
        prefix: Vec<OsString>,
        no_preserve: bool,
    ) -> Result<Self, Error> {
        let failed = |source: io::Error| Error::WriteFile { path: dir.to_owned(), source };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        Ok(Self { dir: opened, path: dir.to_owned(), copy, prefix, no_preserve, entries: ENTRIES })
    }

    pub(super) fn unpack(&self, pieces: mpsc::Receiver<Vec<u8>>) -> Result<Skipped, Error> {
        self.unpack_from(Pieces { pieces, piece: Vec::new(), at: 0 })
    }

    fn unpack_from(&self, stream: impl Read) -> Result<Skipped, Error> {
        let mut skipped = Skipped::default();
        let allowance = Rc::new(std::cell::Cell::new(0));
        let mut archive = tar::Archive::new(Limited { stream, left: Rc::clone(&allowance) });
        let mut entries = archive.entries().map_err(Error::Archive)?;
        let mut count = 0;
        loop {
            allowance.set(HEADER_BYTES);
            let Some(entry) = entries.next() else { break };
            let mut entry = entry.map_err(Error::Archive)?;
            if count >= self.entries {
                return Err(corrupt(&format!("it has more than {} entries and directories", self.entries)));
            }
            count += 1;
            allowance.set(u64::MAX);
            let name = entry.path().map_err(Error::Archive)?.into_owned();
            let kind = entry.header().entry_type();
            match kind {
                EntryType::XGlobalHeader => {}
                // Read to its end below, its holes would be written out as zeros, up to 2^63 of them.
                EntryType::GNUSparse => {
                    return Err(corrupt(&format!(
                        "{:?} is a sparse file, which cp does not copy",
                        shown(&name)
                    )));
                }
                EntryType::Symlink => {
                    let to = shown(&entry.link_name().ok().flatten().unwrap_or_default());
                    skipped.add(format!("symlink: {:?} -> {to:?}", shown(&name)));
                }
                EntryType::Directory | EntryType::Regular | EntryType::Continuous => {
                    let place = self.place(&name, kind == EntryType::Directory)?;
                    let mut made = 0;
                    if kind == EntryType::Directory {
                        self.make_directories(&place, &mut made)
                            .map_err(|e| self.failed(&place, e.into()))?;
                        // The last one is the entry itself.
                        made = made.saturating_sub(1);
                    } else {
                        let mode = entry.header().mode().unwrap_or(0o644);
                        self.write(&place, mode, &mut entry, &mut made)
                            .map_err(|e| self.failed(&place, e))?;
                    }
                    count += made;
                }
                _ => skipped.add(format!("{:?}: no file and no directory", shown(&name))),
            }
            // The rest of an entry is content: the next read begins with a header.
            io::copy(&mut entry, &mut io::sink()).map_err(Error::Archive)?;
        }
        Ok(skipped)
    }

    /// Where an entry goes, below the target directory.
    fn place(&self, name: &Path, is_directory: bool) -> Result<Vec<OsString>, Error> {
        if name.as_os_str().len() > NAME_BYTES {
            return Err(corrupt(&format!("a name has more than {NAME_BYTES} bytes: {:?}", shown(name))));
        }
        let mut names = Vec::new();
        for component in name.components() {
            match component {
                Component::Normal(name) => names.push(name.to_owned()),
                Component::CurDir => {}
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                    return Err(corrupt(&format!("{:?} leads out of the copied directory", shown(name))));
                }
            }
        }
        let Some(rest) = names.strip_prefix(self.prefix.as_slice()) else {
            return Err(corrupt(&format!("{:?} was not asked for", shown(name))));
        };
        let copy = match &self.copy {
            CopyName::As(copy) => Some(copy),
            CopyName::FileAs(copy) => (rest.is_empty() && !is_directory).then_some(copy),
        };
        Ok(copy.into_iter().chain(rest).cloned().collect())
    }

    /// Adds the number of those that were not there to `made`.
    fn make_directories(&self, place: &[OsString], made: &mut usize) -> rustix::io::Result<OwnedFd> {
        let mut dir = within(self.dir.as_fd(), OsStr::new("."), DIRECTORY, Mode::empty())?;
        for name in place {
            match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => *made += 1,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
            dir = within(dir.as_fd(), name, DIRECTORY, Mode::empty())?;
        }
        Ok(dir)
    }

    fn write(
        &self,
        place: &[OsString],
        mode: u32,
        content: &mut impl Read,
        made: &mut usize,
    ) -> io::Result<()> {
        let Some((name, parents)) = place.split_last() else {
            return Err(io::ErrorKind::IsADirectory.into());
        };
        let dir = self.make_directories(parents, made)?;
        // A FIFO of the user's in its place must not hold the copy up.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mode = if self.no_preserve { 0o644 } else { mode & 0o777 };
        let mut file = File::from(within(dir.as_fd(), name, flags, Mode::from_raw_mode(mode))?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is there, and no regular file"));
        }
        io::copy(content, &mut file).map(drop)
    }

    fn failed(&self, place: &[OsString], source: io::Error) -> Error {
        Error::WriteFile { path: self.path.join(shown(&place.iter().collect::<PathBuf>())), source }
    }
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn within(
    dir: std::os::fd::BorrowedFd<'_>,
    name: &OsStr,
    flags: OFlags,
    mode: Mode,
) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(dir, name, flags, mode, WITHIN)
}

fn corrupt(problem: &str) -> Error {
    Error::Corrupt { problem: problem.to_owned() }
}

/// The begin of a name, which may be long.
fn shown(name: &Path) -> String {
    name.display().to_string().chars().take(200).collect()
}

/// Ends with an error once the allowance of bytes is used up.
struct Limited<R> {
    stream: R,
    left: Rc<std::cell::Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left.get()).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 && !buffer.is_empty() {
            return Err(io::Error::other("the headers of an entry have more than 1 MiB"));
        }
        let read = self.stream.read(&mut buffer[..most])?;
        self.left.set(self.left.get().saturating_sub(read as u64));
        Ok(read)
    }
}

/// What a task received, as a stream.
struct Pieces {
    pieces: mpsc::Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() {
            let Some(piece) = self.pieces.blocking_recv() else { return Ok(0) };
            (self.piece, self.at) = (piece, 0);
        }
        let read = (&self.piece[self.at..]).read(buffer)?;
        self.at += read;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Archive(tar::Builder<Vec<u8>>);

    impl Archive {
        fn new() -> Self {
            Self(tar::Builder::new(Vec::new()))
        }

        /// A header as it is, with any name.
        fn add(mut self, name: &str, kind: EntryType, content: &str, link: &str) -> Self {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
            header.set_entry_type(kind);
            header.set_mode(0o750);
            header.set_size(content.len() as u64);
            header.set_cksum();
            self.0.append(&header, content.as_bytes()).unwrap();
            self
        }

        fn file(self, name: &str, content: &str) -> Self {
            self.add(name, EntryType::Regular, content, "")
        }

        fn unpack(self, dir: &Path, copy: &str, prefix: &[&str]) -> Result<Skipped, Error> {
            self.unpack_as(dir, CopyName::As(copy.into()), prefix)
        }

        fn unpack_as(self, dir: &Path, copy: CopyName, prefix: &[&str]) -> Result<Skipped, Error> {
            let prefix = prefix.iter().map(OsString::from).collect();
            let target = Target::open(dir, copy, prefix, false).unwrap();
            target.unpack_from(self.0.into_inner().unwrap().as_slice())
        }
    }

    #[test]
    fn files_come_with_their_modes_and_their_directories() {
        let dir = tempfile::tempdir().unwrap();
        let archive = Archive::new()
            .add("etc/app/", EntryType::Directory, "", "")
            .file("etc/app/a", "one")
            .file("./etc/app/sub/b", "two");
        assert_eq!(archive.unpack(dir.path(), "copy", &["etc", "app"]).unwrap(), Skipped::default());
        assert_eq!(fs::read_to_string(dir.path().join("copy/a")).unwrap(), "one");
        assert_eq!(fs::read_to_string(dir.path().join("copy/sub/b")).unwrap(), "two");
        let mode = fs::metadata(dir.path().join("copy/a")).unwrap().permissions().mode();
        assert_eq!(mode & 0o700, 0o700);
        Archive::new().file("etc/hosts", "x").unpack(dir.path(), "copy", &["etc", "hosts"]).unwrap_err();
        Archive::new().file("etc/hosts", "x").unpack(dir.path(), "file", &["etc", "hosts"]).unwrap();
        Archive::new().file("etc/hosts", "y").unpack(dir.path(), "file", &["etc", "hosts"]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("file")).unwrap(), "y");
    }

    #[test]
    fn an_existing_directory_gets_a_file_or_the_content_of_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let file = Archive::new().file("etc/hosts", "x");
        file.unpack_as(dir.path(), CopyName::FileAs("hosts".into()), &["etc", "hosts"]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("hosts")).unwrap(), "x");
        let directory = Archive::new().add("etc/", EntryType::Directory, "", "").file("etc/hosts", "y");
        directory.unpack_as(dir.path(), CopyName::FileAs("etc".into()), &["etc"]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("hosts")).unwrap(), "y");
        assert!(!dir.path().join("etc").exists());
    }

    #[test]
    fn nothing_is_made_outside_of_the_target() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir(&outside).unwrap();
        let out = outside.to_str().unwrap();
        for name in ["d/../../out/x", "../out/x", "d/..", "/etc/x", &format!("{out}/x")] {
            let error = Archive::new().file(name, "x").unpack(&inside, "d", &["d"]).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{name}: {error}");
        }
        let error = Archive::new().file("other/x", "x").unpack(&inside, "d", &["d"]).unwrap_err();
        assert_eq!(error.to_string(), "tar contents corrupted: \"other/x\" was not asked for");
        // A link in the archive is not made, so nothing is written through it.
        let archive = Archive::new()
            .add("d/link", EntryType::Symlink, "", out)
            .file("d/link/x", "x")
            .add("d/hard", EntryType::Link, "", "/etc/passwd")
            .add("d/pipe", EntryType::Fifo, "", "")
            .add("d/disk", EntryType::Block, "", "");
        let skipped = archive.unpack(&inside, "d", &["d"]).unwrap();
        assert_eq!(skipped.shown.len(), 4, "{skipped:?}");
        assert_eq!(skipped.shown[0], format!("symlink: \"d/link\" -> {out:?}"));
        assert!(inside.join("d/link").is_dir() && !inside.join("d/hard").exists());
        // Nor through links that are there already.
        symlink(&outside, inside.join("d/old")).unwrap();
        symlink(outside.join("y"), inside.join("d/file")).unwrap();
        for name in ["d/old/x", "d/file"] {
            let error = Archive::new().file(name, "x").unpack(&inside, "d", &["d"]).unwrap_err();
            assert!(matches!(error, Error::WriteFile { .. }), "{name}: {error}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_fifo_in_the_way_does_not_hold_the_copy_up() {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join("f"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        Archive::new().file("f", "x").unpack(dir.path(), "f", &["f"]).unwrap_err();
    }

    #[test]
    fn headers_and_warnings_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::new();
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(2 << 20);
        header.set_cksum();
        archive.0.append(&header, io::repeat(b'a').take(2 << 20)).unwrap();
        let error =
            archive.file("d/x", "x").unpack_as(dir.path(), CopyName::FileAs("copy".into()), &[]).unwrap_err();
        assert!(linux::chain(&error).contains("more than 1 MiB"), "{}", linux::chain(&error));
        let links = (0..50)
            .fold(Archive::new(), |archive, n| archive.add(&format!("d/{n}"), EntryType::Symlink, "", "x"));
        let skipped = links.unpack_as(dir.path(), CopyName::FileAs("copy".into()), &[]).unwrap();
        assert_eq!((skipped.shown.len(), skipped.more), (WARNINGS, 30));
        let directories = ["d", "d/e", "d/e/f", "d/e/f/g"];
        let four = || {
            directories
                .into_iter()
                .fold(Archive::new(), |archive, name| archive.add(name, EntryType::Directory, "", ""))
        };
        for (archive, expected) in [
            (four(), true),
            (four().file("x", ""), false),
            (Archive::new().file("a/b/c", "").file("x", ""), true),
            (Archive::new().file("a/b/c/d", "").file("x", ""), false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut target =
                Target::open(dir.path(), CopyName::FileAs("copy".into()), Vec::new(), false).unwrap();
            target.entries = 4;
            let unpacked = target.unpack_from(archive.0.into_inner().unwrap().as_slice());
            assert_eq!(unpacked.is_ok(), expected, "{unpacked:?}");
        }
    }

    #[test]
    fn long_names_are_refused_and_cut_in_messages() {
        let dir = tempfile::tempdir().unwrap();
        for (kind, bytes) in [(EntryType::Directory, 5000), (EntryType::Regular, 3000)] {
            let mut archive = Archive::new();
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(EntryType::GNULongName);
            header.set_size(bytes);
            header.set_cksum();
            archive.0.append(&header, io::repeat(b'a').take(bytes)).unwrap();
            let error = archive
                .add("a", kind, "", "")
                .unpack_as(dir.path(), CopyName::FileAs("copy".into()), &[])
                .unwrap_err();
            let said = linux::chain(&error);
            assert!(said.len() < 500 && said.contains(&"a".repeat(200)), "{said}");
            assert_eq!(said.contains("more than 4096 bytes"), bytes > 4096, "{said}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// Its holes are not in the stream: a small archive would be a large file, or zeros without end.
    #[test]
    fn a_sparse_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::new();
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..3].copy_from_slice(b"d/s");
        header.set_entry_type(EntryType::GNUSparse);
        header.set_size(0);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.sparse[0].set_offset(1 << 62);
        gnu.sparse[0].set_length(0);
        gnu.set_real_size(1 << 62);
        header.set_cksum();
        archive.0.append(&header, io::empty()).unwrap();
        let error = archive.unpack_as(dir.path(), CopyName::FileAs("copy".into()), &[]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tar contents corrupted: \"d/s\" is a sparse file, which cp does not copy"
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
