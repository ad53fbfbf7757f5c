//! What only cgroup v2 has: controllers that a group hands down, files that v1
//! lacks, one file that kills a whole group.
//!
//! Invariant: a controller is handed down only where it is not yet. Doing it
//! again would be refused in a group that has processes (cgroup-v2.rst, "No
//! Internal Process Constraint").

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::{read, write};
use crate::{Error, Result};

/// mkdir -p of `path` below `root`; every group above the last one hands
/// `controllers` down. Returns the directories that were not there before, also
/// with an error.
pub fn ensure_dirs(
    root: &Path,
    path: &Path,
    controllers: &[&str],
) -> std::result::Result<Vec<PathBuf>, (Error, Vec<PathBuf>)> {
    let mut made = Vec::new();
    let mut dir = root.to_owned();
    for name in path.strip_prefix("/").unwrap_or(path) {
        if let Err(error) = hand_down(&dir, controllers) {
            return Err((error, made));
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

/// Gives the groups below `dir` these controllers.
fn hand_down(dir: &Path, controllers: &[&str]) -> Result<()> {
    const OP: &str = "hand down cgroup controllers";
    if controllers.is_empty() {
        return Ok(());
    }
    let file = dir.join("cgroup.subtree_control");
    let enabled = read(&file)?;
    let missing: Vec<String> = controllers
        .iter()
        .filter(|name| !enabled.split_whitespace().any(|known| known == **name))
        .map(|name| format!("+{name}"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let wanted = missing.join(" ");
    let problem = match fs::write(&file, &wanted) {
        Ok(()) => return Ok(()),
        Err(e) => e,
    };
    let reason = match problem.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => {
            let pids = read(&dir.join("cgroup.procs")).unwrap_or_default();
            let pids: Vec<&str> = pids.split_whitespace().take(5).collect();
            format!(
                ": the group has processes of its own (pids {}), and cgroup v2 limits only groups whose \
                 parent has none; move them to another group, or choose another parent group",
                pids.join(" ")
            )
        }
        Some(Errno::ENOENT) => {
            let available = read(&dir.join("cgroup.controllers")).unwrap_or_default();
            format!(
                ": the group itself has only {:?}; its parent must hand the others down",
                available.trim()
            )
        }
        _ => String::new(),
    };
    Err(Error::new(OP, format!("{wanted} in {}{reason}", dir.display()), problem))
}

/// Writes `files` into `dir`. Returns those that this kernel does not have.
pub(super) fn write_present(dir: &Path, files: &[(String, String)]) -> Result<Vec<String>> {
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
            // A group's directory takes no new files.
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

/// `memory.high`, but neither a path nor a file of the group itself (`cgroup.procs`).
fn is_limit(file: &str) -> bool {
    let controller = file.split_once('.').map(|(controller, _)| controller);
    controller.is_some_and(|c| !c.is_empty() && c != "cgroup") && !file.contains('/')
}

/// SIGKILL to every process in `dir` and below, also to those that fork
/// meanwhile. `false`: the kernel cannot (before Linux 5.14).
pub(super) fn kill(dir: &Path) -> Result<bool> {
    match write(&dir.join("cgroup.kill"), "1") {
        Ok(()) => Ok(true),
        Err(_) if !dir.join("cgroup.kill").exists() => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
