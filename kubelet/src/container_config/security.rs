//! Converts security contexts to CRI, with kubelet's defaults (kubernetes,
//! pkg/kubelet/kuberuntime/security_context.go).

use proto::cri;
use proto::cri::security_profile::ProfileType;

use super::{Error, Instance, Node};
use crate::objects::{
    Capabilities, Pod, SeccompProfile, SeccompProfileType, SecurityContext, SupplementalGroupsPolicy,
};

/// The paths that procMount Default masks.
const MASKED_PATHS: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READONLY_PATHS: [&str; 6] =
    ["/proc/bus", "/proc/dynamic_debug", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

pub(super) fn of_sandbox(pod: &Pod, node: Node<'_>) -> Result<cri::LinuxSandboxSecurityContext, Error> {
    let context = &pod.spec.security_context;
    let privileged = pod
        .spec
        .all_containers()
        .any(|c| c.security_context.as_ref().is_some_and(|s| s.privileged == Some(true)));
    Ok(cri::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(pod)),
        run_as_user: context.run_as_user.map(number),
        run_as_group: context.run_as_group.map(number),
        supplemental_groups: supplemental_groups(pod),
        supplemental_groups_policy: supplemental_groups_policy(pod).into(),
        privileged,
        seccomp: Some(seccomp(context.seccomp_profile.as_ref(), node)?),
        ..cri::LinuxSandboxSecurityContext::default()
    })
}

pub(super) fn of_container(
    instance: &Instance<'_>,
    node: Node<'_>,
) -> Result<cri::LinuxContainerSecurityContext, Error> {
    let default = SecurityContext::default();
    let own = instance.container.security_context.as_ref().unwrap_or(&default);
    let of_pod = &instance.pod.spec.security_context;
    let run_as_user = own.run_as_user.or(of_pod.run_as_user);
    check_non_root(instance, own, run_as_user)?;
    let privileged = own.privileged == Some(true);
    let paths = |paths: &[&str]| match privileged {
        true => Vec::new(),
        false => paths.iter().map(|p| (*p).to_owned()).collect(),
    };
    let run_as_group = own.run_as_group.or(of_pod.run_as_group).map(number);
    let (run_as_user, run_as_username) = match run_as_user {
        Some(uid) => (Some(number(uid)), String::new()),
        // CRI allows a group only together with a user, so pass the image's user.
        None if run_as_group.is_some() => (instance.image.uid, instance.image.username.clone()),
        None => (None, String::new()),
    };
    let profile = own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref());
    Ok(cri::LinuxContainerSecurityContext {
        capabilities: own.capabilities.as_ref().map(capabilities),
        privileged,
        namespace_options: Some(namespaces(instance.pod)),
        run_as_user,
        run_as_username,
        run_as_group,
        readonly_rootfs: own.read_only_root_filesystem == Some(true),
        supplemental_groups: supplemental_groups(instance.pod),
        supplemental_groups_policy: supplemental_groups_policy(instance.pod).into(),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: paths(&MASKED_PATHS),
        readonly_paths: paths(&READONLY_PATHS),
        seccomp: Some(seccomp(profile, node)?),
        ..cri::LinuxContainerSecurityContext::default()
    })
}

fn check_non_root(
    instance: &Instance<'_>,
    own: &SecurityContext,
    run_as_user: Option<u32>,
) -> Result<(), Error> {
    let must = own.run_as_non_root.or(instance.pod.spec.security_context.run_as_non_root);
    if must != Some(true) {
        return Ok(());
    }
    let image_user = instance.image.uid.as_ref().map(|uid| uid.value);
    match (run_as_user, image_user, instance.image.username.as_str()) {
        (Some(0), _, _) => Err(Error::RunsAsRoot),
        (None, Some(0), _) | (None, None, "" | "root") => Err(Error::ImageRunsAsRoot),
        // The image maps the user name to a number.
        (None, None, name) => Err(Error::ImageUserUnknown { user: name.to_owned() }),
        _ => Ok(()),
    }
}

fn namespaces(pod: &Pod) -> cri::NamespaceOption {
    let of_node = |shared: bool| if shared { cri::NamespaceMode::Node } else { cri::NamespaceMode::Pod };
    let spec = &pod.spec;
    let pid = match (spec.host_pid, spec.share_process_namespace) {
        (true, _) => cri::NamespaceMode::Node,
        (false, true) => cri::NamespaceMode::Pod,
        (false, false) => cri::NamespaceMode::Container,
    };
    cri::NamespaceOption {
        network: of_node(spec.host_network).into(),
        pid: pid.into(),
        ipc: of_node(spec.host_ipc).into(),
        ..cri::NamespaceOption::default()
    }
}

fn supplemental_groups(pod: &Pod) -> Vec<i64> {
    let context = &pod.spec.security_context;
    context.fs_group.iter().chain(&context.supplemental_groups).map(|group| i64::from(*group)).collect()
}

fn supplemental_groups_policy(pod: &Pod) -> cri::SupplementalGroupsPolicy {
    match pod.spec.security_context.supplemental_groups_policy.unwrap_or_default() {
        SupplementalGroupsPolicy::Merge => cri::SupplementalGroupsPolicy::Merge,
        SupplementalGroupsPolicy::Strict => cri::SupplementalGroupsPolicy::Strict,
    }
}

fn capabilities(wanted: &Capabilities) -> cri::Capability {
    cri::Capability {
        add_capabilities: wanted.add.clone(),
        drop_capabilities: wanted.drop.clone(),
        add_ambient_capabilities: Vec::new(),
    }
}

/// Without a profile, kubelet's seccompDefault applies.
fn seccomp(profile: Option<&SeccompProfile>, node: Node<'_>) -> Result<cri::SecurityProfile, Error> {
    let kind = |profile_type: ProfileType, localhost_ref: String| cri::SecurityProfile {
        profile_type: profile_type.into(),
        localhost_ref,
    };
    Ok(match profile.map(|p| (p.profile_type, &p.localhost_profile)) {
        None if node.seccomp_default => kind(ProfileType::RuntimeDefault, String::new()),
        None | Some((SeccompProfileType::Unconfined, _)) => kind(ProfileType::Unconfined, String::new()),
        Some((SeccompProfileType::RuntimeDefault, _)) => kind(ProfileType::RuntimeDefault, String::new()),
        Some((SeccompProfileType::Localhost, None)) => return Err(Error::NoSeccompProfile),
        Some((SeccompProfileType::Localhost, Some(name))) => {
            kind(ProfileType::Localhost, super::text(&node.root_dir.join("seccomp").join(name)))
        }
    })
}

fn number(value: u32) -> cri::Int64Value {
    cri::Int64Value { value: i64::from(value) }
}
