//! The node's root directory: kubelet's layout, a shared mount for mount propagation, and the lock
//! that excludes a second kubelet. `machine`: figures of the whole machine. `sockets`: where the kubelet's
//! own sockets are.

pub(crate) mod machine;
pub(crate) mod sockets;

mod own_mount;

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use linux::lock::FileLock;
use linux::mountinfo;

/// Why the root directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "another hawser-kubelet runs on {}: stop it (hawser-kubelet stop --root-dir {}) or choose another --root-dir",
        root.display(), root.display()
    )]
    Locked { root: PathBuf },
    #[error("root directory {}: {op}", path.display())]
    Directory {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("root directory {}", path.display())]
    Kernel {
        path: PathBuf,
        #[source]
        source: linux::Error,
    },
    #[error("root directory {}: still mounted below it: {}", root.display(), list(mounts))]
    StillMounted { root: PathBuf, mounts: Vec<PathBuf> },
}

/// The root directory, locked by this process.
#[derive(Debug)]
pub struct Node {
    root: PathBuf,
    _lock: FileLock,
}

impl Node {
    /// Takes the lock before any change and creates the directories. Mounts the root directory on
    /// itself as a shared mount, so that kubelet and runtime see what a CSI driver mounts below it.
    /// If the root directory is a mount point already, it is only made shared.
    pub fn claim(root: &Path) -> Result<Self, Error> {
        make_dir(root, 0o750)?;
        let root = root.canonicalize().map_err(|source| Error::Directory {
            op: "resolve",
            path: root.to_owned(),
            source,
        })?;
        make_dir(&root.join("hawser"), 0o700)?;
        let lock = FileLock::try_exclusive_after_kill(&root.join("hawser/lock"), 0o600)
            .map_err(|source| Error::Kernel { path: root.clone(), source })?
            .ok_or_else(|| Error::Locked { root: root.clone() })?;
        for dir in ["pods", "plugins", "plugins_registry"] {
            make_dir(&root.join(dir), 0o750)?;
        }
        own_mount::share(&root).map_err(|source| Error::Kernel { path: root.clone(), source })?;
        Ok(Self { root, _lock: lock })
    }

    /// Absolute and without symbolic links, as in mountinfo.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The embedded runtime's directory, with images and writable layers. The user may mount a disk there.
    pub fn runtime_dir(root: &Path) -> PathBuf {
        root.join("hawser/runtime")
    }

    /// Unmounts the root directory's mount on itself after the last pod is gone. Keeps the file
    /// systems that the user mounted there and at [`Self::runtime_dir`]. Fails while anything else is
    /// mounted below it.
    pub(crate) fn unshare(&self) -> Result<(), Error> {
        let kernel = |source| Error::Kernel { path: self.root.clone(), source };
        let users = [self.root.clone(), Self::runtime_dir(&self.root)];
        let below: Vec<PathBuf> = mountinfo::below(&self.root)
            .map_err(kernel)?
            .into_iter()
            .map(|m| m.mount_point)
            .filter(|point| !users.contains(point))
            .collect();
        if !below.is_empty() {
            return Err(Error::StillMounted { root: self.root.clone(), mounts: below });
        }
        own_mount::unshare(&self.root).map_err(kernel)
    }
}

fn make_dir(path: &Path, mode: u32) -> Result<(), Error> {
    DirBuilder::new().recursive(true).mode(mode).create(path).map_err(|source| Error::Directory {
        op: "create",
        path: path.to_owned(),
        source,
    })
}

fn list(mounts: &[PathBuf]) -> String {
    mounts.iter().map(|m| m.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::mount::{self, MountFlags};

    /// Runs in a mount namespace of its own.
    fn in_own_mounts(test: impl FnOnce(&Path) + Send) {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("root may unshare");
                mount::make_private(Path::new("/")).unwrap();
                let dir = tempfile::tempdir().unwrap();
                let root = dir.path().join("root");
                std::fs::create_dir(&root).unwrap();
                test(&root);
            });
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        });
    }

    fn mounts_at(root: &Path) -> usize {
        mountinfo::read().unwrap().iter().filter(|mount| mount.mount_point == root).count()
    }

    #[test]
    fn the_mount_of_an_earlier_run_is_taken_away() {
        in_own_mounts(|root| {
            drop(Node::claim(root).unwrap());
            assert_eq!(mounts_at(root), 1);
            let node = Node::claim(root).unwrap();
            assert_eq!(mounts_at(root), 1);
            node.unshare().unwrap();
            assert_eq!(mounts_at(root), 0);
            node.unshare().unwrap();
        });
    }

    #[test]
    fn a_file_system_that_the_user_mounted_stays() {
        in_own_mounts(|root| {
            mount::mount_fs("tmpfs", "users", root, MountFlags::default(), "").unwrap();
            for _ in 0..2 {
                Node::claim(root).unwrap().unshare().unwrap();
                assert_eq!(mounts_at(root), 1);
            }
            mount::unmount(root, mount::UnmountMode::Detach).unwrap();
            // The user may also bind-mount the directory on itself, for example in fstab.
            mount::bind(root, root).unwrap();
            Node::claim(root).unwrap().unshare().unwrap();
            assert_eq!(mounts_at(root), 1);
            mount::unmount(root, mount::UnmountMode::Detach).unwrap();
        });
    }

    #[test]
    fn a_record_of_another_boot_or_of_another_mount_unmounts_nothing() {
        in_own_mounts(|root| {
            let record = root.join("hawser/own_mount.json");
            for text in ["", "{", "{\"bootId\":\"other\",\"mountId\":ID}"] {
                let node = Node::claim(root).unwrap();
                let id = mountinfo::at(root).unwrap().unwrap().mount_id.to_string();
                std::fs::write(&record, text.replace("ID}", &format!("{id}}}"))).unwrap();
                node.unshare().unwrap();
                assert_eq!(mounts_at(root), 1, "{text}");
                mount::unmount(root, mount::UnmountMode::Detach).unwrap();
            }
        });
    }
}
