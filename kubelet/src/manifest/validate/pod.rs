//! Rules for pods.

use std::collections::BTreeSet;

use super::super::path::FieldPath;
use super::{
    Findings, MAX_IMAGE_BYTES, MAX_PATH_BYTES, all_containers, lifecycle, names, network, sources, storage,
};
use crate::objects::{
    Container, DEFAULT_NAMESPACE, DnsPolicy, MountPropagation, ObjectMeta, Pod, PodSpec, Quantity,
    SeccompProfile, SeccompProfileType, Volume, VolumeMount, VolumeSource,
};
use crate::pod::huge_pages;

/// A kubelet's usual 110 pods cannot take all mounts of the node then (fs.mount-max: 100,000).
const MOST_VOLUMES: usize = 500;

/// NAME_MAX of the directory of a pod's logs, `<namespace>_<name>_<uid>`, without the 32 digits of the uid of a
/// pod from a file. `apply` allows fewer bytes: there the uid has hyphens too.
const MOST_NAME_BYTES: usize = 255 - "__".len() - 32;

pub(super) fn check(pod: &Pod, findings: &mut Findings) {
    check_log_directory(pod, findings);
    let at = FieldPath::root().key("spec");
    let spec = &pod.spec;
    check_volumes(&at.key("volumes"), &spec.volumes, findings);
    check_own_claims(&at.key("volumes"), pod, findings);
    if spec.containers.is_empty() {
        findings.required(at.key("containers"));
    }
    let volumes: BTreeSet<&str> = spec.volumes.iter().map(|volume| volume.name.as_str()).collect();
    let mut names = BTreeSet::new();
    for (at, container) in all_containers(&at, spec) {
        if !names.insert(container.name.as_str()) {
            findings.duplicate(at.key("name"), &container.name);
        }
        check_container(&at, container, &volumes, findings);
    }
    network::check(&at, spec, findings);
    lifecycle::check_pod(&at, pod, findings);
    check_dns(&at, spec, findings);
    check_os(&at, spec, findings);
    check_seccomp(&at, spec.security_context.seccomp_profile.as_ref(), findings);
}

/// In Kubernetes such a pod is accepted, and its kubelet cannot start it.
fn check_log_directory(pod: &Pod, findings: &mut Findings) {
    let ObjectMeta { namespace, name, .. } = &pod.metadata;
    let namespace = if namespace.is_empty() { DEFAULT_NAMESPACE } else { namespace };
    let bytes = namespace.len() + name.len();
    if bytes > MOST_NAME_BYTES {
        let message = format!(
            "Too long: may not be more than {MOST_NAME_BYTES} bytes together with the namespace, has {bytes}: \
             both are in the name of the directory of the pod's logs"
        );
        findings.add(FieldPath::root().key("metadata").key("name"), message);
    }
}

fn check_volumes(at: &FieldPath, volumes: &[Volume], findings: &mut Findings) {
    if volumes.len() > MOST_VOLUMES {
        let message = format!("Too many: {}: must have at most {MOST_VOLUMES} items", volumes.len());
        return findings.add(at.clone(), message);
    }
    let mut names = BTreeSet::new();
    for (index, volume) in volumes.iter().enumerate() {
        let at = at.index(index);
        findings.name(at.key("name"), &volume.name, names::label);
        if !names.insert(volume.name.as_str()) {
            findings.duplicate(at.key("name"), &volume.name);
        }
        check_volume_source(&at, volume, findings);
    }
}

/// The names of the claims that are made for the pod.
fn check_own_claims(at: &FieldPath, pod: &Pod, findings: &mut Findings) {
    for (index, volume) in pod.spec.volumes.iter().enumerate() {
        let Some(VolumeSource::Ephemeral(_)) = volume.source() else { continue };
        let name = volume.claim_name(&pod.metadata.name).unwrap_or_default();
        findings.name(at.index(index).key("name"), &name, names::subdomain);
    }
}

