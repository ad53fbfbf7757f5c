//! Enforces a container's device rules, and handles machines that cannot.
//!
//! Invariant: no program of a container without device control has CAP_MKNOD, and the container's
//! status names the reason. With CAP_MKNOD it could make a node for a disk of the host.

use linux::cgroup::Cgroup;
use nix::errno::Errno;

use super::error::{LaunchError, Result};
use super::plan::Plan;
use crate::error::chain;

/// What to do if the rules cannot be enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithoutControl {
    Refuse,
    /// `--allow-without-device-control`
    StartWithoutMknod,
}

/// Restricts `cgroup` according to `plan`. If that is impossible, removes MKNOD from the plan and
/// returns the text for the container's status.
pub(super) fn establish(
    plan: &mut Plan,
    cgroup: &Cgroup,
    otherwise: WithoutControl,
) -> Result<Option<String>> {
    let Some(policy) = &plan.devices_policy else { return Ok(None) };
    let Err(error) = cgroup.restrict_devices(policy) else { return Ok(None) };
    let remedy = remedy(error.errno());
    match otherwise {
        WithoutControl::Refuse => Err(LaunchError::NoDeviceControl { cause: error, remedy }),
        WithoutControl::StartWithoutMknod => {
            without_mknod(plan);
            // Nor do nodes work that an image or a volume brings.
            plan.nodev = true;
            let cause = chain(&error);
            Ok(Some(format!(
                "runs without device control and without CAP_MKNOD (--allow-without-device-control): {cause}: {remedy}"
            )))
        }
    }
}

/// Removes MKNOD from the plan of a program of a container without device control.
pub(super) fn without_mknod(plan: &mut Plan) {
    plan.capabilities = plan.capabilities.without(crate::spec::capabilities::mknod());
}

/// What an administrator can do about a refused program.
fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::ENOSYS | Errno::EINVAL => "use a kernel with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF",
        Errno::EPERM | Errno::EACCES => {
            "give the runtime CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN, and let no cgroup above have a device \
             program that forbids others"
        }
        Errno::ENODEV => "mount cgroup2 on /sys/fs/cgroup",
        _ => "see the kernel's log",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_names_something_to_do() {
        assert!(remedy(Errno::ENOSYS).contains("CONFIG_BPF_SYSCALL"));
        assert!(remedy(Errno::EPERM).contains("CAP_BPF"));
        assert!(remedy(Errno::ENODEV).contains("mount cgroup2"));
    }
}
