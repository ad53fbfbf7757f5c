//! The probes of one pod's containers: one task each, beside the pod's worker (kubelet, pkg/kubelet/prober).
//!
//! A task writes its decisions to the shared results and wakes the worker when they change. A container
//! with a startup probe gets its other tasks once it has started.

mod answer;
mod check;
mod dial;
pub(crate) mod exec;
mod grpc;
pub(crate) mod http;
mod kept;
mod tls;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::cri::{ContainerState, ContainerStatus};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::clients::cri::Cri;
use crate::objects::{EventType, ObjectRef, Pod, Probe, ProbeKind, Time};
use crate::pod_state::observed::{Observed, name_of, time};
use crate::pod_state::plan::{Cause, Target};
use crate::pod_state::probe_results::{ProbeResults, Run};
use crate::sink::Sinks;
use answer::Answer;
use check::Check;
pub(crate) use check::port_number;
use kept::{Kept, KeptDecisions};

/// kubelet's maxProbeRetries: tries of a check that cannot be made.
const TRIES: usize = 3;

#[derive(Debug)]
pub(crate) struct Probes {
    shared: Arc<Shared>,
    /// By container id. A task that has ended stays here, so that it does not start again.
    tasks: BTreeMap<(String, ProbeKind), Task>,
    /// Whether the containers of an earlier kubelet were seen.
    has_adopted: bool,
    /// Only readiness is probed.
    is_ending: bool,
}

/// What the tasks of a pod need.
#[derive(Debug)]
pub(crate) struct Asking {
    pub(crate) cri: Cri,
    pub(crate) sinks: Sinks,
    pub(crate) pod: ObjectRef,
    /// Wakes the pod's worker.
    pub(crate) wake: Arc<Notify>,
}

#[derive(Debug)]
struct Shared {
    asking: Asking,
    results: Mutex<ProbeResults>,
    kept: KeptDecisions,
}

/// A running task; it ends when this is dropped.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Probes {
    /// `pod_dir` may have what an earlier kubelet knew.
    pub(crate) fn new(asking: Asking, pod_dir: &Path) -> Self {
        let kept = KeptDecisions::read(pod_dir);
        let shared = Shared { asking, results: Mutex::new(kept.results()), kept };
        Self { shared: Arc::new(shared), tasks: BTreeMap::new(), has_adopted: false, is_ending: false }
    }

    /// The decisions so far.
    pub(crate) fn results(&self) -> ProbeResults {
        self.shared.results().clone()
    }

    /// Starts the probes of running containers and stops those of ended ones. `host_ip` is the address of
    /// a pod in the host's network.
    pub(crate) fn follow(&mut self, pod: &Pod, observed: &Observed, host_ip: &str) {
        let ids: BTreeSet<&str> = observed.containers.iter().map(|c| c.id.as_str()).collect();
        self.shared.results().retain(&ids);
        self.shared.kept.retain(&ids);
        let running: BTreeMap<&str, &ContainerStatus> =
            observed.running().map(|c| (c.id.as_str(), c)).collect();
        self.tasks.retain(|(id, _), _| running.contains_key(id.as_str()));
        let ip = if pod.spec.host_network {
            host_ip.to_owned()
        } else {
            observed.pod_ips().into_iter().next().unwrap_or_default()
        };
        let is_adopted = !std::mem::replace(&mut self.has_adopted, true);
        for status in running.into_values() {
            debug_assert_eq!(status.state(), ContainerState::ContainerRunning);
            let Some(container) = pod.spec.container_named(name_of(status)) else { continue };
            for kind in ProbeKind::ALL {
                let Some(probe) = container.probe(kind) else { continue };
                let key = (status.id.clone(), kind);
                let (has_started, has_failed) = {
                    let results = self.shared.results();
                    (results.is_started(container, &status.id), results.failed(&status.id).is_some())
                };
                let is_its_turn = has_started != (kind == ProbeKind::Startup);
                // A container that an earlier kubelet was stopping for a failed probe is stopped all the same.
                let ends = self.is_ending || has_failed;
                let is_due = is_its_turn && (!ends || kind == ProbeKind::Readiness);
                if self.tasks.contains_key(&key) || !is_due {
                    continue;
                }
                let Some(check) = Check::new(probe, container, &status.id, &ip) else { continue };
                let begin = begin_after(status, kind, probe, is_adopted);
                let task = run(Arc::clone(&self.shared), check, kind, probe.clone(), begin);
                self.tasks.insert(key, Task(tokio::spawn(task)));
            }
        }
    }

    /// Notes and writes which containers are stopped for a failed probe, before they are. Blocks.
    pub(crate) fn note_kills(&self, targets: &[Target]) {
        for target in targets {
            let kept = match target.cause {
                Cause::Probe(ProbeKind::Startup) => &self.shared.kept.failed_startup,
                Cause::Probe(ProbeKind::Liveness) => &self.shared.kept.failed_liveness,
                Cause::Probe(ProbeKind::Readiness)
                | Cause::End
                | Cause::Changed
                | Cause::Resized
                | Cause::SandboxLost => continue,
            };
            self.shared.results().note_kill(&target.id);
            kept.set(&target.id, true);
        }
    }

    /// Stops what would end a container: the pod ends. Readiness is still probed.
    pub(crate) fn stop_restarts(&mut self) {
        self.is_ending = true;
        self.tasks.retain(|(_, kind), _| *kind == ProbeKind::Readiness);
    }
}

