//! Stops containers: preStop hooks, the order of sidecars, and grace periods (kubelet,
//! kuberuntime_container.go: killContainer; kuberuntime_termination_order.go).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::Tools;
use super::hooks::Call;
use crate::objects::{EventType, ObjectRef, Pod};
use crate::pod_state::plan::Target;

/// kubelet's minimum after a hook or other containers used the grace period.
const LEAST_GRACE: Duration = Duration::from_secs(2);

/// Containers whose preStop hook has ended, by id: it runs once. One that was cut off runs again.
#[derive(Debug, Clone, Default)]
pub(super) struct PreStopped(Arc<Mutex<BTreeSet<String>>>);

impl PreStopped {
    pub(super) fn contains(&self, id: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    pub(super) fn insert(&self, id: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
    }
}

/// A preStop hook to run.
#[derive(Debug)]
pub(super) struct PreStop {
    pub(super) call: Call,
    pub(super) ended: PreStopped,
}

/// One container to stop.
#[derive(Debug)]
pub(super) struct Stopping {
    pub(super) target: Target,
    pub(super) pre_stop: Option<PreStop>,
    /// Containers of a lower rank wait for those of a higher one.
    pub(super) rank: usize,
}

/// Sidecars end after all containers, in reverse order.
pub(super) fn rank(pod: &Pod, name: &str) -> usize {
    let sidecar = pod.spec.init_containers.iter().position(|c| c.name == name && c.is_sidecar());
    sidecar.unwrap_or(usize::MAX)
}

/// Stops all containers concurrently, as far as their ranks allow, and returns the first error after all
/// have answered. Unmounts the volumes of containers that survive SIGKILL, so that a later call succeeds.
pub(super) async fn stop_all(
    tools: Arc<Tools>,
    pod: ObjectRef,
    all: Vec<Stopping>,
    grace: Duration,
) -> crate::clients::cri::Result<()> {
    // A container has ended when its sender is dropped.
    let (ends, ended): (Vec<_>, Vec<_>) = all.iter().map(|_| watch::channel(())).unzip();
    let ranks: Vec<usize> = all.iter().map(|stopping| stopping.rank).collect();
    let mut stops = JoinSet::new();
    for (stopping, end) in all.into_iter().zip(ends) {
        let higher = ranks.iter().zip(&ended).filter(|(rank, _)| **rank > stopping.rank);
        let before: Vec<_> = higher.map(|(_, ended)| ended.clone()).collect();
        let (tools, pod) = (Arc::clone(&tools), pod.clone());
        stops.spawn(async move {
            let _ends_now = end;
            stop_one(&tools, &pod, stopping, before, grace).await
        });
    }
    let mut outcome = Ok(());
    let mut has_survivors = false;
    while let Some(stopped) = stops.join_next().await {
        let stopped = stopped.unwrap_or(Ok(()));
        has_survivors |= stopped.as_ref().is_err_and(crate::clients::cri::Error::is_survival);
        outcome = outcome.and(stopped);
    }
    if has_survivors {
        tools.volumes.unmount_from_survivors(&pod);
    }
    outcome
}

async fn stop_one(
    tools: &Tools,
    pod: &ObjectRef,
    stopping: Stopping,
    before: Vec<watch::Receiver<()>>,
    grace: Duration,
) -> crate::clients::cri::Result<()> {
    let Stopping { target, pre_stop, .. } = stopping;
    let grace = target.grace.unwrap_or(grace);
    let begun = Instant::now();
    let waits = !grace.is_zero() && (pre_stop.is_some() || !before.is_empty());
    if waits {
        if let Some(PreStop { call, ended }) = pre_stop {
            let outcome = within(grace, call).await;
            ended.insert(&target.id);
            if let Err(why) = outcome {
                let message = format!("PreStopHook of container {} failed: {why}", target.name);
                tools.sinks.record(pod, EventType::Warning, "FailedPreStopHook", &message);
            }
        }
        let turn = async {
            for mut ended in before {
                let _ended = ended.changed().await;
            }
        };
        let _late = timeout(grace.saturating_sub(begun.elapsed()), turn).await;
    }
    let left = if waits { left(grace, begun.elapsed()) } else { grace };
    tools.cri.stop_container(&target.id, &target.full_name, left).await
}

async fn within(grace: Duration, call: Call) -> Result<(), String> {
    let late =
        |_elapsed| Err(format!("it did not complete within the grace period of {} s", grace.as_secs()));
    timeout(grace, call.run()).await.unwrap_or_else(late)
}

/// CRI counts whole seconds; kubelet rounds what has passed down.
fn left(grace: Duration, passed: Duration) -> Duration {
    grace.saturating_sub(Duration::from_secs(passed.as_secs())).max(LEAST_GRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_uses_the_grace_period_but_its_last_seconds() {
        let left = |grace, passed| left(Duration::from_secs(grace), Duration::from_millis(passed)).as_secs();
        assert_eq!(left(30, 900), 30);
        assert_eq!(left(30, 12_300), 18);
        assert_eq!(left(30, 30_000), 2);
        assert_eq!(left(1, 0), 2);
    }

    #[test]
    fn sidecars_end_in_reverse_order_after_the_containers() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {
                "initContainers": [
                    {"name": "first", "restartPolicy": "Always"}, {"name": "second", "restartPolicy": "Always"},
                ],
                "containers": [{"name": "a"}]
            }
        }))
        .unwrap();
        let mut names = ["first", "a", "second"];
        names.sort_by_key(|name| std::cmp::Reverse(rank(&pod, name)));
        assert_eq!(names, ["a", "second", "first"]);
    }
}
