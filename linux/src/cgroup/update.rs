//! Changes the limits of a group whose processes run.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::limits::Limit;
use super::{Hierarchies, Limits, Version, is_limit, limits, read, shortened, under, v1, v2, write_present};
use crate::{Error, Result};

impl Hierarchies {
    /// Sets `limits` in the existing group `path`. Others stay as they are. After an error, some
    /// may be set. The answer lists those that this machine or this group cannot have.
    pub fn update(&self, path: &Path, limits: &Limits) -> Result<Vec<String>> {
        // Before any is set.
        if let Some((file, _)) = limits.unified.iter().find(|(file, _)| !is_limit(file)) {
            let problem = format!("{file:?}: not a controller's file");
            return Err(Error::new("set cgroup limit", problem, Errno::EINVAL));
        }
        let mut unmet = Vec::new();
        for limit in limits.set() {
            let controller = limit.controller();
            match self.group_with(controller, path)? {
                None => unmet.push(format!("{controller}: this machine has no such cgroup controller")),
                Some((version, dir)) => set(version, &dir, &limit)?,
            }
        }
        for limit in &limits.unified {
            let controller = limits::controller(&limit.0);
            let dir = match self.group_with(controller, path)? {
                Some((Version::V2, dir)) => dir,
                // As when a container is created: v1 has none of these files.
                Some((Version::V1, _)) | None => continue,
            };
            let missing = write_present(&dir, std::slice::from_ref(limit))?;
            unmet.extend(
                missing.iter().map(|file| format!("{file}: this kernel's cgroups have no such limit")),
            );
        }
        Ok(unmet)
    }

    /// The limits of group `path` that have no common default: processors and memory nodes. A caller
    /// of [`Self::update`] keeps them, to undo it.
    pub fn cpuset(&self, path: &Path) -> Limits {
        let Some((_, dir)) = self.group_of("cpuset", path) else { return Limits::default() };
        let content = |file| Some(read(&dir.join(file)).ok()?.trim().to_owned());
        Limits {
            cpuset_cpus: content("cpuset.cpus"),
            cpuset_mems: content("cpuset.mems"),
            ..Limits::default()
        }
    }

    /// The group's directory for `controller`, in which v2 enables it; `None`: the machine has no
    /// such controller. `ENOENT` if the group does not exist.
    fn group_with(&self, controller: &str, path: &Path) -> Result<Option<(Version, PathBuf)>> {
        let Some((_, root)) = self.controllers.get(controller) else { return Ok(None) };
        let Some((version, dir)) = self.group_of(controller, path) else {
            return Err(Error::at("find cgroup", &under(root, path), Errno::ENOENT));
        };
        if version == Version::V2 {
            let path = if dir == under(root, path) { path.to_owned() } else { shortened(path) };
            v2::ensure_dirs(root, &path, &[controller]).map_err(|(error, _)| error)?;
        }
        Ok(Some((version, dir)))
    }
}

fn set(version: Version, dir: &Path, limit: &Limit<'_>) -> Result<()> {
    match version {
        Version::V1 => v1::set(dir, limit),
        Version::V2 => v2::set(dir, limit),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cgroup::remove_dirs;

    #[test]
    fn limits_are_raised_and_lowered_in_any_order_and_others_stay() {
        let hierarchies = Hierarchies::detect().unwrap();
        assert!(hierarchies.has("memory"), "this test needs root and a memory controller: {hierarchies:?}");
        let parent = PathBuf::from(format!("/hawser-test-update-{}", std::process::id()));
        let made = hierarchies.ensure_parent_of_containers(&parent).unwrap();
        let path = parent.join("c");
        let first = Limits { pids: Some(17), memory_bytes: Some(64 << 20), ..Limits::default() };
        let (group, _) = hierarchies.create_everywhere(&path, &first).unwrap();
        let read = |controller: &str, v1: &str, v2: &str| {
            let (version, dir) = hierarchies.group_of(controller, &path).unwrap();
            fs::read_to_string(dir.join(if version == Version::V1 { v1 } else { v2 })).unwrap()
        };
        for mib in [128_i64, 32, 256] {
            let bytes = mib << 20;
            let both = Some(bytes + (1 << 20));
            let limits =
                Limits { memory_bytes: Some(bytes), memory_and_swap_bytes: both, ..Limits::default() };
            hierarchies.update(&path, &limits).unwrap();
            let found = read("memory", "memory.limit_in_bytes", "memory.max");
            assert_eq!(found.trim(), bytes.to_string());
            assert_eq!(hierarchies.usage(&path).memory.unwrap().limit, Some(bytes.cast_unsigned()));
        }
        // Its group in this hierarchy was not made for limits.
        let limits = Limits { cpuset_cpus: Some("0".to_owned()), ..Limits::default() };
        assert_eq!(hierarchies.update(&path, &limits).unwrap(), Vec::<String>::new());
        assert_eq!(read("cpuset", "cpuset.cpus", "cpuset.cpus").trim(), "0");
        assert_eq!(read("pids", "pids.max", "pids.max").trim(), "17");

        if let Some((Version::V1, dir)) = hierarchies.group_of("cpuset", &path) {
            // Beside it, a group begins with processors.
            let beside = dir.with_file_name("beside");
            fs::create_dir(&beside).unwrap();
            let processors = fs::read_to_string(beside.join("cpuset.cpus")).unwrap();
            fs::remove_dir(&beside).unwrap();
            assert_ne!(processors.trim(), "");
        }

        let wrong = Limits { cpuset_cpus: Some("4095".to_owned()), ..Limits::default() };
        assert!(hierarchies.update(&path, &wrong).unwrap_err().to_string().contains("\"4095\""));
        let unified = vec![("cgroup.procs".to_owned(), "0".to_owned())];
        let refused = hierarchies.update(&path, &Limits { unified, ..Limits::default() });
        assert_eq!(refused.unwrap_err().errno(), Errno::EINVAL);
        group.remove().unwrap();
        let gone = hierarchies.update(&path, &first).unwrap_err();
        assert_eq!(gone.errno(), Errno::ENOENT, "{gone}");
        assert_eq!(remove_dirs(&made), Vec::<PathBuf>::new());
    }
}