/// What the probes of an earlier kubelet have decided.
pub(super) fn kept_results(pod_dir: &Path) -> ProbeResults {
    KeptDecisions::read(pod_dir).results()
}

impl Shared {
    fn results(&self) -> std::sync::MutexGuard<'_, ProbeResults> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self, kind: ProbeKind) -> Option<&Kept> {
        match kind {
            ProbeKind::Startup => Some(&self.kept.started),
            ProbeKind::Readiness => Some(&self.kept.ready),
            ProbeKind::Liveness => None,
        }
    }

    fn warn(&self, reason: &str, message: &str) {
        self.asking.sinks.record(&self.asking.pod, EventType::Warning, reason, message);
    }
}

/// The pause before the first check. After a restart of the kubelet the checks of all pods spread over a
/// period, but readiness, which may have changed meanwhile.
fn begin_after(status: &ContainerStatus, kind: ProbeKind, probe: &Probe, is_adopted: bool) -> Duration {
    let age = time(status.started_at).map(|started| Time::now().duration_since(started));
    let age = age.and_then(|age| Duration::try_from(age).ok()).unwrap_or_default();
    let delay = probe.initial_delay().saturating_sub(age);
    if !is_adopted || kind == ProbeKind::Readiness || age < probe.period() {
        return delay;
    }
    // An id is random.
    let random = status.id.get(..4).and_then(|digits| u16::from_str_radix(digits, 16).ok()).unwrap_or(0);
    delay + probe.period().mul_f64(f64::from(random) / f64::from(u16::MAX))
}

async fn run(shared: Arc<Shared>, check: Check, kind: ProbeKind, probe: Probe, begin: Duration) {
    sleep(begin).await;
    let mut ticks = interval(probe.period());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut successes_or_failures = Run::default();
    loop {
        ticks.tick().await;
        let Some(success) = shared.ask(&check, kind, &probe).await else { continue };
        let decision = successes_or_failures.count(success, probe.successes(), probe.failures());
        let Some(decision) = decision else { continue };
        decide(&shared, check.container_id(), kind, decision).await;
        // A startup probe has one decision; a failure of liveness ends the container.
        let is_final = match kind {
            ProbeKind::Startup => true,
            ProbeKind::Liveness => !decision,
            ProbeKind::Readiness => false,
        };
        if is_final {
            return;
        }
    }
}

/// A success is on the disk before the worker publishes it: the kubelet may be killed right after that.
async fn decide(shared: &Arc<Shared>, id: &str, kind: ProbeKind, success: bool) {
    if success {
        remember(shared, id, kind, true).await;
    }
    if shared.results().set(id, kind, success) {
        shared.asking.wake.notify_one();
    }
    if !success {
        remember(shared, id, kind, false).await;
    }
}

/// Writes what the next kubelet must know, if that changes.
async fn remember(shared: &Arc<Shared>, id: &str, kind: ProbeKind, success: bool) {
    if shared.kept(kind).is_none_or(|kept| kept.has(id) == success) {
        return;
    }
    let (shared, id) = (Arc::clone(shared), id.to_owned());
    let written = tokio::task::spawn_blocking(move || {
        if let Some(kept) = shared.kept(kind) {
            kept.set(&id, success);
        }
    });
    if let Err(error) = written.await {
        tracing::debug!(%error, "write which probes have succeeded");
    }
}

