//! What the keeper does once, before it serves: the only time that it opens paths.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use linux::lock::FileLock;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::log::{Level, Log};

const BACKLOG: i32 = 64;
const LOWEST_OOM_SCORE_ADJ: &str = "-1000";

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("must be started by root, since only root's processes may connect to it")]
    NotRoot,
    #[error("--socket {}: its directory is missing: make it first", path.display())]
    NoDirectory { path: PathBuf },
    #[error("{}: another keeper answers there", path.display())]
    Live { path: PathBuf },
    #[error("{}: another keeper is starting there", path.display())]
    Starting { path: PathBuf },
    #[error("{}: exists and is not a socket", path.display())]
    NotASocket { path: PathBuf },
    #[error("{op} {}", path.display())]
    Socket {
        op: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("lock")]
    Lock {
        #[source]
        cause: linux::Error,
    },
    #[error("{op}")]
    System {
        op: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("signals")]
    Signals {
        #[source]
        cause: linux::Error,
    },
}

/// A non-blocking listener at `path`, mode 0600. It replaces the socket of a process that is gone.
pub(crate) fn bind(path: &Path) -> Result<OwnedFd, StartError> {
    let failed = |op| {
        let path = path.to_owned();
        move |cause: Errno| StartError::Socket { op, path, cause: cause.into() }
    };
    // Without the lock, two keepers could replace the same stale socket, and one of them would
    // serve a socket that no path leads to.
    let _lock = match lock(path) {
        Err(StartError::Lock { cause }) if cause.errno() == nix::errno::Errno::ENOENT => {
            return Err(StartError::NoDirectory { path: path.to_owned() });
        }
        locked => locked?,
    };
    let address = SocketAddrUnix::new(path).map_err(failed("address"))?;
    remove_stale(path, &address)?;
    let listener = new_socket().map_err(failed("socket for"))?;
    // Never open to others, not even briefly.
    let umask = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = rustix::net::bind(&listener, &address);
    rustix::process::umask(umask);
    bound.map_err(failed("bind"))?;
    rustix::net::listen(&listener, BACKLOG).map_err(failed("listen on"))?;
    Ok(listener)
}

fn lock(path: &Path) -> Result<FileLock, StartError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    FileLock::try_exclusive(Path::new(&name), 0o600)
        .map_err(|cause| StartError::Lock { cause })?
        .ok_or_else(|| StartError::Starting { path: path.to_owned() })
}

fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), StartError> {
    let failed = |op, cause: io::Error| StartError::Socket { op, path: path.to_owned(), cause };
    let connected = new_socket().and_then(|socket| rustix::net::connect(&socket, address));
    match connected {
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::CONNREFUSED) => {}
        // EAGAIN: its queue is full. EPROTOTYPE: a socket of another type.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            return Err(StartError::Live { path: path.to_owned() });
        }
        Err(e) => return Err(failed("connect to", e.into())),
    }
    let found = std::fs::symlink_metadata(path).map_err(|e| failed("look at", e))?;
    if !found.file_type().is_socket() {
        return Err(StartError::NotASocket { path: path.to_owned() });
    }
    std::fs::remove_file(path).map_err(|e| failed("remove stale", e))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// So that no signal to the session or process group of its parent reaches the keeper.
pub(crate) fn leave_session(log: Log) {
    if let Err(e) = linux::process::new_session() {
        log.warn(format_args!("stays in the session of its parent: {e}: {}", e.reason()));
    }
}

/// The keeper is the last process that should be killed when memory runs out. Without
/// CAP_SYS_RESOURCE the score stays as it is.
pub(crate) fn lower_oom_score(log: Log) {
    if let Err(e) = linux::procfs::write(Path::new("self/oom_score_adj"), LOWEST_OOM_SCORE_ADJ) {
        log.info(format_args!(
            "oom_score_adj stays as it is (a lower one needs CAP_SYS_RESOURCE): {e}: {}",
            e.reason()
        ));
    }
}

/// Raises the soft limit of open descriptors to the hard one; the limit.
pub(crate) fn raise_descriptor_limit(log: Log) -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(e) => {
            log.write(Level::Warn, format_args!("the limit of open files stays as it is: {e}"));
            current.unwrap_or(u64::MAX)
        }
    }
}
