//! Leases of one network, one file per address, in the reference's format: the
//! file's name is the address, its content `<container id>\r\n<ifname>`; beside
//! them `lock` and `last_reserved_ip.<number of the range set>`.
//!
//! Invariants: a lease appears with its whole content or not at all, and is
//! only made or removed while [`LockedStore`] is held. The reference holds the
//! same lock, so an empty lease seen under it is what a crash of the reference
//! left, and is free.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, Flock, FlockArg, OFlag};
use nix::unistd::linkat;

use crate::{Error, Range};

/// Who holds an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub container_id: String,
    pub ifname: String,
}

impl Owner {
    fn content(&self) -> String {
        format!("{}\r\n{}", self.container_id, self.ifname)
    }
}

/// The directory of one network's leases.
#[derive(Debug)]
pub struct LeaseStore {
    dir: PathBuf,
}

impl LeaseStore {
    /// `<data_dir>/<network>`, made when missing. `network` is a checked name.
    pub fn open(data_dir: &Path, network: &str) -> Result<Self, Error> {
        let dir = data_dir.join(network);
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&dir)
            .map_err(|e| Error::disk("create directory", &dir, e))?;
        Ok(Self { dir })
    }

    /// Waits for the lock that the reference takes, too.
    pub fn lock(&self) -> Result<LockedStore<'_>, Error> {
        let path = self.dir.join("lock");
        // As the reference opens it: for reading, mode 0750.
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_CREAT.bits())
            .mode(0o750)
            .open(&path)
            .map_err(|e| Error::disk("open", &path, e))?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(lock) => return Ok(LockedStore { dir: &self.dir, _lock: lock }),
                Err((back, Errno::EINTR)) => file = back,
                Err((_, errno)) => return Err(Error::disk("lock", &path, errno)),
            }
        }
    }
}

/// The leases while nobody else changes them.
#[derive(Debug)]
pub struct LockedStore<'a> {
    dir: &'a Path,
    _lock: Flock<File>,
}

