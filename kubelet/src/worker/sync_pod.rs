//! From the plan to running containers: cgroup and directories, volumes,
//! sandbox, containers. Each step finds what an earlier try left.

use std::sync::Arc;
use std::time::Duration;

use proto::cri;
use tracing::{Instrument, info_span};

use super::images::NotYet;
use super::{Next, Worker};
use crate::container_config::{self, Instance};
use crate::environment::PodFacts;
use crate::etc_hosts::{self, Hosts};
use crate::objects::{Container, ContainerStateWaiting, EventType, Time};
use crate::observed::{Observed, instance_of, pod_ips};
use crate::plan::{Sandbox, Start, Steps, Wait, restart_key};

/// A step failed; its event is recorded.
#[derive(Debug)]
struct Failed;

/// The sandbox to start containers in.
#[derive(Debug)]
struct ReadySandbox {
    id: String,
    config: cri::PodSandboxConfig,
    facts: PodFacts,
}

impl Worker {
    pub(super) async fn carry_out(&mut self, steps: Steps, observed: Observed) -> Next {
        let soonest = steps.wait.iter().map(|w| w.remaining).min();
        for wait in &steps.wait {
            self.note_crash_loop(wait);
        }
        self.publish_status(&observed).await;
        if steps.start.is_empty() {
            return Next::Within(soonest);
        }
        let span =
            info_span!("sync_pod", pod = self.pod.metadata.name, namespace = self.pod.metadata.namespace);
        let next = self.start(&steps, &observed).instrument(span).await;
        if !matches!(next, Next::Deleted) {
            self.publish_now().await;
        }
        match (next, soonest) {
            (Next::Within(retry), Some(wait)) => Next::Within(Some(retry.map_or(wait, |r| r.min(wait)))),
            (next, _) => next,
        }
    }

    async fn start(&mut self, steps: &Steps, observed: &Observed) -> Next {
        if self.prepare().is_err() {
            return Next::Within(Some(self.retries.step()));
        }
        if self.mounted.is_none() {
            let pod = Arc::new(self.pod.clone());
            let mounted = tokio::select! {
                mounted = self.tools.volumes.mount_pod(&pod) => mounted,
                () = self.until_deleted() => return Next::Deleted,
            };
            self.mounted = Some(mounted);
        }
        let Ok(sandbox) = self.ensure_sandbox(&steps.sandbox, observed).await else {
            return Next::Within(Some(self.retries.step()));
        };
        let mut retry: Option<Duration> = None;
        for (position, start) in steps.start.iter().enumerate() {
            if self.is_deleted() {
                return Next::Deleted;
            }
            if position > 0 {
                // The next one's image may take its time: show what runs already.
                self.publish_now().await;
            }
            let container = self.pod.spec.containers[start.container].clone();
            match self.start_container(&container, start, &sandbox, observed).await {
                Ok(()) => drop(self.waiting.remove(&container.name)),
                Err(NotYet { why, retry: after }) => {
                    let after = after.unwrap_or_else(|| self.retries.step());
                    retry = Some(retry.map_or(after, |r| r.min(after)));
                    self.waiting.insert(container.name, why);
                }
            }
        }
        if retry.is_none() {
            self.retries.reset();
        }
        Next::Within(retry)
    }

    async fn publish_now(&mut self) {
        if let Ok(observed) = Observed::of(&self.tools.cri, self.uid()).await {
            self.publish_status(&observed).await;
        }
    }

