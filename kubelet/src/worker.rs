//! One pod's worker: a task that brings its pod to the object's desired state, and finally tears it
//! down. Object changes and runtime events wake it; it then observes the pod and executes the plan
//! of `pod_state::plan`.
//!
//! Invariant: a worker ends only after its pod or the pod's object is removed. Workers never wait
//! for each other: a mount pod starts while the worker of the pod that needs it waits for its
//! volume.

mod container_ids;
mod deadline;
mod enforced_limits;
mod failed;
mod hooks;
mod images;
mod messages;
mod own_files;
mod probes;
mod pull_secrets;
mod replaced;
mod resize;
mod stop;
mod sub_paths;
mod sync_pod;
mod termination;
mod tools;

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tracing::warn;

use crate::backoff::Backoff;
use crate::backoff::keyed::KeyedBackoff;
use crate::capacity::admission::{Admitted, Rejection, Room};
use crate::capacity::critical::is_critical;
use crate::capacity::preemption::{self, PREEMPTING};
use crate::objects::{EventType, Object, Pod, PodCondition, PodStatus, RestartPolicy, Time};
use crate::pod::resources;
use crate::pod_state::observed::Observed;
use crate::pod_state::plan::{self, Cause, Situation, Target};
use crate::pod_state::status::{DEVICE_CONTROL, DEVICE_CONTROL_MISSING, Sources, Waiting};
use crate::volumes::MountedVolumes;
use hooks::Call;
use messages::Messages;
use probes::{Asking, Probes};
use stop::{PreStop, PreStopped, Stopping};
use tools::IsSlow;

pub(crate) use own_files::FileWork;
pub(crate) use termination::tear_down_orphan;
pub(crate) use tools::{Starts, Tools, host_ip};

/// While other pods end.
const ROOM_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Worker {
    tools: Arc<Tools>,
    /// As admitted, with the last published status. Mostly the store's own, so that it is in memory once.
    pod: Arc<Pod>,
    wake: Arc<Notify>,
    /// Set once all are mounted; a restarted container uses them again.
    mounted: Option<MountedVolumes>,
    waiting: Waiting,
    messages: Messages,
    /// By container name.
    restarts: KeyedBackoff,
    /// By image.
    pulls: KeyedBackoff,
    /// Back-off of failed steps.
    retries: Backoff,
    probes: Probes,
    /// When the pod's activity began.
    started: Option<Time>,
    /// The pod's share of the node, until it has ended.
    admitted: Option<Admitted>,
    /// The pods that make room for this one, by uid, until they have ended.
    awaited: BTreeSet<String>,
    /// Ended containers that were stopped for another instance, by id; also on disk.
    replaced: BTreeSet<String>,
    resize_problem: Option<String>,
    pre_stopped: PreStopped,
    /// The container whose postStart hook runs, by id: it has not started yet.
    hooked: Option<String>,
    finished: bool,
    is_slow: IsSlow,
}

/// When to observe the pod again.
#[derive(Debug)]
enum Next {
    /// The pod must end: it was deleted, failed, or reached its deadline during the round.
    MustEnd,
    Finished,
    /// At the next event, or after this time at the latest.
    Within(Option<Duration>),
}

/// Events that a wait within a round took: when it ends, they wake the worker again. Without an event it
/// does not wake, so that a failed round waits as long as its back-off says.
#[derive(Debug)]
struct Taken<'a> {
    wake: &'a Notify,
    is_any: bool,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.is_any {
            self.wake.notify_one();
        }
    }
}

