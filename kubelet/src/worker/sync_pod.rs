//! Executes a plan, action by action: cgroup and directories, volumes, sandbox, containers. Each
//! action reuses the results of an earlier attempt.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use proto::cri;
use tracing::{Instrument, info_span, warn};

use super::hooks::Call;
use super::images::NotYet;
use super::{Next, Worker};
use crate::container_config::etc_hosts::{self, Hosts};
use crate::container_config::{self, Instance};
use crate::logs::log_directory;
use crate::objects::{Container, ContainerStateWaiting, EventType, Time};
use crate::pod::fields::PodFacts;
use crate::pod::names::PodNames;
use crate::pod_state::observed::{Observed, pod_ips};
use crate::pod_state::plan::{self, Action, Cause, Start, Target};

/// An action of the pod failed and has recorded its event.
#[derive(Debug)]
pub(super) struct Failed;

/// Why a round stops early.
#[derive(Debug)]
enum Stop {
    /// The pod must end: it was deleted, failed, or reached its deadline during the round.
    MustEnd,
    Finished,
    Pod(Failed),
    /// Only this container cannot start.
    Container(NotYet),
}

impl From<Failed> for Stop {
    fn from(failed: Failed) -> Self {
        Self::Pod(failed)
    }
}

impl From<NotYet> for Stop {
    fn from(why: NotYet) -> Self {
        Self::Container(why)
    }
}

/// Results of earlier actions of a plan for later ones.
#[derive(Debug, Default)]
struct Round {
    sandbox: Option<ReadySandbox>,
    /// The image of the current container.
    image: Option<cri::Image>,
    /// How many containers have been started so far.
    begun: usize,
    /// This container does not start in this round.
    failed: Option<plan::Container>,
    /// The shortest delay until a retry.
    retry: Option<Duration>,
    /// Whether the round has started an init container: the next may be due.
    has_begun_init: bool,
}

impl Round {
    fn sandbox(&self) -> &ReadySandbox {
        self.sandbox.as_ref().expect("a plan has its sandbox before its containers")
    }
}

/// The sandbox for the containers.
#[derive(Debug)]
struct ReadySandbox {
    id: String,
    config: cri::PodSandboxConfig,
    facts: PodFacts,
}

impl Worker {
    /// For a pod that must run.
    pub(super) async fn carry_out(&mut self, plan: Vec<Action>, observed: &Observed) -> Next {
        let mut soonest: Option<Duration> = None;
        let mut actions = plan.as_slice();
        while let [Action::BackOff { container, remaining }, rest @ ..] = actions {
            self.note_crash_loop(*container);
            soonest = Some(soonest.map_or(*remaining, |s| s.min(*remaining)));
            actions = rest;
        }
        if actions == [Action::Finish] {
            self.waiting.clear();
        }
        self.publish_status(observed).await;
        if actions == [Action::Finish] && self.fail_unfinished() {
            return Next::MustEnd;
        }
        if actions.is_empty() {
            return Next::Within(soonest);
        }
        let span =
            info_span!("sync_pod", pod = self.pod.metadata.name, namespace = self.pod.metadata.namespace);
        let next = self.act(actions).instrument(span).await;
        if matches!(next, Next::Within(_)) {
            self.publish_now().await;
        }
        match (next, soonest) {
            (Next::Within(retry), Some(wait)) => Next::Within(Some(retry.map_or(wait, |r| r.min(wait)))),
            (next, _) => next,
        }
    }

    async fn act(&mut self, actions: &[Action]) -> Next {
        let mut round = Round::default();
        for action in actions {
            if self.must_end() {
                return Next::MustEnd;
            }
            let container = action.container();
            if container.is_some() && container == round.failed {
                continue;
            }
            match self.carry_out_one(action, &mut round).await {
                Ok(()) => {}
                Err(Stop::MustEnd) => return Next::MustEnd,
                Err(Stop::Finished) => return Next::Finished,
                Err(Stop::Pod(Failed)) => return Next::Within(Some(self.retries.step())),
                Err(Stop::Container(NotYet { why, retry })) => {
                    let retry = retry.unwrap_or_else(|| self.retries.step());
                    round.retry = Some(round.retry.map_or(retry, |r| r.min(retry)));
                    round.failed = container;
                    if let Some(container) = container {
                        self.waiting.insert(self.pod.spec.container_at(container).name.clone(), why);
                    }
                }
            }
        }
        if round.retry.is_none() {
            self.retries.reset();
        }
        if round.has_begun_init {
            return Next::Within(Some(Duration::ZERO));
        }
        Next::Within(round.retry)
    }

