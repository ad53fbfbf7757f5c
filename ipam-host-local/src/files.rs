//! The lease files of one network, in the reference's format: one file for each address (`lease`),
//! and beside them `lock` and `last_reserved_ip.<number of the range set>`. The files are
//! authoritative; the index only speeds up lookups.
//!
//! Invariant: a lease appears with its whole content or not at all.

use std::cell::RefCell;
use std::fs::{DirBuilder, File, FileTimes, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use crate::Error;
use crate::index::format::{Stamp, life};
use crate::lease::{self, Holder};

/// In bytes. Container ids have 64 characters, and interface names up to 15.
const USUAL_LEASE: usize = 1024;

/// In bytes. A container id is passed in an environment variable, whose length Linux limits to this
/// (execve(2), `MAX_ARG_STRLEN`).
const LONGEST_LEASE: u64 = 128 * 1024;

/// The network's directory.
#[derive(Debug)]
pub(crate) struct LeaseFiles {
    path: PathBuf,
    dir: File,
    /// For an incomplete lease, if the file system has no unnamed files.
    scratch: PathBuf,
    /// A lease that could not be read, and the error: its address counts as taken.
    unread: RefCell<Option<(PathBuf, i32)>>,
}

/// `last_reserved_ip.<number of the range set>`, opened.
#[derive(Debug)]
pub(crate) struct Place {
    name: String,
    /// `None` if it does not exist yet.
    file: Option<File>,
    /// Bytes.
    length: usize,
    /// The address that was reserved last, if known.
    last: Option<IpAddr>,
}

impl Place {
    pub(crate) fn last(&self) -> Option<IpAddr> {
        self.last
    }

    pub(crate) fn is_new(&self) -> bool {
        self.file.is_none()
    }
}

/// A lease file as found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) holder: Holder,
    /// See [`crate::index::format::Entry::life`].
    pub(crate) life: u64,
}

impl LeaseFiles {
    /// Opens `path`, and creates it if it is missing. `scratch` is a directory on the same file
    /// system, which need not exist.
    pub(crate) fn create(path: PathBuf, scratch: PathBuf) -> Result<Self, Error> {
        if let Ok(dir) = open_dir(&path) {
            return Ok(Self::of(path, dir, scratch));
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&path)
            .map_err(|e| Error::disk("mkdir", &path, e))?;
        let dir = open_dir(&path).map_err(|e| Error::disk("open", &path, e))?;
        Ok(Self::of(path, dir, scratch))
    }

    /// `None` if the directory does not exist.
    pub(crate) fn open(path: PathBuf, scratch: PathBuf) -> Result<Option<Self>, Error> {
        match open_dir(&path) {
            Ok(dir) => Ok(Some(Self::of(path, dir, scratch))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::disk("open", &path, e)),
        }
    }

    fn of(path: PathBuf, dir: File, scratch: PathBuf) -> Self {
        Self { path, dir, scratch, unread: RefCell::default() }
    }

    /// The error of a lease that was skipped, if any.
    pub(crate) fn unread(&self) -> Option<Error> {
        let unread = self.unread.borrow();
        unread.as_ref().map(|(path, code)| Error::disk("read", path, io::Error::from_raw_os_error(*code)))
    }

