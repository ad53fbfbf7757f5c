//! Control groups of containers on v1, v2 and hybrid machines. mountinfo shows where each
//! controller is mounted; none is assumed.
//!
//! Invariant: a container's group exists in every hierarchy. The group of a program that cannot
//! make namespaces exists only in hierarchies that affect it (limits, device rules, accounting),
//! since each join takes time.

mod below;
mod end;
mod enforced;
mod limits;
mod listing;
mod update;
pub mod usage;
pub mod v1;
pub mod v2;
pub mod view;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::errno::Errno;
use rustix::fs::{Mode, OFlags};

use crate::bpf::DeviceProgram;
use crate::device_rules::Policy;
use crate::mountinfo::{self, MountEntry};
use crate::{Error, Result};

pub use end::remove_tree;
pub use enforced::Enforced;
use limits::Files;
pub use limits::Limits;

/// Controllers for a container's group, if the machine has them.
const WANTED: &[&str] = &["cpu", "cpuacct", "memory", "pids", "devices"];
/// Types of the hierarchies' file systems.
const V1_TYPE: &str = "cgroup";
const V2_TYPE: &str = "cgroup2";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// Where each controller is mounted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hierarchies {
    controllers: BTreeMap<String, (Version, PathBuf)>,
    /// The v2 tree, with or without controllers.
    unified: Option<PathBuf>,
    /// Every v1 tree, also those without a controller (`name=systemd`).
    v1: Vec<PathBuf>,
}

/// The mechanism that restricts a group's devices, and its hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceControl {
    /// The v1 hierarchy with the controller `devices`.
    V1(PathBuf),
    /// No such hierarchy: a BPF program in the v2 hierarchy.
    V2(PathBuf),
    /// Neither is mounted.
    Missing,
}

/// A hierarchy in which a group gets a directory.
#[derive(Debug)]
struct Place<'a> {
    version: Version,
    root: &'a Path,
    /// The controllers that v2 groups must enable for their children.
    controllers: Vec<&'a str>,
    depth: Depth,
}

/// How much of a group's path exists in a hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    Full,
    /// The group is directly below the first one of its path (`/pods/burstable/a` becomes
    /// `/pods/a`): without limits, the groups in between only cost time.
    Short,
}

impl Place<'_> {
    /// `path` in this hierarchy.
    fn path(&self, path: &Path) -> PathBuf {
        if self.depth == Depth::Short { shortened(path) } else { path.to_owned() }
    }
}

/// One group: its directories in the hierarchies that it is part of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    dirs: Vec<(Version, PathBuf)>,
    memory: Option<(Version, PathBuf)>,
    /// With the group's own directory.
    devices: DeviceControl,
}

impl Hierarchies {
    pub fn detect() -> Result<Self> {
        Self::of(&mountinfo::read()?)
    }

    /// The hierarchies that were mounted when this process first found any. They are mounted when the
    /// machine starts, and the whole mount table takes milliseconds on a node with hundreds of pods.
    pub fn known() -> Result<Self> {
        static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
        if let Some(table) = TABLE.get() {
            return Self::of_table(table);
        }
        let table = Self::table()?;
        let found = Self::of_table(&table)?;
        if !table.is_empty() {
            TABLE.get_or_init(|| table);
        }
        Ok(found)
    }

    /// The part of the mount table that [`Self::detect`] needs, in the form of mountinfo.
    pub fn table() -> Result<Vec<u8>> {
        mountinfo::text_of_types(&[V1_TYPE, V2_TYPE])
    }

    /// The hierarchies of such a table, with the controllers that the v2 tree has now.
    pub fn of_table(table: &[u8]) -> Result<Self> {
        let mounts = mountinfo::parse(table).ok_or_else(|| {
            Error::new("parse", "table of cgroup mounts", std::io::Error::from(ErrorKind::InvalidData))
        })?;
        Self::of(&mounts)
    }

