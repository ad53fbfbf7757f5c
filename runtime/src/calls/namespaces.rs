//! Which namespaces a pod and its containers get (CRI, `NamespaceOption`), and the kernel settings of
//! the pod's namespaces.
//!
//! A pod's PID namespace exists from its first container on that shares it: most pods need none.

use std::path::PathBuf;

use oci_spec::runtime::LinuxNamespaceType;
use proto::cri::{ContainerConfig, NamespaceMode, NamespaceOption, PodSandboxConfig};

use crate::error::{Error, Result};
use crate::launcher::sysctl;
use crate::runtime::Runtime;
use crate::runtime::state::{RunState, Sandbox, SandboxRecord};
use crate::shim::protocol::HoldPids;
use crate::spec::PidNamespace;
use crate::spec::pod::{cgroup_parent, sharing};

const OF_POD: &str = "config.linux.security_context.namespace_options";
const OF_CONTAINER: &str = "config.linux.security_context.namespace_options";

/// Refuses a pod's namespaces and settings that cannot be.
pub(crate) fn check(config: &PodSandboxConfig) -> Result<()> {
    let linux = config.linux.as_ref();
    let options = linux.and_then(|l| l.security_context.as_ref()).and_then(|c| c.namespace_options.as_ref());
    if let Some(options) = options {
        check_options(OF_POD, options)?;
        if options.pid() == NamespaceMode::Target {
            let problem = "TARGET is of a container, not of a pod";
            return Err(Error::invalid(format!("{OF_POD}.pid"), problem));
        }
    }
    let sharing = sharing(config);
    let has_own = |kind| match kind {
        LinuxNamespaceType::Ipc => !sharing.host_ipc,
        _ => !sharing.host_network,
    };
    for name in linux.iter().flat_map(|linux| linux.sysctls.keys()) {
        sysctl::checked_path(name, has_own)
            .map_err(|problem| Error::invalid("config.linux.sysctls", problem.to_string()))?;
    }
    Ok(())
}

/// Network and ipc are the pod's or the node's; a user namespace of its own is not supported.
fn check_options(field: &str, options: &NamespaceOption) -> Result<()> {
    for (name, mode) in [("network", options.network()), ("ipc", options.ipc())] {
        if !matches!(mode, NamespaceMode::Pod | NamespaceMode::Node) {
            let problem = format!("{} is neither POD nor NODE", mode.as_str_name());
            return Err(Error::invalid(format!("{field}.{name}"), problem));
        }
    }
    match options.userns_options.as_ref().map(proto::cri::UserNamespace::mode) {
        None | Some(NamespaceMode::Node) => Ok(()),
        Some(NamespaceMode::Pod) => Err(Error::Unsupported {
            field: "namespace_options.userns_options.mode",
            value: "POD".to_owned(),
        }),
        Some(mode @ (NamespaceMode::Container | NamespaceMode::Target)) => {
            let problem = format!("{} is neither POD nor NODE", mode.as_str_name());
            Err(Error::invalid(format!("{field}.userns_options.mode"), problem))
        }
    }
}

/// The PID namespace of a new container. Absent options mean one of its own. The sandbox must not
/// change meanwhile.
pub(crate) async fn pids(
    runtime: &Runtime,
    sandbox: &Sandbox,
    config: &ContainerConfig,
) -> Result<PidNamespace> {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let Some(options) = context.and_then(|context| context.namespace_options.as_ref()) else {
        return Ok(PidNamespace::Own);
    };
    check_options(OF_CONTAINER, options)?;
    match options.pid() {
        NamespaceMode::Container => Ok(PidNamespace::Own),
        NamespaceMode::Node => Ok(PidNamespace::Node),
        NamespaceMode::Target => {
            let target = target(runtime, sandbox, &options.target_id)?;
            sandbox.shim().ok_or(Error::Task { task: "shim" })?.check_joins_pids()?;
            Ok(PidNamespace::Of(target))
        }
        NamespaceMode::Pod => {
            let record = sandbox.record();
            if sharing(&record.config).host_pid {
                return Ok(PidNamespace::Node);
            }
            let shim = sandbox.shim().ok_or(Error::Task { task: "shim" })?;
            let asked = HoldPids { cgroup: holders_group(&record), network: record.netns };
            Ok(PidNamespace::Of(shim.hold_pids(asked).await?))
        }
    }
}