    /// Waits for the lock, which the reference uses too (flock(2)). It is held until the file is
    /// closed.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        let failed = |op| move |e: io::Error| Error::disk(op, &self.path.join("lock"), e);
        loop {
            // With the reference's flags and mode: for reading, 0750.
            let file =
                self.open_file("lock", OFlag::O_RDONLY | OFlag::O_CREAT, 0o750).map_err(failed("open"))?;
            match file.lock() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                outcome => outcome.map_err(failed("lock"))?,
            }
            // A lock file that was removed meanwhile excludes no other process.
            if file.metadata().map_err(failed("stat"))?.nlink() > 0 {
                return Ok(file);
            }
        }
    }

    /// The lease of `ip`, if there is one.
    pub(crate) fn read(&self, ip: IpAddr) -> Result<Option<Found>, Error> {
        self.read_named(&ip.to_string())
    }

    /// Calls `visit` with every lease.
    pub(crate) fn scan(&self, mut visit: impl FnMut(IpAddr, Found)) -> Result<(), Error> {
        let list = |e| Error::disk("readdir", &self.path, e);
        for entry in std::fs::read_dir(&self.path).map_err(list)? {
            let name = entry.map_err(list)?.file_name();
            let Some((ip, name)) = name.to_str().and_then(|name| Some((lease::address(name)?, name))) else {
                continue;
            };
            // May have been removed by hand meanwhile.
            if let Some(found) = self.read_named(name)? {
                visit(ip, found);
            }
        }
        Ok(())
    }

    /// Gives the lease its name, its only one: it cannot be published again. `None` if the address is
    /// taken; otherwise the identity of the file.
    pub(crate) fn publish(&self, lease: &NewLease, ip: IpAddr) -> Result<Option<u64>, Error> {
        let name = ip.to_string();
        let linked = match lease.link(&self.dir, &name) {
            Err(Errno::EEXIST) => match self.read_named(&name)? {
                Some(Found { holder: Holder::Empty, .. }) => {
                    self.remove(ip)?;
                    lease.link(&self.dir, &name)
                }
                _ => return Ok(None),
            },
            other => other,
        };
        match linked {
            // The lease exists, even if this fails: 0 is no file's identity.
            Ok(()) => Ok(Some(self.published(lease, &name).map_or(0, |file| life_of(&file)))),
            Err(Errno::EEXIST) => Ok(None),
            Err(e) => Err(Error::disk("link", &self.path.join(&name), e)),
        }
    }

    /// The file of a lease that was linked to `name`.
    fn published(&self, lease: &NewLease, name: &str) -> io::Result<Metadata> {
        match lease {
            NewLease::Nameless(file) => file.metadata(),
            NewLease::Named(scratch) => {
                // First: this changes the file's ctime, which is a part of its identity.
                std::fs::remove_file(scratch)?;
                self.open_file(name, OFlag::O_PATH | OFlag::O_NOFOLLOW, 0)?.metadata()
            }
        }
    }

    /// Removes the lease of `ip`; a missing one is a success.
    pub(crate) fn remove(&self, ip: IpAddr) -> Result<(), Error> {
        let name = ip.to_string();
        match unlinkat(&self.dir, name.as_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(e) => Err(Error::disk("remove", &self.path.join(name), e)),
        }
    }

    /// Writes `content` to a file without a visible name.
    pub(crate) fn new_lease(&self, content: &str) -> Result<NewLease, Error> {
        // No fsync: no container of this lease survives a power failure, and a lease that is empty
        // afterwards counts as free.
        let nameless = OpenOptions::new()
            .write(true)
            .custom_flags(OFlag::O_TMPFILE.bits())
            .mode(0o600)
            .open(&self.path)
            .and_then(|mut file| file.write_all(content.as_bytes()).map(|()| file));
        match nameless {
            Ok(file) => Ok(NewLease::Nameless(file)),
            // EISDIR: the kernel lacks the flag. EOPNOTSUPP: the file system does.
            Err(e)
                if matches!(
                    e.raw_os_error().map(Errno::from_raw),
                    Some(Errno::EISDIR | Errno::EOPNOTSUPP)
                ) =>
            {
                self.new_named_lease(content)
            }
            Err(e) => Err(Error::disk("create lease in", &self.path, e)),
        }
    }

    pub(crate) fn new_named_lease(&self, content: &str) -> Result<NewLease, Error> {
        // One name is enough: the lock is held, and a crash's leftover is replaced.
        let path = self.scratch.join("lease");
        let written = DirBuilder::new().recursive(true).mode(0o700).create(&self.scratch).and_then(|()| {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            // From here on, Drop removes the file after a failure.
            let lease = NewLease::Named(path.clone());
            file.write_all(content.as_bytes()).map(|()| lease)
        });
        written.map_err(|e| Error::disk("write", &path, e))
    }

    /// The round-robin position in range set `set`.
    pub(crate) fn place(&self, set: usize) -> Place {
        let name = format!("last_reserved_ip.{set}");
        let mut place = Place { name, file: None, length: 0, last: None };
        // A failure only loses the position, for this call.
        let Ok(mut file) = self.open_file(&place.name, OFlag::O_RDWR, 0) else { return place };
        let mut buffer = [0; 64];
        if let Ok(content) = read_some(&mut file, &mut buffer) {
            place.length = content.len();
            place.last = str::from_utf8(content).ok().and_then(|text| text.parse().ok());
            place.last = place.last.map(|ip| ip.to_canonical());
        }
        place.file = Some(file);
        place
    }

    /// Records `ip` as the last address. Overwrites in place as the reference does, but without
    /// truncating first: one address over another needs no space on a full disk. After a crash
    /// half-way, the file has another address or none, and the next call continues from elsewhere.
    pub(crate) fn note_last(&self, place: &mut Place, ip: IpAddr) -> Result<(), Error> {
        let failed = |e| Error::disk("write", &self.path.join(&place.name), e);
        let text = ip.to_string();
        if place.file.is_none() {
            let flags = OFlag::O_RDWR | OFlag::O_CREAT;
            place.file = Some(self.open_file(&place.name, flags, 0o600).map_err(failed)?);
        }
        let Some(file) = &place.file else { return Ok(()) };
        file.write_all_at(text.as_bytes(), 0).map_err(failed)?;
        if place.length > text.len() {
            file.set_len(text.len() as u64).map_err(failed)?;
        }
        place.length = text.len();
        place.last = Some(ip);
        Ok(())
    }

    pub(crate) fn stamp(&self) -> Result<Stamp, Error> {
        let metadata = self.dir.metadata().map_err(|e| Error::disk("stat", &self.path, e))?;
        Ok(Stamp {
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Sets the directory's modification time to a unique value, and returns the directory's stamp:
    /// it differs after any later change, however soon. Before Linux 6.13, the kernel's own times
    /// are those of its last tick, up to 10 ms ago, so two changes within a tick look the same. A
    /// tick is never a second old.
    ///
    /// `None` if the file system does not store nanoseconds.
    pub(crate) fn set_stamp(&self) -> Result<Option<Stamp>, Error> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Odd: a file system with micro- or milliseconds does not return this value.
        let time = Duration::new(now.as_secs().saturating_sub(1), now.subsec_nanos() | 1);
        self.dir
            .set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + time))
            .map_err(|e| Error::disk("set time of", &self.path, e))?;
        let wanted = (time.as_secs().cast_signed(), i64::from(time.subsec_nanos()));
        Ok(Some(self.stamp()?).filter(|stamp| stamp.modified == wanted))
    }

    fn read_named(&self, name: &str) -> Result<Option<Found>, Error> {
        match self.try_read_named(name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) if is_of_the_file(&e) => {
                let path = self.path.join(name);
                let code = e.raw_os_error().unwrap_or_default();
                let why = Error::disk("read", &path, e);
                cni_plugin::warn("host-local", format_args!("{why}: the address counts as taken"));
                self.unread.replace(Some((path, code)));
                Ok(Some(Found { holder: Holder::Other, life: 0 }))
            }
            read => read.map(Some).map_err(|e| Error::disk("read", &self.path.join(name), e)),
        }
    }

    fn try_read_named(&self, name: &str) -> io::Result<Found> {
        // Non-blocking, in case the name is a FIFO without a writer.
        let mut file = self.open_file(name, OFlag::O_RDONLY | OFlag::O_NONBLOCK, 0)?;
        let metadata = file.metadata()?;
        let holder = if metadata.is_file() { read_holder(&mut file)? } else { Holder::Other };
        Ok(Found { holder, life: life_of(&metadata) })
    }

    fn open_file(&self, name: &str, flags: OFlag, mode: u32) -> io::Result<File> {
        let flags = flags | OFlag::O_CLOEXEC;
        Ok(openat(&self.dir, name, flags, Mode::from_bits_truncate(mode)).map(File::from)?)
    }
}

