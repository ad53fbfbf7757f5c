//! Unpacks a layer in a separate process, which contains the effects of a hostile image: memory,
//! time, decoder faults.
//!
//! Invariant: the blob's digest is checked before anything of it is unpacked (for a registry's blob, by the
//! download), and again while it is unpacked.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use linux::cgroup::{Cgroup, Hierarchies, Limits};
use sha2::{Digest, Sha256};

use super::error::{ImageError, Result};
use super::job::Job;
use super::limits::Used;
use super::unpack;
use crate::error::chain;
use crate::reexec::{UNPACKER_NAME, own_program};

/// The unpacker's memory: a decoder's window, one header, and pages that wait for the disk.
const MEMORY_BYTES: u64 = 512 << 20;
/// A gigabyte takes about ten seconds; only an attack takes this long.
const CPU_SECONDS: u64 = 1800;
const DESCRIPTORS: u64 = 64;
const CGROUP_PREFIX: &str = "hawser-unpack-";
/// Limit for a killed process to leave its control group.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);
/// On tmpfs, written files count as the unpacker's memory.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Runs `job` in a child, in its own control group below `parent`. Returns what it used.
///
/// If the group cannot be made (no cgroups, or read-only ones), only the resource limits restrict
/// the child: its address space.
pub(crate) fn run_in_child(job: &Job, parent: &Path) -> Result<Used> {
    let hierarchies = Hierarchies::known()?;
    let limits = Limits {
        memory_bytes: (!is_in_memory(&job.target)).then_some(MEMORY_BYTES.cast_signed()),
        pids: Some(4),
        ..Limits::default()
    };
    let path = cgroup_of(parent, &job.digest);
    let cgroup = match hierarchies.create(&path, &limits) {
        Ok((cgroup, unmet)) => {
            for limit in unmet {
                tracing::warn!(limit, "a layer is unpacked without a limit of its control group");
            }
            Some(cgroup)
        }
        Err(error) => {
            tracing::warn!(error = %chain(&error), "a layer is unpacked without a control group");
            None
        }
    };
    let result = spawn_and_wait(job, cgroup.as_ref().map(|cgroup| (path.as_path(), cgroup)));
    if let Some(Err(error)) = cgroup.map(|cgroup| cgroup.end(REMOVAL_TIMEOUT)) {
        // The next start removes it.
        tracing::warn!(error = %chain(&error), "the control group of an unpacker stays");
    }
    result
}

/// Each layer that this process unpacks has its own group.
fn cgroup_of(parent: &Path, digest: &str) -> PathBuf {
    let hex = digest.trim_start_matches("sha256:");
    let process = std::process::id();
    parent.join(format!("{CGROUP_PREFIX}{process}-{}", hex.get(..16).unwrap_or(hex)))
}

/// Removes the groups below `parent` whose runtimes were killed while they unpacked.
pub(crate) fn remove_abandoned_cgroups(parent: &Path) {
    let Ok(hierarchies) = Hierarchies::known() else { return };
    let names = hierarchies.names_below(parent).unwrap_or_else(|error| {
        tracing::warn!(error = %chain(&error), "the control groups of ended unpackers stay");
        BTreeSet::default()
    });
    for name in names {
        let owner = name.strip_prefix(CGROUP_PREFIX).and_then(|rest| rest.split('-').next());
        let owner = owner.and_then(|pid| pid.parse().ok());
        // This process has made none yet: an earlier process had the same pid.
        let is_abandoned = owner.is_some_and(|pid| pid == std::process::id().cast_signed() || has_ended(pid));
        if is_abandoned
            && let Err(error) = Cgroup::find(&hierarchies, &parent.join(&name)).end(REMOVAL_TIMEOUT)
        {
            tracing::warn!(error = %chain(&error), "the control group of an ended unpacker stays");
        }
    }
}

