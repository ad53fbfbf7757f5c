//! A pod's settings from its CRI configuration. Pure, except for the host's name.

use std::path::PathBuf;

use proto::cri::{NamespaceMode, PodSandboxConfig};

/// Used if a request names no cgroup parent.
const DEFAULT_CGROUP_PARENT: &str = "/hawser-runtime";
pub(crate) const POD_INTERFACE: &str = "eth0";

/// Which namespaces of the host a pod shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) host_network: bool,
    pub(crate) host_ipc: bool,
    pub(crate) host_pid: bool,
}

pub(crate) fn sharing(config: &PodSandboxConfig) -> Sharing {
    let options = config
        .linux
        .as_ref()
        .and_then(|l| l.security_context.as_ref())
        .and_then(|c| c.namespace_options.as_ref());
    let node = |mode: Option<NamespaceMode>| mode == Some(NamespaceMode::Node);
    Sharing {
        host_network: node(options.map(|o| o.network())),
        host_ipc: node(options.map(|o| o.ipc())),
        host_pid: node(options.map(|o| o.pid())),
    }
}

pub(crate) fn cgroup_parent(config: &PodSandboxConfig) -> PathBuf {
    let parent = config.linux.as_ref().map(|l| l.cgroup_parent.as_str()).unwrap_or_default();
    PathBuf::from(if parent.is_empty() { DEFAULT_CGROUP_PARENT } else { parent })
}

pub(crate) fn hostname(config: &PodSandboxConfig) -> String {
    if !config.hostname.is_empty() {
        return config.hostname.clone();
    }
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|t| t.trim().to_owned()).unwrap_or_default()
}