/// The group of the process that holds the pod's PID namespace.
pub(crate) fn holders_group(record: &SandboxRecord) -> PathBuf {
    cgroup_parent(&record.config).join(&record.id)
}

/// The first process of a running container of the same pod.
fn target(runtime: &Runtime, sandbox: &Sandbox, id: &str) -> Result<i32> {
    let field = || format!("{OF_CONTAINER}.target_id");
    if id.is_empty() {
        return Err(Error::invalid(field(), "empty, and pid is TARGET"));
    }
    let container = runtime.container(id)?;
    if container.record.sandbox_id != sandbox.id {
        return Err(Error::invalid(field(), format!("container {id:?} is in another pod")));
    }
    match container.state() {
        RunState::Running { pid, .. } => Ok(pid),
        state @ (RunState::Created | RunState::Exited(_)) => {
            let (id, state) = (container.id.clone(), state.cri().as_str_name().to_owned());
            Err(Error::WrongState { kind: "target container", id, state, wanted: "running" })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proto::cri::{LinuxPodSandboxConfig, LinuxSandboxSecurityContext, UserNamespace};

    use super::*;

    fn pod(options: NamespaceOption, sysctl: Option<&str>) -> PodSandboxConfig {
        let context = LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
        let sysctls: HashMap<_, _> =
            sysctl.map(|name| (name.to_owned(), "1".to_owned())).into_iter().collect();
        let linux = LinuxPodSandboxConfig { security_context: Some(context), sysctls, ..Default::default() };
        PodSandboxConfig { linux: Some(linux), ..Default::default() }
    }

    fn refusal(options: NamespaceOption, sysctl: Option<&str>) -> String {
        check(&pod(options, sysctl)).unwrap_err().to_string()
    }

    #[test]
    fn modes_that_a_pod_cannot_have_are_refused_by_name() {
        let mut options = NamespaceOption::default();
        options.set_network(NamespaceMode::Container);
        assert_eq!(
            refusal(options, None),
            "config.linux.security_context.namespace_options.network: CONTAINER is neither POD nor NODE"
        );
        let mut options = NamespaceOption::default();
        options.set_pid(NamespaceMode::Target);
        assert!(refusal(options, None).ends_with(".pid: TARGET is of a container, not of a pod"));
        let mut users = UserNamespace::default();
        users.set_mode(NamespaceMode::Target);
        let options = NamespaceOption { userns_options: Some(users), ..Default::default() };
        assert!(refusal(options, None).ends_with("userns_options.mode: TARGET is neither POD nor NODE"));
    }

    #[test]
    fn settings_are_refused_unless_the_pod_has_their_namespace() {
        let own = NamespaceOption::default;
        for name in ["kernel.shm_rmid_forced", "net.ipv4.ip_forward", "fs.mqueue.msg_max"] {
            check(&pod(own(), Some(name))).unwrap();
        }
        assert_eq!(
            refusal(own(), Some("vm.swappiness")),
            "config.linux.sysctls: sysctl vm.swappiness: it is not a setting of a namespace but of the whole node"
        );
        let mut shared = own();
        shared.set_ipc(NamespaceMode::Node);
        assert_eq!(
            refusal(shared, Some("kernel.shm_rmid_forced")),
            "config.linux.sysctls: sysctl kernel.shm_rmid_forced: the container shares the ipc namespace of the node"
        );
        let mut shared = own();
        shared.set_network(NamespaceMode::Node);
        assert!(
            refusal(shared, Some("net.ipv4.ip_forward")).contains("the container shares the net namespace")
        );
    }
}