/// Whether process `pid` is gone or a zombie. False if that is unknown.
fn has_ended(pid: i32) -> bool {
    match linux::process::open_pidfd(pid) {
        Ok(Some(process)) => linux::process::wait_for_end(process, Duration::ZERO).unwrap_or(false),
        Ok(None) => true,
        Err(_) => false,
    }
}

fn spawn_and_wait(job: &Job, cgroup: Option<(&Path, &Cgroup)>) -> Result<Used> {
    let text = serde_json::to_string(job).map_err(message("write the unpacker's job"))?;
    let program = own_program()?;
    let output = Command::new(program)
        .arg0(UNPACKER_NAME)
        .arg(text)
        .arg(std::process::id().to_string())
        .args(cgroup.map(|(path, _)| path))
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .map_err(ImageError::io("start the unpacker"))?;
    if output.status.success() {
        return serde_json::from_slice(&output.stdout).map_err(message("the unpacker's answer"));
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(match output.status.signal() {
        _ if cgroup.is_some_and(|(_, cgroup)| cgroup.oom_kills() > 0) => {
            ImageError::Memory { bytes: MEMORY_BYTES }
        }
        Some(signal) => ImageError::Killed { signal, said },
        None => ImageError::Unpacker { said },
    })
}

fn message(op: &'static str) -> impl Fn(serde_json::Error) -> ImageError {
    move |source| ImageError::Message { op, source }
}

fn is_in_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|kind| kind.f_type == TMPFS_MAGIC)
}

/// The child: does the job and prints what it used.
pub(crate) fn run(job: &str, parent: &str, cgroup: Option<&Path>) -> Result<String> {
    let job: Job = serde_json::from_str(job).map_err(message("read the job"))?;
    confine(&job, parent, cgroup)?;
    let used = unpack_verified(&job)?;
    serde_json::to_string(&used).map_err(message("write the answer"))
}

fn confine(job: &Job, parent: &str, cgroup: Option<&Path>) -> Result<()> {
    let kill = Some(rustix::process::Signal::KILL);
    rustix::process::set_parent_process_death_signal(kill).map_err(ImageError::io("follow the parent"))?;
    let is_there = rustix::process::getppid().is_some_and(|pid| pid.as_raw_nonzero().to_string() == parent);
    if !is_there {
        return Err(ImageError::NoParent);
    }
    if let Some(cgroup) = cgroup {
        let hierarchies = Hierarchies::known()?;
        Cgroup::find(&hierarchies, cgroup).join()?;
    }
    for (resource, most) in [
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_NOFILE, DESCRIPTORS),
        (libc::RLIMIT_CPU, CPU_SECONDS),
        (libc::RLIMIT_FSIZE, job.limits.unpacked_bytes),
        (libc::RLIMIT_AS, 2 * MEMORY_BYTES),
    ] {
        linux::process::set_rlimit(resource, most, most)?;
    }
    Ok(linux::credentials::set_no_new_privs()?)
}

fn unpack_verified(job: &Job) -> Result<Used> {
    let mut file = job.blob.open()?;
    let digest = &job.digest;
    let failed = |e: io::Error| ImageError::reading(format!("blob {digest}"))(e);
    let start = |file: &mut File| file.seek(SeekFrom::Start(job.blob.offset)).map_err(failed);
    start(&mut file)?;
    if job.is_checked {
        return unpack::unpack(file.take(job.blob.size), job);
    }
    let mut hash = Sha256::new();
    let mut blob = (&mut file).take(job.blob.size);
    let mut buffer = vec![0; 128 << 10];
    loop {
        let length = blob.read(&mut buffer).map_err(failed)?;
        if length == 0 {
            break;
        }
        hash.update(&buffer[..length]);
    }
    let found = format!("sha256:{}", base16ct::lower::encode_string(&hash.finalize()));
    if found != *digest {
        return Err(ImageError::OtherDigest { wanted: digest.clone(), found });
    }
    start(&mut file)?;
    unpack::unpack(file.take(job.blob.size), job)
}
