//! The pod's PID namespace, which a process holds from the first container on that shares it.

use linux::cgroup::Cgroup;
use linux::process::{self, Child};
use oci_spec::runtime::{LinuxNamespaceType, Spec};

use super::error::{Result, ShimError};
use super::protocol::{Answer, HoldPids};
use super::{AFTER_KILL, Shim, note, remove_cgroup};
use crate::error::chain;
use crate::launcher;
use crate::spec::pid_namespace_of;

#[derive(Debug)]
pub(super) struct Holder {
    child: Child,
    cgroup: Cgroup,
}

impl Shim {
    pub(super) fn hold_pids(&mut self, asked: &HoldPids) -> Result<Answer> {
        if let Some(holder) = &self.holder {
            return Ok(Answer::Holds { pid: holder.child.pid });
        }
        let (child, cgroup) = launcher::hold_pids(&asked.cgroup, asked.network.as_deref(), &self.dir)?;
        let pid = child.pid;
        self.holder = Some(Holder { child, cgroup });
        Ok(Answer::Holds { pid })
    }

    /// Whether `pid`, a child that has ended, was the holder. Then every container that shared its
    /// namespace has ended and was reaped before, and the pod ends with this process.
    pub(super) fn holder_ended(&mut self, pid: i32) -> bool {
        let Some(holder) = self.holder.take_if(|holder| holder.child.pid == pid) else { return false };
        remove_cgroup(Some(&holder.cgroup));
        note("the process that held the pod's PID namespace has ended, and the pod with it");
        self.ended = true;
        true
    }

    /// Before this process ends.
    pub(super) fn end_holder(&mut self) {
        let Some(holder) = self.holder.take() else { return };
        let killed = process::signal_pidfd(&holder.child.pidfd, libc::SIGKILL)
            .and_then(|_| process::wait_for_end(&holder.child.pidfd, AFTER_KILL));
        if let Err(error) = killed {
            note(&chain(&error));
        }
        remove_cgroup(Some(&holder.cgroup));
    }

    /// A PID namespace that the specification names is that of a process which this one has not reaped
    /// yet: no other process can have its number.
    pub(super) fn check_pid_namespace(&self, spec: &Spec) -> Result<()> {
        let namespaces = spec.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
        let shared = namespaces.into_iter().flatten().filter(|n| n.typ() == LinuxNamespaceType::Pid);
        let Some(path) = shared.filter_map(|namespace| namespace.path().as_ref()).next() else {
            return Ok(());
        };
        let of_containers = self.containers.values().filter(|container| container.pidfd.is_some());
        let mut pids = of_containers
            .map(|container| container.status.pid)
            .chain(self.holder.iter().map(|h| h.child.pid));
        let known = pids.any(|pid| *path == pid_namespace_of(pid));
        if known { Ok(()) } else { Err(ShimError::NoPidNamespace) }
    }
}
