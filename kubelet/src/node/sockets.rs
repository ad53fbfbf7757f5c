//! The location of the kubelet's own sockets: in its root directory, or in memory if the disk is
//! full.
//!
//! Each start creates a new socket file, which fails on an XFS that a pod has filled. The kubelet
//! must start anyway, to evict that pod.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tokio::net::UnixListener;

/// On a tmpfs that no pod can fill.
const IN_MEMORY: &str = "/run/hawser-kubelet";
/// Hexadecimal digits that distinguish root directories.
const DIGEST_DIGITS: usize = 16;

/// Binds `path` with mode 0600, replacing the socket of a killed kubelet: the caller holds the root
/// directory's lock. Returns the actual path.
pub(crate) fn bind(path: &Path) -> io::Result<(UnixListener, PathBuf)> {
    bind_or_in(path, Path::new(IN_MEMORY))
}

/// The actual path of the socket that belongs at `path`.
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
            // Private, like the root directory.
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            let listener = runtime::listen(&elsewhere)?;
            tracing::warn!(
                wanted = %path.display(), socket = %elsewhere.display(),
                "the disk is full: serving clients on a socket in memory"
            );
            Ok((listener, elsewhere))
        }
        bound => {
            let listener = bound?;
            // Remove the socket of an earlier start.
            let _may_not_be_there = std::fs::remove_file(&elsewhere);
            Ok((listener, path.to_owned()))
        }
    }
}

/// Derived from the root directory's real path.
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
    async fn on_a_full_disk_a_socket_is_in_memory_until_there_is_space() {
        let (disk, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // Two inodes: the root and one file.
        mount_fs("tmpfs", "tmpfs", disk.path(), MountFlags::default(), "nr_inodes=2").unwrap();
        let (filler, path) = (disk.path().join("filler"), disk.path().join("kubelet.sock"));
        fs::write(&filler, "").unwrap();
        let connects = || UnixStream::connect(find_or_in(&path, memory.path())).is_ok();

        let (listener, place) = bind_or_in(&path, memory.path()).unwrap();
        assert!(place.starts_with(memory.path()) && connects(), "{}", place.display());
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o600);
        // Simulate a killed kubelet.
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
