//! Binds claims to existing volumes, provisions volumes through the claim's class, and reclaims
//! them when the claim is deleted.
//!
//! Invariants:
//! - DeleteVolume follows only an explicit deletion of the claim (never a removed manifest), and
//!   only if the reclaim policy is Delete.
//! - The store writes a volume to disk before its claim names it.
//! - A claim says that CreateVolume was called before it is, and goes only when its outcome is known.

mod begun;
mod binding;
mod create;
mod expand;
mod reclaim;
mod snapshot_calls;
mod snapshots;
mod source;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::clients::plugins::Plugins;
use crate::objects::{
    EventType, Kind, Object, ObjectRef, PersistentVolume, PersistentVolumeClaim, Pod, VolumeSource,
};
use crate::store::{Change, Store};
use crate::volumes::Volumes;
use binding::Decision;

pub(crate) use reclaim::users_of_claim;

/// How long a class or driver may be missing before the attempt fails, and a volume staged before its
/// deletion is reported as waiting.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How soon to retry what failed on a full disk.
const SETTLE_RETRY: Duration = Duration::from_secs(5);

/// Clones share everything.
#[derive(Debug, Clone)]
pub(crate) struct Provisioner {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    plugins: Plugins,
    volumes: Volumes,
    progress: Mutex<Progress>,
    /// Notified when an attempt ends, and when a volume is unstaged that one waits for.
    ended: Notify,
}

/// By the uid of the claim or volume.
#[derive(Debug, Default)]
struct Progress {
    running: HashSet<String>,
    /// The volumes that claims are being bound to, by the claim's uid.
    chosen: HashMap<String, String>,
    failed: HashMap<String, Retry>,
    /// Those whose volume has to be unstaged before its deletion.
    unstaging: HashSet<String>,
    /// Those of them whose volume is unstaged now: they are tried again at once.
    unstaged: HashSet<String>,
}

#[derive(Debug)]
struct Retry {
    backoff: Backoff,
    due: Instant,
}