    fn note_crash_loop(&mut self, wait: &Wait) {
        let metadata = &self.pod.metadata;
        let name = &self.pod.spec.containers[wait.container].name;
        let pause = self.restarts.pause(&restart_key(name)).as_secs();
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

    /// The pod's cgroup and directories.
    fn prepare(&self) -> Result<(), Failed> {
        if let Err(error) = self.tools.ensure_pod_cgroup(&self.pod) {
            let message = format!("unable to ensure pod cgroup exists: {}", trace::error_chain(&error));
            return Err(self.failed("FailedCreatePodContainer", &message));
        }
        let logs = container_config::log_directory(&self.tools.log_dir, &self.pod.metadata);
        for dir in [self.tools.volumes.pod_dir(self.uid()), logs] {
            if let Err(error) = std::fs::create_dir_all(&dir) {
                return Err(self.failed("Failed", &format!("create directory {}: {error}", dir.display())));
            }
        }
        Ok(())
    }

    async fn ensure_sandbox(&self, wanted: &Sandbox, observed: &Observed) -> Result<ReadySandbox, Failed> {
        let attempt = match wanted {
            Sandbox::Create { attempt } => *attempt,
            Sandbox::Keep { .. } => observed.sandboxes.first().map_or(0, crate::observed::attempt_of),
        };
        let config = container_config::sandbox(&self.pod, attempt, self.tools.node())
            .map_err(|e| self.failed("FailedCreatePodSandBox", &trace::error_chain(&e)))?;
        let id = match wanted {
            Sandbox::Keep { id } => id.clone(),
            Sandbox::Create { .. } => {
                self.remove_old_sandboxes(observed).await?;
                let _turn = self.tools.starts.turn(&self.pod, &self.is_slow).await;
                self.tools.cri.run_pod_sandbox(config.clone()).await.map_err(|e| {
                    let message = format!("Failed to create pod sandbox: {e}");
                    self.failed("FailedCreatePodSandBox", &message)
                })?
            }
        };
        let status = self.tools.cri.pod_sandbox_status(&id).await;
        let status = status.map_err(|e| self.failed("FailedPodSandBoxStatus", &e.to_string()))?;
        let own_ips = status.as_ref().map(pod_ips).unwrap_or_default();
        let host_ip = self.tools.host_ip.clone();
        let pod_ips = if self.pod.spec.host_network { vec![host_ip.clone()] } else { own_ips };
        let facts = PodFacts { node_name: self.tools.node_name.clone(), host_ip, pod_ips };
        Ok(ReadySandbox { id, config, facts })
    }

    /// Their containers stay: they are the record of what has run.
    async fn remove_old_sandboxes(&self, observed: &Observed) -> Result<(), Failed> {
        for sandbox in &observed.sandboxes {
            self.record(
                EventType::Normal,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
            let stopped = self.tools.cri.stop_pod_sandbox(&sandbox.id, &self.full_name()).await;
            stopped.map_err(|e| self.failed("FailedKillPod", &e.to_string()))?;
        }
        Ok(())
    }

    async fn start_container(
        &mut self,
        container: &Container,
        start: &Start,
        sandbox: &ReadySandbox,
        observed: &Observed,
    ) -> Result<(), NotYet> {
        let image = self.ensure_image(container, &sandbox.config).await?;
        self.remove_old_instances(container, observed).await;
        let config = self.configure(container, start, &image, &sandbox.facts).map_err(|message| {
            self.record(EventType::Warning, "Failed", &format!("Error: {message}"));
            NotYet::new("CreateContainerConfigError", message)
        })?;
        let turn = self.tools.starts.turn(&self.pod, &self.is_slow).await;
        let created = self.tools.cri.create_container(&sandbox.id, config, sandbox.config.clone()).await;
        let id = created.map_err(|e| self.container_failed("CreateContainerError", e.message))?;
        self.record(EventType::Normal, "Created", &format!("Container created: {}", container.name));
        if let Some(ended) = start.after {
            self.restarts.step(&restart_key(&container.name), ended, Time::now());
        }
        let started =
            self.tools.cri.start_container(&id, &format!("{}/{}", self.full_name(), container.name)).await;
        drop(turn);
        started.map_err(|e| self.container_failed("RunContainerError", e.message))?;
        self.record(EventType::Normal, "Started", &format!("Container started: {}", container.name));
        Ok(())
    }

    fn configure(
        &self,
        container: &Container,
        start: &Start,
        image: &cri::Image,
        facts: &PodFacts,
    ) -> Result<cri::ContainerConfig, String> {
        let files = self.tools.own_files(self.uid(), &container.name, start.restart_count);
        files.make(&self.etc_hosts(facts)).map_err(|e| format!("make the container's own files: {e}"))?;
        let empty = crate::volumes::MountedVolumes::new();
        let instance = Instance {
            pod: &self.pod,
            container,
            restart_count: start.restart_count,
            image,
            volumes: self.mounted.as_ref().unwrap_or(&empty),
            facts,
            etc_hosts: &files.etc_hosts,
            termination_log: &files.termination_log,
        };
        container_config::container(&instance, self.tools.node()).map_err(|e| trace::error_chain(&e))
    }

    fn etc_hosts(&self, facts: &PodFacts) -> String {
        if self.pod.spec.host_network {
            return etc_hosts::host_network(&std::fs::read_to_string("/etc/hosts").unwrap_or_default());
        }
        Hosts {
            pod_ips: facts.pod_ips.iter().filter_map(|ip| ip.parse().ok()).collect(),
            hostname: container_config::hostname(&self.pod, &self.tools.node_name),
        }
        .managed()
    }

    /// All but the newest that ended; and what was created and never started.
    async fn remove_old_instances(&self, container: &Container, observed: &Observed) {
        let mut keep = 1;
        for instance in observed.instances(&container.name) {
            let ended = instance.state() == cri::ContainerState::ContainerExited;
            if ended && keep > 0 {
                keep -= 1;
                continue;
            }
            let which = (container.name.as_str(), instance_of(instance));
            if let Err(error) = self.tools.remove_instance(&self.pod.metadata, &instance.id, which).await {
                tracing::warn!(%error, "an old instance of a container stays");
            }
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
