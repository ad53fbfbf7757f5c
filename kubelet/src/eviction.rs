//! What is done so that the disk does not fill up (kubernetes, pkg/kubelet/eviction
//! and pkg/kubelet/images): pods that take more than their limits allow are
//! evicted, and on a disk that is nearly full dead containers and unused images
//! go.
//!
//! Node-pressure eviction (of pods within their limits) is not done.

mod disk;
mod garbage;
mod images;
mod limits;
mod measure;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::critical::is_critical;
use crate::objects::{EventType, Object, Pod, PodPhase};
use crate::worker::Tools;
pub use garbage::ImageGc;

/// As kubelet's.
const PERIOD: Duration = Duration::from_secs(10);
/// A pod whose files take long to count is counted less often: at most this
/// part of the time goes into it.
const SHARE_OF_TIME: u32 = 10;

/// Pods that are measured at a time: one with millions of files must not keep
/// the others from being measured.
const AT_A_TIME: usize = 4;
/// Longer than any count. What takes longer waits for a lock of the kernel that the pod may hold
/// for ever: it goes on, and others are measured.
const LONGEST_TURN: Duration = measure::TIME_LIMIT.saturating_add(Duration::from_secs(5));

/// Evicts pods that are over their limits. Never ends.
pub(crate) async fn watch_limits(tools: Arc<Tools>) {
    // `None` while it is being measured.
    let mut not_before: BTreeMap<String, Option<Instant>> = BTreeMap::new();
    let mut looks: JoinSet<(String, Duration)> = JoinSet::new();
    let turns = Arc::new(Semaphore::new(AT_A_TIME));
    loop {
        let next = Instant::now() + PERIOD;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => break,
                Some(Ok((uid, took))) = looks.join_next() => {
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
            let (tools, turns) = (Arc::clone(&tools), Arc::clone(&turns));
            looks.spawn(async move {
                // Never closed, so never an error.
                let turn = turns.acquire().await;
                let begun = Instant::now();
                let mut look = pin!(look_at(&tools, &pod));
                if timeout(LONGEST_TURN, look.as_mut()).await.is_err() {
                    drop(turn);
                    look.await;
                }
                (uid, begun.elapsed())
            });
        }
    }
}

async fn look_at(tools: &Arc<Tools>, pod: &Arc<Pod>) {
    let usage = match measure::of_pod(tools, pod).await {
        Ok(usage) => usage,
        Err(error) => {
            let message = format!("the pod's limits on the disk: {}", trace::error_chain(&error));
            tools.sinks.record(&pod.reference(), EventType::Warning, "DiskUsageUnknown", &message);
            return;
        }
    };
    if let Some(message) = limits::exceeded(pod, &usage) {
        if tools.store.evict_pod(&pod.metadata.uid, &message) {
            tools.sinks.record(&pod.reference(), EventType::Warning, "Evicted", &message);
        }
    } else if !usage.is_complete {
        let message = "the pod's files change too fast, or are too many, to be counted in full: \
                       its limits on the disk count what was seen";
        tools.sinks.record(&pod.reference(), EventType::Warning, "DiskUsageIncomplete", message);
    }
}

fn may_be_evicted(pod: &Pod) -> bool {
    let is_active = matches!(pod.status.phase, PodPhase::Pending | PodPhase::Running | PodPhase::Unknown);
    is_active && !pod.metadata.is_deleted() && !is_critical(pod)
}

/// Frees a disk that is nearly full. Never ends.
pub(crate) async fn watch_disk(tools: Arc<Tools>, thresholds: ImageGc) {
    garbage::collect_for_ever(tools, thresholds, PERIOD).await;
}