impl Worker {
    pub(crate) fn new(tools: Arc<Tools>, pod: Arc<Pod>, wake: Arc<Notify>) -> Self {
        let pod_dir = tools.volumes.pod_dir(&pod.metadata.uid);
        let asking = Asking {
            cri: tools.cri.clone(),
            sinks: tools.sinks.clone(),
            pod: pod.reference(),
            wake: Arc::clone(&wake),
        };
        Self {
            probes: Probes::new(asking, &pod_dir),
            started: None,
            admitted: None,
            awaited: BTreeSet::new(),
            replaced: replaced::read(&pod_dir),
            resize_problem: None,
            pre_stopped: PreStopped::default(),
            hooked: None,
            tools,
            pod,
            wake,
            mounted: None,
            waiting: Waiting::default(),
            messages: Messages::default(),
            restarts: KeyedBackoff::default(),
            pulls: KeyedBackoff::default(),
            retries: Backoff::new(Duration::from_secs(1), Duration::from_secs(10)),
            finished: false,
            is_slow: IsSlow::default(),
        }
    }

    pub(crate) async fn run(mut self) {
        while !self.is_deleted() {
            // The future is large and a pod mostly waits, so box it: it needs memory only while it
            // runs.
            match Box::pin(self.sync_once()).await {
                // The next round ends the pod.
                Next::MustEnd => {}
                Next::Finished => {
                    Box::pin(self.finish()).await;
                    // The stop of a failed pod may have taken the event of its deletion.
                    if !self.is_deleted() {
                        self.wake.notified().await;
                    }
                }
                Next::Within(None) => self.wake.notified().await,
                Next::Within(Some(pause)) => {
                    // Continue after an event and after the timeout.
                    let _elapsed = tokio::time::timeout(pause, self.wake.notified()).await;
                }
            }
        }
        Box::pin(self.terminate()).await;
    }

    async fn sync_once(&mut self) -> Next {
        if self.finished {
            return Next::Finished;
        }
        if self.is_failed() {
            return self.end_failed().await;
        }
        self.follow_changes();
        let observed = match self.observe().await {
            Ok(observed) => observed,
            Err(error) => {
                warn!(pod = self.pod.metadata.name, %error, "cannot observe the pod");
                return Next::Within(Some(self.retries.step()));
            }
        };
        if plan::has_ended_before(&self.pod, &observed) {
            return Next::Finished;
        }
        self.note_start(&observed);
        let plan = plan::run(&Situation {
            pod: &self.pod,
            observed: &observed,
            probes: &self.probes.results(),
            restarts: &self.restarts,
            replaced: &self.replaced,
            now: Time::now(),
        });
        // A pod that ended while no kubelet ran needs no room and has no deadline any more.
        let has_ended = plan == [plan::Action::Finish];
        if !has_ended && (!self.is_admitted(&observed) || self.fail_after_deadline()) {
            return self.end_failed().await;
        }
        if !has_ended && self.waits_for_room() {
            self.publish_status(&observed).await;
            return Next::Within(Some(ROOM_PAUSE));
        }
        self.forget_changes(&plan, &observed);
        match (self.carry_out(plan, &observed).await, self.until_deadline()) {
            (Next::Within(pause), Some(left)) => Next::Within(Some(pause.map_or(left, |p| p.min(left)))),
            (next, _) => next,
        }
    }

    /// What the runtime and the kernel say about the pod.
    async fn observe(&self) -> crate::clients::cri::Result<Observed> {
        let mut observed = Observed::of(&self.tools.cri, self.uid()).await?;
        let group = resources::cgroup_path(&self.tools.cgroup_root, &self.pod);
        enforced_limits::fill(&mut observed, &self.pod, &group);
        Ok(observed)
    }

    /// Takes the pod's share of the node; otherwise fails the pod. A pod that an earlier kubelet has
    /// started is not judged again.
    fn is_admitted(&mut self, observed: &Observed) -> bool {
        if self.admitted.is_some() {
            return true;
        }
        let has_run = !observed.sandboxes.is_empty() || !observed.containers.is_empty();
        let room = match self.tools.admission.admit(&self.pod, has_run) {
            Err(rejection) if !rejection.missing.is_empty() && is_critical(&self.pod) => self.preempt(),
            judged => judged,
        };
        match room {
            Ok(Room { admitted, awaited }) => {
                self.admitted = Some(admitted);
                self.awaited = awaited;
                true
            }
            Err(rejection) => {
                self.record(EventType::Warning, &rejection.reason, &rejection.message);
                let message = format!("Pod was rejected: {}", rejection.message);
                self.tools.store.fail_pod(self.uid(), &rejection.reason, &message);
                false
            }
        }
    }

