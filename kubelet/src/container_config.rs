//! Converts a pod to CRI: the sandbox's configuration and each container's.

pub(crate) mod dns;
pub(crate) mod environment;
pub(crate) mod etc_hosts;
pub(crate) mod expansion;
mod security;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use proto::{cri, signals};
use sha2::{Digest, Sha256};

use crate::clients::cri::{
    CONTAINER_NAME_LABEL, IMAGE_ANNOTATION, POD_NAME_LABEL, POD_NAMESPACE_LABEL, POD_UID_LABEL,
};
use crate::logs::{log_directory, log_path};
use crate::objects::{
    Container, ContainerPort, DnsPolicy, MountPropagation, ObjectMeta, Pod, PodDnsConfig, RecursiveReadOnly,
    TerminationMessagePolicy,
};
use crate::pod::cgroup::Hierarchies;
use crate::pod::fields::PodFacts;
use crate::pod::names::{self, PodNames};
use crate::pod::{huge_pages, resources};
use crate::store::Store;
use crate::volumes::{MountedVolumes, SubPath};
use environment::{Environment, Origins};

/// Names the kubelet that owns a sandbox, where several share a runtime.
pub(crate) const ROOT_DIR_ANNOTATION: &str = "hawser.dev/root-dir";

const ETC_HOSTS: &str = "/etc/hosts";
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Why a pod cannot be converted: CreateContainerConfigError.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Environment(#[from] environment::Error),
    #[error(transparent)]
    Hostname(#[from] names::TooLong),
    #[error("volumeMounts {volume}: the pod has no such volume")]
    NoVolume { volume: String },
    #[error("volumeMounts {volume}: mountPropagation Bidirectional is only for privileged containers")]
    Bidirectional { volume: String },
    #[error(
        "volumeMounts {volume}: recursiveReadOnly Enabled is not supported by the container runtime; use IfPossible"
    )]
    RecursiveReadOnly { volume: String },
    #[error("container has runAsNonRoot and image will run as root")]
    ImageRunsAsRoot,
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root: set runAsUser"
    )]
    ImageUserUnknown { user: String },
    #[error("container's runAsUser breaks non-root policy")]
    RunsAsRoot,
    #[error("securityContext.seccompProfile.localhostProfile is missing")]
    NoSeccompProfile,
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// The node's part of a pod's configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node<'a> {
    pub(crate) name: &'a str,
    pub(crate) root_dir: &'a Path,
    pub(crate) log_dir: &'a Path,
    pub(crate) cgroup_root: &'a str,
    pub(crate) hierarchies: &'a Hierarchies,
    /// Use RuntimeDefault instead of Unconfined for pods without a seccomp profile.
    pub(crate) seccomp_default: bool,
    /// The runtime can make mounts read-only with everything below them.
    pub(crate) recursive_read_only: bool,
}

/// One instance of a container.
#[derive(Debug)]
pub(crate) struct Instance<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) container: &'a Container,
    /// 0 for the first.
    pub(crate) restart_count: u32,
    pub(crate) image: &'a cri::Image,
    pub(crate) volumes: &'a MountedVolumes,
    /// Mounted parts of volumes, by the index of the volumeMount.
    pub(crate) sub_paths: &'a BTreeMap<usize, PathBuf>,
    pub(crate) facts: &'a PodFacts,
    /// Has the ConfigMaps and Secrets of its variables.
    pub(crate) store: &'a Store,
    /// The kubelet's own file, mounted into the container.
    pub(crate) etc_hosts: &'a Path,
    pub(crate) termination_log: &'a Path,
}

pub(crate) fn sandbox(pod: &Pod, attempt: u32, node: Node<'_>) -> Result<cri::PodSandboxConfig, Error> {
    let metadata = &pod.metadata;
    let mut annotations: HashMap<String, String> = metadata.annotations.clone().into_iter().collect();
    annotations.insert(ROOT_DIR_ANNOTATION.to_owned(), node.root_dir.to_string_lossy().into_owned());
    let mut labels: HashMap<String, String> = metadata.labels.clone().into_iter().collect();
    labels.extend(pod_labels(metadata));
    Ok(cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            namespace: metadata.namespace.clone(),
            attempt,
        }),
        hostname: hostname(pod, node.name)?,
        log_directory: text(&log_directory(node.log_dir, metadata)),
        dns_config: Some(dns_config(pod)?),
        port_mappings: port_mappings(pod),
        labels,
        annotations,
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: resources::cgroup_path(node.cgroup_root, pod),
            security_context: Some(security::of_sandbox(pod, node)?),
            sysctls: sysctls(pod),
            ..cri::LinuxPodSandboxConfig::default()
        }),
    })
}