fn check_volume_source(at: &FieldPath, volume: &Volume, findings: &mut Findings) {
    match volume.source() {
        Some(VolumeSource::EmptyDir(dir)) => {
            if !["", "Memory"].contains(&dir.medium.as_str()) {
                let message =
                    format!("Unsupported value: {:?}: supported values: \"\", \"Memory\"", dir.medium);
                findings.add(at.below("emptyDir.medium"), message);
            }
            if let Some(limit) = dir.size_limit.as_ref().filter(|limit| limit.is_negative()) {
                let field = at.below("emptyDir.sizeLimit");
                findings.invalid(field, &limit.to_string(), "must be greater than or equal to 0");
            }
        }
        Some(VolumeSource::HostPath(host)) => {
            let field = at.below("hostPath.path");
            findings.length(field.clone(), host.path.len(), MAX_PATH_BYTES);
            if host.path.is_empty() {
                findings.required(field);
            } else if host.path.split('/').any(|part| part == "..") {
                findings.invalid(field, &host.path, "must not contain '..'");
            } else if !host.path.starts_with('/') {
                findings.invalid(field, &host.path, "must be an absolute path");
            }
        }
        Some(VolumeSource::Claim(claim)) => {
            findings.name(at.below("persistentVolumeClaim.claimName"), &claim.claim_name, names::subdomain);
        }
        Some(
            VolumeSource::ConfigMap(_)
            | VolumeSource::Secret(_)
            | VolumeSource::Downward(_)
            | VolumeSource::Projected(_),
        ) => sources::check_volume(at, volume, findings),
        Some(VolumeSource::Ephemeral(source)) => {
            let at = at.below("ephemeral.volumeClaimTemplate");
            super::labels(&at.key("metadata"), &source.volume_claim_template.metadata, findings);
            check_template(&at.key("metadata"), &source.volume_claim_template.metadata, findings);
            storage::check_claim_spec(&at.key("spec"), &source.volume_claim_template.spec, findings);
        }
        None if volume.sources().next().is_none() => {
            findings.add(at.clone(), "Required value: must specify a volume type");
        }
        None => findings.add(at.clone(), "Forbidden: may not specify more than 1 volume type"),
    }
}

/// A claim that is made for a pod has its name and its owner from the pod.
fn check_template(at: &FieldPath, meta: &ObjectMeta, findings: &mut Findings) {
    for (name, is_set) in [
        ("name", !meta.name.is_empty()),
        ("namespace", !meta.namespace.is_empty()),
        ("uid", !meta.uid.is_empty()),
        ("generation", meta.generation != 0),
        ("creationTimestamp", meta.creation_timestamp.is_some()),
        ("deletionTimestamp", meta.deletion_timestamp.is_some()),
        ("deletionGracePeriodSeconds", meta.deletion_grace_period_seconds.is_some()),
        ("ownerReferences", !meta.owner_references.is_empty()),
    ] {
        if is_set {
            findings.add(at.key(name), "Forbidden: cannot be set");
        }
    }
}

fn check_os(at: &FieldPath, spec: &PodSpec, findings: &mut Findings) {
    if let Some(os) = spec.os.as_ref().filter(|os| os.name != "linux") {
        let message = format!("Unsupported value: {:?}: supported values: \"linux\"", os.name);
        findings.add(at.below("os.name"), message);
    }
}

fn check_container(at: &FieldPath, container: &Container, volumes: &BTreeSet<&str>, findings: &mut Findings) {
    findings.name(at.key("name"), &container.name, names::label);
    if container.image.is_empty() {
        findings.required(at.key("image"));
    } else if container.image.trim() != container.image {
        findings.invalid(at.key("image"), &container.image, "must not have leading or trailing whitespace");
    }
    findings.length(at.key("image"), container.image.len(), MAX_IMAGE_BYTES);
    findings.length(
        at.key("terminationMessagePath"),
        container.termination_message_path.len(),
        MAX_PATH_BYTES,
    );
    sources::check_env(&at.key("env"), &container.env, findings);
    sources::check_env_from(&at.key("envFrom"), &container.env_from, findings);
    check_ports(&at.key("ports"), container, findings);
    check_resources(&at.key("resources"), container, findings);
    check_resize_policy(&at.key("resizePolicy"), container, findings);
    check_mounts(&at.key("volumeMounts"), container, volumes, findings);
    check_security(at, container, findings);
}