    /// The hierarchies of one mount table, with the controllers that the v2 tree has now.
    pub fn of(mounts: &[MountEntry]) -> Result<Self> {
        let mut found = Self::from_mounts(mounts);
        if let Some(unified) = found.unified.clone() {
            for controller in read(&unified.join("cgroup.controllers"))?.split_whitespace() {
                let place = (Version::V2, unified.clone());
                found.controllers.entry(controller.to_owned()).or_insert(place);
            }
        }
        Ok(found)
    }

    fn from_mounts(mounts: &[MountEntry]) -> Self {
        let mut found = Self::default();
        // Only whole hierarchies: groups cannot be made in a bind mount of one group.
        for mount in mounts.iter().filter(|m| m.root == Path::new("/")) {
            match mount.fs_type.as_str() {
                V2_TYPE => found.unified = found.unified.or_else(|| Some(mount.mount_point.clone())),
                V1_TYPE => {
                    found.v1.push(mount.mount_point.clone());
                    for option in mount.super_options.split(',').filter(|o| v1::CONTROLLERS.contains(o)) {
                        let place = (Version::V1, mount.mount_point.clone());
                        found.controllers.entry(option.to_owned()).or_insert(place);
                    }
                }
                _ => {}
            }
        }
        found
    }

    /// Whether the machine has `controller`, on v1 or on v2.
    pub fn has(&self, controller: &str) -> bool {
        self.controllers.contains_key(controller)
    }

    /// Whether `controller` belongs to the v2 tree.
    pub fn has_in_v2(&self, controller: &str) -> bool {
        self.controllers.get(controller).is_some_and(|(version, _)| *version == Version::V2)
    }

    /// Where devices are restricted: on v1 if it has the controller, so that there is no second
    /// mechanism in a v2 tree beside it.
    pub fn device_control(&self) -> DeviceControl {
        match (self.controllers.get("devices"), &self.unified) {
            (Some((_, root)), _) => DeviceControl::V1(root.clone()),
            (None, Some(unified)) => DeviceControl::V2(unified.clone()),
            (None, None) => DeviceControl::Missing,
        }
    }

    /// The directory of group `path` for `controller`, if the machine has the controller.
    pub fn dir(&self, controller: &str, path: &Path) -> Option<PathBuf> {
        self.controllers.get(controller).map(|(_, root)| under(root, path))
    }

    /// The existing directory of group `path` for `controller`, full or short.
    fn group_of(&self, controller: &str, path: &Path) -> Option<(Version, PathBuf)> {
        let (version, root) = self.controllers.get(controller)?;
        let dirs = [under(root, path), under(root, &shortened(path))];
        dirs.into_iter().find(|dir| dir.is_dir()).map(|dir| (*version, dir))
    }

    /// Makes `path` in each hierarchy in which a group of [`Self::create`] below needs it. Returns
    /// the new directories in order of creation, for [`remove_dirs`].
    pub fn ensure_parent(&self, path: &Path) -> Result<Vec<PathBuf>> {
        ensure_all(&self.places(WANTED), |_| path.to_owned())
    }

    /// [`Self::ensure_parent`] for groups of [`Self::create_everywhere`].
    pub fn ensure_parent_of_containers(&self, path: &Path) -> Result<Vec<PathBuf>> {
        ensure_all(&self.all_places(WANTED), |depth| match depth {
            Depth::Full => path.to_owned(),
            Depth::Short => first_of(path),
        })
    }

    /// [`Self::ensure_parent`] for launchers that use the whole path in every hierarchy (OCI
    /// runtimes).
    pub fn ensure_parent_everywhere(&self, path: &Path) -> Result<Vec<PathBuf>> {
        ensure_all(&self.all_places(WANTED), |_| path.to_owned())
    }