pub(crate) fn container(instance: &Instance<'_>, node: Node<'_>) -> Result<cri::ContainerConfig, Error> {
    let Instance { pod, container, .. } = *instance;
    let environment = Environment::of(Origins {
        pod,
        container,
        facts: instance.facts,
        store: instance.store,
        root_dir: node.root_dir,
    })?;
    let expanded = |field: &str, texts: &[String]| -> Result<Vec<String>, environment::Error> {
        let texts = texts.iter().enumerate();
        texts.map(|(number, text)| environment.expand(&format!("{field}[{number}]"), text)).collect()
    };
    let command = expanded("command", &container.command)?;
    let args = expanded("args", &container.args)?;
    let mut labels: HashMap<String, String> = pod_labels(&pod.metadata).into();
    labels.insert(CONTAINER_NAME_LABEL.to_owned(), container.name.clone());
    Ok(cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata {
            name: container.name.clone(),
            attempt: instance.restart_count,
        }),
        image: Some(cri::ImageSpec {
            image: instance.image.id.clone(),
            user_specified_image: container.image.clone(),
            ..cri::ImageSpec::default()
        }),
        command,
        args,
        working_dir: container.working_dir.clone(),
        envs: environment
            .into_variables()
            .into_iter()
            .map(|(key, value)| cri::KeyValue { key, value: value.into_bytes() })
            .collect(),
        mounts: mounts(instance, node)?,
        labels,
        annotations: annotations(instance),
        log_path: log_path(&container.name, instance.restart_count),
        stdin: container.stdin,
        stdin_once: container.stdin_once,
        tty: container.tty,
        stop_signal: stop_signal(container).into(),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(linux_resources(pod, container, node)),
            security_context: Some(security::of_container(instance, node)?),
        }),
        ..cri::ContainerConfig::default()
    })
}

fn linux_resources(pod: &Pod, container: &Container, node: Node<'_>) -> cri::LinuxContainerResources {
    let pod_group = resources::cgroup_path(node.cgroup_root, pod);
    let limits = resources::of_container(pod, container, resources::node_memory_bytes());
    cri::LinuxContainerResources {
        memory_swap_limit_in_bytes: node
            .hierarchies
            .memory_and_swap(&pod_group, limits.memory_limit_in_bytes),
        hugepage_limits: huge_pages::limits(&container.resources.limits, huge_pages::pools()),
        unified: node.hierarchies.container_files(&pod_group),
        ..limits
    }
}

/// Its name was checked with the manifest.
fn stop_signal(container: &Container) -> cri::Signal {
    signals::parse(container.stop_signal()).unwrap_or_default()
}

/// As kubelet: empty for a pod on the host's network, which has the host's name. A runtime that keeps the host's uts
/// namespace for it, such as containerd, cannot set another.
fn hostname(pod: &Pod, node_name: &str) -> Result<String, Error> {
    if pod.spec.host_network {
        return Ok(String::new());
    }
    Ok(PodNames::of(pod, node_name).of_kernel(pod)?)
}

/// The parts of volumes that the container mounts, with variables replaced.
pub(crate) fn sub_paths(origins: Origins<'_>) -> Result<Vec<SubPath>, Error> {
    let mut environment = None;
    let mut parts = Vec::new();
    for (number, mount) in origins.container.volume_mounts.iter().enumerate() {
        let path = if mount.sub_path_expr.is_empty() {
            mount.sub_path.clone()
        } else {
            let environment: &Environment = match &mut environment {
                Some(known) => known,
                none => none.insert(Environment::of(origins)?),
            };
            environment.expand_all(&format!("volumeMounts[{number}].subPathExpr"), &mount.sub_path_expr)?
        };
        if !path.is_empty() || !mount.sub_path_expr.is_empty() {
            let (volume, container) = (mount.name.clone(), origins.container.name.clone());
            parts.push(SubPath { volume, container, number, path });
        }
    }
    Ok(parts)
}

/// All ports but those of init containers that end, as kubelet passes them: the runtime opens those with a host port. A pod on the host's
/// network opens its ports itself.
fn port_mappings(pod: &Pod) -> Vec<cri::PortMapping> {
    if pod.spec.host_network {
        return Vec::new();
    }
    let ports = pod.spec.lasting_containers().flat_map(|container| &container.ports);
    let mapping = |port: &ContainerPort| cri::PortMapping {
        protocol: match port.protocol.as_str() {
            "UDP" => cri::Protocol::Udp,
            "SCTP" => cri::Protocol::Sctp,
            _ => cri::Protocol::Tcp,
        }
        .into(),
        container_port: port.container_port.into(),
        host_port: port.host_port.into(),
        host_ip: port.host_ip.clone(),
    };
    ports.map(mapping).collect()
}

fn sysctls(pod: &Pod) -> HashMap<String, String> {
    let sysctls = &pod.spec.security_context.sysctls;
    sysctls.iter().map(|sysctl| (sysctl.name.replace('/', "."), sysctl.value.clone())).collect()
}