impl Shared {
    /// One check and its events; `None` if it could not be made, which counts as neither.
    async fn ask(&self, check: &Check, kind: ProbeKind, probe: &Probe) -> Option<bool> {
        let kind = kind.as_str();
        let mut errors = Vec::new();
        while errors.len() < TRIES {
            match check.ask(&self.asking.cri, probe.timeout()).await {
                Ok(Answer::Success) => return Some(true),
                Ok(Answer::Warning(output)) => {
                    self.warn("ProbeWarning", &format!("{kind} probe warning: {output}"));
                    return Some(true);
                }
                Ok(Answer::Failure(output)) => {
                    self.warn("Unhealthy", &format!("{kind} probe failed: {output}"));
                    return Some(false);
                }
                Err(error) => errors.push(error),
            }
        }
        let error = errors.pop().unwrap_or_default();
        self.warn("Unhealthy", &format!("{kind} probe errored and resulted in unknown state: {error}"));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(id: &str, started_ago: i64) -> ContainerStatus {
        let started_at = i64::try_from(Time::now().as_nanosecond()).unwrap() - started_ago * 1_000_000_000;
        ContainerStatus { id: id.to_owned(), started_at, ..ContainerStatus::default() }
    }

    #[test]
    fn the_initial_delay_counts_from_the_start_of_the_container() {
        let probe = Probe { initial_delay_seconds: 30, ..Probe::default() };
        let delay =
            |id, ago, kind, is_adopted| begin_after(&status(id, ago), kind, &probe, is_adopted).as_secs();
        assert_eq!(delay("ffff", 20, ProbeKind::Liveness, false), 9);
        assert_eq!(delay("ffff", 40, ProbeKind::Liveness, false), 0);
        assert_eq!(delay("ffff", 40, ProbeKind::Readiness, true), 0);
        assert_eq!(delay("ffff", 40, ProbeKind::Liveness, true), 10, "spread over a period");
        assert_eq!(delay("0000", 40, ProbeKind::Liveness, true), 0);
    }

    #[tokio::test]
    async fn a_decision_wakes_the_worker_and_a_start_begins_the_other_probes() {
        let dir = tempfile::tempdir().unwrap();
        let store = crate::store::Store::open(dir.path(), "node").unwrap();
        let open = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let [open_port, closed_port] = [&open, &closed].map(|l| l.local_addr().unwrap().port());
        drop(closed);
        let probe = |port: u16| serde_json::json!({"tcpSocket": {"port": port}, "failureThreshold": 1});
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"hostNetwork": true, "containers": [{
                "name": "c", "startupProbe": probe(open_port), "readinessProbe": probe(open_port),
                "livenessProbe": probe(closed_port),
            }]}
        }))
        .unwrap();
        let mut running = status("x", 0);
        running.state = ContainerState::ContainerRunning.into();
        running.metadata = Some(proto::cri::ContainerMetadata { name: "c".to_owned(), attempt: 0 });
        let observed = Observed { containers: vec![running], ..Observed::default() };
        let (wake, cri) = (Arc::new(Notify::new()), Cri::new(std::path::Path::new("/none")));
        let reference = crate::objects::Object::reference(&pod);
        let new = || {
            let (cri, sinks) = (cri.clone(), Sinks::new(store.clone(), Vec::new()));
            Probes::new(Asking { cri, sinks, pod: reference.clone(), wake: Arc::clone(&wake) }, dir.path())
        };
        let mut probes = new();
        let container = &pod.spec.containers[0];
        let mut tasks = Vec::new();
        while probes.results().failed("x").is_none() || !probes.results().is_ready(container, "x") {
            probes.follow(&pod, &observed, "127.0.0.1");
            tasks.push(probes.tasks.len());
            tokio::time::timeout(Duration::from_secs(10), wake.notified()).await.expect("a decision");
        }
        assert_eq!(tasks[..2], [1, 3], "first the startup probe alone");
        assert_eq!(probes.results().failed("x"), Some(ProbeKind::Liveness));
        assert!(!probes.results().was_killed("x"), "the worker has not begun to stop it");
        // The next kubelet does not probe the start again.
        let startup = probes.tasks.get_mut(&("x".to_owned(), ProbeKind::Startup)).expect("it stays");
        let ended = tokio::time::timeout(Duration::from_secs(10), &mut startup.0).await;
        ended.expect("one decision ends it").unwrap();
        let mut next = new();
        assert!(next.results().is_started(container, "x") && next.results().is_ready(container, "x"));
        next.follow(&pod, &observed, "127.0.0.1");
        assert!(next.tasks.len() == 2 && !next.tasks.contains_key(&("x".to_owned(), ProbeKind::Startup)));
        // Nor whether a container lives that is being stopped since it does not.
        probes.note_kills(&[Target {
            id: "x".to_owned(),
            name: "c".to_owned(),
            full_name: "default/p/c".to_owned(),
            cause: Cause::Probe(ProbeKind::Liveness),
            grace: None,
        }]);
        assert!(probes.results().was_killed("x"));
        let mut next = new();
        assert!(next.results().was_killed("x"));
        next.follow(&pod, &observed, "127.0.0.1");
        assert_eq!(next.tasks.keys().map(|(_, kind)| *kind).collect::<Vec<_>>(), [ProbeKind::Readiness]);
        probes.follow(&pod, &Observed::default(), "127.0.0.1");
        assert!(probes.tasks.is_empty() && probes.results() == ProbeResults::default());
    }
}
