//! CSIDriver.spec.requiresRepublish: repeats NodePublishVolume while pods run, at once for a volume
//! whose daemon has ended, otherwise every [`PERIOD`].
//!
//! Invariant: only published volumes are republished. A republish does not change the kubelet's own
//! state: directories, vol_data.json, file groups.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{Instrument, info_span};

use super::device::{Device, DeviceKey, Stage};
use super::{Error, Volumes, csi_mount::CsiMount, resolve};
use crate::backoff::Backoff;
use crate::objects::{EventType, Object, Pod, VolumeSource};

const PERIOD: Duration = Duration::from_secs(60);

/// Volumes whose daemon has ended.
#[derive(Debug, Default)]
pub(super) struct Due {
    keys: Mutex<BTreeSet<DeviceKey>>,
    added: Notify,
}

impl Due {
    pub(super) fn add(&self, key: &DeviceKey) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone());
        self.added.notify_one();
    }

    fn take(&self) -> BTreeSet<DeviceKey> {
        std::mem::take(&mut *self.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The delay after a failed republish or the end of a daemon.
#[derive(Debug)]
struct Retry {
    backoff: Backoff,
    /// The earliest next republish.
    at: Instant,
    /// Whether to retry at `at` without another reason.
    has_failed: bool,
}

/// The schedule of all volumes.
#[derive(Debug)]
struct Rounds {
    next: Instant,
    dead: BTreeSet<DeviceKey>,
    retries: BTreeMap<DeviceKey, Retry>,
    busy: BTreeSet<DeviceKey>,
    running: JoinSet<Finished>,
}

#[derive(Debug)]
struct Finished {
    key: DeviceKey,
    was_dead: bool,
    /// Whether it succeeded for every pod.
    has_succeeded: bool,
}

impl Rounds {
    fn new(next: Instant) -> Self {
        let running = JoinSet::new();
        Self { next, dead: BTreeSet::new(), retries: BTreeMap::new(), busy: BTreeSet::new(), running }
    }

    fn wake(&self) -> Instant {
        let waits = |key: &DeviceKey, retry: &Retry| retry.has_failed || self.dead.contains(key);
        let waiting = self.retries.iter().filter(|(key, r)| !self.busy.contains(key) && waits(key, r));
        waiting.map(|(_, retry)| retry.at).fold(self.next, Instant::min)
    }

    fn begins(&mut self, now: Instant) -> bool {
        let begins = now >= self.next;
        if begins {
            self.next = now + PERIOD;
        }
        begins
    }

    /// Marks a due volume as busy and returns whether its daemon has ended; `None` if it is not
    /// due.
    fn is_due(&mut self, key: &DeviceKey, is_round: bool) -> Option<bool> {
        let now = Instant::now();
        // Reset the delay after a healthy period.
        if self.retries.get(key).is_some_and(|retry| !retry.has_failed && now >= retry.at + PERIOD) {
            self.retries.remove(key);
        }
        let was_dead = match self.retries.get(key) {
            Some(retry) => now >= retry.at && (retry.has_failed || self.dead.contains(key)),
            None => self.dead.contains(key),
        };
        if self.busy.contains(key) || !(was_dead || is_round) {
            return None;
        }
        self.dead.remove(key);
        self.busy.insert(key.clone());
        Some(was_dead)
    }

    /// Lengthens the delay after each end of a daemon.
    fn finished(&mut self, Finished { key, was_dead, has_succeeded }: Finished) {
        self.busy.remove(&key);
        if has_succeeded && !was_dead {
            return;
        }
        let (now, backoff) = (Instant::now(), Backoff::new(Duration::from_millis(500), PERIOD));
        let retry = self.retries.entry(key).or_insert(Retry { backoff, at: now, has_failed: false });
        retry.has_failed = !has_succeeded;
        retry.at = now + retry.backoff.step();
    }
}

impl Volumes {
    /// Never ends. Volumes are independent of each other.
    pub(crate) async fn republish(self) {
        let mut rounds = Rounds::new(Instant::now() + PERIOD);
        loop {
            tokio::select! {
                () = self.shared.republish.added.notified() => {}
                () = tokio::time::sleep_until(rounds.wake()) => {}
                Some(finished) = rounds.running.join_next() => {
                    if let Ok(finished) = finished {
                        rounds.finished(finished);
                    }
                }
            }
            rounds.dead.extend(self.shared.republish.take());
            let is_round = rounds.begins(Instant::now());
            let devices = self.shared.devices.all();
            rounds.retries.retain(|key, _| devices.iter().any(|device| device.key == *key));
            for device in devices {
                if !self.shared.republish_is_required(&device) {
                    rounds.dead.remove(&device.key);
                } else if let Some(was_dead) = rounds.is_due(&device.key, is_round) {
                    let (this, key) = (self.clone(), device.key.clone());
                    let republish = async move {
                        let has_succeeded = this.republish_to_users(&device, was_dead).await;
                        Finished { key, was_dead, has_succeeded }
                    };
                    rounds.running.spawn(republish.in_current_span());
                }
            }
        }
    }

    /// Returns whether it succeeded for every pod.
    async fn republish_to_users(&self, device: &Arc<Device>, was_dead: bool) -> bool {
        let mut all = true;
        let users = device.users();
        for pod in self.shared.store.pods().iter().filter(|pod| users.contains(&pod.metadata.uid)) {
            for again in self.published_from(pod, device) {
                let volume = again.volume.metadata.name.clone();
                let (event_type, reason, message) = match self.publish_again(again).await {
                    Ok(()) if !was_dead => continue,
                    Ok(()) => (
                        EventType::Normal,
                        "VolumeRepublished",
                        format!("volume {volume} is published again after its daemon ended"),
                    ),
                    Err(error) => {
                        all = false;
                        let message = format!("publish volume {volume} again: {}", error.text());
                        (EventType::Warning, "FailedMount", message)
                    }
                };
                self.shared.sinks.record(&pod.reference(), event_type, reason, &message);
            }
        }
        all
    }

    /// The pod's published mounts of the volume; none once the pod ends.
    fn published_from(&self, pod: &Arc<Pod>, device: &Arc<Device>) -> Vec<CsiMount> {
        let is_over = pod.metadata.is_deleted()
            || pod.status.phase.has_ended()
            || self.target_of(device, &pod.metadata.uid).is_none();
        let driver = self.shared.plugins.driver(&device.key.driver).filter(|_| !is_over);
        let Some(driver) = driver else { return Vec::new() };
        let of_device = |volume: &crate::objects::Volume| {
            let claim = volume.claim_name(&pod.metadata.name)?;
            let read_only = matches!(volume.source(), Some(VolumeSource::Claim(source)) if source.read_only);
            let resolved = resolve::claim_in_use(&self.shared.store, pod, &claim).ok()?;
            (resolved.key == device.key)
                .then(|| self.shared.csi_mount(pod, device, driver.clone(), resolved.volume, read_only))
        };
        pod.spec.volumes.iter().filter_map(of_device).collect()
    }

    /// Runs as a task and waits for the volume's other operations.
    async fn publish_again(&self, again: CsiMount) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let span = info_span!("volume_republish", pod = again.pod.metadata.name);
        let operation = async move {
            let device = Arc::clone(&again.device);
            let mut stage = device.stage.lock().await;
            let uid = &again.pod.metadata.uid;
            if *stage == Stage::No || shared.is_stopping(uid) || !device.is_used_by(uid) {
                return Ok(());
            }
            again.run_again(&mut stage).await
        };
        let finished = tokio::spawn(operation.instrument(span)).await;
        finished.unwrap_or(Err(Error::Interrupted { what: "the republish" }))
    }
}

impl super::Shared {
    pub(super) fn republish_is_required(&self, device: &Device) -> bool {
        let object = self.store.csi_driver(&device.key.driver);
        object.is_some_and(|object| object.spec.requires_republish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_keeps_ending_is_restarted_with_growing_delays() {
        let key = DeviceKey { driver: "d".to_owned(), volume_handle: "v".to_owned() };
        let mut rounds = Rounds::new(Instant::now() + 1000 * PERIOD);
        let begun = Instant::now();
        let mut starts = 0;
        while begun.elapsed() < Duration::from_secs(60) {
            rounds.dead.insert(key.clone());
            if rounds.is_due(&key, false) == Some(true) {
                starts += 1;
                rounds.finished(Finished { key: key.clone(), was_dead: true, has_succeeded: true });
            } else {
                tokio::time::sleep_until(rounds.wake()).await;
            }
        }
        assert!((5..=8).contains(&starts), "{starts} in a minute");
        // After a healthy period, the next end is handled at once.
        rounds.dead.clear();
        tokio::time::sleep(3 * PERIOD).await;
        rounds.dead.insert(key.clone());
        assert_eq!(rounds.is_due(&key, false), Some(true));
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_failed_republish_is_retried() {
        let key = DeviceKey { driver: "d".to_owned(), volume_handle: "v".to_owned() };
        let mut rounds = Rounds::new(Instant::now() + 1000 * PERIOD);
        rounds.busy.insert(key.clone());
        rounds.finished(Finished { key: key.clone(), was_dead: true, has_succeeded: false });
        assert_eq!(rounds.is_due(&key, false), None, "not at once");
        tokio::time::sleep_until(rounds.wake()).await;
        assert_eq!(rounds.is_due(&key, false), Some(true));
        rounds.finished(Finished { key: key.clone(), was_dead: true, has_succeeded: true });
        assert_eq!(rounds.wake(), rounds.next);
        tokio::time::sleep(PERIOD).await;
        assert_eq!(rounds.is_due(&key, false), None);
    }
}
