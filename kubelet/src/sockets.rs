//! Where the kubelet's own sockets are: in its root directory, or in memory where the disk has
//! no room for one.
//!
//! A socket is a new file each time. On XFS, a disk that a pod has filled takes none, and the
//! kubelet must start all the same: it is what ends such a pod.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tokio::net::UnixListener;

/// On a tmpfs that no pod can fill.
const IN_MEMORY: &str = "/run/hawser-kubelet";
/// Of the digest that tells root directories apart.
const DIGEST_DIGITS: usize = 16;

/// Binds `path`, mode 0600, in the place of a socket that a killed kubelet has left: the caller
/// has the root directory's lock. Returns where the socket is.
pub(crate) fn bind(path: &Path) -> io::Result<(UnixListener, PathBuf)> {
    bind_or_in(path, Path::new(IN_MEMORY))
}

/// Where a client finds the socket that belongs at `path`.
pub(crate) fn find(path: &Path) -> PathBuf {
    find_or_in(path, Path::new(IN_MEMORY))
}

fn find_or_in(path: &Path, dir: &Path) -> PathBuf {
    let elsewhere = || in_memory(path, dir).ok().filter(|place| place.exists());
    if path.exists() { path.to_owned() } else { elsewhere().unwrap_or_else(|| path.to_owned()) }
}

fn bind_or_in(path: &Path, dir: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let elsewhere = in_memory(path, dir)?;
    match runtime::listen(path) {
        Err(e) if matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            // Closed to others, as the root directory's own is.
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            let listener = runtime::listen(&elsewhere)?;
            tracing::warn!(
                wanted = %path.display(), socket = %elsewhere.display(),
                "the disk has no room for a socket: clients are served on one in memory"
            );
            Ok((listener, elsewhere))
        }
        bound => {
            let listener = bound?;
            // Of an earlier start.
            let _may_not_be_there = std::fs::remove_file(&elsewhere);
            Ok((listener, path.to_owned()))
        }
    }
}

/// By the real path of the root directory, however it was given.
fn in_memory(path: &Path, dir: &Path) -> io::Result<PathBuf> {
    let parent = path.parent().unwrap_or(Path::new("/")).canonicalize()?;
    let digest = base16ct::lower::encode_string(&Sha256::digest(parent.as_os_str().as_encoded_bytes()));
    let name = &digest[..DIGEST_DIGITS];
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(dir.join(format!("{name}-{file}")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use linux::mount::{MountFlags, UnmountMode, mount_fs, unmount};

    use super::*;

    #[tokio::test]
    async fn a_socket_that_the_disk_has_no_room_for_is_in_memory_until_it_has() {
        let (disk, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // Its root and one file.
        mount_fs("tmpfs", "tmpfs", disk.path(), MountFlags::default(), "nr_inodes=2").unwrap();
        let (filler, path) = (disk.path().join("filler"), disk.path().join("kubelet.sock"));
        fs::write(&filler, "").unwrap();
        let connects = || UnixStream::connect(find_or_in(&path, memory.path())).is_ok();

        let (listener, place) = bind_or_in(&path, memory.path()).unwrap();
        assert!(place.starts_with(memory.path()) && connects(), "{}", place.display());
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o600);
        // Of a killed kubelet.
        drop(listener);
        let (listener, again) = bind_or_in(&path, memory.path()).unwrap();
        assert_eq!(again, place);
        assert!(connects());
        drop(listener);

        fs::remove_file(&filler).unwrap();
        let (_listener, place) = bind_or_in(&path, memory.path()).unwrap();
        assert_eq!((&place, again.exists()), (&path, false));
        assert!(connects());
        unmount(disk.path(), UnmountMode::Detach).unwrap();
    }
}