/// Whether only this file is unreadable: a bad block, or another file type made by hand. The
/// reference skips such a file, and its address stays taken.
fn is_of_the_file(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(
        errno,
        Some(
            Errno::EIO
                | Errno::EUCLEAN
                | Errno::EBADMSG
                | Errno::ENODATA
                | Errno::ELOOP
                | Errno::ENXIO
                | Errno::EACCES
                | Errno::EPERM
        )
    )
}

fn read_holder(file: &mut File) -> io::Result<Holder> {
    let mut buffer = [0; USUAL_LEASE + 1];
    let start = read_some(file, &mut buffer)?;
    if start.len() <= USUAL_LEASE {
        return Ok(Holder::read(start));
    }
    let mut content = start.to_vec();
    file.take(LONGEST_LEASE).read_to_end(&mut content)?;
    let is_longer = content.len() as u64 > LONGEST_LEASE;
    Ok(if is_longer { Holder::Other } else { Holder::read(&content) })
}

/// One read: a regular file returns everything that fits.
fn read_some<'b>(file: &mut File, buffer: &'b mut [u8]) -> io::Result<&'b [u8]> {
    loop {
        match file.read(buffer) {
            Ok(length) => return Ok(&buffer[..length]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn open_dir(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(OFlag::O_DIRECTORY.bits()).open(path)
}

fn life_of(file: &Metadata) -> u64 {
    life(file.ino(), (file.ctime(), file.ctime_nsec()))
}

/// A complete lease without a name, or with a temporary one.
#[derive(Debug)]
pub(crate) enum NewLease {
    /// `O_TMPFILE`: disappears with the process unless it is linked.
    Nameless(File),
    /// For file systems without `O_TMPFILE`.
    Named(PathBuf),
}

impl NewLease {
    fn link(&self, dir: &File, name: &str) -> nix::Result<()> {
        match self {
            Self::Nameless(file) => {
                let source = format!("/proc/self/fd/{}", file.as_raw_fd());
                linkat(AT_FDCWD, source.as_str(), dir, name, AtFlags::AT_SYMLINK_FOLLOW)
            }
            Self::Named(source) => linkat(AT_FDCWD, source, dir, name, AtFlags::empty()),
        }
    }
}

impl Drop for NewLease {
    fn drop(&mut self) {
        if let Self::Named(path) = self {
            // The next lease replaces a file that stays; no reader sees it.
            let _may_be_gone = std::fs::remove_file(path);
        }
    }
}
