//! The kernel settings that a specification may change: those of a namespace that the container
//! does not share with the node.
//!
//! Invariant: a name is a path below /proc/sys without `..`.

use oci_spec::runtime::{Linux, LinuxNamespaceType};

use super::error::{LaunchError, Result};

/// Settings of an ipc namespace (sysctl(8), ipc/ipc_sysctl.c).
const IPC: &[&str] = &[
    "kernel/auto_msgmni",
    "kernel/msg_next_id",
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "kernel/sem_next_id",
    "kernel/shm_next_id",
    "kernel/shm_rmid_forced",
    "kernel/shmall",
    "kernel/shmmax",
    "kernel/shmmni",
];
const UTS: &[&str] = &["kernel/domainname", "kernel/hostname"];

/// `net.ipv4.ip_forward` as `net/ipv4/ip_forward`, with its value.
pub(super) fn checked(linux: &Linux) -> Result<Vec<(String, String)>> {
    let has_own = |kind| linux.namespaces().iter().flatten().any(|n| n.typ() == kind);
    let settings = linux.sysctl().iter().flatten();
    settings.map(|(name, value)| Ok((checked_path(name, has_own)?, value.clone()))).collect()
}

/// The path of a setting in one of the namespaces that are not the node's (`has_own`).
pub(crate) fn checked_path(name: &str, has_own: impl Fn(LinuxNamespaceType) -> bool) -> Result<String> {
    let path = path_of(name);
    let kind = namespace_of(&path).ok_or_else(|| LaunchError::SysctlOfNode { name: name.to_owned() })?;
    if has_own(kind) {
        Ok(path)
    } else {
        Err(LaunchError::SysctlOfSharedNamespace { name: name.to_owned(), kind })
    }
}

/// Dots separate, unless a slash comes first: then dots are part of names (sysctl(8):
/// `net/ipv4/conf/eth0.5/arp_notify`).
fn path_of(name: &str) -> String {
    let first = name.find(['.', '/']).and_then(|at| name[at..].chars().next());
    if first == Some('/') {
        return name.to_owned();
    }
    name.chars()
        .map(|c| match c {
            '.' => '/',
            '/' => '.',
            other => other,
        })
        .collect()
}

fn namespace_of(path: &str) -> Option<LinuxNamespaceType> {
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return None;
    }
    if path.starts_with("net/") {
        Some(LinuxNamespaceType::Network)
    } else if path.starts_with("fs/mqueue/") || IPC.contains(&path) {
        Some(LinuxNamespaceType::Ipc)
    } else if UTS.contains(&path) {
        Some(LinuxNamespaceType::Uts)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, namespaces: &[&str]) -> Result<Vec<(String, String)>> {
        let namespaces: Vec<_> = namespaces.iter().map(|kind| serde_json::json!({"type": kind})).collect();
        let linux = serde_json::json!({"namespaces": namespaces, "sysctl": {name: "1"}});
        checked(&serde_json::from_value(linux).unwrap())
    }

    #[test]
    fn settings_of_the_containers_own_namespaces_are_paths_below_proc_sys() {
        for (name, namespace, path) in [
            ("net.ipv4.ip_forward", "network", "net/ipv4/ip_forward"),
            ("net/ipv4/conf/eth0.5/arp_notify", "network", "net/ipv4/conf/eth0.5/arp_notify"),
            ("net.ipv4.conf.eth0/5.arp_notify", "network", "net/ipv4/conf/eth0.5/arp_notify"),
            ("kernel.shm_rmid_forced", "ipc", "kernel/shm_rmid_forced"),
            ("fs.mqueue.msg_max", "ipc", "fs/mqueue/msg_max"),
        ] {
            assert_eq!(check(name, &[namespace]).unwrap(), [(path.to_owned(), "1".to_owned())]);
        }
    }

    #[test]
    fn settings_of_the_node_are_refused_by_name() {
        for name in [
            "kernel.core_pattern",
            "vm.swappiness",
            "net/../kernel/core_pattern",
            "net//x",
            "net/../../../etc/passwd",
            "/etc/passwd",
        ] {
            let problem = check(name, &["network", "ipc", "uts"]).unwrap_err();
            assert_eq!(
                problem.to_string(),
                format!("sysctl {name}: it is not a setting of a namespace but of the whole node")
            );
        }
        let problem = check("net.ipv4.ip_forward", &["ipc"]).unwrap_err();
        assert_eq!(
            problem.to_string(),
            "sysctl net.ipv4.ip_forward: the container shares the net namespace of the node"
        );
    }
}
