//! A node of its own for one run of critest: namespaces of every kind but users, and control groups of which only its
//! own part is visible.
//!
//! This program starts itself three times, one inside the other:
//!
//! - `join` makes the control groups, enters them and new namespaces;
//! - `init` is process 1 there: it mounts, reaps, and ends the node with its end;
//! - `work` starts the runtime, then critest.
//!
//! Invariant: what the run leaves goes with process 1, and the caller removes control groups and directory.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use ::tests::{mounts, netlink};
use anyhow::{Context, Result, bail, ensure};
use linux::cgroup::{Hierarchies, Limits};
use linux::mount::{MountFlags, UnmountMode};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use super::plan::Plan;
use super::work;
use ::tests::containerd::hide_run_and_var_lib;

/// The first argument of this program in a node.
pub(crate) const COMMAND: &str = "cri-node";

/// Runs `plan` in a node; what it prints goes to `node.log` in the plan's directory.
pub(super) fn run(plan: &Plan) -> Result<()> {
    let log_file = plan.dir.join("node.log");
    let log = fs::File::create(&log_file).with_context(|| log_file.display().to_string())?;
    let plan_file = plan.save()?;
    let mut command = stage("join", &plan_file)?;
    command.stdout(log.try_clone().context("duplicate the log's descriptor")?).stderr(log);
    let status = command.status().context("start the node");
    let removed = remove_groups(&plan.group());
    ensure!(
        status?.success(),
        "the node failed: {}",
        fs::read_to_string(&log_file).unwrap_or_default().trim_end()
    );
    removed
}

/// Of this program: one of the stages, and the file with the plan.
pub(crate) fn enter(mut arguments: impl Iterator<Item = OsString>) -> Result<()> {
    let (stage, plan) = (arguments.next().unwrap_or_default(), arguments.next().unwrap_or_default());
    let plan_file = PathBuf::from(plan);
    let plan = Plan::load(&plan_file)?;
    match stage.to_str() {
        Some("join") => join(&plan, &plan_file),
        Some("init") => init(&plan_file),
        Some("work") => work::run(&plan),
        _ => bail!("{COMMAND}: {stage:?} is no stage"),
    }
}

fn stage(name: &str, plan_file: &Path) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("this program")?);
    command.arg(COMMAND).arg(name).arg(plan_file);
    Ok(command)
}

fn join(plan: &Plan, plan_file: &Path) -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("PR_SET_PDEATHSIG")?;
    let (group, _unmet) = Hierarchies::detect()?.create_everywhere(&plan.group(), &Limits::default())?;
    group.join()?;
    let all = [
        CloneFlags::CLONE_NEWNS,
        CloneFlags::CLONE_NEWNET,
        CloneFlags::CLONE_NEWIPC,
        CloneFlags::CLONE_NEWUTS,
        CloneFlags::CLONE_NEWCGROUP,
        CloneFlags::CLONE_NEWPID,
    ];
    unshare(all.into_iter().collect()).context("new namespaces")?;
    let status = stage("init", plan_file)?.status().context("start process 1")?;
    ensure!(status.success(), "process 1: {status}");
    Ok(())
}

fn init(plan_file: &Path) -> Result<()> {
    // The node ends with the stage before this one, which ends with the command.
    set_pdeathsig(Signal::SIGKILL).context("PR_SET_PDEATHSIG")?;
    linux::mount::make_private(Path::new("/")).context("make / private")?;
    linux::mount::mount_fs("proc", "proc", Path::new("/proc"), MountFlags::default(), "")?;
    mount_groups()?;
    hide_run_and_var_lib()?;
    hide_apparmor()?;
    netlink::set_loopback_up()?;
    let worker = stage("work", plan_file)?.spawn().context("start the worker")?;
    let status = reap(&worker)?;
    ensure!(status == WaitStatus::Exited(pid_of(&worker), 0), "the run: {status:?}");
    Ok(())
}

/// Mounts each hierarchy of control groups again, whose root is now the node's group.
fn mount_groups() -> Result<()> {
    let is_groups = |fs_type: &str| matches!(fs_type, "cgroup" | "cgroup2");
    for mount in mounts()?.into_iter().filter(|mount| is_groups(&mount.fs_type)) {
        linux::mount::unmount(&mount.mount_point, UnmountMode::Detach)?;
        let which: Vec<&str> =
            mount.super_options.split(',').filter(|option| names_hierarchy(option)).collect();
        let data = if mount.fs_type == "cgroup" { which.join(",") } else { String::new() };
        linux::mount::mount_fs(&mount.fs_type, "cgroup", &mount.mount_point, MountFlags::default(), &data)?;
        if mount.fs_type == "cgroup2" {
            leave_root_group(&mount.mount_point)?;
        }
    }
    Ok(())
}

/// Whether a mount option of cgroup v1 names a controller or a hierarchy without one.
fn names_hierarchy(option: &str) -> bool {
    !matches!(option, "rw" | "ro" | "xattr" | "clone_children" | "seclabel")
        && !option.starts_with("release_agent=")
}

/// In cgroup v2, a group with processes enables no controllers for its children: the process leaves the root of
/// this hierarchy.
fn leave_root_group(hierarchy: &Path) -> Result<()> {
    let group = hierarchy.join("init");
    fs::create_dir(&group).with_context(|| group.display().to_string())?;
    let processes = group.join("cgroup.procs");
    fs::write(&processes, "0").with_context(|| processes.display().to_string())
}

/// The machine's kernel may have AppArmor. The node is one without it, as all nodes of this suite.
fn hide_apparmor() -> Result<()> {
    let enabled = Path::new("/sys/module/apparmor/parameters/enabled");
    if enabled.exists() {
        linux::mount::bind(Path::new("/dev/null"), enabled)?;
    }
    Ok(())
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

/// Waits for every child, also for those that lost their parents, until `worker` has ended.
fn reap(worker: &Child) -> Result<WaitStatus> {
    loop {
        let status = waitpid(None, None).context("wait for children")?;
        if status.pid() == Some(pid_of(worker)) {
            return Ok(status);
        }
    }
}

/// The node's control groups, once its processes are gone.
fn remove_groups(group: &Path) -> Result<()> {
    let own = group.strip_prefix("/").unwrap_or(group);
    for mount in mounts()?.into_iter().filter(|mount| mount.fs_type.starts_with("cgroup")) {
        let dir = mount.mount_point.join(own);
        if dir.is_dir() {
            remove_tree(&dir)?;
        }
    }
    Ok(())
}

/// rmdir of the groups below `dir`, then of `dir`.
fn remove_tree(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry.with_context(|| dir.display().to_string())?;
        if entry.file_type().with_context(|| dir.display().to_string())?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    ::tests::eventually("the control group is empty", std::time::Duration::from_secs(10), || {
        fs::remove_dir(dir).with_context(|| dir.display().to_string())
    })
}