    async fn carry_out_one(&mut self, action: &Action, round: &mut Round) -> Result<(), Stop> {
        match action {
            Action::BackOff { container, .. } => self.note_crash_loop(*container),
            Action::Prepare => self.prepare()?,
            Action::MountVolumes => self.mount_volumes().await?,
            Action::StopSandbox { id } => self.stop_old_sandbox(id).await?,
            Action::RemoveSandbox { id } => self.remove_old_sandbox(id).await,
            Action::CreateSandbox { attempt } => round.sandbox = Some(self.create_sandbox(*attempt).await?),
            Action::EnterSandbox { id, attempt } => {
                let config = self.sandbox_config(*attempt)?;
                round.sandbox = Some(self.ready_sandbox(id.clone(), config).await?);
            }
            Action::PullImage { container } => {
                if round.begun > 0 {
                    // This pull may take long: publish the running containers first.
                    self.publish_now().await;
                }
                round.begun += 1;
                let container = self.pod.spec.container_at(*container).clone();
                round.image = Some(self.ensure_image(&container, &round.sandbox().config).await?);
            }
            Action::Remove { container, id, number } => self.remove_instance(*container, id, *number).await,
            Action::Start(start) => {
                let container = self.pod.spec.container_at(start.container).clone();
                let image = round.image.take().expect("a plan has an image before its container");
                self.start_container(&container, start, &image, round.sandbox()).await?;
                self.waiting.remove(&container.name);
                round.has_begun_init |= start.container < self.pod.spec.init_containers.len();
            }
            Action::Resize { containers } => {
                if let Some(retry) = self.resize(containers).await {
                    round.retry = Some(round.retry.map_or(retry, |r| r.min(retry)));
                }
            }
            Action::Kill { targets, grace } => {
                let dir = self.tools.volumes.pod_dir(self.uid());
                super::replaced::add(&mut self.replaced, targets, &dir)
                    .map_err(|error| self.failed("FailedKillPod", &linux::chain(&error)))?;
                self.probes.note_kills(targets);
                self.kill(targets, *grace).await?;
            }
            Action::Finish => return Err(Stop::Finished),
        }
        Ok(())
    }

    async fn mount_volumes(&mut self) -> Result<(), Stop> {
        if self.mounted.is_none() {
            let pod = Arc::clone(&self.pod);
            let mounted = tokio::select! {
                mounted = self.tools.volumes.mount_pod(&pod) => Some(mounted),
                () = self.until_end() => None,
            };
            self.mounted = Some(mounted.ok_or(Stop::MustEnd)?);
        }
        Ok(())
    }

    pub(super) async fn publish_now(&mut self) {
        if let Ok(mut observed) = self.observe().await {
            // As with kubelet.
            for container in &mut observed.containers {
                if self.hooked.as_ref() == Some(&container.id) {
                    container.set_state(cri::ContainerState::ContainerCreated);
                }
            }
            self.publish_status(&observed).await;
        }
    }

    fn note_crash_loop(&mut self, container: plan::Container) {
        let metadata = &self.pod.metadata;
        let container = self.pod.spec.container_at(container);
        let name = &container.name;
        let pause = self.restarts.pause(name).as_secs();
        let of = format!("{}_{}({})", metadata.name, metadata.namespace, metadata.uid);
        let why = ContainerStateWaiting {
            reason: "CrashLoopBackOff".to_owned(),
            message: format!("back-off {pause}s restarting failed container={name} pod={of}"),
        };
        let event = format!("Back-off restarting failed container {name} in pod {of}");
        if self.waiting.get(name) != Some(&why) {
            self.record(EventType::Warning, "BackOff", &event);
        }
        self.waiting.insert(name.clone(), why);
    }

    /// Creates the pod's cgroup and directories.
    fn prepare(&self) -> Result<(), Failed> {
        if let Err(error) = self.tools.ensure_pod_cgroup(&self.pod) {
            let message = format!("unable to ensure pod cgroup exists: {}", linux::chain(&error));
            return Err(self.failed("FailedCreatePodContainer", &message));
        }
        let logs = log_directory(&self.tools.log_dir, &self.pod.metadata);
        for dir in [self.tools.volumes.pod_dir(self.uid()), logs] {
            if let Err(error) = std::fs::create_dir_all(&dir) {
                return Err(self.failed("Failed", &format!("create directory {}: {error}", dir.display())));
            }
        }
        Ok(())
    }

