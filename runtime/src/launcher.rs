//! The native launcher: from an OCI specification to a running process, in one clone3.
//!
//! All decisions are made before the clone ([`plan`]). The child ([`child`]) only acts, and reports
//! a failed step through a pipe that execve(2) closes.
//!
//! Invariant: runs in the single-threaded shim only.

mod beside;
mod cgroup_mount;
mod child;
pub(crate) mod device_control;
mod device_policy;
pub(crate) mod error;
mod holder;
mod plan;
mod root;
mod seccomp;
mod streams;
pub(crate) mod sysctl;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use linux::cgroup::{Cgroup, Hierarchies, Limits};
use linux::pid_namespace::with_children_in;
use linux::process::{self, Child};
use linux::rootfs::EmptyMounts;
use nix::errno::Errno;
use nix::sched::CloneFlags;
use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

use crate::error::chain;
use device_control::WithoutControl;
use error::{LaunchError, Result};
pub(crate) use holder::hold_pids;
use plan::Plan;
pub(crate) use streams::{StandardStreams, Stdio};

/// Cgroup v2 groups that an unprivileged container may make below its own: the kernel has 65,535
/// ids for memory groups on the whole machine.
const MOST_GROUPS_BELOW: u32 = 256;
/// Levels of such groups.
const DEEPEST_GROUP: u32 = 16;

/// How often a container may change its groups while one of them is being joined.
const MOST_MOVES: usize = 3;

/// Directories of a container's root file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Overlay {
    /// Topmost first.
    pub(crate) lower: Vec<PathBuf>,
    pub(crate) upper: PathBuf,
    pub(crate) work: PathBuf,
    /// Made if they are missing, before anything is mounted below the root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) directories: Vec<PathBuf>,
}

impl Overlay {
    pub(crate) fn view(&self) -> linux::rootfs::Overlay<'_> {
        linux::rootfs::Overlay { lower: &self.lower, upper: &self.upper, work: &self.work }
    }
}

/// The limits of a container with this specification.
pub(crate) fn limits_of(spec: &Spec) -> Limits {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    resources.map(plan::limits).unwrap_or_default()
}

/// A cloned child on its way to execve(2).
#[derive(Debug)]
pub(crate) struct Launched {
    pub(crate) child: Child,
    pub(crate) cgroup: Cgroup,
    /// Ends without data once the program runs; otherwise has the reason why it does not.
    pub(crate) outcome: OwnedFd,
    pub(crate) warnings: Vec<String>,
    /// Requirements of the specification that this machine does not enforce.
    pub(crate) not_enforced: Option<String>,
}

/// Settings of a container's start that are not in its specification.
#[derive(Debug)]
pub(crate) struct Surroundings<'a> {
    pub(crate) overlay: &'a Overlay,
    pub(crate) hierarchies: &'a Hierarchies,
    pub(crate) mounts: &'a EmptyMounts,
    pub(crate) streams: StandardStreams,
    pub(crate) without_device_control: WithoutControl,
}

/// Clones the container's first process.
pub(crate) fn launch(spec: &Spec, with: Surroundings<'_>) -> Result<Launched> {
    let mut plan = Plan::new(spec)?;
    let hierarchies = with.hierarchies;
    let (cgroup, warnings) = hierarchies.create_everywhere(&plan.cgroup_path, &plan.limits)?;
    let limited = if plan.own_cgroup_namespace {
        cgroup.limit_groups_below(MOST_GROUPS_BELOW, DEEPEST_GROUP).map_err(LaunchError::from)
    } else {
        Ok(())
    };
    // In the host's namespace, /proc/self/cgroup shows the host's groups anyway.
    plan.cgroup_view =
        if plan.own_cgroup_namespace { hierarchies.view_of(&cgroup) } else { hierarchies.view_of_all() };
    let launched = limited
        .and_then(|()| device_control::establish(&mut plan, &cgroup, with.without_device_control))
        .and_then(|not_enforced| {
            let (child, outcome) = clone(&plan, &with, &cgroup)?;
            Ok((child, outcome, not_enforced))
        });
    match launched {
        Ok((child, outcome, not_enforced)) => Ok(Launched { child, cgroup, outcome, warnings, not_enforced }),
        Err(problem) => {
            // The group is empty.
            let _first_failure_is_returned = cgroup.remove();
            Err(problem)
        }
    }
}

