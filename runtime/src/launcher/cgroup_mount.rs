//! The mounts on a container's /sys/fs/cgroup, where programs (the JVM, Go, .NET) read their
//! limits.
//!
//! On cgroup v2 the container's group is mounted there, on v1 a tmpfs with one
//! directory for each hierarchy that the container is in. These are bind mounts: a
//! new mount of the file system could change options of the host's (nsdelegate).
//!
//! Invariant: every mount here is read-only, unless the container is privileged.

use std::os::fd::OwnedFd;

use linux::cgroup::view::View;
use linux::rootfs::{self, Attributes, MountsBelow, Propagation};
use rustix::fs::{Mode, OFlags};

use super::error::{LaunchError, Result};

/// A tree for the mount's target, and the trees for directories in it.
#[derive(Debug)]
pub(super) struct CgroupTree {
    pub(super) tree: OwnedFd,
    below: Vec<(String, OwnedFd)>,
}

impl CgroupTree {
    pub(super) fn new(view: &View, attributes: Attributes) -> Result<Self> {
        let bind = |dir| {
            let tree = rootfs::clone_tree(dir, MountsBelow::Without)?;
            let change = Attributes { propagation: Some(Propagation::Private), ..attributes };
            rootfs::set_attributes(&tree, change)?;
            Ok::<_, LaunchError>(tree)
        };
        let (dirs, links) = match view {
            View::Unified(dir) => return Ok(Self { tree: bind(dir)?, below: Vec::new() }),
            View::Hierarchies { dirs, links } => (dirs, links),
        };
        let tree = rootfs::new_fs("tmpfs", &["mode=755".to_owned(), "size=64k".to_owned()])?;
        let mut below = Vec::new();
        for (name, dir) in dirs {
            rustix::fs::mkdirat(&tree, name.as_str(), Mode::from(0o755))
                .map_err(|e| directory("create directory", name, e))?;
            below.push((name.clone(), bind(dir)?));
        }
        for (name, target) in links {
            rootfs::make_link(&tree, name, target)?;
        }
        rootfs::set_attributes(&tree, attributes)?;
        Ok(Self { tree, below })
    }

    /// Attaches the other trees, after `tree` was attached.
    pub(super) fn attach_below(self) -> Result<()> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.below.into_iter().try_for_each(|(name, mount)| {
            let dir = rustix::fs::openat(&self.tree, name.as_str(), flags, Mode::empty())
                .map_err(|e| directory("open directory", &name, e))?;
            Ok(rootfs::attach(mount, dir, name.as_ref())?)
        })
    }
}

fn directory(op: &'static str, name: &str, errno: rustix::io::Errno) -> LaunchError {
    LaunchError::CgroupDirectory { op, name: name.to_owned(), source: errno.into() }
}
