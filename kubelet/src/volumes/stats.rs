//! Asks the drivers about the volumes in use (NodeGetVolumeStats). An answer has both the volume's condition, which
//! `health.rs` follows, and its figures, which `figures.rs` shows: neither asks again.
//!
//! Invariants:
//! - A driver that does not answer delays only the answers about its own volumes.
//! - A volume of a pod has at most one question at a time, and each has a time limit.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use proto::csi::NodeGetVolumeStatsResponse;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::Volumes;
use super::device::{Device, Stage};

/// For volumes with a condition: another process may serve a volume, whose end the kubelet does not see.
const PERIOD: Duration = Duration::from_secs(10);
/// The other volumes are asked about once a minute, which is kubelet's volumeStatsAggPeriod.
const ROUNDS_FOR_ALL: u32 = 6;
/// Pods that start are asked about together, and not while they start.
const SETTLING: Duration = Duration::from_secs(3);
/// For one question.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Questions to one driver.
const AT_ONCE: usize = 4;

/// A driver's last answer about a volume of a pod.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) stats: NodeGetVolumeStatsResponse,
    pub(super) time: Timestamp,
}

/// The last answers, by target path.
#[derive(Debug, Default)]
pub(super) struct Answers {
    by_target: Mutex<HashMap<PathBuf, Arc<Answer>>>,
    /// A pod's volumes have been mounted.
    mounted: Notify,
    /// Conditions may have changed.
    changed: Notify,
    /// By the driver's name.
    turns: Mutex<BTreeMap<String, Arc<Semaphore>>>,
}

impl Answers {
    pub(super) fn get(&self, target: &Path) -> Option<Arc<Answer>> {
        self.by_target().get(target).cloned()
    }

    /// A pod's volumes have been mounted: ask about them soon.
    pub(super) fn ask_about_new(&self) {
        self.mounted.notify_one();
    }

    /// A daemon has ended: ask at once.
    pub(super) fn ask_about_conditions(&self) {
        self.changed.notify_one();
    }

    fn by_target(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<Answer>>> {
        self.by_target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turns(&self, driver: &str) -> Arc<Semaphore> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Semaphore::new(AT_ONCE));
        Arc::clone(turns.entry(driver.to_owned()).or_insert_with(new))
    }
}

/// A volume that is mounted for a pod.
#[derive(Debug, Clone)]
struct InUse {
    device: Arc<Device>,
    pod_uid: String,
    target: PathBuf,
    /// Another operation on the volume runs.
    is_busy: bool,
}

/// Which volumes a round asks about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// Those without a question so far.
    New,
    /// Also those whose drivers report conditions.
    Conditions,
    All,
}

/// What is known of the questions, by target path.
#[derive(Debug, Default)]
struct Questions {
    /// Whether the driver reports conditions, of each volume that was asked about. A driver that did not answer
    /// counts as one that does.
    has_condition: HashMap<PathBuf, bool>,
    /// Those without an answer yet.
    open: HashSet<PathBuf>,
    /// Those to ask about again: the answer may be older than the change.
    again: HashSet<PathBuf>,
}

impl Questions {
    /// Whether a question about the volume begins now.
    fn begins(&mut self, target: &Path, round: Round) -> bool {
        let is_due = match (self.has_condition.get(target), round) {
            (None, _) | (_, Round::All) => true,
            (Some(has_condition), Round::Conditions) => *has_condition,
            (Some(_), Round::New) => false,
        };
        is_due && self.open.insert(target.to_owned())
    }

    fn repeat_open(&mut self) {
        self.again.clone_from(&self.open);
    }

    /// Returns whether to ask about the volume again.
    fn ended(&mut self, target: PathBuf, has_condition: bool) -> bool {
        self.open.remove(&target);
        let again = self.again.remove(&target);
        self.has_condition.insert(target, has_condition);
        again
    }

    fn retain(&mut self, is_in_use: impl Fn(&PathBuf) -> bool) {
        self.has_condition.retain(|target, _| is_in_use(target));
    }
}

impl Volumes {
    /// Never ends.
    pub(crate) async fn ask_drivers(self) {
        let answers = &self.shared.answers;
        let mut questions = Questions::default();
        let mut running = JoinSet::new();
        let (mut round, mut number, mut next) = (Round::All, 0_u32, Instant::now() + PERIOD);
        loop {
            let in_use = self.in_use();
            let targets: HashSet<&PathBuf> = in_use.iter().map(|volume| &volume.target).collect();
            questions.retain(|target| targets.contains(target));
            answers.by_target().retain(|target, _| targets.contains(target));
            for volume in in_use {
                if !volume.is_busy && questions.begins(&volume.target, round) {
                    running.spawn(self.clone().ask(volume));
                }
            }
            let mut settled = None;
            round = loop {
                tokio::select! {
                    () = sleep_until(next) => {
                        number = number.wrapping_add(1);
                        next = Instant::now() + PERIOD;
                        break if number.is_multiple_of(ROUNDS_FOR_ALL) { Round::All } else { Round::Conditions };
                    }
                    () = sleep_until(settled.unwrap_or(next)), if settled.is_some() => break Round::New,
                    () = answers.mounted.notified() => {
                        settled.get_or_insert_with(|| Instant::now() + SETTLING);
                    }
                    () = answers.changed.notified() => {
                        questions.repeat_open();
                        break Round::Conditions;
                    }
                    Some(ended) = running.join_next() => {
                        if let Some(volume) = again(&mut questions, ended) {
                            running.spawn(self.clone().ask(volume));
                        }
                    }
                }
            };
        }
    }

