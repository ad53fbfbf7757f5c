//! `/metrics/resource`: the figures that a metrics server reads, with kubelet's names (kubernetes,
//! pkg/kubelet/metrics/collectors/resource_metrics.go).

use proto::cri;

use super::exposition::{Exposition, Kind};
use super::usage::{self, Measured, NodeUsage, Usage};
use crate::objects::{ContainerState, Pod};

/// `usage` is `None` if the runtime does not answer: then only the node's figures are there.
pub(super) fn text(
    pods: &[impl AsRef<Pod>],
    usage: Option<&Usage>,
    node: Option<NodeUsage>,
    now: i64,
) -> String {
    let mut text = Exposition::default();
    if let Some(node) = node {
        let time = Some(milliseconds(now));
        let cpu = "Processor time of the node in seconds";
        text.metric("node_cpu_usage_seconds_total", Kind::Counter, cpu).sample(
            &[],
            seconds(node.cpu_nanoseconds),
            time,
        );
        text.metric("node_memory_working_set_bytes", Kind::Gauge, "Working set of the node in bytes").sample(
            &[],
            node.working_set_bytes as f64,
            time,
        );
        text.metric("node_swap_usage_bytes", Kind::Gauge, "Swap space in use on the node in bytes").sample(
            &[],
            node.swap_used_bytes as f64,
            time,
        );
    }
    let found: Vec<Found<'_>> = usage.map(|usage| find(pods, usage)).unwrap_or_default();
    text.of_pods(&found);
    text.of_containers(&found);
    text.starts_of_containers(&found);
    let has_failed = f64::from(u8::from(usage.is_none() || node.is_none()));
    for name in ["resource_scrape_error", "scrape_error"] {
        text.metric(name, Kind::Gauge, "1 if a figure could not be read, otherwise 0").sample(
            &[],
            has_failed,
            None,
        );
    }
    text.into_text()
}

/// A pod that the runtime has figures of.
struct Found<'a> {
    pod: &'a Pod,
    usage: &'a usage::PodUsage,
}

fn find<'a>(pods: &'a [impl AsRef<Pod>], usage: &'a Usage) -> Vec<Found<'a>> {
    let pods = pods.iter().map(AsRef::as_ref);
    pods.filter_map(|pod| Some(Found { pod, usage: usage.of_pod(&pod.metadata.uid)? })).collect()
}

impl Exposition {
    fn of_pods(&mut self, pods: &[Found<'_>]) {
        let mut metric =
            self.metric("pod_cpu_usage_seconds_total", Kind::Counter, "Processor time of the pod in seconds");
        for found in pods {
            if let Some(Measured { value, time }) = found.usage.cpu() {
                metric.sample(&labels(found.pod), seconds(value), Some(milliseconds(time)));
            }
        }
        let mut metric =
            self.metric("pod_memory_working_set_bytes", Kind::Gauge, "Working set of the pod in bytes");
        for found in pods {
            if let Some(Measured { value, time }) = found.usage.working_set() {
                metric.sample(&labels(found.pod), value as f64, Some(milliseconds(time)));
            }
        }
    }

    fn of_containers(&mut self, pods: &[Found<'_>]) {
        type Figure = fn(&cri::ContainerStats) -> Option<(f64, i64)>;
        let figures: [(&'static str, Kind, &str, Figure); 3] = [
            (
                "container_cpu_usage_seconds_total",
                Kind::Counter,
                "Processor time of the container in seconds",
                |stats| usage::cpu(stats.cpu.as_ref()).map(|cpu| (seconds(cpu.value), cpu.time)),
            ),
            (
                "container_memory_working_set_bytes",
                Kind::Gauge,
                "Working set of the container in bytes",
                |stats| usage::working_set(stats.memory.as_ref()).map(|set| (set.value as f64, set.time)),
            ),
            (
                "container_swap_usage_bytes",
                Kind::Gauge,
                "Swap space in use by the container in bytes",
                |stats| {
                    let swap = stats.swap.as_ref()?;
                    Some((usage::value(swap.swap_usage_bytes.as_ref())? as f64, swap.timestamp))
                },
            ),
        ];
        for (name, kind, help, figure) in figures {
            let mut metric = self.metric(name, kind, help);
            for found in pods {
                for (container, stats) in sorted(found) {
                    if let Some((value, time)) = figure(stats) {
                        let labels = container_labels(found.pod, container);
                        metric.sample(&labels, value, Some(milliseconds(time)));
                    }
                }
            }
        }
    }

    fn starts_of_containers(&mut self, pods: &[Found<'_>]) {
        let mut metric = self.metric(
            "container_start_time_seconds",
            Kind::Gauge,
            "Start of the container, in seconds since 1970",
        );
        for found in pods {
            for status in
                found.pod.status.init_container_statuses.iter().chain(&found.pod.status.container_statuses)
            {
                if let ContainerState::Running(running) = &status.state
                    && let Some(started) = &running.started_at
                {
                    let labels = container_labels(found.pod, &status.name);
                    metric.sample(&labels, started.as_second() as f64, None);
                }
            }
        }
    }
}

fn sorted<'a>(found: &Found<'a>) -> Vec<(&'a str, &'a cri::ContainerStats)> {
    let mut containers: Vec<_> =
        found.usage.containers.iter().map(|(name, stats)| (name.as_str(), stats)).collect();
    containers.sort_by_key(|(name, _)| *name);
    containers
}

fn labels(pod: &Pod) -> [(&str, &str); 2] {
    [("namespace", &pod.metadata.namespace), ("pod", &pod.metadata.name)]
}

fn container_labels<'a>(pod: &'a Pod, container: &'a str) -> [(&'a str, &'a str); 3] {
    let [namespace, pod] = labels(pod);
    [("container", container), namespace, pod]
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

fn milliseconds(nanoseconds: i64) -> i64 {
    nanoseconds / 1_000_000
}
