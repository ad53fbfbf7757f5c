//! Rules for init containers, probes, hooks, deadlines and readiness gates.

use proto::signals;

use super::super::path::FieldPath;
use super::{Findings, MAX_PATH_BYTES, names};
use crate::objects::{
    Container, ContainerPort, ExecAction, Hook, HttpGetAction, Lifecycle, Pod, PodSpec, Port, Probe,
    ProbeKind,
};

/// apis/core/validation: the largest activeDeadlineSeconds.
const MAX_DEADLINE_SECONDS: u64 = i32::MAX as u64;

pub(super) fn check_pod(at: &FieldPath, pod: &Pod, findings: &mut Findings) {
    let spec = &pod.spec;
    if let Some(seconds) = spec.active_deadline_seconds
        && !(1..=MAX_DEADLINE_SECONDS).contains(&seconds)
    {
        let rule = format!("must be between 1 and {MAX_DEADLINE_SECONDS}, inclusive");
        findings.invalid(at.key("activeDeadlineSeconds"), &seconds.to_string(), &rule);
    }
    for (index, gate) in spec.readiness_gates.iter().enumerate() {
        let field = at.key("readinessGates").index(index).key("conditionType");
        findings.name(field, &gate.condition_type, names::qualified);
    }
    let grace = spec.termination_grace_period_seconds;
    for (index, container) in spec.containers.iter().enumerate() {
        let at = at.key("containers").index(index);
        if container.restart_policy.is_some() {
            findings.add(at.key("restartPolicy"), "Forbidden: may not be set for non-init containers");
        }
        check_container(&at, container, grace, findings);
        check_stop_signal(&at, container, spec, findings);
    }
    for (index, container) in spec.init_containers.iter().enumerate() {
        let at = at.key("initContainers").index(index);
        check_init_container(&at, container, findings);
        check_container(&at, container, grace, findings);
        check_stop_signal(&at, container, spec, findings);
    }
}

/// The names of signals are those of the pod's system.
fn check_stop_signal(at: &FieldPath, container: &Container, spec: &PodSpec, findings: &mut Findings) {
    let (at, signal) = (at.below("lifecycle.stopSignal"), container.stop_signal());
    if signal.is_empty() {
        return;
    }
    if spec.os.is_none() {
        let rule = "Forbidden: may not be set for containers with empty `spec.os.name`: set it to linux";
        findings.add(at, rule);
    } else if signals::parse(signal).is_none() {
        let rule = "must be the name of a signal, such as \"SIGUSR1\" or \"SIGRTMIN+3\"";
        findings.add(at, format!("Unsupported value: {signal:?}: {rule}"));
    }
}

fn check_init_container(at: &FieldPath, container: &Container, findings: &mut Findings) {
    match container.restart_policy.as_deref() {
        Some("Always") => return,
        Some(other) => {
            let message = format!("Unsupported value: {other:?}: supported values: \"Always\"");
            findings.add(at.key("restartPolicy"), message);
        }
        None => {}
    }
    let rule = "Forbidden: may not be set for init containers without restartPolicy=Always";
    for kind in ProbeKind::ALL {
        if container.probe(kind).is_some() {
            findings.add(at.key(field_of(kind)), rule);
        }
    }
    if container.lifecycle.is_some() {
        findings.add(at.key("lifecycle"), rule);
    }
}

fn field_of(kind: ProbeKind) -> &'static str {
    match kind {
        ProbeKind::Startup => "startupProbe",
        ProbeKind::Liveness => "livenessProbe",
        ProbeKind::Readiness => "readinessProbe",
    }
}

fn check_container(at: &FieldPath, container: &Container, grace: u64, findings: &mut Findings) {
    for kind in ProbeKind::ALL {
        if let Some(probe) = container.probe(kind) {
            check_probe(&at.key(field_of(kind)), kind, probe, container, findings);
        }
    }
    if let Some(Lifecycle { post_start, pre_stop, .. }) = &container.lifecycle {
        for (name, hook) in [("postStart", post_start), ("preStop", pre_stop)] {
            if let Some(hook) = hook {
                check_hook(&at.key("lifecycle").key(name), hook, container, grace, findings);
            }
        }
    }
}