impl LockedStore<'_> {
    /// Gives `owner` the first free one of `candidates` and remembers it as the
    /// last one of range set `set`. `None` when all are taken.
    pub fn reserve_first<'r>(
        &self,
        candidates: impl Iterator<Item = (IpAddr, &'r Range)>,
        set: usize,
        owner: &Owner,
    ) -> Result<Option<(IpAddr, &'r Range)>, Error> {
        let lease = NewLease::write(self.dir, &owner.content())?;
        for (ip, range) in candidates {
            if !self.publish(&lease, ip)? {
                continue;
            }
            if let Err(cause) = self.remember(set, ip) {
                return Err(match self.remove(ip) {
                    Ok(()) => cause,
                    Err(undo) => Error::Rollback { cause: Box::new(cause), rollback: vec![undo] },
                });
            }
            return Ok(Some((ip, range)));
        }
        Ok(None)
    }

    /// The addresses that `owner` holds. The oldest format has no interface
    /// name: such a lease is held by every interface of its container.
    pub fn held_by(&self, owner: &Owner) -> Result<Vec<IpAddr>, Error> {
        let (full, bare) = (owner.content(), owner.container_id.as_str());
        let leases = self.leases()?;
        Ok(leases.into_iter().filter(|l| l.content == full || l.content == bare).map(|l| l.ip).collect())
    }

    /// Removes what `owner` holds; only if that is nothing, leases of the
    /// oldest format with its container id.
    pub fn release(&self, owner: &Owner) -> Result<(), Error> {
        let leases = self.leases()?;
        let holding = |content: &str| leases.iter().filter(|l| l.content == content).map(|l| l.ip).collect();
        let mut held: Vec<IpAddr> = holding(&owner.content());
        if held.is_empty() {
            held = holding(&owner.container_id);
        }
        held.into_iter().try_for_each(|ip| self.remove(ip))
    }

    /// Removes the lease of `ip`; absence is a success.
    pub fn remove(&self, ip: IpAddr) -> Result<(), Error> {
        let path = self.dir.join(ip.to_string());
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::disk("remove", &path, e)),
            _ => Ok(()),
        }
    }

    /// The address that range set `set` gave last; `None` when not known, which
    /// only costs the round robin its place.
    pub fn last_reserved(&self, set: usize) -> Option<IpAddr> {
        std::fs::read_to_string(self.last_path(set)).ok()?.trim().parse().ok()
    }

    fn remember(&self, set: usize, ip: IpAddr) -> Result<(), Error> {
        // In place, as the reference does: a crash half-way leaves something
        // that is no address, which `last_reserved` takes as not known.
        let path = self.last_path(set);
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(ip.to_string().as_bytes()))
            .map_err(|e| Error::disk("write", &path, e))
    }

    fn last_path(&self, set: usize) -> PathBuf {
        self.dir.join(format!("last_reserved_ip.{set}"))
    }

    /// Whether `ip` was free and is now the lease's.
    fn publish(&self, lease: &NewLease, ip: IpAddr) -> Result<bool, Error> {
        let path = self.dir.join(ip.to_string());
        match lease.link(&path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let crashed = std::fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == 0);
                if !crashed {
                    return Ok(false);
                }
                self.remove(ip)?;
                lease.link(&path).map(|()| true).map_err(|e| Error::disk("create", &path, e))
            }
            Err(e) => Err(Error::disk("create", &path, e)),
        }
    }

    fn leases(&self) -> Result<Vec<Lease>, Error> {
        let list = |e| Error::disk("list", self.dir, e);
        let mut leases = Vec::new();
        for entry in std::fs::read_dir(self.dir).map_err(list)? {
            let entry = entry.map_err(list)?;
            let Some(ip) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            match std::fs::read(entry.path()) {
                Ok(bytes) => {
                    leases.push(Lease { ip, content: String::from_utf8_lossy(&bytes).trim().to_owned() });
                }
                // Removed by hand meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::disk("read", &entry.path(), e)),
            }
        }
        Ok(leases)
    }
}

struct Lease {
    ip: IpAddr,
    content: String,
}

/// A written lease that has no name yet, or only a temporary one.
#[derive(Debug)]
enum NewLease {
    /// `O_TMPFILE`: vanishes with the process unless linked.
    Nameless(File),
    /// For file systems without `O_TMPFILE`.
    Named(PathBuf),
}

impl NewLease {
    fn write(dir: &Path, content: &str) -> Result<Self, Error> {
        // No fsync: after a power failure no container of this lease lives, and
        // a lease that came back empty counts as free.
        let nameless = OpenOptions::new()
            .write(true)
            .custom_flags(OFlag::O_TMPFILE.bits())
            .mode(0o600)
            .open(dir)
            .and_then(|mut file| file.write_all(content.as_bytes()).map(|()| file));
        match nameless {
            Ok(file) => Ok(Self::Nameless(file)),
            // EISDIR: a kernel, EOPNOTSUPP: a file system that does not know the flag.
            Err(e)
                if matches!(
                    e.raw_os_error().map(Errno::from_raw),
                    Some(Errno::EISDIR | Errno::EOPNOTSUPP)
                ) =>
            {
                Self::write_named(dir, content)
            }
            Err(e) => Err(Error::disk("create lease in", dir, e)),
        }
    }

    fn write_named(dir: &Path, content: &str) -> Result<Self, Error> {
        // One name is enough: the lock is held, and a crash's leftover is replaced.
        let path = dir.join(".new_lease");
        let lease = Self::Named(path.clone());
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(content.as_bytes()))
            .map_err(|e| Error::disk("write", &path, e))?;
        Ok(lease)
    }

    /// `AlreadyExists` when the name is taken.
    fn link(&self, path: &Path) -> io::Result<()> {
        match self {
            Self::Nameless(file) => {
                let source = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
                linkat(AT_FDCWD, &source, AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW).map_err(io::Error::from)
            }
            Self::Named(source) => std::fs::hard_link(source, path),
        }
    }
}

