//! The child between clone3(2) and execve(2): from the shim's copy to the
//! container's first process.
//!
//! Invariant: the order. The groups of cgroup v1 are joined before the namespaces change what is
//! visible (the child starts in its v2 group). Everything that has a path of the host is opened before
//! the child moves into a mount namespace of its own. Then every descriptor of the host is closed, and
//! privileges are dropped last.

use std::convert::Infallible;
use std::ffi::{CString, OsStr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use linux::cgroup::Cgroup;
use linux::credentials::CapabilitySet;
use linux::process::Capabilities;
use linux::rootfs;
use linux::{process, procfs};
use nix::errno::Errno;
use nix::sched::CloneFlags;

use super::Surroundings;
use super::error::{ExecProblem, LaunchError, Result};
use super::plan::Plan;
use super::root::{Root, Source};
use super::streams::{StandardStreams, Stdio, control_terminal, take_terminal};

/// Returns only if the program does not run, with the reason, which goes to `report`.
pub(super) fn run(
    plan: &Plan,
    with: &Surroundings<'_>,
    cgroup: &Cgroup,
    report: BorrowedFd<'_>,
) -> Result<Infallible> {
    process::set_undumpable()?;
    process::new_session()?;
    linux::credentials::join_new_session_keyring()?;
    cgroup.join_as_thread()?;
    if plan.own_cgroup_namespace {
        process::unshare(CloneFlags::CLONE_NEWCGROUP)?;
    }
    if let Some(wanted) = plan.oom_score_adj {
        set_oom_score_adj(wanted)?;
    }
    // It was started in the PID namespace: a process cannot change its own.
    for (path, kind) in plan.joined_namespaces.iter().filter(|(_, kind)| *kind != CloneFlags::CLONE_NEWPID) {
        let file = std::fs::File::open(path)
            .map_err(|source| LaunchError::Namespace { path: path.clone(), source })?;
        process::enter_namespace(file, *kind)?;
    }
    let null = build_root(plan, with)?;
    let take_stdio = || {
        match &with.streams {
            StandardStreams::Pipes(Stdio { stdin, stdout, stderr }) => {
                process::set_stdio(stdin.as_ref().unwrap_or(&null), stdout, stderr)?;
            }
            StandardStreams::Terminal(socket) => {
                take_terminal(plan.uid, socket)?;
                control_terminal()?;
            }
        }
        drop(null);
        Ok(())
    };
    settle(plan, take_stdio, &[report])?;
    give_up_privileges(plan)?;
    become_program(plan)
}

/// The steps within the container's root directory before privileges are given up.
pub(super) fn settle(
    plan: &Plan,
    take_stdio: impl FnOnce() -> Result<()>,
    kept: &[BorrowedFd<'_>],
) -> Result<()> {
    for limit in &plan.rlimits {
        process::set_rlimit(limit.resource, limit.soft, limit.hard)?;
    }
    take_stdio()?;
    change_directory(&plan.cwd)?;
    // Before a filter that may refuse it.
    Ok(process::close_all_but(kept)?)
}

/// The last steps, which need no privilege.
pub(super) fn become_program(plan: &Plan) -> Result<Infallible> {
    process::reset_signals()?;
    exec(&plan.args, &plan.env)
}

/// Returns a null device of the container's own.
fn build_root(plan: &Plan, with: &Surroundings<'_>) -> Result<OwnedFd> {
    let sources = plan.mounts.iter().map(|mount| Source::open(plan, mount)).collect::<Result<Vec<_>>>()?;
    let overlay = with.overlay.view().mount()?;
    for (name, value) in &plan.sysctls {
        procfs::write(&Path::new("sys").join(name), value).map_err(|e| LaunchError::Sysctl {
            name: name.clone(),
            value: value.clone(),
            cause: e.source,
        })?;
    }
    let mut root = Root::mount(plan, overlay, with.mounts)?;
    for path in &with.overlay.directories {
        root.ensure_directory(path).map_err(|problem| problem.making_volume(path))?;
    }
    for (mount, source) in plan.mounts.iter().zip(sources) {
        root.attach(mount, source)?;
    }
    root.ensure_directory(&plan.cwd)?;
    root.protect()?;
    root.enter()
}

/// By descriptor: a link of /proc in the image's path would lead to a directory
/// that this process still holds open (CVE-2024-21626).
fn change_directory(path: &Path) -> Result<()> {
    let problem = |cause| LaunchError::WorkingDirectory { path: path.to_owned(), cause };
    let root = rootfs::open_root(Path::new("/")).map_err(|e| problem(e.source))?;
    let found = rootfs::open_in_root(root, path).map_err(|e| problem(e.source))?;
    rustix::process::fchdir(found).map_err(|e| problem(e.into()))
}

/// Sets the value, which was clamped before. If the kernel still refuses, the inherited value
/// stays; the caller has reported that.
pub(super) fn set_oom_score_adj(wanted: i32) -> Result<()> {
    match procfs::write(Path::new("self/oom_score_adj"), &wanted.to_string()) {
        Err(e) if e.source.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        other => other.map_err(|e| LaunchError::OomScoreAdj { wanted, cause: e.source }),
    }
}

pub(super) fn give_up_privileges(plan: &Plan) -> Result<()> {
    process::limit_bounding_set(plan.capabilities.bounding)?;
    // A filter needs CAP_SYS_ADMIN or no_new_privs.
    if !plan.no_new_privileges {
        install_seccomp(plan)?;
    }
    process::become_user(plan.uid, plan.gid, &plan.groups)?;
    let capabilities = if plan.no_new_privileges && !plan.seccomp.is_empty() {
        with_memory_for_filters(plan.capabilities)?
    } else {
        plan.capabilities
    };
    process::set_capabilities(capabilities)?;
    // The change of user may have undone it (fs.suid_dumpable).
    process::set_undumpable()?;
    if plan.no_new_privileges {
        linux::credentials::set_no_new_privs()?;
        install_seccomp(plan)?;
    }
    Ok(())
}

/// Adds CAP_BPF if this process has it: other processes' filters may use up the kernel's memory for
/// unprivileged filters (net.core.bpf_jit_limit). execve(2) drops it, since it is in no set that
/// survives (capabilities(7), "Transformation of capabilities").
pub(super) fn with_memory_for_filters(wanted: Capabilities) -> Result<Capabilities> {
    let held = linux::credentials::capabilities()?.permitted;
    let bpf = (held & CapabilitySet::BPF).bits();
    Ok(Capabilities { permitted: wanted.permitted | bpf, effective: wanted.effective | bpf, ..wanted })
}

fn install_seccomp(plan: &Plan) -> Result<()> {
    Ok(plan.seccomp.iter().try_for_each(|program| process::install_seccomp(program))?)
}

fn exec(args: &[CString], env: &[CString]) -> Result<Infallible> {
    let name = args.first().ok_or(LaunchError::NoArguments)?;
    let name = OsStr::from_bytes(name.as_bytes());
    let failed = |problem| Err(LaunchError::Exec { name: name.to_owned(), problem });
    let mut found_but_denied = false;
    for candidate in candidates(name, env) {
        if !rootfs::is_plain_path(&candidate) {
            return failed(ExecProblem::OutOfContainer);
        }
        let error = process::exec(&candidate, args, env);
        match error.errno() {
            Errno::ENOENT | Errno::ENOTDIR if candidate.exists() => {
                return failed(ExecProblem::NoInterpreter);
            }
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => found_but_denied = true,
            _ => return failed(ExecProblem::Other(error.source)),
        }
    }
    failed(match (found_but_denied, name.as_bytes().contains(&b'/')) {
        (true, _) => ExecProblem::Denied,
        (false, true) => ExecProblem::NoFile,
        (false, false) => ExecProblem::NotInPath,
    })
}

fn candidates(name: &OsStr, env: &[CString]) -> Vec<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return vec![PathBuf::from(name)];
    }
    let path = env.iter().find_map(|pair| pair.as_bytes().strip_prefix(b"PATH=")).unwrap_or_default();
    std::env::split_paths(OsStr::from_bytes(path))
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .collect()
}
