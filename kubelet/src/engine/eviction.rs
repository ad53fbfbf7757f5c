//! Keeps the node's disk, memory and processes from running out (kubernetes, pkg/kubelet/eviction and
//! pkg/kubelet/images):
//! - Pods that exceed their limits are evicted.
//! - On a nearly full disk, dead containers and unused images are removed.
//! - While the node is under pressure, pods within their limits are evicted too.

mod disk;
mod garbage;
mod image_directories;
mod images;
mod limits;
mod measure;
mod monitor;
mod node;
mod observe;
mod rank;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::capacity::critical::is_critical;
use crate::capacity::pressure::{NodePressure, PressureLimits};
use crate::objects::{EventType, Object, Pod, PodPhase};
use crate::store::EVICTED;
use crate::worker::Tools;
use garbage::Garbage;
pub use garbage::ImageGc;
use measure::Scope;

/// kubelet's period.
const PERIOD: Duration = Duration::from_secs(10);
/// Measuring a pod takes at most this part of the time (1/10), so a pod with many files is measured
/// less often.
const SHARE_OF_TIME: u32 = 10;

/// Pods measured concurrently: one with millions of files must not delay the others.
const AT_A_TIME: usize = 4;
/// Longer than any measurement. A slower one waits for a kernel lock that the pod may hold forever:
/// it continues without its permit, so that other pods are measured.
const MEASURE_TIMEOUT: Duration = measure::TIME_LIMIT.saturating_add(Duration::from_secs(5));

/// Evicts pods that are over their limits. Never ends.
pub(crate) async fn watch_limits(tools: Arc<Tools>) {
    // `None` while the measurement runs.
    let mut not_before: BTreeMap<String, Option<Instant>> = BTreeMap::new();
    let mut measurements: JoinSet<(String, Duration)> = JoinSet::new();
    let permits = Arc::new(Semaphore::new(AT_A_TIME));
    loop {
        let next = Instant::now() + PERIOD;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => break,
                Some(Ok((uid, took))) = measurements.join_next() => {
                    not_before.insert(uid, Some(Instant::now() + took * SHARE_OF_TIME));
                }
            }
        }
        let pods = tools.store.pods();
        not_before.retain(|uid, due| due.is_none() || pods.iter().any(|pod| pod.metadata.uid == *uid));
        for pod in pods.into_iter().filter(|pod| may_be_evicted(pod) && limits::has_any(pod)) {
            let uid = pod.metadata.uid.clone();
            if not_before.get(&uid).is_some_and(|due| due.is_none_or(|at| Instant::now() < at)) {
                continue;
            }
            not_before.insert(uid.clone(), None);
            let (tools, permits) = (Arc::clone(&tools), Arc::clone(&permits));
            measurements.spawn(async move {
                // The semaphore is never closed.
                let permit = permits.acquire().await;
                let begun = Instant::now();
                let mut measurement = pin!(check_limits(&tools, &pod));
                if timeout(MEASURE_TIMEOUT, measurement.as_mut()).await.is_err() {
                    drop(permit);
                    measurement.await;
                }
                (uid, begun.elapsed())
            });
        }
    }
}

async fn check_limits(tools: &Arc<Tools>, pod: &Arc<Pod>) {
    let usage = match measure::of_pod(tools, pod, Scope::Limited).await {
        Ok(usage) => usage,
        Err(error) => {
            let message = format!("cannot measure the pod's disk usage: {}", linux::chain(&error));
            tools.sinks.record(&pod.reference(), EventType::Warning, "DiskUsageUnknown", &message);
            return;
        }
    };
    if let Some(message) = limits::exceeded(pod, &usage) {
        if tools.store.fail_pod(&pod.metadata.uid, EVICTED, &message) {
            tools.sinks.record(&pod.reference(), EventType::Warning, "Evicted", &message);
        }
    } else if !usage.is_complete {
        let message = "the pod has too many files, or changes them too fast, for a full count: \
                       its limits apply to the counted part";
        tools.sinks.record(&pod.reference(), EventType::Warning, "DiskUsageIncomplete", message);
    }
}

fn may_be_evicted(pod: &Pod) -> bool {
    let is_active = matches!(pod.status.phase, PodPhase::Pending | PodPhase::Running | PodPhase::Unknown);
    is_active && !pod.metadata.is_deleted() && !is_critical(pod)
}

/// Frees a disk that is nearly full, and evicts pods while the node is under pressure. Never ends.
pub(crate) async fn watch_node(
    tools: Arc<Tools>,
    image_gc: ImageGc,
    limits: PressureLimits,
    pressure: NodePressure,
) {
    let garbage = Arc::new(Garbage::new(image_gc));
    tokio::join!(
        garbage.directories.follow(&tools.cri, PERIOD),
        garbage::collect_forever(Arc::clone(&tools), Arc::clone(&garbage), PERIOD),
        node::watch(Arc::clone(&tools), Arc::clone(&garbage), limits, pressure, PERIOD),
    );
}
