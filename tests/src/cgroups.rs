//! The cgroup by which every process of a sandbox is known, however it was
//! orphaned, and by which it is killed.
//!
//! Invariant: membership is inherited by fork from the *thread* that joined, so
//! what a test starts is tagged without a race. On cgroup v1 any thread may join
//! alone (file `tasks`). On cgroup v2 a thread may do so among the threaded
//! children of its process's own group only, so the process moves to one first;
//! what it starts may go from there to any group, as a pod's process does.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, gettid};

use crate::eventually;

const ROOT: &str = "/sys/fs/cgroup";
/// Hierarchies in which a thread may join alone; the first that is mounted is used.
const TRACKING: [&str; 3] = ["systemd", "freezer", "pids"];

/// On a machine with cgroup v2 alone, the group of processes whose threads have tags.
const THREADED: &str = "hawser-test-support";

#[derive(Debug)]
pub struct Tag {
    name: String,
    /// Where the thread comes from and goes back to; the tag is a child of it.
    home: PathBuf,
    /// The file of a group that takes threads.
    threads: &'static str,
}

/// A process of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub pid: i32,
    /// `comm`, at most 15 bytes.
    pub name: String,
    /// Arguments joined by blanks; empty for a zombie, and for an instant within execve.
    pub command_line: String,
    /// Dead, and not yet waited for by its parent.
    pub is_zombie: bool,
}

impl Tag {
    /// Makes the cgroup `/<name>` and moves the calling thread into it.
    /// Whether a test that was killed has left groups of this name, of its own or of its node.
    pub(crate) fn is_left(name: &str) -> Result<bool> {
        let hierarchies = linux::cgroup::Hierarchies::detect()?;
        let of_node = hierarchies.names_below(Path::new("/"))?;
        let own = hierarchies.names_below(&Path::new("/").join(THREADED))?;
        Ok(of_node.contains(name) || own.contains(name))
    }

    pub fn join(name: &str) -> Result<Self> {
        let name = name.to_owned();
        let v1 = TRACKING.iter().map(|name| Path::new(ROOT).join(name));
        if let Some(home) = v1.into_iter().find(|dir| dir.join("tasks").exists()) {
            let tag = Self { name, home, threads: "tasks" };
            fs::create_dir(tag.dir()).with_context(|| tag.dir().display().to_string())?;
            tag.move_thread_to(&tag.dir())?;
            return Ok(tag);
        }
        ensure!(
            is_v2(),
            "no cgroup v1 hierarchy of {TRACKING:?} in {ROOT}, nor is that cgroup v2: the tests cannot find their processes"
        );
        let tag = Self { name, home: threaded_home()?, threads: "cgroup.threads" };
        fs::create_dir(tag.dir()).with_context(|| tag.dir().display().to_string())?;
        let kind = tag.dir().join("cgroup.type");
        fs::write(&kind, "threaded").with_context(|| kind.display().to_string())?;
        tag.move_thread_to(&tag.dir())?;
        Ok(tag)
    }

    fn dir(&self) -> PathBuf {
        self.home.join(&self.name)
    }

    fn move_thread_to(&self, dir: &Path) -> Result<()> {
        let threads = dir.join(self.threads);
        fs::write(&threads, gettid().to_string()).with_context(|| threads.display().to_string())
    }

    /// Every process that is in a cgroup at or below `/<name>` of any hierarchy,
    /// but for the calling process itself.
    pub fn processes(&self) -> Result<Vec<Process>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").context("/proc")? {
            let Ok(pid) = entry.context("/proc")?.file_name().to_string_lossy().parse::<i32>() else {
                continue;
            };
            // A process may end between any two looks; then it is none of the sandbox's.
            let Ok(cgroups) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { continue };
            if pid.cast_unsigned() != std::process::id() && is_member(&cgroups, &self.name) {
                found.extend(describe(pid));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Directories at or below `/<name>` in every hierarchy, the tracking one itself excepted.
    pub fn directories(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        if is_v2() {
            collect_directories(&Path::new(ROOT).join(&self.name), &mut found);
        }
        for entry in fs::read_dir(ROOT).context(ROOT)? {
            let hierarchy = entry.context(ROOT)?.path();
            // `cpu,cpuacct` and its like have symbolic links beside them.
            if hierarchy.is_symlink() {
                continue;
            }
            collect_directories(&hierarchy.join(&self.name), &mut found);
        }
        found.retain(|dir| *dir != self.dir());
        Ok(found)
    }

    /// SIGKILL to every process until none is left.
    pub fn kill_all(&self) -> Result<()> {
        eventually("the sandbox's processes die", Duration::from_secs(30), || {
            let left: Vec<Process> = self.processes()?.into_iter().filter(|p| !p.is_zombie).collect();
            for process in &left {
                // Gone already is as good.
                let _gone = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
            }
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })
    }

    /// Removes what [`Tag::directories`] lists and the tag itself.
    pub fn remove(&self) -> Result<()> {
        self.move_thread_to(&self.home)?;
        let mut dirs = self.directories()?;
        // Children stand after their parents.
        dirs.reverse();
        dirs.push(self.dir());
        for dir in dirs {
            eventually("the cgroup is empty", Duration::from_secs(30), || {
                fs::remove_dir(&dir).with_context(|| dir.display().to_string())
            })?;
        }
        Ok(())
    }
}

/// Whether the machine has cgroup v2 alone.
fn is_v2() -> bool {
    Path::new(ROOT).join("cgroup.controllers").exists()
}

/// The group that this process is in from now on. Once for a process: a second
/// move would take along the threads that have tags by then.
fn threaded_home() -> Result<PathBuf> {
    static MOVED: Mutex<bool> = Mutex::new(false);
    let home = Path::new(ROOT).join(THREADED);
    let mut moved = MOVED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*moved {
        fs::create_dir_all(&home).with_context(|| home.display().to_string())?;
        let processes = home.join("cgroup.procs");
        fs::write(&processes, std::process::id().to_string())
            .with_context(|| processes.display().to_string())?;
        *moved = true;
    }
    Ok(home)
}

fn collect_directories(dir: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    found.push(dir.to_path_buf());
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        collect_directories(&entry.path(), found);
    }
}

/// Whether a line of /proc/<pid>/cgroup (`4:memory:/hw-1/pods/x`) is at or below `/<name>`.
fn is_member(cgroups: &str, name: &str) -> bool {
    cgroups
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .any(|path| path.split('/').any(|part| part == name))
}

/// `None` when the process has ended since it was listed.
fn describe(pid: i32) -> Option<Process> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned();
    let raw = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let command_line = String::from_utf8_lossy(&raw).replace('\0', " ").trim_end().to_owned();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let is_zombie = status.lines().any(|line| line.starts_with("State:") && line.contains('Z'));
    Some(Process { pid, name, command_line, is_zombie })
}

#[cfg(test)]
mod tests {
    use super::is_member;

    #[test]
    fn a_process_belongs_to_the_tag_at_any_depth_of_any_hierarchy() {
        assert!(is_member("9:name=systemd:/hw-1\n8:pids:/\n", "hw-1"));
        assert!(is_member("9:name=systemd:/\n8:pids:/hw-1/pods/a\n", "hw-1"));
        assert!(!is_member("9:name=systemd:/hw-12\n0::/\n", "hw-1"));
    }
}
