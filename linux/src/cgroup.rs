//! Control groups of containers on v1, v2 and hybrid machines: every controller
//! is looked for where it is mounted (mountinfo), none is assumed.
//!
//! Invariant: a group joins only the hierarchies that have an effect on it
//! (limits, device rules, accounting): each join costs an RCU grace period.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::mountinfo::{self, MountEntry};
use crate::{Error, Result};

/// Controllers that a container group is put under, where the machine has them.
const WANTED: &[&str] = &["cpu", "cpuacct", "memory", "pids", "devices"];
const V1_CONTROLLERS: &[&str] = &[
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "hugetlb",
    "net_cls",
    "net_prio",
    "perf_event",
    "rdma",
    "misc",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// Where each controller lives.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hierarchies {
    controllers: BTreeMap<String, (Version, PathBuf)>,
    /// The v2 tree, with or without controllers.
    unified: Option<PathBuf>,
    /// Every v1 tree, also those without a controller (`name=systemd`).
    v1: Vec<PathBuf>,
}

/// Limits of one group; `None` leaves the kernel's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<i64>,
    /// cgroup v1 meaning: 2..=262144; converted to a weight on v2.
    pub cpu_shares: Option<u64>,
    /// Microseconds per period; negative for none.
    pub cpu_quota: Option<i64>,
    pub cpu_period: Option<u64>,
    pub pids: Option<i64>,
    pub cpuset_cpus: Option<String>,
    pub cpuset_mems: Option<String>,
    /// Page size (`2MB`) and bytes.
    pub hugepages: Vec<(String, u64)>,
    /// In order; `None` leaves devices alone.
    pub devices: Option<Vec<DeviceRule>>,
}

/// One line of devices.allow or devices.deny: `c 1:3 rwm`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRule {
    pub allow: bool,
    pub rule: String,
}

/// One group, as the directories it has in the hierarchies it takes part in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    dirs: Vec<(Version, PathBuf)>,
    memory: Option<(Version, PathBuf)>,
}

impl Hierarchies {
    pub fn detect() -> Result<Self> {
        let mut found = Self::from_mounts(&mountinfo::read()?);
        if let Some(unified) = found.unified.clone() {
            let path = unified.join("cgroup.controllers");
            let text = fs::read_to_string(&path).map_err(|e| Error::at("read", &path, e))?;
            for controller in text.split_whitespace() {
                let place = (Version::V2, unified.clone());
                found.controllers.entry(controller.to_owned()).or_insert(place);
            }
        }
        Ok(found)
    }

    fn from_mounts(mounts: &[MountEntry]) -> Self {
        let mut found = Self::default();
        // Only whole hierarchies: a bind mount of one group is not the place to make others.
        for mount in mounts.iter().filter(|m| m.root == Path::new("/")) {
            match mount.fs_type.as_str() {
                "cgroup2" => found.unified = found.unified.or_else(|| Some(mount.mount_point.clone())),
                "cgroup" => {
                    found.v1.push(mount.mount_point.clone());
                    for option in mount.super_options.split(',').filter(|o| V1_CONTROLLERS.contains(o)) {
                        let place = (Version::V1, mount.mount_point.clone());
                        found.controllers.entry(option.to_owned()).or_insert(place);
                    }
                }
                _ => {}
            }
        }
        found
    }

    pub fn has(&self, controller: &str) -> bool {
        self.controllers.contains_key(controller)
    }

    /// The directory of group `path` for `controller`, if the machine has the controller.
    pub fn dir(&self, controller: &str, path: &Path) -> Option<PathBuf> {
        self.controllers.get(controller).map(|(_, root)| under(root, path))
    }

    /// Makes `path` wherever a container below it will need it. Returns what was
    /// not there before, in the order of creation, for [`remove_dirs`].
    pub fn ensure_parent(&self, path: &Path) -> Result<Vec<PathBuf>> {
        ensure_all(path, self.places(WANTED))
    }

    /// The same in every hierarchy, for a launcher that joins all of them (runc).
    pub fn ensure_parent_everywhere(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let mut places = self.places(WANTED);
        let others = self.v1.iter().map(|root| (Version::V1, root.as_path()));
        for (version, root) in others.chain(self.unified.iter().map(|root| (Version::V2, root.as_path()))) {
            if !places.iter().any(|(_, known, _)| *known == root) {
                places.push((version, root, Vec::new()));
            }
        }
        ensure_all(path, places)
    }