    /// [`Self::places`], and every other hierarchy without a controller and with short paths.
    fn all_places<'a>(&'a self, wanted: &[&'a str]) -> Vec<Place<'a>> {
        let mut places = self.places(wanted);
        let others = self.v1.iter().map(|root| (Version::V1, root.as_path()));
        for (version, root) in others.chain(self.unified.iter().map(|root| (Version::V2, root.as_path()))) {
            if !places.iter().any(|known| known.root == root) {
                places.push(Place { version, root, controllers: Vec::new(), depth: Depth::Short });
            }
        }
        places
    }

    /// Makes the group `path` with `limits`. After a failure, the group itself does not exist. The
    /// second value lists limits whose controller the machine lacks.
    pub fn create(&self, path: &Path, limits: &Limits) -> Result<(Cgroup, Vec<String>)> {
        self.create_in(self.places(&self.wanted(limits)), path, limits)
    }

    /// [`Self::create`] in every hierarchy, for processes that may make namespaces. If a process
    /// has no group of its own, its new cgroup namespace shows the group of the process that
    /// started it, possibly the host's root, and root could change that group.
    pub fn create_everywhere(&self, path: &Path, limits: &Limits) -> Result<(Cgroup, Vec<String>)> {
        let wanted = self.wanted(limits);
        self.create_in(self.all_places(&wanted), path, limits)
    }

    fn wanted<'a>(&self, limits: &'a Limits) -> Vec<&'a str> {
        let unified = limits.unified_controllers().filter(|name| self.has_in_v2(name));
        [WANTED, &limits.more_controllers(), &unified.collect::<Vec<_>>()].concat()
    }

    fn create_in(
        &self,
        places: Vec<Place<'_>>,
        path: &Path,
        limits: &Limits,
    ) -> Result<(Cgroup, Vec<String>)> {
        let devices = match self.device_control() {
            DeviceControl::V1(root) => DeviceControl::V1(under(&root, path)),
            DeviceControl::V2(root) => DeviceControl::V2(under(&root, path)),
            DeviceControl::Missing => DeviceControl::Missing,
        };
        let mut group = Cgroup { dirs: Vec::new(), memory: None, devices };
        if let Some((version, root)) = self.controllers.get("memory") {
            group.memory = Some((*version, under(root, path)));
        }
        let cpuset = self.controllers.get("cpuset").filter(|(version, _)| *version == Version::V1);
        let result = places.iter().try_for_each(|place| {
            let path = place.path(path);
            ensure_dirs(place, &path).map_err(|(error, _)| error)?;
            group.dirs.push((place.version, under(place.root, &path)));
            if cpuset.is_some_and(|(_, cpuset)| cpuset == place.root) {
                v1::inherit_cpuset(place.root, &path)?;
            }
            Ok(())
        });
        let result = result.and_then(|()| self.apply(path, limits));
        match result {
            Ok(unmet) => Ok((group, unmet)),
            Err(error) => {
                // The caller gets the original error; at most an empty group stays.
                let _group_stays = group.remove();
                Err(error)
            }
        }
    }

    /// The hierarchies with any of `wanted`, each with the controllers that it has, and the one in
    /// which devices are restricted.
    fn places<'a>(&'a self, wanted: &[&'a str]) -> Vec<Place<'a>> {
        let mut places: Vec<Place<'a>> = Vec::new();
        for &name in wanted {
            let Some((version, root)) = self.controllers.get(name) else { continue };
            match places.iter_mut().find(|place| place.root == root) {
                Some(place) => place.controllers.push(name),
                None => {
                    let controllers = vec![name];
                    places.push(Place { version: *version, root, controllers, depth: Depth::Full });
                }
            }
        }
        if let (DeviceControl::V2(_), Some(unified)) = (self.device_control(), &self.unified)
            && !places.iter().any(|place| place.root == unified)
        {
            let controllers = Vec::new();
            places.push(Place { version: Version::V2, root: unified, controllers, depth: Depth::Full });
        }
        places
    }

    fn apply(&self, path: &Path, limits: &Limits) -> Result<Vec<String>> {
        let mut unmet = Vec::new();
        for limit in limits.set() {
            let controller = limit.controller();
            match self.controllers.get(controller) {
                None => unmet.push(format!("{controller}: this machine has no such cgroup controller")),
                Some((Version::V1, root)) => v1::set(&under(root, path), &limit)?,
                Some((Version::V2, root)) => v2::set(&under(root, path), &limit)?,
            }
        }
        let files = limits.unified.iter().filter(|(file, _)| self.has_in_v2(limits::controller(file)));
        let files: Files = files.cloned().collect();
        if let Some(root) = self.unified.as_ref().filter(|_| !files.is_empty()) {
            let missing = write_present(&under(root, path), &files)?;
            unmet.extend(
                missing.iter().map(|file| format!("{file}: this kernel's cgroups have no such limit")),
            );
        }
        Ok(unmet)
    }
}