    /// Has less important pods end, so that a critical pod has room.
    fn preempt(&self) -> Result<Room, Rejection> {
        let store = &self.tools.store;
        let mut failed = Vec::new();
        let room = self.tools.admission.preempt(
            &self.pod,
            || store.pods(),
            |victim| {
                // One that is not failed here has ended or failed meanwhile: it frees its share as well.
                if store.fail_pod(&victim.metadata.uid, PREEMPTING, preemption::MESSAGE) {
                    failed.push(victim.reference());
                }
            },
        );
        for victim in failed {
            self.tools.sinks.record(&victim, EventType::Warning, PREEMPTING, preemption::MESSAGE);
        }
        room
    }

    /// Whether pods that make room for this one have not ended yet.
    fn waits_for_room(&mut self) -> bool {
        if !self.awaited.is_empty() {
            let holders = self.tools.admission.holders();
            self.awaited.retain(|uid| holders.contains(uid));
        }
        !self.awaited.is_empty()
    }

    /// Once the pod's containers have ended, as with kubelet: its volumes may need a critical pod that waits
    /// for this room.
    fn release_share(&mut self) {
        self.admitted = None;
        self.tools.admission.release(self.uid());
    }

    fn uid(&self) -> &str {
        &self.pod.metadata.uid
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.pod.metadata.namespace, self.pod.metadata.name)
    }

    /// Also true if the object is gone or belongs to a successor.
    fn is_deleted(&self) -> bool {
        let metadata = &self.pod.metadata;
        let known = self.tools.store.pod(&metadata.namespace, &metadata.name);
        known.is_none_or(|pod| pod.metadata.uid != metadata.uid || pod.metadata.is_deleted())
    }

    async fn until_deleted(&self) {
        while !self.is_deleted() {
            self.wake.notified().await;
        }
    }

    /// Whether the pod's round must stop: the pod is deleted, failed, or past its deadline.
    fn must_end(&self) -> bool {
        self.is_deleted() || self.is_failed() || self.until_deadline().is_some_and(|left| left.is_zero())
    }

    /// Waits until the pod must end. Other events that it takes wake the worker again afterwards.
    async fn until_end(&self) {
        let mut taken = Taken { wake: &self.wake, is_any: false };
        while !self.must_end() {
            let left = self.until_deadline().unwrap_or(Duration::MAX);
            taken.is_any |= tokio::time::timeout(left, self.wake.notified()).await.is_ok();
        }
    }

    /// Waits for `work`, and publishes the pod at each event; `None` if the pod must end first. The events wake
    /// the worker again afterwards.
    async fn unless_ended<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let wake = Arc::clone(&self.wake);
        let mut taken = Taken { wake: &wake, is_any: false };
        let mut work = pin!(work);
        while !self.must_end() {
            if taken.is_any {
                self.publish_now().await;
            }
            let left = self.until_deadline().unwrap_or(Duration::MAX);
            tokio::select! {
                done = &mut work => return Some(done),
                () = wake.notified() => taken.is_any = true,
                () = tokio::time::sleep(left) => {}
            }
        }
        None
    }

    async fn publish_status(&mut self, observed: &Observed) {
        self.messages.read_new(&self.tools, &self.pod, observed).await;
        self.probes.follow(&self.pod, observed, &self.tools.host_ip);
        let status = Sources {
            pod: &self.pod,
            observed,
            waiting: &self.waiting,
            probes: &self.probes.results(),
            termination_messages: self.messages.by_container_id(),
            replaced: &self.replaced,
            resize_problem: self.resize_problem.as_deref(),
            runtime_name: &self.tools.runtime_name,
            host_ip: &self.tools.host_ip,
            now: crate::objects::now(),
        }
        .status();
        let missing = |conditions: &[PodCondition]| {
            conditions.iter().find(|c| c.condition_type == DEVICE_CONTROL).map(|c| c.message.clone())
        };
        if let Some(message) = missing(&status.conditions)
            && missing(&self.pod.status.conditions).is_none()
        {
            self.record(EventType::Warning, DEVICE_CONTROL_MISSING, &message);
        }
        self.tools.sinks.set_pod_status(&self.pod.reference(), &status);
        let is_new = self.pod.status.start_time.is_none();
        self.keep_status(status);
        if is_new && self.pod.spec.active_deadline_seconds.is_some() {
            // The deadline counts from here, also if a restart of the kubelet comes before the first sandbox. On a full
            // disk it then begins anew.
            self.tools.store.keep_pod_status(self.uid());
        }
    }

    fn keep_status(&mut self, status: PodStatus) {
        let own = &*self.pod;
        let known = self.tools.store.pod(&own.metadata.namespace, &own.metadata.name);
        let is_same =
            |known: &Pod| known.metadata == own.metadata && known.spec == own.spec && known.status == status;
        match known.filter(|known| is_same(known)) {
            Some(known) => self.pod = known,
            None => Arc::make_mut(&mut self.pod).status = status,
        }
    }

    /// Records an event for each kill.
    fn announce(&self, targets: &[Target]) {
        for target in targets {
            let name = &target.name;
            let message = match target.cause {
                Cause::End | Cause::SandboxLost => format!("Stopping container {name}"),
                Cause::Changed => format!("Container {name} definition changed, will be restarted"),
                Cause::Resized => format!("Container {name} resize requires restart, will be restarted"),
                Cause::Probe(kind) => {
                    let kind = kind.as_str().to_lowercase();
                    let restarts = self.pod.spec.restart_policy != RestartPolicy::Never
                        || self.pod.spec.container_named(name).is_some_and(|c| c.is_sidecar());
                    let then = if restarts { ", will be restarted" } else { "" };
                    format!("Container {name} failed {kind} probe{then}")
                }
            };
            self.record(EventType::Normal, "Killing", &message);
        }
    }

    /// Stops containers with their preStop hooks.
    fn stopping(
        &self,
        targets: &[Target],
        grace: Duration,
    ) -> impl Future<Output = crate::clients::cri::Result<()>> + use<> {
        let mut all = Vec::new();
        for target in targets {
            let container = self.pod.spec.container_named(&target.name);
            let hook = container.and_then(|c| Some((c, c.lifecycle.as_ref()?.pre_stop.as_ref()?)));
            let hook = hook.filter(|_| !self.pre_stopped.contains(&target.id));
            let pre_stop = hook.map(|(container, hook)| {
                let call = Call {
                    cri: self.tools.cri.clone(),
                    hook: hook.clone(),
                    container: container.clone(),
                    id: target.id.clone(),
                    pod_ip: self.pod.status.pod_ip.clone(),
                };
                PreStop { call, ended: self.pre_stopped.clone() }
            });
            all.push(Stopping {
                target: target.clone(),
                pre_stop,
                rank: stop::rank(&self.pod, &target.name),
            });
        }
        stop::stop_all(Arc::clone(&self.tools), self.pod.reference(), all, grace)
    }

    fn record(&self, event_type: EventType, reason: &str, message: &str) {
        self.tools.sinks.record(&self.pod.reference(), event_type, reason, message);
    }
}

