//! Network namespaces: opened by path, entered on a thread of their own, kept
//! alive by a bind-mounted file.
//!
//! Invariant: after a call, the calling thread is in the same namespace as before, except for
//! [`NetNs::enter`]. To get a socket in another namespace, open it inside [`NetNs::run`] or
//! [`NetNs::visit`]; it stays in that namespace.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};

use crate::{Error, Result};

/// The calling thread's own network namespace.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// An open network namespace; it lives at least as long as this value.
#[derive(Debug)]
pub struct NetNs {
    file: File,
    path: PathBuf,
}

impl NetNs {
    /// Opens the namespace at `path`: a bind-mounted nsfs file or `/proc/PID/ns/net`. `ENOENT` if
    /// the path is missing, `EINVAL` if it is not a namespace (for example, after its unmount).
    pub fn open(path: &Path) -> Result<Self> {
        const OP: &str = "open network namespace";
        // Another kind of file may be a FIFO, on which a plain open blocks.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(|e| Error::at(OP, path, e))?;
        let stat = fstatfs(&file).map_err(|e| Error::at(OP, path, e))?;
        if stat.filesystem_type() != NSFS_MAGIC {
            return Err(Error::at(OP, path, Errno::EINVAL));
        }
        Ok(Self { file, path: path.to_owned() })
    }

    /// The namespace of the calling thread.
    pub fn current() -> Result<Self> {
        Self::open(Path::new(CURRENT))
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the calling thread is in this namespace.
    pub fn is_current(&self) -> Result<bool> {
        self.same_as(&Self::current()?)
    }

    /// Whether both are the same namespace: same inode on the same nsfs.
    pub fn same_as(&self, other: &Self) -> Result<bool> {
        Ok(self.identity()? == other.identity()?)
    }

    /// Runs `work` on a new thread inside this namespace and waits for it. A panic of `work`
    /// continues in the caller.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        on_new_thread(|| {
            self.enter()?;
            Ok(work())
        })
    }

    /// Moves the calling thread into this namespace permanently. Only for single-threaded programs
    /// that do nothing outside it; all others use [`NetNs::run`].
    pub fn enter(&self) -> Result<()> {
        setns(&self.file, CloneFlags::CLONE_NEWNET)
            .map_err(|e| Error::at("enter network namespace", &self.path, e))
    }

    /// Runs `work` on the calling thread inside this namespace, then returns the thread to its own,
    /// `home`. Saves the thread of [`NetNs::run`], for single-threaded programs that live about a
    /// millisecond. If the thread cannot return, the process ends, since no code may continue in
    /// the wrong namespace.
    pub fn visit<T>(&self, home: &NetNs, work: impl FnOnce() -> T) -> Result<T> {
        self.enter()?;
        let _back = Return { home };
        Ok(work())
    }

    fn identity(&self) -> Result<(u64, u64)> {
        let stat = self.file.metadata().map_err(|e| Error::at("stat network namespace", &self.path, e))?;
        Ok((stat.dev(), stat.ino()))
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Each attempt takes some microseconds.
const RETURN_ATTEMPTS: usize = 1000;

/// Returns the thread to its namespace, also after a panic.
struct Return<'a> {
    home: &'a NetNs,
}

impl Drop for Return<'_> {
    fn drop(&mut self) {
        // setns(2) allocates a little memory; a lack of it passes.
        let is_home = (0..RETURN_ATTEMPTS).any(|_| self.home.enter().is_ok());
        if !is_home {
            std::process::abort();
        }
    }
}

/// The magic number of the file system at `path` (statfs(2), `f_type`), to explain an `EINVAL` of
/// [`NetNs::open`]; `None` if the path is gone.
pub fn filesystem_magic(path: &Path) -> Option<i64> {
    rustix::fs::statfs(path).ok().map(|stat| stat.f_type)
}

/// Makes a new network namespace (only `lo`, down) and binds it to `path`, which must not exist yet
/// (`EEXIST`). The namespace outlives its processes, until [`remove_persistent`]. After a failure
/// there is no file.
pub fn create_persistent(path: &Path) -> Result<NetNs> {
    const OP: &str = "create network namespace";
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o444)
        .open(path)
        .map_err(|e| Error::at(OP, path, e))?;
    on_new_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|e| Error::at(OP, path, e))?;
        // This thread's own link: /proc/self shows the main thread, which stays in its namespace.
        mount(Some(CURRENT), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|e| Error::at("bind network namespace", path, e))
    })
    .and_then(|()| NetNs::open(path))
    .inspect_err(|_| {
        // The caller gets the original error. `remove_persistent` can remove what may remain.
        let _stays = remove_persistent(path);
    })
}

/// Removes a namespace of [`create_persistent`], also an incomplete one; a missing one is a
/// success. Processes inside keep the namespace alive.
pub fn remove_persistent(path: &Path) -> Result<()> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {} // once more: mounts stack
            // EINVAL: not a mount point.
            Err(Errno::EINVAL | Errno::ENOENT) => break,
            Err(e) => return Err(Error::at("unmount network namespace", path, e)),
        }
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::at("remove network namespace", path, e)),
        _ => Ok(()),
    }
}

/// Runs `work` on a thread whose namespaces it may change, and waits. A panic continues in the caller.
pub(crate) fn on_new_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("netns".to_owned())
            .spawn_scoped(scope, work)
            .map_err(|e| Error::new("start thread", "netns", e))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn must_be_root() {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
    }

    fn links() -> Vec<String> {
        // /proc/self would show the main thread's namespace.
        let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        table.lines().skip(2).filter_map(|l| l.split(':').next()).map(|l| l.trim().to_owned()).collect()
    }

    #[test]
    fn a_persistent_namespace_is_entered_by_run_only_and_removed_without_trace() {
        must_be_root();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pod");
        let before = NetNs::current().unwrap();

        let made = create_persistent(&path).unwrap();
        assert!(!made.is_current().unwrap());
        assert!(NetNs::open(&path).unwrap().same_as(&made).unwrap());
        assert!(made.run(|| made.is_current().unwrap()).unwrap());
        assert_eq!(made.run(links).unwrap(), ["lo"]);
        assert!(made.visit(&before, || made.is_current().unwrap()).unwrap());
        assert!(before.is_current().unwrap(), "the caller's thread stayed at home");

        assert_eq!(create_persistent(&path).unwrap_err().errno(), Errno::EEXIST);
        assert!(NetNs::open(&path).unwrap().same_as(&made).unwrap(), "the refused call removed nothing");

        remove_persistent(&path).unwrap();
        remove_persistent(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_missing_path_and_an_ordinary_file_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        assert_eq!(NetNs::open(&file).unwrap_err().errno(), Errno::ENOENT);
        std::fs::write(&file, "").unwrap();
        assert_eq!(NetNs::open(&file).unwrap_err().errno(), Errno::EINVAL);
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert_eq!(NetNs::open(&fifo).unwrap_err().errno(), Errno::EINVAL);
        remove_persistent(&file).unwrap();
        assert!(!file.exists(), "a leftover without a mount is removed too");
    }
}
