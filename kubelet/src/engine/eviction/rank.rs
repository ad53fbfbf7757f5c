//! Which pod is evicted first (kubernetes, pkg/kubelet/eviction/helpers.go: rankMemoryPressure,
//! rankDiskPressure, rankPIDPressure). No I/O.

use std::cmp::Reverse;

use crate::capacity::pressure::Signal;

/// A pod that may be evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) uid: String,
    pub(super) priority: i32,
    /// Of the scarce resource; `None`: its measurement failed, or the pod itself keeps it from its end, so the
    /// pod comes first.
    pub(super) usage: Option<u64>,
    pub(super) request: u64,
}

/// Those over their request first, then by priority, then by what they use over their request. Processes
/// are not requested: there, priority counts first.
pub(super) fn order(signal: Signal, candidates: &mut [Candidate]) {
    let over = |candidate: &Candidate| {
        let used = candidate.usage.unwrap_or_default();
        i128::from(used) - i128::from(candidate.request)
    };
    match signal {
        Signal::PidAvailable => {
            candidates.sort_by_key(|c| (c.priority, Reverse(c.usage.unwrap_or(u64::MAX))));
        }
        Signal::MemoryAvailable
        | Signal::NodefsAvailable
        | Signal::NodefsInodesFree
        | Signal::ImagefsAvailable
        | Signal::ImagefsInodesFree => candidates.sort_by_key(|c| {
            let exceeds = over(c) > 0;
            (Reverse(c.usage.is_none()), Reverse(exceeds), c.priority, Reverse(over(c)))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(uid: &str, priority: i32, usage: Option<u64>, request: u64) -> Candidate {
        Candidate { uid: uid.to_owned(), priority, usage, request }
    }

    fn ordered(signal: Signal, mut candidates: Vec<Candidate>) -> Vec<String> {
        order(signal, &mut candidates);
        candidates.into_iter().map(|candidate| candidate.uid).collect()
    }

    #[test]
    fn pods_over_their_request_go_first_then_priority_then_usage_over_the_request() {
        let candidates = vec![
            candidate("within", -5, Some(900), 1000),
            candidate("important", 10, Some(900), 0),
            candidate("large", 0, Some(500), 100),
            candidate("larger", 0, Some(501), 100),
            candidate("equal", 0, Some(100), 100),
            candidate("unknown", 99, None, 0),
        ];
        assert_eq!(
            ordered(Signal::MemoryAvailable, candidates.clone()),
            ["unknown", "larger", "large", "important", "within", "equal"]
        );
        assert_eq!(
            ordered(Signal::NodefsAvailable, candidates),
            ["unknown", "larger", "large", "important", "within", "equal"]
        );
    }

    #[test]
    fn pods_with_most_processes_of_the_lowest_priority_go_first() {
        let candidates = vec![
            candidate("few", 0, Some(1), 0),
            candidate("many", 0, Some(100), 0),
            candidate("important", 1, Some(1000), 0),
        ];
        assert_eq!(ordered(Signal::PidAvailable, candidates), ["many", "few", "important"]);
    }
}