impl Cgroup {
    /// Moves the calling process, which must be single-threaded, into the group.
    pub fn join(&self) -> Result<()> {
        self.dirs.iter().try_for_each(|(version, dir)| match version {
            Version::V1 => v1::join_as_thread(dir),
            Version::V2 => v2::admit(dir, 0),
        })
    }

    fn dirs_of(&self, version: Version) -> impl Iterator<Item = &PathBuf> {
        self.dirs.iter().filter(move |(found, _)| *found == version).map(|(_, dir)| dir)
    }

    /// Its v2 directory, if any, to start a process in ([`crate::process::clone_child`]).
    pub fn open_v2(&self) -> Result<Option<OwnedFd>> {
        let Some(dir) = self.dirs_of(Version::V2).next() else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(dir, flags, Mode::empty()).map(Some).map_err(|e| Error::at("open cgroup", dir, e))
    }

    /// Moves the calling thread into its v1 directories; processes that the thread starts are in
    /// them too. On v2, [`Self::admit`] moves whole processes.
    pub fn join_as_thread(&self) -> Result<()> {
        self.dirs_of(Version::V1).try_for_each(|dir| v1::join_as_thread(dir))
    }

    /// Moves process `pid` into its v2 directory, if any.
    pub fn admit(&self, pid: i32) -> Result<()> {
        self.dirs_of(Version::V2).try_for_each(|dir| v2::admit(dir, pid))
    }

    /// Restricts its processes to the devices that `policy` allows. Must come before the first
    /// process joins. After a failure they are unrestricted.
    pub fn restrict_devices(&self, policy: &Policy) -> Result<()> {
        match &self.devices {
            DeviceControl::V1(dir) => v1::restrict_devices(dir, policy),
            _ if policy.allows_everything() => Ok(()),
            DeviceControl::V2(dir) => DeviceProgram::load(&policy.program())?.attach(dir),
            DeviceControl::Missing => {
                let missing = "neither the cgroup v1 controller `devices` nor a cgroup v2 tree is mounted";
                Err(Error::new("restrict devices", missing, Errno::ENODEV))
            }
        }
    }

