//! Device control of a container: its rules put in force, and what happens where
//! the machine cannot do that.
//!
//! Invariant: a container without device control never has CAP_MKNOD, and its
//! status names the reason. Without both, any node that it makes is a disk of the host.

use linux::cgroup::Cgroup;
use linux::device_rules::{Access, DeviceKind, DeviceRule, Devices, Policy};
use nix::errno::Errno;
use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

use super::plan::Plan;
use crate::error::chain;

/// What to do where rules cannot be put in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithoutControl {
    Refuse,
    /// `--allow-without-device-control`
    StartWithoutMknod,
}

/// Restricts `cgroup` as `plan` says. `Some`: it could not, the plan has no MKNOD
/// any more, and this is what the container's status must say.
pub(super) fn establish(
    plan: &mut Plan,
    cgroup: &Cgroup,
    otherwise: WithoutControl,
) -> Result<Option<String>, String> {
    let Some(policy) = &plan.devices_policy else { return Ok(None) };
    let Err(error) = cgroup.restrict_devices(policy) else { return Ok(None) };
    let (cause, remedy) = (chain(&error), remedy(error.errno()));
    match otherwise {
        WithoutControl::Refuse => Err(format!(
            "device control: {cause}: {remedy}, or start the runtime with --allow-without-device-control, \
             which gives containers no CAP_MKNOD instead"
        )),
        WithoutControl::StartWithoutMknod => {
            plan.capabilities = plan.capabilities.without(crate::spec::capabilities::mknod());
            Ok(Some(format!(
                "runs without device control and without CAP_MKNOD (--allow-without-device-control): {cause}: {remedy}"
            )))
        }
    }
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

/// `None`: the specification says nothing of devices.
pub(super) fn policy(rules: Option<&[LinuxDeviceCgroup]>) -> Result<Option<Policy>, String> {
    let rules = rules.map(|rules| rules.iter().map(rule).collect::<Result<Vec<_>, _>>()).transpose()?;
    Ok(rules.map(|rules| Policy::of(&rules)))
}

fn rule(rule: &LinuxDeviceCgroup) -> Result<DeviceRule, String> {
    let problem =
        |what: &str, value: String| format!("linux.resources.devices: {what} {value} is not supported");
    // Absent, or -1 as runc writes it: all.
    let number = |name: &str, value: Option<i64>| match value {
        None | Some(-1) => Ok(None),
        Some(n) => u32::try_from(n).map(Some).map_err(|_| problem(name, n.to_string())),
    };
    let kind = match rule.typ().unwrap_or(LinuxDeviceType::A) {
        LinuxDeviceType::A => None,
        LinuxDeviceType::B => Some(DeviceKind::Block),
        LinuxDeviceType::C | LinuxDeviceType::U => Some(DeviceKind::Character),
        LinuxDeviceType::P => return Err(problem("type", "p".to_owned())),
    };
    let devices = match kind {
        None => Devices::All,
        Some(kind) => Devices::Some {
            kind,
            major: number("major", rule.major())?,
            minor: number("minor", rule.minor())?,
        },
    };
    let access = rule.access().as_deref().unwrap_or("rwm");
    let access = Access::parse(access).ok_or_else(|| problem("access", format!("{access:?}")))?;
    Ok(DeviceRule { allow: rule.allow(), devices, access })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<DeviceRule, String> {
        rule(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn rules_are_read_as_runc_reads_them() {
        let deny_all = DeviceRule { allow: false, devices: Devices::All, access: Access::ALL };
        assert_eq!(parsed(r#"{"allow":false,"access":"rwm"}"#).unwrap(), deny_all);
        assert_eq!(
            parsed(r#"{"allow":false,"type":"a","major":-1,"minor":-1,"access":"rwm"}"#).unwrap(),
            deny_all
        );
        let kind = DeviceKind::Character;
        assert_eq!(
            parsed(r#"{"allow":true,"type":"c","major":136,"access":"rwm"}"#).unwrap().devices,
            Devices::Some { kind, major: Some(136), minor: None }
        );
        let error = parsed(r#"{"allow":true,"type":"c","access":"rx"}"#).unwrap_err();
        assert_eq!(error, "linux.resources.devices: access \"rx\" is not supported");
    }

    #[test]
    fn every_refusal_names_something_to_do() {
        assert!(remedy(Errno::ENOSYS).contains("CONFIG_BPF_SYSCALL"));
        assert!(remedy(Errno::EPERM).contains("CAP_BPF"));
        assert!(remedy(Errno::ENODEV).contains("mount cgroup2"));
    }
}
