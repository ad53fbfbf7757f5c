//! Rules for a pod's names, ports, namespaces and kernel settings.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::super::path::FieldPath;
use super::{Findings, all_containers, names};
use crate::objects::PodSpec;

/// Settings of the pod's own namespaces that cannot harm other pods (kubernetes,
/// pkg/kubelet/sysctl/safe_sysctls.go).
const SAFE_SYSCTLS: &[&str] = &[
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];

pub(super) fn check(at: &FieldPath, spec: &PodSpec, findings: &mut Findings) {
    for (name, label) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
        if !label.is_empty() {
            findings.name(at.key(name), label, names::label);
        }
    }
    for (index, alias) in spec.host_aliases.iter().enumerate() {
        let at = at.key("hostAliases").index(index);
        check_address(at.key("ip"), &alias.ip, findings);
        for (index, name) in alias.hostnames.iter().enumerate() {
            findings.name(at.key("hostnames").index(index), name, names::subdomain);
        }
    }
    if spec.host_pid && spec.share_process_namespace {
        let rule = "ShareProcessNamespace and HostPID cannot both be enabled";
        findings.invalid(at.key("shareProcessNamespace"), "true", rule);
    }
    check_host_ports(at, spec, findings);
    check_sysctls(&at.key("securityContext").key("sysctls"), spec, findings);
}

fn check_host_ports(at: &FieldPath, spec: &PodSpec, findings: &mut Findings) {
    let mut taken = BTreeSet::new();
    for (number, (at, container)) in all_containers(at, spec).enumerate() {
        // An init container has ended before the next container starts.
        let ends = number < spec.init_containers.len() && !container.is_sidecar();
        let mut taken_until_its_end = BTreeSet::new();
        let taken = if ends { &mut taken_until_its_end } else { &mut taken };
        for (port_index, port) in container.ports.iter().enumerate() {
            let at = at.key("ports").index(port_index);
            if !port.host_ip.is_empty() {
                check_address(at.key("hostIP"), &port.host_ip, findings);
            }
            if port.host_port == 0 {
                continue;
            }
            if spec.host_network && port.host_port != port.container_port {
                let rule = "must match `containerPort` when `hostNetwork` is true";
                findings.invalid(at.key("hostPort"), &port.host_port.to_string(), rule);
            }
            if !taken.insert((&port.protocol, &port.host_ip, port.host_port)) {
                findings.duplicate(at.key("hostPort"), &port.host_port.to_string());
            }
        }
    }
}

/// kubelet would reject the pod with SysctlForbidden.
fn check_sysctls(at: &FieldPath, spec: &PodSpec, findings: &mut Findings) {
    let mut set = BTreeSet::new();
    for (index, sysctl) in spec.security_context.sysctls.iter().enumerate() {
        let at = at.index(index).key("name");
        let name = sysctl.name.replace('/', ".");
        if sysctl.name.is_empty() {
            findings.required(at);
        } else if !set.insert(name.clone()) {
            findings.duplicate(at, &sysctl.name);
        } else if !SAFE_SYSCTLS.contains(&name.as_str()) {
            let message = format!("Forbidden: sysctl {name:?} is not one that kubelet calls safe");
            findings.add(at, format!("{message}: {}", SAFE_SYSCTLS.join(", ")));
        } else if spec.host_network && name.starts_with("net.") {
            findings.add(at, "Forbidden: may not be specified when 'hostNetwork' is true");
        } else if spec.host_ipc && name.starts_with("kernel.") {
            findings.add(at, "Forbidden: may not be specified when 'hostIPC' is true");
        }
    }
}

fn check_address(at: FieldPath, address: &str, findings: &mut Findings) {
    if address.parse::<IpAddr>().is_err() {
        findings.invalid(at, address, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)");
    }
}