    /// Makes the group `path` with `limits`. Fails without leaving the leaf
    /// behind. A limit whose controller the machine lacks is named in the second value.
    pub fn create(&self, path: &Path, limits: &Limits) -> Result<(Cgroup, Vec<String>)> {
        let mut wanted = WANTED.to_vec();
        if limits.cpuset_cpus.is_some() || limits.cpuset_mems.is_some() {
            wanted.push("cpuset");
        }
        if !limits.hugepages.is_empty() {
            wanted.push("hugetlb");
        }
        let mut group = Cgroup { dirs: Vec::new(), memory: None };
        if let Some((version, root)) = self.controllers.get("memory") {
            group.memory = Some((*version, under(root, path)));
        }
        let result = self.places(&wanted).into_iter().try_for_each(|(version, root, controllers)| {
            ensure_dirs(root, path, version, &controllers).map_err(|(error, _)| error)?;
            group.dirs.push((version, under(root, path)));
            if version == Version::V1 && controllers.contains(&"cpuset") {
                inherit_cpuset(root, path)?;
            }
            Ok(())
        });
        let result = result.and_then(|()| self.apply(path, limits));
        match result {
            Ok(unmet) => Ok((group, unmet)),
            Err(error) => {
                // The cause is what the caller needs; an empty group is all that may stay.
                drop(group.remove());
                Err(error)
            }
        }
    }

    /// Hierarchies with any of `wanted`, each once, with the ones it has.
    fn places<'a>(&self, wanted: &[&'a str]) -> Vec<(Version, &Path, Vec<&'a str>)> {
        let mut places: Vec<(Version, &Path, Vec<&'a str>)> = Vec::new();
        for &name in wanted {
            let Some((version, root)) = self.controllers.get(name) else { continue };
            match places.iter_mut().find(|(_, known, _)| known == root) {
                Some((_, _, names)) => names.push(name),
                None => places.push((*version, root, vec![name])),
            }
        }
        places
    }

    fn apply(&self, path: &Path, limits: &Limits) -> Result<Vec<String>> {
        let mut unmet = Vec::new();
        for (controller, v1, v2) in settings(limits) {
            match self.controllers.get(controller) {
                None => unmet.push(format!("{controller}: this machine has no such cgroup controller")),
                Some((Version::V1, root)) => write_all(&under(root, path), &v1)?,
                Some((Version::V2, root)) => write_all(&under(root, path), &v2)?,
            }
        }
        if let Some(rules) = &limits.devices {
            match self.controllers.get("devices") {
                Some((_, root)) => {
                    for rule in rules {
                        let file = if rule.allow { "devices.allow" } else { "devices.deny" };
                        write(&under(root, path).join(file), &rule.rule)?;
                    }
                }
                None => unmet.push("devices: cgroup v2 has device rules only as BPF programs".to_owned()),
            }
        }
        Ok(unmet)
    }
}

type FileValues = Vec<(String, String)>;

/// What to write for the limits that are set: controller, v1 files, v2 files.
fn settings(limits: &Limits) -> Vec<(&'static str, FileValues, FileValues)> {
    let pair = |file: &str, value: String| (file.to_owned(), value);
    let max = |value: i64| if value < 0 { "max".to_owned() } else { value.to_string() };
    let mut out = Vec::new();
    if let Some(bytes) = limits.memory_bytes {
        out.push((
            "memory",
            vec![pair("memory.limit_in_bytes", bytes.to_string())],
            vec![pair("memory.max", max(bytes))],
        ));
    }
    if let Some(shares) = limits.cpu_shares {
        // The kernel's own bounds, mapped as runc does: 2..262144 -> 1..10000.
        let weight = 1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142;
        out.push((
            "cpu",
            vec![pair("cpu.shares", shares.to_string())],
            vec![pair("cpu.weight", weight.to_string())],
        ));
    }
    if limits.cpu_quota.is_some() || limits.cpu_period.is_some() {
        let period = limits.cpu_period.unwrap_or(100_000);
        let quota = limits.cpu_quota.unwrap_or(-1);
        out.push((
            "cpu",
            vec![pair("cpu.cfs_period_us", period.to_string()), pair("cpu.cfs_quota_us", quota.to_string())],
            vec![pair("cpu.max", format!("{} {period}", max(quota)))],
        ));
    }
    if let Some(pids) = limits.pids {
        out.push(("pids", vec![pair("pids.max", max(pids))], vec![pair("pids.max", max(pids))]));
    }
    for (file, value) in [("cpuset.cpus", &limits.cpuset_cpus), ("cpuset.mems", &limits.cpuset_mems)] {
        if let Some(value) = value {
            out.push(("cpuset", vec![pair(file, value.clone())], vec![pair(file, value.clone())]));
        }
    }
    for (size, bytes) in &limits.hugepages {
        out.push((
            "hugetlb",
            vec![pair(&format!("hugetlb.{size}.limit_in_bytes"), bytes.to_string())],
            vec![pair(&format!("hugetlb.{size}.max"), bytes.to_string())],
        ));
    }
    out
}