fn pod_labels(metadata: &ObjectMeta) -> [(String, String); 3] {
    [
        (POD_NAME_LABEL.to_owned(), metadata.name.clone()),
        (POD_NAMESPACE_LABEL.to_owned(), metadata.namespace.clone()),
        (POD_UID_LABEL.to_owned(), metadata.uid.clone()),
    ]
}

/// kubelet's own annotations; a restarted kubelet identifies the container by them.
fn annotations(instance: &Instance<'_>) -> HashMap<String, String> {
    let Instance { pod, container, .. } = instance;
    let policy = match container.termination_message_policy {
        TerminationMessagePolicy::File => "File",
        TerminationMessagePolicy::FallbackToLogsOnError => "FallbackToLogsOnError",
    };
    let spec = serde_json::to_vec(container).expect("an object read from JSON is JSON");
    let hash = base16ct::lower::encode_string(&Sha256::digest(&spec))[..8].to_owned();
    let grace = pod.spec.termination_grace_period_seconds.to_string();
    [
        ("io.kubernetes.container.hash", hash),
        ("io.kubernetes.container.restartCount", instance.restart_count.to_string()),
        ("io.kubernetes.container.terminationMessagePath", container.termination_message_path.clone()),
        ("io.kubernetes.container.terminationMessagePolicy", policy.to_owned()),
        ("io.kubernetes.pod.terminationGracePeriod", grace),
        (IMAGE_ANNOTATION, container.image.clone()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

fn mounts(instance: &Instance<'_>, node: Node<'_>) -> Result<Vec<cri::Mount>, Error> {
    let Instance { container, .. } = instance;
    let mut mounts = Vec::new();
    for (number, wanted) in container.volume_mounts.iter().enumerate() {
        let volume = instance
            .volumes
            .get(&wanted.name)
            .ok_or_else(|| Error::NoVolume { volume: wanted.name.clone() })?;
        let propagation = wanted.mount_propagation.unwrap_or(MountPropagation::None);
        let privileged = container.security_context.as_ref().is_some_and(|s| s.privileged == Some(true));
        if propagation == MountPropagation::Bidirectional && !privileged {
            return Err(Error::Bidirectional { volume: wanted.name.clone() });
        }
        let recursive_read_only = match wanted.recursive_read_only.unwrap_or(RecursiveReadOnly::Disabled) {
            RecursiveReadOnly::Disabled => false,
            RecursiveReadOnly::IfPossible => node.recursive_read_only,
            RecursiveReadOnly::Enabled if node.recursive_read_only => true,
            RecursiveReadOnly::Enabled => {
                return Err(Error::RecursiveReadOnly { volume: wanted.name.clone() });
            }
        };
        mounts.push(cri::Mount {
            container_path: absolute(&wanted.mount_path),
            host_path: text(instance.sub_paths.get(&number).unwrap_or(&volume.host_path)),
            readonly: wanted.read_only || volume.read_only,
            recursive_read_only,
            propagation: match propagation {
                MountPropagation::None => cri::MountPropagation::PropagationPrivate,
                MountPropagation::HostToContainer => cri::MountPropagation::PropagationHostToContainer,
                MountPropagation::Bidirectional => cri::MountPropagation::PropagationBidirectional,
            }
            .into(),
            ..cri::Mount::default()
        });
    }
    let taken =
        |path: &str| container.volume_mounts.iter().any(|m| absolute(&m.mount_path) == absolute(path));
    let own = [
        (ETC_HOSTS, instance.etc_hosts),
        (container.termination_message_path.as_str(), instance.termination_log),
    ];
    for (container_path, host_path) in own.into_iter().filter(|(path, _)| !path.is_empty() && !taken(path)) {
        mounts.push(cri::Mount {
            container_path: absolute(container_path),
            host_path: text(host_path),
            ..cri::Mount::default()
        });
    }
    Ok(mounts)
}

/// kubelet: MakeAbsolutePath.
fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn dns_config(pod: &Pod) -> Result<cri::DnsConfig, Error> {
    let base = match pod.spec.dns_policy {
        DnsPolicy::None => cri::DnsConfig::default(),
        DnsPolicy::ClusterFirst | DnsPolicy::ClusterFirstWithHostNet | DnsPolicy::Default => {
            let path = Path::new(RESOLV_CONF);
            dns::of_node(path).map_err(|source| Error::Read { path: path.to_owned(), source })?
        }
    };
    Ok(match &pod.spec.dns_config {
        Some(more) => dns::merged(base, own_dns(more)),
        None => base,
    })
}

fn own_dns(config: &PodDnsConfig) -> cri::DnsConfig {
    let option = |o: &crate::objects::PodDnsOption| match &o.value {
        Some(value) => format!("{}:{value}", o.name),
        None => o.name.clone(),
    };
    cri::DnsConfig {
        servers: config.nameservers.clone(),
        searches: config.searches.clone(),
        options: config.options.iter().map(option).collect(),
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