/// Whether the containers of an earlier kubelet's pod have ended for good: it holds no share of the node.
pub(crate) async fn has_ended(tools: &Tools, pod: &Pod) -> bool {
    let uid = &pod.metadata.uid;
    if pod.spec.restart_policy == RestartPolicy::Always {
        return false;
    }
    let Ok(observed) = Observed::of(&tools.cri, uid).await else { return false };
    let pod_dir = tools.volumes.pod_dir(uid);
    let situation = Situation {
        pod,
        observed: &observed,
        probes: &probes::kept_results(&pod_dir),
        restarts: &KeyedBackoff::default(),
        replaced: &replaced::read(&pod_dir),
        now: Time::now(),
    };
    plan::run(&situation) == [plan::Action::Finish]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::PodPhase;
    use crate::store::{EVICTED, Source, Store};

    /// The worker of a pod whose volume waits for a Secret.
    fn worker(root: &std::path::Path) -> Worker {
        let store = Store::open(root, "node").unwrap();
        let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n\
                   spec: {activeDeadlineSeconds: 3600, containers: [{name: c, image: demo}],\
                   volumes: [{name: v, secret: {secretName: absent}}]}\n";
        let parsed = crate::manifest::parse(pod.as_bytes(), "test.yaml");
        assert_eq!(parsed.errors, []);
        for object in parsed.manifests {
            store.apply(object.described(), Source::Api).unwrap();
        }
        let tools = Tools::of_test(root, std::path::Path::new("/none"), store.clone());
        let pod = store.pods().remove(0);
        let mut worker = Worker::new(Arc::new(tools), pod, Arc::default());
        worker.started = Some(Time::now());
        worker
    }

    #[tokio::test]
    async fn a_changed_image_resets_the_back_off_of_its_container_also_if_it_changes_back() {
        let root = tempfile::tempdir().unwrap();
        let mut worker = worker(root.path());
        let apply = |worker: &mut Worker, change: &dyn Fn(&mut Pod)| {
            let mut pod = (*worker.tools.store.pods().remove(0)).clone();
            change(&mut pod);
            let text = serde_json::to_vec(&pod).unwrap();
            let parsed = crate::manifest::parse(&text, "test.json");
            assert_eq!(parsed.errors, []);
            for object in parsed.manifests {
                worker.tools.store.apply(object.described(), Source::Api).unwrap();
            }
            worker.follow_changes();
        };
        let image =
            |image: &'static str| move |pod: &mut Pod| pod.spec.containers[0].image = image.to_owned();
        let now = Time::now();
        let crash = |worker: &mut Worker| worker.restarts.step("c", now, now);
        crash(&mut worker);
        apply(&mut worker, &|pod| pod.metadata.labels = [("a".to_owned(), "b".to_owned())].into());
        assert_eq!(worker.pod.metadata.labels["a"], "b");
        apply(&mut worker, &image("demo"));
        assert_eq!(crash(&mut worker).as_secs(), 20, "the definition is the same");
        apply(&mut worker, &image("absent"));
        assert_eq!(worker.pod.spec.containers[0].image, "absent");
        assert_eq!(worker.restarts.remaining("c", now, now), None);
        crash(&mut worker);
        apply(&mut worker, &image("demo"));
        assert_eq!(worker.restarts.remaining("c", now, now), None);
    }

    async fn mount(worker: &mut Worker) -> Next {
        let observed = Observed::default();
        let mount = worker.carry_out(vec![plan::Action::MountVolumes], &observed);
        tokio::time::timeout(Duration::from_secs(20), mount).await.expect("the wait ends")
    }

    #[tokio::test]
    async fn an_eviction_ends_the_wait_for_volumes() {
        let root = tempfile::tempdir().unwrap();
        let mut worker = worker(root.path());
        let (store, wake) = (worker.tools.store.clone(), Arc::clone(&worker.wake));
        let uid = worker.uid().to_owned();
        let evict = async {
            let pause = Duration::from_millis(50);
            tokio::time::sleep(pause).await;
            // The event of another container.
            wake.notify_one();
            tokio::time::sleep(pause).await;
            assert!(store.fail_pod(&uid, EVICTED, "the disk is full"));
            wake.notify_one();
        };
        let (next, ()) = tokio::join!(mount(&mut worker), evict);
        assert!(matches!(next, Next::MustEnd), "{next:?}");
        let woken = tokio::time::timeout(Duration::from_secs(10), wake.notified()).await;
        woken.expect("the events that the wait took are not lost");
    }

    #[tokio::test]
    async fn the_deadline_ends_the_wait_for_volumes() {
        let root = tempfile::tempdir().unwrap();
        let mut worker = worker(root.path());
        Arc::make_mut(&mut worker.pod).spec.active_deadline_seconds = Some(1);
        let next = mount(&mut worker).await;
        assert!(matches!(next, Next::MustEnd), "{next:?}");
        assert!(worker.fail_after_deadline() && worker.is_failed());
    }

    #[tokio::test]
    async fn the_deadline_of_a_pod_without_a_sandbox_counts_from_its_start_over_a_restart() {
        let root = tempfile::tempdir().unwrap();
        let mut worker = worker(root.path());
        worker.publish_status(&Observed::default()).await;
        let start = worker.pod.status.start_time;
        assert!(start.is_some());
        drop(worker);
        let pod = Store::open(root.path(), "node").unwrap().pods().remove(0);
        assert_eq!(pod.status.start_time, start);
    }

    #[tokio::test]
    async fn a_pod_that_has_ended_does_not_fail_any_more() {
        for phase in [PodPhase::Succeeded, PodPhase::Failed] {
            let root = tempfile::tempdir().unwrap();
            let mut worker = worker(root.path());
            worker.started = Some(Time::UNIX_EPOCH);
            assert!(worker.must_end());
            Arc::make_mut(&mut worker.pod).status.phase = phase;
            let (store, uid) = (worker.tools.store.clone(), worker.uid().to_owned());
            store.set_pod_status(&uid, worker.pod.status.clone());
            assert!(!store.fail_pod(&uid, EVICTED, "the disk is full"), "{phase:?}");
            assert!(!worker.fail_after_deadline() && !worker.must_end(), "{phase:?}");
        }
    }

    #[tokio::test]
    async fn a_pod_with_its_published_status_is_in_memory_once() {
        let root = tempfile::tempdir().unwrap();
        let mut worker = worker(root.path());
        worker.publish_status(&Observed::default()).await;
        let (store, uid) = (worker.tools.store.clone(), worker.uid().to_owned());
        let known = store.pods().remove(0);
        assert!(Arc::ptr_eq(&worker.pod, &known), "{:?} and {known:?}", worker.pod);
        // Another's change is not taken for a status that the worker has published.
        assert!(store.fail_pod(&uid, EVICTED, "the disk is full"));
        let known = store.pods().remove(0);
        assert_ne!(worker.pod.status, known.status);
        worker.publish_status(&Observed::default()).await;
        assert_eq!(store.pod_status(&uid).unwrap().reason, EVICTED);
        assert_ne!(worker.pod.status.reason, EVICTED);
    }

    #[tokio::test]
    async fn a_pod_with_nothing_left_to_start_fails_unless_it_has_ended() {
        let root = tempfile::tempdir().unwrap();
        let mut worker = worker(root.path());
        Arc::make_mut(&mut worker.pod).status.phase = PodPhase::Succeeded;
        assert!(!worker.fail_unfinished());
        Arc::make_mut(&mut worker.pod).status.phase = PodPhase::Pending;
        assert!(!worker.is_failed() && worker.fail_unfinished() && worker.is_failed());
        assert_eq!(worker.tools.store.pods()[0].status.reason, "SandboxLost");
    }

    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_waiting_pod_uses_little_memory() {
        let bytes = size_of_future(Worker::run);
        assert!(bytes < 4096, "{bytes}");
    }
}
