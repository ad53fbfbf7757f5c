//! Where a test's group is.

use std::path::{Path, PathBuf};

use linux::cgroup::Hierarchies;
use linux::mountinfo;

/// The directory of the group `path` in v1's hierarchy of the freezer, where the kernel has no `cgroup.kill`; in v2
/// if there is no such hierarchy.
pub(crate) fn directory(hierarchies: &Hierarchies, path: &Path) -> PathBuf {
    hierarchies.dir("freezer", path).unwrap_or_else(|| {
        let mounts = mountinfo::read().unwrap();
        let found = mounts.into_iter().find(|m| m.fs_type == "cgroup2" && m.root == Path::new("/"));
        found.expect("this test needs cgroups").mount_point.join(path.strip_prefix("/").unwrap())
    })
}
