//! A container's view of its cgroups below /sys/fs/cgroup: on v2 its group as the whole tree, on v1
//! one directory for each hierarchy. Programs look for their limits there.
//!
//! Invariant: an unprivileged container sees its own group and those below it, never the host's or
//! another pod's.

use std::path::{Path, PathBuf};

use super::{Cgroup, Hierarchies, Version, WANTED};

/// Directories of the host to be mounted below /sys/fs/cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum View {
    /// Only cgroup v2: this directory is the whole view.
    Unified(PathBuf),
    /// v1, or both versions: names in a tmpfs, and the directories mounted on them. `links` are
    /// other names of directories (`cpu` for `cpu,cpuacct`).
    Hierarchies { dirs: Vec<(String, PathBuf)>, links: Vec<(String, String)> },
}

impl Default for View {
    /// The view of a machine without cgroups.
    fn default() -> Self {
        Self::Hierarchies { dirs: Vec::new(), links: Vec::new() }
    }
}

impl Hierarchies {
    /// The view of a container in `group`: the hierarchies in which programs look for limits.
    pub fn view_of(&self, group: &Cgroup) -> View {
        // A group's directory is its hierarchy's mount point plus the group's path.
        let root_of = |version: Version, dir: &Path| match version {
            Version::V1 => self.v1.iter().find(|root| dir.starts_with(root)).cloned(),
            Version::V2 => self.unified.clone(),
        };
        let is_shown = |root: &PathBuf| {
            let shown = WANTED.iter().chain(&["cpuset"]).filter_map(|name| self.controllers.get(*name));
            Some(root) == self.unified.as_ref() || shown.into_iter().any(|(_, place)| place == root)
        };
        let places = group.dirs.iter().filter_map(|(v, dir)| Some((root_of(*v, dir)?, dir.clone())));
        let places = places.filter(|(root, _)| is_shown(root));
        self.view(places.collect())
    }

    /// The view of the whole machine, for a privileged container.
    pub fn view_of_all(&self) -> View {
        let roots = self.v1.iter().chain(&self.unified);
        self.view(roots.map(|root| (root.clone(), root.clone())).collect())
    }

    /// From pairs: mount point of a hierarchy, directory to show for it.
    fn view(&self, mut places: Vec<(PathBuf, PathBuf)>) -> View {
        if self.v1.is_empty()
            && let Some((_, dir)) = places.pop()
        {
            return View::Unified(dir);
        }
        let (mut dirs, mut links) = (Vec::new(), Vec::new());
        for (root, dir) in places {
            let name = match root.file_name().and_then(|n| n.to_str()) {
                Some(name) if Some(&root) != self.unified.as_ref() => name.to_owned(),
                _ => "unified".to_owned(),
            };
            if dirs.iter().any(|(known, _)| *known == name) {
                continue; // mounted twice
            }
            if name.contains(',') {
                links.extend(name.split(',').map(|controller| (controller.to_owned(), name.clone())));
            }
            dirs.push((name, dir));
        }
        View::Hierarchies { dirs, links }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::DeviceControl;
    use crate::mountinfo;

    fn hierarchies(table: &str) -> Hierarchies {
        Hierarchies::from_mounts(&mountinfo::parse(table.as_bytes()).unwrap())
    }

    fn group(dirs: &[(Version, &str)]) -> Cgroup {
        let dirs = dirs.iter().map(|(v, dir)| (*v, PathBuf::from(dir))).collect();
        Cgroup { dirs, memory: None, devices: DeviceControl::Missing }
    }

    #[test]
    fn on_v2_the_group_is_the_whole_tree() {
        let machine = hierarchies("35 31 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        let own = machine.view_of(&group(&[(Version::V2, "/sys/fs/cgroup/pods/a")]));
        assert_eq!(own, View::Unified("/sys/fs/cgroup/pods/a".into()));
        assert_eq!(machine.view_of_all(), View::Unified("/sys/fs/cgroup".into()));
    }

    #[test]
    fn on_a_hybrid_machine_each_hierarchy_of_the_group_has_its_name() {
        let machine = hierarchies(
            "32 31 0:29 / /cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             33 31 0:30 / /cg/memory rw - cgroup cgroup rw,memory\n\
             34 31 0:31 / /cg/systemd rw - cgroup cgroup rw,name=systemd\n\
             35 31 0:32 / /cg/v2 rw - cgroup2 cgroup2 rw\n",
        );
        let dirs = [
            (Version::V1, "/cg/cpu,cpuacct/pods/a"),
            (Version::V1, "/cg/memory/pods/a"),
            (Version::V2, "/cg/v2/pods/a"),
        ];
        let View::Hierarchies { dirs, links } = machine.view_of(&group(&dirs)) else { panic!("v1") };
        let shown: Vec<_> = dirs.iter().map(|(name, dir)| (name.as_str(), dir.to_str().unwrap())).collect();
        assert_eq!(
            shown,
            [
                ("cpu,cpuacct", "/cg/cpu,cpuacct/pods/a"),
                ("memory", "/cg/memory/pods/a"),
                ("unified", "/cg/v2/pods/a")
            ]
        );
        let joint = "cpu,cpuacct".to_owned();
        assert_eq!(links, [("cpu".to_owned(), joint.clone()), ("cpuacct".to_owned(), joint)]);
        let View::Hierarchies { dirs, .. } = machine.view_of_all() else { panic!("v1") };
        assert_eq!(dirs.len(), 4, "with systemd");
    }
}