fn check_probe(
    at: &FieldPath,
    kind: ProbeKind,
    probe: &Probe,
    container: &Container,
    findings: &mut Findings,
) {
    let actions =
        [probe.exec.is_some(), probe.http_get.is_some(), probe.tcp_socket.is_some(), probe.grpc.is_some()];
    check_number_of_actions(at, &actions, findings);
    check_exec(at, probe.exec.as_ref(), findings);
    check_http(at, probe.http_get.as_ref(), container, findings);
    if let Some(action) = &probe.tcp_socket {
        check_port(&at.below("tcpSocket.port"), &action.port, container, findings);
    }
    if probe.grpc.as_ref().is_some_and(|action| action.port == 0) {
        findings.invalid(at.below("grpc.port"), "0", "must be between 1 and 65535, inclusive");
    }
    if kind != ProbeKind::Readiness && probe.successes() != 1 {
        findings.invalid(at.key("successThreshold"), &probe.success_threshold.to_string(), "must be 1");
    }
    let field = at.key("terminationGracePeriodSeconds");
    match probe.termination_grace_period_seconds {
        Some(seconds) if kind == ProbeKind::Readiness => {
            findings.invalid(field, &seconds.to_string(), "must not be set for readinessProbes");
        }
        Some(0) => findings.invalid(field, "0", "must be greater than 0"),
        Some(_) | None => {}
    }
}

fn check_hook(at: &FieldPath, hook: &Hook, container: &Container, grace: u64, findings: &mut Findings) {
    let actions = [hook.exec.is_some(), hook.http_get.is_some(), hook.sleep.is_some()];
    check_number_of_actions(at, &actions, findings);
    check_exec(at, hook.exec.as_ref(), findings);
    check_http(at, hook.http_get.as_ref(), container, findings);
    if let Some(sleep) = hook.sleep
        && sleep.seconds > grace
    {
        let rule = format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
        findings.invalid(at.below("sleep.seconds"), &sleep.seconds.to_string(), &rule);
    }
}

fn check_number_of_actions(at: &FieldPath, actions: &[bool], findings: &mut Findings) {
    match actions.iter().filter(|given| **given).count() {
        0 => findings.add(at.clone(), "Required value: must specify a handler type"),
        1 => {}
        _ => findings.add(at.clone(), "Forbidden: may not specify more than 1 handler type"),
    }
}

fn check_exec(at: &FieldPath, action: Option<&ExecAction>, findings: &mut Findings) {
    if action.is_some_and(|action| action.command.is_empty()) {
        findings.required(at.below("exec.command"));
    }
}

fn check_http(
    at: &FieldPath,
    action: Option<&HttpGetAction>,
    container: &Container,
    findings: &mut Findings,
) {
    let Some(action) = action else { return };
    let at = at.key("httpGet");
    findings.length(at.key("path"), action.path.len(), MAX_PATH_BYTES);
    check_port(&at.key("port"), &action.port, container, findings);
    for (index, header) in action.http_headers.iter().enumerate() {
        let at = at.key("httpHeaders").index(index);
        // RFC 9110, 5.1: a token.
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if header.name.is_empty() || !header.name.bytes().all(is_token) {
            findings.invalid(at.key("name"), &header.name, "must be a valid HTTP header name");
        }
        if header.value.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
            findings.invalid(at.key("value"), &header.value, "must not contain control characters");
        }
    }
}

fn check_port(at: &FieldPath, port: &Port, container: &Container, findings: &mut Findings) {
    let Port::Name(name) = port else { return };
    let has = |port: &ContainerPort| port.name.as_ref() == Some(name);
    if !container.ports.iter().any(has) {
        findings.add(at.clone(), format!("Not found: {name:?}: the container has no port with this name"));
    }
}