/// A further program of a container on its way to execve(2).
#[derive(Debug)]
pub(crate) struct LaunchedBeside {
    /// Ends before the program runs.
    pub(crate) first: Child,
    /// As [`Launched`] has it. Its end without data comes after the pid.
    pub(crate) outcome: OwnedFd,
    /// Has the pid of the program, which is a child of this process too, in native byte order.
    pub(crate) number: OwnedFd,
}

/// A running container.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running<'a> {
    pub(crate) cgroup: &'a Cgroup,
    /// Its first process, which is not reaped yet.
    pub(crate) pid: i32,
    pub(crate) pidfd: BorrowedFd<'a>,
    /// Whether it runs without device control.
    pub(crate) has_no_device_control: bool,
}

/// Starts a further program in a running container.
pub(crate) fn launch_beside(
    spec: &Spec,
    args: &[String],
    container: Running<'_>,
    streams: &StandardStreams,
) -> Result<LaunchedBeside> {
    let plan = Plan::new(spec)?.with_args(args)?;
    let mut plan = if matches!(streams, StandardStreams::Terminal(_)) { plan.with_terminal() } else { plan };
    let Running { cgroup, pid, pidfd, has_no_device_control } = container;
    if has_no_device_control {
        device_control::without_mknod(&mut plan);
    }
    let (outcome, report) = pipe()?;
    let (number, written) = pipe()?;
    let clone = |group: Option<&OwnedFd>| {
        process::clone_child(CloneFlags::empty(), group.map(AsFd::as_fd), || {
            match beside::run(&plan, cgroup, pidfd, streams, &report, &written) {
                Ok(()) => 0,
                Err(problem) => reported(&report, &problem),
            }
        })
    };
    let mut child = clone(cgroup.open_v2()?.as_ref());
    for _ in 0..MOST_MOVES {
        match &child {
            // The container has moved its processes into groups below its own.
            Err(e) if matches!(e.errno(), Errno::EBUSY | Errno::EOPNOTSUPP) => {
                child = clone(Some(&Hierarchies::known()?.open_group_of(cgroup, pid)?));
            }
            Ok(_) | Err(_) => break,
        }
    }
    let child = child?;
    Ok(LaunchedBeside { first: child, outcome: outcome.into(), number: number.into() })
}

fn clone(plan: &Plan, with: &Surroundings<'_>, cgroup: &Cgroup) -> Result<(Child, OwnedFd)> {
    let (outcome, report) = pipe()?;
    let group = cgroup.open_v2()?;
    let group = group.as_ref().map(AsFd::as_fd);
    let start = || {
        process::clone_child(plan.new_namespaces - CloneFlags::CLONE_NEWNS, group, || {
            let Err(problem) = child::run(plan, with, cgroup, report.as_fd());
            reported(&report, &problem)
        })
    };
    let child = match plan.pid_namespace()? {
        Some(namespace) => with_children_in(namespace, start)??,
        None => start()?,
    };
    Ok((child, outcome.into()))
}

fn pipe() -> Result<(File, File)> {
    let (read, write) = std::io::pipe().map_err(LaunchError::io("pipe"))?;
    Ok((OwnedFd::from(read).into(), OwnedFd::from(write).into()))
}

/// The exit code of a child that did not become its program.
fn reported(mut report: &File, problem: &LaunchError) -> i32 {
    // If even this fails, there is no other way to report.
    let _no_reader = report.write_all(chain(problem).as_bytes());
    127
}
