//! Tears a pod down: containers, sandbox, volumes, cgroup, directories. Every step is retried until
//! it succeeds, so that nothing is left behind.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use proto::mount_pod::VOLUME_ID_ANNOTATION;
use tracing::warn;

use super::stop::{Stopping, stop_all};
use super::{Tools, Worker};
use crate::backoff::Backoff;
use crate::capacity::critical::is_mount_pod;
use crate::clients::cri::Cri;
use crate::logs::log_directory;
use crate::objects::{EventType, Object, ObjectRef, now};
use crate::pod_state::observed::Observed;
use crate::pod_state::plan::{self, Action, Target};
use crate::pod_state::status;

/// For a pod without an object.
const ORPHAN_GRACE: Duration = Duration::from_secs(1);

impl Worker {
    /// Releases the resources of a pod that ended by itself. Its status and logs stay until it is
    /// deleted.
    pub(super) async fn finish(&mut self) {
        if self.finished {
            return;
        }
        self.report_dead_daemon();
        let pod = self.pod.reference();
        self.stop_for_good().await;
        self.tools.volumes.unmount_pod(&pod).await;
        if let Err(error) = self.tools.remove_pod_cgroup(&pod.uid).await {
            warn!(error = linux::chain(&error), "cgroup of an ended pod not removed");
        }
        self.mounted = None;
        self.finished = true;
        // Without a start, an earlier kubelet has written it.
        if self.started.is_some() && !self.is_failed() {
            self.keep_end().await;
        }
    }

    /// Stops the sandboxes of a pod that has ended, and frees its room. Its status keeps their addresses.
    pub(super) async fn stop_for_good(&mut self) {
        let pod = self.pod.reference();
        stop_sandboxes(&self.tools, &pod).await;
        self.release_share();
        let mut status = self.pod.status.clone();
        if status::note_no_sandbox(&mut status, now()) {
            self.tools.sinks.set_pod_status(&pod, &status);
            self.keep_status(status);
        }
    }

    /// Writes for the next kubelet how the pod has ended. A full disk may have no space for that yet.
    pub(super) async fn keep_end(&self) {
        let mut backoff = Backoff::operation();
        while !self.tools.store.keep_pod_status(self.uid()) && !self.is_deleted() {
            let _elapsed = tokio::time::timeout(backoff.step(), self.wake.notified()).await;
        }
    }

    pub(super) async fn terminate(mut self) {
        let pod = self.pod.reference();
        self.follow_changes();
        self.probes.stop_restarts();
        self.stop_containers().await;
        if let Ok(observed) = Observed::of(&self.tools.cri, self.uid()).await {
            self.publish_status(&observed).await;
        }
        stop_sandboxes(&self.tools, &pod).await;
        self.release_share();
        tear_down(&self.tools, &pod).await;
        let logs = log_directory(&self.tools.log_dir, &self.pod.metadata);
        remove_logs(&logs);
        let mut backoff = Backoff::operation();
        while let Err(error) = self.tools.store.forget_pod(self.uid()) {
            warn!(pod = pod.name, error = linux::chain(&error), "cannot remove the pod from the store");
            tokio::time::sleep(backoff.step()).await;
        }
    }

    /// Stops all containers concurrently, each with the whole grace period. A shorter one set
    /// meanwhile starts at that time.
    async fn stop_containers(&mut self) {
        let mut backoff = Backoff::operation();
        let mut announced = false;
        loop {
            let observed = match Observed::of(&self.tools.cri, self.uid()).await {
                Ok(observed) => observed,
                Err(error) => {
                    self.record(EventType::Warning, "FailedKillPod", &error.to_string());
                    tokio::time::sleep(backoff.step()).await;
                    continue;
                }
            };
            if self.pod.status.pod_ip.is_empty() {
                // An earlier kubelet started the pod: the hooks of its containers need its address.
                self.publish_status(&observed).await;
            }
            let plan = plan::end(&observed, self.grace());
            let [Action::Kill { targets, grace }] = plan.as_slice() else { return };
            if !std::mem::replace(&mut announced, true) {
                self.announce(targets);
            }
            if let Err(error) = self.stop_unless_hurried(targets, *grace).await {
                self.record(EventType::Warning, "FailedKillPod", &error.to_string());
                tokio::time::sleep(backoff.step()).await;
            }
        }
    }

    /// Ends early when the grace period is shortened.
    async fn stop_unless_hurried(
        &mut self,
        targets: &[Target],
        grace: Duration,
    ) -> crate::clients::cri::Result<()> {
        let mut stopping = pin!(self.stopping(targets, grace));
        loop {
            tokio::select! {
                stopped = &mut stopping => return stopped,
                () = self.wake.notified() => {}
            }
            if self.grace() < grace {
                // It ends the hooks too.
                targets.iter().for_each(|target| self.pre_stopped.insert(&target.id));
                return Ok(());
            }
            // The first containers have ended, or one is no longer ready.
            self.publish_now().await;
        }
    }