impl Provisioner {
    pub(crate) fn new(store: Store, plugins: Plugins, volumes: Volumes) -> Self {
        let shared = Shared { store, plugins, volumes, progress: Mutex::default(), ended: Notify::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Checks every claim and volume after each relevant change.
    pub(crate) async fn run(self) {
        let mut changes = self.shared.store.subscribe();
        let mut drivers = self.shared.plugins.changes();
        loop {
            drivers.mark_unchanged();
            let next = self.sync_all();
            tokio::select! {
                changed = next_change(&mut changes, &RELEVANT) => {
                    match changed {
                        Some(kind) if SNAPSHOTS.contains(&kind) => self.retry_claims(),
                        Some(kind) if !RETRY_TRIGGERS.contains(&kind) => {}
                        _ => self.progress().failed.clear(),
                    }
                }
                Ok(()) = drivers.changed() => self.progress().failed.clear(),
                () = self.shared.ended.notified() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Returns when the next retry is due.
    fn sync_all(&self) -> Instant {
        let mut next = Instant::now() + Duration::from_secs(3600);
        if !reclaim::mark_ownerless(&self.shared.store) {
            next = next.min(Instant::now() + SETTLE_RETRY);
        }
        for claim in self.shared.store.claims() {
            let uid = &claim.metadata.uid;
            match self.retry_due(uid) {
                Some(due) => next = next.min(due),
                None => self.sync_claim(&claim),
            }
        }
        next = self.sync_snapshots(next);
        for volume in reclaim::half_deleted(&self.shared.store) {
            match self.retry_due(&volume.metadata.uid) {
                Some(due) => next = next.min(due),
                None => self.finish_deletion(volume),
            }
        }
        if !reclaim::settle_volumes(&self.shared.store) {
            next = next.min(Instant::now() + SETTLE_RETRY);
        }
        next
    }

    /// When a failed object is retried; `None` if now.
    fn retry_due(&self, uid: &str) -> Option<Instant> {
        let progress = self.progress();
        if progress.unstaged.contains(uid) {
            return None;
        }
        let due = progress.failed.get(uid).map(|retry| retry.due);
        due.filter(|due| *due > Instant::now())
    }

    fn sync_claim(&self, claim: &Arc<PersistentVolumeClaim>) {
        if self.progress().running.contains(&claim.metadata.uid) {
            return;
        }
        if claim.metadata.is_deleted() {
            if let Some(copy) = self.copy_of(claim) {
                self.record_once(
                    &claim.reference(),
                    "ClaimDeletePending",
                    &format!("the claim is kept until {copy}"),
                );
                return;
            }
            if users_of_claim(&self.shared.store, &self.shared.volumes, claim).is_empty() {
                self.attempt(claim, Attempt::Reclaim);
            }
            return;
        }
        let chosen = self.progress().chosen.values().cloned().collect();
        match binding::decide(claim, &self.shared.store, &chosen) {
            Decision::Nothing if expand::is_due(&self.shared.store, &self.shared.volumes, claim) => {
                self.attempt(claim, Attempt::Expand);
            }
            Decision::Nothing => {}
            Decision::Lose => self.attempt(claim, Attempt::Lose),
            Decision::Bind { volume } => {
                self.progress().chosen.insert(claim.metadata.uid.clone(), volume.clone());
                self.attempt(claim, Attempt::Bind { volume });
            }
            Decision::Provision { class } => match self.shared.plugins.driver(&class.provisioner) {
                Some(driver) => self.attempt(claim, Attempt::Create { class, driver }),
                None => {
                    let message = format!(
                        "waiting for a volume to be created by driver {}, which is not registered: \
                         start it with this kubelet's root directory",
                        class.provisioner
                    );
                    self.attempt(claim, Attempt::Wait(Failure { reason: "ProvisioningFailed", message }));
                }
            },
            Decision::Wait { event_type: EventType::Warning, reason, message } => {
                self.attempt(claim, Attempt::Wait(Failure { reason, message }));
            }
            Decision::Wait { event_type: EventType::Normal, reason, message } => {
                self.record_once(&claim.reference(), reason, &message);
            }
        }
    }

    fn attempt(&self, claim: &Arc<PersistentVolumeClaim>, attempt: Attempt) {
        let (shared, claim) = (Arc::clone(&self.shared), Arc::clone(claim));
        let subject = claim.reference();
        self.spawn(subject, async move { attempt.run(&shared, &claim).await });
    }

    fn finish_deletion(&self, volume: Arc<PersistentVolume>) {
        let shared = Arc::clone(&self.shared);
        let subject = volume.reference();
        let delete = async move { reclaim::delete(&shared, &volume, &volume.metadata.uid).await };
        self.spawn(subject, delete);
    }

    /// Runs `work` as a task, at most one per claim or volume.
    fn spawn(&self, subject: ObjectRef, work: impl Future<Output = Result<(), Failure>> + Send + 'static) {
        let uid = subject.uid.clone();
        let mut progress = self.progress();
        if !progress.running.insert(uid.clone()) {
            return;
        }
        progress.unstaged.remove(&uid);
        drop(progress);
        let this = self.clone();
        tokio::spawn(async move {
            let outcome = work.await;
            let mut progress = this.progress();
            progress.running.remove(&uid);
            progress.chosen.remove(&uid);
            match outcome {
                Ok(()) => {
                    progress.failed.remove(&uid);
                    progress.unstaged.remove(&uid);
                }
                Err(failure) => {
                    let new = || Retry { backoff: Backoff::operation(), due: Instant::now() };
                    let retry = progress.failed.entry(uid).or_insert_with(new);
                    retry.due = Instant::now() + retry.backoff.step();
                    drop(progress);
                    let Failure { reason, message } = failure;
                    this.shared.store.record(&subject, EventType::Warning, reason, &message);
                }
            }
            this.shared.ended.notify_one();
        });
    }

    fn record_once(&self, subject: &ObjectRef, reason: &str, message: &str) {
        self.shared.record_first(subject, reason, message);
    }

    fn is_running(&self, uid: &str) -> bool {
        self.progress().running.contains(uid)
    }

    /// What a deleted claim waits for: its snapshot that is being taken, or the clone of its volume that is
    /// being made.
    fn copy_of(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        let (store, metadata, running) = (&self.shared.store, &claim.metadata, self.running());
        let (copy, is_deleted) = if let Some(snapshot) =
            snapshots::being_taken(store, &metadata.namespace, &metadata.name, &running)
        {
            (format!("snapshot {}", snapshot.metadata.name), snapshot.metadata.is_deleted())
        } else {
            let kind = "PersistentVolumeClaim";
            let clones = source::claims_from(store, kind, &metadata.namespace, &metadata.name, &running);
            let is_being_made = |clone: &PersistentVolumeClaim| {
                begun::is_noted(clone) || running.contains(&clone.metadata.uid)
            };
            let clone = clones.iter().find(|clone| is_being_made(clone))?;
            (format!("its clone, claim {},", clone.metadata.name), clone.metadata.is_deleted())
        };
        Some(if is_deleted {
            format!("{copy} is deleted, which needs its driver")
        } else {
            format!("{copy} is done: delete that to end the wait")
        })
    }

    fn running(&self) -> HashSet<String> {
        self.progress().running.clone()
    }

    /// A claim may have waited for the snapshot that has changed: to be made from it, or to be deleted. Others keep
    /// their back-off, and so do snapshots: their own errors are changes too.
    fn retry_claims(&self) {
        let may_wait = |claim: &PersistentVolumeClaim| {
            let spec = &claim.spec;
            spec.data_source.is_some() || spec.data_source_ref.is_some() || claim.metadata.is_deleted()
        };
        let claims = self.shared.store.claims();
        let waiting: HashSet<&str> =
            claims.iter().filter(|claim| may_wait(claim)).map(|claim| claim.metadata.uid.as_str()).collect();
        self.progress().failed.retain(|uid, _| !waiting.contains(uid.as_str()));
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.shared.progress()
    }
}

/// One operation for a claim.
#[derive(Debug)]
enum Attempt {
    Bind {
        volume: String,
    },
    Create {
        class: Arc<crate::objects::StorageClass>,
        driver: crate::clients::csi::Driver,
    },
    Reclaim,
    Expand,
    Lose,
    /// A missing class or driver often appears a moment later: the class follows the claim in the
    /// same file, or the driver is starting.
    Wait(Failure),
}

/// The event of a failed attempt.
#[derive(Debug)]
struct Failure {
    reason: &'static str,
    message: String,
}

impl Attempt {
    async fn run(self, shared: &Arc<Shared>, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
        match self {
            Self::Bind { volume } => create::bind(&shared.store, claim, &volume),
            Self::Create { class, driver } => create::provision(&shared.store, claim, &class, &driver).await,
            Self::Reclaim => reclaim::reclaim(shared, claim).await,
            Self::Expand => expand::expand(shared, claim).await,
            Self::Lose => create::lose(&shared.store, claim),
            Self::Wait(failure) => shared.wait(failure).await,
        }
    }
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A waiting object is checked often; do not repeat the same event.
    fn record_first(&self, subject: &ObjectRef, reason: &str, message: &str) {
        let is_recorded = self
            .store
            .events()
            .iter()
            .any(|e| e.involved_object.uid == subject.uid && e.reason == reason && e.message == message);
        if !is_recorded {
            self.store.record(subject, EventType::Normal, reason, message);
        }
    }

    /// Returns the failure unless a relevant change comes before the timeout.
    async fn wait(&self, failure: Failure) -> Result<(), Failure> {
        let (mut changes, mut drivers) = (self.store.subscribe(), self.plugins.changes());
        tokio::select! {
            _ = next_change(&mut changes, &RETRY_TRIGGERS) => Ok(()),
            Ok(()) = drivers.changed() => Ok(()),
            () = tokio::time::sleep(TIMEOUT) => Err(failure),
        }
    }
}

/// The kinds that a claim depends on.
const RELEVANT: [Kind; 9] = [
    Kind::StorageClass,
    Kind::CsiDriver,
    Kind::PersistentVolumeClaim,
    Kind::PersistentVolume,
    Kind::Pod,
    Kind::VolumeSnapshot,
    Kind::VolumeSnapshotClass,
    Kind::VolumeSnapshotContent,
    Kind::Secret,
];
/// The kinds that users write: after a change, retry failed attempts.
const RETRY_TRIGGERS: [Kind; 5] = [
    Kind::StorageClass,
    Kind::CsiDriver,
    Kind::PersistentVolumeClaim,
    Kind::VolumeSnapshotClass,
    Kind::Secret,
];
const SNAPSHOTS: [Kind; 2] = [Kind::VolumeSnapshot, Kind::VolumeSnapshotContent];

/// The next change of one of `kinds`; `None` if the receiver lagged.
async fn next_change(changes: &mut Receiver<Change>, kinds: &[Kind]) -> Option<Kind> {
    loop {
        match changes.recv().await {
            Ok(change) if kinds.contains(&change.kind) => return Some(change.kind),
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => return None,
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// The pods in the claim's namespace that name it and have not ended.
fn pods_naming(store: &Store, claim: &PersistentVolumeClaim) -> Vec<Arc<Pod>> {
    let metadata = &claim.metadata;
    let names = |pod: &Pod| {
        pod.spec.volumes.iter().any(|volume| match volume.source() {
            Some(VolumeSource::Claim(source)) => source.claim_name == metadata.name,
            // Another pod's claim of this name has to go first.
            Some(VolumeSource::Ephemeral(_)) => {
                claim.has_owner(&pod.metadata.uid)
                    && volume.claim_name(&pod.metadata.name).as_ref() == Some(&metadata.name)
            }
            _ => false,
        })
    };
    let pods = store.pods().into_iter();
    pods.filter(|p| p.metadata.namespace == metadata.namespace && names(p) && !p.status.phase.has_ended())
        .collect()
}
