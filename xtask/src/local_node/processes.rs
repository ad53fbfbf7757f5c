//! The node's processes, found by what the kernel knows of them.
//!
//! Invariant: a process is the node's if it runs a program of the node's directory, if it is the shim of a
//! pod in that directory, or if it is in a control group of the node's pods. Each is ended by a
//! descriptor of its own, never by its name alone.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::tests::eventually;
use anyhow::{Context, Result, ensure};
use linux::cgroup::{Cgroup, Hierarchies};
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
    running(|process| process.executable == place.program(program))
}

/// Kills every process of the node, and removes the control groups of its pods.
pub(super) fn end_all(place: &Place, cgroup: &Path) -> Result<()> {
    let hierarchies = Hierarchies::detect().context("find the control group hierarchies")?;
    // One that a killed `up` is just starting appears between two looks.
    let mut quiet = 0;
    eventually("the node's processes end", END_TIMEOUT, || {
        let mut left = Cgroup::find(&hierarchies, cgroup).pids()?;
        left.extend(running(|process| {
            process.executable.starts_with(place.programs()) || process.is_shim_in(place.dir())
        })?);
        for pid in &left {
            kill(*pid)?;
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

fn kill(pid: i32) -> Result<()> {
    let Some(pidfd) = process::open_pidfd(pid)? else { return Ok(()) };
    process::signal_pidfd(&pidfd, Signal::SIGKILL as i32)
        .map(drop)
        .with_context(|| format!("kill process {pid}"))
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

fn running(is_wanted: impl Fn(&Process) -> bool) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let entry = entry.context("/proc")?;
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        if Process::look_at(&entry.path()).is_some_and(|process| is_wanted(&process)) {
            found.push(pid);
        }
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