impl Cgroup {
    /// Puts the calling process in, which must have one thread only. On v1 it goes
    /// in as a thread: that needs no cgroup_threadgroup_rwsem, whose writer waits
    /// for an RCU grace period (kernel/cgroup/cgroup.c, `cgroup_procs_write_start`).
    pub fn join(&self) -> Result<()> {
        self.dirs.iter().try_for_each(|(version, dir)| match version {
            Version::V1 => write(&dir.join("tasks"), "0"),
            Version::V2 => write(&dir.join("cgroup.procs"), "0"),
        })
    }

    /// How often the kernel killed one of its processes for lack of memory.
    pub fn oom_kills(&self) -> u64 {
        let Some((version, dir)) = &self.memory else { return 0 };
        let file = match version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// The processes in it, as pids of the reader.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .dirs
            .iter()
            .filter_map(|(_, dir)| fs::read_to_string(dir.join("cgroup.procs")).ok())
            .flat_map(|text| text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<_>>())
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Removes its directories; absence is a success. `EBUSY` while it has processes.
    pub fn remove(&self) -> Result<()> {
        self.dirs.iter().try_for_each(|(_, dir)| match fs::remove_dir(dir) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::at("remove cgroup", dir, e)),
            _ => Ok(()),
        })
    }

    /// The group `path` wherever it exists, whoever made it.
    pub fn find(hierarchies: &Hierarchies, path: &Path) -> Self {
        let v1 = hierarchies.v1.iter().map(|root| (Version::V1, under(root, path)));
        let v2 = hierarchies.unified.iter().map(|root| (Version::V2, under(root, path)));
        let mut dirs: Vec<(Version, PathBuf)> = v1.chain(v2).filter(|(_, dir)| dir.is_dir()).collect();
        // One mount may stand in the table twice.
        dirs.sort_by(|a, b| a.1.cmp(&b.1));
        dirs.dedup();
        let memory = hierarchies.controllers.get("memory").map(|(v, root)| (*v, under(root, path)));
        Self { dirs, memory }
    }
}

/// Removes groups from the last to the first; those still in use (by somebody
/// else) and those already gone stay as they are. Returns the ones still there.
pub fn remove_dirs(dirs: &[PathBuf]) -> Vec<PathBuf> {
    let mut left: Vec<PathBuf> = dirs
        .iter()
        .rev()
        .filter(|dir| fs::remove_dir(dir).is_err_and(|e| e.kind() != ErrorKind::NotFound))
        .cloned()
        .collect();
    left.reverse();
    left
}

fn ensure_all(path: &Path, places: Vec<(Version, &Path, Vec<&str>)>) -> Result<Vec<PathBuf>> {
    let mut created = Vec::new();
    for (version, root, controllers) in places {
        match ensure_dirs(root, path, version, &controllers) {
            Ok(made) => created.extend(made),
            Err((error, made)) => {
                created.extend(made);
                // Best effort: the error is what matters, the rest is empty groups.
                drop(remove_dirs(&created));
                return Err(error);
            }
        }
    }
    Ok(created)
}

fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// mkdir -p below `root`; on v2 hands the controllers down. Also on failure says what was made.
fn ensure_dirs(
    root: &Path,
    path: &Path,
    version: Version,
    controllers: &[&str],
) -> std::result::Result<Vec<PathBuf>, (Error, Vec<PathBuf>)> {
    let mut made = Vec::new();
    let mut dir = root.to_owned();
    for name in path.strip_prefix("/").unwrap_or(path) {
        if version == Version::V2 {
            for controller in controllers {
                let file = dir.join("cgroup.subtree_control");
                if let Err(error) = write(&file, &format!("+{controller}")) {
                    return Err((error, made));
                }
            }
        }
        dir.push(name);
        match fs::create_dir(&dir) {
            Ok(()) => made.push(dir.clone()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err((Error::at("create cgroup", &dir, e), made)),
        }
    }
    Ok(made)
}

/// A v1 cpuset group takes no process until it has cpus and mems; new ones are empty.
fn inherit_cpuset(root: &Path, path: &Path) -> Result<()> {
    let mut dir = root.to_owned();
    for name in path.strip_prefix("/").unwrap_or(path) {
        let parent = dir.clone();
        dir.push(name);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let own =
                fs::read_to_string(dir.join(file)).map_err(|e| Error::at("read", &dir.join(file), e))?;
            if own.trim().is_empty() {
                let inherited = fs::read_to_string(parent.join(file))
                    .map_err(|e| Error::at("read", &parent.join(file), e))?;
                write(&dir.join(file), inherited.trim())?;
            }
        }
    }
    Ok(())
}

fn write_all(dir: &Path, values: &[(String, String)]) -> Result<()> {
    values.iter().try_for_each(|(file, value)| write(&dir.join(file), value))
}

fn write(path: &Path, value: &str) -> Result<()> {
    fs::write(path, value)
        .map_err(|e| Error::new("write cgroup", format!("{value:?} to {}", path.display()), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_machine_has_each_controller_where_it_is_mounted() {
        let table = b"32 31 0:29 / /cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                      33 31 0:30 / /cg/systemd rw - cgroup cgroup rw,name=systemd\n\
                      34 31 0:31 /sub /elsewhere rw - cgroup cgroup rw,memory\n\
                      35 31 0:32 / /cg/unified rw - cgroup2 cgroup2 rw\n";
        let found = Hierarchies::from_mounts(&mountinfo::parse(table).unwrap());
        assert_eq!(found.dir("cpuacct", Path::new("/a")), Some(PathBuf::from("/cg/cpu,cpuacct/a")));
        assert!(!found.has("memory"), "a bind mount of one group is not the hierarchy");
        assert_eq!(found.unified.as_deref(), Some(Path::new("/cg/unified")));
        assert_eq!(found.places(WANTED).len(), 1);
    }

    #[test]
    fn shares_become_a_weight_on_v2() {
        let limits = Limits { cpu_shares: Some(1024), cpu_quota: Some(-1), ..Limits::default() };
        let [(_, _, weight), (_, _, max)] = &settings(&limits)[..] else { panic!("two settings") };
        assert_eq!(weight, &[("cpu.weight".to_owned(), "39".to_owned())]);
        assert_eq!(max, &[("cpu.max".to_owned(), "max 100000".to_owned())]);
    }

    #[test]
    fn a_group_has_its_limit_and_is_removed_with_what_was_made_for_it() {
        let hierarchies = Hierarchies::detect().unwrap();
        assert!(hierarchies.has("memory"), "this test needs root and a memory controller: {hierarchies:?}");
        let parent = PathBuf::from(format!("/hawser-test-{}", std::process::id()));
        let made = hierarchies.ensure_parent(&parent).unwrap();
        let limits = Limits { memory_bytes: Some(64 << 20), pids: Some(17), ..Limits::default() };
        let (group, unmet) = hierarchies.create(&parent.join("c"), &limits).unwrap();
        assert_eq!(unmet, Vec::<String>::new());
        let memory = hierarchies.dir("memory", &parent.join("c")).unwrap();
        let (v1, v2) = (memory.join("memory.limit_in_bytes"), memory.join("memory.max"));
        let read = fs::read_to_string(v1).or_else(|_| fs::read_to_string(v2)).unwrap();
        assert_eq!(read.trim(), (64 << 20).to_string());
        assert_eq!(group.oom_kills(), 0);
        group.remove().unwrap();
        group.remove().unwrap();
        assert_eq!(remove_dirs(&made), Vec::<PathBuf>::new());
    }
}
