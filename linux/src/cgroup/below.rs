//! Groups that processes make below their own one.
//!
//! On v2, a group whose subgroups have controllers has no processes itself (cgroup-v2.rst, "No Internal Process
//! Constraint"), so a further process of a container must join the subgroup of one that is there.

use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::{Cgroup, Hierarchies, Version, under};
use crate::{Error, Result, procfs};

impl Hierarchies {
    /// The v2 directory of the group that has process `pid`, which is not reaped yet. `EXDEV`, unless that is `group`
    /// or below it.
    pub fn open_group_of(&self, group: &Cgroup, pid: i32) -> Result<OwnedFd> {
        let file = PathBuf::from(format!("/proc/{pid}/cgroup"));
        let text = procfs::read(&file).map_err(|e| Error::at("read", &file, e))?;
        let refused = |problem: &str| {
            let what = format!("{problem} in {}: {:?}", file.display(), text.trim_end());
            Error::new("find the cgroup of a process", what, Errno::EXDEV)
        };
        let (Some(root), Some(dir)) = (&self.unified, group.dirs_of(Version::V2).next()) else {
            return Err(refused("no cgroup v2"));
        };
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        let path = under(root, Path::new(path.ok_or_else(|| refused("no cgroup v2"))?));
        let rest = below(dir, &path).ok_or_else(|| refused("no group of the container"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let failed = |e: rustix::io::Errno| Error::at("open cgroup", &path, e);
        let dir = rustix::fs::open(dir, flags, Mode::empty()).map_err(failed)?;
        // The container may rename its groups meanwhile.
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        rustix::fs::openat2(dir, rest, flags, Mode::empty(), how).map_err(failed)
    }
}

/// `path` relative to `dir`; `None`, unless it is `dir` or below it.
fn below(dir: &Path, path: &Path) -> Option<PathBuf> {
    let rest = path.strip_prefix(dir).ok()?;
    let is_plain = rest.components().all(|component| matches!(component, Component::Normal(_)));
    is_plain.then(|| if rest == Path::new("") { PathBuf::from(".") } else { rest.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_of_the_container_are_below_it() {
        let dir = Path::new("/cgroup/pods/c");
        let relative = |path: &str| below(dir, Path::new(path)).map(|path| path.display().to_string());
        assert_eq!(relative("/cgroup/pods/c").as_deref(), Some("."));
        assert_eq!(relative("/cgroup/pods/c/a/b").as_deref(), Some("a/b"));
        for other in ["/cgroup/pods", "/cgroup/pods/c2", "/cgroup/pods/c/../d", "/"] {
            assert_eq!(relative(other), None, "{other}");
        }
    }
}
