//! `describe pod`.

use super::report::{Report, moment};
use super::sources;
use super::{Describe, Table};
use crate::cli::rows::or_none;
use crate::objects::{
    Container, ContainerPort, ContainerState, ContainerStatus, EnvVar, Handler, Pod, Probe, Volume,
    VolumeMount, VolumeSource,
};

impl Describe for Pod {
    fn describe(&self, report: &mut Report) {
        let (spec, status) = (&self.spec, &self.status);
        report.field(0, "UID", &self.metadata.uid);
        let node = [spec.node_name.as_str(), status.host_ip.as_str()];
        let node: Vec<&str> = node.into_iter().filter(|part| !part.is_empty()).collect();
        report.field(0, "Node", &node.join("/"));
        report.field(0, "Start Time", &moment(status.start_time));
        report.field(0, "Status", status.phase.as_str());
        if !status.reason.is_empty() {
            report.field(0, "Reason", &status.reason);
        }
        if !status.message.is_empty() {
            report.field(0, "Message", &status.message);
        }
        report.field(0, "IP", &status.pod_ip);
        let ips: Vec<String> = status.pod_ips.iter().map(|ip| format!("IP:  {}", ip.ip)).collect();
        report.list(0, "IPs", &ips);
        for (title, containers) in
            [("Init Containers", &spec.init_containers), ("Containers", &spec.containers)]
        {
            if !containers.is_empty() {
                report.title(0, title);
            }
            for container in containers {
                describe_container(container, status.of_container(&container.name), report);
            }
        }
        describe_gates(self, report);
        describe_conditions(self, report);
        describe_volumes(&spec.volumes, report);
        let qos = status.qos_class.map(|class| format!("{class:?}")).unwrap_or_default();
        report.field(0, "QoS Class", &qos);
    }
}

fn describe_ports(ports: &[ContainerPort], report: &mut Report) {
    let join = |number: fn(&ContainerPort) -> String| {
        let each = ports.iter().map(|port| format!("{}/{}", number(port), port.protocol));
        each.collect::<Vec<_>>().join(", ")
    };
    let (title, host_title) = if ports.len() > 1 { ("Ports", "Host Ports") } else { ("Port", "Host Port") };
    report.field(2, title, &join(|port| port.container_port.to_string()));
    report.field(2, host_title, &join(|port| port.host_port.to_string()));
}

fn describe_container(container: &Container, status: Option<&ContainerStatus>, report: &mut Report) {
    report.title(1, &container.name);
    report.field(2, "Container ID", status.map_or("", |status| &status.container_id));
    report.field(2, "Image", &container.image);
    report.field(2, "Image ID", status.map_or("", |status| &status.image_id));
    describe_ports(&container.ports, report);
    report.list(2, "Command", &container.command);
    report.list(2, "Args", &container.args);
    if let Some(status) = status {
        describe_state("State", &status.state, report);
        if let Some(last) = &status.last_state {
            describe_state("Last State", last, report);
        }
        report.field(2, "Ready", if status.ready { "True" } else { "False" });
        report.field(2, "Restart Count", &status.restart_count.to_string());
    }
    for (title, amounts) in
        [("Limits", &container.resources.limits), ("Requests", &container.resources.requests)]
    {
        let amounts: Vec<String> =
            amounts.iter().map(|(name, amount)| format!("{name}:  {amount}")).collect();
        report.list(2, title, &amounts);
    }
    for (title, probe) in [
        ("Liveness", &container.liveness_probe),
        ("Readiness", &container.readiness_probe),
        ("Startup", &container.startup_probe),
    ] {
        if let Some(probe) = probe {
            report.field(2, title, &probe_line(probe));
        }
    }
    let environment: Vec<String> = container.env.iter().map(variable).collect();
    report.list(2, "Environment Variables from", &sources::env_from(&container.env_from));
    report.list(2, "Environment", &environment);
    let mounts: Vec<String> = container.volume_mounts.iter().map(mount).collect();
    report.list(2, "Mounts", &mounts);
}