    async fn create_sandbox(&self, attempt: u32) -> Result<ReadySandbox, Failed> {
        let config = self.sandbox_config(attempt)?;
        let permit = self.tools.starts.permit(&self.pod, &self.is_slow).await;
        let created = self.tools.cri.run_pod_sandbox(config.clone()).await;
        drop(permit);
        let id = created.map_err(|e| {
            self.failed("FailedCreatePodSandBox", &format!("Failed to create pod sandbox: {e}"))
        })?;
        self.ready_sandbox(id, config).await
    }

    fn sandbox_config(&self, attempt: u32) -> Result<cri::PodSandboxConfig, Failed> {
        container_config::sandbox(&self.pod, attempt, self.tools.node())
            .map_err(|e| self.failed("FailedCreatePodSandBox", &linux::chain(&e)))
    }

    async fn ready_sandbox(&self, id: String, config: cri::PodSandboxConfig) -> Result<ReadySandbox, Failed> {
        let status = self.tools.cri.pod_sandbox_status(&id).await;
        let status = status.map_err(|e| self.failed("FailedPodSandBoxStatus", &e.to_string()))?;
        let own_ips = status.as_ref().map(pod_ips).unwrap_or_default();
        let host_ip = self.tools.host_ip.clone();
        let pod_ips = if self.pod.spec.host_network { vec![host_ip.clone()] } else { own_ips };
        let facts = PodFacts { node_name: self.tools.node_name.clone(), host_ip, pod_ips };
        Ok(ReadySandbox { id, config, facts })
    }

    async fn stop_old_sandbox(&self, id: &str) -> Result<(), Failed> {
        let message = "Pod sandbox changed, it will be killed and re-created.";
        self.record(EventType::Normal, "SandboxChanged", message);
        let stopped = self.tools.cri.stop_pod_sandbox(id, &self.full_name()).await;
        stopped.map_err(|e| self.failed("FailedKillPod", &e.to_string()))
    }

    /// The pod starts also if it stays.
    async fn remove_old_sandbox(&self, id: &str) {
        if let Err(error) = self.tools.cri.remove_pod_sandbox(id, &self.full_name()).await {
            warn!(%error, "an old sandbox of the pod was not removed");
        }
    }

    async fn start_container(
        &mut self,
        container: &Container,
        start: &Start,
        image: &cri::Image,
        sandbox: &ReadySandbox,
    ) -> Result<(), NotYet> {
        let config = self.configure(container, start, image, &sandbox.facts).await.map_err(|message| {
            self.record(EventType::Warning, "Failed", &format!("Error: {message}"));
            NotYet::new("CreateContainerConfigError", message)
        })?;
        let permit = self.tools.starts.permit(&self.pod, &self.is_slow).await;
        let created = self.tools.cri.create_container(&sandbox.id, config, sandbox.config.clone()).await;
        let id = created.map_err(|e| self.container_failed("CreateContainerError", e.message))?;
        self.record(EventType::Normal, "Created", &format!("Container created: {}", container.name));
        if let Some(ended) = start.after {
            self.restarts.step(&container.name, ended, Time::now());
        }
        let started =
            self.tools.cri.start_container(&id, &format!("{}/{}", self.full_name(), container.name)).await;
        drop(permit);
        started.map_err(|e| self.container_failed("RunContainerError", e.message))?;
        self.record(EventType::Normal, "Started", &format!("Container started: {}", container.name));
        self.check_stop_signal(container, &id).await;
        self.run_post_start(container, &id, &sandbox.facts).await
    }

    /// A runtime that does not know stop signals, such as containerd 1.6, ignores them and reports none.
    async fn check_stop_signal(&self, container: &Container, id: &str) {
        let signal = container.stop_signal();
        if signal.is_empty() {
            return;
        }
        if let Ok(Some(status)) = self.tools.cri.container_status(id).await
            && status.stop_signal() == cri::Signal::RuntimeDefault
        {
            let name = &container.name;
            let message = format!(
                "Container {name}: the container runtime does not support stopSignal {signal}: it sends the image's \
                 signal, or SIGTERM"
            );
            self.record(EventType::Warning, "UnsupportedStopSignal", &message);
        }
    }

