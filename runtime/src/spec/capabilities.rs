//! Capabilities by name, and the set that a container gets.

use crate::error::{Error, Result};

/// By number (linux/capability.h).
const NAMES: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// The default set of Kubernetes containers (containerd's default).
const DEFAULT: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The bit of `CAP_X`, `X` or `x`; `None` if Linux has no such capability.
pub(crate) fn bit(name: &str) -> Option<u64> {
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    NAMES.iter().position(|n| *n == short).map(|number| 1 << number)
}

/// The capability to make device nodes.
pub(crate) fn mknod() -> u64 {
    bit("MKNOD").expect("it is in the list above")
}

/// `CAP_X` for each bit, in order of number.
pub(crate) fn names(set: u64) -> Vec<String> {
    let known = NAMES.iter().enumerate();
    known.filter(|(number, _)| set & (1 << number) != 0).map(|(_, name)| format!("CAP_{name}")).collect()
}

/// The default set plus `add` minus `drop`. `ALL` means all capabilities, and `drop: ALL` is
/// applied first, so that `add` names the whole set.
pub(crate) fn resolve(add: &[String], drop: &[String], privileged: bool) -> Result<u64> {
    let all = (1_u64 << NAMES.len()) - 1;
    if privileged {
        return Ok(all);
    }
    let set = |list: &[String], field: &str| {
        list.iter().try_fold(0, |set, name| {
            if name.eq_ignore_ascii_case("ALL") || name.eq_ignore_ascii_case("CAP_ALL") {
                return Ok(all);
            }
            bit(name)
                .map(|bit| set | bit)
                .ok_or_else(|| Error::invalid(field, format!("unknown capability {name:?}")))
        })
    };
    let add = set(add, "linux.security_context.capabilities.add_capabilities")?;
    let drop = set(drop, "linux.security_context.capabilities.drop_capabilities")?;
    let default = DEFAULT.iter().filter_map(|name| bit(name)).fold(0, |set, bit| set | bit);
    // With ALL in one list, the names in the other list are the exceptions.
    Ok(match (add == all, drop == all) {
        (_, true) if add != all => add,
        (true, _) => all & !if drop == all { 0 } else { drop },
        _ => (default | add) & !drop,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    #[test]
    fn the_default_is_kubernetes_default_to_the_bit() {
        assert_eq!(resolve(&[], &[], false).unwrap(), 0xa804_25fb);
    }

    #[test]
    fn dropping_all_leaves_what_is_added() {
        let set = resolve(&list(&["CHOWN", "cap_setuid"]), &list(&["ALL"]), false).unwrap();
        assert_eq!(names(set), ["CAP_CHOWN", "CAP_SETUID"]);
    }

    #[test]
    fn adding_all_leaves_out_what_is_dropped() {
        let set = resolve(&list(&["ALL"]), &list(&["SYS_ADMIN"]), false).unwrap();
        assert_eq!(set, ((1 << 41) - 1) & !(1 << 21));
    }

    #[test]
    fn an_unknown_name_is_named_with_its_field() {
        let err = resolve(&list(&["FLY"]), &[], false).unwrap_err();
        assert_eq!(
            err.to_string(),
            "linux.security_context.capabilities.add_capabilities: unknown capability \"FLY\""
        );
    }
}
