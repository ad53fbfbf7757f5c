//! Translates the device rules of a specification into those of `linux`. Pure.

use linux::device_rules::{Access, DeviceKind, DeviceRule, Devices, Policy};
use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

use super::error::{LaunchError, Result};

/// `None`: the specification has no device rules.
pub(super) fn policy(rules: Option<&[LinuxDeviceCgroup]>) -> Result<Option<Policy>> {
    let rules = rules.map(|rules| rules.iter().map(rule).collect::<Result<Vec<_>>>()).transpose()?;
    Ok(rules.map(|rules| Policy::of(&rules)))
}

fn rule(rule: &LinuxDeviceCgroup) -> Result<DeviceRule> {
    let problem = |what, value| LaunchError::DeviceRule { what, value };
    // Absent, or -1 as runc writes it: all devices.
    let number = |name, value: Option<i64>| match value {
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

    fn parsed(text: &str) -> Result<DeviceRule> {
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
        assert_eq!(error.to_string(), "linux.resources.devices: access \"rx\" is not supported");
    }
}