fn check_ports(at: &FieldPath, container: &Container, findings: &mut Findings) {
    for (index, port) in container.ports.iter().enumerate() {
        let at = at.index(index);
        if port.container_port == 0 {
            findings.invalid(at.key("containerPort"), "0", "must be between 1 and 65535, inclusive");
        }
        if !["TCP", "UDP", "SCTP"].contains(&port.protocol.as_str()) {
            let message = format!(
                "Unsupported value: {:?}: supported values: \"SCTP\", \"TCP\", \"UDP\"",
                port.protocol
            );
            findings.add(at.key("protocol"), message);
        }
    }
}

fn check_resources(at: &FieldPath, container: &Container, findings: &mut Findings) {
    let resources = &container.resources;
    findings.amounts(&at.key("limits"), &resources.limits);
    findings.amounts(&at.key("requests"), &resources.requests);
    for (name, request) in &resources.requests {
        let comparison = match resources.limits.get(name) {
            Some(limit) if request != limit && !may_be_overcommitted(name) => {
                format!("must be equal to {name} limit of {limit}")
            }
            Some(limit) if request > limit => {
                format!("must be less than or equal to {name} limit of {limit}")
            }
            None if !may_be_overcommitted(name) => {
                let message = "Required value: Limit must be set for non overcommitable resources";
                findings.add(at.key("limits"), message);
                continue;
            }
            Some(_) | None => continue,
        };
        findings.invalid(at.key("requests").key(name), &request.to_string(), &comparison);
    }
    check_resource_names(at, container, findings);
}

/// Kubernetes' own resources but huge pages.
fn may_be_overcommitted(resource: &str) -> bool {
    !resource.contains('/') && !resource.starts_with(huge_pages::PREFIX)
}

fn check_resource_names(at: &FieldPath, container: &Container, findings: &mut Findings) {
    let resources = &container.resources;
    let (mut has_huge_pages, mut has_others) = (false, false);
    for (field, amounts) in [("limits", &resources.limits), ("requests", &resources.requests)] {
        for (name, amount) in amounts {
            let at = at.key(field).key(name);
            if let Err(broken) = names::qualified(name) {
                findings.invalid(at, name, &broken);
            } else if let Some(page_size) = name.strip_prefix(huge_pages::PREFIX) {
                has_huge_pages = true;
                let page_size = page_size.parse::<Quantity>().ok().and_then(|size| size.exact_value());
                let is_multiple =
                    page_size.is_some_and(|size| size > 0 && amount.value().is_multiple_of(size));
                if !is_multiple {
                    let rule = format!("{amount} is not positive integer multiple of {name}");
                    findings.invalid(at, &amount.to_string(), &rule);
                }
            } else if ["cpu", "memory"].contains(&name.as_str()) {
                has_others = true;
            } else if !name.contains('/') && name != "ephemeral-storage" {
                findings.invalid(at, name, "must be a standard resource for containers");
            }
        }
    }
    if has_huge_pages && !has_others {
        findings.add(at.clone(), "Forbidden: HugePages require cpu or memory");
    }
}

fn check_resize_policy(at: &FieldPath, container: &Container, findings: &mut Findings) {
    let mut names = BTreeSet::new();
    for (index, policy) in container.resize_policy.iter().enumerate() {
        let at = at.index(index);
        if !["cpu", "memory"].contains(&policy.resource_name.as_str()) {
            let message = format!(
                "Unsupported value: {:?}: supported values: \"cpu\", \"memory\"",
                policy.resource_name
            );
            findings.add(at.key("resourceName"), message);
        } else if !names.insert(policy.resource_name.as_str()) {
            findings.duplicate(at.key("resourceName"), &policy.resource_name);
        }
        if !["NotRequired", "RestartContainer"].contains(&policy.restart_policy.as_str()) {
            let message = format!(
                "Unsupported value: {:?}: supported values: \"NotRequired\", \"RestartContainer\"",
                policy.restart_policy
            );
            findings.add(at.key("restartPolicy"), message);
        }
    }
}

fn check_mounts(at: &FieldPath, container: &Container, volumes: &BTreeSet<&str>, findings: &mut Findings) {
    let mut paths = BTreeSet::new();
    for (index, mount) in container.volume_mounts.iter().enumerate() {
        let at = at.index(index);
        if mount.name.is_empty() {
            findings.required(at.key("name"));
        } else if !volumes.contains(mount.name.as_str()) {
            findings.add(at.key("name"), format!("Not found: {:?}", mount.name));
        }
        let field = at.key("mountPath");
        if mount.mount_path.is_empty() {
            findings.required(field);
        } else if mount.mount_path.contains(':') {
            findings.invalid(field, &mount.mount_path, "must not contain ':'");
        } else if !paths.insert(mount.mount_path.as_str()) {
            findings.invalid(field, &mount.mount_path, "must be unique");
        }
        findings.length(at.key("mountPath"), mount.mount_path.len(), MAX_PATH_BYTES);
        check_sub_path(&at, mount, findings);
        check_propagation(&at, mount, container, findings);
    }
}