    /// The grace period of the deletion, or else of the pod.
    fn grace(&self) -> Duration {
        let metadata = &self.pod.metadata;
        let known = self.tools.store.pod(&metadata.namespace, &metadata.name);
        let asked = known
            .filter(|pod| pod.metadata.uid == metadata.uid)
            .and_then(|pod| pod.metadata.deletion_grace_period_seconds);
        Duration::from_secs(asked.unwrap_or(self.pod.spec.termination_grace_period_seconds))
    }

    fn report_dead_daemon(&self) {
        if !is_mount_pod(&self.pod) || self.is_deleted() {
            return;
        }
        // A pod that was started before it got a volume names none.
        let volume_id = self.pod.metadata.annotations.get(VOLUME_ID_ANNOTATION).cloned();
        let (volumes, pod) = (self.tools.volumes.clone(), self.pod.clone());
        // Use a separate task: the volume may be busy with a Stage that also waits for the dead
        // daemon.
        tokio::spawn(async move { volumes.daemon_died(volume_id.as_deref(), &pod).await });
    }
}

/// Tears down a pod that only the runtime or the disk has.
pub(crate) async fn tear_down_orphan(tools: Arc<Tools>, pod: ObjectRef) {
    let mut backoff = Backoff::operation();
    loop {
        let stopped = match Observed::of(&tools.cri, &pod.uid).await {
            Ok(observed) => match plan::end(&observed, ORPHAN_GRACE).as_slice() {
                [Action::Kill { targets, grace }] => {
                    // Without the object, hooks and order are unknown.
                    let of = |target: &Target| Stopping { target: target.clone(), pre_stop: None, rank: 0 };
                    let all = targets.iter().map(of).collect();
                    stop_all(Arc::clone(&tools), pod.clone(), all, *grace).await
                }
                _ => Ok(()),
            },
            Err(error) => Err(error),
        };
        match stopped {
            Ok(()) => break,
            Err(error) => warn!(%error, uid = pod.uid, "cannot stop an orphaned pod"),
        }
        tokio::time::sleep(backoff.step()).await;
    }
    tear_down(&tools, &pod).await;
    // If the same manifest has created the same pod again, these are its logs.
    if !tools.store.has_pod(&pod.uid) {
        find_logs(&tools.log_dir, &pod.uid).iter().for_each(|logs| remove_logs(logs));
    }
}

/// The log directories of a pod whose name may be unknown.
fn find_logs(log_dir: &Path, uid: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(log_dir).into_iter().flatten().flatten();
    let is_of_pod = |name: &OsStr| name.to_str().and_then(|n| n.rsplit_once('_')).is_some_and(|n| n.1 == uid);
    entries.filter(|entry| is_of_pod(&entry.file_name())).map(|entry| entry.path()).collect()
}

/// Removes the rest of a pod whose containers have stopped.
async fn tear_down(tools: &Tools, pod: &ObjectRef) {
    stop_sandboxes(tools, pod).await;
    tools.volumes.unmount_pod(pod).await;
    let mut backoff = Backoff::operation();
    while let Err(message) = remove_all(tools, pod).await {
        tools.sinks.record(pod, EventType::Warning, "FailedKillPod", &message);
        tokio::time::sleep(backoff.step()).await;
    }
}

async fn stop_sandboxes(tools: &Tools, pod: &ObjectRef) {
    let mut backoff = Backoff::operation();
    while let Err(error) = try_stop_sandboxes(&tools.cri, pod).await {
        tools.sinks.record(pod, EventType::Warning, "FailedKillPod", &error.to_string());
        tokio::time::sleep(backoff.step()).await;
    }
}

async fn try_stop_sandboxes(cri: &Cri, pod: &ObjectRef) -> crate::clients::cri::Result<()> {
    for sandbox in cri.list_pod_sandboxes(Some(&pod.uid)).await? {
        cri.stop_pod_sandbox(&sandbox.id, &format!("{}/{}", pod.namespace, pod.name)).await?;
    }
    Ok(())
}

async fn remove_all(tools: &Tools, pod: &ObjectRef) -> Result<(), String> {
    let (uid, name) = (pod.uid.as_str(), format!("{}/{}", pod.namespace, pod.name));
    let refused = |e: crate::clients::cri::Error| e.to_string();
    for sandbox in tools.cri.list_pod_sandboxes(Some(uid)).await.map_err(refused)? {
        tools.cri.remove_pod_sandbox(&sandbox.id, &name).await.map_err(refused)?;
    }
    // A runtime may keep containers of removed sandboxes.
    for container in tools.cri.list_containers(Some(uid)).await.map_err(refused)? {
        tools.cri.remove_container(&container.id).await.map_err(refused)?;
    }
    tools.remove_pod_cgroup(uid).await.map_err(|e| linux::chain(&e))?;
    tools.volumes.remove_pod_dir(uid).await.map_err(|e| linux::chain(&e))
}

fn remove_logs(dir: &Path) {
    if let Err(error) = linux::tree::remove(dir) {
        warn!(error = linux::chain(&error), "logs of a deleted pod not removed");
    }
}