    /// A failure ends the container. The hook may hang: it ends with the pod.
    async fn run_post_start(
        &mut self,
        container: &Container,
        id: &str,
        facts: &PodFacts,
    ) -> Result<(), NotYet> {
        let hook = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.post_start.clone());
        let Some(hook) = hook else { return Ok(()) };
        let pod_ip = facts.pod_ips.first().cloned().unwrap_or_default();
        let cri = self.tools.cri.clone();
        let call = Call { cri, hook, container: container.clone(), id: id.to_owned(), pod_ip };
        self.hooked = Some(id.to_owned());
        let outcome = self.unless_ended(call.run()).await;
        self.hooked = None;
        let Some(Err(why)) = outcome else { return Ok(()) };
        let message = format!("PostStartHook of container {} failed: {why}", container.name);
        self.record(EventType::Warning, "FailedPostStartHook", &message);
        let full_name = format!("{}/{}", self.full_name(), container.name);
        let (id, name) = (call.id, container.name.clone());
        let target = Target { id, name, full_name, cause: Cause::End, grace: None };
        let grace = Duration::from_secs(self.pod.spec.termination_grace_period_seconds);
        // An error has its event, and the container is stopped with the pod at the latest.
        let _stopped_or_deleted = self.kill(&[target], grace).await;
        Err(NotYet::new("PostStartHookError", message))
    }

    async fn configure(
        &self,
        container: &Container,
        start: &Start,
        image: &cri::Image,
        facts: &PodFacts,
    ) -> Result<cri::ContainerConfig, String> {
        let files = self.tools.own_files(self.uid(), &container.name, start.restart_count);
        files
            .make(&self.etc_hosts(facts))
            .map_err(|e| format!("create the container's /etc/hosts and termination log: {e}"))?;
        let sub_paths = self.mount_sub_paths(container, facts).await?;
        let empty = crate::volumes::MountedVolumes::new();
        let instance = Instance {
            pod: &self.pod,
            container,
            restart_count: start.restart_count,
            image,
            volumes: self.mounted.as_ref().unwrap_or(&empty),
            sub_paths: &sub_paths,
            facts,
            store: &self.tools.store,
            etc_hosts: &files.etc_hosts,
            termination_log: &files.termination_log,
        };
        container_config::container(&instance, self.tools.node()).map_err(|e| linux::chain(&e))
    }

    fn etc_hosts(&self, facts: &PodFacts) -> String {
        let own = if self.pod.spec.host_network {
            etc_hosts::host_network(&std::fs::read_to_string("/etc/hosts").unwrap_or_default())
        } else {
            let PodNames { hostname, domain } = PodNames::of(&self.pod, &self.tools.node_name);
            let pod_ips = facts.pod_ips.iter().filter_map(|ip| ip.parse().ok()).collect();
            Hosts { pod_ips, hostname, domain }.managed()
        };
        own + &etc_hosts::of_aliases(&self.pod.spec.host_aliases)
    }

    async fn remove_instance(&self, container: plan::Container, id: &str, number: u32) {
        let name = &self.pod.spec.container_at(container).name;
        if let Err(error) = self.tools.remove_instance(&self.pod.metadata, id, name, number).await {
            tracing::warn!(%error, "an old instance of a container was not removed");
        }
    }

    /// Stops containers of a pod that goes on, or has ended by itself.
    async fn kill(&mut self, targets: &[Target], grace: Duration) -> Result<(), Stop> {
        self.announce(targets);
        let mut stopping = pin!(self.stopping(targets, grace));
        loop {
            tokio::select! {
                stopped = &mut stopping => {
                    // The event of their end may have come during the wait.
                    self.wake.notify_one();
                    return stopped.map_err(|e| self.failed("FailedKillPod", &e.to_string()).into());
                }
                () = self.wake.notified() => {}
            }
            if self.is_deleted() || self.is_failed() {
                return Err(Stop::MustEnd);
            }
            self.publish_now().await;
        }
    }

    fn container_failed(&self, reason: &str, message: String) -> NotYet {
        self.record(EventType::Warning, "Failed", &format!("Error: {message}"));
        NotYet::new(reason, message)
    }

    fn failed(&self, reason: &str, message: &str) -> Failed {
        self.record(EventType::Warning, reason, message);
        Failed
    }
}
