//! From what is left of the node's resources to its conditions and to what is to be reclaimed
//! (kubernetes, pkg/kubelet/eviction/eviction_manager.go: synchronize). No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::capacity::pressure::{Condition, Signal, Threshold};

/// In bytes, inodes or processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Left {
    pub(super) available: u64,
    pub(super) capacity: u64,
}

/// What is known now; a signal that cannot be observed is not there. One with several sources, such as file
/// systems or groups with limits of their own, has several values: a share is a share of each capacity.
pub(super) type Observations = BTreeMap<Signal, Vec<Left>>;

#[derive(Debug)]
pub(super) struct Monitor {
    thresholds: Vec<Threshold>,
    /// How long a condition stays after its threshold was last met.
    transition: Duration,
    /// Since when each threshold has been met.
    met_since: Vec<Option<Instant>>,
    last_met: BTreeMap<Condition, Instant>,
}

/// What follows from one round of observations.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) conditions: Vec<Condition>,
    /// The threshold to look after, with its observation: memory first.
    pub(super) reclaim: Option<(Threshold, Left)>,
}

impl Monitor {
    pub(super) fn new(thresholds: Vec<Threshold>, transition: Duration) -> Self {
        let met_since = vec![None; thresholds.len()];
        Self { thresholds, transition, met_since, last_met: BTreeMap::new() }
    }

    pub(super) fn judge(&mut self, observations: &Observations, now: Instant) -> Verdict {
        let mut reclaim: Option<(Threshold, Left)> = None;
        for (threshold, since) in self.thresholds.iter().zip(&mut self.met_since) {
            let Some(left) = scarcest(threshold, observations) else {
                *since = None;
                continue;
            };
            let since = *since.get_or_insert(now);
            self.last_met.insert(threshold.signal.condition(), now);
            let is_due = now.duration_since(since) >= threshold.grace;
            if is_due && reclaim.is_none_or(|(other, _)| threshold.signal < other.signal) {
                reclaim = Some((*threshold, left));
            }
        }
        let transition = self.transition;
        self.last_met.retain(|_, last| now == *last || now.duration_since(*last) < transition);
        Verdict { conditions: self.last_met.keys().copied().collect(), reclaim }
    }
}

/// Of the values that meet the threshold, the one with least left; `None` if it is not met.
pub(super) fn scarcest(threshold: &Threshold, observations: &Observations) -> Option<Left> {
    let all = observations.get(&threshold.signal).into_iter().flatten().copied();
    all.filter(|left| left.available < threshold.amount(left.capacity)).min_by_key(|left| left.available)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::pressure::{GracePeriods, Thresholds};

    const MINUTE: Duration = Duration::from_secs(60);

    fn left(signal: Signal, available: u64) -> Observations {
        Observations::from([(signal, vec![Left { available, capacity: 1000 }])])
    }

    #[test]
    fn a_share_is_one_of_each_capacity() {
        let threshold = Thresholds::parse("memory.available<10%").unwrap().0[0];
        let gib =
            |available: u64, capacity: u64| Left { available: available << 30, capacity: capacity << 30 };
        let (machine, group) = (gib(5, 64), gib(4, 8));
        let found =
            |all: &[Left]| scarcest(&threshold, &Observations::from([(threshold.signal, all.to_vec())]));
        assert_eq!(found(&[machine, group]), Some(machine));
        assert_eq!(found(&[gib(7, 64), group]), None);
        let smaller = Left { available: 1 << 20, ..group };
        assert_eq!(found(&[machine, smaller]), Some(smaller), "the scarcest");
    }

    #[test]
    fn a_condition_lasts_and_a_hard_threshold_acts_at_once() {
        let hard = Thresholds::parse("memory.available<100").unwrap();
        let mut monitor = Monitor::new(hard.0, 5 * MINUTE);
        let now = Instant::now();
        let calm = monitor.judge(&left(Signal::MemoryAvailable, 100), now);
        assert_eq!(calm, Verdict { conditions: Vec::new(), reclaim: None });
        let met = monitor.judge(&left(Signal::MemoryAvailable, 99), now);
        assert_eq!((met.conditions, met.reclaim.unwrap().1.available), (vec![Condition::Memory], 99));
        let after = monitor.judge(&left(Signal::MemoryAvailable, 100), now + 4 * MINUTE);
        assert_eq!(after, Verdict { conditions: vec![Condition::Memory], reclaim: None });
        let later = monitor.judge(&left(Signal::MemoryAvailable, 100), now + 5 * MINUTE);
        assert_eq!(later.conditions, []);
        assert_eq!(monitor.judge(&Observations::new(), now + 6 * MINUTE).conditions, []);
    }

    #[test]
    fn a_soft_threshold_waits_for_its_grace_period_without_a_break() {
        let periods = GracePeriods::parse("nodefs.available=2m").unwrap();
        let soft = Thresholds::parse("nodefs.available<50%").unwrap().with_grace(&periods).unwrap();
        let mut monitor = Monitor::new(soft.0, Duration::ZERO);
        let now = Instant::now();
        let judge = |monitor: &mut Monitor, available, minutes| {
            let verdict = monitor.judge(&left(Signal::NodefsAvailable, available), now + minutes * MINUTE);
            (verdict.conditions, verdict.reclaim.is_some())
        };
        assert_eq!(judge(&mut monitor, 400, 0), (vec![Condition::Disk], false));
        assert_eq!(judge(&mut monitor, 600, 1), (vec![], false));
        assert_eq!(judge(&mut monitor, 400, 2), (vec![Condition::Disk], false));
        assert_eq!(judge(&mut monitor, 400, 4), (vec![Condition::Disk], true));
    }

    #[test]
    fn memory_comes_before_the_disk() {
        let hard = Thresholds::parse("pid.available<1%,nodefs.available<50%,memory.available<50%").unwrap();
        let mut monitor = Monitor::new(hard.0, Duration::ZERO);
        let mut both = left(Signal::NodefsAvailable, 1);
        both.extend(left(Signal::MemoryAvailable, 1));
        both.extend(left(Signal::PidAvailable, 1));
        let verdict = monitor.judge(&both, Instant::now());
        assert_eq!(verdict.reclaim.unwrap().0.signal, Signal::MemoryAvailable);
        assert_eq!(verdict.conditions, [Condition::Memory, Condition::Disk, Condition::Pid]);
    }
}