impl Drop for NewLease {
    fn drop(&mut self) {
        if let Self::Named(path) = self {
            // What stays is replaced by the next lease and read by nobody.
            drop(std::fs::remove_file(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::range::RawRange;
    use crate::{RangeSet, allocate};

    fn owner(id: &str) -> Owner {
        Owner { container_id: id.to_owned(), ifname: "eth0".to_owned() }
    }

    fn ranges() -> Vec<RangeSet> {
        let subnet = cni_plugin::conf::parse_cidr("10.0.0.0/29");
        vec![RangeSet::new(&[RawRange { subnet, ..RawRange::default() }]).unwrap()]
    }

    fn add(store: &LeaseStore, id: &str) -> Result<String, String> {
        let ips = allocate(&store.lock().unwrap(), &ranges(), &[], &owner(id));
        ips.map(|ips| ips[0].address.ip().to_string()).map_err(|e| cni_plugin::CniError::from(e).msg)
    }

    #[test]
    fn the_files_are_the_references() {
        let dir = tempfile::tempdir().unwrap();
        let store = LeaseStore::open(dir.path(), "net").unwrap();
        assert_eq!(add(&store, "a").unwrap(), "10.0.0.2");

        let at = |name: &str| dir.path().join("net").join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().mode() & 0o7777;
        assert_eq!(std::fs::read(at("10.0.0.2")).unwrap(), b"a\r\neth0");
        assert_eq!(std::fs::read(at("last_reserved_ip.0")).unwrap(), b"10.0.0.2");
        assert_eq!(std::fs::read(at("lock")).unwrap(), b"");
        assert_eq!((mode("10.0.0.2"), mode("last_reserved_ip.0"), mode("lock")), (0o600, 0o600, 0o750));
        assert_eq!(std::fs::read_dir(dir.path().join("net")).unwrap().count(), 3);
    }

    #[test]
    fn an_empty_lease_of_a_crashed_writer_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let store = LeaseStore::open(dir.path(), "net").unwrap();
        std::fs::write(dir.path().join("net/10.0.0.2"), "").unwrap();
        assert_eq!(add(&store, "a").unwrap(), "10.0.0.2");
        assert_eq!(std::fs::read(dir.path().join("net/10.0.0.2")).unwrap(), b"a\r\neth0");
    }

    #[test]
    fn a_lease_of_the_oldest_format_is_known_and_released() {
        let dir = tempfile::tempdir().unwrap();
        let store = LeaseStore::open(dir.path(), "net").unwrap();
        std::fs::write(dir.path().join("net/10.0.0.5"), "a\n").unwrap();
        let refused = add(&store, "a").unwrap_err();
        let expected = "failed to allocate for range 0: 10.0.0.5 has been allocated to a, duplicate allocation is not allowed";
        assert_eq!(refused, expected);
        store.lock().unwrap().release(&owner("a")).unwrap();
        assert!(!dir.path().join("net/10.0.0.5").exists());
    }

    #[test]
    fn a_lease_without_its_second_file_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = LeaseStore::open(dir.path(), "net").unwrap();
        // A directory in its place makes the write fail for root, too.
        std::fs::create_dir(dir.path().join("net/last_reserved_ip.0")).unwrap();
        assert!(add(&store, "a").unwrap_err().contains("write "));
        assert!(!dir.path().join("net/10.0.0.2").exists());
    }

    #[test]
    fn a_file_system_without_nameless_files_gets_the_same_lease() {
        let dir = tempfile::tempdir().unwrap();
        let lease = NewLease::write_named(dir.path(), "a\r\neth0").unwrap();
        let path = dir.path().join("10.0.0.2");
        lease.link(&path).unwrap();
        assert_eq!(lease.link(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        drop(lease);
        assert_eq!(std::fs::read(&path).unwrap(), b"a\r\neth0");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
