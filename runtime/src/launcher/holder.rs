//! The process that holds a pod's PID namespace: process 1 there, which reaps orphans and runs no
//! program. When it is killed, the kernel kills every process of the namespace.
//!
//! Containers see it, and one with CAP_SYS_PTRACE may read and control it. So it has nothing: no
//! privilege, no file, an empty root directory, a group of its own, the pod's network, and no system
//! call that its task does not need.

use std::convert::Infallible;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use linux::cgroup::{Cgroup, Hierarchies, Limits};
use linux::mount::AccessTimes;
use linux::netns::NetNs;
use linux::pid_namespace;
use linux::process::{self, BpfInstruction, Capabilities, Child};
use linux::rootfs::{self, Attributes};
use nix::sched::CloneFlags;
use oci_spec::runtime::LinuxSeccomp;
use serde_json::json;

use super::child::with_memory_for_filters;
use super::error::{LaunchError, Result};
use super::{pipe, reported, seccomp};

/// Of an unprivileged user that no image has; the user of Kubernetes' pause image, too.
const USER: u32 = 65535;
/// What the child says once it holds the namespace.
const READY: &[u8] = b"\0";
const MAX_SAID_BYTES: u64 = 4096;
/// prctl and capset give up the privilege with which the filter was installed.
const SYSTEM_CALLS: &[&str] =
    &["capset", "close", "close_range", "exit", "exit_group", "prctl", "rt_sigtimedwait", "wait4", "write"];
const EMPTY: Attributes = Attributes {
    read_only: true,
    nosuid: true,
    nodev: true,
    noexec: true,
    access_times: AccessTimes::Kernels,
    nodiratime: false,
    propagation: None,
    recursive: false,
};

/// Starts it in the group `path`, with the network namespace `network` or the host's. `dir`: a
/// directory over which its root is mounted, where only it sees it.
pub(crate) fn hold_pids(path: &Path, network: Option<&Path>, dir: &Path) -> Result<(Child, Cgroup)> {
    let filter = filter()?;
    let limits = Limits { pids: Some(1), ..Limits::default() };
    let (cgroup, _unmet) = Hierarchies::detect()?.create_everywhere(path, &limits)?;
    start(&cgroup, network, dir, &filter).map(|child| (child, cgroup.clone())).inspect_err(|_| {
        // Without a process; the caller gets the reason.
        let _may_stay = cgroup.remove();
    })
}

fn filter() -> Result<Vec<Vec<BpfInstruction>>> {
    let profile = json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [{"names": SYSTEM_CALLS, "action": "SCMP_ACT_ALLOW"}],
    });
    let profile: LinuxSeccomp = serde_json::from_value(profile).expect("the profile is a constant");
    seccomp::compile(&profile)
}

fn start(
    cgroup: &Cgroup,
    network: Option<&Path>,
    dir: &Path,
    filter: &[Vec<BpfInstruction>],
) -> Result<Child> {
    let (outcome, report) = pipe()?;
    let group = cgroup.open_v2()?;
    let namespaces = CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS;
    let child = process::clone_child(namespaces, group.as_ref().map(AsFd::as_fd), || {
        let Err(problem) = hold(cgroup, network, dir, filter, &report);
        reported(&report, &problem)
    })?;
    drop(report);
    let mut said = Vec::new();
    outcome.take(MAX_SAID_BYTES).read_to_end(&mut said).map_err(LaunchError::io("read the outcome pipe"))?;
    if said == READY {
        return Ok(child);
    }
    process::signal_pidfd(&child.pidfd, libc::SIGKILL)?;
    Err(LaunchError::Holder { said: String::from_utf8_lossy(&said).into_owned() })
}

/// The child.
fn hold(
    cgroup: &Cgroup,
    network: Option<&Path>,
    dir: &Path,
    filter: &[Vec<BpfInstruction>],
    mut report: &File,
) -> Result<Infallible> {
    process::set_undumpable()?;
    process::new_session()?;
    linux::credentials::join_new_session_keyring()?;
    cgroup.join_as_thread()?;
    process::unshare(CloneFlags::CLONE_NEWCGROUP)?;
    if let Some(network) = network {
        NetNs::open(network)?.enter()?;
    }
    rootfs::make_all_slaves()?;
    let root = rootfs::new_fs("tmpfs", &["size=4k", "nr_inodes=2", "mode=555"].map(str::to_owned))?;
    rootfs::set_attributes(&root, EMPTY)?;
    rootfs::attach(root, rootfs::open_root(dir)?, dir)?;
    rootfs::pivot_into(rootfs::open_root(dir)?)?;
    let (at_its_end, _) = std::io::pipe().map_err(LaunchError::io("pipe"))?;
    process::set_stdio(&at_its_end, &at_its_end, &at_its_end)?;
    process::close_all_but(&[report.as_fd()])?;
    process::reset_signals()?;
    pid_namespace::block_signals()?;
    process::limit_bounding_set(0)?;
    process::become_user(USER, USER, &[])?;
    process::set_capabilities(with_memory_for_filters(Capabilities::default())?)?;
    process::set_undumpable()?;
    linux::credentials::set_no_new_privs()?;
    // After the change of user, which would undo it. If the shim has ended before, the report finds no
    // reader.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|e| LaunchError::Io { op: "follow the parent", source: e.into() })?;
    // The list of allowed calls, which seccomp(2) is not in, comes last.
    filter.iter().rev().try_for_each(|program| process::install_seccomp(program))?;
    process::set_capabilities(Capabilities::default())?;
    report.write_all(READY).map_err(LaunchError::io("report"))?;
    process::close_all_but(&[])?;
    Err(pid_namespace::reap_until_killed().into())
}