/// As kubectl shows it: `http-get http://:80/ delay=0s timeout=1s period=10s #success=1 #failure=3`.
fn probe_line(probe: &Probe) -> String {
    let action = match probe.handler() {
        Some(Handler::Exec(action)) => format!("exec [{}]", action.command.join(" ")),
        Some(Handler::HttpGet(action)) => {
            let scheme = format!("{:?}", action.scheme).to_lowercase();
            format!("http-get {scheme}://{}:{}{}", action.host, action.port, action.path)
        }
        Some(Handler::TcpSocket(action)) => format!("tcp-socket {}:{}", action.host, action.port),
        Some(Handler::Grpc(action)) => format!("grpc <pod>:{} {}", action.port, action.service),
        Some(Handler::Sleep(_)) | None => "unknown".to_owned(),
    };
    format!(
        "{} delay={}s timeout={}s period={}s #success={} #failure={}",
        action.trim_end(),
        probe.initial_delay().as_secs(),
        probe.timeout().as_secs(),
        probe.period().as_secs(),
        probe.successes(),
        probe.failures()
    )
}

fn describe_gates(pod: &Pod, report: &mut Report) {
    if pod.spec.readiness_gates.is_empty() {
        return;
    }
    report.title(0, "Readiness Gates");
    let mut table = Table::with_head(["Type", "Status"]);
    for gate in &pod.spec.readiness_gates {
        let condition = pod.status.conditions.iter().find(|c| c.condition_type == gate.condition_type);
        let status = condition.map_or("<none>".to_owned(), |c| format!("{:?}", c.status));
        table.push(vec![gate.condition_type.clone(), status]);
    }
    report.table(1, table);
}

fn describe_state(title: &str, state: &ContainerState, report: &mut Report) {
    match state {
        ContainerState::Waiting(waiting) => {
            report.field(2, title, "Waiting");
            report.field(3, "Reason", &waiting.reason);
            if !waiting.message.is_empty() {
                report.field(3, "Message", &waiting.message);
            }
        }
        ContainerState::Running(running) => {
            report.field(2, title, "Running");
            report.field(3, "Started", &moment(running.started_at));
        }
        ContainerState::Terminated(ended) => {
            report.field(2, title, "Terminated");
            report.field(3, "Reason", &ended.reason);
            if !ended.message.is_empty() {
                report.field(3, "Message", &ended.message);
            }
            report.field(3, "Exit Code", &ended.exit_code.to_string());
            report.field(3, "Started", &moment(ended.started_at));
            report.field(3, "Finished", &moment(ended.finished_at));
        }
    }
}

fn variable(variable: &EnvVar) -> String {
    let value = variable.value_from.as_ref().map_or_else(|| variable.value.clone(), sources::value_from);
    format!("{}:  {value}", variable.name)
}

fn mount(mount: &VolumeMount) -> String {
    let mode = if mount.read_only { "ro" } else { "rw" };
    let part = match (mount.sub_path.as_str(), mount.sub_path_expr.as_str()) {
        ("", "") => String::new(),
        ("", part) | (part, _) => format!(",path={part:?}"),
    };
    format!("{} from {} ({mode}{part})", mount.mount_path, mount.name)
}

fn describe_conditions(pod: &Pod, report: &mut Report) {
    if pod.status.conditions.is_empty() {
        return;
    }
    report.title(0, "Conditions");
    let mut table = Table::with_head(["Type", "Status", "Reason"]);
    for condition in &pod.status.conditions {
        let (kind, status) = (condition.condition_type.clone(), format!("{:?}", condition.status));
        table.push(vec![kind, status, condition.reason.clone()]);
    }
    report.table(1, table);
}

fn describe_volumes(volumes: &[Volume], report: &mut Report) {
    if volumes.is_empty() {
        return report.field(0, "Volumes", "");
    }
    report.title(0, "Volumes");
    for volume in volumes {
        report.title(1, &volume.name);
        match volume.source() {
            Some(VolumeSource::EmptyDir(dir)) => {
                report.field(2, "Type", "EmptyDir (a temporary directory that shares a pod's lifetime)");
                report.field(2, "Medium", &dir.medium);
                let limit = dir.size_limit.as_ref().map(ToString::to_string).unwrap_or_default();
                report.field(2, "SizeLimit", &or_none(&limit));
            }
            Some(VolumeSource::HostPath(host)) => {
                report.field(2, "Type", "HostPath (bare host directory volume)");
                report.field(2, "Path", &host.path);
            }
            Some(VolumeSource::Claim(claim)) => {
                let kind =
                    "PersistentVolumeClaim (a reference to a PersistentVolumeClaim in the same namespace)";
                report.field(2, "Type", kind);
                report.field(2, "ClaimName", &claim.claim_name);
                report.field(2, "ReadOnly", &claim.read_only.to_string());
            }
            Some(source) => sources::describe_volume(source, report),
            None => report.field(2, "Type", "<unknown>"),
        }
    }
}
