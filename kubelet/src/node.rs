//! The node's own ground: the root directory with kubelet's layout, shared for
//! mount propagation, and the lock that keeps a second kubelet out of it.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use linux::lock::FileLock;
use linux::mount::{self, UnmountMode};
use linux::mountinfo;

/// Why this node cannot be used.
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

/// The root directory, held by this process.
#[derive(Debug)]
pub struct Node {
    root: PathBuf,
    _lock: FileLock,
}

impl Node {
    /// Makes the directories, takes the lock (first, before anything changes)
    /// and mounts the root directory on itself as a shared mount, so that what
    /// a CSI driver mounts below it is seen by kubelet and runtime alike.
    pub fn claim(root: &Path) -> Result<Self, Error> {
        make_dir(root, 0o750)?;
        let root = root.canonicalize().map_err(|source| Error::Directory {
            op: "resolve",
            path: root.to_owned(),
            source,
        })?;
        make_dir(&root.join("hawser"), 0o700)?;
        let lock = FileLock::try_exclusive(&root.join("hawser/lock"), 0o600)
            .map_err(|source| Error::Kernel { path: root.clone(), source })?
            .ok_or_else(|| Error::Locked { root: root.clone() })?;
        for dir in ["pods", "plugins", "plugins_registry"] {
            make_dir(&root.join(dir), 0o750)?;
        }
        share(&root).map_err(|source| Error::Kernel { path: root.clone(), source })?;
        Ok(Self { root, _lock: lock })
    }

    /// Absolute, without symbolic links: as mountinfo prints it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Takes the mount of the root directory on itself away again, after the
    /// last pod is gone. Refuses while anything is mounted below it.
    pub(crate) fn unshare(&self) -> Result<(), Error> {
        let kernel = |source| Error::Kernel { path: self.root.clone(), source };
        let below: Vec<PathBuf> = mountinfo::read()
            .map_err(kernel)?
            .into_iter()
            .map(|m| m.mount_point)
            .filter(|point| point.starts_with(&self.root) && *point != self.root)
            .collect();
        if !below.is_empty() {
            return Err(Error::StillMounted { root: self.root.clone(), mounts: below });
        }
        match mountinfo::at(&self.root).map_err(kernel)? {
            // Our own listening sockets keep the mount busy until we exit.
            Some(_) => mount::unmount(&self.root, UnmountMode::Detach).map_err(kernel),
            None => Ok(()),
        }
    }
}

fn share(root: &Path) -> linux::Result<()> {
    if mountinfo::at(root)?.is_none() {
        // Recursive: what is mounted below already must stay visible.
        mount::bind_recursive(root, root)?;
    }
    mount::make_shared(root)
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