fn check_sub_path(at: &FieldPath, mount: &VolumeMount, findings: &mut Findings) {
    for (name, path) in [("subPath", &mount.sub_path), ("subPathExpr", &mount.sub_path_expr)] {
        findings.length(at.key(name), path.len(), MAX_PATH_BYTES);
        if path.starts_with('/') {
            findings.invalid(at.key(name), path, "must be a relative path");
        } else if path.split('/').any(|part| part == "..") {
            findings.invalid(at.key(name), path, "must not contain '..'");
        } else if path.contains('\0') {
            findings.invalid(at.key(name), path, "must not contain a NUL byte");
        }
    }
    if !mount.sub_path.is_empty() && !mount.sub_path_expr.is_empty() {
        let rule = "subPathExpr and subPath are mutually exclusive";
        findings.invalid(at.key("subPathExpr"), &mount.sub_path_expr, rule);
    }
}

fn check_propagation(at: &FieldPath, mount: &VolumeMount, container: &Container, findings: &mut Findings) {
    if mount.mount_propagation == Some(MountPropagation::Bidirectional) && !is_privileged(container) {
        findings.add(
            at.key("mountPropagation"),
            "Forbidden: Bidirectional mount propagation is available only to privileged containers",
        );
    }
    if !mount.is_recursive_read_only() {
        return;
    }
    let at = at.key("recursiveReadOnly");
    if !mount.read_only {
        findings.add(at.clone(), "Forbidden: may only be specified when readOnly is true");
    }
    if !matches!(mount.mount_propagation, None | Some(MountPropagation::None)) {
        findings.add(at, "Forbidden: may only be specified when mountPropagation is None or not specified");
    }
}

fn is_privileged(container: &Container) -> bool {
    container.security_context.as_ref().is_some_and(|context| context.privileged == Some(true))
}

fn check_security(at: &FieldPath, container: &Container, findings: &mut Findings) {
    let Some(context) = &container.security_context else { return };
    if is_privileged(container) && context.allow_privilege_escalation == Some(false) {
        let rule = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
        findings.invalid(at.key("securityContext"), "", rule);
    }
    check_seccomp(at, context.seccomp_profile.as_ref(), findings);
}

fn check_seccomp(at: &FieldPath, profile: Option<&SeccompProfile>, findings: &mut Findings) {
    let Some(profile) = profile else { return };
    let field = at.below("securityContext.seccompProfile.localhostProfile");
    let is_local = profile.profile_type == SeccompProfileType::Localhost;
    match profile.localhost_profile.as_deref() {
        None | Some("") if is_local => {
            findings.add(field, "Required value: must be set when seccomp type is Localhost");
        }
        Some(path) if !is_local => {
            findings.invalid(field, path, "can only be set when seccomp type is Localhost");
        }
        Some(path) if path.starts_with('/') || path.split('/').any(|part| part == "..") => {
            findings.invalid(field, path, "must be a relative path without '..'");
        }
        Some(_) | None => {}
    }
}

fn check_dns(at: &FieldPath, spec: &PodSpec, findings: &mut Findings) {
    let config = spec.dns_config.as_ref();
    let nameservers = config.map_or(&[][..], |config| &config.nameservers);
    let at = at.below("dnsConfig.nameservers");
    if spec.dns_policy == DnsPolicy::None && nameservers.is_empty() {
        findings.add(
            at.clone(),
            "Required value: must provide at least one DNS nameserver when `dnsPolicy` is None",
        );
    }
    if nameservers.len() > 3 {
        findings.add(at.clone(), format!("Too many: {}: must have at most 3 items", nameservers.len()));
    }
    for (index, server) in nameservers.iter().enumerate() {
        if server.parse::<std::net::IpAddr>().is_err() {
            findings.invalid(
                at.index(index),
                server,
                "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
            );
        }
    }
}
