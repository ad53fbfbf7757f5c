//! `/metrics`: the kubelet's own figures. Names that kubelet has too mean the same as there; the others
//! begin with `hawser_kubelet_`.

use std::collections::BTreeMap;

use super::counters::Counters;
use super::exposition::{Exposition, Kind};
use super::volumes;
use crate::objects::{ContainerState, Pod, PodPhase};
use crate::volumes::Figures;

pub(super) fn text(
    node_name: &str,
    pods: &[impl AsRef<Pod>],
    volumes: &Figures,
    counters: &Counters,
) -> String {
    let mut text = Exposition::default();
    text.metric("kubelet_node_name", Kind::Gauge, "Always 1; the label has the node's name").sample(
        &[("node", node_name)],
        1.0,
        None,
    );
    of_pods(&mut text, pods);
    volumes::add_metrics(&mut text, pods, volumes);
    let mut requests =
        text.metric("kubelet_http_requests_total", Kind::Counter, "Answered requests of the HTTP endpoints");
    for ((path, method, code), count) in counters.requests() {
        let code = code.to_string();
        let is_long = if is_long_running(path) { "true" } else { "false" };
        let labels = [
            ("code", code.as_str()),
            ("long_running", is_long),
            ("method", method),
            ("path", path),
            ("server_type", "readwrite"),
        ];
        requests.sample(&labels, count as f64, None);
    }
    text.metric(
        "hawser_kubelet_unauthorized_requests_total",
        Kind::Counter,
        "Requests on --listen without the token, or with a wrong one",
    )
    .sample(&[], counters.unauthorized() as f64, None);
    text.metric(
        "hawser_kubelet_refused_connections_total",
        Kind::Counter,
        "Connections to the HTTP endpoints that were closed because there were too many",
    )
    .sample(&[], counters.refused_connections() as f64, None);
    text.metric(
        "hawser_kubelet_streams",
        Kind::Gauge,
        "Clients that have streams of exec, attach or portForward through the HTTP endpoints",
    )
    .sample(&[], counters.streams() as f64, None);
    of_process(&mut text);
    text.into_text()
}

fn is_long_running(path: &str) -> bool {
    matches!(path, "exec" | "attach" | "portForward" | "containerLogs")
}

fn of_pods(text: &mut Exposition, pods: &[impl AsRef<Pod>]) {
    let pods = || pods.iter().map(AsRef::as_ref);
    let running = pods().filter(|pod| pod.status.phase == PodPhase::Running).count();
    text.metric("kubelet_running_pods", Kind::Gauge, "Pods that run").sample(&[], running as f64, None);
    let mut states = BTreeMap::from([("created", 0), ("exited", 0), ("running", 0)]);
    for pod in pods() {
        for status in pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses) {
            let state = match status.state {
                ContainerState::Running(_) => "running",
                ContainerState::Terminated(_) => "exited",
                ContainerState::Waiting(_) if status.container_id.is_empty() => continue,
                ContainerState::Waiting(_) => "created",
            };
            *states.entry(state).or_default() += 1;
        }
    }
    let mut containers = text.metric("kubelet_running_containers", Kind::Gauge, "Containers in each state");
    for (state, count) in states {
        containers.sample(&[("container_state", state)], f64::from(count), None);
    }
}

/// As Prometheus' clients name them. A figure that cannot be read is left out.
fn of_process(text: &mut Exposition) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.and_then(|rest| rest.trim_end_matches("kB").trim().parse::<u64>().ok());
    if let Some(kibibytes) = resident {
        text.metric("process_resident_memory_bytes", Kind::Gauge, "Resident memory of the kubelet in bytes")
            .sample(&[], (kibibytes * 1024) as f64, None);
    }
    if let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") {
        text.metric("process_open_fds", Kind::Gauge, "Open file descriptors of the kubelet").sample(
            &[],
            descriptors.count() as f64,
            None,
        );
    }
    if let Some(ticks) = cpu_ticks(&std::fs::read_to_string("/proc/self/stat").unwrap_or_default()) {
        text.metric("process_cpu_seconds_total", Kind::Counter, "Processor time of the kubelet in seconds")
            .sample(&[], ticks as f64 / 100.0, None);
    }
}

/// User and system time of the process (proc_pid_stat(5), fields 14 and 15), in ticks of 10 ms.
fn cpu_ticks(stat: &str) -> Option<u64> {
    // Behind the name, which may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_behind_a_hostile_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 25 0 0 20 0 1 0 5 6 7";
        assert_eq!(cpu_ticks(stat), Some(175));
        assert_eq!(cpu_ticks(""), None);
    }

    #[test]
    fn answers_and_wrong_tokens_are_counted() {
        let counters = Counters::default();
        counters.answered("pods", &hyper::Method::GET, 200);
        counters.answered("pods", &hyper::Method::GET, 200);
        counters.count_unauthorized();
        let streams = counters.open_streams();
        let shown = text("node", &Vec::<std::sync::Arc<Pod>>::new(), &Figures::new(), &counters);
        let expected = "kubelet_http_requests_total{code=\"200\",long_running=\"false\",method=\"GET\",path=\"pods\",\
                        server_type=\"readwrite\"} 2\n";
        assert!(shown.contains(expected), "{shown}");
        assert!(shown.contains("\nhawser_kubelet_unauthorized_requests_total 1\n"), "{shown}");
        assert!(
            shown.contains("\nhawser_kubelet_streams 1\n") && shown.contains("\nprocess_open_fds "),
            "{shown}"
        );
        drop(streams);
        assert_eq!(counters.streams(), 0);
    }

    #[test]
    fn every_metric_is_documented() {
        let page = include_str!("../../../docs/METRICS.md");
        let none = Vec::<std::sync::Arc<Pod>>::new();
        let own = text("node", &none, &Figures::new(), &Counters::default());
        let node = crate::endpoints::usage::NodeUsage::read().ok();
        let usage = crate::endpoints::usage::Usage::default();
        let resource = crate::endpoints::resource_metrics::text(&none, Some(&usage), node, 0);
        for metric in [own, resource]
            .iter()
            .flat_map(|text| text.lines())
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        {
            let is_there =
                [format!("`{metric}`"), format!("`{metric}{{")].iter().any(|name| page.contains(name));
            assert!(is_there, "docs/METRICS.md does not name {metric}");
        }
    }
}