    /// How often the kernel has killed one of its processes for lack of memory.
    pub fn oom_kills(&self) -> u64 {
        let Some((version, dir)) = &self.memory else { return 0 };
        let file = match version {
            Version::V1 => v1::MEMORY_EVENTS,
            Version::V2 => v2::MEMORY_EVENTS,
        };
        let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// The existing directories of group `path`, whichever program made them.
    pub fn find(hierarchies: &Hierarchies, path: &Path) -> Self {
        let v1 = hierarchies.v1.iter().map(|root| (Version::V1, root));
        let roots = v1.chain(hierarchies.unified.iter().map(|root| (Version::V2, root)));
        let paths = [path.to_owned(), shortened(path)];
        let dirs =
            roots.flat_map(|(version, root)| paths.iter().map(move |path| (version, under(root, path))));
        let mut dirs: Vec<(Version, PathBuf)> = dirs.filter(|(_, dir)| dir.is_dir()).collect();
        // The mount table may list a mount twice.
        dirs.sort_by(|a, b| a.1.cmp(&b.1));
        dirs.dedup();
        let memory = hierarchies.controllers.get("memory").map(|(v, root)| (*v, under(root, path)));
        Self { dirs, memory, devices: DeviceControl::Missing }
    }
}

/// Removes groups, the last one first. Groups still in use and missing ones are skipped. Returns
/// those that still exist.
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

fn ensure_all(places: &[Place<'_>], path: impl Fn(Depth) -> PathBuf) -> Result<Vec<PathBuf>> {
    let mut created = Vec::new();
    for place in places {
        match ensure_dirs(place, &path(place.depth)) {
            Ok(made) => created.extend(made),
            Err((error, made)) => {
                created.extend(made);
                // Best effort: the caller gets the error, and only empty groups remain.
                let _may_be_gone = remove_dirs(&created);
                return Err(error);
            }
        }
    }
    Ok(created)
}

fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The first group in `path`.
fn first_of(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).iter().take(1).collect()
}

/// [`Depth::Short`]: the first group of `path` and the last one.
fn shortened(path: &Path) -> PathBuf {
    let first = first_of(path);
    match path.file_name() {
        Some(last) if path.strip_prefix("/").unwrap_or(path) != first => first.join(last),
        _ => first,
    }
}

/// mkdir -p; on v2 also enables the controllers. A failure also lists the new directories.
fn ensure_dirs(place: &Place<'_>, path: &Path) -> std::result::Result<Vec<PathBuf>, (Error, Vec<PathBuf>)> {
    // v1 has no controllers to enable.
    if place.version == Version::V1 || place.controllers.is_empty() {
        return make_dirs(place.root, path);
    }
    v2::ensure_dirs(place.root, path, &place.controllers)
}

/// mkdir -p that tries the last directory first: usually only that one is missing.
fn make_dirs(root: &Path, path: &Path) -> std::result::Result<Vec<PathBuf>, (Error, Vec<PathBuf>)> {
    let (mut made, mut below) = (Vec::new(), Vec::new());
    let mut dir = under(root, path);
    loop {
        match fs::create_dir(&dir) {
            Ok(()) => made.push(dir),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) if e.kind() == ErrorKind::NotFound && dir != root => {
                let parent = dir.parent().unwrap_or(root).to_owned();
                below.push(std::mem::replace(&mut dir, parent));
                continue;
            }
            Err(e) => return Err((Error::at("create cgroup", &dir, e), made)),
        }
        match below.pop() {
            Some(next) => dir = next,
            None => return Ok(made),
        }
    }
}

fn write_all(dir: &Path, values: &[(String, String)]) -> Result<()> {
    values.iter().try_for_each(|(file, value)| write(&dir.join(file), value))
}

/// Writes `files` into `dir`. Returns those that this kernel lacks.
fn write_present(dir: &Path, files: &[(String, String)]) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for (file, value) in files {
        if !is_limit(file) {
            return Err(Error::new(
                "set cgroup limit",
                format!("{file:?}: not a controller's file"),
                Errno::EINVAL,
            ));
        }
        match write(&dir.join(file), value) {
            // Files cannot be created in a group's directory.
            Err(e)
                if matches!(e.errno(), Errno::ENOENT | Errno::EACCES | Errno::EPERM)
                    && !dir.join(file).exists() =>
            {
                missing.push(file.clone());
            }
            written => written?,
        }
    }
    Ok(missing)
}