    /// Returns the volume and whether its driver reports conditions.
    async fn ask(self, volume: InUse) -> (InUse, bool) {
        let mut has_condition = true;
        let stats = self.stats(&volume, &mut has_condition).await;
        let answer = stats.map(|stats| Arc::new(Answer { stats, time: Timestamp::now() }));
        let is_used = volume.device.is_used_by(&volume.pod_uid);
        let mut by_target = self.shared.answers.by_target();
        let before = by_target.remove(&volume.target);
        if let Some(answer) = answer.filter(|_| is_used) {
            by_target.insert(volume.target.clone(), Arc::clone(&answer));
            drop(by_target);
            let condition_before = before.as_ref().and_then(|before| before.stats.volume_condition.as_ref());
            if let Some(condition) = answer.stats.volume_condition.as_ref().filter(|_| has_condition) {
                self.follow_condition(&volume.device, &volume.pod_uid, condition_before, condition);
            }
        }
        (volume, has_condition)
    }

    /// `None` without an answer, and for a driver that reports no figures.
    async fn stats(&self, volume: &InUse, has_condition: &mut bool) -> Option<NodeGetVolumeStatsResponse> {
        let key = &volume.device.key;
        let driver = self.shared.plugins.driver(&key.driver)?;
        let turns = self.shared.answers.turns(driver.name());
        // The semaphore is never closed.
        let _turn = turns.acquire().await;
        let asked = timeout(TIMEOUT, async {
            let can = driver.node_capabilities().await?;
            *has_condition = can.volume_condition;
            if !can.volume_stats {
                return Ok(None);
            }
            driver.node_volume_stats(&key.volume_handle, &volume.target).await.map(Some)
        });
        match asked.await {
            Ok(Ok(stats)) => stats,
            Ok(Err(error)) => {
                debug!(%error, "no figures and no condition of a volume");
                None
            }
            Err(_elapsed) => {
                let (volume_handle, seconds) = (&key.volume_handle, TIMEOUT.as_secs());
                debug!(
                    volume_handle,
                    "no figures and no condition of a volume: no answer within {seconds} s"
                );
                None
            }
        }
    }

    fn in_use(&self) -> Vec<InUse> {
        let mut found = Vec::new();
        for device in self.shared.devices.all() {
            let (is_staged, is_busy) = match device.stage.try_lock() {
                Ok(stage) => (*stage != Stage::No, false),
                Err(_held) => (true, true),
            };
            for pod_uid in device.users().into_iter().filter(|_| is_staged) {
                if let Some(target) = self.target_of(&device, &pod_uid) {
                    found.push(InUse { device: Arc::clone(&device), pod_uid, target, is_busy });
                }
            }
        }
        found
    }
}

/// The volume, if it is to be asked about again. A question that panicked is not repeated.
fn again(questions: &mut Questions, ended: Result<(InUse, bool), JoinError>) -> Option<InUse> {
    let (volume, has_condition) = ended.ok()?;
    let repeats = questions.ended(volume.target.clone(), has_condition);
    (repeats && questions.open.insert(volume.target.clone())).then_some(volume)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_with_a_condition_are_asked_about_more_often_than_others() {
        let [sick, plain, new] = ["sick", "plain", "new"].map(Path::new);
        let mut questions = Questions::default();
        let due = |questions: &mut Questions, round| {
            let due = [sick, plain, new].map(|target| questions.begins(target, round));
            questions.open.clear();
            due
        };
        questions.ended(sick.to_owned(), true);
        questions.ended(plain.to_owned(), false);
        assert_eq!(due(&mut questions, Round::New), [false, false, true]);
        assert_eq!(due(&mut questions, Round::Conditions), [true, false, true]);
        assert_eq!(due(&mut questions, Round::All), [true; 3]);
    }

    #[test]
    fn a_volume_has_one_question_at_a_time_and_another_one_after_a_change() {
        let target = Path::new("t");
        let mut questions = Questions::default();
        assert!(questions.begins(target, Round::All) && !questions.begins(target, Round::All));
        questions.repeat_open();
        assert!(questions.ended(target.to_owned(), true), "its answer may be older than the change");
        assert!(questions.begins(target, Round::All) && !questions.ended(target.to_owned(), true));
    }
}
