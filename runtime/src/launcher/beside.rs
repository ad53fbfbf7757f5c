//! A further process of a running container.
//!
//! Three processes take part: the shim; a child of it outside of the container's pid namespace, which enters
//! the container's other namespaces and gives up its privileges; and that child's sibling in the pid
//! namespace, which becomes the program. So a process of the container, which may trace others
//! (CAP_SYS_PTRACE), sees none with more privileges than the program has.

use std::convert::Infallible;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};

use linux::cgroup::Cgroup;
use linux::process;

use super::child::{become_program, give_up_privileges, set_oom_score_adj, settle};
use super::error::{LaunchError, Result};
use super::plan::Plan;
use super::reported;
use super::streams::{StandardStreams, Stdio, control_terminal, take_terminal};

/// The child outside of the pid namespace. Writes the program's pid to `number`; reasons why there is none,
/// its sibling's too, go to `report`.
pub(super) fn run(
    plan: &Plan,
    cgroup: &Cgroup,
    first: BorrowedFd<'_>,
    streams: &StandardStreams,
    report: &File,
    mut number: &File,
) -> Result<()> {
    process::set_undumpable()?;
    // A filter may forbid setsid(2) later. Then the program shares this child's process group, not the shim's.
    process::new_session()?;
    linux::credentials::join_new_session_keyring()?;
    cgroup.join_as_thread()?;
    if let Some(wanted) = plan.oom_score_adj {
        set_oom_score_adj(wanted)?;
    }
    // The root directory is the container's from here on; a new pid namespace is that of children.
    process::enter_namespace(first, plan.namespaces())?;
    let take_stdio = || match streams {
        StandardStreams::Pipes(stdio) => take_pipes(stdio),
        StandardStreams::Terminal(socket) => take_terminal(plan.uid, socket),
    };
    // A filter may forbid it later.
    let gate = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| LaunchError::Io { op: "pipe", source: e.into() })?;
    settle(plan, take_stdio, &[report.as_fd(), number.as_fd(), gate.0.as_fd(), gate.1.as_fd()])?;
    give_up_privileges(plan)?;
    // Without what its filter took: the sibling is seen in the container.
    process::set_capabilities(plan.capabilities)?;
    process::set_undumpable()?;
    let has_terminal = matches!(streams, StandardStreams::Terminal(_));
    let announce =
        |pid: i32| number.write_all(&pid.to_ne_bytes()).map_err(LaunchError::io("write the program's pid"));
    process::clone_sibling(gate, announce, || match last_steps(plan, has_terminal) {
        Err(problem) => reported(report, &problem),
        Ok(never) => match never {},
    })
}

fn take_pipes(Stdio { stdin, stdout, stderr }: &Stdio) -> Result<()> {
    match stdin {
        Some(stdin) => process::set_stdio(stdin, stdout, stderr)?,
        // At its end at once. The container may have changed its /dev/null.
        None => {
            let (empty, _) = std::io::pipe().map_err(LaunchError::io("pipe"))?;
            process::set_stdio(empty, stdout, stderr)?;
        }
    }
    Ok(())
}

/// In the pid namespace.
fn last_steps(plan: &Plan, has_terminal: bool) -> Result<Infallible> {
    process::new_session()?;
    if has_terminal {
        control_terminal()?;
    }
    become_program(plan)
}