/// Accepts `memory.high`, but no path and no file of the group itself (`cgroup.procs`).
fn is_limit(file: &str) -> bool {
    let controller = file.split_once('.').map(|(controller, _)| controller);
    controller.is_some_and(|c| !c.is_empty() && c != "cgroup") && !file.contains('/')
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| Error::at("read", path, e))
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
        assert_eq!(found.places(WANTED).len(), 2, "cpu and cpuacct together; v2 for devices");
    }

    #[test]
    fn a_hierarchy_without_limits_has_only_the_ends_of_a_path() {
        let short = |path: &str| shortened(Path::new(path)).display().to_string();
        assert_eq!(short("/pods/burstable/pod7/a"), "pods/a");
        assert_eq!(short("/pods/a"), "pods/a");
        assert_eq!(short("/a"), "a");
        assert_eq!(first_of(Path::new("/pods/burstable")), Path::new("pods"));
    }

    #[test]
    fn devices_are_restricted_by_v1_where_it_has_the_controller_and_by_v2_elsewhere() {
        let control = |table: &str| {
            Hierarchies::from_mounts(&mountinfo::parse(table.as_bytes()).unwrap()).device_control()
        };
        let v1 = "32 31 0:29 / /cg/devices rw - cgroup cgroup rw,devices\n";
        let v2 = "35 31 0:32 / /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(control(&format!("{v2}{v1}")), DeviceControl::V1("/cg/devices".into()));
        assert_eq!(control(v2), DeviceControl::V2("/cg".into()));
        assert_eq!(control(""), DeviceControl::Missing);
    }

    #[test]
    fn the_cgroup_part_of_the_mount_table_has_the_same_hierarchies() {
        let part = Hierarchies::of_table(&Hierarchies::table().unwrap()).unwrap();
        assert_eq!(part, Hierarchies::detect().unwrap());
        assert_eq!(Hierarchies::of_table(b"no table").unwrap_err().errno(), Errno::EIO);
    }

    #[test]
    fn a_group_has_its_limit_and_is_removed_with_what_was_made_for_it() {
        let hierarchies = Hierarchies::detect().unwrap();
        assert!(hierarchies.has("memory"), "this test needs root and a memory controller: {hierarchies:?}");
        let parent = PathBuf::from(format!("/hawser-test-{}", std::process::id()));
        let missing = hierarchies.missing_parents(&parent.join("a"));
        let made = hierarchies.ensure_parent(&parent).unwrap();
        assert!(!made.is_empty() && made.iter().all(|dir| missing.contains(dir)), "{made:?}: {missing:?}");
        let left = hierarchies.missing_parents(&parent.join("a"));
        assert!(left.len() < missing.len() && !left.iter().any(|dir| made.contains(dir)), "{left:?}");
        let limits = Limits { memory_bytes: Some(64 << 20), pids: Some(17), ..Limits::default() };
        let (group, unmet) = hierarchies.create(&parent.join("c"), &limits).unwrap();
        assert_eq!(unmet, Vec::<String>::new());
        let memory = hierarchies.dir("memory", &parent.join("c")).unwrap();
        let (v1, v2) = (memory.join("memory.limit_in_bytes"), memory.join("memory.max"));
        let read = fs::read_to_string(v1).or_else(|_| fs::read_to_string(v2)).unwrap();
        assert_eq!(read.trim(), (64 << 20).to_string());
        assert_eq!(group.oom_kills(), 0);
        let names = || Vec::from_iter(hierarchies.names_below(&parent).unwrap());
        assert_eq!(names(), ["c"]);
        for (_, dir) in group.dirs.iter().skip(1) {
            fs::remove_dir(dir).unwrap();
        }
        assert_eq!(names(), ["c"], "it is left in one hierarchy");
        group.remove().unwrap();
        assert_eq!(names(), Vec::<String>::new());
        group.remove().unwrap();
        assert_eq!(remove_dirs(&made), Vec::<PathBuf>::new());
    }

    #[test]
    fn only_files_of_controllers_are_limits() {
        for file in ["memory.oom.group", "memory.swap.max", "io.weight", "hugetlb.2MB.max"] {
            assert!(is_limit(file), "{file}");
        }
        for file in ["cgroup.procs", "cgroup.kill", "../memory.max", "memory.x/y", "memory", ".max", ""] {
            assert!(!is_limit(file), "{file}");
        }
    }
}
