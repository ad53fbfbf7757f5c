//! The node's processes, found by what the kernel knows of them.
//!
//! Invariant: a process is the node's if it runs a program of the node's directory, if it is the shim of a
//! pod in that directory, or if it is in a control group of the node's pods. Each is ended by a
//! descriptor of its own, after a second look: its number may have become another process's before.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::tests::eventually;
use anyhow::{Context, Result, ensure};
use linux::cgroup::{Cgroup, Hierarchies, remove_dirs};
use linux::mount::FuseConnections;
use linux::{mountinfo, process};
use nix::sys::signal::Signal;

use super::place::Place;

/// `argv[0]` of a pod's shim, whose program has no path; `argv[1]` is the directory of the pod.
const SHIM: &[u8] = b"hawser-shim";
/// For processes that a full disk or a stalled one holds up.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// The processes that run `program` of the node's directory.
pub(super) fn of_program(place: &Place, program: &str) -> Result<Vec<i32>> {
    let found = running()?.into_iter().filter(|(_, process)| process.executable == place.program(program));
    Ok(found.map(|(pid, _)| pid).collect())
}

/// The directory of another node that runs in this network namespace.
pub(super) fn other_node(place: &Place) -> Result<Option<PathBuf>> {
    let network = |process: &str| fs::metadata(format!("/proc/{process}/ns/net")).map(|found| found.ino());
    let here = network("self").context("/proc/self/ns/net")?;
    let is_here = |pid: &i32| network(&pid.to_string()).is_ok_and(|there| there == here);
    let mut others = running()?.into_iter().filter_map(|(pid, process)| {
        let is_kubelet = process.executable.ends_with("bin/hawser-kubelet");
        let dir = process.executable.ancestors().nth(2).filter(|_| is_kubelet)?;
        let is_node = dir != place.dir() && Place::is_recorded(dir);
        (is_node && is_here(&pid)).then(|| dir.to_owned())
    });
    Ok(others.next())
}

/// Makes the control group of the node's pods. An error if there is one already: what is in it is not the
/// node's.
pub(super) fn claim_group(cgroup: &Path) -> Result<()> {
    let hierarchies = Hierarchies::detect().context("find the control group hierarchies")?;
    let taken = || format!("this machine has a control group {} already", cgroup.display());
    let name = cgroup.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    ensure!(!hierarchies.names_below(Path::new("/"))?.contains(&name), taken());
    let missing = hierarchies.missing_parents(cgroup);
    let made = hierarchies.ensure_parent_of_containers(cgroup)?;
    // Another `up` may be at work at the same time.
    let is_alone = made.len() == missing.len();
    if !is_alone {
        let _still_in_use = remove_dirs(&made);
    }
    ensure!(is_alone, taken());
    Ok(())
}

/// Removes the group of an `up` that was interrupted, if nothing is in it.
pub(super) fn remove_empty_group(cgroup: &Path) -> Result<()> {
    let hierarchies = Hierarchies::detect().context("find the control group hierarchies")?;
    if Cgroup::find(&hierarchies, cgroup).pids()?.is_empty() && hierarchies.names_below(cgroup)?.is_empty() {
        Cgroup::find(&hierarchies, cgroup).end(END_TIMEOUT)?;
    }
    Ok(())
}

/// By the numbers that they have now.
fn of_node(place: &Place, hierarchies: &Hierarchies, cgroup: &Path) -> Result<BTreeSet<i32>> {
    let mut found: BTreeSet<i32> = Cgroup::find(hierarchies, cgroup).pids()?.into_iter().collect();
    let is_ours = |process: &Process| {
        process.executable.starts_with(place.programs()) || process.is_shim_in(place.dir())
    };
    found.extend(running()?.into_iter().filter(|(_, process)| is_ours(process)).map(|(pid, _)| pid));
    Ok(found)
}

/// Kills every process of the node, and removes the control groups of its pods.
pub(super) fn end_all(place: &Place, cgroup: &Path) -> Result<()> {
    let hierarchies = Hierarchies::detect().context("find the control group hierarchies")?;
    // One that a killed `up` is just starting appears between two looks.
    let mut quiet = 0;
    eventually("the node's processes end", END_TIMEOUT, || {
        let left = of_node(place, &hierarchies, cgroup)?;
        let mut opened = Vec::new();
        for pid in &left {
            opened.extend(process::open_pidfd(*pid)?.map(|pidfd| (*pid, pidfd)));
        }
        // A descriptor is of one process: if its number is still the node's, so was the process.
        let still = if opened.is_empty() { BTreeSet::new() } else { of_node(place, &hierarchies, cgroup)? };
        for (pid, pidfd) in opened.iter().filter(|(pid, _)| still.contains(pid)) {
            let killed = process::signal_pidfd(pidfd, Signal::SIGKILL as i32);
            killed.with_context(|| format!("kill process {pid}"))?;
        }
        quiet = if left.is_empty() { quiet + 1 } else { 0 };
        if !left.is_empty() {
            abort_connections(place)?;
        }
        ensure!(quiet >= 2, "processes {left:?} are still there");
        Ok(())
    })?;
    Ok(Cgroup::find(&hierarchies, cgroup).end(END_TIMEOUT)?)
}

/// What the kernel shows of a process.
struct Process {
    /// The path of its program, also if another file has taken the program's place.
    executable: PathBuf,
    words: Vec<u8>,
}

impl Process {
    /// `None`: a thread of the kernel, or a process that has ended.
    fn look_at(entry: &Path) -> Option<Self> {
        let executable = fs::read_link(entry.join("exe")).ok()?.display().to_string();
        let executable = executable.strip_suffix(" (deleted)").unwrap_or(&executable).into();
        Some(Self { executable, words: fs::read(entry.join("cmdline")).ok()? })
    }

    fn is_shim_in(&self, dir: &Path) -> bool {
        let mut words = self.words.split(|byte| *byte == 0);
        let (name, pod) = (words.next(), words.next().map(OsStr::from_bytes));
        name == Some(SHIM) && pod.is_some_and(|pod| Path::new(pod).starts_with(dir))
    }
}

/// Every process.
fn running() -> Result<Vec<(i32, Process)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let entry = entry.context("/proc")?;
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        found.extend(Process::look_at(&entry.path()).map(|process| (pid, process)));
    }
    Ok(found)
}

/// Ends the system calls that wait for a volume's daemon, also those of other programs.
fn abort_connections(place: &Place) -> Result<()> {
    let is_volume = |mount: &mountinfo::MountEntry| {
        mount.fs_type.starts_with("fuse") && mount.mount_point.starts_with(place.dir())
    };
    let volumes: Vec<_> = mountinfo::read()?.into_iter().filter(is_volume).collect();
    if volumes.is_empty() {
        return Ok(());
    }
    let connections = FuseConnections::open()?;
    for volume in volumes {
        if let Some(connection) = connections.connection(volume.minor)? {
            connection.abort()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_is_known_by_the_directory_of_its_pod() {
        let process = |words: &str| Process { executable: "/".into(), words: words.as_bytes().to_vec() };
        let is_shim = |words: &str| process(words).is_shim_in(Path::new("/var/lib/hawser-up"));
        assert!(is_shim("hawser-shim\0/var/lib/hawser-up/k/hawser/runtime/sandboxes/0a\0"));
        assert!(!is_shim("hawser-shim\0/var/lib/hawser-up2/k/hawser/runtime/sandboxes/0a\0"));
        assert!(!is_shim("hawser-shim\0"));
        assert!(!is_shim("cat\0/var/lib/hawser-up/k\0"));
    }
}
